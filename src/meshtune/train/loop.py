"""The training loop, in the order things happen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from meshtune.data.batch import Batch
from meshtune.data.loader import Loader, ahead
from meshtune.errors import Interrupted, NonFinite, NoProgress, UserError, explained, is_out_of_memory
from meshtune.launch.signals import EvaluationStopped, StopRequest
from meshtune.meter.causes import causes
from meshtune.meter.noise_scale import with_measurement
from meshtune.meter.rows import time_now
from meshtune.parallel.mesh import World
from meshtune.rundir import RunDir, disk_is_full, room
from meshtune.train.step import Counts
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.data.batch import MicroBatch
    from meshtune.model.pieces import Piece
    from meshtune.optim.optimizer import Optimizer
    from meshtune.train.callbacks import Training
    from meshtune.train.checkpoint import Checkpoints
    from meshtune.train.evaluate import Evaluation
    from meshtune.train.export import Exporter
    from meshtune.train.folder import Claim
    from meshtune.train.measure import Meter
    from meshtune.train.step import Outcome, Passes
    from meshtune.train.trackers import Metrics


NO_RUNS = "The checkpoint of step {step} has values that no run has"
UNUSABLE = (
    "Use a checkpoint that this version of meshtune wrote, or set checkpoint.resume=never and "
    "output_exists=new."
)

MOST_STOPS = 3  # by signals, in a row, without a new checkpoint

STEADIER = (
    "Try a lower train.learning_rate, a longer warm-up, or train.precision=fp32; `meshtune data` shows the "
    "rows."
)


@dataclass
class Progress:
    """State besides tensors that is saved with every checkpoint and read back."""

    step: int = 0  # updates done
    data: dict[str, Any] | None = None  # the loader's state
    best_loss: float = math.inf  # of the evaluations so far
    best_step: int = 0
    stale: int = 0  # evaluations since the best one
    evaluated_step: int = 0  # of the newest evaluation that the fields above count
    saved_step: int = 0  # of the newest checkpoint
    # Of all steps done, for the end row: with log.every the rows don't add up to them. None: it continues
    # from a checkpoint that does not have them.
    tokens: int | None = 0
    seconds: float | None = 0.0
    gradient_noise: tuple[float, float] = 0.0, 0.0  # averages of |G|² and tr(Σ)
    expert_bias: list[list[float]] = field(default_factory=list)  # of the routers that a bias balances

    def add(self, tokens: int, seconds: float) -> None:
        """Count the tokens and the seconds of one step."""
        self.tokens = None if self.tokens is None else self.tokens + tokens
        self.seconds = None if self.seconds is None else self.seconds + seconds


@dataclass
class Run:
    """The parts of a run, made by build.build; the loop reads no settings."""

    folder: RunDir
    world: World
    steps: int  # updates of the whole run
    loader: Loader
    passes: Passes
    optimizer: Optimizer
    # State by name -> as pieces of the whole model's tensors.
    as_pieces: Callable[[dict[str, Tensor]], dict[str, Tensor | Piece]]
    seed: int  # of dropout, when a checkpoint is resumed in another layout
    learning_rate: Callable[[int], float]  # number of an update, from 1 -> its rate
    max_grad_norm: float  # 0: gradients are not clipped
    max_nonfinite_steps: int  # in a row, after which the run ends
    evaluation: Evaluation
    evaluate_every: int  # in steps; 0: at the end only
    keep_best: bool  # the exported model is that of the lowest evaluation loss
    early_stopping: int  # evaluations without a lower loss, after which the run finishes; 0: never
    noise_every: int  # in steps: measurements of the gradient noise scale; 0: never
    checkpoints: Checkpoints
    checkpoint_every: int  # in steps; 0: at the end only
    metrics: Metrics
    meter: Meter
    flops: Callable[[Batch], tuple[float, float]]  # of mfu.flops_of: (needed, by the 6N formula), this rank's
    data_sentences: Callable[[], list[str]]  # what was cut, dropped or skipped while streaming
    exporter: Exporter
    stop: StopRequest
    claim: Claim | None  # the main rank's: keeps other processes out of the folder
    training: Training | None = None  # of callbacks; None: there are none
    progress: Progress = field(default_factory=Progress)


def train(run: Run) -> None:
    """Run to the last step and write the model. Raises NonFinite and Interrupted with the last good
    checkpoint on the disk.
    """
    now, nonfinite, meter = run.progress, 0, run.meter
    claim, explained_failures = run.claim or nullcontext(), failures_explained(run)
    with claim, run.metrics, run.stop, meter.running(), explained_failures, saved_on_stop(run):
        if now.step == 0 and run.evaluation.at_start:
            evaluate(run)
        if now.evaluated_step < now.step:
            evaluate_resumed(run)
        batches, first, ended = prepared(run), now.step + 1, None
        run.metrics.training()
        while now.step < run.steps and not ends_early(run):
            # From the end of the last step on, unless something came between: devices may still update.
            started = meter.begin(ended)
            waited = time.perf_counter()
            batch, now.data, columns = next(batches)
            data_seconds = time.perf_counter() - waited

            now.step += 1
            rate, counts = run.learning_rate(now.step), Counts(batch.units, *run.flops(batch), batch.tokens)
            micro_batches = [run.passes.parallel.to_device(each) for each in columns]
            with meter.watching(now.step):
                done = run.passes.step(
                    micro_batches, counts, meter.phase, learning_rate=rate, max_grad_norm=run.max_grad_norm,
                    measure_noise=bool(run.noise_every) and now.step % run.noise_every == 0,
                    mismatched=batch.mismatched,
                )  # fmt: skip
            evaluating = due(now.step, run.evaluate_every, run.steps)
            saving = due(now.step, run.checkpoint_every, run.steps) and done.finite
            if evaluating or saving:
                run.world.synchronize()
            measured = meter.end(
                now.step, micro_batches=batch.micro_batches, loading=data_seconds,
                in_flight=run.passes.in_flight(), stop=run.stop.requested is not None,
            )  # fmt: skip
            stopping = measured.stopping
            if stopping:
                run.world.synchronize()
            ended = time.perf_counter()
            step_seconds = ended - started
            now.add(batch.tokens, step_seconds)
            now.gradient_noise, noise = with_measurement(now.gradient_noise, done.noise)

            run.metrics.train(
                step=now.step, loss=done.loss, grad_norm=done.norm, learning_rate=rate, tokens=batch.tokens,
                label_tokens=batch.label_tokens, step_seconds=step_seconds, data_seconds=data_seconds,
                peak_memory_bytes=measured.peak_bytes, peak_resident_bytes=measured.resident_bytes,
                skipped=not done.finite, warm_up=measured.warm_up,
                flops=known(done.flops), flops_6n=known(done.flops_6n), epoch=run.loader.epochs_at(now.data),
                noise=noise, measured=done.measured,
            )  # fmt: skip
            due_rows = [measured.time, *([done.experts | {"step": now.step}] if done.experts else [])]
            run.metrics.measured(now.step, due_rows, [*measured.memory, *measured.others])
            after_step(run, finite=done.finite, first=now.step == first)
            nonfinite = check_finite(run, done, nonfinite, batch)

            if evaluating or saving:
                ended = None
            if saving and not run.keep_best:  # first: an evaluation that is cut off costs no step
                save(run)
            if evaluating or reason_to_stop(run):
                evaluate(run)
            if saving or stopping or reason_to_stop(run):
                save(run)
            if stopping:
                raise interrupted(run)
        finish(run)


def prepared(run: Run) -> Iterator[tuple[Batch, dict[str, Any], list[MicroBatch]]]:
    """Yield each batch, the loader's state after it, and this rank's columns of it in host memory.

    For CUDA they are made while the device computes.
    """
    made = ((batch, state, run.passes.columns_of(batch)) for batch, state in run.loader)
    return ahead(made) if run.world.device.type == "cuda" else made


def check_finite(run: Run, done: Outcome, nonfinite: int, batch: Batch) -> int:
    """Say that a step was not applied, if it was not. Returns how many were not in a row.

    nonfinite: before this step. Raises NonFinite after those that the run bears, where none was applied, or
    where one spoilt the weights.
    """
    if done.finite:
        return 0
    now, nonfinite = run.progress, nonfinite + 1
    if not done.spoilt:
        run.metrics.log_line(
            f"Step {now.step} was not applied: loss {done.loss}, gradient norm {done.norm}. Batch: "
            f"{batch.origin}."
        )
    none_applied = now.step == run.steps == nonfinite
    if nonfinite >= run.max_nonfinite_steps or none_applied or done.spoilt:
        run.checkpoints.wait()
        end(run, "stopped: loss or gradients were not finite")
        raise NonFinite(spoilt(run, batch) if done.spoilt else stopped_nonfinite(run, nonfinite, batch))
    return nonfinite


def after_step(run: Run, *, finite: bool, first: bool) -> None:
    """Make room for copies of the checkpoints after the first step, and delete the run that this one replaces
    once a step was finite.
    """
    if first and run.checkpoint_every:
        run.checkpoints.reserve(tensors_of(run))
    if finite and run.claim:
        run.claim.drop_replaced()


def known(count: float) -> float | None:
    """The count; None for NaN, which stands for an unknown count in sums over ranks."""
    return None if math.isnan(count) else count


def due(step: int, every: int, last: int) -> bool:
    """True if something happens after `step`: every `every` steps (0: never), and at step `last`."""
    return step == last or (bool(every) and step % every == 0)


def evaluate(run: Run) -> None:
    """Log a held-out evaluation; keep the best step's checkpoint where asked."""
    loss = run.evaluation.run(run.progress.step, run.metrics)
    if loss is not None and run.progress.step:
        count_evaluation(run, loss)


def count_evaluation(run: Run, loss: float) -> None:
    """Add this step's held-out loss to the progress; keep the best step's checkpoint where asked."""
    now = run.progress
    now.evaluated_step = now.step
    if loss < now.best_loss:
        now.best_loss, now.best_step, now.stale = loss, now.step, 0
        if run.keep_best:
            save(run)
    else:
        now.stale += 1


def evaluate_resumed(run: Run) -> None:
    """Count the evaluation of a checkpoint that was saved before it, by its row; without one, evaluate if the
    step is due. Every rank calls it.
    """
    now = run.progress
    rows = run.world.broadcast_object(run.folder.rows("eval") if run.world.main else None)
    if losses := [row["loss"] for row in rows if row["step"] == now.step]:
        count_evaluation(run, math.nan if losses[-1] is None else losses[-1])
    elif due(now.step, run.evaluate_every, run.steps):
        evaluate(run)


def ends_early(run: Run) -> bool:
    """True if the step that was done is to be the last, which is logged."""
    now, reason = run.progress, reason_to_stop(run)
    if run.early_stopping and now.stale >= run.early_stopping:
        reason = (
            f"{counted(now.stale, 'evaluation')} without a lower loss than {now.best_loss:.4f} "
            f"(step {now.best_step})"
        )
    if reason:
        run.metrics.log_line(f"Stopping early after step {now.step}: {reason}.")
    return reason is not None


def reason_to_stop(run: Run) -> str | None:
    """The reason that a callback, which runs on the main rank, gave for stopping; None: it gave none. With
    callbacks every rank calls it.
    """
    return run.world.broadcast_object(run.training.reason) if run.training else None


def save(run: Run) -> None:
    """Save a checkpoint of this step, once."""
    now = run.progress
    if now.saved_step == now.step:
        return
    keep_folder(run)
    now.saved_step = now.step
    now.expert_bias = run.passes.balance.state() if run.passes.balance else []
    run.metrics.writing("a checkpoint")
    started = time.perf_counter()
    values = vars(now) | {"axes": axis_sizes(run.world), "generators": list(random_state(run.world))}
    # Materialised: a parameter that was never stepped is asked for on resuming too.
    run.checkpoints.save(now.step, tensors_of(run, materialise=True), values, protect=protected(run))
    run.metrics.log({"kind": "save", "step": now.step, "seconds": time.perf_counter() - started})


def protected(run: Run) -> set[int]:
    """The steps whose checkpoints are kept besides the newest ones."""
    return {run.progress.best_step} if run.keep_best and run.progress.best_step else set()


def keep_folder(run: Run) -> None:
    """Write a run folder that was deleted or moved away anew, and report it; only the main rank does."""
    if run.claim and run.claim.renew():
        run.metrics.log_line(
            f"The run folder {run.folder.path} was deleted or moved while this run was training. It was made "
            f"anew at step {run.progress.step}; earlier rows and checkpoints are not in it."
        )


def restore(run: Run, step: int) -> None:
    """Put weights, optimizer state and progress where the checkpoint of `step` left them; not the loader.

    Dropout's generators too, if the layout is the same; else they are seeded for `step`. Every rank calls it.
    Raises UserError if the checkpoint is damaged or does not fit.
    """
    values = run.checkpoints.values(step)
    run.progress = progress_of(values, step)
    generators = random_state(run.world)
    with explained(NO_RUNS.format(step=step), UNUSABLE):
        # In another layout, or on another kind of device, dropout can't be drawn as before; nor need it be.
        alike = values["axes"] == axis_sizes(run.world) and len(values["generators"]) == len(generators)
    wanted = run.as_pieces(run.optimizer.state(materialise=True)) | (generators if alike else {})
    run.checkpoints.load(step, wanted)
    run.checkpoints.prune(step, protected(run))
    run.passes.share_tied()
    restore_biases(run, run.progress.expert_bias)
    run.optimizer.publish()
    if alike:
        for name, state in generators.items():
            torch.cuda.set_rng_state(state) if "cuda" in name else torch.set_rng_state(state)
    else:
        seed_dropout(run.world, run.seed, step)


def progress_of(values: Mapping[str, Any], step: int) -> Progress:
    """The progress in the values of the checkpoint of `step`. Raises UserError if they aren't a run's."""
    # From an earlier version's checkpoint.
    absent: dict[str, Any] = {"tokens": None, "seconds": None, "gradient_noise": (0.0, 0.0)}
    absent["expert_bias"] = []
    absent["evaluated_step"] = step  # those versions evaluated before they saved
    with explained(NO_RUNS.format(step=step), UNUSABLE):
        values = absent | {**values}
        now = Progress(**{key: values[key] for key in vars(Progress())})
        if not isinstance(now.data, dict):  # None would begin the data again
            raise ValueError("data isn't a position in the data")
        if any(
            type(n) is not int or n < 0
            for n in (now.step, now.best_step, now.stale, now.saved_step, now.evaluated_step)
        ):
            raise ValueError("a step isn't a whole number")
        now.best_loss = float(now.best_loss)
        squared_norm, variance = now.gradient_noise
        now.gradient_noise = float(squared_norm), float(variance)
        return now


def tensors_of(run: Run, *, materialise: bool = False) -> dict[str, Tensor | Piece]:
    """The tensors of a checkpoint, live, by name: this rank's pieces, and its generators' states.

    materialise: make zeros for optimizer state that no step has made yet.
    """
    return run.as_pieces(run.optimizer.state(materialise=materialise)) | random_state(run.world)


def random_state(world: World) -> dict[str, Tensor]:
    """The states of this rank's random number generators that draw dropout."""
    rank = f".{world.rank}" if world.size > 1 else ""
    states = {f"random.cpu{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda{rank}"] = torch.cuda.get_rng_state()
    return states


def restore_biases(run: Run, biases: list[list[float]]) -> None:
    """Put the biases of routers where a checkpoint has them; [] leaves them as they are."""
    if run.passes.balance and biases:
        run.passes.balance.load_state(biases)


def axis_sizes(world: World) -> list[int]:
    return [axis.size for axis in world.axes]


def seed_dropout(world: World, seed: int, step: int = 0) -> None:
    """Seed torch's generators for dropout: differently on ranks that see other tokens or other blocks,
    equally on tp ranks (their replicated activations must stay equal; tensor.py sets apart what they don't
    share).

    step: of the checkpoint that is resumed; 0: a new run.
    """
    place = world.rank // world.tp.size
    torch.manual_seed(hash((seed, place, step)) if place or step else seed)


def finish(run: Run) -> None:
    """Write model/: the last step's weights, or the best evaluation's where asked."""
    now = run.progress
    run.stop.consequence = "all steps are done; the run writes its model and ends"
    run.metrics.writing("the last checkpoint")
    run.checkpoints.wait()
    keep_folder(run)
    steps = now.step
    if run.keep_best and now.best_step not in (0, now.step):
        steps = restore_best(run)
    for sentence in run.data_sentences():
        run.metrics.log_line(sentence)
    run.metrics.writing("the model")
    run.exporter.write(run.folder.model, steps=steps)
    end(run, "finished", early=now.step < run.steps, model_step=steps)
    if sentence := run.exporter.push(run.folder):
        run.metrics.log_line(sentence)


def end(run: Run, status: str, **facts: Any) -> None:
    """Log why the run was slow, if it was, and the end row: the time, the step, what ended the run, and the
    sums over its steps.
    """
    now = run.progress
    if run.world.main:
        for cause in causes(run.folder.rows()):
            run.metrics.log(cause.row() | {"step": now.step})
    run.metrics.end(
        ended=time_now(), step=now.step, status=status, tokens=now.tokens, seconds=now.seconds, **facts
    )


def restore_best(run: Run) -> int:
    """Put the weights of the best evaluation back; returns the step that the model is of."""
    now = run.progress
    there = run.world.broadcast_object(now.best_step in run.checkpoints.steps())
    if not there or run.checkpoints.problems(now.best_step):
        run.metrics.log_line(
            f"The checkpoint of step {now.best_step}, with the lowest held-out loss {now.best_loss:.4f}, is "
            f"not there or damaged; the model is step {now.step}'s."
        )
        return now.step
    weights = {name: tensor for name, tensor in run.optimizer.state().items() if name.startswith("model.")}
    run.checkpoints.load(now.best_step, run.as_pieces(weights))
    run.passes.share_tied()
    restore_biases(run, progress_of(run.checkpoints.values(now.best_step), now.best_step).expert_bias)
    run.optimizer.publish()
    run.metrics.log_line(
        f"The model is step {now.best_step}'s, with the lowest held-out loss: {now.best_loss:.4f}."
    )
    return now.best_step


@contextmanager
def saved_on_stop(run: Run) -> Iterator[None]:
    """Save where a signal ends an evaluation, and end the run as after a step; resuming makes it up."""
    try:
        yield
    except EvaluationStopped:
        if run.progress.step:
            save(run)
        raise interrupted(run) from None


def interrupted(run: Run) -> Interrupted:
    """The error that ends a run after a signal, once the checkpoint is on the disk. Every rank calls it."""
    run.checkpoints.wait()
    step, signal = run.progress.step, run.stop.requested or "a signal to another rank"
    saved = (
        "The checkpoint is saved; the same command resumes from it."
        if step in run.checkpoints.steps()
        else f"The checkpoint could not be saved. {last_checkpoint(run)}"
    )
    if not step:
        saved = "The same command begins again."
    end(run, f"stopped by {signal}")
    stopped = f"Stopped by {signal} after step {step} of {run.steps}"
    times = run.world.broadcast_object(run.folder.stops_without_progress() if run.world.main else 0)
    if times < MOST_STOPS:
        return Interrupted(f"{stopped}. {saved}")
    return NoProgress(
        f"{stopped}: {times} stops in a row left no new checkpoint, so this ends with exit code "
        f"{NoProgress.exit_code} instead of {Interrupted.exit_code}. Give it more time than a start, a step "
        f"and a checkpoint need. {saved}"
    )


def stopped_nonfinite(run: Run, steps: int, batch: Batch) -> str:
    """Text of the NonFinite error. steps: how many in a row were not applied; batch: that of the last one."""
    return (
        f"Loss or gradients were not finite for {counted(steps, 'step')} in a row, up to step "
        f"{run.progress.step} ({batch.origin}). "
        f"{last_checkpoint(run)} {STEADIER}"
    )


def spoilt(run: Run, batch: Batch) -> str:
    """Text of the NonFinite error where weights were updated with gradients that are not finite."""
    return (
        f"Gradients of step {run.progress.step} were not finite ({batch.origin}), and "
        "train.step_in_backward=true had updated weights with them before their norm was known. "
        f"{last_checkpoint(run)} {STEADIER} Without train.step_in_backward such a step is left out."
    )


def last_checkpoint(run: Run) -> str:
    steps = run.checkpoints.steps()
    return f"The last good checkpoint is step {steps[-1]}." if steps else "No checkpoint was saved yet."


@contextmanager
def failures_explained(run: Run) -> Iterator[None]:
    """Turn what a full disk or memory raises into what to do."""
    with out_of_memory_explained(run), full_disk_explained(run):
        yield


@contextmanager
def full_disk_explained(run: Run) -> Iterator[None]:
    """Turn a write that found no room into what is there and how to continue (a checkpoint that finds none is
    only reported).
    """
    try:
        yield
    except (OSError, SafetensorError, UserError) as error:
        reason = error.__cause__ if isinstance(error, UserError) else error
        if reason is None or not disk_is_full(reason):
            raise
        run.checkpoints.wait()
        raise UserError(
            f"After step {run.progress.step} of {run.steps}: {reason}. {last_checkpoint(run)} "
            f"{room(reason).rstrip('.')} for {run.folder.path}"
            + (
                " (checkpoint.keep=1 needs less); the same command then resumes."
                if run.checkpoints.steps()
                else "; the same command then begins again at step 1."
            )
        ) from error


@contextmanager
def out_of_memory_explained(run: Run) -> Iterator[None]:
    """Turn the allocator's refusal into what was largest and what would fit."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise run.meter.memory.out_of_memory_error(str(error)) from error
