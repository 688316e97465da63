"""From settings to the parts of a run. The settings stop in api/: below, functions take the values they use.

config ─> choice (choose.py) ─> data, model (resolve.py) ─> run folder (output.py) ─> train.loop.Run
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from meshtune.api import output, resolve
from meshtune.api.choose import Choice, choose_together, out_of_memory
from meshtune.api.output import absolute, base_digest_of
from meshtune.api.resolve import inputs_of, model_spec, optimizer_spec, rate_in_words, schedule_of
from meshtune.config import Config
from meshtune.data.prepare import Prepared, sentences
from meshtune.data.tokens import id_bound
from meshtune.errors import UserError, expanded
from meshtune.experts.products import experts_of
from meshtune.launch.signals import StopRequest
from meshtune.length import length_sentences, steps_between, steps_of
from meshtune.meter.mfu import flops_of, peak_flops
from meshtune.meter.noise_scale import noise_refusals
from meshtune.model.anatomy import parts_kept
from meshtune.model.load import quiet, tables
from meshtune.model.lora import modules_named
from meshtune.model.save import check_written
from meshtune.optimizers import caution
from meshtune.parallel.mesh import World, join
from meshtune.plan.cluster import unused_here
from meshtune.plan.hardware import datasheet_flops
from meshtune.plan.workload import method_notes
from meshtune.precision import PRECISIONS
from meshtune.routers.balance import router_sentence
from meshtune.rundir import RunDir
from meshtune.train.callbacks import Callback, Callbacks, Hooks, Training
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.console import Course
from meshtune.train.dashboards import Labels
from meshtune.train.evaluate import Evaluation
from meshtune.train.export import Exporter, try_repository
from meshtune.train.folder import rate_change
from meshtune.train.inputs import Inputs, first_texts, loader_of, stream_sentences
from meshtune.train.loop import Run, restore, seed_dropout
from meshtune.train.loss import TokenLoss
from meshtune.train.measure import Meter
from meshtune.train.model import RankModel, rank_model
from meshtune.train.reference import reference_of
from meshtune.train.run_row import device_of, gpus_of, run_row
from meshtune.train.self_check import beyond_tested
from meshtune.train.trackers import Metrics, Tracker, tracker_problems
from meshtune.train.untrained import position_sentences, untrained_sentences
from meshtune.units import counted, on_screen, working

EMULATED = "A processor multiplies no 8-bit floats: rounded to them, they are multiplied in fp32, slowly."

Claimed = Callable[[RunDir], None]


def build(
    config: Config,
    choice: Choice | None = None,
    *,
    claimed: Claimed = lambda _: None,
    hooks: Hooks = Hooks(),  # noqa: B008 - a frozen value
) -> Run:
    """Everything that `loop.train` needs on this rank, put where its newest good checkpoint left it.

    Every rank calls it; it seeds torch's generators. choice: of `choose`, the same on all ranks; None: chosen
    here, by rank 0. claimed: called with the run folder once it is chosen. hooks: the same on all ranks.
    Raises UserError for settings, data, models and layouts that can't work, before the run folder is touched.
    """
    problems = tracker_problems(config.log.to)
    if hooks.loss and config.objective != "sft":
        problems += [f"loss=… is of tokens, and objective={config.objective} of whole answers; keep one."]
    if problems:
        raise UserError(problems)
    device = device_of(config.train.device)
    choice = choice or choose_together(config)
    of_tokens = hooks.loss is None and config.objective == "sft"
    if config.log.gradient_noise_scale:
        problems += noise_refusals(choice.layout, token_loss=not of_tokens)
    if problems:
        raise UserError(problems)
    world = join(choice.layout, device)
    torch.manual_seed(config.train.seed)
    quiet()
    inputs = inputs_of(config)
    if world.main and inputs.encoder.added:  # else the result could not be prompted as it was trained
        check_written(inputs.tokenizer, first_texts(inputs))
    if config.hub.push_to and world.main:  # after the data: a refused file leaves no empty repository
        try_repository(config.hub.push_to, private=config.hub.private)
    rows = id_bound(inputs.tokenizer)
    spec = model_spec(config, choice.attention, device.type, compile=choice.compile, embeddings=rows)
    spec = replace(spec, memory=min((memory for _, memory in gpus_of(device)), default=0.0))
    cache, steps = expanded(config.data.cache), steps_of(config, inputs.prepared.sequences)
    reference = reference_of(spec, inputs.prepared, world, cache=cache, steps=steps)
    if reference:
        reference.compute_apart(config.data.seq_len)
    with working("loading the model", on_screen) if world.main else nullcontext():
        model = rank_model(
            spec, world, optimizer=optimizer_spec(config), tokens_per_sequence=config.data.seq_len,
            token_loss=TokenLoss(hooks.loss) if hooks.loss else None,
        )  # fmt: skip
    if reference:
        inputs = inputs._replace(prepared=reference.given(inputs.prepared, model))
    seed_dropout(world, config.train.seed)
    return assemble(config, model, inputs, claimed, hooks.callbacks)


def assemble(
    config: Config, model: RankModel, inputs: Inputs, claimed: Claimed, callbacks: Sequence[Callback]
) -> Run:
    """Claim the run folder, put the parts together, and restore the newest good checkpoint, if there is one.

    Every rank calls it. model, inputs: of the config. claimed: see `build`. Raises UserError as
    `output.claim_together`, and for trackers that can't start.
    """
    prepared, world, seq_len = inputs.prepared, model.parallel.world, config.data.seq_len
    sequences, gpus = prepared.sequences, gpus_of(world.device)
    steps = steps_of(config, sequences)
    load = partial(loader_of, prepared.train, world.layout, world.data_rank, config.train.seed)
    notices = position_sentences(config.model.name, seq_len, model.whole, model.parallel.anatomy, prepared)
    notices += [*unused_here(config, world.size, gpus), *model.flash_notes]
    run_folder, resumed, claim = output.claim_together(
        config, model, steps, notices.append, prepared.train.label_share, prepared.train.width
    )
    claimed(run_folder)
    training = Training(run_folder.path, steps) if callbacks else None
    evaluate_every = steps_between(config.eval.every, config, sequences)
    save_every = steps_between(config.checkpoint.every, config, sequences)
    held_out_tokens = prepared.eval.token_count if prepared.eval is not None else 0
    generates, best = bool(config.eval.samples or config.eval.exact_match), config.eval.keep_best
    course = Course(steps, resumed or 0, evaluate_every, save_every, held_out_tokens, generates, best)
    metrics = metrics_of(
        config, run_folder, world, course, [Callbacks(callbacks, training)] if training else []
    )
    exporter = exporter_of(
        config, model.whole, world, pieces=model.parallel.own_pieces, dtype=model.spec.compute_dtype,
        tokenizer=inputs.tokenizer, stop_ids=inputs.encoder.stop_ids,
    )  # fmt: skip
    stop = StopRequest(enabled=config.checkpoint.save_on_signal, say=metrics.log_line)
    run = Run(
        folder=run_folder,
        world=world,
        steps=steps,
        loader=load(),
        passes=model.passes,
        optimizer=model.optimizer,
        as_pieces=model.pieces,
        seed=config.train.seed,
        learning_rate=schedule_of(config, steps),
        max_grad_norm=config.train.max_grad_norm,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
        evaluation=evaluation_of(config, model, inputs, run_folder, stop),
        evaluate_every=evaluate_every,
        keep_best=config.eval.keep_best,
        early_stopping=config.eval.early_stopping,
        noise_every=config.log.gradient_noise_scale,
        checkpoints=checkpoints_of(config, world, run_folder, metrics),
        checkpoint_every=save_every,
        metrics=metrics,
        meter=Meter(world, model.memory(advice=partial(out_of_memory, config, world.layout, gpus))),
        flops=flops_of(model.census, seq_len, ranks=world.size // world.data_ranks),
        exporter=exporter,
        data_sentences=partial(stream_sentences, prepared),
        stop=stop,
        claim=claim,
        training=training,
    )
    if resumed is not None:
        notices += filter(None, [rate_change(run_folder, resumed, steps, run.learning_rate)])
        restore(run, resumed)
        run.loader = load(run.progress.data)
    notices += length_sentences(config, sequences, steps, resumed)
    announce(config, run, model, prepared, resumed, [*sentences(prepared.stats), *notices])
    return run


def metrics_of(
    config: Config, folder: RunDir, world: World, course: Course, more: Sequence[Tracker]
) -> Metrics:
    """The run's rows and their trackers, by the `log` settings. course: the steps to come; more: trackers."""
    log, directory = config.log, config.log.textfile_directory
    return Metrics.open(
        folder,
        log.to,
        rank=world.rank,
        every=log.every,
        course=course,
        world=world.size,
        device=world.device.type,
        memory=log.memory,
        peak_flops_per_second=peak_flops(world.device, config.train.precision, datasheet_flops),
        settings=output.settings(config, folder),
        labels=Labels(log.project, log.name, log.tags, log.group, expanded(directory) if directory else None),
        more=more,
    )


def checkpoints_of(config: Config, world: World, run_folder: RunDir, metrics: Metrics) -> Checkpoints:
    """The run's checkpoints, by the `checkpoint` settings; what they report is printed."""
    return Checkpoints(
        run_folder.checkpoints,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.async_save,
        process_group=world.checkpoint_group,
        report=metrics.log_line,
    )


def announce(
    config: Config, run: Run, model: RankModel, prepared: Prepared, resumed: int | None, notices: list[str]
) -> None:
    """Write the run row, and print what a user must know before the first step; only rank 0 does both.

    Every rank calls it. resumed: step of the checkpoint that the run resumes from, None for a new run.
    notices: sentences to print.
    """
    metrics, export = run.metrics, run.exporter
    notices += untrained_sentences(model.spec, model.whole, prepared.train, export.tokenizer, export.stop_ids)
    rate, spanned = rate_in_words(config), config.train.lr_decay_steps or run.steps
    settings = resolve.run_settings(config) | {"learning_rate": rate, "schedule_steps": spanned}
    metrics.start(**run_row(settings, run, model, prepared, resumed))
    if sentence := caution(config.train.precision, config.train.optimizer):
        metrics.log_line(sentence)
    about_model = filter(
        None,
        (
            beyond_tested(model.whole),
            parts_kept(model.whole),
            router_sentence(model.whole, model.passes.balance),
            *method_notes(config, model.census, any(experts_of(model.whole))),
            EMULATED if PRECISIONS[config.train.precision].fp8 and run.world.device.type == "cpu" else "",
        ),
    )
    for sentence in (*resolve.override_sentences(config.model), *about_model, *notices):
        metrics.log_line(sentence)
    if model.added_embeddings:
        metrics.log_line(
            f"{counted(model.added_embeddings, 'token')} of the tokenizer had no embedding: new ones start "
            "from the mean of the others."
        )
    if resumed is not None:
        metrics.log_line(f"Going on from the checkpoint of step {resumed} in {run.folder.path}.")


def evaluation_of(
    config: Config, model: RankModel, inputs: Inputs, run_folder: RunDir, stop: StopRequest
) -> Evaluation:
    """Evaluation by the `eval` settings, which `stop` ends; samples go to run_folder."""
    return Evaluation(
        parallel=model.parallel,
        tokenizer=inputs.tokenizer,
        dataset=inputs.prepared.eval,
        micro_batch_size=model.parallel.world.layout.micro_batch_size,
        max_new_tokens=config.eval.max_new_tokens,
        at_start=config.eval.at_start,
        samples=config.eval.samples,
        exact_match=config.eval.exact_match,
        stop_ids=inputs.encoder.stop_ids,
        folder=run_folder,
        objective=model.passes.objective,
        stop=stop,
    )


def exporter_of(config: Config, model: PreTrainedModel, world: World, **parts: Any) -> Exporter:
    """The exporter of a run, or of one whole model; of an adapter if it trains one.

    model: the whole one, its parameters may be on meta. parts: pieces, dtype, tokenizer and stop_ids, as
    Exporter has them.
    """
    lora, base = config.lora, config.model
    named = [model.get_submodule(path) for path in modules_named(model, config.modules_to_save)]
    adapter = {
        **lora.model_dump(exclude={"r", "target_modules"}),
        "lora_rank": lora.r,
        "modules_to_save": config.modules_to_save,
        # Added rows, which are trained.
        "embeddings": any(table.weight.requires_grad and table not in named for table in tables(model)),
        "overrides": base.overrides,
        "revision": base.revision,
        "quantised": config.quantise,
    }
    return Exporter(
        model=model,
        world=world,
        base_name=absolute(base.name),
        base_digest=base_digest_of(config) if world.main else None,
        adapter=adapter if config.adapts else None,
        recipe=resolve.recipe(config),
        push_to=config.hub.push_to,
        private=config.hub.private,
        **parts,
    )
