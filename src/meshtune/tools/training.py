"""Conversions of the model, the method, the training, labels and sequences."""

import json
import math
import re
from importlib.resources import files
from typing import Any

from meshtune.data.messages import REASONING
from meshtune.precision import NF4_ERROR
from meshtune.schedules import SCHEDULES, transformers_schedule
from meshtune.setting import is_regular_expression, is_template
from meshtune.tools.job import (
    OFF,
    Conversion,
    Converted,
    Job,
    NoCounterpart,
    NotNeeded,
    Refused,
    comma_separated,
    listed,
    only,
    sections,
    short,
)
from meshtune.tools.planned import Planned, named_modules, patterns
from meshtune.tools.preferences import told_values
from meshtune.tools.rows import has_alpaca_prompts
from meshtune.tools.table import counterpart, reason

NO_MASTER_WEIGHTS = (
    "with fp32 master weights; axolotl has none unless it shards, which train.precision=bf16-pure is like"
)
FROZEN_AS_STORED = "frozen weights keep the checkpoint's dtype, and only the adapter is fp32"
PEFT_MODULES = ["q_proj", "v_proj"]  # peft's own for llama, mistral, qwen2, qwen3 and gemma
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # Phi-3, -4
WIDE = 4096  # features of hidden states in models of 7 to 8 billion parameters
STACKED = ("gate_up_proj", "up_proj", "down_proj")  # parameters of experts
MLP = ("gate_proj", "up_proj", "down_proj")
PLUGINS = ("cutcrossentropy", "liger", "kernels", "expertparallel", "swanlab", "lmeval")  # train the same


def mapping(value: Any) -> dict[str, Any]:
    """A mapping that may be written as JSON."""
    return json.loads(value) if isinstance(value, str) else dict(value)


# Model #


def attention(value: Any, job: Job) -> dict[str, Any]:
    name = {"disabled": "eager"}.get(str(value), str(value))
    if name == "eager" or (name == "sdpa" and not packs(job)):
        return {"model.attention": name}
    return {}  # auto: the fastest that keeps packed documents apart


def packs(job: Job) -> bool:
    return job.on("packing", "neat_packing", "sample_packing", "dataset.packed")


def attention_kernel(_: str, fp32: str, flash: str, eager: str = "eager") -> Conversion:
    """The kernel of attention. fp32: the tool's for fp32, which flash attention lacks. flash: its other."""

    def write(plan: Planned) -> str:
        usual = fp32 if plan.config.train.precision == "fp32" else flash
        return {"sdpa": "sdpa", "eager": eager}.get(plan.config.model.attention, usual)

    return Conversion(attention, write)


def attention_switch(_: str, kernel: str) -> Conversion:
    return Conversion(lambda value, job: attention(kernel if value else "auto", job))


def model_arguments(value: Any, job: Job) -> Converted:
    arguments = mapping(value)
    settings = attention(arguments.pop("attn_implementation", "auto"), job)
    for name in ("revision", "trust_remote_code"):
        if name in arguments:
            settings[f"model.{name}"] = arguments.pop(name)
    left = [name for name in arguments if name not in ("dtype", "torch_dtype", "use_cache", "device_map")]
    return Converted(settings, f"without {', '.join(left)}: the model is run unchanged" if left else "")


# Method #


def adapter(value: Any, job: Job) -> dict[str, Any]:
    if value not in ("lora", "qlora"):
        raise Refused(f"adapter: {value} is not offered; meshtune trains all weights or LoRA.")
    return method(value, job)


def lora_or_full(value: Any, job: Job) -> dict[str, Any]:
    if value not in ("lora", "full"):
        part = "; model.freeze keeps some weights as they are" if value == "freeze" else ""
        raise Refused(f"finetuning_type: {value} is not offered; meshtune trains all weights or LoRA{part}.")
    return method(value, job)


def method(_: Any, job: Job) -> dict[str, Any]:
    return {"method": f"{'q' if frozen_bits(job) else ''}lora" if is_lora(job) else "full"}


def frozen_bits(job: Job) -> int:
    """Bits to which the file quantises the weights next to its adapter; 0: it leaves them as they are."""
    if not is_lora(job) or job.on("load_in_8bit"):
        return 8 * is_lora(job)
    switched = job.on("load_in_4bit", "model.quantize_base") or job.value("adapter") == "qlora"
    four = switched or short(job.value("model._component_")).startswith("qlora")
    return int(job.value("quantization_bit", default=None) or 4 * four)


def quantised(_: str, four: Any = None, scales: str = "") -> Conversion:
    """A base in fewer bits.

    four: the value that is written for 4 bits. scales: the key that quantises the scales of blocks too, and
    is off unless it is given.
    """

    def read(value: Any, job: Job) -> Converted:
        if value in OFF:
            return Converted({})
        if not is_lora(job):
            raise NoCounterpart("only frozen weights are quantised, next to an adapter; set method=qlora")
        bits = frozen_bits(job)
        more = f": half the memory, but rounded by {NF4_ERROR:.0%} of their size instead of 1%" * (bits == 8)
        lost = f"frozen weights take 4 bits, not {bits}{more}; method=lora keeps 16" if bits != 4 else ""
        if bits == 4 and scales and scales not in job.given:
            lost = job.table.entries[scales].arguments[1]
        return Converted({"method": "qlora"}, lost=lost)

    return Conversion(read, lambda plan: four)


def nf4(setting: str, values: list[Any], reason: str) -> Conversion:
    """As `only`, for a base in 4 bits."""

    def read(value: Any, job: Job) -> Converted:
        if frozen_bits(job) != 4:
            raise NotNeeded("no weights are quantised to 4 bits")
        return only(setting, values, reason).converted(value, job)

    return Conversion(read)


def is_lora(job: Job) -> bool:
    """True if the file trains an adapter."""
    model = job.value("model._component_")
    chosen = job.value("adapter") or job.value("finetuning_type") or short(model)
    return bool(job.value("use_peft")) or "lora" in str(chosen)


def llama_factory_rank(value: Any, job: Job) -> dict[str, Any]:
    alpha = {} if "lora_alpha" in job.given else {"lora.alpha": 2 * value}
    return {"lora.r": value, **alpha}


def modules(value: Any, job: Job) -> Converted:
    if job.on("lora_target_linear"):
        raise NotNeeded("lora_target_linear takes all linear layers")
    if value == "by the model":
        return Converted({"lora.target_modules": PEFT_MODULES}, "peft's for llama, mistral, qwen and gemma")
    pattern = isinstance(value, str) and is_regular_expression(value)
    named = [value.strip()] if pattern else comma_separated(value)
    everywhere = named in (["all"], ["all-linear"], ["linear"])
    return Converted({"lora.target_modules": with_experts("all-linear" if everywhere else named, job)})


def with_experts(targets: str | list[str], job: Job) -> str | list[str]:
    """Add "experts" to targets where the file names their parameters."""
    named = listed(job.value("lora_target_parameters", default=[]))
    return [*listed(targets), "experts"] if any(name.endswith(STACKED) for name in named) else targets


def all_linear(value: Any, job: Job) -> dict[str, Any]:
    return {"lora.target_modules": with_experts("all-linear", job)} if value else {}


def parameters(value: Any, job: Job) -> Converted:
    if others := [name for name in listed(value) if not name.endswith(STACKED)]:
        raise NoCounterpart(f"of parameters, only experts' weights get adapters, not {', '.join(others)}")
    chosen = job.given.get("lora_target_modules", [])
    targets = [] if chosen in OFF else modules(chosen, job).settings["lora.target_modules"]
    made = with_experts("all-linear", job) if job.on("lora_target_linear") else targets or ["experts"]
    remark = "all weights of experts get adapters" if len(listed(value)) == 1 else ""
    return Converted({"lora.target_modules": made} if listed(value) else {}, remark)


def torchtune_modules(value: Any, job: Job) -> Converted:
    theirs = job.value("model.lora_attn_modules", default=[])
    found: Any = ["o_proj" if name == "output_proj" else name for name in theirs]
    found += MLP if job.on("model.apply_lora_to_mlp") else ()
    remark = ""
    if len(found) == 7:
        found = "all-linear"
    elif re.search(r"\bphi[34]", str(job.value("model._component_"))):
        parts = {part: fused for fused, parts in FUSED.items() for part in parts}
        remark = "Hugging Face's Phi has one matrix for query, key and value, and one for gate and up"
        found = [*dict.fromkeys(parts.get(name, name) for name in found)]
    head = "without the output layer, which apply_lora_to_output adds"
    return Converted(
        {"lora.target_modules": found}, remark, head if job.on("model.apply_lora_to_output") else ""
    )


# Precision #


def precision(_: str, *names: str) -> Conversion:
    """A flag of the precision, which the file's flags and the dtype of its weights make together."""
    return Conversion(lambda value, job: precision_of(job), lambda plan: plan.config.train.precision in names)


def precision_of(job: Job) -> Converted:
    if job.on("fp8"):
        return Converted({"train.precision": "fp8"})
    dtype = short(job.value("dtype", "torch_dtype"))
    if job.on("pure_bf16", "bfloat16"):
        return Converted({"train.precision": "bf16-pure"})
    if job.on("bf16", "fp16", "float16") and not job.on("float32"):
        pure = dtype == "bfloat16" and not is_lora(job)
        remark = NO_MASTER_WEIGHTS if job.tool == "axolotl" and not (is_lora(job) or job.shards) else ""
        return Converted({"train.precision": "bf16-pure" if pure else "bf16"}, remark)
    if job.tool == "llama_factory" and is_lora(job) and stored_dtype(job) != "float32":
        return Converted({"train.precision": "bf16"}, FROZEN_AS_STORED)
    return Converted({"train.precision": "bf16-pure" if dtype == "bfloat16" else "fp32"})


def stored_dtype(job: Job) -> str:
    """Dtype of the weights in a model's folder, bfloat16 where it does not say or is not on this machine."""
    file = job.read(f"{job.value('model_name_or_path')}/config.json")
    stored = json.loads(file.read_text(encoding="utf-8")) if file else {}
    return str(stored.get("dtype") or stored.get("torch_dtype") or "bfloat16")


def fp16(value: Any, job: Job) -> Converted:
    if value not in OFF:
        raise NoCounterpart(f"{reason('train.precision', 'fp16')}; train.precision is bf16")
    return Converted({}) if "bf16" in job.given else precision_of(job)


def torchtune_dtype(value: Any, job: Job) -> dict[str, Any]:
    if value == "fp16":
        raise NoCounterpart(f"{reason('train.precision', 'fp16')}; train.precision is bf16")
    return {"train.precision": "bf16-pure" if value == "bf16" else str(value)}


# Length and learning rate #


def transformers_arguments(plan: Planned) -> tuple[str, dict[str, Any]]:
    """(lr_scheduler_type, lr_scheduler_kwargs) of the learning-rate schedule."""
    train = plan.config.train
    return transformers_schedule(
        train.lr_scheduler,
        peak=plan.config.learning_rate,
        total_steps=train.max_steps or 0,
        min_ratio=train.min_lr_ratio,
        arguments=train.lr_scheduler_kwargs,
    )


def schedule(value: Any, job: Job) -> Converted:
    name = short(value).removeprefix("get_").replace("_schedule_with_warmup", "").replace("_schedule", "")
    if name not in SCHEDULES:
        raise NoCounterpart(f"there is no schedule {name}; train.lr_scheduler is cosine")
    if SCHEDULES[name].needs_floor and not (floors(job) or job.on("cosine_min_lr_ratio")):
        return Converted({"train.lr_scheduler": name.replace("_with_min_lr", "")}, "without its least rate")
    return Converted({"train.lr_scheduler": name})


def scheduled(job: Job) -> str:
    """Name of the schedule that `schedule` gives, "" for none."""
    value = job.value("lr_scheduler_type", "lr_scheduler", "lr_scheduler._component_", default="")
    try:
        return schedule(value, job).settings["train.lr_scheduler"]
    except NoCounterpart:
        return ""


def schedule_arguments(value: Any, job: Job) -> Converted:
    arguments = mapping(value)
    settings: dict[str, Any] = floors(job)
    for name in ("min_lr", "min_lr_rate", "min_lr_ratio"):
        arguments.pop(name, None)
    taken = SCHEDULES[scheduled(job) or "cosine"].arguments
    if kept := {name: entry for name, entry in arguments.items() if name in taken}:
        settings["train.lr_scheduler_kwargs"] = kept
    left = [name for name in arguments if name not in taken]
    return Converted(settings, f"without {', '.join(left)}, which the schedule does not take" if left else "")


def floors(job: Job) -> dict[str, float]:
    """{"train.min_lr_ratio": ...} where the arguments of the schedule say how low the rate ends."""
    arguments = mapping(job.value("lr_scheduler_kwargs", default={}))
    if "min_lr" in arguments and job.value("learning_rate"):
        return {"train.min_lr_ratio": float(arguments["min_lr"]) / float(job.value("learning_rate"))}
    given = arguments.get("min_lr_rate", arguments.get("min_lr_ratio"))
    return {} if given is None else {"train.min_lr_ratio": float(given)}


def least_rate(value: Any, job: Job) -> dict[str, Any]:
    if SCHEDULES[scheduled(job) or "cosine"].floor is None:
        raise NotNeeded(f"the schedule {scheduled(job)} has no least rate")
    return {"train.min_lr_ratio": float(value)}


def warmup(value: Any, job: Job) -> dict[str, Any]:
    no_warmup_for_constant(job)
    if not value and job.value("warmup_ratio"):
        return {}
    if 0 < float(value) < 1:
        return {"train.warmup_ratio": float(value)}
    return {"train.warmup_steps": int(value)}


def warmup_ratio(value: Any, job: Job) -> dict[str, Any]:
    no_warmup_for_constant(job)
    if job.value("warmup_steps"):
        raise NotNeeded("warmup_steps says how long to warm up")
    return {"train.warmup_ratio": float(value)}


def no_warmup_for_constant(job: Job) -> None:
    name = scheduled(job)
    if name and not SCHEDULES[name].warmup:
        raise NotNeeded(f"the schedule {name} has no warm-up")


def warmup_share(plan: Planned) -> float | None:
    return plan.config.train.warmup_ratio if plan.config.train.warmup_steps is None else None


def warmup_below_1(plan: Planned) -> float | None:
    """Warm-up in steps, or as a share of all steps."""
    share = warmup_share(plan)
    return plan.config.train.warmup_steps if share is None else share


def epochs(value: Any, job: Job) -> Converted:
    if "max_steps_per_epoch" in job.given:
        return steps_per_epoch(job.given["max_steps_per_epoch"], job)
    if job.ended_by_steps:
        raise NotNeeded("the number of steps ends the run")
    return Converted({"train.num_epochs": float(value)})


def steps_per_epoch(value: Any, job: Job) -> Converted:
    number = int(job.value("epochs", default=1))
    return Converted({"train.max_steps": int(value) * number}, f"{value} steps in each of {number} epochs")


# Optimizer and loss #


def optimizer(value: Any, job: Job) -> Converted:
    if job.on("use_muon"):
        raise NotNeeded("use_muon chooses the optimizer")
    ours = counterpart("train.optimizer", short(value))
    if ours is None:
        raise NoCounterpart(f"there is no optimizer {short(value)}; train.optimizer is adamw")
    setting, _, name = ours.write.partition("=")
    paged = {"train.offload": "optimizer"} if short(value).lower().startswith("paged") else {}
    return Converted({setting: name} | paged, lost=ours.why)


def weight_decay(value: Any, job: Job) -> dict[str, Any]:
    """Convert torchtune's, whose default is AdamW's own: other optimizers have none."""
    if "optimizer.weight_decay" not in job.given and "adamw" not in short(job.value("optimizer._component_")):
        raise NotNeeded("the optimizer has no weight decay of its own")
    return {"train.weight_decay": float(value)}


def beta(_: str, place: int) -> Conversion:
    """One of AdamW's two betas. place: 0 or 1."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        betas = [job.value("adam_beta1", default=0.9), job.value("adam_beta2", default=0.999)]
        return {"train.adam_betas": [float(each) for each in betas]}

    return Conversion(read, lambda plan: plan.config.train.adam_betas[place])


def plugins(value: Any, job: Job) -> Converted:
    others = [str(name) for name in listed(value) if short(name).removesuffix("plugin") not in PLUGINS]
    if others:
        raise NoCounterpart(f"what {', '.join(others)} changes in training is left out")
    raise NotNeeded("the forward, its attention, loss and kernels are chosen by meshtune")


def torchtune_loss(value: Any, job: Job) -> Converted:
    if settings := told_values(job.tool, "loss._component_").get(short(value)):
        return Converted(settings)
    if "crossentropy" not in short(value) and not short(value).startswith("ce"):
        raise NoCounterpart(f"there is no loss {short(value)}; it is the mean cross-entropy of label tokens")
    raise NotNeeded("the loss is the chunked mean cross-entropy of label tokens")


# Labels #


def labels_of_rows(_: str, keys: list[str], usual: list[str]) -> Conversion:
    """Labels that axolotl's data sets choose by `keys`; usual: the values that label tokens as here."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        rows = sections(job.value("datasets"))
        given = [each[key] for each in rows for key in keys if each.get(key) not in (None, "")]
        chosen = {label for value in given for label in listed(value) or ["no role"]}
        if chosen - {*usual}:
            raise NoCounterpart(job.table.entries["datasets.message_field_training"].reason)
        return {}

    return Conversion(read)


def thought_field(value: Any, job: Job) -> dict[str, Any]:
    if value not in REASONING:
        raise NoCounterpart(f"the thought of a message is its {', '.join(REASONING[:-1])} or {REASONING[-1]}")
    return {}


def train_on_prompt(job: Job) -> dict[str, Any]:
    """data.train_on by LLaMA-Factory's stage, train_on_prompt and mask_history."""
    if job.value("stage") == "pt" or job.on("train_on_prompt"):
        return {"data.train_on": "all"}
    return {"data.train_on": "completion" if job.on("mask_history") else "assistant"}


def label_switch(_: str, ours: str) -> Conversion:
    return Conversion(lambda value, job: train_on_prompt(job), lambda plan: plan.config.data.train_on == ours)


def stage(value: Any, job: Job) -> Converted:
    if value not in (stages := told_values(job.tool, "stage")):
        raise Refused(f"stage: {value} is not trained here; meshtune trains the stages {', '.join(stages)}.")
    if job.objective == "sft":
        return Converted(train_on_prompt(job))
    prompts = "the cross entropy has the tokens of the prompt too" if job.objective == "orpo" else ""
    return Converted({"objective": job.objective}, prompts)


def completion_only(value: Any, job: Job) -> Converted:
    if job.on("assistant_only_loss"):
        raise NotNeeded("assistant_only_loss says which tokens are labelled")
    if value == "by the rows":
        if "completion" in job.value("datasets.columns", default=()):
            return Converted({"data.train_on": "completion"})
        remark = "so for messages and text; where rows have a prompt and a completion, set completion"
        return Converted({"data.train_on": "all"}, remark)
    return Converted({"data.train_on": "completion" if value else "all"})


def trains(value: Any, job: Job) -> Converted:
    if not value:
        raise Refused(f"do_train: {value} trains nothing. meshtune eval and meshtune generate run a model.")
    raise NotNeeded("a run trains")


# Sequences and templates #


def llama_factory_packing(value: Any, job: Job) -> Converted:
    if job.on("neat_packing"):
        return Converted({"data.packing": True})
    given = bool(job.given.get("packing", job.value("stage") == "pt"))
    remark = "documents of a sequence do not see each other" if given else ""
    return Converted({"data.packing": given}, remark)


def packing_strategy(value: Any, job: Job) -> dict[str, Any]:
    if str(value) == "wrapped" and packs(job):
        raise NoCounterpart("documents of a sequence do not see each other, and are cut only where too long")
    return {}


def overlong(value: Any, job: Job) -> dict[str, Any]:
    plain = {str(each.get("type")) for each in sections(job.value("datasets"))} == {"completion"} or job.on(
        "pretraining_dataset"
    )
    if value == "truncate" and job.objective != "sft":
        return {"data.overlong": "cut"}
    value = "truncate" if plain else value  # axolotl splits plain text, as `auto` does, whatever this says
    return {"data.overlong": {"truncate": "auto", "raise": "error"}.get(value, value)}


def template_name(setting: str, theirs: str = "", others: bool = False) -> Conversion:
    """A chat template. theirs: the built-ins that the tool has by the same name. others: as file or text."""

    def write(plan: Planned) -> str | None:
        name = plan.setting(setting)
        if name in (None, "none") or (name in theirs.split()) is others:
            return None
        file = files("meshtune.data") / "templates" / f"{name}.jinja"
        return name if not others or is_template(name) or not file.is_file() else file.read_text("utf-8")

    return Conversion((lambda value, job: {setting: value}) if others else named_template, write)


def named_template(value: Any, job: Job) -> Converted:
    name = str(value).removeprefix("tokenizer_default_fallback_")
    built_in = [file.name for file in (files("meshtune.data") / "templates").iterdir()]
    known = f"{name}.jinja" in built_in
    if is_template(str(value)):
        return Converted({"data.chat_template": value})
    if has_alpaca_prompts(job):
        raise NotNeeded("rows of type alpaca have a prompt of their own")
    if value != name:
        lacking = f"set data.chat_template={name}" if known else f"there is no template {name} here"
        return Converted({}, lost=f"where the tokenizer has no template: {lacking}")
    if value == "tokenizer_default":
        return Converted({})
    if job.on("chat_template_jinja"):
        raise NotNeeded("chat_template_jinja is the template")
    if not known:
        raise NoCounterpart(
            f"there is no template {name} here; the tokenizer's own is used, and where it has none, "
            "data.chat_template takes a built-in's name, a file or the template itself"
        )
    alpaca = name == "alpaca" and job.tool == "llama_factory"
    return Converted({"data.chat_template": name}, "without the first line (Below is ...)" if alpaca else "")


def end_token(value: Any, job: Job) -> Converted:
    file = files("meshtune.data") / "templates" / f"{job.value('chat_template')}.jinja"
    if file.is_file() and f"an answer ends with: {value}\n" in file.read_text("utf-8"):
        raise NotNeeded("the template ends answers with it, and makes it the tokenizer's eos token")
    raise NoCounterpart("the tokenizer keeps its own, or has the template's; change it in the model's folder")


def answer_tokens(value: Any, job: Job) -> dict[str, Any]:
    if value == 0:
        raise NotNeeded("0: no answers are written")
    return {"eval.max_new_tokens": value}


def mlp_tile_of_shards(setting: str) -> Conversion:
    """Axolotl's shards of a sequence; by default as long as the model is wide."""

    def read(value: Any, job: Job) -> Converted:
        if value in OFF:
            return Converted({})
        rows = int(job.value("micro_batch_size", default=1) or 1)
        if shards := int(job.value("tiled_mlp_num_shards", default=0) or 0):
            return Converted({setting: rows * math.ceil(int(job.value("sequence_len")) / shards)})
        lost = f"a tile of {WIDE} tokens of each row; axolotl takes the number of features"
        return Converted({setting: rows * WIDE}, lost=lost)

    return Conversion(read)


def elsewhere(setting: str, there: Any = None) -> Conversion:
    """No setting: another key's conversion reads this one. there: the value that is written as true."""
    return Conversion(lambda value, job: {}, lambda plan: plan.setting(setting) == there)


READ = (
    model_arguments, method, torchtune_modules, fp16, torchtune_dtype, least_rate, steps_per_epoch,
    weight_decay, plugins, torchtune_loss, thought_field, completion_only,
    trains, packing_strategy, answer_tokens, end_token,
)  # fmt: skip
MADE = (
    attention_kernel, attention_switch, precision, beta, label_switch, labels_of_rows, elsewhere,
    template_name, quantised, nf4, mlp_tile_of_shards,
)  # fmt: skip
MAKERS = {make.__name__: make for make in MADE}
CONVERSIONS = {
    **{read.__name__: Conversion(read) for read in READ},
    "section": Conversion(lambda value, job: {}),  # the keys in the section are converted one by one
    "adapter": Conversion(adapter, lambda plan: plan.config.method if plan.config.adapts else None),
    "lora_or_full": Conversion(lora_or_full, lambda plan: plan.config.method.removeprefix("q")),
    "llama_factory_rank": Conversion(llama_factory_rank, lambda plan: plan.config.lora.r),
    "all_linear": Conversion(all_linear, lambda plan: plan.config.lora.target_modules == "all-linear"),
    "parameters": Conversion(parameters),
    "modules": Conversion(modules, lambda plan: patterns(plan.config.lora.target_modules)),
    "named_modules": Conversion(modules, named_modules),
    "schedule": Conversion(schedule, lambda plan: transformers_arguments(plan)[0]),
    "schedule_arguments": Conversion(schedule_arguments, lambda plan: transformers_arguments(plan)[1]),
    "warmup": Conversion(warmup, lambda plan: plan.config.train.warmup_steps),
    "warmup_ratio": Conversion(warmup_ratio, warmup_share),
    "warmup_below_1": Conversion(warmup, warmup_below_1),
    "epochs": Conversion(epochs, lambda plan: None if plan.config.train.max_steps else plan.epochs),
    "optimizer": Conversion(optimizer, lambda plan: "adamw_torch_fused"),
    "stage": Conversion(stage, lambda plan: "pt" if plan.rows == {"text"} else "sft"),
    "llama_factory_packing": Conversion(llama_factory_packing, lambda plan: plan.config.data.packing),
    "overlong": Conversion(
        overlong,
        lambda plan: {"drop": "drop", "error": "raise"}.get(plan.config.data.overlong, "truncate"),
    ),
    "thinking": Conversion(
        lambda value, job: {} if value else {"data.chat_template_kwargs": {"enable_thinking": False}}
    ),
    "device": Conversion(lambda value, job: {"train.device": "cpu"} if value == "cpu" else {}),
    "compiled": Conversion(
        lambda value, job: {"train.compile": value is True} if value != "auto" else {},
        lambda plan: plan.setting("train.compile"),
    ),
}
