"""Wrong values of every setting: each ends in sentences that name the key, and none shows Python."""

import re
from pathlib import Path

import pytest
from cases import cases

from meshtune.config import load
from meshtune.errors import UserError, type_name, written
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


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.max_steps=x y", "train.max_steps = x y: write a whole number."),
        ("train.max_steps=1.5", "train.max_steps = 1.5: write a whole number."),
        ("train.max_steps=0", "train.max_steps = 0: write a number from 1 on."),
        ("train.compile=perhaps", "train.compile = perhaps: write true or false."),
        ("train.adam_betas=[0.9]", "train.adam_betas = [0.9]: write 2 values."),
        ("train.adam_betas=[]", "train.adam_betas = []: write 2 values."),
        (
            "train.precision=8",
            "train.precision = 8: it must be one of fp32, bf16, bf16-pure, fp64.",
        ),
        ("train.reduce_dtype=[fp32]", 'train.reduce_dtype = ["fp32"]: it must be one of fp32, bf16.'),
        ("train.adam_betas=5", "train.adam_betas = 5: write a list, such as [a, b]."),
        ("train.adam_eps=0", "train.adam_eps = 0: write a number above 0."),
        ("checkpoint=5", "checkpoint = 5: write settings of this section, such as {name: value}."),
        ("model.name=[a]", 'model.name = ["a"]: write text, in quotes where YAML reads something else.'),
        ('model.name=""', 'model.name = "": write text that is not empty.'),
        (
            "model.attention=flash_attention_2",
            "model.attention = flash_attention_2: write auto, meshtune, sdpa or eager.",
        ),
        (
            "checkpoint.resume=autos",
            "checkpoint.resume = autos: write auto or never (did you mean auto?).",
        ),
        ("eval.every=often", "eval.every = often: write a number of steps, or of epochs such as 0.5 epoch."),
        (
            "data.where={a: [1]}",
            "data.where.a = [1]: write true or false or a whole number or a number or text, in quotes where "
            "YAML reads something else.",
        ),
        ("cluster={gpus: -1}", "cluster.gpus = -1: write a number from 1 on."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_to_write(override: str, sentence: str) -> None:
    assert problems_of(override) == (sentence,)


UNQUANTISED = "its states are not quantised: more memory, same updates"
LOSS_SCALING = "fp16 needs loss scaling, which meshtune does not do; bf16 has the range of fp32"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("train.optimizer=adamw_torch", "write train.optimizer=adamw."),
        ("train.optimizer=adamw_torch_fused", "write train.optimizer=adamw."),
        ("train.optimizer=torch.optim.AdamW", "write train.optimizer=adamw."),
        ("train.optimizer=paged_adamw_8bit", f"write train.optimizer=adamw ({UNQUANTISED})."),
        ("train.precision=fp16", f"write train.precision=bf16 ({LOSS_SCALING})."),
        ("train.precision=16", f"write train.precision=bf16 ({LOSS_SCALING})."),
        ("train.precision=bfloat16", "write train.precision=bf16."),
        ("method=dora", "write method=lora lora.use_dora=true."),
        (
            "method=qlora",
            "write method=lora (weights are not quantised: the frozen ones take 2 bytes each, in bf16).",
        ),
    ],
)
def test_another_trainers_value_is_answered_with_ours(override: str, remedy: str) -> None:
    setting, _, value = override.partition("=")
    assert problems_of(override) == (f"{setting} = {value}: {remedy}",)
    assert len(problems_of(override, "train.seed=x")) == 2


def test_what_stands_for_another_trainers_value_is_valid() -> None:
    for setting, rows in toml("values").items():
        assert setting in SETTINGS
        for row in rows:
            named = ("adamw", "lion", "adafactor", "muon") if r"\1" in row["write"] else ("",)
            for name in named:
                assert problems_of(*row["write"].replace(r"\1", name).split()) == ()


@pytest.mark.parametrize(
    ("layout", "clause"),
    [
        ("zero3", "'zero3' lacks its number of ranks; write it as in zero3x2."),
        ("dp-mb2", "'dp' lacks its number of ranks; write it as in dp2."),
        ("tp2-mb", "'mb' lacks its number; write it as in mb2."),
    ],
)
def test_a_token_without_its_size_is_answered_with_one(layout: str, clause: str) -> None:
    assert problems_of(f"layout={layout}") == (f"Layout '{layout}': {clause}",)


def test_values_are_shown_as_their_user_writes_them() -> None:
    assert [*map(written, (None, True, [1, "a"], {"a": None}, "x y", "", " x", 1.5))] == [
        "null", "true", '[1, "a"]', '{"a": null}', "x y", '""', '" x"', "1.5"
    ]  # fmt: skip
    assert len(written("x" * 10_000)) == 201
    assert [*map(type_name, (None, True, [], {}, "x", 1, 1.5))] == [
        "null", "true or false", "a list", "an object", "text", "a number", "a number"
    ]  # fmt: skip
