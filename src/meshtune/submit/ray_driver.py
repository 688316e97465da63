"""Driver of a job of Ray: start a run's ranks on each machine, and again until the run is done.

    job of Ray ──> this ──> an actor on each machine (`Starter`) ──> python -m meshtune train …

`meshtune submit --to ray` writes its command; it runs on the cluster, and only there needs Ray. Ray Train is
not used: it makes the process group itself, and runs training in a thread, where no signal can be handled.

    exit code 75    the run has saved: it is started again, unless Ray's job was asked to stop
    lost machine    the other machines are stopped; started again once Ray has all machines, or with --least
                    the most that it has
    others          the job's exit code
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from meshtune.errors import Interrupted, NoProgress, UserError, reason_of
from meshtune.launch.ray import ORDINARY, started
from meshtune.launch.signals import StopRequest
from meshtune.rundir import RunDir, saved_steps
from meshtune.units import counted, duration, notice

LOOK = 1.0  # seconds between looks at a machine's process
SAID = 30.0  # seconds without machines after which the log has a line on it
GATHER = 120.0  # seconds in which an elastic job's start waits for all machines, before it takes fewer
FRUITLESS = 3  # starts in a row without a new checkpoint, after which the job ends


class Starter:
    """An actor of Ray on one machine; its process starts the machine's ranks."""

    def __init__(self) -> None:
        self.process: Any = None
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the actor
        self.read = 0  # bytes of `output` that were returned

    def machine(self) -> tuple[str, str, int]:
        """(Address and node in words, address, a free port)."""
        ray = import_module("ray")
        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        with socket.create_server(("", 0)) as free:
            return f"{address} (node {node[:8]})", address, free.getsockname()[1]

    def newest(self, output: str) -> int:
        """Step of the run's newest checkpoint; 0 without one."""
        return sum(saved_steps(RunDir(Path(output)).checkpoints)[-1:])

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: str | None) -> None:
        """Start `meshtune`. folder: in which; None: the one that Ray has made."""
        environment = {**os.environ, **variables}
        self.process = started(words, environment, cwd=folder, stdout=self.output, stderr=subprocess.STDOUT)

    def look(self) -> tuple[bytes, int | None]:
        """(Output since the last look, exit code), after LOOK seconds at most; None: the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LOOK)
        code, file = self.process.returncode, self.output.fileno()
        text = os.pread(file, os.fstat(file).st_size - self.read, self.read)
        self.read += len(text)
        return text, code

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)


class Driver:
    """The starts of one job."""

    def __init__(self, ray: Any, options: Namespace, stop: StopRequest) -> None:
        self.ray, self.options, self.stop = ray, options, stop
        self.newest: int | None = None  # step of the newest checkpoint at the last start
        self.fruitless = 0  # starts in a row that left no newer one
        self.said = False  # that Ray lacks machines, at this start

    def run(self) -> int:
        """Start the run until it ends; returns the job's exit code. Raises UserError where it can't start,
        and NoProgress.
        """
        while True:
            if (group := self.placed()) is None:
                return Interrupted.exit_code
            try:
                code = self.started(group)
            finally:
                self.ray.util.remove_placement_group(group)  # and its actors
            if self.stop.requested or code not in (None, Interrupted.exit_code):
                return Interrupted.exit_code if code is None else code
            notice("meshtune: the run is started again, once Ray has machines.")

    def placed(self) -> Any:
        """A placement group with all machines; of an elastic job, once Ray has had GATHER seconds for all,
        with the most that it has, `least` or more. None if the job is stopped before. Raises UserError if
        Ray does not have them in time.
        """
        options, began = self.options, time.monotonic()
        fewest = options.least or options.machines
        patience = options.wait if fewest == options.machines else min(GATHER, options.wait)
        while time.monotonic() < began + options.wait:
            for machines in range(options.machines, fewest - 1, -1):
                if group := self.group_of(machines, patience if machines == options.machines else LOOK):
                    return group
                if self.stop.requested:
                    return None
        raise UserError(
            f"{self.lacking(fewest, options.wait)}. Add nodes or change cluster.ray.bundle, and submit again."
        )

    def group_of(self, machines: int, patience: float) -> Any:
        """A placement group with the machines; None if Ray does not have them within `patience` seconds, or
        if the job is stopped.
        """
        options, began = self.options, time.monotonic()
        group = self.ray.util.placement_group([options.bundle] * machines, strategy="STRICT_SPREAD")
        while not group.wait(LOOK):
            waited = time.monotonic() - began
            if waited > patience or self.stop.requested:
                self.ray.util.remove_placement_group(group)
                return None
            if waited > SAID and not self.said:
                self.said, until = True, f"waits for {duration(options.wait)} at most"
                if options.least:
                    until += f", and after {duration(patience)} for {options.least} or more"
                notice(f"meshtune: {self.lacking(machines, waited)}. The job {until}.")
        self.said = False
        if options.least:
            notice(f"meshtune: the run starts on {counted(machines, 'machine')}.")
        return group

    def lacking(self, machines: int, waited: float) -> str:
        """Clause on what Ray has, where it has not given the machines for that time in seconds."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        bundle = self.options.bundle
        return (
            f"Ray has not given {counted(machines, 'machine')} with {bundle} each for {duration(waited)}. "
            f"Its nodes have {[{name: node.get(name, 0) for name in bundle} for node in nodes]}, other jobs "
            "included"
        )

    def started(self, group: Any) -> int | None:
        """Start the run on all machines; returns its exit code, or None where a machine was lost."""
        ray, options = self.ray, self.options
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = ray.remote(
            num_cpus=options.bundle.get("CPU", 0), num_gpus=options.bundle.get("GPU", 0), runtime_env=ORDINARY
        )(Starter)  # fmt: skip
        starters = [
            actor.options(scheduling_strategy=strategy(group, placement_group_bundle_index=n)).remote()
            for n in range(group.bundle_count)
        ]
        try:
            places = ray.get([starter.machine.remote() for starter in starters])
            names = [name for name, *_ in places]
            self.check(ray.get(starters[0].newest.remote(options.output)))
            shared = {
                "MESHTUNE_MACHINES": str(group.bundle_count), "MESHTUNE_RANKS": str(options.ranks),
                "MASTER_ADDR": places[0][1], "MASTER_PORT": str(places[0][2]),
            }  # fmt: skip
            # One machine takes its ranks from --nproc, and its GPUs without.
            words = [*options.words, f"--nproc={options.ranks}"] if options.least else options.words
            for n, starter in enumerate(starters):
                variables = shared | {"MESHTUNE_MACHINE": str(n)}
                ray.get(starter.start.remote(words, variables, options.folder))
        except ray.exceptions.RayActorError as error:
            notice(f"meshtune: a machine was lost: {reason_of(error)}")
            return None
        return self.followed(starters, names)

    def check(self, newest: int) -> None:
        """Raise NoProgress after FRUITLESS starts in a row without a newer checkpoint. newest: its step."""
        self.fruitless = self.fruitless + 1 if newest == self.newest else 0
        self.newest = newest
        if self.fruitless == FRUITLESS:
            raise NoProgress(
                f"{FRUITLESS} starts in a row left no checkpoint newer than step {newest}, so the job ends. "
                "Lower checkpoint.every, or find out why the machines were lost."
            )

    def followed(self, starters: Sequence[Any], names: Sequence[str]) -> int | None:
        """Forward output and a stop until the processes of all machines have ended; returns as `started`.

        Those left after the margin are killed; the margin begins with a stop and with a failure, and is 0
        once a machine is lost.
        """
        ray, stopping, until = self.ray, False, float("inf")
        codes: dict[int, int | None] = {}  # of machines; None: lost
        looks = {starter.look.remote(): n for n, starter in enumerate(starters)}
        while looks:
            for look in ray.wait([*looks], timeout=LOOK)[0]:
                number = looks.pop(look)
                try:
                    text, code = ray.get(look)
                except ray.exceptions.RayActorError as error:
                    notice(f"meshtune: machine {number}, {names[number]}, was lost: {reason_of(error)}")
                    codes[number], until = None, 0.0
                    continue
                sys.stdout.buffer.write(text)
                sys.stdout.flush()
                if code is None:
                    looks[starters[number].look.remote()] = number
                    continue
                codes[number] = code
                if code not in (0, Interrupted.exit_code):
                    until = min(until, time.monotonic() + self.options.margin)
            asked = signal.SIGKILL if time.monotonic() > until else None
            if self.stop.requested and not stopping:
                stopping, until = True, min(until, time.monotonic() + self.options.margin)
                asked = asked or signal.SIGTERM
            for number in looks.values() if asked else ():
                starters[number].signal.remote(int(asked or 0))
        return combined(codes)


def combined(codes: Mapping[int, int | None]) -> int | None:
    """Exit code of the run by those of its machines; None if one was lost.

    Of several failures the one that says more: 1 and signals may follow from another machine's.
    """
    ended = [code for code in codes.values() if code is not None]
    if len(ended) < len(codes):
        return None
    failed = [code for code in ended if code not in (0, Interrupted.exit_code)]
    code = max(failed or ended)
    return code if code >= 0 else 128 - code


def main(words: Sequence[str] | None = None) -> int:
    """Run the driver; returns the job's exit code."""
    parser, kinds = ArgumentParser(description=__doc__), {"machines": int, "ranks": int, "bundle": json.loads}
    kinds |= {"margin": float, "wait": float, "output": str, "folder": str, "least": int}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, required=name not in ("folder", "least"))
    parser.add_argument("words", nargs="+")
    options, ray = parser.parse_args(words), import_module("ray")
    ray.init(log_to_driver=False)
    try:
        with StopRequest(say=notice) as stop:  # after ray.init, which sets handlers
            return Driver(ray, options, stop).run()
    except (UserError, Interrupted) as error:
        notice(f"meshtune: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
