"""Processes of the other ranks on this machine, which the same torchrun or srun started."""

import os
from contextlib import suppress
from pathlib import Path

from meshtune.errors import UserError
from meshtune.launch.place import Place, place_of


def siblings(place: Place) -> dict[int, tuple[int, int]]:
    """Return rank -> (local rank, process id) of the other ranks that this process's parent has started.

    A rank is found from its first instruction on, by its environment, while it imports or is stopped; not
    where a shell script stands between it and srun, or in another container. place: of this rank.
    """
    found: dict[int, tuple[int, int]] = {}
    for pid in children(os.getppid()):
        with suppress(OSError, UserError, ValueError):  # it has ended meanwhile, or is no rank
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            other = place_of(dict(word.split("=", 1) for word in words if "=" in word))
            if other and other.rank != place.rank and (other.world, other.port) == (place.world, place.port):
                found[other.rank] = other.local_rank, pid
    return found


def rank_before(place: Place) -> tuple[int, int] | None:
    """Return (rank, process id) of the rank with the previous local rank on this machine; None if there is
    no other, or it can't be found. place: of this rank.
    """
    wanted = (place.local_rank - 1) % place.local_world
    pids = {rank: pid for rank, (local_rank, pid) in siblings(place).items() if local_rank == wanted}
    return next(iter(pids.items()), None)


def children(pid: int) -> list[int]:
    """Process ids of a process's children; [] if they can't be read, as on systems without /proc."""
    pids: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, file.read_text().split())
    return pids
