"""Blocks of pages that begin with `$ meshtune plan` are compared with what the command prints."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "plan_outputs.py"))
PAGE = "```\n$ meshtune plan a.yaml \\\n    cluster.gpus=8\nSpeed  {} tokens/s\n…\n1  zero3x8 …  +2\n```\n"


def test_a_page_with_another_number_than_the_command_prints_is_noticed() -> None:
    ran: list[str] = []

    def repeat(command: str) -> str:
        ran.append(command)
        return "An 8B model\nSpeed 7,327\n   tokens/s\nMemory 3 GiB\n1 zero3x8  75.3  +2\n"

    assert [*SCRIPT["differences"](PAGE.format("7,327"), repeat)] == []
    assert ran == ["meshtune plan a.yaml \\\n    cluster.gpus=8"]
    (sentence,) = SCRIPT["differences"](PAGE.format("7,328"), repeat)
    assert "in this order: Speed 7,328 tokens/s" in sentence


def test_plans_are_shown_by_pages() -> None:
    shown = [command for page in SCRIPT["PAGES"] for command, _ in SCRIPT["BLOCK"].findall(page.read_text())]
    assert len(shown) >= 3
