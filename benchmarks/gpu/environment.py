"""Versions, the device, the packages that are missing; wheels that were carried to this machine."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MESHTUNE = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "yaml", "jinja2",
    "typer", "rich", "pydantic", "xxhash", "psutil",
)  # fmt: skip
OPTIONAL = (
    "datasets", "pyarrow", "altair", "vl_convert", "pytest", "hypothesis", "peft", "accelerate",
    "tensorboard", "trl", "liger_kernel", "triton", "flash_attn",
)  # fmt: skip
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "liger_kernel": "liger-kernel",
    "vl_convert": "vl-convert-python",
    "flash_attn": "flash-attn-4",
}


def install_wheels(folder: Path, target: Path) -> str | None:
    """Install the wheels of a folder into `target`, for this process and those it starts, without a network.

    Returns why it failed; None: all are installed.
    """
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        return f"{folder} has no wheels"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-cache-dir"]
    done = subprocess.run([*command, "--target", str(target), *wheels], capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-1000:]
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = f"{target}:{os.environ.get('PYTHONPATH', '')}"
    importlib.invalidate_caches()
    return None


def environment() -> dict[str, Any]:
    """Versions by package (None: not installed), "missing" packages and, where there is one, the GPU."""
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in (*MESHTUNE, *OPTIONAL):
        try:
            found[name] = version(DISTRIBUTIONS.get(name, name))
        except PackageNotFoundError:
            found[name] = None
    found["missing"] = [name for name in (*MESHTUNE, *OPTIONAL) if importlib.util.find_spec(name) is None]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory}
    return found


def child_environment() -> dict[str, str]:
    """The environment of the processes that the check starts: this checkout's meshtune, no network."""
    paths = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
