"""The planner's memory against that of real training steps, over a grid of layouts on CPU ranks.

    python validation/memory_grid.py [--layouts mb2-ga2,zero3x2-mb2-ga2] [--precision bf16] --out FILE.json
    python validation/memory_grid.py --of FILE.json     # compares what was measured before

A small Llama, or the model that `--config CONFIG.json` describes, is trained two steps per layout through the
real engine, each rank watched by PhaseMemory. Every row is one full document with all tokens labelled, so the
numbers are the same in every run. FILE.json:

    {"<layout>": {"precision", "ranks": [{"rank", "steps": [{"step", "phase", "bytes", "parts"}],
                                          "states": {"weights", "gathered", "gradients", "optimizer"}}]}}

Layouts in another precision than bf16 are named "<layout> <precision>".

The second step, the first one that has all optimizer state, is compared with the planner's events:

    forward               the loss
    backward              the fullest of: backward of the head, backward of a block, end of backward
    forward and backward  (pipelines) the fullest of these four
    optimizer             the update

States are compared to the byte: weights, gradients and optimizer state as they are when the update begins,
without the model's buffers and the optimizer's step counters; the weights that ZeRO-1 and -2 gather as they
are when the last micro-batch's forward begins, if an earlier one gathered them. What ZeRO-1 holds of
gradients in between is FSDP2's own; there unit tests compare the planner with `partition.share`, and that
with real ranks.
Gradients that replicas sum are 4 bytes more than predicted for each parameter tensor: the same all-reduce
carries the number of ranks that have one.

The rest is a phase's peak without the planner's states at that event, measured and predicted; an update has
next to none. Of pipeline ranks the first, the fullest in the middle and the last
are compared; of the ranks that differ on other axes alone, the fullest. torch's pipeline stages make the
buffers that they receive in once, in the first step, so a watch of the second step would miss them: they are
counted in when it begins.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from meshtune import config, launch
from meshtune.config import Config
from meshtune.launch import Rank
from meshtune.layout import Layout
from meshtune.meter.ledger import storage_bytes
from meshtune.meter.phases import WATCHED_STEPS, PhaseMemory
from meshtune.meter.trace import GATHERED
from meshtune.model.capabilities import traits
from meshtune.model.load import on_meta, read_config
from meshtune.model.multimodal import auto_class
from meshtune.model.trace import census_of
from meshtune.parallel.pipeline import Pipeline
from meshtune.placement.columns import Columns
from meshtune.placement.share import coordinates
from meshtune.plan.accounting import accounting_of
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory import timeline
from meshtune.plan.memory.stages import RANKS
from meshtune.plan.search import stages_of
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.precision import PRECISIONS
from meshtune.rundir import write_text_atomically
from meshtune.sections import ClusterConfig
from meshtune.train import build, loop

SEQ_LEN = 512
MODEL = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GRID = {
    "bf16": (
        "mb2-ga1", "mb2-ga2", "mb2-ga2-attention", "mb2-ga2-selective", "mb2-ga2-full",
        "mb2-ga2-selective4", "mb2-ga2-full4", "zero3x2-mb2-ga2-full4", "pp2-1f1b-mb1-ga4-full2",
        "pp2-interleaved1f1b-v2-mb1-ga4-full1",
        "dp2-mb2-ga1", "dp2-mb2-ga2",
        "zero1x2-mb2-ga2", "zero2x2-mb2-ga2", "zero3x2-mb2-ga2", "zero3x4-mb2-ga1-full",
        "dp2-zero3x2-mb1-ga2",
        "tp2-mb2-ga2", "tp2-sp-mb2-ga2", "tp2-sp-regather-mb2-ga2", "tp4-sp-mb2-ga1-full",
        "zero3x2-tp2-sp-mb2-ga1",
        "cp2-mb2-ga1", "ulysses2-mb2-ga2",
        "pp2-1f1b-mb1-ga4", "pp4-1f1b-mb1-ga8", "pp2-gpipe-mb1-ga4", "pp2-interleaved1f1b-v2-mb1-ga4",
        "pp2-zb-mb1-ga4", "pp2-zbv-mb1-ga4", "pp2-zbv-mb1-ga4-attention", "pp2-dualpipev-mb1-ga4",
        "zero1x2-pp2-1f1b-mb1-ga4", "dp2-tp2-sp-pp2-1f1b-mb1-ga4-full",
        "tp2-sp-regather-pp2-1f1b-mb1-ga4",
    ),
    "fp32": ("mb2-ga2", "zero3x2-mb2-ga2", "tp2-sp-mb2-ga2"),
    "bf16-pure": ("mb2-ga2",),
}  # fmt: skip
MOST_ROWS = 64  # as many as two steps of the largest batch take
EVENTS_OF_PHASE = {  # events of the planner that a phase's peak is compared with
    "forward": timeline.EVENTS[:1],
    "backward": timeline.EVENTS[1:4],
    "forward and backward": timeline.EVENTS[:4],
    "optimizer": timeline.EVENTS[4:],
}
STATES = ("weights", "gradients", "optimizer")
GATHERED_STATE = (GATHERED,)  # under ZeRO-1 and -2 alone: for a whole step

# measuring #


class Recorder(PhaseMemory):
    """Records the peaks of every watched step in `steps`, and the model states of the last one in `states`.

    watched: the run's PhaseMemory, which this one replaces. buffers: returns the tensors that a pipeline
    receives in.
    """

    def __init__(self, watched: PhaseMemory, buffers: Callable[[], list[Tensor]]) -> None:
        super().__init__(watched.model, watched.optimizer, watched.device, buffers=buffers)
        self.steps: list[dict[str, Any]] = []
        self.states: dict[str, int] = {}

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        with super().watching(step):
            yield
        for peak in self.peaks.values():
            parts = {name: size for name, size in peak.parts.items() if size}
            self.steps.append({"step": step, "phase": peak.phase, "bytes": peak.bytes, "parts": parts})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        parameters = storage_bytes(list(self.model.parameters()))
        if name == "forward":
            self.states["gathered"] = storage_bytes(self.known()[GATHERED])
        elif name == "optimizer":
            masters = storage_bytes([*self.model.parameters(), *self._state()]) - parameters
            gradients = storage_bytes(self.optimizer.gradients())
            self.states |= {"weights": parameters, "gradients": gradients, "optimizer": masters}
        with super().phase(name):
            yield

    def _state(self) -> list[Tensor]:
        """The optimizer's, masters among them; not its counters of steps."""
        return [tensor for tensor in self.optimizer.state().values() if tensor.ndim]


def receive_buffers(run: loop.Run) -> list[Tensor]:
    """The receive buffers that torch's pipeline stages have allocated."""
    pipeline = run.passes.parallel.pipeline
    schedules = pipeline._schedules.values() if pipeline else ()
    infos = [
        info
        for schedule in schedules
        for stage in Pipeline._torch_stages(schedule)
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in received
    ]
    return [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor)]


def model_of(file: Path | None) -> PretrainedConfig:
    """The configuration in `file`; None: MODEL."""
    return MODEL if file is None else read_config(file, str(file), trust_remote_code=False)


def make_data(folder: Path, file: Path | None = None) -> None:
    """Write model/ with a tokenizer of single bytes, and train.jsonl with documents longer than SEQ_LEN.

    file: see `model_of`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    model = model_of(file)
    auto_class(model).from_config(model).save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = ("".join(draw.choices("abcdefghij klmnop", k=SEQ_LEN + 88)) for _ in range(MOST_ROWS))
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "train.jsonl").write_text("".join(lines))


def settings_of(data: Path, output: Path, layout: Layout, precision: str) -> Config:
    """Config of WATCHED_STEPS steps under this layout, with the global batch size that follows from it.

    data: folder of `make_data`. output: the run folder.
    """
    overrides = [
        f"model.name={data / 'model'}", f"data.train={data / 'train.jsonl'}", f"data.cache={data / 'cache'}",
        f"data.seq_len={SEQ_LEN}", "data.train_on=all", "data.overlong=cut", "method=full",
        f"train.global_batch_size={layout.global_batch_size}", f"train.max_steps={WATCHED_STEPS}",
        f"train.precision={precision}", "train.device=cpu", "checkpoint.every=0", "log.to=[jsonl]",
        f"layout={layout}", f"output={output}",
    ]  # fmt: skip
    return config.load(None, overrides)


def train_rank(rank: Rank, settings: Config, results: Path) -> None:
    """Train on this rank and write its peaks and states to `results`/<rank>.json."""
    run = build.build(settings)
    run.memory = recorder = Recorder(run.memory, lambda: receive_buffers(run))
    loop.train(run)
    found = {"rank": rank.number, "steps": recorder.steps, "states": recorder.states}
    (results / f"{rank.number}.json").write_text(json.dumps(found))


def measure(data: Path, layout: str, precision: str) -> dict[str, Any]:
    """Train under the layout on ranks of this machine, and return the peaks and states of each rank.

    data: folder of `make_data`. Returns one value of FILE.json (see above).
    """
    parsed = Layout.parse(layout)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        settings = settings_of(data, results / "run", parsed, precision)
        launch.run(train_rank, settings, results, ranks=parsed.world)
        ranks = [json.loads((results / f"{rank}.json").read_text()) for rank in range(parsed.world)]
    return {"precision": precision, "ranks": ranks}


def cases(layouts: str | None, precision: str | None) -> list[tuple[str, str]]:
    """(Layout, precision) of each case to measure.

    layouts: comma-separated, measured in `precision`, None for bf16. None: the cases of GRID in `precision`,
    or all of them.
    """
    if layouts:
        return [(layout, precision or "bf16") for layout in layouts.split(",")]
    return [(layout, kind) for kind in GRID if precision in (None, kind) for layout in GRID[kind]]


# comparing #


class Row(NamedTuple):
    """Peak of one phase of one kind of rank, in bytes; `rest` is the peak without model states."""

    layout: str
    rank: str
    phase: str
    measured: float
    predicted: float
    rest: float
    rest_predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def rest_error(self) -> float:
        return self.rest_predicted / self.rest - 1


class Held(NamedTuple):
    """Bytes of the model states of one kind of rank, by part.

    "gathered" is among the parts only under ZeRO-1 or -2 with several micro-batches and without a pipeline.
    """

    layout: str
    rank: str
    measured: Mapping[str, int]
    predicted: Mapping[str, int]

    @property
    def surplus(self) -> str:
        """Bytes measured beyond the prediction, by part; empty if all are equal."""
        more = {part: size - self.predicted[part] for part, size in self.measured.items()}
        return ", ".join(f"{part} {size:+,}" for part, size in more.items() if size)


@cache
def workload(precision: str, file: Path | None) -> Workload:
    model = on_meta(model_of(file))
    return Workload(
        model="memory grid", work=Work.of(census_of(model)), traits=traits(model), seq_len=SEQ_LEN,
        global_batch_size=1, precision=precision,
    )  # fmt: skip


def compare(
    name: str, found: Mapping[str, Any], step: int = WATCHED_STEPS, file: Path | None = None
) -> tuple[list[Row], list[Held]]:
    """Peaks of a layout's measured step, and the states of the last one, beside the planner's.

    name: the layout, with its precision if that is not bf16. found: what `measure` returned for it. step:
    whose peaks; from 1. file: of the model, see `model_of`. One Row per kind of rank and
    phase, one Held per kind of rank.
    """
    layout = Layout.parse(name.split()[0])
    model, layouts = workload(found["precision"], file), Columns.of([layout])
    accounting = accounting_of(model, cluster_of(ClusterConfig(gpu="cpu"), gpus=layout.world))
    stages = stages_of(model, layouts)
    predicted = timeline.step_timeline(model.work, layouts, accounting, SEQ_LEN, stages, first_step=step == 1)
    shape = len(RANKS), 1
    rows, states = [], []
    kinds = {1: (0,), 2: (0, 2)}.get(layout.pp, (0, 1, 2))
    for kind in kinds:
        at = {
            event: {part: float(np.broadcast_to(size, shape)[kind, 0]) for part, size in parts.items()}
            for event, parts in predicted.items()
        }
        place, label = int(stages.rank[kind, 0]), RANKS[kind] if layout.pp > 1 else ""
        ranks = [each for each in found["ranks"] if coordinates(layout, each["rank"])["pp"] == place]
        for phase, events in EVENTS_OF_PHASE.items():
            sizes = [
                each["bytes"]
                for rank in ranks
                for each in rank["steps"]
                if (each["step"], each["phase"]) == (step, phase)
            ]
            if sizes:
                fullest = max((at[event] for event in events), key=lambda parts: sum(parts.values()))
                own_states = sum(fullest[part] for part in STATES + GATHERED_STATE * (layout.zero in (1, 2)))
                total = sum(fullest.values())
                held = max(sizes)
                rows.append(Row(name, label, phase, held, total, held - own_states, total - own_states))
        measured = ranks[0]["states"]
        planned = {part: round(at["update"][part]) for part in STATES}
        if layout.zero in (1, 2) and layout.pp == 1 and layout.gradient_accumulation_steps > 1:
            planned["gathered"] = round(at["loss"][GATHERED])
        states.append(Held(name, label, {part: measured[part] for part in planned}, planned))
    return rows, states


def report(found: Mapping[str, Any], file: Path | None) -> str:
    """All layouts as Markdown. file: of the model, see `model_of`."""
    rows, states = [], []
    for name, each in found.items():
        own_rows, own_states = compare(name, each, file=file)
        rows, states = rows + own_rows, states + own_states
    passes = [row for row in rows if row.phase != "optimizer"]
    first = [
        row.error
        for name, each in found.items()
        for row in compare(name, each, step=1, file=file)[0]
        if row.phase != "optimizer"
    ]
    wrong = [f"{each.layout} {each.rank}".strip() for each in states if each.surplus]
    fine = {row.layout for row in rows} - {row.layout for row in passes if abs(row.rest_error) > 0.02}
    return "\n".join([
        f"Model states exact to the byte: {'yes' if not wrong else 'no: ' + ', '.join(wrong)} "
        f"({len(states) - len(wrong)} of {len(states)} ranks).",
        f"The rest: {_errors([row.rest_error for row in passes])}; within 2 % on {len(fine)} of {len(found)} "
        "layouts.",
        f"All together: {_errors([row.error for row in rows])}; in the first step's passes {_errors(first)}.",
        "",
        "| layout | rank | phase | measured | predicted | error | the rest, measured | predicted | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.layout} | {row.rank} | {row.phase} | {row.measured:,.0f} | {row.predicted:,.0f} | "
            f"{row.error:+.1%} | {row.rest:,.0f} | {row.rest_predicted:,.0f} | "
            f"{'' if row.phase == 'optimizer' else f'{row.rest_error:+.1%}'} |"
            for row in rows
        ),
        "",
        "| layout | rank | weights | gathered | gradients | optimizer | as predicted |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
        *(
            f"| {each.layout} | {each.rank} | "
            + " | ".join(
                f"{each.measured[part]:,}" if part in each.measured else ""
                for part in ("weights", "gathered", "gradients", "optimizer")
            )
            + f" | {each.surplus or 'yes'} |"
            for each in states
        ),
    ])  # fmt: skip


def _errors(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"mean error {sum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", help="comma-separated; default: the whole grid")
    parser.add_argument("--precision", choices=[*PRECISIONS])
    parser.add_argument("--config", type=Path, help="a config.json; default: a small Llama")
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path, help="where the measured bytes go")
    files.add_argument("--of", type=Path, help="what --out wrote, to compare again")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.of.read_text()) if options.of else {}
    with tempfile.TemporaryDirectory() as folder:
        if options.out:
            make_data(Path(folder), options.config)
        for layout, precision in cases(options.layouts, options.precision) if options.out else ():
            name, started = layout if precision == "bf16" else f"{layout} {precision}", time.perf_counter()
            found[name] = measure(Path(folder), layout, precision)
            write_text_atomically(options.out, json.dumps(found, indent=1) + "\n")
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(report(found, options.config))


if __name__ == "__main__":
    main()
