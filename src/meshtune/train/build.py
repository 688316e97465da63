"""From settings to the parts of a run. The settings stop here: below, functions take the values they use.

config ─> choice (choose.py) ─> tokenizer, data (inputs.py) ─> model (model.py) ─> run folder ─> Run
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from meshtune.config import Config
from meshtune.data.prepare import Prepared, sentences
from meshtune.data.tokens import id_bound
from meshtune.errors import UserError, expanded
from meshtune.launch.signals import StopRequest
from meshtune.meter.mfu import flops_of, peak_flops
from meshtune.meter.noise_scale import noise_refusals
from meshtune.model.anatomy import left_out_of_loss, parts_kept
from meshtune.model.load import override_sentences, quiet
from meshtune.model.save import check_written
from meshtune.parallel.mesh import World, join
from meshtune.plan.cluster import unused_here
from meshtune.plan.hardware import datasheet_flops
from meshtune.precision import PRECISIONS
from meshtune.rundir import RunDir
from meshtune.train import output
from meshtune.train.callbacks import Callback, Callbacks, Hooks, Training
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.choose import Choice, choose_together, device_of, gpus_of, out_of_memory, prediction
from meshtune.train.dashboards import Labels
from meshtune.train.evaluate import Evaluation
from meshtune.train.export import exporter_of, try_repository
from meshtune.train.inputs import Inputs, first_texts, inputs_of, loader_of, steps_of, stream_sentences
from meshtune.train.loop import Run, restore, seed_dropout
from meshtune.train.loss import TokenLoss, check_same
from meshtune.train.measure import Meter
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec, RankModel, rank_model
from meshtune.train.run_row import run_row
from meshtune.train.self_check import beyond_tested
from meshtune.train.trackers import Metrics, tracker_problems
from meshtune.train.untrained import position_sentences, untrained_sentences
from meshtune.train.updates import (
    course_of,
    length_sentences,
    rate_in_words,
    schedule_of,
    steps_between,
)
from meshtune.units import counted

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
    if problems := tracker_problems(config.log.to):
        raise UserError(problems)
    device = device_of(config.train.device)
    choice = choice or choose_together(config)
    if config.log.gradient_noise_scale and (
        problems := noise_refusals(choice.layout, token_loss=hooks.loss is not None)
    ):
        raise UserError(problems)
    world = join(choice.layout, device)
    torch.manual_seed(config.train.seed)
    quiet()
    inputs = inputs_of(config)
    if world.main and inputs.encoder.added:  # else the result could not be prompted as it was trained
        check_written(inputs.tokenizer, first_texts(inputs))
    if config.hub.push_to and world.main:  # after the data: a refused file leaves no empty repository
        try_repository(config.hub.push_to, private=config.hub.private)
    model = rank_model(
        model_spec(config, choice.attention, device.type, embeddings=id_bound(inputs.tokenizer)),
        world,
        optimizer=optimizer_spec(config),
        tokens_per_sequence=config.data.seq_len,
        token_loss=TokenLoss(hooks.loss) if hooks.loss else None,
    )
    seed_dropout(world, config.train.seed)
    return assemble(config, model, inputs, claimed, hooks.callbacks)


def assemble(
    config: Config, model: RankModel, inputs: Inputs, claimed: Claimed, callbacks: Sequence[Callback]
) -> Run:
    """Claim the run folder, put the parts together, and restore the newest good checkpoint, if there is one.

    Every rank calls it. model, inputs: of the config. claimed: see `build`. Raises UserError as
    `claim_together`, and for trackers that can't start.
    """
    prepared, world, steps = inputs.prepared, model.parallel.world, steps_of(config, inputs.prepared.train)
    gpus = gpus_of(world.device)
    notices = position_sentences(config, model.whole, model.parallel.anatomy, prepared)
    notices += unused_here(config, world.size, gpus)
    run_folder, resumed, claim = claim_together(
        config, model, steps, notices.append, prepared.train.label_share
    )
    claimed(run_folder)
    training = Training(run_folder.path, steps) if callbacks else None
    metrics = Metrics.open(
        run_folder,
        config.log.to,
        rank=world.rank,
        every=config.log.every,
        course=course_of(config, prepared, steps, resumed or 0),
        world=world.size,
        device=world.device.type,
        memory=config.log.memory,
        peak_flops_per_second=peak_flops(world.device, config.train.precision, datasheet_flops),
        settings=output.settings(config, run_folder),
        labels=labels_of(config),
        more=[Callbacks(callbacks, training)] if training else (),
    )
    exporter = exporter_of(
        config, model.whole, inputs.tokenizer, inputs.encoder, pieces=model.parallel.own_pieces, world=world,
        dtype=model.spec.compute_dtype,
    )  # fmt: skip
    run = Run(
        folder=run_folder,
        world=world,
        steps=steps,
        loader=loader_of(config, prepared.train, world.layout, world.data_rank),
        passes=model.passes,
        optimizer=model.optimizer,
        as_pieces=model.pieces,
        seed=config.train.seed,
        learning_rate=schedule_of(config, steps),
        max_grad_norm=config.train.max_grad_norm,
        max_nonfinite_steps=config.train.max_nonfinite_steps,
        evaluation=evaluation_of(config, model, inputs, run_folder),
        evaluate_every=steps_between(config.eval.every, config, prepared.train),
        keep_best=config.eval.keep_best,
        early_stopping=config.eval.early_stopping,
        noise_every=config.log.gradient_noise_scale,
        checkpoints=checkpoints_of(config, world, run_folder, metrics),
        checkpoint_every=steps_between(config.checkpoint.every, config, prepared.train),
        metrics=metrics,
        meter=Meter(world, model.memory(advice=partial(out_of_memory, config, world.layout, gpus))),
        flops=flops_of(model.census, config.data.seq_len, ranks=world.size // world.data_ranks),
        exporter=exporter,
        data_sentences=partial(stream_sentences, prepared),
        stop=StopRequest(enabled=config.checkpoint.save_on_signal),
        claim=claim,
        training=training,
    )
    if resumed is not None:
        notices += filter(None, [output.rate_change(run_folder, resumed, steps, run.learning_rate)])
        restore(run, resumed)
        run.loader = loader_of(config, prepared.train, world.layout, world.data_rank, run.progress.data)
    notices += length_sentences(config, prepared.train, steps, resumed)
    announce(config, run, model, prepared, resumed, [*sentences(prepared.stats), *notices])
    return run


def labels_of(config: Config) -> Labels:
    """How the run's trackers file it, by the `log` settings."""
    log, directory = config.log, config.log.textfile_directory
    return Labels(log.project, log.name, log.tags, log.group, expanded(directory) if directory else None)


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
    notices += untrained_sentences(config, model.whole, prepared.train, export.tokenizer, export.stop_ids)
    metrics.start(**run_row(config, run, model, prepared, resumed))
    metrics.log_line(f"Learning rate: {rate_in_words(config)}.")
    if caution := PRECISIONS[config.train.precision].caution:
        metrics.log_line(caution)
    about_model = filter(
        None, (beyond_tested(model.whole), parts_kept(model.whole), left_out_of_loss(model.whole))
    )
    for sentence in (*override_sentences(config.model), *about_model, *notices):
        metrics.log_line(sentence)
    if model.added_embeddings:
        metrics.log_line(
            f"{counted(model.added_embeddings, 'token')} of the tokenizer had no embedding: new ones start "
            "from the mean of the others."
        )
    if resumed is not None:
        metrics.log_line(f"Going on from the checkpoint of step {resumed} in {run.folder.path}.")


def claim_together(
    config: Config,
    model: RankModel,
    steps: int,
    report: Callable[[str], None],
    label_share: float | None,
) -> tuple[RunDir, int | None, output.Claim | None]:
    """(The run folder; the step to resume from, None without a checkpoint; the claim, None on other ranks).

    Every rank calls it; the main rank claims the folder, writes config.yaml and plan.yaml, and broadcasts it.
    steps: updates of the whole run. report: called, on the main rank, with a sentence for each damaged
    checkpoint. label_share: as in `prediction`. Raises UserError as folder.choose_folder and folder.begin, if
    the run began with another loss function, and if a rank does not see the folder.
    """
    claim, place, world = None, None, model.parallel.world
    if world.main:
        chosen, resumed = output.choose_folder(config, steps, report)
        if resumed is not None:
            check_same(model.passes.token_loss, chosen.run)
        plan = prediction(config, world.layout, gpus_of(world.device), label_share)
        claim = output.begin(chosen.run, config, plan, resumed, replace=chosen.start == "replace")
        place = chosen.run, resumed
    run_folder, resumed = world.broadcast_object(place)
    missing = [
        rank
        for rank, there in enumerate(world.all_gather_object(run_folder.config_file.exists()))
        if not there
    ]
    if missing:
        raise UserError(
            f"output = {config.output}: ranks {', '.join(map(str, missing[:8]))} don't see the run folder "
            f"{run_folder.path} that rank 0 made; name one on a file system that all machines share."
        )
    return run_folder, resumed, claim


def model_spec(config: Config, attention: str, kernels: str, *, embeddings: int = 0) -> ModelSpec:
    """The model of a config as plain values.

    attention: of Choice, never "auto". kernels: torch's name of the kind of device. embeddings: rows that the
    tokenizer needs; 0: all that there are.
    """
    train = config.train
    return ModelSpec(
        source=config.model.name,
        init=config.model.init,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        overrides=config.model.overrides,
        attention=attention,
        kernels=kernels,
        precision=train.precision,
        reduce_dtype=train.reduce_dtype,
        lora=LoraSpec(**dict(config.lora)) if config.method == "lora" else None,
        freeze=tuple(config.model.freeze),
        embeddings=embeddings,
        label_smoothing=train.label_smoothing,
        neftune_alpha=train.neftune_alpha,
        compile=train.compile,
        seed=train.seed,
    )


def optimizer_spec(config: Config) -> OptimizerSpec:
    train = config.train
    return OptimizerSpec(
        name=train.optimizer, betas=train.adam_betas, eps=train.adam_eps, weight_decay=train.weight_decay
    )


def evaluation_of(config: Config, model: RankModel, inputs: Inputs, run_folder: RunDir) -> Evaluation:
    """Evaluation by the `eval` settings; without held-out data it does nothing. Samples go to run_folder."""
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
        token_loss=model.passes.token_loss,
    )
