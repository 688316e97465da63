"""Check that all machines of a run see its folder, before hours of work depend on it."""

import time
from pathlib import Path

from meshtune.errors import UserError

MARK = ".machine-"  # begins the name of a machine's file in the run folder
PATIENCE = 60.0  # seconds in which a network file system shows a new file on other machines


def unseen(folder: Path, machine: int, machines: int, start: str) -> list[int]:
    """Write this machine's file into the folder; return the machines with files that are not visible in it.

    All machines call it at the same time. start: the file's content, the same on all machines and new at each
    start. Raises UserError if the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{MARK}{machine}").write_text(start)
    except OSError as error:
        raise UserError(
            f"output = {folder} can't be written on machine {machine}: {error.strerror}."
        ) from None
    until, missing = time.monotonic() + PATIENCE, [*range(machines)]
    while missing := [number for number in missing if not shows(folder / f"{MARK}{number}", start)]:
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    return missing


def shows(file: Path, text: str) -> bool:
    """True if the file holds this text."""
    try:
        return file.read_text() == text
    except OSError:
        return False
