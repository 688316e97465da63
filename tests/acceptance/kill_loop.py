"""Kill runs at random moments until enough kills have been survived: `make kill-loop KILLS=200 SEED=0`.

A kill is survived if the same command, started again, goes on and ends with the numbers of a run that was
never killed, to the bit (kills.py). Two chains run at once. Prints a line for each, and writes a table.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))  # tiny

from kills import CASES, STEPS, VICTIMS, WINDOWS, Chain, Failed, Kill, Straight, straight_run
from tiny import make_folder

AT_ONCE = 2
SHARES = {"start-up": 4, "data": 3, "before config.yaml": 3, "training": 5, "checkpoint": 5, "export": 3,
          "report": 2}  # how often a window is drawn  # fmt: skip


def draw(number: int, seed: int) -> Chain:
    """Chain `number` of a seed: a case, how it is started, and 3 to 6 kills in the order of a run."""
    rng = Random(f"{seed}/{number}")
    case = list(CASES)[number % len(CASES)]
    how = "command" if number % 8 == 3 else "fork"
    if number % 12 == 9:  # a number of a case of two ranks
        case, how = "zero1x2", "torchrun"
    one_rank = CASES[case][1] == 1
    drawn = rng.choices(list(SHARES), list(SHARES.values()), k=rng.randint(3, 6))
    kills = []
    for window in drawn:
        victim = "all" if one_rank else rng.choice(VICTIMS[:3])
        kills.append(Kill(victim, window, round(rng.random(), 3)))
    stages = list(WINDOWS)
    later = [kill for kill in kills if kill.window != "start-up"]
    later.sort(key=lambda kill: (0 if kill.window in ("training", "checkpoint") else 1, kill.fraction))
    later.sort(key=lambda kill: min(stages.index(kill.window), stages.index("training"))
               if kill.window == "checkpoint" else stages.index(kill.window))  # fmt: skip
    for kill in kills:
        if kill.window == "start-up":
            later.insert(rng.randint(0, len(later)), kill)
    if not one_rank and rng.random() < 0.25:
        later.insert(rng.randint(0, 1), Kill("rank stopped", "before the group", round(rng.random(), 3)))
    return Chain(case, tuple(later), how)


def run_chain(number: int, chain: Chain, straight: Straight, tiny: Path, folder: Path) -> tuple[int, Chain]:
    """Run a chain in a folder of its own, which stays only if something is wrong."""
    place = folder / f"chain-{number}"
    place.mkdir()
    chain.run(straight, tiny, place)
    if not chain.problems:
        shutil.rmtree(place)
    return number, chain


def straights(pool: ProcessPoolExecutor, tiny: Path, folder: Path) -> dict[tuple[str, str], Straight]:
    """The uninterrupted run of each (case, how it is started); how it is started only changes its seconds."""
    runs: dict[tuple[str, str], Future[Straight]] = {}
    for number, case in enumerate(CASES):
        place = folder / f"straight-{number}"
        place.mkdir()
        runs[case, "fork"] = pool.submit(straight_run, case, tiny, place)
    done = {key: future.result() for key, future in runs.items()}
    begun = time.monotonic()
    place = folder / "straight-command"
    place.mkdir()
    command = pool.submit(straight_run, "one rank", tiny, place, "command").result()
    imports = max(0.0, command.start_seconds - done["one rank", "fork"].start_seconds)
    print(
        f"{len(CASES)} straight runs; {time.monotonic() - begun:.0f} s for the installed command", flush=True
    )
    for (case, _), straight in list(done.items()):
        for how in ("command", "torchrun"):
            done[case, how] = Straight(straight.run, straight.start_seconds + imports)
    return done


def loop(kills: int, seed: int, folder: Path) -> Iterator[tuple[int, Chain]]:
    """Yield (number, finished chain) until `kills` kills were survived."""
    from meshtune.api import build, choose  # noqa: F401 - before the forks, which share it
    from meshtune.train import loop  # noqa: F401 - before the forks, which share it

    tiny = folder / "tiny"
    tiny.mkdir()
    make_folder(tiny)
    with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("fork")) as pool:
        straight = straights(pool, tiny, folder)
        numbers, running, survived = count(), set(), 0
        while survived < kills:
            while len(running) < AT_ONCE:
                chain = draw(number := next(numbers), seed)
                running.add(
                    pool.submit(run_chain, number, chain, straight[chain.case, chain.how], tiny, folder)
                )
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                number, chain = future.result()
                survived += 0 if chain.problems else len(chain.done)
                yield number, chain
        for future in running:  # what has begun counts too
            yield future.result()


# The table #


def table(chains: list[Chain], kills: int, seed: int, seconds: float) -> str:
    """The page: survived kills by victim and window, chains by case, and what is wrong."""
    import torch
    import transformers

    import meshtune

    tried = Counter((kill.window, kill.victim) for chain in chains for kill in chain.done)
    survived = Counter(
        (kill.window, kill.victim) for chain in chains if not chain.problems for kill in chain.done
    )
    good = [chain for chain in chains if not chain.problems]
    head = (
        f"{time.strftime('%Y-%m-%d')}, meshtune {meshtune.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, {os.cpu_count()} "
        f"cores, CPU ranks (gloo), seed {seed}, {seconds / 60:.0f} minutes."
    )
    lines = [
        "# Runs that were killed, and started again", "",
        head, "",
        "```", f"make kill-loop KILLS={kills} SEED={seed}", "```", "",
        f"{survived.total()} of {tried.total()} kills were survived: the same command, started again, ended "
        "with the numbers of a run that was never killed, to the bit. "
        f"{len(good)} of {len(chains)} chains of kills were equal in train and eval rows, samples and every "
        "file of `model/`, had whole checkpoints of the same steps, a report, no half-written file in the "
        "run folder, cache or temporary directory, and no process left. After a kill all processes had ended "
        f"within {max(chain.slowest for chain in chains):.0f} s.",
        "", f"Each run has {STEPS} steps and a checkpoint every 3. A cell is survived / tried.", "",
        "| killed in | " + " | ".join(HEADINGS.values()) + " |",
        "| --- |" + " ---: |" * len(VICTIMS),
    ]  # fmt: skip
    for window, meaning in WINDOWS.items():
        cells = [
            f"{survived[window, victim]} / {tried[window, victim]}" if tried[window, victim] else ""
            for victim in VICTIMS
        ]
        lines.append(f"| {window}: {meaning} | " + " | ".join(cells) + " |")
    lines += ["", "| run | started | chains | bit-equal | kills |", "| --- | --- | ---: | ---: | ---: |"]
    for case in CASES:
        for how, words in STARTED.items():
            of_both = [chain for chain in chains if (chain.case, chain.how) == (case, how)]
            if of_both:
                equal = sum(not chain.problems for chain in of_both)
                done = sum(len(chain.done) for chain in of_both)
                lines.append(f"| {case} | {words} | {len(of_both)} | {equal} | {done} |")
    wrong = [f"- {chain.case}, {chain.done}: {problem}" for chain in chains for problem in chain.problems]
    return "\n".join([*lines, *(["", "Not as promised:", "", *wrong] if wrong else [])]) + "\n"


HEADINGS = dict(
    zip(VICTIMS, ("all processes", "launcher, or torchrun", "one rank", "one rank, SIGSTOP"), strict=True)
)
STARTED = {
    "fork": "forked after its imports",
    "command": "`python -m meshtune`",
    "torchrun": "`torchrun --standalone`",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="to survive before it ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the table, written after every chain")
    options = parser.parse_args()
    folder, begun, chains = Path(tempfile.mkdtemp(prefix="kill-loop-")), time.monotonic(), []
    try:
        for number, chain in loop(options.kills, options.seed, folder):
            chains.append(chain)
            done = ", ".join(f"{kill.victim} in {kill.window}" for kill in chain.done)
            kills = sum(len(chain.done) for chain in chains if not chain.problems)
            print(
                f"{kills:4d} survived | {number}: {chain.case} ({chain.how}), {chain.seconds:.0f} s: {done}",
                *chain.problems, sep="\n     ", flush=True,
            )  # fmt: skip
            if options.out:  # also of a loop that is stopped
                options.out.write_text(table(chains, options.kills, options.seed, time.monotonic() - begun))
    except Failed as error:
        sys.exit(str(error))
    if any(chain.problems for chain in chains):
        sys.exit(f"Some kills were not survived; their folders are in {folder}.")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
