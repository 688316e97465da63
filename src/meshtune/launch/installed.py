"""This machine's processor and the installed software, without importing torch, which takes seconds."""

import ctypes
import importlib.util
import platform
import runpy
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshtune import __version__

PROCESSOR = Path("/proc/cpuinfo")
FLASH_4 = "pip install 'flash-attn-4>=4.0.0b36'"  # as pyproject.toml's extra `gpu`; pip's default is a stub


def processor_name() -> str:
    """Model of this machine's processor; its architecture where the system does not name the model."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of the software that every result depends on."""
    return {
        "meshtune": __version__,
        "torch": torch_build()["__version__"],
        "transformers": version("transformers"),
        "python": platform.python_version(),
        **{f"flash-attn-{number}": own for number, own in flash_versions().items()},
    }


def flash_versions() -> dict[int, str]:
    """Versions of FlashAttention that are installed besides torch's own, with those of their packages."""
    found = {}
    for number in (4, 3):
        with suppress(PackageNotFoundError):
            found[number] = version(f"flash-attn-{number}")
    return {number: own for number, own in found.items() if own.startswith(f"{number}.")}  # no stub, 0.0.1


def newest_flash() -> int:
    """Newest version of FlashAttention here, torch's 2 included; 4 without a GPU, to plan for others."""
    return 4 if has_no_gpu() else max(flash_versions(), default=2)


def torch_build() -> dict[str, Any]:
    """The values of torch/version.py: __version__; cuda, hip and xpu, None where it is built without."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin, "torch is required"
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def has_no_gpu() -> bool:
    """True if torch can see no GPU here: its build or the machine has no CUDA. False: ask torch."""
    build = torch_build()
    if build.get("hip") or build.get("xpu"):
        return False
    try:
        return not build["cuda"] or not ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
