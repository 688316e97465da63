"""A temporary folder of one process and its ranks; those of killed processes are removed."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshtune.filesystem import try_lock

PREFIX = "meshtune-ranks-"
YOUNG_SECONDS = 60  # a younger folder may not be locked yet


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new temporary folder, which is removed at the end of the block.

    It is locked as long as this process or one forked from it lives, whatever kills them: a folder whose
    lock is free is a killed process's, and is removed here. Without locks none is.
    """
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            try_lock(handle, shared=True)
            yield Path(name)
        finally:
            os.close(handle)


def remove_abandoned() -> None:
    """Remove the folders of killed processes of this user from the temporary directory."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < YOUNG_SECONDS:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if not try_lock(handle):  # BlockingIOError: it is in use
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
