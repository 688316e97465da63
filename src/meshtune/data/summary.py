"""Size of the prepared training data, kept in data.cache for `meshtune plan`, which reads no rows.

`meshtune data` and `meshtune train` write it, under a name that is a digest of the settings that decide it.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.config import Config
from meshtune.data.example import is_url
from meshtune.data.files import pattern_root
from meshtune.errors import expanded
from meshtune.rundir import write_text_atomically
from meshtune.sections import is_pattern

if TYPE_CHECKING:
    from meshtune.data.pack import Dataset

WITHOUT_EFFECT = {"eval", "mean_document_tokens", "cache"}  # of the data section, on the training data's size


@dataclass(frozen=True)
class Summary:
    """Size of one epoch of the training data."""

    sequences: int
    tokens: int  # without padding
    mean_document_tokens: float  # as data.mean_document_tokens
    files: dict[str, list[int]]  # path of each local file and folder -> [bytes, time of its last change]

    def changed(self) -> list[str]:
        """The files and folders that have changed, or gone, since they were counted."""
        return [path for path, stamp in self.files.items() if _stamp(path) != stamp]


def write_summary(config: Config, train: "Dataset") -> None:
    """Keep the size of the config's training data; a cache that can't be written keeps none."""
    places = [expanded(source.path) for source in config.data.train if not is_url(source.path)]
    folders = [pattern_root(path) if is_pattern(str(path)) else path for path in places]
    folders = [path for path in folders if path.is_dir()]
    paths = [str(path.absolute()) for path in [*map(Path, train.files), *folders] if path.exists()]
    files = {path: stamp for path in paths if (stamp := _stamp(path))}
    summary = Summary(len(train), train.token_count, train.mean_document_tokens, files)
    with suppress(OSError):
        write_text_atomically(_file(config), json.dumps(asdict(summary)))


def read_summary(config: Config) -> Summary | None:
    """The size of the config's training data; None if these settings' rows were never counted here."""
    try:
        return Summary(**json.loads(_file(config).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _stamp(path: str) -> list[int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _file(config: Config) -> Path:
    data = config.data.model_dump(mode="json", exclude=WITHOUT_EFFECT)
    for source in data["train"]:
        source["path"] = _absolute(source["path"])
    model = [_absolute(config.model.name), config.model.revision]
    recipe = json.dumps([model, data, config.train.seed], sort_keys=True)
    digest = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
    return expanded(config.data.cache, "data.cache") / f"summary-{digest}.json"


def _absolute(name: str) -> Any:
    """The absolute path of what is on this machine; a hub id or URL unchanged."""
    path = expanded(name)
    return str(path.absolute()) if path.exists() or (is_pattern(name) and not is_url(name)) else name
