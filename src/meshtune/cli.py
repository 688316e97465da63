"""The command line: the commands of commands/, and the exit code of what ends them.

A command imports what it needs inside its function, so that `meshtune --help` answers at once.
"""

import signal
import sys
from typing import Annotated

import typer

from meshtune import __version__, errors, streams
from meshtune.commands.bench import bench
from meshtune.commands.calibrate import calibrate
from meshtune.commands.chat import chat
from meshtune.commands.command import Command, Group
from meshtune.commands.config import config, schema
from meshtune.commands.data import data
from meshtune.commands.dryrun import dryrun
from meshtune.commands.env import env
from meshtune.commands.evaluate import evaluate
from meshtune.commands.export import export
from meshtune.commands.generate import generate
from meshtune.commands.migrate import migrate
from meshtune.commands.plan import Plan, plan
from meshtune.commands.probe import probe
from meshtune.commands.report import report
from meshtune.commands.submit import Submit, submit
from meshtune.commands.sweep import SimulateAlone, sweep
from meshtune.commands.train import train
from meshtune.commands.ui import ui
from meshtune.errors import Interrupted, NonFinite, RankFailed, UserError, memory_explained
from meshtune.filesystem import BAD_PATH, chooser
from meshtune.rundir import disk_is_full, room
from meshtune.units import notice

app = typer.Typer(
    name="meshtune",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
CLASSES = {plan: Plan, submit: Submit, sweep: SimulateAlone}
PANELS = {  # of the help, in this order
    "Plan": (config, data, plan, dryrun),
    "Train": (train, submit, evaluate, generate, chat, export),
    "Measure": (probe, bench, calibrate, sweep),
    "Look": (report, ui, env, migrate, schema),
}
for panel, commands in PANELS.items():
    for command in commands:
        name = "eval" if command is evaluate else command.__name__
        app.command(name, cls=CLASSES.get(command, Command), rich_help_panel=panel)(command)


def print_version(asked: bool) -> None:
    """Print the version and end the command, if it is asked for."""
    if asked:
        print(f"meshtune {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Plan, train and measure the fine-tuning of Hugging Face language models."""


def main() -> None:
    """Run the command; turn what ends it into an exit code (errors.py)."""
    streams.guard()
    pressed: list[int] = []

    def press(number: int, _: object) -> None:  # an import that it ends may hide it in an error of its own
        pressed.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, press)
    try:
        with memory_explained():
            app(prog_name="meshtune")  # also as `python -m meshtune`, so that completion has one name
    except (UserError, NonFinite, Interrupted, RankFailed) as error:
        problems = error.problems if isinstance(error, UserError) else (str(error),)
        for problem in problems:
            notice(f"meshtune: {problem}")
        sys.exit(error.exit_code)
    except OSError as error:
        nowhere = "No usable temporary directory" in str(error)
        if not (disk_is_full(error) or nowhere or error.errno in BAD_PATH):
            raise
        remedy = room(error) if disk_is_full(error) else chooser(error) or "Change the path."
        notice(f"meshtune: {error}. {remedy} Then run the command again.")
        sys.exit(UserError.exit_code)
    except (KeyboardInterrupt, Exception) as error:
        broken_import = pressed and "importlib._bootstrap" in errors.traceback_of(error)
        if not (isinstance(error, KeyboardInterrupt) or broken_import):
            raise
        sys.exit(errors.INTERRUPTED)
    except SystemExit as end:
        if not end.code and (lost := streams.lost_result()):
            notice(f"meshtune: stdout could not be written: {lost.strerror}. {room(lost)} Then run it again.")
            sys.exit(UserError.exit_code)
        raise
