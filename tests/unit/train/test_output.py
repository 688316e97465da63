"""The table of output.py: which folder a run writes when `output` holds one; how a run is replaced."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from golden import refuses, says
from ranks import run_ranks

from meshtune import config
from meshtune.api import output
from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.train import folder

Settings = Callable[..., list[str]]
Make = Callable[..., RunDir]
LEARNING_RATE = "train.learning_rate=2e-3"


@pytest.fixture
def make(settings: Settings, tmp_path: Path) -> Make:
    """Function(*overrides, finished=None, early=False) that makes a run of 9 steps in the run folder."""

    def made(*overrides: str, finished: int | None = None, early: bool = False, name: str = "run") -> RunDir:
        run = RunDir(tmp_path / name)
        length = () if any("num_epochs" in word for word in overrides) else ("train.max_steps=9",)
        wanted = config.load(None, settings("train.max_steps=null", *length, *overrides))
        output.begin(run, wanted, "layout: mb1-ga4\n", None).__exit__()
        run.append({"kind": "run", "total_steps": 9})
        run.append({"kind": "train", "step": finished or 5, "loss": 1.0, "learning_rate": 1e-5})
        if finished:
            run.append({"kind": "end", "step": finished, "status": "finished", "early": early})
            run.report_file.touch()
        return run

    return made


@pytest.fixture
def decide(settings: Settings) -> Callable[..., tuple[str, str]]:
    """Function(*overrides, steps=None) -> (name of the folder, how the run starts there)."""

    def decided(*overrides: str, steps: int | None = None) -> tuple[str, str]:
        length = (
            () if any(word.startswith("train.num_epochs") for word in overrides) else ("train.max_steps=9",)
        )
        words = settings("train.max_steps=null", *length, *overrides)
        decision = output.decide(config.load(None, words), steps)
        return decision.run.path.name, decision.start

    return decided


@pytest.mark.ci
def test_an_unfinished_run_of_the_same_settings_is_continued_whatever_output_exists_says(
    make, decide
) -> None:
    make()
    for choice in ("null", "new", "extend", "replace"):
        assert decide(f"output_exists={choice}") == ("run", "continue")


@pytest.mark.ci
@pytest.mark.parametrize("words", [("checkpoint.resume=never",), (LEARNING_RATE,)])
def test_an_unfinished_run_that_can_not_be_continued_follows_output_exists(words, make, decide) -> None:
    make()
    assert decide(*words, "output_exists=new") == ("run-2", "begin")
    assert decide(*words, "output_exists=replace") == ("run", "replace")
    for choice in ("null", "extend"):
        if words == ("checkpoint.resume=never",) and choice == "extend":
            continue  # the settings contradict each other
        with refuses(UserError) as refused:
            decide(*words, f"output_exists={choice}")
        differing = "train.learning_rate is 0.002 here and 0.001 there."
        assert (differing in refused.value.problems) == (words == (LEARNING_RATE,))


@pytest.mark.parametrize(
    "word",
    ["train.optimizer=adamw-8bit", "train.optimizer=adamw-bf16", "train.precision=fp8", "method=qlora"],
)
def test_a_run_of_other_bits_is_refused(word: str, make, decide) -> None:
    make("method=lora")
    with pytest.raises(UserError, match=f"{word.partition('=')[0]} is {word.partition('=')[2]} here and"):
        decide("method=lora", word)


@pytest.mark.parametrize(
    "left", ["nothing", "train", "model", "model/adapter_config.json", "checkpoints/step-5"]
)
def test_a_run_that_did_no_step_leaves_its_folder_free_for_other_settings(
    left: str, make, decide, settings: Settings, tmp_path: Path
) -> None:
    """Its trackers could not start, or the model did not fit."""
    run = RunDir(tmp_path / "run")
    output.begin(run, config.load(None, settings("train.max_steps=9")), "", None).__exit__()
    run.append({"kind": "run", "total_steps": 9})
    if left == "nothing":
        for words in ((), (LEARNING_RATE,), (LEARNING_RATE, "output_exists=new")):
            assert decide(*words) == ("run", "begin")
        return
    if left == "train":
        run.append({"kind": "train", "step": 1, "loss": 1.0})
    else:
        (run.path / left).mkdir(parents=True)
    assert decide() == ("run", "continue")
    with refuses(UserError):
        decide(LEARNING_RATE)


def test_a_run_that_never_resumes_is_told_how_to_go_on(make, decide) -> None:
    make(finished=9)
    with refuses(UserError):
        decide("checkpoint.resume=never")


def test_a_finished_run_is_refused_with_the_three_choices(make, decide, tmp_path: Path) -> None:
    make(finished=9)
    for steps in (None, 9):
        with pytest.raises(UserError) as refused:
            decide(steps=steps)
        (sentence,) = refused.value.problems
        says(sentence)
        assert decide("output_exists=new", steps=steps) == ("run-2", "begin")
        assert decide("output_exists=replace", steps=steps) == ("run", "replace")
        with refuses(UserError):
            decide("output_exists=extend", steps=steps)


def test_the_choices_of_a_run_with_other_settings_name_what_differs(make, decide) -> None:
    make(finished=9)
    with refuses(UserError):
        decide("train.max_steps=12", LEARNING_RATE)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("train.num_epochs=1",), ("train.num_epochs=1",)),
        (("train.num_epochs=1",), ("train.num_epochs=1", "train.max_steps=12")),
        (("train.num_epochs=1",), ("train.num_epochs=1", "train.max_steps=7")),
        (("train.max_steps=9",), ("train.max_steps=9", "train.num_epochs=2")),
        ((), ()),
        (
            ("train.total_tokens=4608", "train.num_epochs=5"),
            ("train.max_steps=null", "train.total_tokens=4500", "train.num_epochs=5"),
        ),
        ((), (LEARNING_RATE,)),
    ],
)
def test_a_finished_run_names_the_settings_that_make_it_longer(before, now, make, decide) -> None:
    make(*before, finished=9)
    with refuses(UserError):
        decide(*now, steps=9)


def test_more_steps_make_a_finished_run_longer_without_asking(make, decide) -> None:
    make(finished=9)
    for choice, expected in (("null", ("run", "extend")), ("extend", ("run", "extend")),
                             ("new", ("run-2", "begin")), ("replace", ("run", "replace"))):  # fmt: skip
        assert decide("train.max_steps=12", f"output_exists={choice}") == expected
    with refuses(UserError):
        decide("train.max_steps=8")


def test_more_epochs_do_too_and_are_counted_once_the_data_is_known(make, decide) -> None:
    make("train.num_epochs=1", finished=9)
    assert decide("train.num_epochs=2") == ("run", "extend")
    assert decide("train.num_epochs=2", steps=18) == ("run", "extend")
    for words in ({"steps": None}, {"steps": 9}):
        with refuses(UserError):
            decide("train.num_epochs=1", **words)
    with refuses(UserError):
        decide("train.num_epochs=1.001", steps=9)
    assert decide("train.max_steps=12") == ("run", "extend")


def test_a_run_of_steps_is_judged_by_epochs_once_the_data_is_known(make, decide) -> None:
    make(finished=9)
    assert decide("train.num_epochs=1") == ("run", "extend")  # perhaps
    with refuses(UserError):
        decide("train.num_epochs=1", steps=7)


def test_a_run_that_stopped_early_goes_on_only_with_more_patience(make, decide) -> None:
    make("eval.every=1", "eval.early_stopping=2", finished=6, early=True)
    patient = ("eval.every=1", "eval.early_stopping=2")
    with refuses(UserError):
        decide("train.max_steps=12", *patient)
    assert decide("train.max_steps=12", "eval.every=1") == ("run", "extend")
    assert decide("train.max_steps=12", "eval.every=1", "eval.early_stopping=3") == ("run", "extend")


def test_a_finished_run_without_a_report_gets_its_report_unless_it_is_to_be_trained_anew(
    make, decide
) -> None:
    make(finished=9).report_file.unlink()
    for choice in ("null", "new", "extend", "replace"):
        assert decide(f"output_exists={choice}") == ("run", "report")
    assert decide("checkpoint.resume=never") == ("run", "report")
    assert decide("checkpoint.resume=never", "output_exists=replace") == ("run", "replace")
    with refuses(UserError):
        decide(LEARNING_RATE)


def test_new_goes_on_with_the_second_run_and_then_takes_a_third_name(make, decide) -> None:
    make(finished=9)
    second = make(name="run-2")
    assert decide("output_exists=new") == ("run-2", "continue")
    second.append({"kind": "end", "step": 9, "status": "finished"})
    second.report_file.touch()
    assert decide("output_exists=new") == ("run-3", "begin")


def test_a_run_of_one_step_is_singular(make) -> None:
    assert output.state_of(make(finished=1)) == "a finished run of 1 step"


def test_a_run_that_goes_on_is_unfinished_until_it_ends_again(make, decide) -> None:
    """Killed in an extension, the run is not taken for a finished one of fewer steps."""
    run = make("train.num_epochs=1", finished=9)
    run.drop_after(9)
    assert decide("train.num_epochs=2") == ("run", "continue")
    assert [row["kind"] for row in run.rows()] == ["run", "train"]


def test_a_runs_own_config_repeats_it_only_in_another_folder(make, tmp_path: Path) -> None:
    run = make("output_exists=replace", finished=9)
    text = run.config_file.read_text()
    assert "`meshtune train config.yaml output=NEW` repeats it" in text
    with refuses(UserError):  # the file does not say replace
        output.decide(config.load(run.config_file))
    decision = output.decide(config.load(run.config_file, [f"output={tmp_path / 'new'}"]))
    assert (decision.run.path, decision.start) == (tmp_path / "new", "begin")


def replaced(run: RunDir) -> folder.Claim:
    return output.begin(run, config.load(run.config_file, ["output_exists=replace"]), "", None, replace=True)


def test_a_replaced_run_is_deleted_only_once_the_new_one_has_done_a_step(make) -> None:
    run = make(finished=9)
    with replaced(run) as claim:
        assert not run.rows() and run.config_file.exists()
        assert len(RunDir(run.replaced).rows("end")) == 1
        run.append({"kind": "train", "step": 1, "loss": 1.0})
        claim.drop_replaced()
    assert not run.replaced.exists() and run.config_file.exists()


@pytest.mark.parametrize("skipped", [False, True])
def test_a_replaced_run_gets_its_folder_back_if_the_new_one_was_killed_before_a_step(
    skipped: bool, make
) -> None:
    run = make(finished=9)
    before = run.metrics_file.read_bytes()
    replaced(run).__exit__()
    if skipped:
        run.append({"kind": "train", "step": 1, "loss": None, "skipped": True})
    assert folder.put_back(run) and not run.replaced.exists()
    assert run.metrics_file.read_bytes() == before
    assert not folder.put_back(run)


def test_a_replaced_run_stays_away_once_the_new_one_has_done_a_step(make) -> None:
    """Killed before the old run is deleted, the new one deletes it with its next step."""
    run = make(finished=9)
    replaced(run).__exit__()
    run.append({"kind": "train", "step": 1, "loss": 1.0})
    assert not folder.put_back(run)
    with replaced(run):  # and a third run replaces the second
        assert [row["step"] for row in RunDir(run.replaced).rows("train")] == [1]


def test_a_run_that_is_being_trained_is_not_replaced(make) -> None:
    run = make(finished=9)
    with folder.Claim(run), refuses(UserError):
        replaced(run)
    assert run.rows("end")


def test_a_link_is_not_renamed(make, tmp_path: Path) -> None:
    link = RunDir(tmp_path / "link")
    link.path.symlink_to(make(finished=9).path)
    with refuses(UserError):
        replaced(link)


@pytest.mark.parametrize(("kept", "said"), [("null", True), ("9", False)])
def test_a_longer_run_says_that_its_learning_rate_jumps_and_how_to_keep_it(
    kept: str, said: bool, make, settings: Settings
) -> None:
    from meshtune.api.resolve import schedule_of

    def rate(*words: str, steps: int) -> Callable[[int], float]:
        return schedule_of(
            config.load(None, settings("train.lr_scheduler=cosine", "train.warmup_steps=0", *words)), steps
        )

    run = make(finished=9)
    last = rate(steps=9)(9)
    run.append({"kind": "train", "step": 9, "loss": 1.0, "learning_rate": last})
    longer = rate(f"train.lr_decay_steps={kept}", steps=18)
    sentence = folder.rate_change(run, 9, 18, longer)
    assert (sentence is not None) == said
    if sentence:
        assert f"was {last:.2g} at step 9 and is {longer(10):.2g} at step 10" in sentence
        says(sentence)
    else:
        assert [longer(step) for step in (9, 10, 18)] == [last] * 3


def test_a_row_that_lacks_the_steps_of_the_schedule_says_nothing_of_the_rate(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    run.append({"kind": "run"})
    run.append({"kind": "train", "step": 1, "loss": 1.0, "learning_rate": 1.0})
    assert folder.rate_change(run, 1, 4, lambda step: 0.5) is None
    run.append({"kind": "run", "total_steps": 9})
    assert folder.rate_change(run, 1, 4, lambda step: 0.5)
    assert folder.rate_change(run, 4, 4, lambda step: 0.5) is None  # nothing is left to train


def test_a_run_keeps_the_day_of_its_start_and_older_runs_go_on_without_one(tmp_path: Path) -> None:
    run, today = RunDir(tmp_path), date.today().isoformat()
    free, pinned = (
        config.load(None, ["model.name=x", *words]) for words in ([], ["data.template_date=2024-02-29"])
    )
    continued = output.Decision(run, "continue")
    run.config_file.write_text(free.to_yaml())  # begun before there was such a setting
    assert output.with_template_date(free, continued).data.template_date == today
    run.config_file.write_text(pinned.to_yaml())
    assert output.with_template_date(free, continued).data.template_date == "2024-02-29"
    assert output.with_template_date(free, output.Decision(run, "begin")).data.template_date == today
    for other in (None, "2026-01-31"):
        trees = [{"data": {"template_date": day}} for day in ("2024-02-29", other)]
        assert len([*output.differences(*trees)]) == (other is not None)
        assert len([*output.differences(*reversed(trees))]) == (other is not None)


@pytest.mark.parametrize("day", ["2026-02-31", "31.01.2026", "2026-1-3"])
def test_a_day_that_the_calendar_lacks_is_refused(day: str) -> None:
    with pytest.raises(UserError, match="template_date"):
        config.load(None, ["model.name=x", f"data.template_date={day}"])


def test_a_machine_that_does_not_see_the_run_folder_is_named_before_models_are_loaded(tmp_path: Path) -> None:
    def checked(folder: Path, blind: bool) -> str:
        rank = dist.get_rank()
        names = {"gethostname": lambda: f"node{rank}", "Path": Blind if blind and rank == 1 else Path}
        with patch.multiple(output, **names):
            try:
                output.check_seen(folder)
            except UserError as error:
                return str(error)
        return ""

    run = tmp_path / "runs" / "sft"
    assert run_ranks(2, checked, run, False, forked=True) == ["", ""] and not [*run.parent.iterdir()]
    said = run_ranks(2, checked, run, True, forked=True)
    assert said[0] == said[1] and "node1 can't see what rank 0 on node0 writes" in said[0]
    run.mkdir()  # it may be what is mounted, with nothing next to it
    run.parent.chmod(0o500)
    assert run_ranks(2, checked, run, False, forked=True) == ["", ""] and not [*run.iterdir()]
    run.parent.chmod(0o700)
    (tmp_path / "file").touch()
    said = run_ranks(2, checked, tmp_path / "file" / "sft", False, forked=True)
    assert said[0] == said[1] and "can't be written on node0" in said[0]


class Blind(type(Path())):
    """Paths of a machine that does not mount the others' folder."""

    def exists(self, **options: bool) -> bool:
        return False


def test_rows_in_a_copy_that_ray_made_are_those_of_the_copy_it_makes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = (tmp_path / "working_dir_files" / f"_ray_pkg_{name}" for name in ("5a08", "03cb"))
    for copy in (before, now):
        (copy / "data").mkdir(parents=True)
        (copy / "data" / "rows.jsonl").write_text("{}\n")
    words = [f"output={tmp_path / 'run'}", "model.name=x", f"data.train={before}/data/rows.jsonl"]
    run, settings = RunDir(tmp_path / "run"), config.load(None, words)
    monkeypatch.chdir(now)
    (source,) = output.at_its_place(settings, run).data.train
    assert source.path == str(now / "data" / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    assert output.at_its_place(settings, run) == settings
