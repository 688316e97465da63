"""A plan in another tool's own configuration, with what that tool can't express of it.

    config + layout ──> accelerate | deepspeed | torchtitan | megatron | axolotl | llamafactory
                        files of that tool · the command that starts it · what is missing, as sentences

A layout that a tool can't run at all is refused, every reason at once. Where it only runs something
differently (a schedule it doesn't have, recomputation of whole blocks where the layout asks for less), the
nearest setting that fits the same memory is written, and a sentence names the difference.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.length import in_steps
from meshtune.nearest import did_you_mean, nearest
from meshtune.plan.export import accelerate, axolotl, deepspeed, llamafactory, megatron, torchtitan
from meshtune.plan.export.exported import Exported
from meshtune.plan.search import Choice
from meshtune.rundir import write_text_atomically

__all__ = ["TOOLS", "Exported", "export", "write"]

TOOLS: Mapping[str, Callable[[Config, Layout, int], Exported]] = {  # writer(config, layout, gpus_per_node)
    "accelerate": accelerate.write,
    "deepspeed": deepspeed.write,
    "torchtitan": torchtitan.write,
    "megatron": megatron.write,
    "axolotl": axolotl.write,
    "llamafactory": llamafactory.write,
}


def check_tool(tool: str) -> str:
    """Return `tool` if plans can be exported for it, else raise UserError with the nearest name."""
    if tool not in TOOLS:
        hint = did_you_mean(nearest(tool, TOOLS), f"; tools: {', '.join(TOOLS)}.")
        raise UserError(f"--export {tool} is no tool that plans are written for{hint}")
    return tool


def export(tool: str, config: Config, layout: Layout, gpus_per_node: int) -> Exported:
    """Return the files and the command with which `tool` runs `layout`; nothing is written to disk.

    The tools count steps or epochs: train.total_tokens is written as the steps that it gives.
    Raises UserError for an unknown tool, and for a layout that it can't run, with every reason.
    """
    return TOOLS[check_tool(tool)](in_steps(config), layout, gpus_per_node)


def write(tool: str, config: Config, choices: Iterable[Choice], folder: Path) -> list[str]:
    """Write the files with which `tool` runs the first of `choices` that it can run into `folder`.

    Returns sentences: which layout is written instead and why, if it is not the first; the command that
    starts it; what the tool can't express. Makes missing folders. Raises UserError, with nothing written, if
    the tool can run none of `choices` (with the reasons of the first) or a file exists already.
    """
    first, refused = None, None
    for choice in choices:
        first = first or choice
        try:
            exported = export(tool, config, choice.layout, choice.cluster.node)
            break
        except UserError as error:
            refused = refused or error
    else:
        raise refused or UserError(f"There is no layout to write for {tool}.")
    if taken := [name for name in exported.files if (folder / name).exists()]:
        raise UserError(f"{folder / taken[0]} exists; name another folder with --to.")
    for name, text in exported.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / name, text)
    instead = []
    if refused:
        slower = choice.seconds.total / first.seconds.total - 1
        instead = [
            f"{' '.join(refused.problems)} Instead, {choice.layout} is written ({slower:+.1%} time a step)."
        ]
    return [
        *instead,
        f"{choice.layout} for {tool} is in {folder}; start it with: {exported.command}",
        *exported.missing,
    ]
