"""The README's picture of a terminal, from a real run.

    python scripts/readme_picture.py RUN_DIR [COMMAND] [SVG]

It shows what `meshtune train` printed at the end of that run.
"""

import io
import sys
from pathlib import Path

from rich.console import Console, RenderableType
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from meshtune.report.run.tables import places, run_summary, samples_table
from meshtune.rundir import RunDir, write_text_atomically

QUIET = TerminalTheme(  # the picture's colours; readable on a light page and on a dark one
    (24, 27, 32),
    (214, 218, 224),
    [(24, 27, 32), (240, 128, 96), (120, 200, 140), (230, 175, 80),
     (95, 170, 235), (200, 150, 220), (90, 200, 205), (214, 218, 224)],
    [(120, 128, 138), (240, 128, 96), (120, 200, 140), (230, 175, 80),
     (95, 170, 235), (200, 150, 220), (90, 200, 205), (255, 255, 255)],
)  # fmt: skip

# rich's own frame fetches its typeface from a server; this one uses a typeface of the reader's machine.
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font: 600 17px system-ui, -apple-system, "Segoe UI", sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main(folder: str, command: str = "make quickstart", file: str = "docs/images/quickstart.svg") -> None:
    run = RunDir(folder)
    picture = terminal_picture(
        prompt(command), run_summary(run), *places(run), Text(), samples_table(run, limit=4)
    )
    write_text_atomically(Path(file), picture)
    print(file)


def terminal_picture(*shown: RenderableType, title: str = "meshtune", width: int = 80) -> str:
    """Screen of a terminal of `width` columns, with `shown` printed on it in order, as SVG text.

    The SVG loads nothing from a network.
    """
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for renderable in shown:
        console.print(renderable)
    return console.export_svg(title=title, theme=QUIET, code_format=FRAME)


def prompt(command: str) -> Text:
    """A command behind a shell's prompt."""
    return Text.assemble(("$ ", Style(color="green", bold=True)), (command, Style(bold=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
