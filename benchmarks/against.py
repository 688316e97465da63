"""One checkout's training speed and memory against another's: step by step, in pairs, inside one run.

    figures = paired(words, other=Path("../meshtune-before"), ranks=1, threads=2, pairs=15)
    print(sentence(figures))

Both checkouts run `build` and `loop.train` on the same settings, each in processes of its own, and both wait
at their loaders: in turn each is let through one step, so that whatever slows the machine for a while hits
both. A pair is one step of each, and who goes first alternates. A step lasts from the moment its batch is
handed out until the next one is asked for. Peak memory is the main rank's maximum resident size.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP = 4  # steps before the pairs; the memory of the first two is metered


class Paired(NamedTuple):
    """Steps of this checkout and of the other one, in the order in which they ran."""

    seconds: list[tuple[float, float]]  # (this checkout's, the other's) of each pair
    losses: list[tuple[float, float]]  # likewise, of each step, those before the pairs too
    peak_bytes: tuple[int, int]  # likewise, of a run of WARM_UP steps

    @property
    def speed(self) -> float:
        """Median over the pairs of the other's step time over this one's: above 1 this one is faster."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """The other's step time over this one's for each pair, ascending."""
        return sorted(theirs / ours for ours, theirs in self.seconds)

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the median of the ratios, whatever their distribution (order statistics)."""
        ratios, number = self.ratios, len(self.seconds)
        tail, rank = 0.0, 0
        while rank < number // 2 and tail + math.comb(number, rank) / 2**number <= 0.025:
            tail += math.comb(number, rank) / 2**number
            rank += 1
        rank = max(rank - 1, 0)
        return ratios[rank], ratios[number - 1 - rank]


def sentence(figures: Paired) -> str:
    """The outcome in one line."""
    low, high = figures.interval
    ours, theirs = figures.peak_bytes
    spread = max(abs(a / b - 1) for a, b in figures.losses)
    return (
        f"{len(figures.seconds)} pairs: speed {figures.speed:.3f} x the other's (95 % interval {low:.3f} to "
        f"{high:.3f}), peak memory {ours / theirs:.3f} x ({ours / 2**20:.0f} and {theirs / 2**20:.0f} MiB), "
        f"losses within {spread:.0e}"
    )


def paired(
    words: Sequence[str],
    *,
    other: Path,
    ranks: int = 1,
    threads: int = 1,
    pairs: int = 15,
    say: Callable[[str], None] = lambda _: None,
) -> Paired:
    """Train with both checkouts on the same settings, step by step in turn, and return what was measured.

    words: a config file, section.key=value, or both. other: a checkout's root. threads: of each rank. pairs:
    steps that count, after WARM_UP others. say: called with a sentence on each pair. Raises SystemExit, with
    the output, if a training process ends early.
    """
    roots = (Path(__file__).resolve().parents[1], other.resolve())
    first_peak, second_peak = (peak_bytes(root, words, ranks, threads) for root in roots)
    ours, theirs = (
        Gated(root, [*words, f"train.max_steps={WARM_UP + pairs + 1}"], ranks, threads) for root in roots
    )
    seconds: list[tuple[float, float]] = []
    try:
        for number in range(WARM_UP + pairs):
            if number % 2:
                second, first = theirs.step(), ours.step()
            else:
                first, second = ours.step(), theirs.step()
            if number >= WARM_UP:
                seconds.append((first, second))
                say(f"pair {len(seconds)}: {first:.3f} s and {second:.3f} s, ratio {second / first:.3f}")
        (first_losses, _), (second_losses, _) = ours.end(), theirs.end()
    finally:
        for process in (ours, theirs):
            process.stop()
    losses = list(zip(first_losses, second_losses, strict=True))
    return Paired(seconds, losses, (first_peak, second_peak))


def peak_bytes(root: Path, words: Sequence[str], ranks: int, threads: int) -> int:
    """Peak resident bytes of the main rank in a run of `WARM_UP` steps.

    root: the checkout's. Allocations from 64 KiB on are mapped each by itself, so that freed ones do not
    count.
    """
    run = Gated(
        root, [*words, f"train.max_steps={WARM_UP}"], ranks, threads, {"MALLOC_MMAP_THRESHOLD_": "65536"}
    )
    try:
        for _ in range(WARM_UP - 1):
            run.step()
        return run.end()[1]
    finally:
        run.stop()


class Gated:
    """A training process of a checkout that waits at its loader before each step."""

    def __init__(
        self, root: Path, words: Sequence[str], ranks: int, threads: int, variables: Mapping[str, str] = {}
    ) -> None:
        """Start the process and wait until it is built. variables: added to its environment.

        root: the checkout's. words: settings, as in `paired`. threads: of each rank. `stop` must be called.
        """
        self.folder = tempfile.TemporaryDirectory()
        self.run = Path(self.folder.name, "run")
        to_worker, self.go = os.pipe()
        self.done, from_worker = os.pipe()
        command = [sys.executable, __file__, str(ranks), str(to_worker), str(from_worker)]
        environment = os.environ | {
            "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", **variables,
        }  # fmt: skip
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [*command, *words, f"output={self.run}"], env=environment, pass_fds=(to_worker, from_worker),
            stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(to_worker)
        os.close(from_worker)
        self.answers = os.fdopen(self.done)
        self._answer()  # built

    def _answer(self) -> float:
        line = self.answers.readline()
        if not line:
            self.process.wait()
            self.output.seek(0)
            raise SystemExit(f"A training process ended early:\n{self.output.read()[-4000:]}")
        return float(line)

    def step(self) -> float:
        """Let the process run one step, wait for its end and return its seconds."""
        os.write(self.go, b"\n")
        return self._answer()

    def end(self) -> tuple[list[float], int]:
        """Let the process run its last step; (losses of all steps but that, its peak resident bytes)."""
        os.write(self.go, b"\n")
        peak = int(self._answer())
        self.process.wait()
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if row["kind"] == "train"][:-1], peak

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.answers.close()
        os.close(self.go)
        self.output.close()
        self.folder.cleanup()


# In the training processes #


class Gate:
    """A loader that waits for a byte before each batch, and reports the seconds of the step after it.

    go: file descriptor of the pipe that the bytes come from. done: that of the pipe for the seconds.
    """

    def __init__(self, loader: Any, go: int, done: int) -> None:
        self.loader, self.go, self.done = loader, go, done

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            os.read(self.go, 1)
            began = time.perf_counter()
            yield batch
            os.write(self.done, f"{time.perf_counter() - began}\n".encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def work(rank: Any, words: Sequence[str], go: int, done: int) -> None:
    """Train on one rank; the main one waits at a `Gate`, and at the end writes its peak bytes to `done`.

    words: settings, as in `paired`. go, done: file descriptors, as `Gate` takes them.
    """
    from meshtune import config
    from meshtune.api import build
    from meshtune.train import loop

    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    run = build.build(config.load(files[0] if files else None, overrides))
    if rank.main:
        gate: Any = Gate(run.loader, go, done)
        run.loader = gate
        os.write(done, b"0\n")
    loop.train(run)
    if rank.main:
        scale = 1 if sys.platform == "darwin" else 1024
        os.write(done, f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}\n".encode())


def main() -> None:
    ranks, go, done, *words = sys.argv[1:]
    from meshtune import launch
    from meshtune.api import build  # noqa: F401 - before ranks are forked
    from meshtune.train import loop  # noqa: F401 - before ranks are forked

    launch.run(work, words, int(go), int(done), ranks=int(ranks), device="cpu")


if __name__ == "__main__":
    main()
