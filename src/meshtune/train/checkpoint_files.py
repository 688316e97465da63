"""The files of a checkpoint on the disk: which are there, and whether they are as they were written.

    manifest.json ─> read_manifest ─> damage of each file, misnamed ─> sentences

checkpoint.py writes and reads them; nothing here talks to other ranks.
"""

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from meshtune.errors import UserError, explained
from meshtune.units import human

HASH = "xxh3_128"  # finds damage; sha256 takes 20 times as long where the CPU has no SHA instructions
CANNOT_BE_READ = "cannot be read"  # unlike damage, this may pass: a network disk, permissions


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint in `folder`, oldest first."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: {"hash", "files": {name: {"size", "hash"}}, "tied": {name: name}}.

    Raises UserError if it is missing or damaged.
    """
    path = folder / "manifest.json"
    if not folder.is_dir():
        steps = ", ".join(str(other) for other in saved_steps(folder.parent)) or "none"
        raise UserError(f"{folder} does not exist. Checkpoints there: {steps}.")
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # opening a pipe waits for ever
            raise ValueError("no regular file")
        manifest = json.loads(path.read_text())
        files, tied = manifest["files"], manifest["tied"]
        plain = all(name == os.path.basename(name) and name not in ("", ".", "..") for name in files)
        sized = all(facts.keys() == {"size", "hash"} for facts in files.values())
        complete = {".metadata", "values.json"} <= files.keys() and manifest["hash"] == HASH
        if not (plain and sized and complete and all(isinstance(name, str) for name in tied.values())):
            raise ValueError("not a manifest of this version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is missing or damaged ({type(error).__name__}: {error}).") from error
    return manifest


def misnamed(folder: Path, step: int) -> str | None:
    """Sentence on a whole checkpoint in `folder` whose values are not those of `step`; None if they are.

    Whoever renames a folder, or writes one, may give it any name and any values.
    """
    file = folder / "values.json"
    with explained(f"{file} is damaged"):
        values = json.loads(file.read_text())
    saved = values.get("step") if isinstance(values, dict) else None
    if type(saved) is int and saved == step:
        return None
    return f"{folder} holds values of step {str(saved)[:40]}; its folder has another name."


def damage(path: Path, facts: dict[str, Any]) -> str | None:
    """Sentence on the damage of one file; None if it is whole. facts: its `size_and_hash` when written."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is damaged: it is no regular file."
        if status.st_size != facts["size"]:
            return f"{path} is damaged: it has {status.st_size} bytes, {facts['size']} were written."
        if size_and_hash(path) != facts:
            return f"{path} is damaged: its content is not what was written ({HASH} differs)."
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} {CANNOT_BE_READ}: {error.strerror or error}."
    return None


def size_and_hash(path: Path) -> dict[str, Any]:
    """{"size": bytes, "hash": hexadecimal digest by HASH} of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
        return {"size": file.tell(), "hash": digest}


class NotSaved(Exception):
    """A checkpoint could not be written; the message is the reason. The run goes on.

    full: True if the disk is, or may be.
    """

    def __init__(self, reason: str, *, full: bool) -> None:
        super().__init__(reason)
        self.full = full

    def sentence(self, step: int, size_bytes: int, folder: Path, earlier: Sequence[int]) -> str:
        """Sentences for the log. size_bytes: of the checkpoint; earlier: steps of whole ones in `folder`."""
        size, remedy = "", "Write elsewhere (output) if this lasts."
        if self.full:
            free = human(free_bytes(folder))
            size = f"It needs about {human(size_bytes)}, and {free} are free in {folder}. "
            remedy = "Free some space, or keep fewer (checkpoint.keep) or write elsewhere (output)."
        return (
            f"The checkpoint of step {step} was not saved: {self}. {size}The earlier ones are whole (steps: "
            f"{', '.join(map(str, earlier)) or 'none'}) and the run goes on. {remedy}"
        )


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds the folder, or would hold it; no bound for a mount without sizes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize


def reason_of(error: BaseException) -> str:
    """Text of the disk's error behind `error`: torch wraps failures of ranks, and raises its own."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror.lower() if cause.strerror else str(cause)
        cause = cause.__context__
    return f"{type(error).__name__}: {error}".strip().rstrip(".")
