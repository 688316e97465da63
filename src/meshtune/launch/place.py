"""Rank, world and rendezvous address of this process, from the environment of torchrun or srun."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshtune.errors import UserError


@dataclass(frozen=True)
class Place:
    """One process among the ranks."""

    rank: int
    world: int  # ranks on all machines
    local_rank: int  # among the ranks of its machine
    local_world: int  # ranks on its machine
    address: str  # host of the store where the ranks meet; a name may not resolve (reachable_address)
    port: int

    def environment(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set."""
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world), "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }  # fmt: skip


def joined() -> bool:
    """True if this process is one of several ranks that torchrun or srun started."""
    return place_of(os.environ) is not None


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Read the place that torchrun or srun gave this process; None if they started one rank, or none.

    Raises UserError if variables that the rendezvous needs are missing.
    """
    if {"RANK", "WORLD_SIZE"} <= environ.keys():
        world = int(environ["WORLD_SIZE"])
        return torchrun_place(environ, world) if world > 1 else None
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= environ.keys():
        # The tasks of this srun; SLURM_NTASKS is the whole allocation's in the shell of salloc or sbatch.
        world = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
        return srun_place(environ, world) if world > 1 else None
    return None


def torchrun_place(environ: Mapping[str, str], world: int) -> Place:
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise UserError(
            f"RANK={environ['RANK']} and WORLD_SIZE={world} are set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: start the ranks by torchrun, or unset both to "
            "start them here (--nproc)."
        )
    rank = int(environ["RANK"])
    return Place(
        rank=rank,
        world=world,
        local_rank=int(environ.get("LOCAL_RANK", rank)),
        local_world=int(environ.get("LOCAL_WORLD_SIZE", world)),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )


def srun_place(environ: Mapping[str, str], world: int) -> Place:
    node_lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in node_lists if name in environ), socket.gethostname())
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(world)))
    job, step = (int(environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        world=world,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world=tasks_on(tasks, int(environ.get("SLURM_NODEID", 0))),
        address=environ.get("MASTER_ADDR", first_host(nodes)),
        # Every rank computes the same port; it lies below the ephemeral ports that the kernel hands out.
        port=int(environ.get("MASTER_PORT", 10000 + (job * 7 + step) % 20000)),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: node003 of node[003-010,012],login1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else nodes)


def tasks_on(tasks: str, node: int) -> int:
    """Count the tasks of node number `node`, from 0; of the last node if there are fewer.

    tasks: as Slurm writes them, 4(x2),3 for two nodes of four tasks and a third of three.
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]
