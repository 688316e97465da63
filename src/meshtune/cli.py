"""The command line: the commands of commands/, and the exit code of what ends them.

A command imports what it needs inside its function, so that `meshtune --help` answers at once.
"""

import errno
import sys

import typer

from meshtune.commands.data import data
from meshtune.commands.env import env
from meshtune.commands.evaluate import evaluate
from meshtune.commands.export import export
from meshtune.commands.generate import generate
from meshtune.commands.plan import plan
from meshtune.commands.report import report
from meshtune.commands.train import train
from meshtune.errors import Interrupted, NonFinite, RankFailed, UserError, memory_explained
from meshtune.rundir import disk_is_full
from meshtune.units import printable

# Of a path that a user named; others are our bugs.
BAD_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS, errno.ELOOP)

app = typer.Typer(
    name="meshtune",
    help="Plan, train and measure the fine-tuning of Hugging Face language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (train, plan, data):
    app.command()(command)
app.command("eval")(evaluate)
for command in (generate, export, report, env):
    app.command()(command)


def main() -> None:
    """Run the command; turn what ends it into an exit code (errors.py)."""
    try:
        with memory_explained():
            app()
    except (UserError, NonFinite, Interrupted, RankFailed) as error:
        problems = error.problems if isinstance(error, UserError) else (str(error),)
        for problem in problems:
            print(f"meshtune: {printable(problem)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if not disk_is_full(error) and error.errno not in BAD_PATH:
            raise
        remedy = "Make room, and run the command" if disk_is_full(error) else "Change the path, and run it"
        print(f"meshtune: {printable(str(error))}. {remedy} again.", file=sys.stderr)
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
