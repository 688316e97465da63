"""From settings to the parts of a run. The config stops here: what is built takes plain values.

config ──> layout ──> tokenizer ──> data ──> model (freeze, LoRA, recompute) ──> optimizer ──> Run
"""

import math
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import meshtune
from meshtune.config import Config, DataConfig, SourceConfig
from meshtune.data.loader import Loader
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared, prepare, sentences
from meshtune.data.source import Source
from meshtune.data.stream import Stream
from meshtune.data.template import Encoder
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy, hidden_pattern, own_attention
from meshtune.model.census import Census
from meshtune.model.load import freeze, load, load_config, load_tokenizer, quiet, resize_embeddings, tables
from meshtune.model.lora import add_lora
from meshtune.model.trace import census_of
from meshtune.parallel.recompute import recompute_blocks
from meshtune.train import folder
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.evaluate import Evaluation
from meshtune.train.export import Exporter, recipe
from meshtune.train.loop import Run, restore
from meshtune.train.memory import PhaseMemory, Workload
from meshtune.train.metrics import Metrics, tracker_problems
from meshtune.train.mfu import flops_of, peak_flops
from meshtune.train.optim import Optimizer
from meshtune.train.schedule import learning_rate, warmup
from meshtune.train.signals import StopRequest
from meshtune.train.step import plain

# precision -> (dtype of the parameters in forward and backward passes, dtype they are trained in)
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "bf16": (torch.bfloat16, torch.float32),
    "bf16-pure": (torch.bfloat16, torch.bfloat16),
}


def build(config: Config, *, ranks: int | None = None) -> Run:
    """Everything that `loop.train` needs, put where its newest good checkpoint left it.

    Raises UserError for settings, data and models that can't work, before the run folder is touched.
    """
    if problems := tracker_problems(config.log.to):
        raise UserError(problems)
    layout = layout_of(config, ranks)
    device = device_of(config)
    attention = attention_of(config)
    torch.manual_seed(config.train.seed)
    quiet()
    tokenizer, encoder = tokenizer_of(config)
    prepared = data_of(config, encoder)
    steps = steps_of(config, prepared.train)
    model, added = model_of(config, tokenizer, attention, device)
    parts = anatomy(model)
    census = census_of(model)
    if attention == "meshtune":
        check_pattern(model, census)
    recompute_blocks(model, parts, layout.recompute)
    if config.train.compile:
        for block in model.get_submodule(parts.blocks).children():
            block.compile()
    optimizer = optimizer_of(config, model, layout)

    damaged: list[str] = []
    run_folder, resumed = folder.claim(config, steps, damaged.append)
    lock = folder.begin(run_folder, config, layout, resumed)
    metrics = Metrics.open(
        run_folder,
        config.log.to,
        every=config.log.every,
        total_steps=steps,
        start_step=resumed or 0,
        world=layout.world,
        peak_flops_per_second=peak_flops(device, config.train.precision),
        settings=config.model_dump(mode="json"),
    )
    checkpoints = Checkpoints(
        run_folder.checkpoints,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.async_save,
        report=metrics.say,
    )
    evaluation = Evaluation(
        model=model,
        tokenizer=tokenizer,
        anatomy=parts,
        device=device,
        dataset=prepared.eval,
        micro_batch_size=layout.micro_batch_size,
        at_start=config.eval.at_start,
        samples=config.eval.samples,
        exact_match=config.eval.exact_match,
        max_new_tokens=config.eval.max_new_tokens,
        stop_ids=encoder.stop_ids,
        folder=run_folder,
    )
    run = Run(
        folder=run_folder,
        steps=steps,
        loader=loader_of(config, prepared.train, layout),
        forward_backward=plain(model, parts, device),
        optimizer=optimizer,
        learning_rate=schedule_of(config, steps),
        max_grad_norm=config.train.max_grad_norm,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
        evaluation=evaluation,
        evaluate_every=config.eval.every,
        keep_best=config.eval.keep_best,
        early_stopping=config.eval.early_stopping,
        checkpoints=checkpoints,
        checkpoint_every=config.checkpoint.every,
        metrics=metrics,
        memory=PhaseMemory(model, optimizer, device, workload=workload_of(config, layout), census=census),
        flops=flops_of(census, config.data.seq_len),
        exporter=exporter_of(config, model, tokenizer, encoder),
        data_sentences=partial(streamed, prepared),
        stop=StopRequest(enabled=config.checkpoint.save_on_signal),
        lock=lock,
    )
    if resumed is not None:
        restore(run, resumed)
        run.loader = loader_of(config, prepared.train, layout, state=run.progress.data)
    metrics.start(
        model=config.model.name,
        method=config.method,
        parameters=census.total,
        trainable_parameters=census.trainable,
        precision=config.train.precision,
        layout=str(layout),
        world=layout.world,
        global_batch_size=config.global_batch_size,
        seq_len=config.data.seq_len,
        total_steps=steps,
        device=device_name(device),
        resumed_from=resumed,
        data=[source.path for source in config.data.train],
        **versions(),
    )
    for sentence in [*sentences(prepared.stats), *damaged]:
        metrics.say(sentence)
    if added:
        metrics.say(
            f"{added} tokens of the tokenizer had no embedding; theirs start from the mean of the others."
        )
    if resumed is not None:
        metrics.say(f"Going on from the checkpoint of step {resumed} in {run_folder.path}.")
    return run


def layout_of(config: Config, ranks: int | None = None) -> Layout:
    """The whole layout. Raises UserError for one that needs more than the one device this version runs on."""
    layout = config.partial_layout.complete(devices=1, global_batch_size=config.global_batch_size)
    problems = []
    if layout.world > 1:
        problems.append(
            f"Layout {layout} needs {layout.world} devices; this version trains on one. Leave the parallel "
            "sizes out: "
            f"layout=mb{layout.micro_batch_size}-{layout.recompute}."
        )
    if ranks is not None and ranks != 1:
        problems.append(f"--nproc {ranks}: this version trains on one device; leave it out.")
    if problems:
        raise UserError(problems)
    return layout


def device_of(config: Config) -> torch.device:
    """The device to train on. Raises UserError when CUDA is asked for and absent."""
    wanted = config.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "train.device = cuda, but torch sees no CUDA device; use train.device=cpu, or install torch for "
            "CUDA."
        )
    cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def attention_of(config: Config) -> str:
    """The attention that the model is built with. Raises UserError where packing is asked for and can't be
    had.
    """
    wanted, trust = config.model.attention, config.model.trust_remote_code
    family = load_config(config.model.name, trust_remote_code=trust, revision=config.model.revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family, trust_remote_code=trust)
    packs = own_attention(model)
    if wanted == "auto":
        wanted = "meshtune" if packs else model.config._attn_implementation
    if wanted != "meshtune" and config.partial_layout.fixed.get("recompute") == "attention":
        raise UserError(
            f"recompute = attention: {type(model).__name__} runs with the attention {wanted}, which it can't "
            "recompute by itself. Use selective or full."
        )
    if wanted == "meshtune" and not packs:
        raise UserError(
            f"model.attention = meshtune: {type(model).__name__} computes its attention inside the model. "
            "Use model.attention=auto with data.packing=false."
        )
    if wanted != "meshtune" and config.data.packing:
        raise UserError(
            f"data.packing = true: the attention {wanted} of {type(model).__name__} can't keep packed "
            "documents apart. " + ("Leave model.attention=auto." if packs else "Set data.packing=false.")
        )
    return wanted


def check_pattern(model: PreTrainedModel, census: Census) -> None:
    """Raise UserError for a family that keeps part of its attention's pattern from the attention function."""
    windows = [attention.window for block in census.blocks for attention in block.attention]
    if hidden := hidden_pattern(model.config, windows):
        raise UserError(
            f"{type(model).__name__} has {hidden}, which it does not tell its attention function, so packed "
            "documents "
            "can't be kept apart. Set model.attention=eager and data.packing=false."
        )


def tokenizer_of(config: Config) -> tuple[PreTrainedTokenizerBase, Encoder]:
    """The tokenizer, with what the chat template adds to it, and what turns rows into labelled tokens."""
    tokenizer = load_tokenizer(
        config.model.name, trust_remote_code=config.model.trust_remote_code, revision=config.model.revision
    )
    data = config.data
    if data.chat_template == "none":  # who loads the result shall prompt it as it was trained
        tokenizer.chat_template = None
    encoder = Encoder(
        tokenizer,
        train_on=data.train_on,
        chat_template=data.chat_template,
        separator=data.separator,
        on_bad_row=data.on_bad_row,
    )
    return tokenizer, encoder


def data_of(config: Config, encoder: Encoder) -> Prepared:
    """Training and held-out data, from the cache where it is there."""
    data = config.data
    if not data.train:
        raise UserError(
            "No data is named; add data: {train: rows.jsonl} to the config, or data.train=… to the command."
        )
    return prepare(
        [source_of(each, data, "train") for each in data.train],
        encoder,
        seq_len=data.seq_len,
        packing=data.packing,
        overlong=data.overlong,
        seed=config.train.seed,
        eval_split=data.eval_split,
        eval_sources=[source_of(each, data, "test") for each in data.eval],
        on_bad_row=data.on_bad_row,
        cache_dir=Path(data.cache).expanduser(),
        streaming=data.streaming,
    )


def source_of(source: SourceConfig, data: DataConfig, split: str) -> Source:
    """A source, with the data section's settings where it has none of its own."""
    columns = data.columns if source.columns is None else source.columns
    return Source(
        path=str(Path(source.path).expanduser()) if source.path.startswith("~") else source.path,
        weight=source.weight,
        split=source.split or split,
        format=source.format or data.format,
        columns=tuple(columns.items()),
    )


def steps_of(config: Config, train: Dataset | Stream) -> int:
    """Updates in the whole run: max_steps, or so many that every epoch's sequences are seen (default: one
    epoch).
    """
    if config.train.max_steps:
        return config.train.max_steps
    if isinstance(train, Stream):
        raise UserError("data.streaming = true: nobody knows how long an epoch is; set train.max_steps.")
    return math.ceil((config.train.num_epochs or 1) * len(train) / config.global_batch_size)


def model_of(
    config: Config, tokenizer: PreTrainedTokenizerBase, attention: str, device: torch.device
) -> tuple[PreTrainedModel, int]:
    """The model with frozen parameters and adapters, in training mode; and how many embeddings it gained."""
    model = load(
        config.model.name,
        init=config.model.init,
        dtype=loading_dtype(config),
        device=device,
        attention=attention,
        trust_remote_code=config.model.trust_remote_code,
        revision=config.model.revision,
        seed=config.train.seed,
    )
    added = resize_embeddings(model, tokenizer)
    if config.method == "lora":
        targets = config.lora.target_modules
        add_lora(
            model,
            r=config.lora.r,
            alpha=config.lora.alpha,
            dropout=config.lora.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            dtype=PRECISIONS[config.train.precision][1],
        )
        if added:  # all new rows are the same mean: untrained, the model could not tell the new tokens apart
            for table in tables(model):
                table.weight.requires_grad_(True)
    if config.model.freeze:
        freeze(model, config.model.freeze)
    return model, added


def loading_dtype(config: Config) -> torch.dtype:
    """What weights are read as: what they are trained in; a frozen base as what it computes in."""
    compute, trained = PRECISIONS[config.train.precision]
    return compute if config.method == "lora" else trained


def optimizer_of(config: Config, model: PreTrainedModel, layout: Layout) -> Optimizer:
    """AdamW over the trainable parameters; the frozen ones get the dtype that forward and backward compute
    in.
    """
    compute, trained = PRECISIONS[config.train.precision]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(trained if parameter.requires_grad else compute)
    sums = (
        torch.float32
        if config.train.reduce_dtype == "fp32" and layout.gradient_accumulation_steps > 1
        else None
    )
    return Optimizer(
        model.named_parameters(),
        betas=config.train.adam_betas,
        eps=config.train.adam_eps,
        weight_decay=config.train.weight_decay,
        compute_dtype=compute if compute != trained else None,
        sum_dtype=sums if compute == torch.bfloat16 else None,
    )


def loader_of(
    config: Config, train: Dataset | Stream, layout: Layout, state: dict[str, Any] | None = None
) -> Loader:
    return Loader(
        train,
        global_batch_size=config.global_batch_size,
        micro_batch_size=layout.micro_batch_size,
        seed=config.train.seed,
        state=state,
    )


def schedule_of(config: Config, steps: int) -> Callable[[int], float]:
    """Step -> learning rate."""
    train = config.train
    return partial(
        learning_rate,
        peak=train.learning_rate,
        kind=train.lr_scheduler,
        warmup_steps=warmup(steps, ratio=train.warmup_ratio, steps=train.warmup_steps),
        total_steps=steps,
    )


def workload_of(config: Config, layout: Layout) -> Workload:
    """What decides the memory of a step, for the advice given when it runs out."""
    return Workload(
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
        seq_len=config.data.seq_len,
        recompute=layout.recompute,
        precision=config.train.precision,
        method=config.method,
        lora_r=config.lora.r,
    )


def streamed(prepared: Prepared) -> list[str]:
    """What was cut, dropped or skipped of a stream so far; what is on the disk was told at the start."""
    if not isinstance(prepared.train, Stream):
        return []
    return sentences(prepared.stats | prepared.train.tally.values())


def exporter_of(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: Encoder
) -> Exporter:
    embeddings = model.get_input_embeddings().weight.requires_grad
    adapter = {
        "r": config.lora.r,
        "alpha": config.lora.alpha,
        "dropout": config.lora.dropout,
        "embeddings": embeddings,
    }
    return Exporter(
        model,
        tokenizer,
        base_name=folder.absolute(config.model.name),
        adapter=adapter if config.method == "lora" else None,
        recipe=recipe(config),
        stop_ids=encoder.stop_ids,
        push_to=config.hub.push_to,
        private=config.hub.private,
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def versions() -> dict[str, str]:
    """What a result depends on."""
    return {
        "meshtune": meshtune.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
