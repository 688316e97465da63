"""docs/families.md has a section for each kind of refusal, and no result that is a fault of ours."""

import re
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshtune.placement.families import KINDS, PAGE

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "validation"))
import family_page  # noqa: E402

TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


def test_each_kind_has_its_section_with_the_words_of_the_code():
    sections = dict(re.findall(r"^## ([\w-]+)\n\n(.*?) Families: \d+\.$", TEXT, re.M))
    assert sections == KINDS


def test_the_table_has_every_family_of_its_version_and_no_fault():
    table = TEXT[TEXT.index("| model_type |") : TEXT.index("# Kinds of reasons")]
    families = re.findall(r"^\| ([\w-]+) \|", table, re.M)[2:]
    named = set(re.findall(r"\[[\w-]+\]\(#([\w-]+)\)", table))
    assert named <= set(KINDS)
    assert "WRONG" not in table and "traceback" not in table and "?" not in table
    if f"transformers {transformers.__version__} " in TEXT:
        assert families == sorted(families) and set(families) >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("outcomes", "cells"),
    [
        ({"one packed": "right", "one unpacked": "right", "cp2 packed": "right"}, ["✓", "", "", "", "✓"]),
        ({"one packed": "refused", "one unpacked": "right"}, ["✓ unpacked", "", "", "", ""]),
        ({"one packed": "refused", "one unpacked": "refused"}, ["✗ [parts](#parts)"] * 5),
        (
            {"one packed": "right", "one unpacked": "WRONG"},
            ["✓ packed, **WRONG** 2e-01 unpacked", "", "", "", ""],
        ),
    ],
)
def test_a_row_says_what_came_of_each_way(outcomes, cells):
    more = {
        "sentences": ["It is built otherwise. See docs/families.md#parts."],
        "loss": 0.2,
        "norm": 0,
        "gradient": 0,
    }
    found = {"family": "x", "runs": {way: {"outcome": outcome, **more} for way, outcome in outcomes.items()}}
    assert family_page.cells(found) == cells
