"""Driver of a sweep's job of Ray: a task of Ray for each experiment, in Ray's own queue.

    job of Ray ──> this ──> `experiment` on a node with the GPUs ──> python -m meshtune sweep … --task NUMBER

It runs on the cluster, and only there needs Ray. The task writes results/<number>.json.

    lost node or worker, exit code 75   the experiment is started again, STARTS times at most
    the node's memory is full           the result is `out of memory`
    no node is large enough             the result is `refused`, after PATIENCE, in which nodes may be added
    Ray's job is stopped                the tasks get SIGTERM, and leave no result
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from meshtune.errors import Interrupted, UserError, reason_of
from meshtune.launch.ray import ORDINARY, started
from meshtune.study.children import MARK, Task, kill_marked
from meshtune.study.queue import PATIENCE, SAVING, listing_of, read_task, written
from meshtune.study.runner import Signals
from meshtune.study.store import CRASHED, OUT_OF_MEMORY, REFUSED, Outcome
from meshtune.units import counted, duration, notice

LOOK = 1.0  # seconds between looks
STARTS = 3  # of an experiment that is lost each time


def experiment(sweep: str, job: str, number: int, variables: Mapping[str, str], folder: str | None) -> int:
    """Run an experiment on this node; returns the exit code. folder: in which; None: the one that Ray has
    made. Ray's cancelling raises KeyboardInterrupt in here.
    """
    mark = f"{job}/{number}"
    kill_marked(mark)  # what a lost worker may have left here
    words = ["sweep", f"{sweep}/sweep.yaml", "--out", sweep, "--task", str(number)]
    process = started(words, {**os.environ, **variables, MARK: mark}, cwd=folder)
    try:
        while process.poll() is None:
            time.sleep(LOOK)
        return process.returncode
    finally:
        process.terminate()
        process.wait()


class Driver:
    """The experiments of one job."""

    def __init__(self, ray: Any, options: Namespace) -> None:
        self.ray, self.options, self.folder = ray, options, Path(options.sweep)
        self.listing = listing_of(self.folder, options.job)
        if not self.listing.exists():
            raise UserError(f"{self.listing} isn't there: all nodes must see the sweep's folder.")
        numbers = self.listing.read_text("utf-8").split()
        self.waiting = [read_task(self.folder, int(number)) for number in numbers]
        self.function = ray.remote(experiment)
        self.queued: dict[Any, Task] = {}  # Ray's reference of a task -> experiment
        self.starts: Counter[int] = Counter()  # by number
        self.too_large: dict[int, float] = {}  # number -> time since when no node is large enough

    def run(self) -> int:
        """Run all experiments; returns the job's exit code."""
        with Signals() as signals:
            while self.waiting or self.queued:
                if signals.count or not self.listing.exists():
                    return self.stopped()
                while self.waiting and not 0 < self.options.jobs <= len(self.queued):
                    self.start(self.waiting.pop(0))
                for reference in self.ray.wait([*self.queued], timeout=LOOK)[0]:
                    self.ended(self.queued.pop(reference), reference)
                self.check()
        return 0

    def needs(self, task: Task) -> dict[str, float]:
        """Resources of an experiment, by Ray's names."""
        gpus = {} if task.on_processor else {"GPU": task.world}
        return {"CPU": task.world, **gpus, **self.options.bundle}

    def start(self, task: Task) -> None:
        """Put an experiment into Ray's queue."""
        self.starts[task.number] += 1
        needs, options = self.needs(task), self.options
        threads = {"OMP_NUM_THREADS": str(max(1, int(needs["CPU"] / task.world)))}  # of a rank
        variables = threads | self.ray.get_runtime_context().runtime_env.get("env_vars", {})
        reference = self.function.options(
            num_cpus=needs.pop("CPU"), num_gpus=needs.pop("GPU", 0), memory=needs.pop("memory", None),
            resources=needs, max_retries=0, runtime_env=ORDINARY,
        ).remote(options.sweep, options.job, task.number, variables, options.folder)  # fmt: skip
        self.queued[reference] = task

    def ended(self, task: Task, reference: Any) -> None:
        """Settle an experiment whose task of Ray has ended."""
        errors = self.ray.exceptions
        try:
            code = self.ray.get(reference)
            why = f"its command ended with exit code {code}."
        except errors.OutOfMemoryError as error:
            written(task, self.folder, Outcome(OUT_OF_MEMORY, reason_of(error)))
            return
        except errors.RayTaskError as error:
            code, why = None, reason_of(error.cause)
        except errors.RayError as error:
            code, why = Interrupted.exit_code, f"Ray has lost it: {reason_of(error)}"
        if code == 0:
            return
        if again := code == Interrupted.exit_code and self.starts[task.number] < STARTS:
            self.waiting.insert(0, task)
        notice(f"meshtune: experiment {task.number}: {why}{' It is started again.' * again}")
        if not again:
            start, log = self.starts[task.number], f"The log of Ray's job {self.options.job} has more."
            reason = f"Start {start} left no result: {why} {log} `--retry crashed` runs it again."
            written(task, self.folder, Outcome(CRASHED, reason))

    def check(self) -> None:
        """Refuse experiments that no node has been large enough for, for PATIENCE."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        for reference, task in [*self.queued.items()]:
            needs, number = self.needs(task), task.number
            if any(all(node.get(name, 0) >= least for name, least in needs.items()) for node in nodes):
                self.too_large.pop(number, None)
                continue
            have = [{name: node.get(name, 0) for name in needs} for node in nodes]
            lacking = f"{counted(task.world, 'rank')} on one machine need {needs}; Ray's nodes have {have}"
            if number not in self.too_large:
                self.too_large[number] = time.monotonic()
                rest = f"It is refused after {duration(PATIENCE)} without a larger node"
                notice(f"meshtune: experiment {number}: {lacking}. {rest}.")
            elif time.monotonic() - self.too_large[number] > PATIENCE:
                self.ray.cancel(reference)
                del self.queued[reference]
                written(task, self.folder, Outcome(REFUSED, f"{lacking}. Leave it out, or add a node."))

    def stopped(self) -> int:
        """Stop the tasks, which leave no results; returns the job's exit code."""
        notice(f"meshtune: stopping {counted(len(self.queued), 'experiment')}.")
        for reference in self.queued:
            self.ray.cancel(reference)
        if self.queued:
            self.ray.wait([*self.queued], num_returns=len(self.queued), timeout=SAVING)
        return Interrupted.exit_code


def main(words: Sequence[str] | None = None) -> int:
    """Run the driver; returns the job's exit code."""
    parser = ArgumentParser(description=__doc__)
    for name, kind in {"sweep": str, "job": str, "jobs": int, "bundle": json.loads, "folder": str}.items():
        parser.add_argument(f"--{name}", type=kind, required=name != "folder")
    options, ray = parser.parse_args(words), import_module("ray")
    ray.init()
    try:
        return Driver(ray, options).run()
    except UserError as error:
        notice(f"meshtune: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
