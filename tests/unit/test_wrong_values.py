"""Wrong values of every setting: each ends in sentences that name the key, and none shows Python."""

import re
from pathlib import Path

import pytest
from cases import cases
from golden import says

from meshtune.config import load
from meshtune.errors import UserError, type_name, written
from meshtune.optimizers import OPTIMIZERS
from meshtune.tools.table import toml

SETTINGS = [
    line
    for line in (Path(__file__).parents[1] / "data" / "settings.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
WRONG = ["[1, [2, x]]", "{a: {b: 1}}", "null", "x y", "-1", "1.5", "true", '""', "1e400", ".nan", "[null, x]",
         "2024-01-01", "!!binary aGk=", "!!set {a, b}", "[x, 1, 2]"]  # fmt: skip
PYTHON = re.compile(
    r"\bNone\b|\bTrue\b|\bFalse\b|\['|', '|\('|\{'|"  # reprs of values
    r"\b(str|int|float|dict|tuple|bool|bytes|NoneType)\b(?!\w)|datetime|b'|"  # names of types
    r"Config\b(?! )|\binstance of\b|\bvalid (integer|number|string|boolean|tuple|dictionary|list)\b|"
    r"[Ii]nput should|unable to|Literal|literal\[|validat|pydantic|Value error"
)


def problems_of(*overrides: str) -> tuple[str, ...]:
    """The sentences about these values; none where they are taken."""
    try:
        load(None, ["model.name=some-model", *overrides])
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("value", cases(WRONG, test=3, ci=WRONG))
def test_no_sentence_about_a_wrong_value_shows_python(value: str) -> None:
    wrong = 0
    for setting in SETTINGS:
        for problem in problems_of(f"{setting}={value}"):
            wrong += 1
            assert not PYTHON.search(problem), f"{setting}={value}: {problem}"
            assert setting.split(".")[0] in problem.lower(), problem
            assert problem.endswith((".", "?", ")")) and len(problem) < 1500, problem
    assert wrong > len(SETTINGS) / 4


OURS = [
    "train.max_steps=x y", "train.max_steps=1.5", "train.max_steps=0", "train.compile=perhaps",
    "train.adam_betas=[0.9]", "train.adam_betas=[]", "train.precision=8", "train.reduce_dtype=[fp32]",
    "train.adam_betas=5", "train.adam_eps=0", "checkpoint=5", "model.name=[a]", 'model.name=""',
    "model.attention=flash_attention_2", "checkpoint.resume=autos", "eval.every=often", "data.where={a: [1]}",
    "cluster={gpus: -1}", "layout=zero3", "layout=dp-mb2", "layout=tp2-mb",
]  # fmt: skip
THEIRS = [  # other trainers' values, each answered with ours
    "train.optimizer=adamw_torch", "train.optimizer=adamw_torch_fused", "train.optimizer=torch.optim.AdamW",
    "train.optimizer=paged_adamw_8bit", "train.precision=fp16", "train.precision=16",
    "train.precision=bfloat16", "method=dora", "method=quantize", "method=dpo",
]  # fmt: skip


@pytest.mark.parametrize("override", [*OURS, *THEIRS])
def test_a_wrong_value_is_named_with_what_to_write(override: str) -> None:
    (sentence,) = problems_of(override)
    says(sentence)
    assert len(problems_of(override, "train.seed=x")) == 2


def test_what_stands_for_another_trainers_value_is_valid() -> None:
    for setting, rows in toml("values").items():
        assert setting in SETTINGS
        for row in rows:
            named = OPTIMIZERS if r"\1" in row["write"] else ("",)
            for name in named:
                assert problems_of(*row["write"].replace(r"\1", name).split()) == ()


def test_values_are_shown_as_their_user_writes_them() -> None:
    assert [*map(written, (None, True, [1, "a"], {"a": None}, "x y", "", " x", 1.5))] == [
        "null", "true", '[1, "a"]', '{"a": null}', "x y", '""', '" x"', "1.5"
    ]  # fmt: skip
    assert len(written("x" * 10_000)) == 201
    assert [*map(type_name, (None, True, [], {}, "x", 1, 1.5))] == [
        "null", "true or false", "a list", "an object", "text", "a number", "a number"
    ]  # fmt: skip
