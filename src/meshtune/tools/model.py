"""The model, the method and the precision of other trainers as settings of ours."""

import json
import re
from typing import Any

from meshtune.setting import is_regular_expression
from meshtune.tools.job import OFF, Converted, Job, NoCounterpart, NotNeeded, Refused, conversion, short
from meshtune.tools.sharding import shards
from meshtune.tools.sources import listed
from meshtune.tools.training import packs

NO_MASTER_WEIGHTS = (
    "with fp32 master weights; axolotl has none unless it shards, which train.precision=bf16-pure is like"
)
PEFT_MODULES = ["q_proj", "v_proj"]  # peft's own for llama, mistral, qwen2, qwen3 and gemma
NOT_QUANTISED = "the frozen weights are in bf16, not in 4 bits, which is about 4 times their memory"
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}  # of Phi-3 and -4
MLP = ("gate_proj", "up_proj", "down_proj")


@conversion
def attention(value: Any, job: Job) -> Converted:
    name = {"disabled": "eager"}.get(str(value), str(value))
    if name == "eager" or (name == "sdpa" and not packs(job)):
        return Converted({"model.attention": name})
    return Converted({})  # auto: the fastest that keeps packed documents apart


@conversion
def sdpa_if(value: Any, job: Job) -> Converted:
    return attention("sdpa" if value else "auto", job)


@conversion
def eager_if(value: Any, job: Job) -> Converted:
    return attention("eager" if value else "auto", job)


@conversion
def model_arguments(value: Any, job: Job) -> Converted:
    arguments = json.loads(value) if isinstance(value, str) else dict(value)
    settings = {}
    if "attn_implementation" in arguments:
        settings |= attention(arguments.pop("attn_implementation"), job).settings
    for theirs, ours in (("revision", "model.revision"), ("trust_remote_code", "model.trust_remote_code")):
        if theirs in arguments:
            settings[ours] = arguments.pop(theirs)
    left = [name for name in arguments if name not in ("dtype", "torch_dtype", "use_cache", "device_map")]
    return Converted(settings, f"without {', '.join(left)}: the model is run unchanged" if left else "")


@conversion
def random(value: Any, job: Job) -> Converted:
    return Converted({"model.init": "random"} if value else {})


@conversion
def adapter(value: Any, job: Job) -> Converted:
    if value == "lora":
        return Converted({"method": "lora"})
    if value == "qlora":
        named = job.on("load_in_4bit", "load_in_8bit")  # which is noted by itself
        return Converted({"method": "lora"}, lost="" if named else NOT_QUANTISED)
    raise Refused(f"adapter: {value} is not offered; meshtune trains all weights or LoRA.")


@conversion
def lora_if(value: Any, job: Job) -> Converted:
    return Converted({"method": "lora" if value else "full"})


@conversion
def lora_or_full(value: Any, job: Job) -> Converted:
    if value not in ("lora", "full"):
        part = "; model.freeze keeps some weights as they are" if value == "freeze" else ""
        raise Refused(f"finetuning_type: {value} is not offered; meshtune trains all weights or LoRA{part}.")
    return Converted({"method": value})


@conversion
def torchtune_model(value: Any, job: Job) -> Converted:
    name = short(value)
    lost = NOT_QUANTISED if name.startswith("qlora") else ""
    return Converted({"method": "lora" if "lora_" in name else "full"}, lost=lost)


def is_lora(job: Job) -> bool:
    """True if the file trains an adapter."""
    model = job.value("model._component_")
    chosen = job.value("adapter") or job.value("finetuning_type") or short(model)
    return bool(job.value("use_peft")) or "lora" in str(chosen)


@conversion
def llama_factory_rank(value: Any, job: Job) -> Converted:
    alpha = {} if "lora_alpha" in job.given else {"lora.alpha": 2 * value}
    return Converted({"lora.r": value, **alpha})


@conversion
def all_linear(value: Any, job: Job) -> Converted:
    return Converted({"lora.target_modules": "all-linear"} if value else {})


@conversion
def modules(value: Any, job: Job) -> Converted:
    if job.on("lora_target_linear"):
        raise NotNeeded("lora_target_linear takes all linear layers")
    if value == "by the model":
        return Converted({"lora.target_modules": PEFT_MODULES}, "peft's for llama, mistral, qwen and gemma")
    names = value.split(",") if isinstance(value, str) and not is_regular_expression(value) else listed(value)
    names = [name.strip() for name in names]
    if names in (["all"], ["all-linear"], ["linear"]):
        return Converted({"lora.target_modules": "all-linear"})
    return Converted({"lora.target_modules": names})


@conversion
def modules_to_save(value: Any, job: Job) -> Converted:
    names = value.split(",") if isinstance(value, str) else list(value)
    return Converted({"lora.modules_to_save": [name.strip() for name in names]})


@conversion
def torchtune_modules(value: Any, job: Job) -> Converted:
    theirs = job.value("model.lora_attn_modules", default=[])
    names = ["o_proj" if name == "output_proj" else name for name in theirs]
    names += MLP if job.on("model.apply_lora_to_mlp") else ()
    remark = ""
    if len(names) == 7:
        names = "all-linear"
    elif re.search(r"\bphi[34]", str(job.value("model._component_"))):
        parts = {part: fused for fused, parts in FUSED.items() for part in parts}
        remark = "Hugging Face's Phi has one matrix for query, key and value, and one for gate and up"
        names = [*dict.fromkeys(parts.get(name, name) for name in names)]
    head = "without the output layer, which apply_lora_to_output adds"
    return Converted(
        {"lora.target_modules": names}, remark, head if job.on("model.apply_lora_to_output") else ""
    )


@conversion
def weights_dtype(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def bf16(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def pure_bf16(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def fp32(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def fp16(value: Any, job: Job) -> Converted:
    if value not in OFF:
        raise NoCounterpart("fp16 needs loss scaling, which is not offered; train.precision is bf16")
    return Converted({}) if "bf16" in job.given else precision(job)


def precision(job: Job) -> Converted:
    """The precision that the file's flags and the dtype of its weights make together."""
    dtype = job.value("dtype", "torch_dtype")
    if job.on("pure_bf16", "bfloat16"):
        return Converted({"train.precision": "bf16-pure"})
    if job.on("bf16", "fp16", "float16") and not job.on("float32"):
        pure = short(dtype) == "bfloat16" and not is_lora(job)
        remark = NO_MASTER_WEIGHTS if job.tool == "axolotl" and not (is_lora(job) or shards(job)) else ""
        return Converted({"train.precision": "bf16-pure" if pure else "bf16"}, remark)
    return Converted({"train.precision": "bf16-pure" if short(dtype) == "bfloat16" else "fp32"})


@conversion
def torchtune_dtype(value: Any, job: Job) -> Converted:
    if value == "fp16":
        raise NoCounterpart("fp16 needs loss scaling, which is not offered; train.precision is bf16")
    return Converted({"train.precision": "bf16-pure" if value == "bf16" else str(value)})


@conversion
def cpu(value: Any, job: Job) -> Converted:
    return Converted({"train.device": "cpu"} if value else {})


@conversion
def device(value: Any, job: Job) -> Converted:
    return Converted({"train.device": "cpu"} if value == "cpu" else {})


@conversion
def compiled(value: Any, job: Job) -> Converted:
    return Converted({"train.compile": value is True} if value != "auto" else {})
