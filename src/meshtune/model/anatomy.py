"""Where a model family keeps its parts: the one place that knows families.

    body ┬ embed                    input ids -> hidden
         ├ blocks ┬ 0 ┬ attention   the transformer blocks, all alike
         │        ┆   └ mlp
         └ norm                     -> last_hidden_state
    head                            last_hidden_state -> logits (before the family's scaling or soft-capping)

Nothing here is listed by family name. The parts are found from what transformers promises for every causal
language model (the embedding and head that it names, the number of blocks in its configuration) and each
finding is verified; a model that is built differently is refused, so that nothing downstream has to guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from meshtune.errors import UserError

WORKS = "decoder-only transformers such as Llama, Qwen, Mistral, Gemma, Phi, OLMo, Cohere, GPT-2 and GPT-NeoX"
NOT_CAUSAL = {"xlnet"}  # two-stream attention over permutations, which no flag of the model shows
MLP_NAMES = ("mlp", "feed_forward", "ffn")

# The tensor-parallel plan strings of transformers that have a meaning for plain dense blocks.
TENSOR_STYLES = {
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "embedding",
    "embedding_rowwise",
}


@dataclass(frozen=True)
class Anatomy:
    """Paths of the parts of one model; `model.get_submodule(path)` gives each."""

    body: str  # "model"; its forward returns last_hidden_state
    embed: str  # "model.embed_tokens"
    blocks: str  # "model.layers", an nn.ModuleList
    norm: str  # "model.norm", the final norm; "" for a family without one
    head: str  # "lm_head"
    attention: str  # "self_attn", inside each block
    mlp: str  # "mlp", inside each block; "" where its matrices lie in the block itself (OPT)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find and verify the parts of `model`. Raises UserError, saying what is unusual, where it can't."""
    config = model.config.get_text_config()
    paths = {module: path for path, module in model.named_modules()}

    def refuse(reason: str) -> UserError:
        return UserError(f"{type(model).__name__} can't be trained: {reason}. What works: {WORKS}.")

    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise refuse("it has no plain embedding and output head")
    container, _, _ = paths[embed].rpartition(".")
    if not container or container not in (body := container.split(".")[0], f"{body}.decoder"):
        raise refuse(f"its embedding is at {paths[embed]!r}, as in models that also see or hear")
    if config.model_type in NOT_CAUSAL or getattr(config, "use_bidirectional_attention", None):
        raise refuse("its attention is not causal")
    if model._is_stateful:
        raise refuse("its recurrent or convolutional blocks would mix the documents of a packed sequence")

    trunk = model.get_submodule(container)
    layers = config.num_hidden_layers
    lists = [
        name
        for name, child in trunk.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == layers
    ]
    if len(lists) != 1:
        raise refuse(
            f"{len(lists)} lists of {layers} blocks were found in {container!r}, where one was expected"
        )
    blocks = trunk.get_submodule(lists[0])
    assert isinstance(blocks, nn.ModuleList)

    norms = [name for name, child in trunk.named_children() if _is_norm(child) and not _of_embedding(name)]
    if len(norms) > 1:
        raise refuse(f"{' and '.join(norms)} could each be its final norm")
    attention = _one_child(blocks[0], lambda name, child: "attention" in type(child).__name__.lower())
    if attention is None:
        raise refuse(f"its block {type(blocks[0]).__name__} has no single attention")
    others = [index for index, block in enumerate(blocks) if attention not in dict(block.named_children())]
    if others:
        raise refuse(
            f"block {others[0]} has no {attention!r} (recurrent or convolutional blocks would mix documents)"
        )
    for path, module in blocks.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise refuse(f"its attention is not causal ({container}.{lists[0]}.{path})")
    mlp = _one_child(blocks[0], lambda name, child: name in MLP_NAMES)
    return Anatomy(
        body=body,
        embed=paths[embed],
        blocks=f"{container}.{lists[0]}",
        norm=f"{container}.{norms[0]}" if norms else "",
        head=paths[head],
        attention=attention,
        mlp=mlp or "",
    )


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _of_embedding(name: str) -> bool:
    return (
        "embed" in name or "per_layer" in name
    )  # Bloom's word_embeddings_layernorm, Gemma3n's per_layer_…_norm


def _one_child(block: nn.Module, wanted) -> str | None:
    found = [name for name, child in block.named_children() if wanted(name, child)]
    return found[0] if len(found) == 1 else None


class Capability(NamedTuple):
    """One row of `meshtune env --model`."""

    feature: str
    supported: bool
    why: str  # why not and what to do instead, or what to know


def capabilities(config: PretrainedConfig, *, trust_remote_code: bool = False) -> list[Capability]:
    """What meshtune can do with a model of this configuration, derived from a build on meta (no weights, no
    memory)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    try:
        found = anatomy(model)
    except UserError as error:
        return [Capability("training", False, str(error))]
    return [
        Capability(
            "training", True, f"{type(model).__name__}: {config.get_text_config().num_hidden_layers} blocks"
        ),
        _packing(model),
        Capability("lora", True, f"all-linear adapts {_linears(model, found)} matrices"),
        Capability(
            "recompute", True, "none, attention, selective, full" if own_attention(model) else "none, full"
        ),
        Capability("compile", True, "train.compile=true compiles each block; attention runs as it is"),
        _tensor(model),
        Capability("pipeline", False, "not yet in this version"),
        Capability("context", False, "not yet in this version"),
    ]


def own_attention(model: PreTrainedModel) -> bool:
    """Whether the family calls a registered attention function and hands it its keyword arguments."""
    return model._supports_attention_backend


def hidden_pattern(config: PretrainedConfig, windows: Sequence[int | None]) -> str | None:
    """What the configuration says of the attention that its attention function is not told; None when
    nothing.

    `windows` are those that the function was given, layer by layer. A family that lays its window, or another
    pattern, only into a mask would be silently wrong with an attention that builds none.
    """
    text = config.get_text_config(decoder=True)
    kinds = text.layer_types if hasattr(text, "layer_types") else None
    if kinds:
        seen = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return None if seen == list(kinds) else f"layers of {', '.join(sorted(set(kinds)))}"
    window = text.sliding_window if hasattr(text, "sliding_window") else None
    return f"a sliding window of {window}" if window and not any(windows) else None


def _packing(model: PreTrainedModel) -> Capability:
    if own_attention(model):
        return Capability("packing", True, "documents are kept apart inside the attention function")
    why = f"{type(model).__name__} computes its attention inside the model, so documents can't be kept apart"
    return Capability("packing", False, f"{why}; set data.packing=false and model.attention=eager")


def _linears(model: PreTrainedModel, found: Anatomy) -> int:
    blocks = model.get_submodule(found.blocks)
    return sum(
        isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" for module in blocks.modules()
    )


def _tensor(model: PreTrainedModel) -> Capability:
    plan = model.config.get_text_config().base_model_tp_plan
    if not plan:
        return Capability(
            "tensor", False, "not yet in this version, and transformers has no plan for this family"
        )
    unknown = sorted(set(plan.values()) - TENSOR_STYLES)
    if unknown:
        return Capability(
            "tensor", False, f"not yet in this version, and its plan needs {', '.join(unknown)}"
        )
    return Capability(
        "tensor", False, "not yet in this version (transformers has a dense plan for this family)"
    )
