"""`from meshtune import Config, Layout, dryrun, generate, plan, train`: in-memory rows, results, errors."""

import inspect
import io
import pydoc
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import pytest
from golden import refuses, says

import meshtune
from meshtune import Config, Layout, config, generate, plan, sweep, train
from meshtune.api.output import differences
from meshtune.api.settings import config_of, tree_of
from meshtune.api.train import with_rows
from meshtune.data.rows import store_rows
from meshtune.errors import UserError

ROWS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(24)]


@pytest.fixture
def tree(settings: Callable[..., list[str]]) -> Callable[..., dict[str, Any]]:
    """Function(*overrides) -> the settings of a short run without data, as a tree of sections."""

    def of(*overrides: str) -> dict[str, Any]:
        words = settings("data.train=null", "data.eval=null", "train.max_steps=2", *overrides)
        return config.load(None, words).model_dump(mode="json", exclude_unset=True)

    return of


def test_importing_meshtune_imports_nothing_else() -> None:
    code = (
        "import sys, meshtune\n"
        "assert not {'torch', 'transformers', 'pydantic', 'rich'} & sys.modules.keys()\n"
        "assert {'Config', 'train'} <= {*dir(meshtune)}\n"
        "from meshtune import Layout, train, plan\n"
        "assert callable(train) and callable(plan) and train is meshtune.train\n"
        "assert str(Layout(dp_replicate=2)) == 'dp2-mb1-ga1'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_are_no_other_names() -> None:
    with pytest.raises(AttributeError, match="tune"):
        getattr(meshtune, "tune")  # noqa: B009
    stub = Path(meshtune.__file__).with_suffix(".pyi").read_text()
    exported = {*dir(meshtune)} - {*vars(meshtune)} | {"dryrun", "plan", "train"}
    assert exported > {"Config", "Layout"} and all(f" {name}\n" in stub for name in exported)


def test_settings_are_a_config_a_tree_or_a_file(tmp_path: Path) -> None:
    tree = {"model": {"name": "org/name"}, "train": {"max_steps": 3}, "output": tmp_path}
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name: org/name}}\ntrain: {{max_steps: 3}}\noutput: {tmp_path}\n")
    config = config_of(tree)
    assert isinstance(config, Config)
    assert config == config_of(file) == config_of(str(file)) == config_of(config)
    changed = config_of(tree | {"layout": Layout(dp_replicate=2)}, ["train.seed=1"])
    assert changed.layout == "dp2-mb1-ga1" and changed.train.seed == 1
    unset = config.model_dump(exclude_unset=True)
    assert changed.model_dump(exclude_unset=True) == unset | {
        "layout": "dp2-mb1-ga1", "train": {"max_steps": 3, "seed": 1}
    }  # fmt: skip
    assert config_of(config, ["train.seed=1"]).train == changed.train
    dotted = {"model.name": "org/name", "train.max_steps": 3, "output": tmp_path}
    assert config_of(dotted) == config and tree_of(dotted)["model"] == {"name": "org/name"}
    with refuses(UserError):
        config_of({"model": {"name": "org/name"}, "train": {"max_stepz": 3}})


def test_a_config_made_in_python_has_our_sentences() -> None:
    sections: dict[str, Any] = {"model": {"name": "org/name"}, "train": {"lr": 1, "seed": -1}, "modl": 1}
    with pytest.raises(UserError) as caught:
        Config(**sections)
    first, second, third = caught.value.problems
    says(first)
    says(second)
    says(third)


def test_a_package_that_is_a_function_documents_the_function() -> None:
    from meshtune.api.train import train as function

    assert inspect.signature(train) == inspect.signature(function)
    described = pydoc.render_doc(train, renderer=pydoc.plaintext)
    assert "train(config: " in described and "Train as `meshtune train` does" in described
    assert not hasattr(train, "trian")


@pytest.mark.ci
def test_rows_in_memory_train_as_a_file_does(tree: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = train(tree(), train_data=ROWS, eval_data=ROWS[:4])
    assert result.folder == tmp_path / "run" and (result.model / "config.json").exists()
    assert result.summary.status == "finished" and result.summary.steps == 2
    assert [row["step"] for row in result.rows if row["kind"] == "train"] == [1, 2]
    assert (result.folder / "report.html").exists()
    table = train(tree(f"output={tmp_path}/table"), train_data=datasets.Dataset.from_list(ROWS))
    assert table.summary.last_loss == result.summary.last_loss
    answers = generate(result.folder, ["1 + 1 =", "2 + 1 ="], max_new_tokens=2)
    assert len(answers) == 2 and answers[:1] == generate(str(result.model), "1 + 1 =", max_new_tokens=2)


def test_other_rows_are_named_wherever_the_cache_is(tmp_path: Path) -> None:
    def settings_with(rows: Any, cache: str) -> dict[str, Any]:
        return {"data": {"train": [{"path": str(store_rows(rows, "train_data", str(tmp_path / cache)))}]}}

    ours, same = settings_with(ROWS, "one"), settings_with(iter(ROWS), "two")
    assert ours != same and list(differences(ours, same)) == []
    (sentence,) = differences(ours, settings_with(ROWS[1:], "one"))
    assert sentence.startswith("train_data has other rows here (train_data-")


@pytest.mark.ci
def test_a_run_goes_on_with_the_rows_it_began_with_alone(
    tree: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtune.train import loop

    def interrupted(run: Any) -> None:
        run.checkpoints.wait()
        raise UserError("Interrupted.")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish", interrupted)
        with refuses(UserError):
            train(tree(), train_data=ROWS)
    other = [*ROWS[:-1], {"prompt": "2 + 2 =", "completion": " 4"}]
    with refuses(UserError):
        train(tree(), train_data=other)
    result = train(tree("train.max_steps=3"), train_data=ROWS)
    assert result.summary.steps == 3


@pytest.mark.parametrize(
    "rows",
    [
        "rows.jsonl",
        {"prompt": ["a"]},
        [],
        ["a text"],
        [{"text": "a"}, {"text": {1, 2}}],
        [{"text": float("nan")}],
    ],
)
def test_what_is_no_row_is_named(rows: Any, tree: Callable[..., dict[str, Any]]) -> None:
    with refuses(UserError):
        train(tree(), train_data=rows)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_bad_rows_in_memory_are_named_by_their_argument(
    kind: str, tree: Callable[..., dict[str, Any]]
) -> None:
    def given(rows: list[dict[str, Any]]) -> Any:
        return datasets.Dataset.from_list(rows) if kind == "Dataset" else rows

    with refuses(UserError):
        train(tree(), train_data=given([{"question": "a"}]))
    with refuses(UserError) as caught:
        train(tree(), train_data=given([*ROWS, {"prompt": "a", "completion": ""}]))
    assert "/rows/" not in str(caught.value)


def test_rows_take_part_in_the_judgement_of_the_settings(tmp_path: Path) -> None:
    tree = {
        "model": {"name": "x"},
        "data": {"train": "rows.jsonl", "cache": str(tmp_path)},
        "eval": {"every": 5},
    }
    with refuses(UserError):
        config.load(defaults=tree)
    held_out = with_rows(tree, None, ROWS[:2])
    assert config.load(defaults=held_out).data.eval[0].path.startswith(str(tmp_path / "rows" / "eval_data-"))


def test_without_rows_the_arguments_that_take_them_are_named() -> None:
    with refuses(UserError):
        train({"model": {"name": "x"}})
    with refuses(UserError):
        train(Config(model={"name": "x"}, eval={"every": 2}), train_data=ROWS)


def test_a_config_leaves_it_to_its_reader_whether_there_are_held_out_rows(tmp_path: Path) -> None:
    named = Config(model={"name": "x"}, data={"train": "a", "cache": str(tmp_path)}, eval={"every": 2})
    assert config.load(defaults=with_rows(tree_of(named), None, ROWS[:2])).eval.every == 2
    with refuses(UserError):
        config.load(defaults=tree_of(named))
    with refuses(UserError):
        Config(model={"name": "x"}, data={"train": "a"}, eval={"keep_best": True})


def test_rows_beside_files_are_refused(settings: Callable[..., list[str]]) -> None:
    both = config.load(None, settings())
    with refuses(UserError):
        train(both, train_data=ROWS)


@pytest.mark.ci
def test_a_plan_is_values(tiny: Path, tmp_path: Path) -> None:
    eight = {"model": {"name": tiny / "model"}, "cluster": {"gpu": "h100-sxm"}, "data": {"cache": tmp_path}}
    answer = plan(eight, gpus=16)
    assert answer.plan.cluster.gpus == 16 and answer.choice.layout.world == 16
    assert answer.best(3)[0] is answer.choice and answer.choice.seconds.total > 0
    assert plan(eight, gpus=[8, 16]).by_size.keys() == {8, 16}
    peak = answer.plan.memory.peak.max() / 2**30
    within = plan(eight, gpus=16, memory_budget=f"{peak / 2:.2f}GiB").plan
    assert len(within) and within.memory.peak.max() <= peak / 2 * 1.01 * 2**30
    bounded = eight | {"train": {"max_steps": 10}}
    kinds = plan(bounded, gpus="8,8xa100-80", by=timedelta(days=2))
    assert [offer.title for offer in kinds.offers] == ["8 x h100-sxm", "8 x a100-80"]
    assert kinds.bounds.by == plan(bounded, by="2d").bounds.by == 172_800


def test_lines_are_printed_only_on_a_terminal_or_a_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    settings = {"model": {"name": "llama-3.2-1b"}, "cluster": {"gpu": "h100-sxm", "gpus": 2}}
    swept = {"base": settings, "run": "bench", "axes": {"layout": ["zero3x2"]}}
    for number, (stream, is_told) in enumerate(
        ((io.StringIO(), False), (Terminal(), True), (notebook(), True))
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        plan(settings, ["layout=zero3x2"], goal="speed")
        assert ("plan(goal=…) is read in this version" in " ".join(stream.getvalue().split())) == is_told
        sweep(swept, simulate=True, out=tmp_path / str(number))
        assert ("predicting" in stream.getvalue()) == is_told
