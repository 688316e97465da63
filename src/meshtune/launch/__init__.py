"""Start ranks here, or join those that torchrun or srun started. Knows nothing of training.

    run(function, *args, ranks=8, device="cpu")      # function(rank, *args) on each of 8 ranks

    this process is a rank (`place_of`)   the function runs here, as that rank
    one rank                              it runs here, without a process group
    several                               they are started here: forked on CPU, so that all share what is
                                          imported; spawned on CUDA, which survives no fork
    one of several machines (`machine_of`)  its share of the ranks is started here; each machine runs the same

    place.py     rank, world and rendezvous address, from the environment of torchrun or srun; an address also
                 where the names of Slurm's nodes do not resolve
    machine.py   which of several machines this is, from the environment of SkyPilot, dstack or Kubernetes
    rank.py      one rank: its process group, its log, the watch over it
    failure.py   the failure that the others followed from: who prints it, what is raised
    signals.py   the signals that ask a run to stop
    start.py     `run`: start the ranks in a temporary folder, forward signals to them, wait for them
    allocator.py torch's CUDA allocator, from the environment: expandable segments by default

Ranks started here get torchrun's environment, and this process keeps the TCPStore of their rendezvous, so
that the store outlives any of them. The first rank that fails ends all, and its error is raised here; ranks
that lost their connection to it are not reported. Signals are forwarded to every rank.

torch.distributed.elastic's start_processes is not used: it stops the other ranks by SIGTERM, which here asks
for a checkpoint, gives them 30 s for it, and reports which rank was seen to fail first, not which did.
"""

from meshtune.launch.machine import joined, machine_of
from meshtune.launch.place import Place, place_of
from meshtune.launch.rank import Rank
from meshtune.launch.start import run, run_here, spawns

__all__ = ["Place", "Rank", "joined", "machine_of", "place_of", "run", "run_here", "spawns"]
