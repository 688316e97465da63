"""From settings to the parts of a run. The config stops here: what is built takes plain values.

config ──> layout ──> tokenizer ──> data ──> model (freeze, LoRA, recompute) ──> optimizer ──> Run
"""

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import meshtune
from meshtune import precision
from meshtune.config import Config, DataConfig, SourceConfig
from meshtune.data.loader import Loader
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared, prepare, sentences
from meshtune.data.source import Source
from meshtune.data.stream import Stream
from meshtune.data.template import Encoder
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy, auto_attention, hidden_pattern, traits
from meshtune.model.load import (
    freeze,
    load,
    load_config,
    load_tokenizer,
    mapped,
    quiet,
    resize_embeddings,
    skeleton,
    tables,
)
from meshtune.model.lora import add_lora, drawn
from meshtune.model.pieces import Piece, Weights, fill
from meshtune.model.trace import census_of
from meshtune.parallel.apply import Parallel, apply
from meshtune.parallel.mesh import World, join
from meshtune.parallel.recompute import recompute_blocks
from meshtune.placement.census import Census
from meshtune.placement.rules import ZERO_BUBBLE, refusals
from meshtune.placement.share import census_stages, stage_count, stage_of_rank
from meshtune.plan.fits import Refused
from meshtune.rundir import RunDir
from meshtune.train import folder, planning
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.evaluate import Evaluation
from meshtune.train.export import Exporter, SharedExporter, recipe
from meshtune.train.generate import answers, answers_of_all
from meshtune.train.loop import Run, restore, seed_dropout
from meshtune.train.loss import finish_loss
from meshtune.train.memory import PhaseMemory
from meshtune.train.metrics import Metrics, tracker_problems
from meshtune.train.mfu import flops_of, peak_flops
from meshtune.train.optim import Optimizer, key_of, parts_of
from meshtune.train.schedule import learning_rate, warmup
from meshtune.train.signals import StopRequest
from meshtune.train.step import ManyRanks, OneDevice, Passes

# precision -> (dtype of the parameters in forward and backward passes, dtype they are trained in)
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    name: (getattr(torch, dtypes.compute), getattr(torch, dtypes.trained))
    for name, dtypes in precision.PRECISIONS.items()
}


def build(config: Config, *, ranks: int | None = None) -> Run:
    """Everything that `loop.train` needs on this rank, put where its newest good checkpoint left it.

    Raises UserError for settings, data, models and layouts that can't work, before the run folder is touched.
    """
    if problems := tracker_problems(config.log.to):
        raise UserError(problems)
    device = device_of(config)
    layout = layout_of(config, ranks)
    attention = attention_of(config, layout)
    world = join(layout, device)
    torch.manual_seed(config.train.seed)
    quiet()
    tokenizer, encoder = tokenizer_of(config)
    prepared = data_of(config, encoder)
    steps = steps_of(config, prepared.train)
    prepare_model = one_device if world.size == 1 else many_ranks
    made = prepare_model(config, world, tokenizer, encoder, attention)
    seed_dropout(world, config.train.seed)

    damaged: list[str] = []
    run_folder, resumed, lock = claimed(config, world, steps, damaged.append)
    metrics = Metrics.open(
        run_folder,
        config.log.to,
        rank=world.rank,
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
        process_group=world.storage,
        report=metrics.say,
    )
    evaluation = Evaluation(
        passes=made.passes,
        model=made.model,
        world=world,
        answer=made.answer,
        tokenizer=tokenizer,
        dataset=prepared.eval,
        micro_batch_size=layout.micro_batch_size,
        multiple=width_multiple(layout),
        at_start=config.eval.at_start,
        samples=config.eval.samples,
        exact_match=config.eval.exact_match,
        stop_ids=encoder.stop_ids,
        folder=run_folder,
    )
    census = made.census
    run = Run(
        folder=run_folder,
        world=world,
        steps=steps,
        loader=loader_of(config, prepared.train, world),
        passes=made.passes,
        optimizer=made.optimizer,
        whole=made.whole,
        seed=config.train.seed,
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
        memory=PhaseMemory(
            made.model,
            made.optimizer,
            device,
            advice=partial(planning.out_of_memory, config, layout, gpus_of(device)),
        ),
        flops=flops_of(census, config.data.seq_len, ranks=world.size // world.data_ranks),
        exporter=made.exporter,
        data_sentences=partial(streamed, prepared),
        stop=StopRequest(enabled=config.checkpoint.save_on_signal),
        lock=lock,
    )
    if resumed is not None:
        restore(run, resumed)
        run.loader = loader_of(config, prepared.train, world, state=run.progress.data)
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
    if made.added:
        metrics.say(
            f"{made.added} tokens of the tokenizer had no embedding; theirs start from the mean of the "
            "others."
        )
    if resumed is not None:
        metrics.say(f"Going on from the checkpoint of step {resumed} in {run_folder.path}.")
    return run


@dataclass(frozen=True)
class Made:
    """The model on this rank and what works on it."""

    model: nn.Module  # this rank's part
    passes: Passes
    optimizer: Optimizer
    census: Census  # of the whole model
    answer: Callable[[Sequence[Sequence[int]]], Sequence[str]]
    exporter: Exporter
    whole: Callable[[dict[str, Tensor]], dict[str, Tensor | Piece]]
    added: int  # embeddings that the tokenizer needed


def one_device(
    config: Config, world: World, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, attention: str
) -> Made:
    """The whole model as Hugging Face loads it."""
    layout = world.layout
    model, added = model_of(config, tokenizer, attention, world.device)
    parts, census = anatomy(model), census_of(model)
    if attention == "meshtune":
        check_pattern(model, census)
    recompute_blocks(model, parts, layout.recompute)
    if config.train.compile:
        for block in model.get_submodule(parts.blocks).children():
            block.compile()
    answer = partial(
        answers, model, tokenizer, max_new_tokens=config.eval.max_new_tokens, stop_ids=encoder.stop_ids
    )
    return Made(
        model=model,
        passes=OneDevice(model, parts, world.device),
        optimizer=optimizer_of(config, model.named_parameters(), layout),
        census=census,
        answer=answer,
        exporter=exporter_of(config, model, tokenizer, encoder),
        whole=lambda state: {**state},
        added=added,
    )


def many_ranks(
    config: Config, world: World, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, attention: str
) -> Made:
    """This rank's part of the model, which never exists as a whole."""
    layout = world.layout
    make = partial(skeleton_of, config, tokenizer, attention)
    whole, added = make()
    census = census_of(whole)
    if attention == "meshtune":
        check_pattern(whole, census)
    every = census_stages(census, layout, config.data.seq_len)
    own = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, world.pp.index)
    compute, _ = PRECISIONS[config.train.precision]
    parallel = apply(
        lambda: make()[0],
        world,
        {stage: every[stage] for stage in own},
        finish=partial(finish_loss, once=layout.schedule not in ZERO_BUBBLE),
        compute_dtype=compute,
        reduce_dtype=reduce_dtype_of(config),
        compile=config.train.compile,
    )
    weights = weights_of(config, whole)
    fill(parallel.named_pieces(), weights)
    for model in (whole, *(stage.model for stage in parallel.stages)):
        weights.copy_buffers(model)
    optimizer = optimizer_of(
        config,
        parallel.named_parameters(),
        layout,
        shared=world.parameter_ranks > 1,
        copies=parallel.copies(),
    )
    stages = nn.ModuleList(parallel.stages)
    passes = ManyRanks(parallel, optimizer)
    answer = partial(
        answers_of_all, passes, stages, world, tokenizer, max_new_tokens=config.eval.max_new_tokens,
        stop_ids=encoder.stop_ids, multiple=width_multiple(layout), rows=layout.micro_batch_size,
    )  # fmt: skip
    return Made(
        model=stages,
        passes=passes,
        optimizer=optimizer,
        census=census,
        answer=answer,
        exporter=SharedExporter(
            **vars(exporter_of(config, whole, tokenizer, encoder)), parallel=parallel, dtype=compute
        ),
        whole=partial(pieces_of, parallel),
        added=added,
    )


def reduce_dtype_of(config: Config) -> torch.dtype | None:
    """What gradients are summed in over ranks; None: as they are, when that is wider."""
    if config.train.precision == "fp64":
        return None
    return torch.bfloat16 if config.train.reduce_dtype == "bf16" else torch.float32


def pieces_of(parallel: Parallel, state: dict[str, Tensor]) -> dict[str, Tensor | Piece]:
    """The optimizer's state as parts of the whole model's, under the names they have there."""
    parameters, found = dict(parallel.named_parameters()), {}
    for key, tensor in state.items():
        kind, name, moment = parts_of(key)
        whole = key_of(kind, parallel.tied.get(name, name), moment)
        if whole not in found:  # a tied copy of what is here too (V schedules) is in there already
            found[whole] = tensor if tensor.ndim == 0 else parallel.piece(name, parameters[name], tensor)
    return found


def claimed(
    config: Config, world: World, steps: int, report: Callable[[str], None]
) -> tuple[RunDir, int | None, IO[str] | None]:
    """(the run folder, the step to go on from, the lock): the main rank takes it, the others are told."""
    lock, found = None, None
    if world.main:
        run_folder, resumed = folder.claim(config, steps, report)
        plan = planning.prediction(config, world.layout, gpus_of(world.device))
        lock = folder.begin(run_folder, config, plan, resumed)
        found = run_folder, resumed
    run_folder, resumed = world.agree(found)
    missing = [rank for rank, there in enumerate(world.gather(run_folder.config_file.exists())) if not there]
    if missing:
        raise UserError(
            f"output = {config.output}: ranks {', '.join(map(str, missing[:8]))} don't see the run folder "
            f"{run_folder.path} that rank 0 made; name one on a file system that all machines share."
        )
    return run_folder, resumed, lock


def layout_of(config: Config, ranks: int | None = None) -> Layout:
    """The whole layout: of `ranks`, or of those that were started. What the config leaves open the planner
    chooses, on the first rank for all. Raises UserError where none can be made, with whatever else speaks
    against what is fixed of it; NothingFits where none fits.
    """
    if config.partial_layout.whole:
        return _completed(config)
    if not dist.is_initialized():
        return _chosen(config, ranks or 1)
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_chosen(config, dist.get_world_size())]
        except UserError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def _chosen(config: Config, ranks: int) -> Layout:
    """What the planner chooses; a model that it can't count gets data parallelism in what is open, and one
    that can't run at all is refused with the settings' reasons.
    """
    try:
        return planning.chosen(config, ranks, gpus_of(device_of(config)))
    except (planning.Uncounted, Refused):
        return _completed(config, ranks)


def _completed(config: Config, ranks: int = 1) -> Layout:
    partial = config.partial_layout
    try:
        return partial.complete(devices=ranks, global_batch_size=config.global_batch_size)
    except UserError as error:
        known = partial.known
        if "gradient_accumulation_steps" not in partial.fixed:  # as many as any schedule takes
            known = replace(known, gradient_accumulation_steps=2 * stage_count(known))
        _, others = attention_and_refusals(config, known, None)
        raise UserError([*error.problems, *others]) from None


def gpus_of(device: torch.device) -> list[tuple[str, float]]:
    """(name, bytes) of each GPU of this machine; none where the run is on the processor."""
    if device.type != "cuda":
        return []
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [(each.name, float(each.total_memory)) for each in found]


def width_multiple(layout: Layout) -> int:
    """What the width of every micro-batch is a multiple of: the sequence is cut by context parallelism
    (all-gather's zigzag takes two parts a rank) and sequence parallelism.
    """
    parts = 2 * layout.cp if layout.cp > 1 and layout.cp_method == "allgather" else layout.cp
    return parts * (layout.tp if layout.sp else 1)


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


def attention_of(config: Config, layout: Layout, ranks: int | None = None) -> str:
    """The attention that the model is built with. Raises UserError, with every reason, where the model can't
    be trained under this layout with these settings; nothing is loaded for that.

    ranks: how many will be started; None: those that run.
    """
    running = dist.get_world_size() if dist.is_initialized() else 1
    attention, problems = attention_and_refusals(config, layout, ranks or running)
    if problems:
        raise UserError(problems)
    return attention


def attention_and_refusals(config: Config, layout: Layout, ranks: int | None) -> tuple[str, list[str]]:
    """The attention that the model is built with, and `rules.refusals` of it; nothing is loaded."""
    trust = config.model.trust_remote_code
    family = load_config(config.model.name, trust_remote_code=trust, revision=config.model.revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family, trust_remote_code=trust)
    attention = config.model.attention
    if attention == "auto":
        attention = auto_attention(model)
    return attention, refusals(
        traits(model),
        layout,
        attention=attention,
        packing=config.data.packing,
        compile=config.train.compile,
        ranks=ranks,
    )


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
    return model, made_trainable(config, model, tokenizer)


def skeleton_of(
    config: Config, tokenizer: PreTrainedTokenizerBase, attention: str
) -> tuple[PreTrainedModel, int]:
    """`model_of` with its parameters on meta."""
    model = skeleton(
        config.model.name,
        init=config.model.init,
        dtype=loading_dtype(config),
        attention=attention,
        trust_remote_code=config.model.trust_remote_code,
        revision=config.model.revision,
    )
    return model, made_trainable(config, model, tokenizer)


def weights_of(config: Config, whole: PreTrainedModel) -> Weights:
    """The values of all parameters of the skeleton `whole`: from its files, and from torch's generator."""
    stored = mapped(
        config.model.name,
        init=config.model.init,
        dtype=loading_dtype(config),
        trust_remote_code=config.model.trust_remote_code,
        revision=config.model.revision,
        seed=config.train.seed,
    )
    return Weights(stored | drawn(whole))


def made_trainable(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Give a model embeddings for all tokens, adapters, and frozen parameters; returns how many embeddings it
    gained.
    """
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
    set_dtypes(config, model)
    return added


def loading_dtype(config: Config) -> torch.dtype:
    """What weights are read as: what they are trained in; a frozen base as what it computes in."""
    compute, trained = PRECISIONS[config.train.precision]
    return compute if config.method == "lora" else trained


def optimizer_of(
    config: Config,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    *,
    shared: bool = False,
    copies: Mapping[str, float] | None = None,
) -> Optimizer:
    """AdamW over the trainable parameters; where ZeRO shards them, FSDP2 rounds for the passes, and adds up.

    shared: whether gradients of several ranks add up, as those of several micro-batches do.
    """
    compute, trained = PRECISIONS[config.train.precision]
    if layout.zero:
        compute = trained
    several = shared or layout.gradient_accumulation_steps > 1
    sums = torch.float32 if config.train.reduce_dtype == "fp32" and several else None
    return Optimizer(
        named_parameters,
        betas=config.train.adam_betas,
        eps=config.train.adam_eps,
        weight_decay=config.train.weight_decay,
        compute_dtype=compute if compute != trained else None,
        sum_dtype=sums if compute == torch.bfloat16 else None,
        copies=copies,
    )


def set_dtypes(config: Config, model: nn.Module) -> None:
    """Trainable parameters in the dtype they are trained in, frozen ones in that of the passes."""
    compute, trained = PRECISIONS[config.train.precision]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(trained if parameter.requires_grad else compute)


def loader_of(
    config: Config, train: Dataset | Stream, world: World, state: dict[str, Any] | None = None
) -> Loader:
    return Loader(
        train,
        global_batch_size=config.global_batch_size,
        micro_batch_size=world.layout.micro_batch_size,
        seed=config.train.seed,
        data_rank=world.data_rank,
        data_ranks=world.data_ranks,
        state=state,
        multiple=width_multiple(world.layout),
        uniform=world.pp.size > 1,
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
