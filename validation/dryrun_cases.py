"""The training steps that dryrun_grid.py compares: tiny models under every technique, with every option."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from meshtune.dryrun.routing import BALANCED, Routing
from meshtune.dryrun.world import Job
from meshtune.layout import Layout
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec
from meshtune.train.preference import PreferenceSpec

SEQ_LEN = 128
PACKED = (50, 40, 30)  # tokens of the documents of a sequence; 8 columns of padding
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "wide": LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}),
    "tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "gemma2": Gemma2Config(**SIZES | {"tie_word_embeddings": True}, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=512, n_positions=SEQ_LEN, n_embd=64, n_layer=4, n_head=8,
                       bos_token_id=1, eos_token_id=2),
    "neox": GPTNeoXConfig(vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=4,
                          num_attention_heads=8, max_position_embeddings=SEQ_LEN, bos_token_id=1,
                          eos_token_id=2),
    "deepseek": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 8}, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step to compare."""

    layout: str
    note: str = ""  # the options below in words; "": none, a packed Llama in bf16
    model: str = "llama"  # of MODELS
    documents: tuple[int, ...] = PACKED
    optimizer: str = "adamw"
    updates: Mapping[str, bool] = field(default_factory=dict)  # of OptimizerSpec
    options: Mapping[str, Any] = field(default_factory=dict)  # of ModelSpec
    reference: str = ""  # of MODELS; "": the model itself, if an option has one
    routing: str = BALANCED.kind

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.note}" if self.note else self.layout

    def job(self, kernels: str = "cpu") -> Job:
        """The job of the case, for one kind of kernels."""
        spec = ModelSpec(source=MODELS[self.model], init="random", kernels=kernels, **self.options)
        return Job(
            spec=spec, optimizer=OptimizerSpec(name=self.optimizer, **self.updates),
            layout=Layout.parse(self.layout), seq_len=SEQ_LEN, documents=self.documents,
            every_micro_batch=True, max_grad_norm=1e-6,  # which clips, as numbers of a dry run do
            reference=MODELS.get(self.reference), routing=Routing(self.routing),
        )  # fmt: skip


TECHNIQUES = (
    "mb2-ga2", "dp2-mb2-ga2", "dp2-mb2-ga2-attention",
    "zero1x2-mb2-ga2", "zero2x2-mb2-ga2-selective1", "zero3x2-mb2-ga2", "zero3x2-mb2-ga2-full2",
    "zero3x2-mb2-ga2-selective", "zero3x4-mb2-ga1-full", "zero3x3-mb1-ga2",
    "dp2-zero1x2-mb1-ga2", "dp2-zero2x2-mb1-ga1", "dp2-zero3x2-mb1-ga2",
    "tp2-mb2-ga2", "tp4-mb1-ga1-full", "tp8-sp-mb1-ga1", "tp2-sp-mb2-ga2", "tp4-sp-mb2-ga1-selective",
    "tp2-sp-regather-mb2-ga2", "tp2-sp-regather-mb1-ga1-attention",
    "cp2-mb2-ga2", "cp4-mb1-ga1-full", "ulysses2-mb2-ga2", "ulysses4-mb1-ga1-selective",
    "pp2-gpipe-mb1-ga4", "pp2-1f1b-mb1-ga4", "pp4-1f1b-mb1-ga8", "pp2-interleaved1f1b-v2-mb1-ga4",
    "pp2-loopedbfs-v2-mb1-ga4", "pp2-zb-v2-mb1-ga4", "pp2-zbv-mb1-ga4", "pp2-dualpipev-mb1-ga4",
    "pp2-1f1b-mb1-ga4-full1", "pp2-zbv-mb1-ga4-attention",
    "tp2-sp-mb2-ga2-linear", "zero3x2-mb2-ga2-offload", "pp2-gpipe-mb1-ga4-offload",
    "zero3x2-tp2-sp-mb1-ga2", "zero1x2-pp2-1f1b-mb1-ga4", "zero3x2-pp2-1f1b-mb1-ga4-full",
    "dp2-tp2-sp-pp2-1f1b-mb1-ga4-full", "cp2-tp2-sp-mb1-ga2", "zero3x2-cp2-mb1-ga1-selective",
    "ulysses2-pp2-1f1b-mb1-ga4", "zero1x2-tp2-pp2-zb-mb1-ga4",
)  # fmt: skip
LORA = LoraSpec(r=4, target_modules=("q_proj", "v_proj"))
FROZEN = {"freeze": ("model.embed_tokens.*", "model.layers.[0-1].*")}
KTO = {"preference": PreferenceSpec("kto")}
SPREAD = {"note": "DeepSeek-V3, tokens spread evenly", "model": "deepseek"}
CROWDED = {"note": "DeepSeek-V3, one rank with all tokens", "model": "deepseek", "routing": "worst"}
GRID = (
    *(Case(layout=layout) for layout in TECHNIQUES),
    Case(layout="mb2-ga2", note="fp32", options={"precision": "fp32"}),
    Case(layout="zero3x2-mb2-ga2-full", note="fp32", options={"precision": "fp32"}),
    Case(layout="tp2-sp-pp2-1f1b-mb1-ga4", note="fp32", options={"precision": "fp32"}),
    Case(layout="dp2-mb2-ga2", note="bf16-pure", options={"precision": "bf16-pure"}),
    Case(layout="zero2x2-tp2-mb1-ga2", note="bf16-pure", options={"precision": "bf16-pure"}),
    Case(layout="dp2-zero2x2-mb1-ga2", note="bf16-pure", options={"precision": "bf16-pure"}),
    Case(layout="dp2-mb2-ga2", note="gradients summed in bf16", options={"reduce_dtype": "bf16"}),
    Case(layout="zero3x2-mb2-ga2", note="gradients summed in bf16", options={"reduce_dtype": "bf16"}),
    Case(layout="dp2-mb2-ga2", note="LoRA", options={"lora": LORA}),
    Case(layout="zero3x2-mb2-ga2-full", note="LoRA on all linear layers, dropout",
         options={"lora": LoraSpec(r=4, dropout=0.1)}),
    Case(layout="tp2-sp-mb2-ga2", note="LoRA on all linear layers", options={"lora": LoraSpec(r=4)}),
    Case(layout="pp2-1f1b-mb1-ga4-selective", note="LoRA", options={"lora": LORA}),
    Case(layout="zero2x2-mb2-ga2", note="DoRA", options={"lora": LoraSpec(r=4, use_dora=True)}),
    Case(layout="tp2-mb2-ga1", note="DoRA, dropout",
         options={"lora": LoraSpec(r=4, use_dora=True, dropout=0.1)}),
    Case(layout="dp2-mb2-ga2", note="LoRA and a head that is trained whole, bf16-pure",
         options={"lora": LoraSpec(r=4, modules_to_save=("lm_head",)), "precision": "bf16-pure"}),
    Case(layout="zero3x2-mb2-ga2", note="frozen parameters", options=FROZEN),
    Case(layout="pp2-1f1b-mb1-ga4", note="frozen parameters", options=FROZEN),
    Case(layout="tp2-mb2-ga2", note="label smoothing", options={"label_smoothing": 0.1}),
    Case(layout="dp2-mb24-ga1", note="three chunks of the loss"),
    Case(layout="tp2-sp-mb24-ga1-full", note="three chunks of the loss, label smoothing",
         options={"label_smoothing": 0.1}),
    Case(layout="pp2-zb-mb12-ga2", note="two chunks of the loss"),
    Case(layout="zero3x2-mb2-ga2", note="NEFTune", options={"neftune_alpha": 5.0}),
    Case(layout="cp2-tp2-sp-mb1-ga1", note="NEFTune", options={"neftune_alpha": 5.0}),
    Case(layout="zero3x2-mb2-ga2-full", note="KTO", options=KTO),
    Case(layout="tp2-sp-pp2-1f1b-mb1-ga4", note="KTO", options=KTO),
    Case(layout="dp2-mb2-ga1", note="KTO, another reference", options=KTO, reference="wide"),
    Case(layout="zero3x2-mb2-ga1", note="KTO, another reference", options=KTO, reference="wide"),
    Case(layout="zero3x2-mb2-ga2", note="tied embeddings", model="tied"),
    Case(layout="pp2-1f1b-mb1-ga4", note="tied embeddings", model="tied"),
    Case(layout="pp2-zbv-mb1-ga4", note="tied embeddings", model="tied"),
    Case(layout="tp2-sp-mb2-ga2", note="tied embeddings, rows added", model="tied",
         options={"embeddings": 520}),
    Case(layout="zero3x2-mb2-ga2", note="Lion", optimizer="lion"),
    Case(layout="tp2-sp-mb2-ga2", note="moments in 16 bits", optimizer="adamw-bf16"),
    Case(layout="zero3x2-mb2-ga2", note="moments in 8 bits", optimizer="adamw-8bit"),
    Case(layout="dp2-mb2-ga2", note="Adafactor", optimizer="adafactor"),
    Case(layout="zero3x2-mb2-ga2", note="updates in the backward", updates={"in_backward": True}),
    Case(layout="dp2-mb2-ga1", note="updates in the backward, states in host memory",
         updates={"in_backward": True, "offload": True}),
    Case(layout="zero3x2-mb2-ga2-offload", note="states in host memory", updates={"offload": True}),
    Case(layout="pp2-1f1b-mb1-ga4", note="moments in 8 bits in host memory", optimizer="adamw-8bit",
         updates={"offload": True}),
    Case(layout="tp2-sp-mb2-ga2-full", note="MLPs in tiles", options={"mlp_tile": 64}),
    Case(layout="zero3x2-mb2-ga2-full", note="QLoRA", options={"lora": LORA, "quantise": "bfloat16"}),
    Case(layout="pp2-1f1b-mb1-ga4", note="Muon", optimizer="muon"),
    Case(layout="zero3x2-mb2-ga2", note="one document", documents=(SEQ_LEN,)),
    Case(layout="tp2-sp-mb2-ga1-full", note="a short document, the rest is padding", documents=(20,)),
    Case(layout="cp4-mb1-ga1", note="a short document, the rest is padding", documents=(20,)),
    Case(layout="dp2-mb2-ga2", note="Mistral, window of 16", model="mistral"),
    Case(layout="cp2-tp2-sp-mb1-ga1", note="Mistral, window of 16", model="mistral"),
    Case(layout="zero3x2-mb2-ga2-selective", note="Gemma 2", model="gemma2"),
    Case(layout="tp2-sp-mb2-ga2", note="Gemma 2", model="gemma2"),
    Case(layout="cp2-mb1-ga1-full", note="Gemma 2", model="gemma2"),
    Case(layout="pp2-1f1b-mb1-ga4", note="Gemma 2", model="gemma2"),
    Case(layout="zero3x2-tp2-sp-mb1-ga1", note="Qwen 3", model="qwen3"),
    Case(layout="dp2-mb2-ga2", note="GPT-2", model="gpt2"),
    Case(layout="zero3x2-mb1-ga2-full", note="GPT-2", model="gpt2"),
    Case(layout="zero2x2-mb2-ga2", note="GPT-NeoX", model="neox"),
    Case(layout="tp2-sp-mb2-ga1", note="GPT-NeoX", model="neox"),
    *(Case(layout=layout, **spread) for layout in ("dp2-ep2-mb2-ga2", "zero3x2-ep2-mb2-ga2-full",
                                                   "zero3x2-ep2-mb2-ga1-selective")
      for spread in (SPREAD, CROWDED)),
)  # fmt: skip
