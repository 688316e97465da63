"""Real benches on this machine beside the plan and the dry run: `make validation-benches`.

    python validation/benches.py --out FOLDER [--only zero3,28M] [--table validation/benches.md]

    probe ─> FOLDER/my-cluster.toml ─> a bench of each case ─> FOLDER/runs, FOLDER/documents
                                    └─> calibrate ─> each quarter of the runs predicted by the other three

Everything that FOLDER holds is kept, so that a run that was stopped goes on. The machine must be idle: the
table names the load before each bench. Compared are

    time      the median step with the one planned by the probe's constants, and with the one planned by
              constants that were fitted to other runs: mean error and Spearman's rank correlation
    memory    tensors on the fullest rank, planned; and those of the simulated rank, to the byte in each
              category (ranks differ by the logits of a few tokens where they share sequences)
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig

from meshtune.api.bench import bench
from meshtune.api.calibrate import calibrate
from meshtune.api.probe import FILE, probe
from meshtune.layout import Layout
from meshtune.meter.rows import fullest_memory
from meshtune.rundir import write_text_atomically
from meshtune.units import counted, human

SEQ_LEN = 256
STEPS = 8  # that are timed
TARGETS = {"spearman": 0.9, "within": 0.8, "memory": 0.03}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
MODELS = {
    "5M": LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=SEQ_LEN, **SPECIAL,
    ),
    "28M": LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=SEQ_LEN, **SPECIAL,
    ),
}  # fmt: skip
LAYOUTS = {
    "5M": (
        "mb1-ga4", "mb4-ga1", "mb8-ga1", "mb8-ga2", "mb2-ga2-full", "mb4-ga2-selective", "mb8-ga1-full",
        "dp2-mb2-ga1", "dp2-mb4-ga2", "zero1x2-mb2-ga2", "zero2x2-mb4-ga1", "zero3x2-mb2-ga1",
        "zero3x2-mb4-ga2-full", "tp2-mb4-ga1", "tp2-sp-mb2-ga2", "tp2-sp-mb4-ga1-selective",
        "pp2-1f1b-mb2-ga4", "pp2-gpipe-mb1-ga4", "cp2-mb4-ga1", "ulysses2-mb2-ga2",
        "dp4-mb2-ga1", "zero1x4-mb4-ga1", "zero3x4-mb2-ga1", "zero3x4-mb1-ga2-full", "dp2-zero2x2-mb2-ga1",
        "zero3x2-tp2-mb2-ga1", "zero3x2-cp2-mb2-ga1-selective", "cp4-mb2-ga1", "pp4-1f1b-mb1-ga8",
        "pp4-zb-mb1-ga8", "dp2-pp2-1f1b-mb2-ga2", "tp2-sp-pp2-1f1b-mb1-ga4",
        "dp8-mb1-ga1", "dp8-mb4-ga1", "zero2x8-mb1-ga2-selective", "zero3x8-mb1-ga1", "zero3x8-mb2-ga2-full",
        "dp2-zero3x4-mb2-ga1", "zero3x4-tp2-sp-mb1-ga1", "zero3x2-cp2-tp2-mb1-ga1", "dp2-pp4-1f1b-mb1-ga4",
        "zero1x2-tp2-pp2-1f1b-mb1-ga4",
    ),
    "28M": (
        "mb2-ga1", "mb4-ga1-full", "dp2-mb2-ga1", "zero3x2-mb2-ga1-selective", "tp2-sp-mb4-ga1",
        "pp2-1f1b-mb1-ga4", "zero3x4-mb1-ga1", "zero3x2-tp2-mb2-ga1", "pp4-1f1b-mb1-ga4", "cp2-dp2-mb2-ga1",
        "zero3x8-mb1-ga1-full", "dp8-mb1-ga1", "tp4-sp-zero3x2-mb2-ga1",
    ),
}  # fmt: skip
LORA = ("mb4-ga1", "zero3x2-mb4-ga1", "zero3x4-mb2-ga1", "dp8-mb1-ga1")  # of the 28M model


class Case(NamedTuple):
    """A layout of a model."""

    model: str  # of MODELS
    layout: Layout
    lora: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-lora {self.layout}" if self.lora else f"{self.model} {self.layout}"

    def settings(self, models: Path) -> dict[str, Any]:
        """The sections of the case's config."""
        method = {"method": "lora", "lora": {"r": 16}} if self.lora else {}
        return {
            "model": {"name": str(models / self.model), "init": "random"},
            "data": {"seq_len": SEQ_LEN},
            "train": {"precision": "fp32", "device": "cpu"},
            **method,
        }


def cases() -> Iterator[Case]:
    """Yield every case, those of a model in the order of their ranks."""
    for model, layouts in LAYOUTS.items():
        yield from (Case(model, Layout.parse(text)) for text in layouts)
    yield from (Case("28M", Layout.parse(text), lora=True) for text in LORA)


def measure(case: Case, out: Path) -> dict[str, Any]:
    """Bench a case beside its plan by the probe's file, unless it is done; return its document."""
    runs = out / "runs" / ("lora" if case.lora else case.model)
    file = out / "documents" / f"{case.name.replace(' ', '-')}.json"
    if file.exists():
        return json.loads(file.read_text())
    settings = case.settings(out / "models") | {"cluster": str(out / FILE)}
    load = os.getloadavg()[0]
    (document,) = bench(settings, layouts=[str(case.layout)], steps=STEPS, out=runs)
    if document["failed"]:
        sys.exit(f"{case.name}: {document['failed']}")
    document |= {"load_before": load, "run": str(runs / str(case.layout))}
    file.parent.mkdir(exist_ok=True)
    write_text_atomically(file, json.dumps(document) + "\n")
    return document


def page(documents: Mapping[str, Mapping[str, Any]], fitted: Mapping[str, Any]) -> str:
    """The page, as Markdown: scores, then every bench."""
    after = {run["run"]: run for run in fitted["left_out"]}
    first = next(iter(documents.values()))["measured"]
    wrong = [off(one) for one in documents.values()]
    unlike = [name for name, one in documents.items() if not simulated_to_the_byte(one)]
    machine = f"{first['device']}, {counted(os.cpu_count() or 1, 'core')}, {date.today()}"
    equal = f"{len(documents) - len(unlike)} of {len(documents)}"
    heads = (
        "model",
        "layout",
        "load before",
        "step, ms",
        "spread",
        "by probe",
        "calibrated",
        "peak",
        "planned",
    )
    lines = [
        "# Real benches beside the plan and the dry run", "",
        "`make validation-benches` writes this page; [benches.py](benches.py) has the cases and says what is "
        f"compared. {machine}: fp32, sequences of {SEQ_LEN} random tokens, medians of {STEPS} steps.", "",
        "## Step time of runs left out of the fit", "",
        "| runs | number | mean error by probe | Spearman | mean error calibrated | Spearman |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {both['after']['runs']} | {two_cells(both['before'])} | {two_cells(both['after'])} |"
            for name, both in fitted["held_out"].items()
        ), "",
        f"Targets: Spearman {TARGETS['spearman']} over all, {TARGETS['within']} within each number of ranks. "
        "Calibrated: each quarter of the runs by constants fitted to the other three.", "",
        "Fitted to all runs: "
        + ", ".join(f"{name} x {one['factor']:.2f}" for name, one in fitted["fitted"].items()) + ".", "",
        "## Memory", "",
        f"Planned peaks of tensors on the fullest rank: {max(map(abs, wrong)):.1%} off at worst (target "
        f"{TARGETS['memory']:.0%}). Simulated to the byte in every category: {equal}"
        + (f"; not {', '.join(unlike)}." if unlike else "."), "",
        f"| {' | '.join(heads)} | simulated |",
        "| --- | --- |" + " ---: |" * (len(heads) - 2) + " --- |",
        *(row(name, one, after[one["run"]]) for name, one in documents.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def two_cells(score: Mapping[str, Any]) -> str:
    """Two cells of a score."""
    order = score["spearman"]
    return f"{score['mean']:.1%} | " + ("" if order is None else f"{order:.3f}")


def row(name: str, document: Mapping[str, Any], left_out: Mapping[str, Any]) -> str:
    """A bench's line of the table."""
    measured = document["measured"]
    step, (model, layout) = measured["step_seconds"], name.split()
    before, after = (left_out[when] / step - 1 for when in ("before", "after"))
    cells = (
        model, layout, f"{document['load_before']:.1f}", f"{1000 * step:,.0f}", f"{measured['spread']:.0%}",
        f"{before:+.0%}", f"{after:+.0%}", human(measured["memory"]["peak"]), f"{off(document):+.1%}",
        "equal" if simulated_to_the_byte(document) else "differs",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def off(document: Mapping[str, Any]) -> float:
    """The planned peak's error, as a share of the measured one."""
    return document["predicted"]["memory"]["peak"] / document["measured"]["memory"]["peak"] - 1


def simulated_to_the_byte(document: Mapping[str, Any]) -> bool:
    """True if every category of the simulated rank's peak is what the same rank counted in the run."""
    simulated = document["simulated"]
    rows = [row for row in document["measured"]["memory_rows"] if row["rank"] == simulated["rank"]]
    counted = {name: size for name, size in fullest_memory(rows).items() if size}
    return counted == {name: int(size) for name, size in simulated["memory"].items() if size}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that keeps what was measured")
    parser.add_argument("--only", default="", help="comma-separated parts of the names of cases")
    parser.add_argument("--table", type=Path, help="where the page goes; default: the terminal")
    options = parser.parse_args(words)
    out = options.out
    for name, config in MODELS.items():
        config.save_pretrained(out / "models" / name)
    if not (out / FILE).exists():
        print("probing this machine …", file=sys.stderr, flush=True)
        probe(out / FILE)
    chosen = [case for case in cases() if any(part in case.name for part in options.only.split(","))]
    documents = {}
    for number, case in enumerate(chosen, 1):
        documents[case.name] = one = measure(case, out)
        step = one["measured"]["step_seconds"]
        print(f"{number} of {len(chosen)}: {case.name} {1000 * step:,.0f} ms", file=sys.stderr, flush=True)
    calibrated = out / "calibrated.toml"
    calibrated.unlink(missing_ok=True)
    runs = [one["run"] for one in documents.values()]
    text = page(documents, calibrate(runs, cluster=out / FILE, out=calibrated))
    if options.table:
        write_text_atomically(options.table, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
