"""The signals that ask a run to stop: from a user, a closed terminal, or a queue."""

import signal
from collections.abc import Iterable

# SIGHUP: the terminal was closed, or ssh lost its connection. SIGUSR1, SIGUSR2 and SIGXCPU: before the time
# limit, from Slurm (--signal), LSF and Grid Engine (-notify, s_cpu).
STOPPING = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip


def heeded(signals: Iterable[signal.Signals] = STOPPING) -> list[signal.Signals]:
    """Those of the signals that this process handles: all but a SIGHUP that is ignored, as under nohup."""
    return [
        number
        for number in signals
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
