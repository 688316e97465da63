"""Facts of the machine and the software that a sweep's results depend on."""

import socket
from typing import Any

from meshtune.launch.rank import cores
from meshtune.meter.rows import time_now
from meshtune.plan.cluster import gpus_here
from meshtune.train.run_row import git_facts, processor_name, versions


def machine_facts(simulated: str | None, *, on_processor: bool) -> dict[str, Any]:
    """Rows of the table `sweep`: host, devices, versions, commit, time. simulated: the devices are those of
    the settings. on_processor: the experiments use no GPU, whatever the machine has.
    """
    gpus = [] if on_processor else [name for name, _ in gpus_here()]
    device = None if simulated else ", ".join(dict.fromkeys(gpus)) or processor_name()
    return {
        "machine": {"host": socket.gethostname(), "cores": cores(), "processor": processor_name()},
        "device": device,
        "gpus": len(gpus),
        **software_facts(),
    }


def facts_elsewhere(*, on_processor: bool) -> dict[str, Any]:
    """The rows where Slurm's nodes run the experiments, whose devices are not known here: of this machine is
    its name alone. on_processor: as of `machine_facts`.
    """
    return {"submitted_from": socket.gethostname(), "gpus": 0 if on_processor else None, **software_facts()}


def software_facts() -> dict[str, Any]:
    return {"started": time_now(), "versions": versions(), **git_facts()}
