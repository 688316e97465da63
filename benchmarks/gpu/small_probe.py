"""Probe with small operations, for a trial of the check: `python benchmarks/gpu/small_probe.py OUT`."""

import json
import sys
from dataclasses import replace

from meshtune.api.probe import probe
from meshtune.study import probe_kind
from meshtune.study.probe import CPU, MIB

if __name__ == "__main__":
    probe_kind.REFUSED = 1e9  # any spread: a trial's figures are not used
    few = replace(
        CPU, squares=(64, 128, 256), blocks=((64, 128),), attended=256, lengths=(64, 256),
        copied=(MIB,), exchanged=(MIB // 4, MIB), sample=0.002, shared_sample=0.004, rounds=3,
    )  # fmt: skip
    print(json.dumps(probe(sys.argv[1], sizes=few, nproc=1, seconds=20.0)))
