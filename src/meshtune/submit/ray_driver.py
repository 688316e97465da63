"""Driver of a job of Ray: start a run's ranks on each machine, and again until the run is done.

    job of Ray ──> this ──> an actor on each machine (`Starter`) ──> python -m meshtune train …

`meshtune submit --to ray` writes its command; it runs on the cluster, and only there needs Ray. Ray Train is
not used: it makes the process group itself, and runs training in a thread, where no signal can be handled.

    exit code 75    the run has saved: it is started again, unless Ray's job was asked to stop
    lost machine    the other machines are stopped; started again once Ray has all machines
    others          the job's exit code
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from meshtune.errors import Interrupted, NoProgress, UserError
from meshtune.launch.signals import StopRequest
from meshtune.launch.visible import unseen
from meshtune.rundir import RunDir, saved_steps
from meshtune.units import counted, duration, notice

LOOK = 1.0  # seconds between looks at a machine's process
SAID = 30.0  # seconds without machines after which a line says so
FRUITLESS = 3  # starts in a row without a new checkpoint, after which the job ends


class Starter:
    """An actor of Ray on one machine, which starts the process that starts the machine's ranks."""

    def __init__(self) -> None:
        self.process: Any = None
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the actor
        self.read = 0  # bytes of it

    def machine(self) -> tuple[str, str, int]:
        """(Address and id of this machine's node, its address, a free port)."""
        ray = import_module("ray")
        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        with socket.create_server(("", 0)) as free:
            return f"{address} (node {node[:8]})", address, free.getsockname()[1]

    def check(self, output: str, machine: int, machines: int, start: str) -> tuple[list[int], int]:
        """(Machines whose files are not visible in the run folder, step of its newest checkpoint)."""
        run = RunDir(Path(output))
        return unseen(run.path, machine, machines, start), sum(saved_steps(run.checkpoints)[-1:])

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: str | None) -> None:
        """Start `meshtune` with these words. folder: to start it in; None: that of Ray."""
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshtune", *words], env={**os.environ, **variables}, cwd=folder,
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
            # PR_SET_PDEATHSIG: nothing is left where Ray kills the actor
            preexec_fn=library and (lambda: library.prctl(1, signal.SIGKILL)),
        )  # fmt: skip

    def look(self) -> tuple[bytes, int | None]:
        """(Output since the last look, exit code of the process), after LOOK seconds; None: it runs."""
        code = None
        try:
            code = self.process.wait(LOOK)
        except subprocess.TimeoutExpired:
            pass
        text = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size - self.read, self.read)
        self.read += len(text)
        return text, code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


class Driver:
    """The starts of one job."""

    def __init__(self, ray: Any, options: Namespace, stop: StopRequest) -> None:
        self.ray, self.options, self.stop = ray, options, stop
        self.machines = range(options.machines)
        self.newest: int | None = None  # step of the newest checkpoint at the last start
        self.fruitless = 0  # starts in a row that left no newer one

    def run(self) -> int:
        """Start the run until it ends; returns the job's exit code. Raises UserError where it can't start."""
        while True:
            group = self.placed()
            try:
                code = None if group is None else self.started(group)
            finally:
                if group is not None:  # which ends its actors
                    self.ray.util.remove_placement_group(group)
            if self.stop.requested:
                return Interrupted.exit_code if code is None else code
            if code not in (None, Interrupted.exit_code):
                return code
            notice("meshtune: starting again" + ("" if code else ", once Ray has the machines"))

    def placed(self) -> Any:
        """A placement group with a bundle on each of the machines; None if the job is stopped meanwhile.

        Raises UserError if Ray does not have them in time.
        """
        bundle, began, said = self.options.bundle, time.monotonic(), False
        group = self.ray.util.placement_group([bundle] * len(self.machines), strategy="STRICT_SPREAD")
        while not group.wait(LOOK):
            waited = time.monotonic() - began
            if self.stop.requested or waited > self.options.wait:
                self.ray.util.remove_placement_group(group)
            if self.stop.requested:
                return None
            if waited > min(SAID, self.options.wait) and not said:
                nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
                known = [{name: node.get(name, 0) for name in bundle} for node in nodes]
                said = True
                notice(
                    f"meshtune: Ray has not given {counted(len(self.machines), 'machine')} with {bundle} each yet; "
                    f"its nodes have {known}, which others may use. Waiting for {duration(self.options.wait)} "
                    "at most."
                )
            if waited > self.options.wait:
                raise UserError(
                    f"Ray had no {counted(len(self.machines), 'machine')} with {bundle} each for "
                    f"{duration(waited)}. Add nodes, or ask for less (cluster.gpus, cluster.ray.bundle), and submit "
                    "again: checkpoints are kept."
                )
        return group

    def started(self, group: Any) -> int | None:
        """Start the run on all machines; returns its exit code, or None where a machine was lost."""
        ray, options, lost = self.ray, self.options, self.ray.exceptions.RayActorError
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        remote = ray.remote(num_cpus=options.bundle.get("CPU", 0), num_gpus=options.bundle.get("GPU", 0))(
            Starter
        )
        starters = [
            remote.options(scheduling_strategy=strategy(group, placement_group_bundle_index=n)).remote()
            for n in self.machines
        ]
        try:
            places = ray.get([starter.machine.remote() for starter in starters])
            self.check(starters, [name for name, *_ in places])
            variables = {
                "MESHTUNE_MACHINES": str(len(places)), "MESHTUNE_RANKS": str(options.ranks),
                "MASTER_ADDR": places[0][1], "MASTER_PORT": str(places[0][2]),
            }  # fmt: skip
            ray.get([
                starter.start.remote(options.words, variables | {"MESHTUNE_MACHINE": str(n)}, options.folder)
                for n, starter in enumerate(starters)
            ])  # fmt: skip
        except lost as error:
            notice(f"meshtune: a machine was lost while the run started: {error}")
            return None
        return self.followed(starters, [name for name, *_ in places])

    def check(self, starters: Sequence[Any], names: Sequence[str]) -> None:
        """Raise UserError if a machine does not see the others' files in the run folder, and NoProgress
        after FRUITLESS starts that left no checkpoint.
        """
        start, output = uuid.uuid4().hex, self.options.output
        checks = [starter.check.remote(output, n, len(names), start) for n, starter in enumerate(starters)]
        try:
            answers = self.ray.get(checks)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError) else error) from None
        seen_by = {n: [*self.machines] for n in self.machines}
        for reader, (missing, _) in enumerate(answers):
            for writer in missing:
                seen_by[writer].remove(reader)
        writer = min(self.machines, key=lambda n: len(seen_by[n]))
        if readers := [names[n] for n in self.machines if n not in seen_by[writer]]:
            raise UserError(
                f"output = {output} is not a folder that all machines share: a file that {names[writer]} "
                f"wrote there is not visible on {', '.join(readers)}. Name a folder on storage that all see "
                "(cluster.storage)."
            )
        newest = max(step for _, step in answers)
        self.fruitless = self.fruitless + 1 if newest == self.newest else 0
        self.newest = newest
        if self.fruitless >= FRUITLESS:
            raise NoProgress(
                f"{FRUITLESS} starts in a row left no checkpoint newer than step {newest}, so the job ends. "
                "Save more often (checkpoint.every), and look at why the machines were lost."
            )

    def followed(self, starters: Sequence[Any], names: Sequence[str]) -> int | None:
        """Forward output and a stop until the processes of all machines have ended; returns as `started`."""
        ray, stopping, until = self.ray, False, float("inf")
        codes: dict[int, int | None] = {}  # machine -> exit code; None: it was lost
        looks = {starter.look.remote(): n for n, starter in enumerate(starters)}
        while looks:
            for look in ray.wait([*looks], timeout=LOOK)[0]:
                number, code = looks.pop(look), None
                try:
                    text, code = ray.get(look)
                    sys.stdout.buffer.write(text)
                    sys.stdout.flush()
                except ray.exceptions.RayActorError as error:
                    notice(f"meshtune: machine {number}, {names[number]}, was lost: {error}")
                    codes[number], until = None, 0.0
                    continue
                if code is None:
                    looks[starters[number].look.remote()] = number
                    continue
                codes[number] = code
                if code not in (0, Interrupted.exit_code):  # the others end too, once they notice
                    until = min(until, time.monotonic() + self.options.margin)
            if self.stop.requested and not stopping:
                stopping, until = True, min(until, time.monotonic() + self.options.margin)
                self.signal([starters[number] for number in looks.values()], signal.SIGTERM)
            if time.monotonic() > until:
                self.signal([starters[number] for number in looks.values()], signal.SIGKILL)
        return combined(codes)

    def signal(self, starters: Sequence[Any], number: signal.Signals) -> None:
        for starter in starters:
            starter.signal.remote(int(number))


def combined(codes: Mapping[int, int | None]) -> int | None:
    """Exit code of a run by those of its machines; None if one was lost.

    Of several failures the one that says more: 1 and signals are often consequences of another machine's end.
    """
    ended = [code for code in codes.values() if code is not None]
    if len(ended) < len(codes):
        return None
    said = [code for code in ended if code > 1 and code != Interrupted.exit_code]
    failed = said or [code for code in ended if code not in (0, Interrupted.exit_code)]
    code = failed[0] if failed else max(ended)
    return code if code >= 0 else 128 - code


def main(words: Sequence[str] | None = None) -> int:
    """Run the driver; returns the job's exit code."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each machine")
    parser.add_argument("--bundle", type=json.loads, required=True, help="resources of each machine, as JSON")
    parser.add_argument("--margin", type=float, required=True, help="seconds in which a stopped run saves")
    parser.add_argument("--wait", type=float, required=True, help="seconds in which Ray has the machines")
    parser.add_argument("--output", required=True, help="the run folder")
    parser.add_argument("--folder", help="that the run starts in")
    parser.add_argument("words", nargs="+", help="of meshtune")
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
