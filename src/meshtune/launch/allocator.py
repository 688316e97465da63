"""The setting of torch's CUDA allocator: expandable segments, unless the user has set it.

Torch reads the environment once, before the first tensor on a GPU. Ranks that are started have the
environment of the process that starts them.
"""

import re
from collections.abc import Mapping, MutableMapping

NAME, EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
SETTING = f"{NAME}={EXPANDABLE}"  # for a shell
# Torch 2.13 reads the first of them that is set (c10/cuda/CUDAAllocatorConfig.h, and tried): old ones win.
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", NAME)


def expand_segments(environ: MutableMapping[str, str]) -> None:
    """Set expandable segments, unless any of NAMES is set."""
    if not any(name in environ for name in NAMES):
        environ[NAME] = EXPANDABLE


def expands(environ: Mapping[str, str]) -> bool:
    """True if the segments of a rank that trains with this environment are expandable."""
    setting = next((environ[name] for name in NAMES if name in environ), EXPANDABLE)
    values = re.findall(r"expandable_segments\s*:\s*(\w+)", setting)
    return bool(values) and values[-1] == "True"


def conflicts(environ: Mapping[str, str]) -> list[str]:
    """Sentences on settings of the user that differ, or that plans do not count on; none: all is well."""
    given = {name: environ[name] for name in NAMES if name in environ}
    sentences = []
    if len(set(given.values())) > 1:
        first, *others = given
        sentences.append(
            f"{', '.join(f'{name}={value}' for name, value in given.items())}: torch reads only {first}; "
            f"unset {' and '.join(others)}."
        )
    if not expands(environ):
        name, value = next(iter(given.items()))
        sentences.append(
            f"{name}={value} is without expandable segments, which plans count on: the allocator reserves "
            f"more memory than planned. Add {EXPANDABLE}."
        )
    return sentences
