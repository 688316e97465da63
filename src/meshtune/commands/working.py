"""A line on a terminal while a command works, with the time so far; it is gone before the answer comes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` and the time so far on stderr during the block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn("line"), TextColumn(text), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task("", total=None)
        yield
