"""Probe: measure this machine, and write a cluster file that plans and dry runs read."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.api.plan import Log, silent
from meshtune.errors import UserError, expanded
from meshtune.units import PYTORCH, counted, working

if TYPE_CHECKING:
    from meshtune.study.probe import Sizes

SECONDS = 125.0  # after which no round begins
CPU_RANKS = 8  # at most, unless asked for otherwise: more are seldom trained with on one machine
FILE = "my-cluster.toml"


def probe(
    out: str | os.PathLike[str] = FILE,
    *,
    nproc: int | None = None,
    seconds: float = SECONDS,
    sizes: Sizes | None = None,
    log: Log = silent,
) -> dict[str, Any]:
    """Measure this machine's GPUs, or its processor where there are none, and write a cluster file.

    Measures matmuls, attention, memory, small operations and, with several ranks, collectives; on CPU all of
    them with 1, 2, 4 … ranks at work. Returns the file's tables. out: the file, which must not exist. nproc:
    ranks at most; None: one for each GPU, 8 on CPU. seconds: after which no round of repeats begins. sizes:
    of what is measured; None: those of the device. Raises UserError before anything is measured for a file
    that can't be written, for more ranks than GPUs, without torch.distributed, and under torchrun or srun;
    afterwards if a GPU stopped answering or no matmul could be measured.
    """
    file = expanded(out)
    check_writable(file)
    from meshtune import launch

    if launch.joined():
        raise UserError(
            "probe starts its ranks itself, on one machine; run it there, without torchrun or srun."
        )
    with working(PYTORCH, lambda _: None):  # the command printed it already
        import torch

        from meshtune.rundir import write_text_atomically
        from meshtune.study import probe
        from meshtune.study.probe import probe_rank, rank_counts
        from meshtune.study.probe_kind import document_of, kind_of, text_of

        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        ranks = ranks_of(nproc, device_type)
        sizes = sizes or (probe.CUDA if device_type == "cuda" else probe.CPU)
        threads = {count: threads_of(count) for count in rank_counts(ranks)}
        device = device_of(device_type, ranks, sizes.dtype)
        before = provenance(device.name, threads)
    log(f"measuring {device.name} with up to {counted(ranks, 'rank')} …")
    figures = launch.run(probe_rank, sizes, device_type, threads, seconds, ranks=ranks, device=device_type)
    fitted = kind_of(figures, device)
    document = document_of(figures, device, fitted, before)
    write_text_atomically(file, text_of(document, file.name))
    return document


def check_writable(file: Path) -> None:
    """Raise UserError, with the remedy, for a file that exists or can't be written."""
    folder = file.parent
    if file.exists():
        raise UserError(f"{file} exists; name another file with --out, or remove it.")
    if file.suffix != ".toml":
        raise UserError(f"--out {file}: name a file that ends in .toml, such as {file.stem or 'my'}.toml.")
    if not folder.is_dir():
        raise UserError(f"--out {file}: there is no folder {folder}; make it, or name another file.")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out {file}: the folder {folder} can't be written to; name another file.")


def ranks_of(nproc: int | None, device_type: str) -> int:
    """Number of ranks at most. Raises UserError if there are fewer GPUs, or no way to join several ranks."""
    import torch

    gpus = torch.cuda.device_count() if device_type == "cuda" else 0
    ranks = nproc or gpus or CPU_RANKS
    if gpus and ranks > gpus:
        raise UserError(f"--nproc {ranks}: this machine has {counted(gpus, 'GPU')}; a rank needs one.")
    if ranks > 1 and not torch.distributed.is_available():
        raise UserError(
            "This torch was built without torch.distributed, so that ranks can't be joined; install another "
            "one, or measure one rank without collectives by --nproc 1."
        )
    return ranks


def threads_of(ranks: int) -> int:
    """CPU threads of each of this many ranks, as training has them: OMP_NUM_THREADS, or equal parts."""
    from meshtune.launch import place
    from meshtune.launch.rank import cores

    return place.threads_of(os.environ, max(1, cores() // ranks))


def device_of(device_type: str, ranks: int, dtype: str) -> Any:
    """The device that was measured, and the catalogue's kind that stands for what was not."""
    import psutil
    import torch

    from meshtune.launch.rank import cores
    from meshtune.plan.hardware import named
    from meshtune.study.probe_kind import Device, like_of
    from meshtune.train.run_row import device_name

    name = device_name(torch.device(device_type))
    if device_type == "cpu":
        memory = float(psutil.virtual_memory().total)
        return Device(name, True, memory, cores(), ranks, dtype, like_of("cpu", None))
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory, like = float(seen.total_memory), like_of(name, named(name))
    return Device(name, False, memory, seen.multi_processor_count, ranks, dtype, like)


def provenance(device: str, threads: dict[int, int]) -> dict[str, Any]:
    """Versions, date and machine: the begin of [measured]."""
    import platform

    import psutil

    from meshtune.launch.rank import cores
    from meshtune.train.run_row import versions

    return versions() | {
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "device": device,
        "host": platform.node(),
        "system": platform.platform(),
        "cores": cores(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 2),
        "load_before": round(psutil.getloadavg()[0], 2),
        "threads_of_each_rank": {str(ranks): number for ranks, number in threads.items()},
    }
