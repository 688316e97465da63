"""Rank, world and rendezvous address of this process, of torchrun or srun, and the other ranks.

The address of the first machine is looked up before the ranks wait for each other there:

    gpu03, from the node list of Slurm or MASTER_ADDR
      resolves                             itself
      does not, in a Slurm job             NodeAddr or NodeHostName of `scontrol show node gpu03`
      neither                              UserError at once, instead of after the time-out of the rendezvous

On clouds a node's name in Slurm is often not the name of its machine.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from meshtune.errors import UserError

SCONTROL_TIMEOUT = 30.0  # s; slurmctld can be slow when many ranks ask at once
RESOLVER_ATTEMPTS = 3  # a second apart, while the resolver reports a temporary failure


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


# SLURM_STEP_ID in the shell of sbatch, in that of salloc, and of a daemon (slurm.h): not a task of srun.
SHELLS_OF_SLURM = ("4294967291", "4294967290", "4294967292")


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Read the place that torchrun or srun gave this process; None if they started one rank, or none.

    An empty variable counts as unset. Raises UserError for a value that is none, and for missing variables
    that the rendezvous needs.
    """
    given = given_in(environ)
    if {"RANK", "WORLD_SIZE"} <= given.keys():
        world = number(given, "WORLD_SIZE", 1)
        if world > 1 and "LOCAL_RANK" not in given:
            raise UserError(
                f"RANK={given['RANK']} and WORLD_SIZE={world} are set without LOCAL_RANK, so that "
                "they may count ranks or machines. If ranks, set LOCAL_RANK and LOCAL_WORLD_SIZE too; if "
                "machines, set MESHTUNE_MACHINE=$RANK and MESHTUNE_MACHINES=$WORLD_SIZE, and unset both."
            )
        return torchrun_place(given, world) if world > 1 else None
    if "SLURM_PROCID" not in given:
        return None
    if given.get("SLURM_STEP_ID", SHELLS_OF_SLURM[0]) in SHELLS_OF_SLURM:
        return None
    if {"SLURM_NTASKS", "SLURM_LOCALID"} <= given.keys():
        # The tasks of this srun; SLURM_NTASKS is the whole allocation's in the shell of salloc or sbatch.
        world = number(given, "SLURM_STEP_NUM_TASKS", 1, number(given, "SLURM_NTASKS", 1))
        if "SKYPILOT_NODE_RANK" in given and world == number(
            given, "SLURM_STEP_NUM_NODES", 1, nodes_of_job(given)
        ):
            return None  # SkyPilot on Slurm starts one task on each machine
        return srun_place(given, world) if world > 1 else None
    return None


def given_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that have a value: an empty one counts as unset."""
    return {name: value for name, value in environ.items() if value.strip()}


def nodes_of_job(environ: Mapping[str, str]) -> int:
    """Nodes of the Slurm job that this process is in; 1 outside of one."""
    given = given_in(environ)
    return number(given, "SLURM_JOB_NUM_NODES", 1, number(given, "SLURM_NNODES", 1, 1))


def refuse_batch_script(environ: Mapping[str, str]) -> None:
    """Raise UserError in the batch script of a Slurm job of several nodes, which runs on the first one."""
    step = environ.get("SLURM_STEP_ID", "").strip() or SHELLS_OF_SLURM[0]
    is_script = bool(environ.get("SLURM_PROCID", "").strip()) and step == SHELLS_OF_SLURM[0]
    if is_script and (nodes := nodes_of_job(environ)) > 1:
        raise UserError(
            f"This is the batch script of a Slurm job of {nodes} nodes (SLURM_PROCID is set, but not by "
            "srun), which runs on the first node only. Put srun before the command; or unset "
            "SLURM_PROCID, to use only this node."
        )


def number(environ: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    """The whole number in a variable; `default` where it is not set. Raises UserError for another value and
    for one below `least`.
    """
    text = environ.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or int(text) < least:
        raise UserError(
            f"{name}={text}: it must be a whole number from {least} on. Whatever starts the ranks sets it "
            "(torchrun, srun or a platform); mend it there, or unset it."
        )
    return int(text)


def torchrun_place(environ: Mapping[str, str], world: int) -> Place:
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise UserError(
            f"RANK={environ['RANK']} and WORLD_SIZE={world} are set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: start the ranks by torchrun, or unset both to "
            "start them here (--nproc)."
        )
    rank = number(environ, "RANK", 0)
    return checked(
        Place(
            rank=rank,
            world=world,
            local_rank=number(environ, "LOCAL_RANK", 0),
            local_world=number(environ, "LOCAL_WORLD_SIZE", 1, world),
            address=environ["MASTER_ADDR"].strip(),
            port=number(environ, "MASTER_PORT", 1),
        ),
        "RANK and WORLD_SIZE",
    )


def srun_place(environ: Mapping[str, str], world: int) -> Place:
    node_lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in node_lists if name in environ), socket.gethostname())
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(world)))
    job, step = (number(environ, name, 0, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return checked(
        Place(
            rank=number(environ, "SLURM_PROCID", 0),
            world=world,
            local_rank=number(environ, "SLURM_LOCALID", 0),
            local_world=tasks_on(tasks, number(environ, "SLURM_NODEID", 0, 0)),
            address=environ.get("MASTER_ADDR", first_host(nodes)).strip(),
            # Every rank computes the same port; it lies below the ephemeral ports that the kernel hands out.
            port=number(environ, "MASTER_PORT", 1, 10000 + (job * 7 + step) % 20000),
        ),
        "SLURM_PROCID and SLURM_STEP_NUM_TASKS",
    )


def checked(place: Place, names: str) -> Place:
    """The place. Raises UserError, with the names of the variables, for a rank or a port that can't be."""
    if place.rank >= place.world:
        raise UserError(f"{names} say rank {place.rank} of {place.world}; ranks count from 0.")
    if place.port > 65535:
        raise UserError(f"MASTER_PORT={place.port}: a port is at most 65535.")
    return place


def threads_of(environ: Mapping[str, str], default: int) -> int:
    """CPU threads of a rank by OMP_NUM_THREADS; of a list (for nested regions) the first. Raises UserError.

    default: where it is empty or not set.
    """
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return number({"OMP_NUM_THREADS": first} if first else {}, "OMP_NUM_THREADS", 1, default)


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
    if not counts:
        raise UserError(f"SLURM_TASKS_PER_NODE={tasks}: it must be numbers such as 4(x2),3.")
    return counts[min(node, len(counts) - 1)]


# Other ranks on this machine #


def siblings(place: Place) -> dict[int, tuple[int, int]]:
    """Return rank -> (local rank, process id) of the other ranks that this process's parent has started.

    A rank is found from its first instruction on, by its environment, while it imports or is stopped; not
    where a shell script stands between it and srun, or in another container. place: of this rank.
    """
    import psutil  # here: commands that start no ranks don't wait for it

    found: dict[int, tuple[int, int]] = {}
    children = []
    with suppress(psutil.Error):  # the parent is gone
        children = psutil.Process(os.getppid()).children()
    for process in children:
        with suppress(psutil.Error, OSError, UserError):  # it has ended meanwhile, or isn't a rank
            other = place_of(process.environ())
            if other and other.rank != place.rank and (other.world, other.port) == (place.world, place.port):
                found[other.rank] = other.local_rank, process.pid
    return found


def rank_before(place: Place) -> tuple[int, int] | None:
    """Return (rank, process id) of the rank with the previous local rank on this machine; None if there is
    no other, or it can't be found. place: of this rank.
    """
    wanted = (place.local_rank - 1) % place.local_world
    pids = {rank: pid for rank, (local_rank, pid) in siblings(place).items() if local_rank == wanted}
    return next(iter(pids.items()), None)


# Address of the first machine #


def reachable_address(name: str) -> str:
    """Return `name` if it resolves on this machine, else the address that Slurm has for the node `name`.

    Raises UserError, with what to set, if neither gives one.
    """
    if resolves(name):
        return name
    addresses, reason = slurm_addresses(name) if "SLURM_JOB_ID" in os.environ else ([], "")
    for address in addresses:
        if resolves(address):
            return address
    source = "MASTER_ADDR" if os.environ.get("MASTER_ADDR") else "the first node of this Slurm job"
    raise UserError(
        f"The ranks are to meet at {name} ({source}), but this name does not resolve on "
        f"{socket.gethostname()}{reason}. Set MASTER_ADDR to an IP address of the machine of rank 0, or to a "
        "name that resolves on every machine (torchrun: start it there with --local-addr)."
    )


def resolves(name: str) -> bool:
    """True if this machine has an address for a host name; always for an IP address."""
    for attempt in range(1, RESOLVER_ATTEMPTS + 1):
        try:
            return bool(socket.getaddrinfo(name, None))
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or attempt == RESOLVER_ATTEMPTS:
                return False
            time.sleep(1)
        except UnicodeError:  # a name that can't be a host's, such as a..b
            return False
    return False


def slurm_addresses(node: str) -> tuple[list[str], str]:
    """Return the addresses that Slurm has for a node, and the end of the error if none of them resolves."""
    command = ["scontrol", "show", "node", node]
    asked = f"`{' '.join(command)}`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT)
    except FileNotFoundError:
        return [], f", and {asked} can't be asked: scontrol is not on PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f", and {asked} failed: {error}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        return [], f", and {asked} failed: {lines[0] if lines else f'exit code {done.returncode}'}"
    addresses = re.findall(r"\b(?:NodeAddr|NodeHostName)=(\S+)", done.stdout)
    return addresses, f", nor does what {asked} gives: {' and '.join(addresses) or 'no address'}"
