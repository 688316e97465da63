"""The data cache: folders of arrays that are whole or absent, whoever writes them and whenever that ends.

A folder is written under another name, flushed to disk and renamed: of two processes that write it at
the same time, one wins and the other uses the winner's. A lock lets the second wait instead of doing the work
twice; without locks (some network file systems) the result is the same. manifest.json holds the size of each
file; a folder that does not match its manifest counts as absent. No file here can hold code: arrays load with
allow_pickle=False.
"""

import hashlib
import json
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.config import Config
from meshtune.data.example import is_url
from meshtune.data.files import pattern_root
from meshtune.errors import expanded
from meshtune.filesystem import replace, sync, try_lock
from meshtune.rundir import write_text_atomically
from meshtune.sections import is_pattern

if TYPE_CHECKING:
    from meshtune.data.pack import Dataset

# Of the data section, on the training data's size. Only runs set template_date; all days have
# nearly the same number of tokens.
WITHOUT_EFFECT = {"eval", "mean_document_tokens", "cache", "template_date"}
STALE_SECONDS = 24 * 3600  # age at which an unfinished folder must be that of a killed process
MANIFEST = "manifest.json"
# Of a folder of arrays, of the digests of data files (files.py), of a model's numbers (census_cache.py), of
# the data's size.
TEMPORARY = re.compile(r"\.([0-9a-f]{32}|hashes(\.json)?|(census|summary)-\w+\.json)\.(?!lock$)\w+(\.tmp)?")


def write_folder(folder: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Make `folder` whole: `write` fills another one, which is renamed; unfinished old ones next to it, of
    any folder, are deleted.

    write: writes arrays into the folder that it gets and returns the manifest, to which the sizes are added.
    """
    remove_unfinished(folder.parent)
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    aside.mkdir()  # not by tempfile, whose folders no group may read
    try:
        manifest = write(aside)
        manifest |= {"sizes": {path.name: path.stat().st_size for path in sorted(aside.iterdir())}}
        (aside / MANIFEST).write_text(json.dumps(manifest))
        for path in [*aside.iterdir(), aside]:
            sync(path)
        try:
            replace(aside, folder)
        except OSError:
            if not folder.is_dir():
                raise
            return  # another process has written it meanwhile, from the same recipe
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(cache: Path) -> None:
    """Remove the temporary folders and files of killed processes from a cache; no other dot files."""
    for path in cache.glob(".*"):
        with suppress(OSError):  # another process was faster
            if TEMPORARY.fullmatch(path.name) and time.time() - path.lstat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """(Manifest, memory-mapped arrays by name), None if the folder is absent or damaged.

    Damaged: a file is missing or has another size than was written.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if any((folder / name).stat().st_size != size for name, size in manifest["sizes"].items()):
            return None
        return manifest, {Path(name).stem: mapped(folder / name) for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def mapped(file: Path) -> np.ndarray:
    """The array of a .npy file, memory-mapped."""
    return np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock file of `folder`; the system releases it when the process dies."""
    with (folder.parent / f".{folder.name}.lock").open("wb") as file:
        try_lock(file, wait=True)  # without locks the rename keeps the folder whole
        yield


def discard(folder: Path) -> None:
    """Remove a damaged folder; it is renamed first, so that no process opens a half removed one."""
    if folder.exists():
        away = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        folder.rename(away / "damaged")
        shutil.rmtree(away, ignore_errors=True)


class GrowingArray:
    """.npy file that grows; leaving the context writes its final size into the header (numpy pads it).

    Its shape is [size], or with `columns` [size, columns].
    """

    def __init__(self, path: Path, dtype: np.dtype, columns: int | None = None) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self._columns = () if columns is None else (columns,)
        self._size = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._write_header()
        self._begin = self._file.tell()

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._size, *self._columns)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self._dtype).data
        self._file.write(data)
        self._hash.update(data)
        self._size += len(values)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> "GrowingArray":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._begin, "the final header must have the size of the first"


# Size of the prepared training data, for `meshtune plan`, which reads no rows #

# `meshtune data` and `meshtune train` write it, under a name that is a digest of the settings that decide it.


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
    of_rows = [] if config.objective == "sft" else [config.objective]
    recipe = json.dumps([model, data, config.train.seed, *of_rows], sort_keys=True)
    digest = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
    return expanded(config.data.cache, "data.cache") / f"summary-{digest}.json"


def _absolute(name: str) -> Any:
    """The absolute path of what is on this machine; a hub id or URL unchanged."""
    path = expanded(name)
    return str(path.absolute()) if path.exists() or (is_pattern(name) and not is_url(name)) else name
