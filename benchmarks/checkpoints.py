"""How long checkpoints take: a state of 28 M parameters with two AdamW moments, all fp32 (about 350 MB).

    python benchmarks/checkpoints.py [--parameters 28e6] [--repeats 5] [--folder /tmp] [--device cpu]

Prints one JSON document, each figure the best of the repeats in seconds: a synchronous save, what an
asynchronous one blocks the loop for (the first without and with `reserve`, and later ones), how much slower
matrix products run beside the background write, hashing, and loading.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from meshtune.train.checkpoint import Checkpoints


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def state(parameters: int, device: str) -> dict[str, Tensor]:
    """75 tensors of `parameters` elements in all, three times (weights and moments), and a step counter."""
    shape = (parameters // (75 * 512), 512)
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    tensors = {f"{kind}.{i}": torch.randn(shape, device=device) for kind in kinds for i in range(75)}
    return tensors | {"optimizer.step": torch.tensor(3.0)}


def beside(work: Callable[[], object], run: Callable[[], object], until: Callable[[], bool]) -> float:
    """Median seconds of a `run` beside a background job.

    work: starts the job. until: returns True once the job has ended; `run` is repeated until then.
    """
    work()
    times = [seconds(run)]
    while not until():
        times.append(seconds(run))
    return statistics.median(times)


def measure(tensors: dict[str, Tensor], folder: Path, repeats: int) -> dict[str, float]:
    """Best times in seconds by name; *_share and *_slowed_by are ratios.

    Both kinds of save take turns; background writes are not timed. folder: written to, and not emptied.
    """
    values = {"loader": {"epoch": 1, "index": 12}}

    def first(reserve: bool) -> float:
        checkpoints = Checkpoints(folder / f"first-{reserve}", keep=1)
        if reserve:
            checkpoints.reserve(tensors)
            checkpoints.wait()
        blocked = seconds(lambda: checkpoints.save(1, tensors, values))
        checkpoints.wait()
        return blocked

    unreserved, reserved = first(False), first(True)
    plain = Checkpoints(folder / "plain", keep=1, asynchronous=False)
    other = Checkpoints(folder / "other", keep=1)
    other.reserve(tensors)
    other.wait()
    sync, blocked = [], []
    for step in range(1, repeats + 1):
        sync.append(seconds(lambda step=step: plain.save(step, tensors, values)))
        blocked.append(seconds(lambda step=step: other.save(step, tensors, values)))
        other.wait()

    left = torch.randn(512, 512, device=tensors["model.0"].device)

    def products() -> None:
        for _ in range(20):
            torch.mm(left, left)
        if left.is_cuda:
            torch.cuda.synchronize()

    alone = statistics.median(seconds(products) for _ in range(50))
    during = beside(lambda: other.save(99, tensors, values), products, (folder / "other" / "step-99").exists)
    other.wait()

    file = max((folder / "plain").glob("step-*/*.distcp"), key=lambda path: path.stat().st_size)

    def digest(algorithm: Callable) -> float:
        with file.open("rb") as stream:
            return seconds(lambda: hashlib.file_digest(stream, algorithm))

    checked = Checkpoints(folder / "plain", keep=1)
    check = seconds(checked.newest_good)
    return {
        "sync_save": min(sync),
        "async_blocks_first": unreserved,
        "async_blocks_first_reserved": reserved,
        "async_blocks": min(blocked),
        "async_blocks_share": statistics.median(b / s for b, s in zip(blocked, sync, strict=True)),
        "products_slowed_by": during / alone,
        "hash_xxh3_128": min(digest(xxhash.xxh3_128) for _ in range(repeats)),
        "hash_sha256": min(digest(hashlib.sha256) for _ in range(repeats)),
        "check": check,
        "load_after_check": min(seconds(lambda: checked.load(repeats, tensors)) for _ in range(repeats)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=28e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    tensors = state(int(arguments.parameters), arguments.device)
    try:
        found = measure(tensors, folder, arguments.repeats)
    finally:
        shutil.rmtree(folder)
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    about = {"megabytes": megabytes, "torch": torch.__version__, "device": arguments.device}
    print(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
