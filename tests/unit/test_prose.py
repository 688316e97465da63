"""Refuse phrases that sound translated, in pages, docstrings and strings: plain field English."""

import re
from pathlib import Path

import pytest
from test_docs import ROOT, hand_written

PHRASES = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|fewer|larger)\w": "isn't a …, has no …",
    r"\balone\b": "only …, without …",
    r"\bbeside\b": "next to, with, compared with",
    r"\b[oO]f (?:which|whom)\b": "a second sentence",
    r"\b(?:so|as) many\b": "the same number of …, or the number",
    r"\bby (?:itself|themselves)\b": "automatically, separately",
    r"\b(?:goes|go|went|going) on\b": "continues, resumes",
    r"\bsays? so\b": "reports it, with a note",
    r"\bno longer\b": "not … any more",
}
ALLOWED: set[str] = set()  # "file: phrase", 30 at most
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def found(text: str) -> list[str]:
    """Phrases in a text, each with the words around it."""
    text = " ".join(text.split())
    return [
        text[max(0, match.start() - 30) : match.end() + 20]
        for phrase in PHRASES
        for match in re.finditer(phrase, text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_phrase_that_sounds_translated(page: Path) -> None:
    assert [text for text in found(hand_written(page)) if f"{page.name}: {text}" not in ALLOWED] == []
