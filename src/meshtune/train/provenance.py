"""Hardware and software that a result depends on."""

import platform

import torch
import transformers

import meshtune


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def versions() -> dict[str, str]:
    """Versions of the software that a result depends on."""
    return {
        "meshtune": meshtune.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
