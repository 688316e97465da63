"""Words of a command line that no command can take."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from golden import refuses

from meshtune import config
from meshtune.api.evaluate import evaluated
from meshtune.api.generate import generate
from meshtune.commands.bench import bench
from meshtune.commands.dryrun import dryrun
from meshtune.commands.env import env
from meshtune.commands.export import export
from meshtune.commands.plan import compare, explain, plan
from meshtune.commands.plan import export as export_plan
from meshtune.commands.report import report
from meshtune.errors import UserError
from meshtune.plan.cluster import sizes_of

NOT_UTF8 = os.fsdecode(b"a\xff")


def test_a_prompt_that_is_not_utf8_is_named() -> None:
    with refuses(UserError):
        generate(None, ["fine", NOT_UTF8])


def test_a_temperature_that_is_nearly_zero_is_refused() -> None:
    with refuses(UserError):
        generate(None, ["fine"], temperature=1e-320)


def test_a_models_name_is_no_markup(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    folder = tmp_path / "[" / "b]m"
    LlamaConfig(num_hidden_layers=1).save_pretrained(folder)
    env(model=str(folder))
    assert "b]m" in capsys.readouterr().out.replace("\n", "")


NOBODY = "~nosuchuser/x"


@pytest.mark.parametrize(
    "run",
    [
        lambda run: evaluated(NOBODY, []),
        lambda run: env(model=NOBODY),
        lambda run: report([Path(NOBODY)]),
        lambda run: export(Path(NOBODY), run / "to"),
        lambda run: export(run, Path(NOBODY)),
        lambda run: export_plan("megatron", ["model.name=llama-3.1-8b"], to=Path(NOBODY)),
        lambda run: plan(["model.name=llama-3.1-8b"], plot=Path(f"{NOBODY}.png")),
        lambda run: dryrun(["model.name=llama-3.1-8b"], plot=Path(NOBODY)),
        lambda run: bench(["model.name=llama-3.1-8b"], profile=Path(NOBODY)),
    ],
    ids=[
        "target", "env --model", "report", "export", "export to", "plan --to", "plan --plot", "dryrun --plot",
        "bench --profile",
    ],
)  # fmt: skip
def test_a_user_who_does_not_exist_is_named(run: Callable[[Path], object], tmp_path: Path) -> None:
    with refuses(UserError):
        run(tmp_path)


@pytest.mark.parametrize("words", ["8,0", "8,1000001", "9" * 5000, "x"])
def test_numbers_of_gpus_are_bounded(words: str) -> None:
    with refuses(UserError):
        sizes_of(words, config.load(None, ["model.name=x"]))


@pytest.mark.parametrize(
    "run",
    [
        lambda words: explain(words[0], ["model.name=llama-3.1-8b"]),
        lambda words: compare(words[0], ["model.name=llama-3.1-8b"]),
        lambda words: dryrun(["model.name=llama-3.1-8b"], layout=words),
        lambda words: bench(["model.name=llama-3.1-8b"], layouts=words),
    ],
    ids=["plan explain", "plan compare", "dryrun", "bench"],
)
def test_an_option_that_names_no_layout_is_refused(run: Callable[[list[str]], object]) -> None:
    with refuses(UserError):
        run([","])


@pytest.mark.parametrize(
    "run",
    [
        lambda file: dryrun(["model.name=llama-3.1-8b"], plot=file),
        lambda file: bench(["model.name=llama-3.1-8b"], profile=file),
    ],
    ids=["dryrun", "bench"],
)
def test_a_file_is_no_folder_to_write_into(run: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "traces"
    file.touch()
    with refuses(UserError):
        run(file)
