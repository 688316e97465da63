"""A plan in another tool's own configuration, with what that tool can't express of it.

    config + layout ──> accelerate | deepspeed | torchtitan | megatron | axolotl | llamafactory
                        files of that tool · the command that starts it · what is missing, as sentences

A layout that a tool can't run, or would run as another one, is refused, every reason at once: the planner
refuses it before it ranks (`tool_for`), by rules.py. Sentences of differences.toml name what the tool runs
differently under the layouts that are left.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.config import Config
from meshtune.data.files import matches
from meshtune.errors import UserError, did_you_mean, expanded, nearest
from meshtune.layout import Layout
from meshtune.length import in_steps
from meshtune.placement.rules import sentences
from meshtune.plan.programs import MESHTUNE, TOOLS, Tool
from meshtune.rundir import write_text_atomically
from meshtune.sections import Sources
from meshtune.setting import is_template
from meshtune.tools import exporters
from meshtune.tools.planned import (
    Exported,
    Planned,
    differences,
    row_notes,
    setting_problems,
    training_problems,
    world_problems,
)
from meshtune.tools.rules import rules_of

EXPORTERS: Mapping[str, Callable[[Planned], Exported]] = {
    name: getattr(exporters, name) for name in TOOLS if name != MESHTUNE.name
}


class Written(NamedTuple):
    """An exported layout whose files are in a folder."""

    tool: Tool
    layout: Layout
    folder: Path
    exported: Exported

    @property
    def sentence(self) -> str:
        """The layout, the folder and the command that starts it there."""
        command = f"cd {shlex.quote(str(self.folder))} && {self.exported.command}"
        return f"{self.layout} for {self.tool.title} is in {self.folder}; start it with: {command}"

    def as_dict(self) -> dict[str, Any]:
        """`export` of the JSON document."""
        return {
            "tool": self.tool.name,
            "layout": str(self.layout),
            "folder": str(self.folder),
            "files": list(self.exported.files),
            "command": self.exported.command,
            "missing": list(self.exported.missing),
        }


def check_tool(name: str) -> str:
    """Return `name` if plans can be exported for it, else raise UserError with the nearest name."""
    if name not in EXPORTERS:
        hint = did_you_mean(nearest(name, EXPORTERS), f"; tools: {', '.join(EXPORTERS)}.")
        raise UserError(f"{name} is not a tool that plans are written for{hint}")
    return name


def tool_for(name: str, config: Config) -> Tool:
    """Return the tool by which the config is to be run, with its rules.

    name: as in --for. Raises UserError for an unknown one, and if it can't train so.
    """
    if name == MESHTUNE.name:
        return MESHTUNE
    tool = TOOLS[check_tool(name)]
    if problems := [*training_problems(tool, config)]:
        raise UserError(problems)
    refused = tuple(setting_problems(tool, config))
    return replace(tool, rules=partial(rules_of, name, config), refused=refused)


def check(name: str, config: Config) -> None:
    """Raise UserError with every setting that can't be exported to a tool. name: of the tool."""
    if problems := [*setting_problems(TOOLS[check_tool(name)], config)]:
        raise UserError(problems)


def export(
    name: str,
    config: Config,
    layout: Layout,
    *,
    blocks: int,
    gpus_per_node: int,
    adapts_experts: bool = False,
) -> Exported:
    """Return the files and the command with which a tool runs `layout`; nothing is written to disk.

    name: of the tool. blocks, adapts_experts: of the model. The tools count steps or epochs:
    train.total_tokens is written as the steps that it gives. Raises UserError for an unknown tool, and for a
    layout that it can't run, with every reason.
    """
    tool = TOOLS[check_tool(name)]
    problems = [*setting_problems(tool, config, adapts_experts=adapts_experts)]
    config = with_whole_paths(in_steps(config))
    problems += sentences(rules_of(name, config, blocks, config.data.seq_len), layout)
    problems += world_problems(config, layout, gpus_per_node)
    if problems:
        raise UserError(problems)
    plan = Planned(config, layout, blocks, gpus_per_node)
    written = EXPORTERS[name](plan)
    notes = [] if name in ("accelerate", "deepspeed") else row_notes(config.data, tool.title)
    lost = exporters.without_key(tool, plan)
    return replace(written, missing=(*written.missing, *differences(tool, plan), *notes, *lost))


def with_whole_paths(config: Config) -> Config:
    """The config with whole paths of the model, the rows and the template that are here: the command starts a
    tool in the folder of its files.
    """

    def whole(path: str) -> str:
        here = expanded(path)
        return os.path.abspath(here) if here.exists() or matches(here) else path

    def sources(several: Sources) -> Sources:
        return tuple(source.model_copy(update={"path": whole(source.path)}) for source in several)

    data, template = config.data, config.data.chat_template
    changed: dict[str, Any] = {"train": sources(data.train), "eval": sources(data.eval)}
    if template and not is_template(template) and Path(template).suffix:  # a file, not the name of another
        changed["chat_template"] = whole(template)
    model = config.model.model_copy(update={"name": whole(config.model.name)})
    return config.model_copy(update={"model": model, "data": data.model_copy(update=changed)})


def write(tool: Tool, exported: Exported, layout: Layout, folder: Path) -> Written:
    """Write the files of an export into `folder`, which is made if it is missing.

    Raises UserError, with nothing written, if a file exists already.
    """
    if taken := [name for name in exported.files if (folder / name).exists()]:
        raise UserError(f"{folder / taken[0]} exists; name another folder with --to.")
    for name, text in exported.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / name, text)
    return Written(tool, layout, folder, exported)
