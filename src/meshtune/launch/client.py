"""Programs of clusters (sbatch, sky, kubectl …) and their answers."""

import subprocess
from collections.abc import Collection

from meshtune.errors import UserError


def client_output(
    tool: str,
    *words: str,
    look: str,
    seconds: float = 120,
    remedy: str = "Work on a machine that has it on PATH",
    codes: Collection[int] = (0,),
) -> str:
    """Output of a program of `tool`. Raises UserError, with its words, if it is missing or fails.

    look: command that shows what was done, for a program that has not answered in so many seconds. remedy:
    clause for a program that is missing. codes: exit codes of an answer.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{words[0]} has not answered for {seconds:g} s; what it was asked to do may be done: look at "
            f"`{look}` before you try again."
        ) from None
    except OSError as error:
        raise UserError(f"{tool}'s {words[0]} can't be run: {error}. {remedy}.") from None
    if done.returncode not in codes:
        said = " ".join((done.stderr.strip() or done.stdout).split())
        raise UserError(f"{words[0]} refused: {said or f'exit code {done.returncode}'}")
    return done.stdout
