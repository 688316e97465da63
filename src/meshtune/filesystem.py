"""Do without what some file systems lack (Lustre, NFS, SMB, FUSE mounts of buckets, overlays); one line says
what that means.

    lock      no locks          two processes are not kept apart
    sync      no fsync          a crash of the machine may lose what was written last
    replace   no rename         copied instead: a kill meanwhile may leave a part
    set_mode  no modes          those of the mount stay

Other errors are raised: a full disk, a quota, a device that fails, a path that is gone. `paths_named` and
`chooser` name the setting or the variable that chose a path which can't be used.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from meshtune.errors import UserError, expanded
from meshtune.setting import is_path
from meshtune.units import notice

if TYPE_CHECKING:
    from pydantic import BaseModel

LACKING = (
    errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EPERM, errno.EACCES,
    errno.EBADF, errno.EROFS,
)  # fmt: skip
# A rename between layers or mounts, of a mount itself, or over something that is there or open elsewhere.
NOT_RENAMED = (*LACKING, errno.EXDEV, errno.EBUSY, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR)
# Of a path that a user named or can change; others are our bugs.
BAD_PATH = (
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP,
)  # fmt: skip
_said: set[str] = set()  # what this process has printed a line about


def try_lock(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> OSError | None:
    """Lock an open file or folder until it is closed; returns the error of a file system without locks.

    shared: other processes may hold it shared, too. wait: until no other holds it. Else raises
    BlockingIOError if another does.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        return error
    return None


def lock(file: IO[Any], path: Path) -> None:
    """Lock an open file until it is closed; one line says if its file system has no locks.

    path: of the file, for the line. Raises BlockingIOError if another process has the lock.
    """
    if error := try_lock(file):
        _lacks(path, "file locks", error, "a second process that writes there is not noticed.")


def is_locked(file: Path) -> bool | None:
    """True if a process holds the lock of a file; None where its file system has no locks.

    Not for a file of SQLite's: closing it here would release the locks that SQLite has on it. Raises OSError
    if the file can't be opened.
    """
    with open(file, "rb") as stream:
        try:
            return None if try_lock(stream, shared=True) else False
        except BlockingIOError:
            return True


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk: else a machine crash may undo a rename."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError as error:
        _lacks(path, "reading what was written", error, "it is not synced.")
        return
    try:
        sync_open(handle, path)
    finally:
        os.close(handle)


def sync_open(descriptor: int, path: Path) -> None:
    """Sync the open file or folder `path`."""
    with _lacking(path, "fsync", "a crash of the machine may lose what was written last."):
        os.fsync(descriptor)


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder; a file or an empty folder at `target` is replaced.

    Where the file system can't, the content is copied and `source` removed. Raises OSError if a folder that
    is not empty is there.
    """
    try:
        os.replace(source, target)
    except OSError as error:
        other_kind = target.exists() and target.is_dir() != source.is_dir()
        if error.errno not in NOT_RENAMED or other_kind or (target.is_dir() and any(target.iterdir())):
            raise
        _copy(source, target)
        shutil.rmtree(source) if source.is_dir() else source.unlink()
        _lacks(target, "such a rename", error, "it was copied; a kill meanwhile would have left a part.")


def set_mode(path: Path, mode: int) -> None:
    """Set the mode of a file, where its file system has modes that this user may change."""
    with _lacking(path):
        path.chmod(mode)


@contextmanager
def _lacking(path: Path, what: str = "", meaning: str = "") -> Iterator[None]:
    """Do without what the file system lacks in the block; with a `meaning`, a line says what that is."""
    try:
        yield
    except OSError as error:
        if error.errno not in LACKING:
            raise
        if meaning:
            _lacks(path, what, error, meaning)


def _copy(source: Path, target: Path) -> None:
    """Copy contents, without modes and times, and sync them."""
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for path in sorted(source.iterdir()):
            _copy(path, target / path.name)
    else:
        shutil.copyfile(source, target)
    sync(target)


def _lacks(path: Path, what: str, error: OSError, meaning: str) -> None:
    """Print once in a process what the file system of a path lacks, and what that means."""
    if what not in _said:
        _said.add(what)
        notice(f"meshtune: {path}: its file system refuses {what} ({error.strerror}): {meaning}")


def concerns(error: OSError, path: Path) -> bool:
    """True if an error is about a path, what is in it, or a folder above it."""
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return False
    file, path = Path(os.fsdecode(error.filename)).absolute(), path.absolute()
    return file.is_relative_to(path) or path.is_relative_to(file)


@contextmanager
def paths_named(config: "BaseModel") -> Iterator[None]:
    """Turn an OSError about a path that can't be used into a UserError with the setting that chose it.

    config: the settings, a tree of sections.
    """
    try:
        yield
    except OSError as error:
        if error.errno in BAD_PATH:
            for setting, path in _paths_of(config):
                if concerns(error, path):
                    raise UserError(
                        f"{setting} is {path}, but {os.fsdecode(error.filename)} can't be used "
                        f"({error.strerror}). Change its rights, or name another path by {setting}."
                    ) from error
        raise


def _paths_of(config: "BaseModel") -> Iterator[tuple[str, Path]]:
    """(Setting, path) of what is written, and of what is read where it is a path that exists."""
    for key, text in texts(config.model_dump(mode="json")):
        if is_path(text, key, type(config)):
            setting, path = re.sub(r"(\.\d+)?(\.path)?$", "", key), expanded(text)
            if setting in ("output", "data.cache") or os.path.lexists(path):
                yield setting, path


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of each text in a tree. key: dotted name of `value`."""
    if isinstance(value, str):
        yield key, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from texts(item, f"{key}.{name}".lstrip("."))


def chooser(error: OSError) -> str:
    """Sentence that names the environment variable which chose the path of an error; "" for others."""
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return "Set TMPDIR to a folder that can be written."
    if concerns(error, temporary):
        return f"TMPDIR chooses another folder than {temporary} for temporary files."
    from huggingface_hub.constants import HF_HOME  # a level of imports that only an error needs

    return "HF_HOME chooses another folder for the hub's files." if concerns(error, Path(HF_HOME)) else ""
