"""What planning needs to know of a model, from its config.json, kept on the disk.

name ──> config.json ──> key ─┬─ hit ──> Known, without torch
                              └─ miss ─> transformers builds it on meta ──> census, traits ──> Known
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meshtune.errors import UserError
from meshtune.model.hub import asking, local
from meshtune.placement.census import Census
from meshtune.placement.rules import Traits
from meshtune.rundir import write_text_atomically

T = TypeVar("T")


@dataclass(frozen=True)
class LoraShape:
    """What of LoRA's settings decides which parameters there are."""

    r: int = 16
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


@dataclass(frozen=True)
class Known:
    """A model in numbers. attention: what model.attention=auto is for it."""

    census: Census
    traits: Traits
    attention: str


def known(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    freeze: tuple[str, ...] = (),
    lora: LoraShape | None = None,
    cache_dir: Path,
    say: Callable[[str], None] = lambda _: None,
) -> Known:
    """The numbers of the causal language model `name`: a hub id, a folder, or a configuration file.

    say: told before what takes seconds. freeze: globs of parameters. They are kept in `cache_dir` by all that
    they depend on; a file there that can't be read is made anew. Of a model that runs code of its own,
    nothing is kept.

    Raises UserError for what is no model, or none that meshtune trains, and as `add_lora` and `freeze`.
    """
    file = _config_file(name, revision)
    key = None if trust_remote_code and _brings_code(file) else _key(file, freeze, lora)
    kept = cache_dir / f"census-{key}.json"
    if key and (found := _read(kept)):
        return found
    say(f"Building {name} without weights to count it; its numbers are kept for the next time.")
    made = _derive(file, name, revision, trust_remote_code, freeze, lora)
    if key:
        with suppress(OSError):  # a disk that is full or not ours costs time, not the answer
            write_text_atomically(kept, json.dumps(asdict(made), separators=(",", ":")))
    return made


def _config_file(name: str, revision: str | None) -> Path:
    if path := local(name):
        return path / "config.json" if path.is_dir() else path
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with asking(name, revision):
        stored = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(
            stored if isinstance(stored, str) else hf_hub_download(name, "config.json", revision=revision)
        )


def _brings_code(file: Path) -> bool:
    return file.is_file() and b'"auto_map"' in file.read_bytes()


def _key(file: Path, freeze: tuple[str, ...], lora: LoraShape | None) -> str | None:
    """A name for all that decides the numbers; None for an unreadable file, which `_derive` explains."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    versions = [version(package) for package in ("meshtune", "transformers", "torch")]
    said = [content, versions, freeze, lora and asdict(lora)]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for folder in ("model", "placement"):  # so that no version between versions lies
        for source in sorted((package / folder).glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _derive(
    file: Path,
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    freeze: tuple[str, ...],
    lora: LoraShape | None,
) -> Known:
    import torch
    from transformers import AutoModelForCausalLM

    from meshtune.model.anatomy import auto_attention, traits
    from meshtune.model.files import resolve
    from meshtune.model.load import read_config
    from meshtune.model.lora import add_lora
    from meshtune.model.trace import census_of
    from meshtune.model.trainable import freeze as freeze_parameters

    if trust_remote_code and not local(name):  # its code lies beside
        folder = resolve(name, revision=revision, weights=False, trust_remote_code=True)
        file = folder / "config.json"
    config = read_config(file, name, trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # each family's model class checks its configuration in its own way
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{name} can't be built by transformers: {said}; mend {file}.") from error
    shape, attention = traits(model), auto_attention(model)
    if lora:
        targets = lora.target_modules
        add_lora(
            model, r=lora.r, alpha=1, target_modules=targets if isinstance(targets, str) else list(targets)
        )
    if freeze:
        freeze_parameters(model, freeze)
    return Known(census_of(model), shape, attention)


# The file #


def _read(file: Path) -> Known | None:
    """What was written; None where nothing was, or something else."""
    try:
        return revived(Known, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def revived(kind: type[T], value: Any) -> T:
    """A dataclass, or what it is made of, from JSON. Raises TypeError where `value` is none of that kind."""
    return _revived(kind, value)


def _revived(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(value, Mapping) or value.keys() != hints.keys():
            raise TypeError(f"{kind} is made of {', '.join(hints)}, not of {value!r:.80}.")
        return kind(**{name: _revived(hints[name], value[name]) for name in hints})  # type: ignore[operator]
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        kinds = (args[0],) * len(value) if args[-1] is Ellipsis else args
        return tuple(_revived(inner, each) for inner, each in zip(kinds, value, strict=True))
    if origin in (Union, UnionType):
        (other,) = (arg for arg in args if arg is not NoneType)
        return None if value is None else _revived(other, value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{value!r:.80} is not {kind}.")


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
