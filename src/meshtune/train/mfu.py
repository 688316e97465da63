"""Model FLOPs utilisation: the share of the device's peak that the model's own arithmetic takes (docs/mfu.md)."""

import tomllib
from functools import cache
from importlib.resources import files

TF32, FP32 = "tf32", "fp32"
COLUMNS = {"fp32": FP32, "tf32": TF32, "bf16": "bf16", "bf16-pure": "bf16"}  # precision -> column of peak.toml


@cache
def _peaks() -> dict[str, dict]:
    return tomllib.loads(files("meshtune.train").joinpath("peak.toml").read_text("utf-8"))


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of a device as its driver names it; None when unknown, for any CPU, and for a slice of a GPU.

    precision: fp32, tf32 (fp32 with TensorFloat-32 products allowed), bf16 or bf16-pure; others have no figure.
    """
    if " MIG " in device_name or precision not in COLUMNS:
        return None
    named = [entry for entry in _peaks().values() if all(word in device_name for word in entry["words"])]
    if not named:
        return None
    best = max(named, key=lambda entry: len("".join(entry["words"])))  # the most exact name
    return 1e12 * best[COLUMNS[precision]]


def mfu(flops: float | None, seconds: float, peak: float | None, devices: int = 1) -> float | None:
    """FLOPs / (seconds × peak × devices), where all are known.

    A share above 1 cannot be: then the peak, or the clock, is not what it is taken for, and there is no figure.
    """
    if flops is None or peak is None or seconds <= 0:
        return None
    share = flops / (seconds * peak * devices)
    return share if share <= 1 else None
