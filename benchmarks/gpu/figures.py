"""Figures of the check: each is a command in a process of its own, with a limit of seconds.

A function returns plain values; one that could not measure, {"error": the end of what was printed}.
"""

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from os import cpu_count
from pathlib import Path
from typing import Any

import psutil

from gpu.environment import ROOT, child_environment
from gpu.models import Scale, words_of, write_folder, write_rows, write_weights

HERE = Path(__file__).parent
Result = dict[str, Any]
Batch = tuple[int, int]  # (sequences of a micro-batch, micro-batches of a step)
TEST_PROCESSES = 8  # at most: tests spend most of their time on the host, which imports and compiles


def command(*words: str | Path, seconds: float, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments. After `seconds` it and all that it has started are killed: a rank that
    lived on would hold the GPU's memory. Raises TimeoutExpired then.
    """
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=child_environment(), cwd=cwd,
    )  # fmt: skip
    try:
        out, told = process.communicate(timeout=seconds)
    except BaseException:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in (process, *started):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
        psutil.wait_procs(started, timeout=30)  # a killed process keeps the GPU's memory until it has ended
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, told)


def failure(done: subprocess.CompletedProcess[str]) -> Result:
    """The end of what a failed command has printed."""
    return {"error": (done.stdout[-500:] + done.stderr[-2500:]).strip(), "exit_code": done.returncode}


class Check:
    """The figures of one check, which write into a folder."""

    def __init__(self, work: Path, scale: Scale, probed: Path) -> None:
        self.work, self.scale, self.probed = work, scale, probed
        self.one = write_folder(work / "one", scale.one, scale.seq_len)
        self.eight = write_folder(work / "eight", scale.eight, scale.seq_len)
        self.mixture = write_folder(work / "mixture", scale.mixture, scale.seq_len)

    def model(self, folder: Path, batch: Batch, *settings: str) -> list[str]:
        """Settings of a model with random weights, and of its batch."""
        sequences = batch[0] * batch[1]
        return [
            f"model.name={folder}", "model.init=random", f"data.seq_len={self.scale.seq_len}",
            f"train.global_batch_size={sequences}", "train.precision=bf16", *settings,
        ]  # fmt: skip

    def probe(self, seconds: float) -> Result:
        """`meshtune probe` beside the catalogue's constants of this GPU. Its file goes to the results."""
        self.probed.unlink(missing_ok=True)
        words = ["-m", "meshtune", "probe", "--out", self.probed, "--json"]
        small = [HERE / "small_probe.py", self.probed]
        done = command(*(small if self.scale.tiny else words), seconds=seconds)
        if done.returncode:
            return failure(done)
        document = json.loads(done.stdout.splitlines()[-1] if self.scale.tiny else done.stdout)
        measured = document["measured"]
        marked = {name: measured[name] for name in ("off", "marked", "refused") if name in measured}
        return {"kind": document["kind"], **marked, "catalogue": self.catalogue()}

    def script(self, *words: str, seconds: float) -> Result:
        """Run a script of this folder; return the JSON of its last line. words: its name and arguments."""
        done = command(HERE / words[0], *words[1:], *["--tiny"] * self.scale.tiny, seconds=seconds)
        return failure(done) if done.returncode else json.loads(done.stdout.splitlines()[-1])

    def catalogue(self) -> Result:
        """The planner's constants of this GPU before a probe; {} for one that it does not know."""
        import torch

        sys.path.insert(0, str(ROOT / "src"))
        from meshtune.plan.hardware import named

        gpu = named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if gpu is None:
            return {}
        return {
            "name": gpu.name, "matmul_max": gpu.matmul_max / 1e12, "bandwidth": gpu.bandwidth / 1e9,
            "efficiency": dict(gpu.efficiency),
        }  # fmt: skip

    def bench(self, folder: Path, batch: Batch, layout: str, *settings: str, seconds: float) -> Result:
        """`meshtune bench` of one layout: predicted, simulated and measured; `by_probe` is the plan with the
        probe's constants. Steps alone are kept of their rows.
        """
        ends, given = time.monotonic() + seconds, self.model(folder, batch, f"layout={layout}", *settings)
        limits = ["--steps", str(self.scale.steps), "--limit", str(max(1, int(seconds - 15)))]
        done = command("-m", "meshtune", "bench", *given, *limits, "--json", seconds=seconds)
        if done.returncode not in (0, 3):
            return failure(done)
        (document,) = json.loads(done.stdout)["layouts"]
        if document["measured"]:
            rows = document["measured"].pop("time_rows")
            document["measured"]["seconds"] = [row["seconds"] for row in rows]
        document["by_probe"] = self.plan(given, layout, ends - time.monotonic())
        return document

    def plan(self, given: list[str], layout: str, seconds: float) -> Result | None:
        """The step and memory that a plan with the probe's file predicts; None without a file."""
        if not self.probed.exists():
            return None
        given = [*given, f"cluster={self.probed}", "cluster.gpus=1"]
        words = ["-m", "meshtune", "plan", "explain", layout, *given, "--json"]
        try:
            done = command(*words, seconds=seconds)
        except subprocess.TimeoutExpired as late:  # what was measured is kept
            return {"error": f"no plan within {late.timeout:.0f} s"}
        if done.returncode:
            return failure(done)
        found = json.loads(done.stdout)
        return {name: found.get(name) for name in ("step_seconds", "time", "memory")}

    def micro_batch(self, folder: Path, layout: str, *settings: str, seconds: float) -> Result:
        """`meshtune bench --find-micro-batch`, which runs out of the device's memory on purpose."""
        given = self.model(folder, (1, 1), f"layout={layout}", *settings)
        if self.scale.tiny:
            given += ["cluster.memory_budget_gib=0.003"]
        limits = ["--limit", str(max(1, int(seconds / 3))), "--find-micro-batch", "--json"]
        done = command("-m", "meshtune", "bench", *given, *limits, seconds=seconds)
        return failure(done) if done.returncode else json.loads(done.stdout)["layouts"][0]

    def profile(self, folder: Path, batch: Batch, layout: str, seconds: float) -> Result:
        """`meshtune bench --profile`: bytes of each file that it writes."""
        traces = self.work / "traces"
        given = self.model(folder, batch, f"layout={layout}")
        options = ["--steps", "1", "--profile", traces, "--json"]
        done = command("-m", "meshtune", "bench", *given, *options, seconds=seconds)
        files = {str(file.relative_to(traces)): file.stat().st_size for file in traces.rglob("*.*")}
        shutil.rmtree(traces, ignore_errors=True)
        return failure(done) if done.returncode else {"files": files}

    def train(self, folder: Path, batch: Batch, layout: str, *settings: str, seconds: float) -> Result:
        """`meshtune train` on packed rows with asynchronous checkpoints: medians and what its rows tell. The
        8B model is read from files, since a processor draws its weights for minutes.

        One that takes too long has those of the steps until then, and an error.
        """
        shape = self.scale.one if folder == self.one else self.scale.eight
        sequences, steps = batch[0] * batch[1], self.scale.steps + 4
        rows = self.work / "rows.jsonl"
        tokens = steps * sequences * self.scale.seq_len
        write_rows(rows, tokens, words_of(shape), max(8, self.scale.seq_len * 2 // 3 // 2))
        output, ends = self.work / "run", time.monotonic() + seconds
        if folder == self.eight:
            write_weights(folder)
        given = self.model(
            folder, batch, f"layout={layout}", f"data.train={rows}", f"data.cache={self.work / 'cache'}",
            "data.train_on=all", f"train.max_steps={steps}", "log.to=[jsonl,console]", f"output={output}",
            f"checkpoint.every={steps // 2}", *settings,
        )  # fmt: skip
        if folder == self.eight:
            given.remove("model.init=random")
        try:
            done = command("-m", "meshtune", "train", *given, seconds=ends - time.monotonic())
            unfinished = failure(done) if done.returncode else {}
        except subprocess.TimeoutExpired:
            unfinished = {"error": f"It did not end within {seconds:.0f} s."}
        file = output / "metrics.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        shutil.rmtree(output, ignore_errors=True)  # checkpoints and models of this size fill a disk
        return summary(found) | unfinished

    def peer(self, name: str, folder: Path, batch: Batch, *, lora: bool = False, seconds: float) -> Result:
        """Another way to train the same model on the same number of tokens (peers.py)."""
        shape = self.scale.one if folder == self.one else self.scale.eight
        case = {
            "name": name, "folder": str(folder), "micro_batch": batch[0], "accumulation": batch[1],
            "seq_len": self.scale.seq_len, "steps": self.scale.steps, "words": words_of(shape), "lora": lora,
        }  # fmt: skip
        done = command(HERE / "peers.py", json.dumps(case), seconds=seconds, cwd=self.work)
        return failure(done) if done.returncode else json.loads(done.stdout.splitlines()[-1])

    def tests(self, *paths: str, seconds: float) -> Result:
        """Tests that need a GPU, side by side where pytest-xdist is installed, with the end of what pytest
        prints; all of it goes to stdout where tests fail.
        """
        words = ["-m", "pytest", *paths, "-m", "gpu", "-rfE", "--tb=short", "--show-capture=no"]
        words += ["-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist"):
            words += ["-n", str(min(TEST_PROCESSES, cpu_count() or 1)), "--dist", "worksteal"]
        done = command(*words, seconds=seconds)
        if done.returncode:
            print(done.stdout, done.stderr[-2000:], flush=True)
        told = done.stderr[-500:] if done.returncode else ""
        return {"exit_code": done.returncode, "tail": told + done.stdout[-4000:]}


def summary(rows: list[Mapping[str, Any]]) -> Result:
    """A run's medians after its warm-up, its causes and the seconds that saving took, from its rows."""
    steps = [row for row in rows if row["kind"] == "train" and not row.get("warm_up")]
    if not steps:
        return {"error": "no step after the warm-up"}
    kinds = sorted({row["kind"] for row in rows})
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second_per_gpu"] for row in steps),
        "step_seconds": statistics.median(row["step_seconds"] for row in steps),
        "mfu": statistics.median(row["mfu"] or 0.0 for row in steps),
        "peak_memory_bytes": max(row["peak_memory_bytes"] or 0 for row in steps),
        "losses": [row["loss"] for row in steps],
        "saves": [row["seconds"] for row in rows if row["kind"] == "save"],
        "causes": [row for row in rows if row["kind"] == "cause"],
        "memory": [row for row in rows if row["kind"] == "memory"],
        "device": [row for row in rows if row["kind"] == "device"],
        "row_kinds": kinds,
    }
