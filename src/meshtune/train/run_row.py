"""The row that begins metrics.jsonl: what was run, on what, and what the planner predicted for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import uuid
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch.cuda import nccl as nccl_of_torch

from meshtune.errors import UserError
from meshtune.experts.register import products_of
from meshtune.launch import installed
from meshtune.launch.installed import processor_name
from meshtune.launch.rank import cores
from meshtune.meter.rows import time_now
from meshtune.model.stored import BASE_DIGEST
from meshtune.rundir import BEGUN, EXPECTED
from meshtune.yaml_tree import read_yaml

if TYPE_CHECKING:
    from meshtune.data.prepare import Prepared
    from meshtune.parallel.mesh import World
    from meshtune.rundir import Row, RunDir
    from meshtune.train.loop import Run
    from meshtune.train.model import RankModel


def run_row(settings: Row, run: Run, model: RankModel, prepared: Prepared, resumed: int | None) -> Row:
    """Facts of one start of a run; {} on ranks other than the main one. Every rank calls it.

    settings: those that the row has, by its keys. resumed: step of the checkpoint that the run resumes from,
    None for a new run.
    """
    hosts = hosts_of(run.world)
    if not run.world.main:
        return {}
    return {
        **identity(run.folder),
        **facts_of(settings, model, prepared),
        "total_steps": run.steps,
        BASE_DIGEST: run.exporter.base_digest,
        "resumed_from": resumed,
        **hosts,
        **predicted(run.folder),
        **expected(),
    }


def facts_of(settings: Row, model: RankModel, prepared: Prepared | None) -> Row:
    """Facts of a run, or of a benched layout, that begins now on this rank's device.

    settings: as `run_row` takes them. prepared: the data; None: random tokens.
    """
    world, balance = model.parallel.world, model.passes.balance
    return {
        "started": time_now(),
        "parameters": model.census.total,
        "trainable_parameters": model.census.trainable,
        "layout": str(world.layout),
        "world": world.size,
        **settings,
        "data_digest": prepared and prepared.digest,
        "label_share": prepared and prepared.train.label_share,
        "longest_sequence": prepared and prepared.train.width,
        "flash_attention": model.flash,
        **(
            {"router": "frozen" if balance.frozen else "trained", "expert_share": model.census.expert_share}
            if balance
            else {}
        ),
        "experts": products_of(model.whole),
        "loss_function": getattr(model.passes.objective, "name", None),
        "device": device_name(world.device),
        "device_type": world.device.type,
        "cores": cores(),
        **versions(),
        **git_facts(),
    }


def hosts_of(world: World) -> dict[str, Any]:
    """Name of the main rank's host, and the number of hosts of all ranks. Every rank calls it."""
    names = world.all_gather_object(socket.gethostname())
    return {"host": names[0], "nodes": len(set(names))}


def identity(folder: RunDir) -> dict[str, Any]:
    """Id of the run in a folder, which it keeps however often it continues, and the number of this start."""
    starts = folder.rows("run")
    before = starts[-1] if starts else {}
    return {"id": before.get("id") or uuid.uuid4().hex, "start": len(starts) + 1}


def predicted(folder: RunDir) -> dict[str, Any]:
    """`predicted` of the folder's plan.yaml; {} for a model or devices that the planner can't predict."""
    plan = read_yaml(folder.plan_file)
    return {"predicted": plan["predicted"]} if "predicted" in plan else {}


def expected() -> dict[str, Any]:
    """`expected` of the job that `meshtune submit` sent, and when it `begun`: its job or this process; {}
    for a run that was not submitted.
    """
    if (text := os.environ.get(EXPECTED)) is None:
        return {}
    try:
        begun = float(os.environ.get(BEGUN) or psutil.Process().create_time())
        return {"expected": json.loads(text), "begun": time_now(begun)}
    except ValueError:
        raise UserError(f"{EXPECTED}={text} is not what `meshtune submit` wrote; unset it.") from None


# Hardware, software and source code that a result depends on #


PATIENCE = 5.0  # seconds in which git or nvidia-smi must have answered; no run waits longer for a fact


def device_of(name: str) -> torch.device:
    """The device of `train.device`: auto, cuda or cpu. Raises UserError when CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "train.device = cuda, but torch sees no CUDA device; use train.device=cpu, or install torch for "
            "CUDA."
        )
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def gpus_of(device: torch.device) -> list[tuple[str, float]]:
    """(name, bytes) of each GPU of this machine; none where the run is on the processor."""
    if device.type != "cuda":
        return []
    properties = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [(gpu.name, float(gpu.total_memory)) for gpu in properties]


def device_name(device: torch.device) -> str:
    """Model of the GPU, as its driver names it, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def versions() -> dict[str, str]:
    """Versions of the software that a result depends on; CUDA, NCCL and the driver where there is a GPU."""
    return installed.versions() | (gpu_versions() if torch.cuda.is_available() else {})


def gpu_versions() -> dict[str, str]:
    """Versions of CUDA and NCCL that torch uses, and of the driver, as far as there are any."""
    nccl = ".".join(map(str, nccl_of_torch.version())) if dist.is_nccl_available() else None
    drivers = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = {"cuda": torch.version.cuda, "nccl": nccl, "driver": drivers and drivers.splitlines()[0]}
    return {name: version for name, version in found.items() if version}


def git_facts() -> dict[str, Any]:
    """The commit that the working directory is at, and whether tracked files differ from it.

    {} outside a repository or without git; "git_dirty" is left out where git takes too long to tell.
    """
    commit = answer("git", "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    changes = answer("git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit} | ({} if changes is None else {"git_dirty": bool(changes)})


def answer(*command: str) -> str | None:
    """Text that a command prints; None if it is missing, fails or takes longer than PATIENCE."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
