"""Hardware, software and source code that a result depends on."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.cuda import nccl as nccl_of_torch

import meshtune

PROCESSOR = Path("/proc/cpuinfo")
PATIENCE = 5.0  # seconds in which git or nvidia-smi must have answered; no run waits longer for a fact


def device_name(device: torch.device) -> str:
    """Model of the GPU, as its driver names it, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """Model of this machine's processor; its architecture where the system does not name the model."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of the software that a result depends on; CUDA, NCCL and the driver where there is a GPU."""
    return {
        "meshtune": meshtune.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        **(gpu_versions() if torch.cuda.is_available() else {}),
    }


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
