"""Check that scripts, tests and files named in the pages exist, and CITATION.cff against the package."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import meshtune

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md")),
         *sorted(ROOT.glob("validation/**/*.md"))]  # fmt: skip
COMMAND = re.compile(r"(?:python|pytest) ((?:benchmarks|validation|scripts|tests)/[\w./-]+)")
OPTION = re.compile(r"python ((?:benchmarks|validation)/\w+\.py)([^`\n]*)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in COMMAND.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in LINK.findall(text) if not (page.parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_a_page_gives_to_a_script_are_in_it(page: Path) -> None:
    for script, options in OPTION.findall(page.read_text(encoding="utf-8")):
        source = (ROOT / script).read_text(encoding="utf-8")
        for name in re.findall(
            r"^(?:import|from) (\w+)", source, re.M
        ):  # its options may be another script's
            beside = (ROOT / script).with_name(f"{name}.py")
            source += beside.read_text(encoding="utf-8") if beside.exists() else ""
        unknown = [option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in source]
        assert not unknown, script


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"]) == ("meshtune", meshtune.__version__)
    assert citation["license"] == "Apache-2.0"


def test_the_layers_on_the_map_of_the_code_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    listed = [line.strip() for line in page[page.index("   cli\n") :].partition("```")[0].splitlines()]
    assert listed == contracts["contracts"][0]["layers"]


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in ROOT.glob("docs/*.md") if f"](docs/{page.name})" not in readme] == []


# A generated page names its script in its head (coming-from.md above its tables); parts have begin and end.
GENERATED = re.compile(r"(?:wrote|writes) this page|<!-- (?:Written|What follows is written) by `")
GENERATED_PART = re.compile(r"<!-- (?:begin|results).*?<!-- end[^>]*>|<!-- meshtune [^>]*>", re.DOTALL)


def hand_written(page: Path) -> str:
    """Text of a page without what scripts write."""
    text = page.read_text(encoding="utf-8")
    marked = GENERATED.search(text)
    return GENERATED_PART.sub("", text[: marked.start()] if marked else text)


def test_pages_are_short() -> None:
    words = {page.name: len(hand_written(page).split()) for page in ROOT.glob("docs/*.md")}
    assert words["planning.md"] <= 1_600 and words["memory.md"] <= 2_500
    assert sum(words.values()) <= 41_340
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
