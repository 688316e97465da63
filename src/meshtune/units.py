"""Binary units, counts, and numbers and text formatted for people; lines that aren't part of a result."""

import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median, quantiles
from typing import Any

Number = Any  # float | np.ndarray, in any mixture that numpy broadcasts
KIB, MIB, GIB = 2**10, 2**20, 2**30
TERA = 10**12
SILENCE = 2.0  # seconds of work after which a count is printed


def human(size: float) -> str:
    """Format bytes in three digits: `human(1.25 * GIB) == "1.25 GiB"`, `human(78.13 * GIB) == "78.1 GiB"`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            number = abs(size) / unit
            return f"{size / unit:,.{(number < 99.95) + (number < 9.995)}f} {name}"
    return f"{size:.0f} B"


def bytes_of(text: str, *, unit: str = "B") -> float | None:
    """Bytes of a size as people write it: `bytes_of("1.5 GiB") == 1.5 * GIB`; None for any other text.

    unit: of a number without one.
    """
    parts = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if not parts:
        return None
    number, prefix, binary = parts.groups()
    if text.strip() == number:
        return bytes_of(f"{number}{unit}")
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return float(number) * (1024 if binary else 1000) ** power


def count(number: float) -> str:
    """Format a large count: `count(1_234_567) == "1.23 M"`."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if abs(number) >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:,.0f}"


def number(value: float) -> str:
    """A number with three digits, or from 100 on all digits before the point: "0.123", "12.0", "1,234"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def significant(number: float, digits: int) -> str:
    """Format a number without scientific notation: `significant(123.4, 2) == "120"`."""
    if number == 0:
        return "0"
    rounded = float(f"{number:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def due_from(step: int, last: int, *every: int) -> int:
    """Number of steps from `step` to `last` that are multiples of one of `every`, at most two numbers (0: of
    none), or the last.
    """
    some = [number for number in every if number]

    def multiples(number: int) -> int:
        return last // number - (step - 1) // number

    twice = multiples(math.lcm(*some)) if len(some) > 1 else 0
    return sum(map(multiples, some)) - twice + all(last % number for number in some)


def counted(number: int, noun: str) -> str:
    """Format a number of things: `counted(1, "row") == "1 row"`, `counted(2_176, "row") == "2,176 rows"`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def scientific(number: float) -> str:
    """Format a small number as settings write it: `scientific(0.0002) == "2e-4"`."""
    mantissa, exponent = f"{number:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def duration(seconds: float, *, like: float | None = None) -> str:
    """Format seconds: `duration(192) == "3 min 12 s"`.

    like: seconds whose unit and decimals are taken, for parts of a sum; None: those of `seconds`.
    """
    size = seconds if like is None else like
    if size < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if size < 1:
        return f"{seconds:.2f} s"
    if size < 60 or round(seconds) < 60:
        return f"{seconds:.1f} s" if size < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def at_words(text: str, width: int | None) -> str:
    """Break lines longer than `width` columns between words; a longer word keeps a line of its own.

    width: None breaks nothing, as for a log file, whose lines are searched.
    """
    if width is None:
        return text
    wrap = textwrap.TextWrapper(
        width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True
    )
    return "\n".join(wrap.fill(line) for line in text.splitlines())


def speed_unit(devices: int, kind: str) -> str:
    """Unit of one device's tokens per second: per GPU, or on a processor per rank, where there are several.

    kind: torch's device type, cuda or cpu.
    """
    per = "GPU" if kind == "cuda" else "rank"
    return "tokens/s" if devices == 1 else f"tokens/s/{per}"


# A terminal obeys them: ESC ] 0 ; sets its title. C0 but tab and newline, DEL, C1.
_CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"}
_CONTROL |= {ord("\r"): None, 127: "\u2421"} | dict.fromkeys(range(128, 160), "\ufffd")


def printable(text: str) -> str:
    """Replace the control characters of text from data, models and files by symbols that a terminal only
    shows.
    """
    return text.translate(_CONTROL)


PYTORCH = "loading PyTorch"
LOADING = {  # command or function of Python -> what it loads, which takes seconds
    "dryrun": PYTORCH,
    "generate": "loading the model",
    "sweep": PYTORCH,
    "train": "loading PyTorch, the model and the data",
}


def on_screen(line: str) -> None:
    """Print a line on stderr if that is a terminal or a notebook's."""
    if sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"):
        log(line)


def log(line: str) -> None:
    """Print a line of a command on stderr."""
    notice(f"meshtune: {line}")


@contextmanager
def working(text: str, log: Callable[[str], None] = log) -> Iterator[Callable[[str], None]]:
    """Show `text` and the time so far on stderr during the block, if stderr is a terminal; it is gone before
    the answer comes. Without a terminal, `log` gets `text` at the beginning.

    Gives a function that shows a count instead of `text`; without a terminal `log` gets one in SILENCE
    seconds. What the block prints on stdout goes to stderr.
    """
    if not sys.stderr.isatty():
        logged = [time.monotonic()]
        log(f"{text} …")

        def log_count(count: str) -> None:
            if time.monotonic() - logged[-1] >= SILENCE:
                logged.append(time.monotonic())
                log(count)

        yield log_count
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text, total=None)
        yield lambda count: shown.update(task, description=count)


def notice(text: str, *, dim: bool = False) -> None:
    """Print lines on stderr, where they aren't part of the result; on a terminal they break at words.

    dim: pale on a terminal, next to text that matters more.
    """
    from meshtune.addresses import public  # here: everything imports this file

    terminal = sys.stderr.isatty()
    pale = dim and terminal and not os.environ.get("NO_COLOR")
    width = None
    if terminal:
        with suppress(OSError):  # it is closed meanwhile
            # Columns are 0 in a terminal that was not told its size.
            width = os.get_terminal_size(sys.stderr.fileno()).columns or None
    lines = at_words(printable(public(text)), width)
    print(f"\033[2m{lines}\033[0m" if pale else lines, file=sys.stderr, flush=True)


def money(amount: float, currency: str = "") -> str:
    """Format an amount, with its currency where one is named: `money(0.0951, "USD") == "0.0951 USD"`."""
    small = 2 - math.floor(math.log10(amount)) if 0 < amount < 1 else 2
    return f"{amount:,.{0 if amount >= 10_000 else small}f} {currency}".rstrip()


# Variables that number the ranks (torchrun, srun) or the machines of a run; the first that is set counts.
NUMBERS = (
    "RANK", "SLURM_PROCID", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK", "PET_NODE_RANK", "MESHTUNE_MACHINE",
)  # fmt: skip


def on_first_rank() -> bool:
    """True unless this process is another rank than the first, or starts ranks on another machine than the
    first, by the variables of what started it.
    """
    names = (*NUMBERS, "JOB_COMPLETION_INDEX") if os.environ.get("MESHTUNE_MACHINES") else NUMBERS
    return next((text for name in names if (text := os.environ.get(name, "").strip())), "0") == "0"


def few(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


# Spread #


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles, as a share of the median; 0 for fewer than 2 values."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return (third - first) / median(values)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: `ranges([0, 1, 2, 5]) == "0-2,5"`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
