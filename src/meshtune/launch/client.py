"""Programs of clusters (sbatch, sky, kubectl …) and their answers."""

import re
import subprocess
from collections.abc import Collection, Mapping

from meshtune.errors import UserError

# A traceback of Python's up to the last error in it.
TRACEBACK = re.compile(r"Traceback .*?(?=\b\w{1,60}(Error|Exception): (?!.*(Error|Exception): ))")


class NoAnswer(UserError):
    """Error: a program has not answered in time; what it was asked to do may be done."""


def client_output(
    tool: str,
    *words: str,
    look: str,
    seconds: float = 120,
    remedy: str = "Work on a machine that has it on PATH",
    codes: Collection[int] = (0,),
    remedies: Mapping[str, str] | None = None,
) -> str:
    """Output of a program of `tool`. Raises UserError, with its words, if it is missing or fails.

    look: command that shows what was done, for a program that has not answered in `seconds` (NoAnswer).
    remedy: clause for a program that is missing. codes: exit codes of an answer. remedies: pattern of a
    refusal -> sentence on what to do.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{words[0]} has not answered for {seconds:g} s; what it was asked to do may be done: look at "
            f"`{look}` before you try again."
        ) from None
    except OSError as error:
        raise UserError(f"{tool}'s {words[0]} can't be run: {error}. {remedy}.") from None
    if done.returncode not in codes:
        said = " ".join((done.stderr.strip() or done.stdout).split())
        said = TRACEBACK.sub("", said) or f"exit code {done.returncode}"
        known = (text for pattern, text in (remedies or {}).items() if re.search(pattern, said))
        text = next(known, "")
        raise UserError(f"{words[0]} refused: " + (f"{said.rstrip('.')}. {text}" if text else said))
    return done.stdout


def id_in(answer: str, pattern: str, look: str) -> str:
    """The id of a new job, the group of `pattern`. look: command for the UserError that is raised without."""
    if found := re.search(pattern, answer):
        return found[1]
    raise UserError(f"The answer names no job; look at `{look}`: {' '.join(answer.split()) or 'it is empty'}")
