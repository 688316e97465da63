"""The support tables of the docs are what the code says."""

import runpy
from pathlib import Path

import pytest

DOCS = Path("docs/parallelism.md")


@pytest.mark.ci
def test_the_tables_in_the_docs_are_those_that_the_code_gives():
    page = DOCS.read_text(encoding="utf-8")

    made = runpy.run_path("scripts/support_matrix.py")["with_tables"](page)

    assert made == page, "run python scripts/support_matrix.py"
