"""Facts of the machine and the software that a sweep's results depend on."""

import socket
from typing import Any

from meshtune.launch.rank import cores
from meshtune.meter.rows import time_now
from meshtune.plan.cluster import gpus_here
from meshtune.train.provenance import git_facts, processor_name, versions


def machine_facts(simulated: str | None) -> dict[str, Any]:
    """Rows of the table `sweep`: host, devices, versions, commit, time. simulated: the devices are those of
    the settings.
    """
    gpus = [name for name, _ in gpus_here()]
    device = None if simulated else ", ".join(dict.fromkeys(gpus)) or processor_name()
    return {
        "started": time_now(),
        "machine": {"host": socket.gethostname(), "cores": cores(), "processor": processor_name()},
        "device": device,
        "gpus": len(gpus),
        "versions": versions(),
        **git_facts(),
    }
