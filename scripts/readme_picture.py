"""The README's picture of a terminal, from a real run.

    python scripts/readme_picture.py RUN_DIR [COMMAND] [SVG]

What it shows is what `meshtune train` printed at the end of that run.
"""

import sys
from pathlib import Path

from meshtune.report.tables import run_summary, samples_table
from meshtune.report.terminal import prompt, terminal_picture
from meshtune.rundir import RunDir, write_text_atomically


def main(folder: str, command: str = "make quickstart", file: str = "docs/images/quickstart.svg") -> None:
    run = RunDir(folder)
    picture = terminal_picture(
        prompt(command), run_summary(run), samples_table(run, limit=4), title="meshtune"
    )
    write_text_atomically(Path(file), picture)
    print(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
