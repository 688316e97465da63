"""Settings of a cluster that are probably in other units: Gb/s for GB/s, two directions, MiB for GiB."""

from __future__ import annotations

from meshtune.plan.hardware import GIGA
from meshtune.plan.kinds import kind_named, kinds_of
from meshtune.sections import ClusterConfig
from meshtune.units import GIB

# More than any GPU has; a kind's own limits are lower.
NETWORK = 100.0  # GB/s to other machines: 800 Gb/s
LINK = 1000.0  # GB/s to the others of its machine
MEMORY = 1000.0  # GiB
SLACK = 1.5  # times a kind's memory, which varies with the driver and the board


def other_units(settings: ClusterConfig) -> tuple[str, ...]:
    """Sentences on network, link and memory that are larger than the kind has, with what may be meant.

    Raises UserError for an unknown kind, and as `kinds_of`.
    """
    gpu = kind_named(settings.gpu, kinds_of(settings.hardware)) if settings.gpu else None
    if gpu is not None and gpu.processor:
        return ()
    name = f"a usual {gpu.name}" if gpu else "no GPU"
    link, memory = (gpu.link / GIGA, gpu.memory / GIB * SLACK) if gpu else (LINK, MEMORY)
    sentences = []
    if settings.network and settings.network > min(NETWORK, link):
        limit = f"{name} has {link:g} in its own machine" if link < NETWORK else "800 Gb/s are 100"
        sentences.append(
            f"cluster.network={settings.network:g} is in GB/s per GPU; {limit}. If Gb/s are meant, write "
            f"cluster.network={settings.network / 8:g}."
        )
    if settings.link and settings.link > link:
        sentences.append(
            f"cluster.link={settings.link:g} is in GB/s in one direction; {name} has "
            f"{'more than ' * (gpu is None)}{link:g}. Halve a rate of both directions, and divide Gb/s by 8."
        )
    if settings.memory_gib and settings.memory_gib > memory:
        has = "has as much" if gpu is None else f"has {gpu.memory / GIB:.4g}"
        sentences.append(
            f"cluster.memory_gib={settings.memory_gib:g} is in GiB; {name} {has}. If MiB are meant, write "
            f"cluster.memory_gib={settings.memory_gib / 1024:.4g}."
        )
    return tuple(sentences)
