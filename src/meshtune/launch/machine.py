"""Number and meeting point of this machine, where a platform starts one process on each of several machines.

    SkyPilot     SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK, the first line of SKYPILOT_NODE_IPS
    dstack       DSTACK_NODES_NUM, DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP
    Kubeflow     PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    any other    MESHTUNE_MACHINES, MESHTUNE_MACHINE or JOB_COMPLETION_INDEX, MASTER_ADDR, MASTER_PORT

`launch.run` starts the ranks of this machine itself: rank = machine · ranks of a machine + local rank.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from zlib import crc32

from meshtune.errors import UserError
from meshtune.launch.place import Place, given_in, number, place_of

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Machine:
    """One of several machines; a process on each starts that machine's ranks."""

    number: int
    machines: int
    ranks: int | None  # of each machine, as its variable has them; None: not said
    address: str  # host of the first machine, where the ranks meet; a name may not resolve yet
    port: int
    said_by: str = ""  # the variables and their values, for messages

    def world(self, wanted: int | None, nproc: int | None, gpus: int, layout: str) -> int:
        """Number of ranks on all machines. Raises UserError where the numbers don't go together.

        wanted: of the layout; None: open. nproc: ranks of each machine, --nproc. gpus: of this machine, 0 on
        its processor.
        """
        shared = (wanted or 0) // self.machines
        each = nproc or self.ranks or gpus or shared or 1
        if wanted is None or wanted == each * self.machines:
            return each * self.machines
        asked = f"--nproc {nproc}" if nproc else f"{each} a machine"
        raise UserError(
            f"Layout {layout} is for {wanted} ranks, but {self.said_by} and {asked} make "
            f"{each * self.machines}; change the layout, the number of machines, or --nproc."
        )

    def door(self) -> AbstractContextManager[socket.socket | None]:
        """Open the socket of the store; nothing but on the first machine. Raises UserError if it is taken."""
        if self.number:
            return nullcontext()
        if self.machines == 1:
            return socket.create_server((LOCALHOST, 0))
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            return socket.create_server(("", self.port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise UserError(
                f"The ranks of {self.machines} machines are to meet at port {self.port} of this one, which "
                f"can't be opened ({error.strerror}); set another MASTER_PORT on all of them."
            ) from error

    def places(self, ranks: int, door: socket.socket | None) -> list[Place]:
        """Places of this machine's ranks, which are `ranks`, as on every machine. door: of `door`."""
        first, world = self.number * ranks, self.machines * ranks
        address, port = (self.address, self.port) if door is None else (LOCALHOST, door.getsockname()[1])
        return [Place(first + n, world, n, ranks, address, port) for n in range(ranks)]


ONLY = Machine(0, 1, None, LOCALHOST, 0)


@dataclass(frozen=True)
class Platform:
    """Names of the variables that a platform sets. numbers: of the machine, the first that is there."""

    machines: str
    numbers: tuple[str, ...]
    address: str
    port: str
    ranks: str = ""
    run: str = ""  # a name of the run, the same on all machines: a port is made of it where none is set
    words: tuple[str, ...] = ()  # values of `ranks` that leave the number to the program


PLATFORMS = (
    Platform(
        "SKYPILOT_NUM_NODES", ("SKYPILOT_NODE_RANK",), "SKYPILOT_NODE_IPS", "MASTER_PORT",
        "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID", ("0",),
    ),
    Platform(
        "DSTACK_NODES_NUM", ("DSTACK_NODE_RANK",), "DSTACK_MASTER_NODE_IP", "MASTER_PORT",
        "DSTACK_GPUS_PER_NODE", "DSTACK_RUN_NAME", ("0",),
    ),
    Platform(
        "PET_NNODES", ("PET_NODE_RANK",), "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE",
        words=("auto", "cpu", "gpu"),
    ),
    Platform(
        "MESHTUNE_MACHINES", ("MESHTUNE_MACHINE", "JOB_COMPLETION_INDEX"), "MASTER_ADDR", "MASTER_PORT",
        "MESHTUNE_RANKS",
    ),
)  # fmt: skip


def machine_of(environ: Mapping[str, str]) -> Machine | None:
    """Read which of several machines this is; None on one machine, and on a rank (`place_of`), whose
    variables are the inner ones.

    Raises UserError for a value that can't be read, for missing variables, and for two platforms that
    disagree.
    """
    if place_of(environ) is not None:
        return None
    given = given_in(environ)
    found = [machine for platform in PLATFORMS if (machine := _of(platform, given)) is not None]
    for other in found[1:]:
        if (other.number, other.machines) != (found[0].number, found[0].machines):
            raise UserError(
                f"{found[0].said_by} and {other.said_by} disagree on which machine this is; unset the "
                "variables of one."
            )
    return found[0] if found and found[0].machines > 1 else None


def joined() -> bool:
    """True if this process is one of several ranks that torchrun or srun started, or starts those of one of
    several machines: the first rank decides for all.
    """
    return place_of(os.environ) is not None or machine_of(os.environ) is not None


def _of(platform: Platform, given: Mapping[str, str]) -> Machine | None:
    """The machine as one platform's variables have it; None where they are not set."""
    if platform.machines not in given:
        return None
    machines = number(given, platform.machines, 1)
    own = next((name for name in platform.numbers if name in given), platform.numbers[0])
    if machines == 1:
        return Machine(0, 1, None, LOCALHOST, 0, f"{platform.machines}=1")
    needed = [own, platform.address] + ([] if platform.run else [platform.port])
    if missing := [name for name in needed if name not in given]:
        raise UserError(
            f"{platform.machines}={machines} says that this is one of several machines, whose ranks meet "
            f"by {', '.join(needed)}; set {' and '.join(missing)}, or unset {platform.machines} to use only "
            "this machine."
        )
    mine = number(given, own, 0)
    if mine >= machines:
        raise UserError(f"{own}={mine} of {platform.machines}={machines}: machines count from 0.")
    ranks = given.get(platform.ranks, "").strip()
    port = number(given, platform.port, 1, 1)
    if port > 65535:
        raise UserError(f"{platform.port}={port}: a port is at most 65535.")
    named = f"{given.get(platform.run, '')} {given[platform.address]}"
    return Machine(
        mine,
        machines,
        None if not ranks or ranks in platform.words else number(given, platform.ranks, 1),
        given[platform.address].split()[0],
        # Below the ephemeral ports that the kernel hands out, as srun's.
        number(given, platform.port, 1, 10000 + crc32(named.encode()) % 20000),
        f"{platform.machines}={machines} with {own}={mine}",
    )
