"""Chat templates of other people, read from the installed wheel of TRL; none is copied into the project."""

import importlib.util
from pathlib import Path

NOT_TEXT_ALONE = ("idefics3", "llava_next", "smolvlm", "diffusion_gemma", "vl", "muse_glimmer")


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
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")
