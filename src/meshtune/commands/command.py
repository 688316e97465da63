"""The classes of all commands: their help, and answers to commands and options that do not exist."""

import inspect
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshtune.errors import UserError
from meshtune.tools.table import section_of, theirs, unsupported

SETTINGS_PAGE = "Settings: docs/settings.md has all; meshtune config prints a file to start from."
EXAMPLES = {
    "config": "meshtune config --method lora --size 8b --out run.yaml",
    "data": "meshtune data run.yaml",
    "plan": "meshtune plan model.name=Qwen/Qwen3-8B cluster.gpu=h100-sxm cluster.gpus=8",
    "plan explain": "meshtune plan explain zero3x8-mb1 model.name=Qwen/Qwen3-8B cluster.gpu=h100-sxm",
    "plan compare": "meshtune plan compare runs/a,runs/b",
    "plan max": "meshtune plan max cluster.gpu=rtx-4090",
    "plan export": "meshtune plan export megatron run.yaml --to exported",
    "dryrun": "meshtune dryrun run.yaml layout=zero3x8-mb1",
    "probe": "meshtune probe",
    "bench": "meshtune bench model.name=Qwen/Qwen3-0.6B --layouts mb4 --steps 10",
    "calibrate": "meshtune calibrate runs",
    "train": "meshtune train run.yaml train.learning_rate=1e-4",
    "sweep": "meshtune sweep sweep.yaml",
    "submit": "meshtune submit run.yaml --to slurm",
    "submit status": "meshtune submit status slurm:1234",
    "submit logs": "meshtune submit logs slurm:1234",
    "submit cancel": "meshtune submit cancel slurm:1234",
    "eval": "meshtune eval runs/my-run data.eval=test.jsonl",
    "generate": "meshtune generate runs/my-run -p 'Why is the sky blue?'",
    "chat": "meshtune chat runs/my-run",
    "export": "meshtune export runs/my-run merged --merge",
    "report": "meshtune report runs/my-run",
    "ui": "meshtune ui runs",
    "migrate": "meshtune migrate axolotl.yml",
    "schema": "meshtune schema --out schema.json",
    "env": "meshtune env --model qwen3-8b",
}

OTHER_NAMES = {  # command -> its names in other trainers
    "train": "finetune fine-tune sft fit run",
    "generate": "infer inference predict",
    "data": "preprocess",
    "ui": "webui",
}
OTHER_OPTIONS = {("sweep", "--slurm"): "--to slurm"}  # (command, option) -> what it is called now


class Help:
    """Help of a command or group: docstrings without their line breaks, flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for flag in (param for param in params if getattr(param, "is_flag", False)):
            flag.display_type_rich = lambda ctx: None
        return params


class Command(Help, TyperCommand):
    """A command with an example in its help; an unknown option is answered with the setting it may mean, a
    missing argument with the example.
    """

    def __init__(self, name: str | None, *, help: str | None = None, **more: Any) -> None:
        text = "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(help or "").split("\n\n"))
        super().__init__(name, help=text, **more)
        if example := EXAMPLES.get(name or ""):
            reads = any("KEY=VALUE" in (param.metavar or "") for param in self.params)
            self.epilog = f"Example: {example}" + f"\n\n{SETTINGS_PAGE}" * reads

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [*args]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "MissingParameter":
                param: Any = getattr(error, "param", None)
                what = (param.metavar or param.name.upper()).split()[0]
                what += f" ({param.help})" if param.help else ""
                raise UserError(f"{what} is missing, as in: {EXAMPLES[str(self.name)]}") from None
            if type(error).__name__ != "NoSuchOption":
                raise
            option = str(getattr(error, "option_name", ""))
            if sentence := setting_meant(str(self.name), option, words):
                raise UserError(f"No such option {option}: {sentence}") from None
            raise


class WithSubcommands(Command):
    """A command whose first word may be one of `subcommands`, each a command with options of its own."""

    subcommands: Mapping[str, Callable[..., None]] = {}

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        valued = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        # --json explain LAYOUT, but not --write explain
        flags = [*takewhile(lambda word: word.startswith("-") and word not in valued, args)]
        if args[len(flags) : len(flags) + 1] and args[len(flags)] in self.subcommands:
            args = [*args[len(flags) :], *flags]
        if not args or args[0] not in self.subcommands:
            return super().make_context(info_name, args, parent, **extra)
        commands, name = typer.Typer(add_completion=False), f"{info_name} {args[0]}"
        commands.command(f"{self.name} {args[0]}", cls=Command)(self.subcommands[args[0]])
        return typer.main.get_command(commands).make_context(name, args[1:], parent, **extra)


class Group(Help, TyperGroup):
    """All commands; one of other tools is answered with what to write instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if section := section_of("commands", args[0]):
            raise UserError(f"meshtune {args[0]}: {unsupported(section)}")
        for command, names in OTHER_NAMES.items():
            if args[0] in names.split():
                raise UserError(f"No such command {args[0]}; did you mean meshtune {command}?")
        return super().resolve_command(ctx, args)


def setting_meant(command: str, option: str, words: list[str]) -> str:
    """Clause on the setting, or the config file, that an option may mean; "" where none is near.

    words: of the command line behind the command.
    """
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == option), 0)
    _, equals, value = words[place].partition("=")
    value = value if equals else next(iter(words[place + 1 :]), "…")
    if instead := OTHER_OPTIONS.get((command, option)):
        return f"write {instead}."
    if option in ("--config", "--config-file", "-c"):
        return f"a config file needs no option; write meshtune {command} {value}."
    if section := section_of("options", option):
        return unsupported(section)
    from meshtune.config import SETTINGS, unknown_key

    name = option.lstrip("-").replace("-", "_")
    meant = [setting for setting in SETTINGS if name in (setting, setting.rpartition(".")[2])]
    if meant:
        written = " or ".join(f"{setting}={value}" for setting in meant)
        return f"settings have no dashes; write {written}."
    return unknown_key([name]) if theirs([name]) else ""
