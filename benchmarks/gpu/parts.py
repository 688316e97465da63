"""The check's parts, in the order of what matters most; each ends within nine minutes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu.environment import MESHTUNE
from gpu.figures import Check, Result

PYTEST = ("pytest", "hypothesis")


@dataclass(frozen=True)
class Figure:
    """One figure of a part."""

    name: str
    seconds: float  # that it may take
    run: Callable[..., Result]  # with seconds=
    needs: Sequence[str] = MESHTUNE  # packages
    gpu: bool = False  # True: nothing to run without a GPU
    tiny: bool = True  # False: with tiny models another figure tries the same commands


EAGER = "train.compile=false"
FP8 = "train.precision=fp8"


def parts(check: Check) -> Mapping[str, Sequence[Figure]]:
    """Figures by part, both in order."""
    one, eight, bench, peer = check.one, check.eight, check.bench, check.peer
    several, few, single = ((2, 1), (1, 2), (2, 1)) if check.scale.tiny else ((4, 1), (2, 2), (4, 1))
    plain, halves = layout_of(several), layout_of(few)
    one_b = partial(bench, one, several)
    eight_b = partial(bench, eight, single, f"{layout_of(single)}-full")
    eight_lora = partial(bench, eight, few, halves, "method=lora")

    def tests(name: str, seconds: float) -> Figure:
        file = f"tests/gpu/test_gpu_{name}.py"
        return Figure(name, seconds, partial(check.tests, file), (*MESHTUNE, *PYTEST), gpu=True)

    return {
        "probe": [
            Figure("kernels", 90, partial(check.script, "kernels.py")),
            Figure("probe", 240, check.probe),
            tests("launch", 60),
        ],
        "bench": [
            Figure("8b-full", 170, eight_b),
            Figure("1b-full", 140, partial(one_b, plain)),
            Figure("1b-eager", 90, partial(one_b, plain, EAGER)),
            Figure("1b-selective", 90, partial(one_b, f"{plain}-selective"), tiny=False),
            Figure("1b-recomputed", 90, partial(one_b, f"{plain}-full"), tiny=False),
            Figure("1b-fp8", 110, partial(one_b, plain, FP8), (*MESHTUNE, "torchao"), tiny=False),
            Figure("8b-eager", 170, partial(eight_b, EAGER), tiny=False),
            Figure("8b-lora-eager", 270, partial(eight_lora, EAGER), tiny=False),
        ],
        "peers": [
            Figure("1b-meshtune", 110, partial(one_b, plain), tiny=False),
            Figure("1b-hand", 150, partial(peer, "hand", one, several), ("torch", "transformers")),
            Figure("1b-trainer", 100, partial(peer, "trainer", one, several), ("transformers", "accelerate")),
            Figure("1b-trl", 100, partial(peer, "trl", one, several), ("trl", "datasets", "accelerate")),
            Figure(
                "1b-liger", 100, partial(peer, "liger", one, several),
                ("transformers", "accelerate", "liger_kernel", "triton"), gpu=True,
            ),
            Figure(
                "8b-lora-trainer", 140, partial(peer, "trainer", eight, few, lora=True),
                ("transformers", "accelerate", "peft"),
            ),
            Figure("8b-lora", 270, eight_lora),
        ],
        "tests": [
            tests("train", 240),
            tests("attention", 200),
            tests("tensor", 60),
            tests("families", 150),
            tests("probe", 120),
        ],
        "memory": [
            tests("reserved", 150),
            Figure("1b-micro-batch", 240, partial(check.micro_batch, one, "mb1-ga1")),
            Figure("1b-profile", 100, partial(check.profile, one, several, plain)),
        ],
        "train": [
            Figure("1b-packed", 250, partial(check.train, one, several, plain)),
            Figure(
                "8b-lora-packed", 270,
                partial(check.train, eight, few, halves, "method=lora", "checkpoint.async_save=false"),
            ),
        ],
        "experts": [
            Figure("products", 90, partial(check.script, "experts.py", "products")),
            Figure("block", 120, partial(check.script, "experts.py", "block")),
            Figure("mixture", 170, partial(bench, check.mixture, several, plain)),
            Figure("mixture-full", 140, partial(bench, check.mixture, several, f"{plain}-full"), tiny=False),
        ],
        "fit": [
            Figure("8b-qlora", 200, partial(bench, eight, few, halves, "method=qlora"), tiny=False),
            Figure("1b-offload", 90, partial(one_b, f"{plain}-offload"), tiny=False),
            Figure("1b-states", 90, partial(one_b, plain, "train.offload=optimizer"), tiny=False),
            Figure("1b-8bit", 90, partial(one_b, plain, "train.optimizer=adamw-8bit"), tiny=False),
        ],
    }  # fmt: skip


def layout_of(batch: tuple[int, int]) -> str:
    """The layout of one device with a micro-batch and a number of them a step."""
    return f"mb{batch[0]}-ga{batch[1]}"


def skipped(figure: Figure, environment: Mapping[str, Any], left: float) -> str | None:
    """Why a figure can't be made: packages, the GPU or time; None: it can."""
    if missing := [name for name in figure.needs if name in environment["missing"]]:
        return f"missing: {', '.join(missing)}"
    if figure.gpu and "gpu" not in environment:
        return "needs a GPU"
    return f"{left:.0f} s left" if left < 20 else None
