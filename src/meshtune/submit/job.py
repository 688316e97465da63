"""The numbers that the files of every engine need: machines, time, margin, price, the command.

    config ──> answer of the plan ──> Job

Seconds of steps, forwards and prices are the plan's. What no plan predicts is assumed (the constants below),
and named in `Job.comments`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from meshtune.api.plan import plan
from meshtune.config import Config, DataConfig
from meshtune.errors import NothingFits, UserError, expanded
from meshtune.length import steps_between
from meshtune.objectives import PROMPTS_AT_ONCE
from meshtune.placement.columns import Columns
from meshtune.plan.answer import Answer, check_bounds, cluster_sizes
from meshtune.plan.changes import silent
from meshtune.plan.cluster import cluster_for
from meshtune.plan.cost import NO_BOUNDS, Bounds, bounds_of, epoch_of, seconds_of, unknown
from meshtune.plan.search import Choice, times
from meshtune.rundir import EXPECTED, RunDir, saved_steps
from meshtune.setting import epochs_of
from meshtune.units import GIB, counted, due_from, duration, human, money

START = 600.0  # seconds until the first step: machines, image, weights, data, compiler
WRITE = 1e9  # bytes/s that all ranks together write a checkpoint with
EVALUATION = 10  # global batches of an evaluation whose rows are not counted
EARLY = 60.0  # seconds by which Slurm may signal earlier
ERROR = 0.5  # error bar of times on processors, as a share
CORES = 4  # of a rank
PROCESS = 8  # GiB of a rank's process in host memory, without what the plan offloads
MOST_MACHINES = 32  # that are tried where cluster.gpus sets no limit
MOUNT = "/storage"  # where an object store is mounted
LOCAL = ("python", "-m", "meshtune", "train")
SET_HERE = re.compile(r"(output|cluster\.(slurm|sky|kubeflow|ray|dstack)(\..*)?)=")  # used by submit only
LAYOUT = re.compile(r"layout(\.\w+)?=")  # a setting of the command line
NAME = 40  # characters, as the strictest engine allows


@dataclass(frozen=True)
class Part:
    """A part of a job's time."""

    name: str
    seconds: float  # expected
    most: float  # the upper end of the error bar; the same where `seconds` is assumed
    how: str  # clause on how it was counted

    def __str__(self) -> str:
        return f"{self.name} {duration(self.most)} ({self.how})"


@dataclass(frozen=True)
class Job:
    """A run as an engine is asked for it; every engine's file is made of these numbers."""

    name: str  # of lower-case letters, digits and dashes, at most 40
    machines: int
    gpus: int  # of each machine; ranks where `processor`
    gpu: str  # kind, of the catalogue
    processor: bool  # no GPU is asked for
    cpus: int  # of each machine
    memory: int  # GiB of host memory of each machine
    layout: str
    parts: tuple[Part, ...]  # of the time that is left
    limit: int  # seconds of one job: all parts, or cluster.time_limit; whole minutes
    jobs: int  # jobs one after the other that the run needs at most
    margin: int  # seconds between the signal and the limit, or of grace
    stop: str  # clause on the parts of `margin`
    price: float | None  # of a GPU-hour; None: not known
    currency: str
    command: tuple[str, ...]  # of each rank, or of each machine
    output: str  # the run folder, as the command has it
    storage: str  # cluster.storage; "": not set
    mount: str  # where `storage` is seen on the machines; "": not set
    environment: Mapping[str, str]  # variables of the command
    why: tuple[str, ...]  # sentences on the machines and the layout
    assumed: tuple[str, ...]  # sentences on what no plan predicts
    least: int | None = None  # machines that it may start with too, or any number between; None: `machines`
    most_jobs: int | None = None  # as `jobs`, on the number of machines that needs most; None: `jobs`

    @property
    def world(self) -> int:
        return self.machines * self.gpus

    @property
    def seconds(self) -> float:
        """Expected time of all that is left."""
        return sum(part.seconds for part in self.parts)

    @property
    def most(self) -> float:
        """Upper end of `seconds`, in seconds."""
        return sum(part.most for part in self.parts)

    def cost(self, seconds: float) -> float | None:
        """Price of that time on all GPUs; None: not known."""
        return None if self.price is None else seconds / 3600 * self.world * self.price

    @property
    def size(self) -> str:
        """Number and kind of machines in words."""
        kind = "rank" if self.processor else f"x {self.gpu}"
        gpus = counted(self.gpus, kind) if self.processor else f"{self.gpus} {kind}"
        return f"{counted(self.machines, 'machine')} of {gpus}"

    def over(self, bounds: Bounds) -> list[float]:
        """Expected time and price as shares of their bounds, as far as they exceed them."""
        pairs = (self.seconds, bounds.by), (self.cost(self.seconds), bounds.budget)
        return [used / most for used, most in pairs if used is not None and most is not None and used > most]

    @property
    def totals(self) -> list[str]:
        """Clauses on the expected time and, where there is one, the price."""
        cost, most = self.cost(self.seconds), self.cost(self.most)
        times = [f"{duration(self.seconds)} expected, at most {duration(self.most)}"]
        if cost is None or most is None:
            return times
        return [*times, f"{money(cost, self.currency)} expected, at most {money(most, self.currency)}"]

    @property
    def several(self) -> str:
        """Clause on the number of jobs, "" for one."""
        return "" if self.jobs == 1 else f", in at most {self.jobs} jobs of {duration(self.limit)}"

    @property
    def comments(self) -> list[str]:
        """Sentences with the numbers, for a file's comments and the terminal."""
        several = f", with {self.machines} machines" if self.least else ""
        time, *price = self.totals
        return [
            f"{self.size}, {self.cpus} CPUs and {self.memory} GiB each. Layout {self.layout}.",
            *self.why,
            f"Time: {time}{self.several}{several}. At most: {', '.join(map(str, self.parts))}.",
            f"A stop has {self.margin} s: {self.stop}.",
            *(f"Price: {clause}." for clause in price),
            *(f"Assumed: {sentence}" for sentence in self.assumed),
        ]

    def facts(self) -> dict[str, object]:
        """The numbers as plain values, for JSON."""
        return {
            **{name: value for name, value in vars(self).items() if name != "parts"},
            "parts": [vars(part) for part in self.parts],
            "seconds": self.seconds, "most_seconds": self.most,
            "cost": self.cost(self.seconds), "most_cost": self.cost(self.most),
        }  # fmt: skip


def job_of(
    config: Config,
    words: Sequence[str] = (),
    *,
    nodes: int | None = None,
    least: int | None = None,
    by: str | None = None,
    budget: float | None = None,
    log: Callable[[str], None] = silent,
    count: Callable[[str], None] = silent,
) -> Job:
    """The job that trains what is left of the config's run.

    words: of the command line, a config file and settings, which the job's command repeats. nodes: machines;
    least: the fewest, where each start may have another number and lays the run out anew. by, budget: bounds
    within which their number is chosen. log, count: as `api.plan.plan` takes them. Raises UserError as that,
    for nodes with bounds, and where time or length is not predicted; NothingFits where no number of machines
    keeps the bounds, or one from least to nodes has no layout.
    """
    bounds = bounds_of(by, budget)
    if nodes and bounds != NO_BOUNDS:
        option = f"--elastic {least}:{nodes}" if least else f"--nodes {nodes}"
        raise UserError(
            f"{option} sets the number of machines, and --by and --budget choose it; leave one out."
        )
    cluster, gpus = cluster_for(config), list[int | str]()
    if nodes and least:
        fixed = config.partial_layout
        if fixed.world is not None:
            raise UserError(
                f"layout = {config.layout} is for {fixed.world} ranks, and --elastic lays the run out for "
                "each number of machines; leave the layout out, or some of it open."
            )
        gpus = [number * cluster.node for number in range(least, nodes + 1)]
    elif nodes:
        gpus = [nodes * cluster.node]
    elif bounds != NO_BOUNDS and config.partial_layout.world is None:
        most = cluster if config.cluster_config.gpus else cluster.of_size(MOST_MACHINES * cluster.node)
        gpus = [*cluster_sizes(most)]
    answer = plan(config, gpus=gpus, log=log, count=count)
    check_bounds([answer.choice.cluster], "speed", bounds)
    answers = [replace(answer, chosen=offer) for offer in answer.offers if offer.choice]
    if least and nodes:
        return elastic(config, answers, words, range(least, nodes + 1))
    if nodes or bounds == NO_BOUNDS:
        return made(config, answers[0], words, f"--nodes {nodes}" if nodes else "by the settings")
    tried = ", ".join(str(one.choice.cluster.gpus) for one in answers)
    rule = "shortest" if budget else "cheapest"
    clause = bounds.clause(cluster.currency, several=True)
    why = f"the {rule} of the runs on {tried} GPUs that are expected to keep the bounds ({clause})"
    jobs = [made(config, one, words, why) for one in answers]
    within = [job for job in jobs if not job.over(bounds)]
    if not within:
        nearest = min(jobs, key=lambda job: max(job.over(bounds)))
        raise NothingFits(
            [
                f"No run on {tried} GPUs is expected to keep the bounds ({clause}). The nearest is on "
                f"{nearest.size}: {', '.join(nearest.totals)}.",
                f"Its time: {', '.join(map(str, nearest.parts))}. Raise the bound, or shorten the run.",
            ]
        )
    return min(within, key=lambda job: job.seconds if budget else job.seconds * job.world)


def elastic(config: Config, answers: Sequence[Answer], words: Sequence[str], machines: range) -> Job:
    """The job of the most machines, with limits that do for each number of them.

    answers: in the order of their machines. Raises NothingFits where one of the numbers has no layout.
    """
    option = f"--elastic {machines[0]}:{machines[-1]}"
    if missing := {*machines} - {answer.choice.cluster.nodes for answer in answers}:
        raise NothingFits(
            f"{option}: no layout fits {' or '.join(map(str, sorted(missing)))} machines; choose other "
            f"numbers, or change train.global_batch_size = {config.global_batch_size}."
        )
    longest = max(stopping(config, answer) for answer in answers)
    *others, most = (made(config, answer, words, option, longest) for answer in answers)
    jobs = [*others, most]
    return replace(
        most,
        least=machines[0],
        limit=max(job.limit for job in jobs),
        most_jobs=max(job.jobs for job in jobs),
        memory=max(job.memory for job in jobs),
        why=(
            *most.why,
            "Each start lays the run out for the machines that it gets.",
            *(f"On {job.size}: {job.layout}, {job.totals[0]}{job.several}." for job in others),
        ),
    )


def made(
    config: Config, answer: Answer, words: Sequence[str], why: str, stop: tuple[int, str] | None = None
) -> Job:
    """The job under the layout that the answer chose.

    why: clause on the number of machines. stop: as `stopping` returns it, of all layouts of an elastic job,
    whose command leaves the layout as the words have it; None: of this answer.
    """
    choice, cluster = answer.choice, answer.choice.cluster
    margin, apart = stop or stopping(config, answer)
    output, environment, moved = places(config)
    parts = parts_of(config, answer, steps_left(config, answer, output))
    writing = answer.workload.checkpoint_bytes / WRITE
    limit, jobs = limit_of(config, sum(part.most for part in parts), margin)
    if jobs > 1:
        _, fewer = limit_of(config, sum(part.seconds for part in parts), margin)
        stops = f"{jobs - 1}, each with a checkpoint in {duration(writing)}"
        parts = (
            *parts[:-1],
            Part("stops", (fewer - 1) * writing, (jobs - 1) * writing, stops),
            Part("start", START * fewer, START * jobs, f"assumed, of {jobs} jobs"),
        )
    fastest = f"the fastest of {counted(len(answer.plan), 'layout')} that fit"
    layout = "the settings'" if config.partial_layout.whole else fastest
    ours = [f"layout={choice.layout}"] if stop is None else [word for word in words if LAYOUT.match(word)]
    storage, each = config.cluster_config.storage or "", cluster.ranks_in_node
    return Job(
        name=re.sub("[^a-z0-9]+", "-", PurePosixPath(output).name.lower())[:NAME].strip("-") or "run",
        machines=cluster.nodes,
        gpus=each,
        gpu=cluster.gpu.name,
        processor=cluster.gpu.processor,
        cpus=CORES * each,
        memory=host_memory(config, answer),
        layout=str(choice.layout),
        parts=parts,
        limit=limit,
        jobs=jobs,
        margin=margin,
        stop=apart,
        price=cluster.price,
        currency=cluster.currency,
        command=(*LOCAL, *repeated(words), *ours, f"output={output}", *moved),
        output=output,
        storage=storage,
        mount=mount_of(storage),
        environment=environment | {EXPECTED: expected_of(parts, choice)},
        why=(
            f"{cluster.title}: {why}. The layout is {layout}.",
            *(sentence for sentence in answer.comparison if "--sort" not in sentence),
        ),
        assumed=(
            f"{duration(START)} until the first step of each job; checkpoints of "
            f"{human(answer.workload.checkpoint_bytes)} written at {WRITE / 1e9:g} GB/s; {CORES} cores and "
            f"{PROCESS} GiB for the process of a rank.",
            *uncounted(config),
        ),
    )


def expected_of(parts: Sequence[Part], choice: Choice) -> str:
    """The predicted time and price, as the run reads them."""
    numbers = {
        "seconds": round(sum(part.seconds for part in parts)),
        "most": round(sum(part.most for part in parts)),
        "gpus": choice.layout.world,
        "price": choice.cluster.price,
        "currency": choice.cluster.currency,
    }
    return json.dumps(numbers, separators=(",", ":"))


def stopping(config: Config, answer: Answer) -> tuple[int, str]:
    """(Seconds in which a run that gets a signal has saved; a clause on their parts). Raises UserError for a
    processor that nobody has measured.
    """
    cluster = answer.choice.cluster
    if not cluster.timed:
        raise UserError(
            f"cluster.gpu={cluster.gpu.name}: the time limit of a job follows from predicted steps, and "
            "nobody has measured this processor: run `meshtune probe --out my-cluster.toml` there, and set "
            "cluster=my-cluster.toml."
        )
    step = answer.choice.seconds.total * (1 + error_of(answer.choice))
    writing = answer.workload.checkpoint_bytes / WRITE
    saved, saving = f"a checkpoint {duration(writing)}", writing
    if config.checkpoint.async_save:  # one that is still being written is waited for first
        saved, saving = f"two checkpoints (one may still be written) {duration(2 * writing)}", 2 * writing
    clause = f"a step {duration(step)}, {saved}, {EARLY:.0f} s in reserve for a signal that comes early"
    return math.ceil(step + saving + EARLY), clause


def error_of(choice: Choice) -> float:
    """Error bar of the predicted times, as a share."""
    return ERROR if choice.accuracy.time is None else choice.accuracy.time


def steps_left(config: Config, answer: Answer, output: str) -> int:
    """Optimizer steps behind the newest checkpoint in the run folder; all for a run that begins anew.

    Raises UserError for a run of unknown length, and for one that has done all its steps.
    """
    if (steps := answer.length.steps) is None:
        raise UserError(unknown(answer.length.missing))
    anew = config.output_exists in ("new", "replace") or config.checkpoint.resume == "never"
    done = [] if anew else saved_steps(RunDir(expanded(output)).checkpoints)[-1:]
    if done and done[0] >= steps:
        raise UserError(
            f"output = {output} has a checkpoint of step {done[0]}, and the run has {steps}: nothing is left "
            "to submit. Raise train.max_steps, or name another output."
        )
    return steps - sum(done)


def parts_of(config: Config, answer: Answer, steps: int) -> tuple[Part, ...]:
    """The parts of the time of `steps` steps."""
    choice, (summary, _) = answer.choice, epoch_of(config)
    error, sequences = error_of(choice), summary and summary.sequences

    def predicted(name: str, seconds: float, how: str) -> Part:
        return Part(name, seconds, seconds * (1 + error), f"{how} ±{error:.0%}")

    step = choice.seconds.total
    parts = [predicted("steps", steps * step, f"{steps:,} of {duration(step)}")]
    if config.data.eval or config.data.eval_split:
        forward = times(answer.workload, choice.cluster, Columns.of([choice.layout]), gradients=False)
        generating, text = answering(config, answer)
        one = held_out(config, answer, sequences) * float(forward.total[0])
        number = happening(config, config.eval.every, steps, sequences) + config.eval.at_start
        how = f"{number} of {duration(one + generating)}"
        if generating:
            how += f", {duration(generating)} of each for {text}"
        parts.append(predicted("evaluations", number * (one + generating), how))
    if before := answer.run.reference_seconds:
        parts.append(predicted("reference", before, "before the first step"))
    writing = answer.workload.checkpoint_bytes / WRITE
    number = saves(config, steps, sequences)
    meanwhile = steps / number * step if config.checkpoint.async_save else 0.0  # seconds of steps
    saving = (number - 1) * max(0.0, writing - meanwhile) + writing
    how = f"{number}, each written in {duration(writing)}"
    how += ", all but the last while steps are done" * (number > 1 and meanwhile >= writing)
    if config.eval.keep_best:
        how += "; eval.keep_best writes one at each evaluation with the lowest loss so far, here all"
    elif 0 < meanwhile < writing and number > 1:
        how += f"; checkpoint.every={math.ceil(writing / step)} waits for none"
    parts.append(Part("checkpoints", saving, saving, how))
    return *parts, Part("start", START, START, "assumed")


def happening(config: Config, every: int | str, steps: int, sequences: int | None) -> int:
    """How often something happens in `steps` steps that is due every `every` of them and at the last one.

    sequences: of an epoch; None: not counted, and the steps are taken for the epochs of the settings.
    """
    if sequences is None and (epochs := epochs_of(every)):
        return math.ceil((config.train.num_epochs or 1) / epochs)
    between = steps_between(every, config, sequences)
    return due_from(1, steps, between)


def saves(config: Config, steps: int, sequences: int | None) -> int:
    """Checkpoints of `steps` steps, also those of evaluations under eval.keep_best, as if each were the best
    so far. sequences: as `happening` takes it.
    """
    intervals = [config.checkpoint.every, *[config.eval.every] * config.eval.keep_best]
    if sequences is None and any(map(epochs_of, intervals)):
        numbers = [happening(config, every, steps, sequences) for every in intervals]
        return sum(numbers) - math.gcd(*numbers) * (len(numbers) > 1)  # those of both
    return due_from(1, steps, *(steps_between(every, config, sequences) for every in intervals))


def uncounted(config: Config) -> list[str]:
    """Sentences on what depends on numbers of rows that are not counted: intervals in epochs, evaluations."""
    summary, reason = epoch_of(config)
    given = (("eval.every", config.eval.every), ("checkpoint.every", config.checkpoint.every))
    texts = [f"{name} = {every}" for name, every in given if epochs_of(every)]
    texts += [f"data.eval_split = {config.data.eval_split:g}"] * (0 < config.data.eval_split < 1)
    number = config.train.num_epochs or 1
    epochs = f"{number:g} epoch{'s' * (number != 1)}"
    said = [f"the run counts as {epochs}, for {' and '.join(texts)}, since {reason}"]
    batches = f"an evaluation of data.eval counts as {EVALUATION} global batches."
    return [*said * bool(texts and not summary), *[batches] * bool(config.data.eval)]


def answering(config: Config, answer: Answer) -> tuple[float, str]:
    """(Seconds in which an evaluation generates its answers, all as long as they may be; a clause on them).

    One rank keeps keys and values; several run the whole text again for each token (train/generate.py).
    """
    prompts = max(config.eval.samples, config.eval.exact_match)
    if not prompts:
        return 0.0, ""
    workload, layout = answer.workload.uncompiled(), answer.choice.layout
    if layout.world == 1:
        rows, tokens, texts = min(prompts, PROMPTS_AT_ONCE), 1, ""
    else:
        rows, tokens = layout.micro_batch_size, math.ceil(workload.document_tokens or workload.seq_len)
        texts = f" in texts of {tokens:,}"
    once = replace(
        layout, micro_batch_size=rows, gradient_accumulation_steps=1, schedule="1f1b", virtual_stages=1
    )
    short = replace(workload, seq_len=tokens, global_batch_size=once.global_batch_size)
    forward = times(short, answer.choice.cluster, Columns.of([once]), gradients=False)
    turns, longest = math.ceil(prompts / (rows * layout.data_ranks)), config.eval.max_new_tokens
    return turns * longest * float(forward.total[0]), f"answers of {longest:,} tokens{texts}"


def held_out(config: Config, answer: Answer, sequences: int | None) -> float:
    """Global batches of one evaluation: EVALUATION of data.eval, whose rows nobody counts.

    sequences: as `happening` takes them.
    """
    split = config.data.eval_split
    if split >= 1:  # rows; a sequence may hold several
        return split / config.global_batch_size
    if config.data.eval:
        return EVALUATION
    batches = (answer.length.steps or 0) / (config.train.num_epochs or 1)  # of an epoch
    if sequences:
        batches = sequences / config.global_batch_size
    return batches * split / (1 - split)


def limit_of(config: Config, seconds: float, margin: int) -> tuple[int, int]:
    """(Seconds of one job, in whole minutes; number of jobs). seconds: of all that is left, at most."""
    text = config.cluster_config.time_limit
    given = f"{text} (as YAML reads a time with colons)" if text and text.isdecimal() else text
    longest = seconds_of(given, "cluster.time_limit = ") if given else math.inf
    limit = 60 * math.ceil((seconds + margin) / 60)
    if limit <= longest:
        return limit, 1
    useful = longest - margin - START
    if useful <= 0:
        raise UserError(
            f"cluster.time_limit = {text}: start, step and checkpoint need {duration(START + margin)}; "
            "use jobs that may take longer, or more machines."
        )
    return int(longest), math.ceil((seconds - START) / useful)


def host_memory(config: Config, answer: Answer) -> int:
    """GiB of host memory of a machine: its ranks, what they offload, and the copy of a checkpoint."""
    choice, cluster = answer.choice, answer.choice.cluster
    rank = PROCESS * GIB + float(choice.memory.host)
    rank += float(choice.memory.peak) if cluster.gpu.processor else 0.0
    copied = answer.workload.checkpoint_bytes / cluster.nodes if config.checkpoint.async_save else 0.0
    return math.ceil((cluster.ranks_in_node * rank + copied) / GIB)


def mount_of(storage: str | None) -> str:
    """Folder where the machines see the storage; "" without one."""
    if storage and "://" in storage:
        return MOUNT
    return str(expanded(storage)) if storage else ""


def places(config: Config) -> tuple[str, dict[str, str], list[str]]:
    """(The run folder, variables, settings of the command) with what is below cluster.storage there."""
    output = str(expanded(config.output))
    if not (mount := mount_of(config.cluster_config.storage)):
        return output, {}, []
    output = output if Path(output).is_absolute() else f"{mount}/{output}"
    default = config.data.cache == DataConfig().cache
    cache = "cache" if default else str(expanded(config.data.cache))
    moved = [] if Path(cache).is_absolute() else [f"data.cache={mount}/{cache}"]
    return output, {"HF_HOME": f"{mount}/hf"}, moved


def repeated(words: Sequence[str]) -> list[str]:
    """The words of the command line without those that the job's command sets."""
    return [word for word in words if not (LAYOUT.match(word) or SET_HERE.match(word))]
