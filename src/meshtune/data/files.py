"""The data files of a source: on this machine or behind a URL, found, opened, and known by their content.

Source ──> files() ──> DataFile, …   readers.py reads them, and says in `share` how far it is
              └──────> content()     a digest, kept in the cache until the file changes
"""

import glob
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any
from urllib.parse import urlparse

from meshtune.data.example import Source, is_url, name_of
from meshtune.errors import UserError, check_fetched, entries, expanded, path_meant, reason_of
from meshtune.rundir import write_text_atomically
from meshtune.sections import HUB_FILES, DataConfig, hub_pattern, is_pattern
from meshtune.setting import SUFFIXES
from meshtune.units import counted, few

SPLITS = {  # words in file names -> the split that they name
    "train": "train", "training": "train", "test": "test", "eval": "validation", "dev": "validation",
    "valid": "validation", "val": "validation", "validation": "validation",
}  # fmt: skip
PACKAGES = {  # protocols whose package fsspec does not bring
    "http": "aiohttp requests", "https": "aiohttp requests", "s3": "s3fs", "s3a": "s3fs",
    "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "sftp": "paramiko",
}  # fmt: skip
# What servers say of a file's version.
VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "mtime", "created")
READABLE = f"meshtune reads {', '.join(SUFFIXES)}, a folder of these, or a hub data set org/name."
BLOCK = 2**20  # bytes that are hashed at a time; eight files are read at once
LISTING = ("dataset_info.json", "dataset_infos.json")  # lists of data sets, of LLaMA-Factory and the hub
UNREAD = (  # suffixes of data files that are not read
    ".zst", ".bz2", ".xz", ".zip", ".tar", ".tar.gz", ".tgz", ".arrow", ".feather", ".avro", ".orc", ".xlsx",
)  # fmt: skip
SHARD = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\..*)")  # train-00000-of-00002.parquet, as the hub names parts
OUTLINE = 2**18  # bytes of a block of `DataFile.outline`
HASHES = "hashes.json"  # in the cache: digests of files that have not changed since
_WRITING = Lock()  # of HASHES, between threads


@dataclass
class DataFile:
    """One file, a folder that `datasets` wrote, or a hub data set; and how far it has been read."""

    path: str  # as errors name it
    filesystem: Any = None  # fsspec's; None: it is on this machine
    inner: str = ""  # its path in that filesystem
    size: int = 0  # bytes; of a hub data set 0 until it is open
    share: float = 0.0  # of it that has been read
    details: Mapping[str, Any] = field(default_factory=dict)  # what a listing of its server said of it

    def __str__(self) -> str:
        return name_of(self.path)

    @property
    def name(self) -> str:
        """Its name in lower case, without the query of a URL."""
        return PurePosixPath(urlparse(self.path).path if self.filesystem else self.path).name.lower()

    @property
    def kind(self) -> str:
        """The suffix that says how it is read; empty for a folder or data set that `datasets` reads."""
        return next((suffix for suffix in SUFFIXES if self.name.endswith(suffix)), "")

    def open(self) -> Any:
        """Open it for reading, as it is stored; a binary file object."""
        return self.filesystem.open(self.inner, "rb") if self.filesystem else Path(self.path).open("rb")

    def content(self, folder: Path, on_read: Callable[[int], None]) -> str:
        """Digest of the content, from HASHES in `folder` if the file has not changed since it was computed.

        Of a file behind a URL it is that of what the server says of its version, else of its content.
        on_read: called with the number of bytes that were read.
        """
        if self.filesystem is None:
            return digest_of(Path(self.path), folder, on_read)
        info = self.filesystem.info(self.inner)
        if version := {key: str(info[key]) for key in VERSIONS if info.get(key)}:
            return _digest([self.path, info.get("size"), version])
        with self.open() as stream:
            return digest_of_stream(stream, on_read)

    def outline(self, blocks: int) -> str:
        """Digest of the size and of up to `blocks` blocks of OUTLINE bytes, evenly spaced; a file that is not
        larger than these is read whole. Of a file behind a URL, of its size and what the server says of it.
        """
        if self.filesystem is not None:
            listed = any(self.details.get(key) for key in VERSIONS)
            info = self.details if listed else self.filesystem.info(self.inner)
            return _digest([info.get("size"), {key: str(info[key]) for key in VERSIONS if info.get(key)}])
        path = Path(self.path)
        if path.is_dir():
            parts = sorted(file for file in path.rglob("*") if file.is_file())
            return outline([*map(_local, parts)], blocks)
        size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
        digest.update(str(size).encode())
        last = max(0, size - OUTLINE)
        every = [last * block // max(1, blocks - 1) for block in range(blocks)]
        starts = range(0, size, OUTLINE) if size <= blocks * OUTLINE else every
        with path.open("rb") as stream:
            for start in starts:
                stream.seek(start)
                digest.update(stream.read(OUTLINE))
        return digest.hexdigest()


def outline(data_files: Sequence[DataFile], blocks: int) -> str:
    """Digest of the sizes of files and of up to `blocks` blocks of OUTLINE bytes, evenly spread over them.

    Of more than `blocks` files it is that of all names and sizes, and of a block of `blocks` of the files.
    """
    count = len(data_files)
    few = count <= blocks
    opened = range(count) if few else {number * count // blocks for number in range(blocks)}
    each = max(1, blocks // max(1, count))
    return _digest(
        [
            (file.kind if few else file.name, file.size, file.outline(each) if number in opened else "")
            for number, file in enumerate(data_files)
        ]
    )


def digest_of_stream(stream: Any, on_read: Callable[[int], None]) -> str:
    """Digest of the bytes of a binary file object. on_read: see `DataFile.content`."""
    digest = hashlib.blake2b(digest_size=16)
    while block := stream.read(BLOCK):
        digest.update(block)
        on_read(len(block))
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def digest_of(path: Path, folder: Path, on_read: Callable[[int], None]) -> str:
    """Digest of a file's bytes, or of the names and bytes of a folder's files.

    It is computed once: HASHES in `folder` keeps it with the size and times of change that the file had.
    """
    if path.is_dir():
        each = sorted(file for file in path.rglob("*") if file.is_file())
        return _digest([(str(file.relative_to(path)), digest_of(file, folder, on_read)) for file in each])

    with path.open("rb") as stream:
        return kept_digest(path, folder, lambda: digest_of_stream(stream, on_read))


def kept_digest(path: Path, folder: Path, compute: Callable[[], str], kind: str = "") -> str:
    """Digest of a file, computed once: see `digest_of`. kind: of digest, where a file has several."""
    status, key = path.stat(), f"{kind}{path.resolve()}"
    kept = _read_hashes(folder / HASHES)
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    if kept.get(key, [])[:3] == state:
        return kept[key][3]
    digest = compute()
    _write_hashes(folder / HASHES, {key: [*state, digest]})
    return digest


def _read_hashes(file: Path) -> dict[str, list]:
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):  # absent, or another program's
        return {}
    return {key: value for key, value in kept.items() if isinstance(value, list) and len(value) == 4}


def _write_hashes(file: Path, new: dict[str, list]) -> None:
    """Add digests to the file; if two processes do so at once, one may lose its own and compute it again.

    A folder that can't be written, as a cache of others, is left as it is.
    """
    with suppress(OSError), _WRITING:
        write_text_atomically(file, json.dumps(_read_hashes(file) | new))


def is_hub(path: str) -> bool:
    """True if `path` is a hub data set id: of the form org/name[:configuration], and no file or folder."""
    is_id = re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?", path) is not None
    return is_id and not path.endswith(SUFFIXES) and not Path(path).exists()


def check_there(data: DataConfig) -> None:
    """Raise UserError for all paths of sources that are nothing on this machine, and no URL or hub id.

    Needs no import that takes seconds, so that a mistyped path is answered at once.
    """
    paths = [source.path for source in (*data.train, *data.eval)]
    local = [expanded(path) for path in paths if not (is_hub(path) or is_url(path))]
    check_fetched(path for path in local if path.is_symlink())
    if absent := [path for path in dict.fromkeys(local) if not (path.exists() or matches(path))]:
        raise UserError(map(missing, absent))


def matches(pattern: Path) -> list[Path]:
    """The files that a pattern such as rows/*.jsonl matches, sorted; ** matches folders of any depth."""
    return [path for path in map(Path, sorted(glob.glob(str(pattern), recursive=True))) if path.is_file()]


def pattern_root(pattern: Path) -> Path:
    """The folder in which a pattern looks for files: its part before the first sign of one."""
    return next(part for part in pattern.parents if not glob.has_magic(str(part)))


def missing(path: Path) -> str:
    """Sentence on a path where there is nothing, with those that it may mean."""
    if is_pattern(str(path)):
        root = pattern_root(path)
        if not root.is_dir():
            return f"No file matches {path} (from {Path.cwd()}): there is no folder {root}."
        return f"No file matches {path} (from {Path.cwd()}); {root} holds {few(_inside(root)) or 'nothing'}."
    return f"There is no file or folder {path} (from {Path.cwd()}){data_like(path) or '.'} {READABLE}"


def _inside(folder: Path) -> list[str]:
    """Names of the files and folders in a folder, without hidden ones."""
    return [f"{each.name}/" if each.is_dir() else each.name for each in entries(folder, 1)]


def files(source: Source, not_read: list[str] | None = None) -> list[DataFile]:
    """The files of a source, in the order in which they are read.

    not_read: gets a sentence that names the data files of a folder, or of a pattern, that are left out. A hub
    data set, and a folder written by `save_to_disk`, is returned as it is. Raises UserError if there is
    nothing at the path or URL, or nothing that can be read, if a package for its protocol is missing, and as
    `check_fetched`.
    """
    not_read = [] if not_read is None else not_read
    if is_hub(source.path):
        return [DataFile(source.path)]
    if is_url(source.path):
        return _remote(source, not_read)
    path = expanded(source.path)
    if path.is_file():
        chosen = [_local(path)]
        if not chosen[0].kind:
            raise UserError(f"{chosen[0]} has an unknown suffix. {READABLE}")
    elif path.is_dir():
        there = sorted(path.rglob("*"))
        check_fetched(file for file in there if file.is_symlink() and file.name.lower().endswith(SUFFIXES))
        each = [file for file in there if file.is_file()]
        if is_saved(path):
            check_fetched(each)
            return [DataFile(str(path), size=sum(file.stat().st_size for file in each))]
        chosen = _chosen(source, {str(file.relative_to(path)): _local(file) for file in each}, not_read)
    else:
        if not (each := matches(path)):
            raise UserError(missing(path))
        chosen = _matched(source, {str(file): _local(file) for file in each}, not_read)
    check_fetched(Path(file.path) for file in chosen)
    return chosen


def _local(file: Path) -> DataFile:
    return DataFile(str(file), size=file.stat().st_size)


def data_like(path: str | Path) -> str:
    """Clause with the data files and folders on this machine that a path may mean; "" where none is near."""

    def is_data(each: Path) -> bool:
        return each.name.lower().endswith(SUFFIXES) and each.name != "config.json"

    def holds_data(each: Path) -> bool:
        return Path(path).suffix == "" and each.is_dir() and any(map(is_data, entries(each, 1)))

    return path_meant(str(path), lambda each: is_data(each) or holds_data(each))


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` of a Dataset or DatasetDict wrote a folder."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _remote(source: Source, not_read: list[str]) -> list[DataFile]:
    """The files of a file, folder or pattern at a URL, by fsspec. Arguments and errors: see `files`."""
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(source.path)
        pattern = is_pattern(source.path)
        if (file := DataFile(source.path, filesystem, root)).name.endswith(SUFFIXES) and not pattern:
            file.size = int(filesystem.size(root) or 0)
            return [file]
        found = (filesystem.glob if pattern else filesystem.find)(root, detail=True)
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(source.path.partition("://")[0].lower())
        remedy = f" pip install {package}" if package else ""
        raise UserError(f"{source.path} can't be read: {error}.{remedy}") from error
    except FileNotFoundError as error:
        raise UserError(
            f"{source.path} can't be read: the file does not exist{_taken_for(source.path)}."
        ) from error
    except Exception as error:  # each filesystem has errors of its own: no access, no network
        raise UserError(
            f"{source.path} can't be read{_taken_for(source.path)}: {reason_of(error)}"
        ) from error
    inside = {}
    for path in sorted(found):
        name = path.removeprefix(root).lstrip("/")
        url = f"{source.path.rstrip('/')}/{name}"
        if pattern:
            name, url = path, filesystem.unstrip_protocol(path)
        size = int(found[path].get("size") or 0)
        inside[name] = DataFile(url, filesystem, path, size, details=found[path])
    if pattern and not inside:
        raise UserError(f"No file matches {source.path}{_taken_for(source.path)}.")
    return (_matched if pattern else _chosen)(source, inside, not_read)


def _taken_for(path: str) -> str:
    """Clause on a pattern that was taken for one of a hub data set; "" for other paths and addresses."""
    name = path.removeprefix(HUB_FILES)
    if name == path or hub_pattern(name) != path:
        return ""
    return f" (no local folder {name.split('/')[0]} exists, so {name} was searched for on the hub)"


def _matched(source: Source, inside: dict[str, DataFile], not_read: list[str]) -> list[DataFile]:
    """The files that a pattern matches and that can be read; the others are named in `not_read`.

    inside: files by name. Raises UserError for none.
    """
    readable = {name: file for name, file in inside.items() if file.kind and file.name not in LISTING}
    if not readable:
        raise UserError(f"{source.path} matches no data file, only {few([*inside])}. {READABLE}")
    _note_not_read(source, inside, readable, "as its suffix is unknown", not_read)
    return [*readable.values()]


def _note_not_read(
    source: Source,
    inside: Mapping[str, DataFile],
    read: Mapping[str, DataFile],
    why: str,
    not_read: list[str],
) -> None:
    """Add a sentence to `not_read` on the files in `inside` that are not in `read`, if there are any."""
    if left_out := [name for name in inside if name not in read]:
        files = f"{len(left_out):,} of {counted(len(inside), 'file')} not read"
        not_read.append(f"{source.path}: {files} ({few(left_out)}), {why}")


def _chosen(source: Source, inside: dict[str, DataFile], not_read: list[str]) -> list[DataFile]:
    """The files of a folder that are read. inside: files by their name in it. not_read: see `files`.

    Raises UserError for none, and for a split other than train that no name tells.
    """
    data_files = {
        name: file
        for name, file in inside.items()
        if file.kind
        and file.name not in LISTING
        and not any(part.startswith(".") for part in name.split("/"))
    }
    if not data_files:
        raise UserError(f"The folder {source.path} holds no data files. {READABLE}")
    # A README.txt next to rows.jsonl describes the data.
    texts = tuple(suffix for suffix in SUFFIXES if ".txt" in suffix)
    rows = {n: file for n, file in data_files.items() if not n.lower().endswith(texts)} or data_files
    unread = {name: file for name, file in inside.items() if file.name.endswith(UNREAD) and not file.kind}
    _note_not_read(source, data_files | unread, data_files, "as such files can't be", not_read)
    _note_not_read(source, data_files, rows, "as the folder has data files that are not .txt", not_read)
    # Training must not read the test.jsonl next to train.jsonl: where names tell the split, they choose.
    split = SPLITS.get(source.split, source.split)
    named = {name: file for name, file in rows.items() if _split_of(name) == split}
    if not named and split != "train":  # all rows would be read: held-out rows that are training rows
        raise UserError(
            f"The folder {source.path} has no file of split {source.split}: file names tell splits, as "
            "test.jsonl does. Name the files of that split, or leave split out."
        )
    every = f"{source.path}/{'**' if any('/' in name for name in rows) else '*'}"
    why = f"as names tell the split {source.split}: {few([*named])}; the pattern {every} reads all"
    _note_not_read(source, rows, named or rows, why, not_read)
    chosen = named or rows
    others = [name for name in chosen if (_split_of(name) or split) != split]
    if others and len(others) < len(chosen):
        not_read.append(
            f"{source.path}: files whose names tell another split are read for {source.split} too "
            f"({few(others)}), as no name tells that one; list the files if these are held out"
        )
    if absent := _absent_shards([*chosen]):
        not_read.append(
            f"{source.path}: {counted(len(absent), 'shard')} missing, and not read: {few(absent)}"
        )
    return [*chosen.values()]


def _absent_shards(names: Sequence[str]) -> list[str]:
    """Names of the shards that lack in what the others' names count."""
    parts = [match.groups() for match in map(SHARD.fullmatch, names) if match]
    every = {
        f"{stem}{number:05}{of}{count}{suffix}"
        for stem, _, of, count, suffix in parts
        for number in range(min(int(count), 10_000))
    }
    return sorted(every - {*names})


def _split_of(name: str) -> str | None:
    """The split that a word of a path names, None where none does."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)
