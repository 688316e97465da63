"""Everything that waits for a GPU: `make gpu-check PART=N`, each part below nine minutes, without a network.

    1 probe    matmuls and attention at the benches' shapes, by each FlashAttention that is installed;
               `meshtune probe`: matmuls, attention, memory, launches; a rank with NCCL
    2 bench    `meshtune bench`: predicted, simulated and measured for 8B full and 1B full (random weights,
               sequences of 4096 tokens); 1B and 8B uncompiled, 1B in two modes of recomputation
    3 peers    a compiled loop by hand, transformers.Trainer, TRL and Liger on the same model and tokens; 8B
               LoRA and the Trainer's
    4 tests    tests/gpu: CUDA attention against its definition, training against a processor …
    5 memory   bytes that the allocator reserves against the dry run's replay, the largest micro-batch, traces
    6 train    `meshtune train` on packed rows, with checkpoints
    7 experts  grouped matmuls against fp32, one block's experts against transformers', the bench of a mixture

    make gpu-check                            all parts in order
    make gpu-check PART=2 MINUTES=6           one, in less time
    make gpu-check ONLY=1b-trl,1b-hand        only these figures
    make gpu-check WHEELS=folder              with wheels that were carried here (pydantic, datasets, trl …)
    make gpu-check TINY=1                     tiny models, on a processor too: does the check itself run?

It first says which packages are missing; only what needs them is skipped. After each figure
benchmarks/results/gpu-<GPU>-<date>.json and .md are written, and copies to $OUT where it is set; a later
part adds to them. A figure that fails is recorded with its error and the next one runs; one that has no time
left is skipped and recorded as such.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.environment import MESHTUNE, ROOT, environment, install_wheels

MINUTES = 8.8  # of a part
NUMBER = 8  # of parts


def options() -> argparse.Namespace:
    """Read the command line; without an option, make's variables."""
    given = os.environ.get
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, default=given("PART") or None, help=f"1 to {NUMBER}")
    parser.add_argument("--minutes", type=float, default=given("MINUTES") or None)
    parser.add_argument("--only", default=given("ONLY"), help="names of figures, with commas between them")
    parser.add_argument("--wheels", type=Path, default=given("WHEELS") or None)
    parser.add_argument("--tiny", action="store_true", default=bool(given("TINY")))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    found = parser.parse_args()
    if found.part not in (None, *range(1, NUMBER + 1)):
        parser.error(f"PART={found.part}: there are parts 1 to {NUMBER}.")
    return found


def main() -> None:
    given, began = options(), time.monotonic()
    deadline = began + 60 * (given.minutes or MINUTES * (1 if given.part else NUMBER))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        if given.wheels and (failed := install_wheels(given.wheels, work / "site")):
            print(f"--wheels: {failed}", flush=True)
        here = environment()
        print(json.dumps(here, indent=1), flush=True)
        if missing := here["missing"]:
            print(f"Missing, what needs them is skipped: {', '.join(missing)}", flush=True)
        if "gpu" not in here and not given.tiny:
            sys.exit("gpu-check needs a CUDA device; torch sees none. TINY=1 tries the check without one.")
        if "psutil" in missing or "tokenizers" in missing or "transformers" in missing:
            sys.exit(f"gpu-check itself needs {', '.join(name for name in MESHTUNE if name in missing)}.")
        run(given, work, here, deadline)
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


def run(given: argparse.Namespace, work: Path, here: dict[str, Any], deadline: float) -> None:
    """Make the figures of the parts that were asked for, and write each as soon as it is there."""
    from gpu.figures import Check  # here: a carried wheel may be what it imports
    from gpu.models import FULL, SMALL
    from gpu.parts import parts, skipped
    from gpu.results import Results

    results = Results(given.results.resolve(), here, "gpu-tiny" if given.tiny else "gpu")
    given.results.mkdir(parents=True, exist_ok=True)
    check = Check(work, SMALL if given.tiny else FULL, results.probed)
    for number, (part, figures) in enumerate(parts(check).items(), 1):
        if given.part not in (None, number):
            continue
        for figure in figures:
            if (given.tiny and not figure.tiny) or (given.only and figure.name not in given.only.split(",")):
                continue
            left, started = deadline - time.monotonic(), time.monotonic()
            if reason := skipped(figure, here, left):
                found: dict[str, Any] = {"skipped": reason}
            else:
                try:
                    found = figure.run(seconds=min(figure.seconds, left))
                except Exception as error:  # the next figure is still made, and this one's error is recorded
                    found = {"error": f"{type(error).__name__}: {str(error)[:1500]}"}
            found["took_seconds"] = round(time.monotonic() - started, 1)
            found = json.loads(json.dumps(found).replace(f"{work}/", "").replace(f"{ROOT}/", ""))
            results.add(f"{part}/{figure.name}", found)
            print(f"{part}/{figure.name}", json.dumps(found)[:3000], flush=True)


if __name__ == "__main__":
    main()
