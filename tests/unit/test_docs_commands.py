"""Commands, options and settings in the documentation and the examples exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml

from meshtune import config
from meshtune.cli import app
from meshtune.config import Config
from meshtune.layout import Layout

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")),
         *sorted(ROOT.glob("examples/*.yaml"))]  # fmt: skip
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SETTINGS = {*config.SETTINGS, *(f"layout.{field}" for field in Layout.__dataclass_fields__)}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?:^|(?<=[\s$(]))meshtune +((?:--)?[a-z][\w-]*)(?= |$|\n)([^\n]*)", re.MULTILINE)


class Command(NamedTuple):
    """One command line in a page."""

    name: str
    words: list[str]


def commands(file: Path) -> Iterator[Command]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        blocks = [block for language, block in FENCE.findall(text) if language != "python"]
        text = "\n".join([*blocks, *INLINE.findall(FENCE.sub("", text).replace("\n", " "))])
    else:
        text = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#"))
    for name, rest in CALL.findall(text.replace("\\\n", " ")):
        yield Command(name, re.split(r" {2,}|\s#|[;|)]", rest.strip())[0].split())


def wrong(command: Command) -> Iterator[str]:
    """Yield what the command line does not know of a command."""
    if command.name.startswith("--"):
        return
    if command.name not in COMMANDS:
        yield f"meshtune {command.name}"
        return
    options = {option for parameter in COMMANDS[command.name].params for option in parameter.opts}
    for word in command.words:
        name, equals, _ = word.partition("=")
        setting = equals and re.fullmatch(r"[a-z_.]+", name)
        known = name in SETTINGS or name.startswith("model.overrides.")
        if (word.startswith("-") and name not in options) or (setting and not known):
            yield f"meshtune {command.name} {word}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_commands_options_and_settings_exist(file: Path) -> None:
    assert [problem for command in commands(file) for problem in wrong(command)] == []


def test_commands_are_found_and_wrong_ones_are_noticed(tmp_path: Path) -> None:
    assert sum(len([*commands(file)]) for file in FILES) > 60
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nmeshtune trian run.yaml\nmeshtune plan a.yaml --gpu 8 train.lr=1   # --x\n```\n"
        "and `meshtune env --modle X`"
    )
    found = [problem for command in commands(page) for problem in wrong(command)]
    assert found == [
        "meshtune trian",
        "meshtune plan --gpu",
        "meshtune plan train.lr=1",
        "meshtune env --modle",
    ]


def test_every_command_is_in_the_table_of_commands() -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    table = page[page.index("## Commands") :]
    assert [name for name in COMMANDS if f"`meshtune {name}" not in table and f"`{name}`" not in table] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = {*re.findall(r"(\S+\.md)$", text[text.index("nav:") :], re.MULTILINE)}
    missing = {page.name for page in ROOT.glob("docs/*.md")} - listed
    assert not missing, "add them to nav in mkdocs.yml"


def test_settings_in_yaml_blocks_of_the_pages_exist() -> None:
    """Blocks that begin with a section of a config, such as `data:`."""
    known = {*SETTINGS, *(key.rpartition(".")[0] for key in SETTINGS)}
    found = []
    for page in FILES:
        for language, block in (
            FENCE.findall(page.read_text(encoding="utf-8")) if page.suffix == ".md" else ()
        ):
            if language == "yaml" and block.partition(":")[0] in Config.model_fields:
                for section, tree in (
                    yaml.safe_load(re.sub(r"^layout:.*\n", "", block, flags=re.M)) or {}
                ).items():
                    inner = tree if isinstance(tree, dict) else {}
                    found += [f"{section}.{key}" for key in inner] + [section]
    assert len(found) > 30
    assert [key for key in found if key not in known] == []
