"""The planner's memory against that of real training steps, over a grid of layouts on CPU ranks.

    python validation/memory_grid.py [--layouts mb2-ga2,… --set train.precision=fp32 …] --out FILE.json
    python validation/memory_grid.py --of FILE.json     # compares what was measured before

A small Llama, or the model that `--config CONFIG.json` describes, is trained two steps per layout through the
real engine, each rank watched by PhaseMemory. Every row is one full document with all tokens labelled, so the
numbers are the same in every run. FILE.json:

    {"<layout>": {"settings": ["<section>.<key>=<value>"],
                  "ranks": [{"rank", "steps": [{"step", "phase", "bytes", "parts"}],
                             "states": {"weights", "gathered", "gradients", "optimizer", "host"}}]}}

Layouts with other settings are named "<layout> <setting> <setting> …".

The second step, the first one that has all optimizer state, is compared with the planner's events
(memory_rows.py).

States are compared to the byte: weights, gradients and optimizer state as they are when the update begins,
without the model's buffers and the optimizer's step counters; the weights that ZeRO-1 and -2 gather as they
are when the last micro-batch's forward begins, if an earlier one gathered them. What ZeRO-1 holds of
gradients in between is FSDP2's own; there unit tests compare the planner with `partition.share`, and that
with real ranks.
Host memory is that of the buffers for what is offloaded, after the last step.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from memory_rows import compare, errors, held
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from meshtune import config, launch
from meshtune.api import build
from meshtune.api.resolve import model_spec, optimizer_spec
from meshtune.config import Config
from meshtune.dryrun.world import TRACED_STEPS, Job
from meshtune.launch import Rank
from meshtune.layout import Layout
from meshtune.meter.ledger import storage_bytes
from meshtune.meter.phases import PhaseMemory
from meshtune.meter.trace import GATHERED
from meshtune.model.anatomy import auto_class
from meshtune.model.load import read_config
from meshtune.optim import host
from meshtune.parallel import offload
from meshtune.rundir import write_text_atomically
from meshtune.train import loop
from meshtune.train.measure import Meter

SEQ_LEN = 512
MODEL = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GRID: dict[tuple[str, ...], tuple[str, ...]] = {  # settings -> layouts
    (): (
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
    ("train.precision=fp32",): ("mb2-ga2", "zero3x2-mb2-ga2", "tp2-sp-mb2-ga2"),
    ("train.precision=bf16-pure",): ("mb2-ga2",),
}  # fmt: skip
MOST_ROWS = 64  # as many as two steps of the largest batch take

# measuring #


class Recorder(PhaseMemory):
    """Records the peaks of every watched step in `steps`, and the model states of the last one in `states`.

    watched: the run's PhaseMemory, which this one replaces.
    """

    def __init__(self, watched: PhaseMemory) -> None:
        super().__init__(watched.model, watched.optimizer, watched.device, buffers=watched.buffers)
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
            masters = storage_bytes([*self.model.parameters(), *self._on_device()]) - parameters
            gradients = storage_bytes(self.optimizer.gradients())
            self.states |= {"weights": parameters, "gradients": gradients, "optimizer": masters}
        with super().phase(name):
            yield

    def _on_device(self) -> list[Tensor]:
        """The optimizer's state, masters among it; not its counters of steps."""
        return [tensor for tensor in self.optimizer.on_device().values() if tensor.ndim]


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


def settings_of(data: Path, output: Path, layout: Layout, settings: Sequence[str]) -> Config:
    """Config of TRACED_STEPS steps under this layout, with the global batch size that follows from it.

    data: folder of `make_data`. output: the run folder. settings: section.key=value each.
    """
    overrides = [
        f"model.name={data / 'model'}", f"data.train={data / 'train.jsonl'}", f"data.cache={data / 'cache'}",
        f"data.seq_len={SEQ_LEN}", "data.train_on=all", "data.overlong=cut", "method=full",
        f"train.global_batch_size={layout.global_batch_size}", f"train.max_steps={TRACED_STEPS}",
        "train.device=cpu", "checkpoint.every=0", "log.to=[jsonl]", f"layout={layout}", f"output={output}",
        *settings,
    ]  # fmt: skip
    return config.load(None, overrides)


@contextmanager
def host_memory() -> Iterator[WeakKeyDictionary[torch.UntypedStorage, int]]:
    """Bytes of each host buffer that is allocated in this context, while it lives. On a processor they are
    memory like all other.
    """
    real, allocated = offload.host_buffer, WeakKeyDictionary[torch.UntypedStorage, int]()

    def counted(like: Tensor, size: int) -> Tensor:
        storage = (buffer := real(like, size)).untyped_storage()
        allocated[storage] = storage.nbytes()
        return buffer

    with patch.object(offload, "host_buffer", counted), patch.object(host, "host_buffer", counted):
        yield allocated


def train_rank(rank: Rank, settings: Config, results: Path) -> None:
    """Train on this rank and write its peaks and states to `results`/<rank>.json."""
    with host_memory() as allocated:
        run = build.build(settings)
        recorder = Recorder(run.meter.memory)
        run.meter = Meter(run.world, recorder)
        loop.train(run)
    states = recorder.states | {"host": sum(allocated.values())}
    found = {"rank": rank.number, "steps": recorder.steps, "states": states}
    (results / f"{rank.number}.json").write_text(json.dumps(found))


def measure(data: Path, layout: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Train under the layout on ranks of this machine, and return the peaks and states of each rank.

    data: folder of `make_data`. settings: as of `settings_of`. Returns one value of FILE.json (see above).
    """
    parsed = Layout.parse(layout)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        chosen = settings_of(data, results / "run", parsed, settings)
        launch.run(train_rank, chosen, results, ranks=parsed.world)
        ranks = [json.loads((results / f"{rank}.json").read_text()) for rank in range(parsed.world)]
    return {"settings": [*settings], "ranks": ranks}


def cases(layouts: str | None, settings: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """(Layout, settings) of each case to measure. layouts: comma-separated; None: the cases of GRID."""
    if layouts:
        return [(layout, settings) for layout in layouts.split(",")]
    return [(layout, each) for each in GRID for layout in GRID[each]]


# comparing #


def job_of(name: str, found: Mapping[str, Any], file: Path | None = None) -> Job:
    """The job of a layout. found: what `measure` returned for it. file: of the model, see `model_of`."""
    layout = Layout.parse(name.split()[0])
    settings = settings_of(Path(), Path(), layout, found["settings"])
    spec = replace(model_spec(settings, "meshtune", "cpu"), source=model_of(file), init="random")
    return Job(
        spec=spec, optimizer=optimizer_spec(settings), layout=layout, seq_len=SEQ_LEN, documents=(SEQ_LEN,)
    )


def report(found: Mapping[str, Any], file: Path | None) -> str:
    """All layouts as Markdown. file: of the model, see `model_of`."""
    rows, first_rows, states = [], [], []
    for name, each in found.items():
        job = job_of(name, each, file)
        rows += compare(name, job, each["ranks"])
        first_rows += compare(name, job, each["ranks"], step=1)
        states += held(name, job, each["ranks"])
    passes = [row for row in rows if row.phase != "optimizer"]
    first = [row.error for row in first_rows if row.phase != "optimizer"]
    wrong = [f"{each.name} {each.rank}".strip() for each in states if each.surplus]
    fine = {row.name for row in rows} - {row.name for row in passes if abs(row.rest_error) > 0.02}
    return "\n".join([
        f"Model states exact to the byte: {'yes' if not wrong else 'no: ' + ', '.join(wrong)} "
        f"({len(states) - len(wrong)} of {len(states)} ranks).",
        f"The rest: {errors([row.rest_error for row in passes])}; within 2 % on {len(fine)} of {len(found)} "
        "layouts.",
        f"All together: {errors([row.error for row in rows])}; in the first step's passes {errors(first)}.",
        "",
        "| layout | rank | phase | measured | predicted | error | the rest, measured | predicted | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.name} | {row.rank} | {row.phase} | {row.bytes:,.0f} | {row.predicted_bytes:,.0f} | "
            f"{row.error:+.1%} | {row.rest[0]:,.0f} | {row.rest[1]:,.0f} | "
            f"{'' if row.phase == 'optimizer' else f'{row.rest_error:+.1%}'} |"
            for row in rows
        ),
        "",
        "| layout | rank | weights | gathered | gradients | optimizer | host | as predicted |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *(
            f"| {each.name} | {each.rank} | "
            + " | ".join(
                f"{each.measured[part]:,}" if part in each.measured else ""
                for part in ("weights", "gathered", "gradients", "optimizer", "host")
            )
            + f" | {each.surplus or 'yes'} |"
            for each in states
        ),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", help="comma-separated; default: the whole grid")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, with --layouts")
    parser.add_argument("--config", type=Path, help="a config.json; default: a small Llama")
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path, help="where the measured bytes go")
    files.add_argument("--of", type=Path, help="what --out wrote, to compare again")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.of.read_text()) if options.of else {}
    with tempfile.TemporaryDirectory() as folder:
        if options.out:
            make_data(Path(folder), options.config)
        for layout, settings in cases(options.layouts, options.set) if options.out else ():
            name, started = " ".join([layout, *settings]), time.perf_counter()
            found[name] = measure(Path(folder), layout, settings)
            write_text_atomically(options.out, json.dumps(found, indent=1) + "\n")
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(report(found, options.config))


if __name__ == "__main__":
    main()
