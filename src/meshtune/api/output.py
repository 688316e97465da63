"""Decide which folder a run writes, and whether it begins, continues or replaces another one there.

`output` holds                     output_exists: unset     new          extend       replace
nothing, or a run without a step   begun                    begun        begun        begun
an unfinished run, same settings   continued                continued    continued    continued
an unfinished run, other settings  refused                  next name    refused      replaced
a finished run, asked to be longer extended                 next name    extended     replaced
... stopped only before its report the report is drawn, with every choice
any other finished run             refused                  next name    refused      replaced

Settings in FREE may differ. The next name is the first of runs/x-2, runs/x-3 … that the table says
is begun or continued. checkpoint.resume=never takes every run for one that can't be continued.

The decision is made before the model is loaded, and once more when the folder is claimed (train/folder.py).
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import date
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from socket import gethostname
from tempfile import NamedTemporaryFile
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from meshtune.addresses import public
from meshtune.api.choose import from_first_rank, prediction
from meshtune.config import Config, load
from meshtune.data.example import rows_name
from meshtune.errors import UserError, expanded, written
from meshtune.length import limits
from meshtune.model.files import ADAPTER_CONFIG
from meshtune.model.stored import BASE_DIGEST, FORM, base_digest
from meshtune.rundir import Row, RunDir, aside_pattern
from meshtune.sections import SourceConfig, is_pattern
from meshtune.setting import is_template
from meshtune.train.folder import Claim, set_aside, step_to_resume
from meshtune.train.loss import check_same
from meshtune.train.model import RankModel
from meshtune.train.run_row import gpus_of
from meshtune.units import counted, notice

RAY_COPY = re.compile(r".*/working_dir_files/_ray_pkg_[^/]+/")  # named by the contents of the folder
# Settings that may change when a run resumes. A longer or shorter run continues with the schedule of its new
# length; the other settings do not change what a step computes.
KEPT = ("data.template_date",)  # null: that of the run in the folder, which has none if it is older
FREE = (
    "train.max_steps", "train.total_tokens", "train.num_epochs", "train.lr_decay_steps", "train.device",
    "eval", "checkpoint", "log", "hub", "layout", "cluster", "output", "output_exists", "data.cache",
    "train.step_in_backward", "train.offload", "train.mlp_tile",
)  # fmt: skip


class Decision(NamedTuple):
    """The folder of a run, and how the run starts there."""

    run: RunDir
    start: Literal["begin", "continue", "extend", "replace", "report"]
    line: str | None = None  # on a run that was there before; the first line that the user sees


def decide(config: Config, steps: int | None = None) -> Decision:
    """Choose the folder by the table above; writes nothing.

    steps: updates of the whole run; None: not known yet, then a finished run that may become longer is
    "extend", and one without its report "report". Raises UserError where the table refuses, with the choices
    and the settings that differ, and if `output` is a file or holds something else.
    """
    named = RunDir(expanded(config.output).absolute())
    if named.path.exists() and not named.path.is_dir():
        raise UserError(f"output = {config.output} is a file; name a folder.")
    for run in candidates(named):
        decision = decision_at(run, config, steps, first=run == named)
        if decision is None:
            continue
        if run != named:
            verb = "begins" if decision.start == "begin" else "resumes"
            there = f"{named.path} holds {state_of(named)}"
            return decision._replace(line=f"output_exists=new: {there}; this run {verb} in {run.path}.")
        return decision
    raise AssertionError("candidates never end")


def with_template_date(config: Config, decision: Decision) -> Config:
    """The settings with the day that the chat template writes in a run: where they leave it open, that of the
    run that is resumed, else today's.
    """
    of_run = None
    if decision.start in ("continue", "extend"):
        of_run = load(decision.run.config_file).data.template_date
    day = config.data.template_date or of_run or date.today().isoformat()
    return config.model_copy(update={"data": config.data.model_copy(update={"template_date": day})})


def decision_at(run: RunDir, config: Config, steps: int | None, *, first: bool) -> Decision | None:
    """Decide on one folder; None: the next name is to be tried. first: it is `output` itself."""
    if is_unused(run):
        return Decision(run, "begin")
    if not run.config_file.exists():
        if first:
            raise UserError(f"output = {config.output} is not empty and holds no run; name another folder.")
        return None
    choice, never = config.output_exists, config.checkpoint.resume == "never"
    before, ended = at_its_place(load(run.config_file), run, config), end_of(run)
    differing = list(differences(settings(config), settings(before)))
    if differing and _other_base(config, before) and _base_here(config, run) is None:
        differing.append(
            f"The weights of {config.model.name} are not on this machine and were not compared with the "
            f"run's. If they are the same: `hf download {config.model.name}`, then the run continues."
        )
    continues = not never and not differing
    if ended is None and continues:
        return Decision(run, "continue")
    longer = bool(ended) and not differing and may_be_longer(config, before, ended, steps)
    if longer and continues and choice in (None, "extend"):
        return Decision(run, "extend", f"{run.path} holds {state_of(run)}; this run makes it longer.")
    anew = longer or (never and choice)
    if ended and not differing and not anew and steps is None and not run.report_file.exists():
        return Decision(run, "report", f"{run.path} holds {state_of(run)}; it gets its report.")
    if choice == "new":
        return None
    if choice == "replace":
        return Decision(
            run,
            "replace",
            f"output_exists=replace: {state_of(run)} in {run.path} is replaced; it is kept as {run.replaced} "
            "until the new run has done a step.",
        )
    raise UserError(refusal(run, config, before, differing))


def refusal(run: RunDir, config: Config, before: Config, differing: list[str]) -> list[str]:
    """Sentences on the run that is there, the choices, and the settings that differ.

    before: settings of the run that is there.
    """
    state, ended = state_of(run), end_of(run)
    other = next(other for other in candidates(run) if not other.path.exists())
    never = config.checkpoint.resume == "never"
    own = ["its own settings"] if differing or not ended else []
    resume = ["checkpoint.resume=auto"] if never else []
    needs = " and ".join(own + resume + (to_be_longer(config, before, ended) if ended else []))
    longer = f"extend it (with {needs} it is made longer)" if ended else f"resume it (with {needs})"
    if differing and not ended:
        state += " with other settings"
    if never:
        state += ", and checkpoint.resume=never keeps it from resuming"
    asked = f" output_exists={config.output_exists} can't resume it." if config.output_exists else ""
    return [
        f"{run.path} holds {state}.{asked} Choose: another `output`; output_exists=new, which writes "
        f"{other.path}; output_exists=replace, which deletes it once the new run has done a step; "
        f"{from_its_weights(run, other)}or {longer}.",
        *differing,
    ]


def from_its_weights(run: RunDir, other: RunDir) -> str:
    """The choice to train on from a run's model in the folder `other`; "" where it has none."""
    if not run.model.exists():
        return ""
    model, exported = run.model, ""
    if (run.model / ADAPTER_CONFIG).exists():
        model = run.path.with_name(f"{run.path.name}-merged")
        exported = f" after `meshtune export {run.path} {model} --merge`"
    return f"model.name={model} output={other.path}{exported}, which begins with its weights; "


def to_be_longer(config: Config, before: Config, ended: Row) -> list[str]:
    """Phrases on the settings that let a finished run continue: those that ended it, or would end it here.

    before: settings of the finished run; ended: its last row.
    """
    now, step, early = config.train, ended["step"], ended.get("early")
    needs = ["eval.early_stopping=0, since it stopped early,"] if early else []
    reached = [limit for limit in limits(config, None) if limit.steps <= step]
    needs += [f"a {limit.setting} above {step * limit.per_step}" for limit in reached]
    if not (reached or now.num_epochs or early):
        needs.append(f"a train.max_steps above {step}")
    ended_there = any(limit.steps == step for limit in limits(before, None))
    if now.num_epochs and not early and not (reached and ended_there):
        needs.append(f"a train.num_epochs above {before.train.num_epochs or now.num_epochs:g}")
    return needs


def state_of(run: RunDir) -> str:
    """Noun phrase on a run that is there: "a finished run of 400 steps"."""
    if ended := end_of(run):
        early = ", stopped early" if ended.get("early") else ""
        return f"a finished run of {counted(ended['step'], 'step')}{early}"
    return "an unfinished run"


def end_of(run: RunDir) -> Row | None:
    """The row that says that the run has finished; None if it has not, or if it continues."""
    finished = [row for row in run.rows("end") if row.get("status") == "finished"]
    return finished[-1] if finished else None


def may_be_longer(config: Config, before: Config, ended: Row, steps: int | None) -> bool:
    """True unless the finished run surely has the steps that the settings ask for.

    before: settings of the finished run; ended: its last row. steps: as `decide` takes it.
    """
    now, then, patience = config.train, before.train, config.eval.early_stopping
    early = ended.get("early")
    if early and 0 < patience <= before.eval.early_stopping:
        return False
    if steps is not None:
        return steps > ended["step"]
    mine, theirs = limits(config, None), limits(before, None)  # steps of an epoch are not known here
    if any(limit.steps <= ended["step"] for limit in mine):
        return False
    if early or (mine and not now.num_epochs):
        return True
    if theirs:
        return (mine, now.num_epochs) != (theirs, then.num_epochs)
    return (now.num_epochs or 1) > (then.num_epochs or 1)


def is_unused(run: RunDir) -> bool:
    """True if nothing is lost when a run begins in the folder: it is missing, is empty but for what a run
    writes before its config.yaml, or holds a run of no step, such as one whose trackers could not start.
    """
    if run.config_file.exists():
        return not (run.rows("train") or run.model.exists() or any(run.checkpoints.glob("[!.]*")))
    first = {run.lock_file.name, aside_pattern(run.config_file)}
    return not run.path.exists() or all(
        any(fnmatch(path.name, pattern) for pattern in first) for path in run.path.iterdir()
    )


def candidates(run: RunDir) -> Iterator[RunDir]:
    """Yield runs/x, runs/x-2, runs/x-3 … without end."""
    yield run
    for number in count(2):
        yield RunDir(run.path.with_name(f"{run.path.name}-{number}"))


def resolved(config: Config, run: RunDir) -> Config:
    """The settings with absolute paths, so that the file works from any folder; output is `run`'s path.

    A learning rate that nobody set stays so: where the file is run with another method, it is that one's.
    output_exists is left out: it says how the run was started, and a file that repeats `replace`
    would delete the run that it describes.
    """

    def absolute_template(name: str) -> str:  # a folder may have the name of a built-in one
        return absolute(name) if not is_template(name) and Path(name).is_file() else name

    paths = _with_paths(config, absolute, absolute_template)
    return paths.model_copy(update={"output": str(run.path), "output_exists": None})


def _with_paths(
    config: Config, change: Callable[[str], str], change_template: Callable[[str], str]
) -> Config:
    """The settings with the paths of model and data changed, and that of the chat template."""

    def sources(before: Iterable[SourceConfig]) -> tuple[SourceConfig, ...]:
        return tuple(source.model_copy(update={"path": change(source.path)}) for source in before)

    template = config.data.chat_template
    data = config.data.model_copy(
        update={
            "train": sources(config.data.train),
            "eval": sources(config.data.eval),
            "chat_template": template and change_template(template),
        }
    )
    model = config.model.model_copy(update={"name": change(config.model.name)})
    return config.model_copy(update={"data": data, "model": model})


def at_its_place(before: Config, run: RunDir, now: Config | None = None) -> Config:
    """The settings of a run that is there, with the paths that its model and data have now.

    Where the run's folder was moved with what is around it, they are where they were as seen from the folder;
    of a copy that Ray made of a folder, in the copy that the process runs in. now: settings that continue
    with it; a model under another name or revision is the same one if its weights are on this machine and are
    those that the run recorded.
    """
    old, here = Path(before.output), run.path.absolute()
    here_in_ray = RAY_COPY.match(f"{Path.cwd()}/")

    def moved(name: str) -> str:
        copied = here_in_ray and RAY_COPY.sub(here_in_ray[0], name)
        if copied and copied != name and Path(copied).exists():
            return copied
        path = Path(name)
        if not path.is_absolute() or path.exists() or not old.is_absolute():
            return name
        place = Path(os.path.normpath(here / os.path.relpath(path, old)))
        return str(place) if place.exists() else name

    placed = _with_paths(before, moved, moved)
    if now is None:
        return placed
    if _other_base(now, placed) and _base_here(now, run):
        own = {"name": absolute(now.model.name), "revision": now.model.revision}
        return placed.model_copy(update={"model": placed.model.model_copy(update=own)})
    return placed


def _other_base(now: Config, before: Config) -> bool:
    """True if the models of two settings have other names or revisions."""
    names = [(absolute(each.model.name), each.model.revision) for each in (now, before)]
    return names[0] != names[1]


def _base_here(now: Config, run: RunDir) -> bool | None:
    """True if a model's weights are those that a run recorded; None if a hub model's are not here."""
    recorded = [row.get(BASE_DIGEST) for row in run.rows("run")][-1:]
    if recorded in ([], [None]) or now.model.init == "random":
        return False
    here = base_digest_of(now, download=False)
    return recorded == [here] if here or expanded(now.model.name).exists() else None


def absolute(name: str) -> str:
    """The absolute path of local files or a pattern; any other name (a hub id, a built-in) unchanged."""
    path = expanded(name)
    pattern = is_pattern(name) and "://" not in name
    return str(path.absolute()) if path.exists() or pattern else name


def settings(config: Config, run: RunDir | None = None) -> dict[str, Any]:
    """The settings as plain values, with absolute paths and the learning rate that is used.

    run: the run's folder; None: `output`.
    """
    values = resolved(config, run or RunDir(config.output)).model_dump(mode="json")
    values["train"]["learning_rate"] = config.learning_rate
    return values


def same_address(now: Any, before: Any) -> bool:
    """True for URLs that differ in nothing but secrets, such as a signature that was renewed."""
    return isinstance(now, str) and isinstance(before, str) and "://" in now and public(now) == public(before)


def differences(now: Any, before: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence for each setting that differs and is not FREE, nor in KEPT and null on a side.

    now, before: settings of this run and of the folder's, as plain values; key: their dotted name, "" for all
    settings. A setting that one of them lacks counts as None.
    """
    if key in FREE or (key in KEPT and None in (now, before)):
        return
    if isinstance(now, dict) and isinstance(before, dict):
        for name in {**before, **now}:
            yield from differences(now.get(name), before.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for number, pair in enumerate(zip(now, before, strict=True)):
            yield from differences(*pair, f"{key}.{number}")
    elif (mine := rows_name(now)) and (theirs := rows_name(before)):  # wherever the data cache is
        if mine != theirs:
            argument = mine.partition("-")[0]
            yield f"{argument} has other rows here ({mine}) than there ({theirs})."
    elif now != before and not same_address(now, before):
        yield f"{key} is {written(now)} here and {written(before)} there."


# The run folder #


HEADER = """\
# Settings of the run in this folder. `meshtune train config.yaml output=NEW` repeats it in the folder NEW;
# without output=NEW the command resumes this run, or refuses if it has finished.
"""


def choose_folder(
    config: Config, steps: int, report: Callable[[str], None], *, download: bool = True
) -> tuple[Decision, int | None]:
    """(What output.decide chooses, the step to resume from); writes nothing.

    The step is None for a run that begins, and for an unfinished one that saved no checkpoint. steps: updates
    of the whole run. report: gets a sentence for each damaged checkpoint that is skipped, for rows that are
    missing, and on a folder that was not named. download: as `check_base` takes it. Raises UserError as
    output.decide, and if the run's checkpoints are all damaged.
    """
    decision = decide(config, steps)
    if decision.line and decision.start != "replace" and str(decision.run.path) != config.output:
        report(decision.line)
    if decision.start in ("begin", "replace"):
        return decision, None
    resumed = step_to_resume(decision.run, report, finished=decision.start == "extend")
    if resumed is not None and decision.start != "report":
        recorded = frozen_base(config, decision.run)
        check_base(config, recorded, str(decision.run.path), named=False, download=download)
    return decision, resumed


def frozen_base(config: Config, run: RunDir) -> str | None:
    """Digest of the base that a run's checkpoints need, since a part of it is frozen; None if it is not
    known, or if they hold all weights.
    """
    return base_of(run) if config.adapts or config.model.freeze else None


def base_of(run: RunDir) -> str | None:
    """Digest of the weights that a run started from; None if it is not known."""
    digests = [row.get(BASE_DIGEST) for row in run.rows("run")]
    return digests[-1] if digests else None


def base_digest_of(config: Config, *, download: bool = True) -> str | None:
    """Digest of the weights that a run starts from, None for random ones. See `base_digest`."""
    model = config.model
    if model.init == "random":
        return None
    cache = expanded(config.data.cache, "data.cache")
    return base_digest(model.name, cache, **model.access, download=download)


def check_base(
    config: Config, recorded: str | None, subject: str, *, named: bool, download: bool = True,
    remedy: str = "model.name=FOLDER (of a hub model, model.revision=REVISION)",
) -> None:  # fmt: skip
    """Compare the base with the weights that `subject`, an adapter or a run, was trained on.

    recorded: their digest; None: not known, as of adapters by peft, and nothing is compared. named: True if
    the user chose the base for this command: another one is then used, with a line on stderr. download: see
    `base_digest`; weights that are not on this machine are not compared, and a line reports it. remedy: what
    names another base.

    Raises UserError for another one where its name was recorded with the adapter or the run.
    """
    model = config.model
    if recorded is None or not recorded.startswith(FORM) or model.init == "random":
        return
    here = base_digest_of(config, download=download)
    if here is None:
        notice(
            f"The weights of {model.name} are not on this machine: whether {subject} was trained on them was "
            "not compared."
        )
    if here in (None, recorded):
        return
    other = f"{subject} was trained on other weights than {model.name} holds now"
    if not named:
        raise UserError(
            f"{other}: they were changed or replaced since. Name a folder with the weights of before: "
            f"{remedy}."
        )
    notice(f"{other}; they are used, since model.name names them.")


def begin(run: RunDir, config: Config, plan: str, resumed: int | None, *, replace: bool = False) -> Claim:
    """Claim the folder, drop the rows of steps that are run again, and write config.yaml and plan.yaml.

    plan: text of plan.yaml; resumed: step of the checkpoint that the run starts from. None: from the
    beginning; an old metrics.jsonl and samples.jsonl are deleted. So is report.html, which would not be of
    this start. replace: set the run that is there aside first. Raises UserError if another process trains
    there, or if the folder can't be renamed.
    """
    if replace:
        set_aside(run)
    claim = Claim(run)
    run.report_file.unlink(missing_ok=True)  # a finished run that has one is not touched again
    if resumed is not None:  # before config.yaml: killed in between, it is an unfinished run of before
        run.drop_after(resumed)
    else:  # rows of a run that was killed before its first checkpoint
        for file in (run.metrics_file, run.samples_file):
            file.unlink(missing_ok=True)
    claim.write({run.config_file: HEADER + resolved(config, run).to_yaml(), run.plan_file: plan})
    return claim


def check_seen(output: Path) -> None:
    """Raise UserError, naming the machines, if one does not see what rank 0 writes into the run folder, or
    where it is to be; every rank calls it, before models and data are loaded.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:

        def file_of_rank_0() -> str:
            folder = output if output.is_dir() else output.parent  # it may itself be what is mounted
            try:
                folder.mkdir(parents=True, exist_ok=True)
                return stack.enter_context(NamedTemporaryFile(prefix=".meshtune-", dir=folder)).name
            except OSError as error:
                raise UserError(
                    f"output = {output} can't be written on {gethostname()}: {error.strerror}."
                ) from error

        file = Path(from_first_rank(file_of_rank_0))
        seen: list[Any] = [None] * ranks
        dist.all_gather_object(seen, (gethostname(), rank == 0 or file.exists()))
    if blind := [*dict.fromkeys(host for host, there in seen if not there)]:
        raise UserError(
            f"output = {output}: {', '.join(blind[:8])} can't see what rank 0 on {seen[0][0]} writes there; "
            "name a folder on a file system that all machines share."
        )


def claim_together(
    config: Config,
    model: RankModel,
    steps: int,
    report: Callable[[str], None],
    label_share: float | None,
    longest: int,
) -> tuple[RunDir, int | None, Claim | None]:
    """(The run folder; the step to resume from, None without a checkpoint; the claim, None on other ranks).

    Every rank calls it; the main rank claims the folder, writes config.yaml and plan.yaml, and broadcasts it.
    steps: updates of the whole run. report: called, on the main rank, with a sentence for each damaged
    checkpoint. label_share, longest: as in `prediction`. Raises UserError as `choose_folder` and `begin`, and
    if the run began with another loss function.
    """
    claim, place, world = None, None, model.parallel.world
    if world.main:
        chosen, resumed = choose_folder(config, steps, report)
        if resumed is not None:
            check_same(model.passes.objective, chosen.run)
        gpus = gpus_of(world.device)
        plan = prediction(config, world.layout, gpus, label_share, longest, model.flash)
        claim = begin(chosen.run, config, plan, resumed, replace=chosen.start == "replace")
        place = chosen.run, resumed
    run_folder, resumed = world.broadcast_object(place)
    return run_folder, resumed, claim
