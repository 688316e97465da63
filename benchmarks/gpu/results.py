"""The check's results: benchmarks/results/gpu-<GPU>-<date>.json and .md, written after each figure.

A later part of the same day on a GPU of the same name adds to the file.
"""

import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

COLUMNS = ("predicted", "by_probe", "simulated", "measured")


class Results:
    """Figures by name, "<part>/<figure>"."""

    def __init__(self, folder: Path, environment: Mapping[str, Any], name: str = "gpu") -> None:
        self.date = f"{datetime.now(UTC):%Y-%m-%d}"
        gpu = environment.get("gpu", "").lower().replace(" ", "-")
        self.name = "-".join(filter(None, (name, gpu, self.date)))
        self.places = [folder, *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])]
        file = folder / f"{self.name}.json"
        self.figures: dict[str, Any] = json.loads(file.read_text())["figures"] if file.exists() else {}
        self.environment = environment

    @property
    def probed(self) -> Path:
        """The cluster file that the probe writes."""
        return self.places[0] / f"{self.name}.toml"

    def add(self, name: str, figure: Mapping[str, Any]) -> None:
        """Keep a figure, and write all that there are."""
        self.figures[name] = dict(figure)
        document = {"date": self.date, "environment": self.environment, "figures": self.figures}
        for place in self.places:
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{self.name}.json").write_text(json.dumps(document, indent=1) + "\n")
            (place / f"{self.name}.md").write_text("\n".join(self.lines()) + "\n")
        if self.probed.exists():
            for place in self.places[1:]:
                (place / self.probed.name).write_text(self.probed.read_text())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        env = self.environment
        yield from (f"# GPU check, {self.date}", "")
        yield f"{env.get('gpu', 'no GPU')}, torch {env['torch']}, transformers {env['transformers']}, "
        yield f"CUDA {env['cuda']}. Missing: {', '.join(env['missing']) or 'nothing'}."
        yield from ("", *benches(self.figures), "", *speeds(self.figures), "", *others(self.figures))


def benches(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table for the benches: the step by part, and memory, in each column of `COLUMNS`."""
    yield "| bench | | predicted | with the probe's file | simulated | measured |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, one in figures.items():
        if "predicted" not in one:
            continue
        title = f"{name} {one['layout']}"
        if not one["measured"]:
            yield f"| {title} | {cell(one['failed'])} | | | | |"
            continue
        found = [one.get(column) or {} for column in COLUMNS]
        speed, mfu = one["measured"]["tokens_per_second_per_gpu"], one["measured"]["mfu"]
        yield f"| {title} | tokens/s | | | | {speed:,.0f} |"
        yield f"| | MFU | | | | {'' if mfu is None else f'{mfu:.1%}'} |"
        yield row("step", [each.get("step_seconds") for each in found], "{:.4f} s")
        for part in one["measured"]["parts"]:
            values = [(each.get("parts") or {}).get(part) for each in found]
            if any(values):
                yield row(part, values, "{:.4f} s")
        sizes = [(each.get("memory") or {}) for each in found]
        for kind in dict.fromkeys(kind for size in sizes for kind in size if kind != "event"):
            values = [size.get(kind) for size in sizes]
            if any(values):
                yield row(f"memory, {kind}", [each and each / 2**30 for each in values], "{:.2f} GiB")


def row(title: str, values: list[Any], form: str) -> str:
    cells = (form.format(value) if isinstance(value, int | float) else "" for value in values)
    return f"| | {title} | {' | '.join(cells)} |"


def speeds(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of tokens/s of everything that trained, in the order in which it ran."""
    yield "| figure | tokens/s | step | peak memory |"
    yield "| --- | ---: | ---: | ---: |"
    for name, one in figures.items():
        found = one.get("measured") or one
        speed = found.get("tokens_per_second", found.get("tokens_per_second_per_gpu"))
        if speed is not None:
            of_bench = one["measured"]["memory"].get("peak", 0) if one.get("measured") else 0
            peak = found.get("peak_memory_bytes", of_bench)
            seconds = f"{found['step_seconds']:.4f} s"
            yield f"| {name} | {speed:,.0f} | {seconds} | {(peak or 0) / 2**30:.1f} GiB |"


def others(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of all other figures, and of what was skipped or failed."""
    yield "| figure | |"
    yield "| --- | --- |"
    for name, one in figures.items():
        if not {"predicted", "tokens_per_second"} & one.keys():
            text = one.get("tail") or one.get("error") or one.get("skipped") or json.dumps(one)
            ends = {"tail", "error"} & one.keys()  # what they have last says most
            yield f"| {name} | {cell(text.strip().splitlines()[-1] if ends else text)} |"


def cell(text: str) -> str:
    """Text on one line of a table, its first 300 characters."""
    return " ".join(text.split())[:300].replace("|", "/")
