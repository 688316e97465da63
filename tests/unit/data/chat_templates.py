"""Chat templates: those of other people, read from the installed wheel of TRL, and two of our own."""

import importlib.util
import re
from pathlib import Path

OURS = Path(__file__).parent / "own_templates"
NOT_TEXT_ALONE = ("idefics3", "llava_next", "smolvlm", "diffusion_gemma", "vl", "muse_glimmer")
SPECIAL = re.compile(
    r"<[|｜][^<>{}'\"\s]{1,40}[|｜]>|<[a-z_]+\|>|<\|[a-z_]+>|</?start_of_turn>|<end_of_[a-z]+>"
)
STOPS = {  # tokens that generation stops at, where it is another than the first one behind an answer
    "gptoss": ("<|return|>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
}


def folder() -> Path:
    """Raises AssertionError where TRL is not installed: its templates are a part of the tests."""
    spec = importlib.util.find_spec("trl")
    assert spec and spec.submodule_search_locations, "TRL is missing: pip install -e '.[dev]'"
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def names() -> list[str]:
    """Templates of text models, as they were published."""
    files = sorted(file.stem for file in folder().glob("*.jinja"))
    return [
        name
        for name in files
        if not name.endswith("_training")
        and not any(word in name.split("_") or name.startswith(word) for word in NOT_TEXT_ALONE)
    ]


def template(name: str) -> str:
    file = OURS / f"{name}.jinja"
    file = file if file.exists() else folder() / file.name
    return file.read_text(encoding="utf-8")


def special_tokens(text: str) -> list[str]:
    """Tokens that a template writes and a tokenizer of its family has, but for <s> and </s>."""
    return sorted({*SPECIAL.findall(text), "<think>", "</think>"})
