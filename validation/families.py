"""Train every family of transformers, tiny, against the unsharded Hugging Face model: `make families`.

    python validation/families.py                         every family, two at a time
    python validation/families.py --only llama,mamba      some
    python validation/families.py --tenth 3               a tenth of the table, from 0 to 9
    python validation/families.py --out DIR --page docs/families.md
                                                          goes on where DIR/<family>.json is missing

Three fp32 steps of a random model (tiny_families.py), packed and unpacked, on one rank and under the layouts
of LAYOUTS, against the same model, eager in attention and experts, a document at a time, with
torch.optim.AdamW: losses, gradient norms and each parameter's first gradient. Nothing of ours runs in the
reference but the rows, which are read as tokens and labels. Layouts run unpacked where packing is refused.

A difference is relative: of a loss or a norm to the reference's, of a gradient to the larger of its norm and
a hundredth of that of all gradients (fp32 says nothing about less). What differs by more than TOLERANCE
is repeated in fp64 on both sides. Exits with 1 if a family is wrong or ended in a traceback.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
import transformers  # noqa: E402
from double import double  # noqa: E402
from family_page import page  # noqa: E402
from multimodal import MULTIMODAL  # noqa: E402
from ranks import run_ranks  # noqa: E402
from tiny import make_rows, make_tokenizer, write_rows  # noqa: E402
from tiny_families import VOCABULARY, tiny_config, tiny_model  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from meshtune import config  # noqa: E402
from meshtune.api import build, choose  # noqa: E402
from meshtune.errors import UserError  # noqa: E402
from meshtune.meter import phases  # noqa: E402
from meshtune.model.anatomy import auto_class, has_text_part  # noqa: E402
from meshtune.rundir import RunDir  # noqa: E402
from meshtune.train import loop  # noqa: E402

LAYOUTS = {"zero3x2": 2, "tp2-sp": 2, "pp2-1f1b": 2, "cp2": 2}  # and their ranks
STEPS, GLOBAL_BATCH, SEQ_LEN = 3, 4, 192
LEARNING_RATE, EPSILON = 1e-3, 1e-6
TOLERANCE = 1e-5  # relative; beyond it a family is wrong, unless it agrees in fp64
DOUBLE_TOLERANCE = 1e-9
SECONDS = 240  # of one family
FAMILIES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL})


class Steps(NamedTuple):
    """Three steps: what is compared."""

    losses: list[float]
    norms: list[float]  # of the gradients
    gradients: dict[str, Tensor]  # of the first step, whole, by parameter; none where a parameter has none


Document = tuple[Tensor, Tensor]  # ids [tokens], labels [tokens]: the next token, or -100


class Trained(NamedTuple):
    """Losses, gradient norms and gradients of one of our ranks."""

    losses: list[float]
    norms: list[float]
    # (parameter, its whole shape, offsets in it, gradient) of each piece
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
    documents: list[list[Document]]  # of each step, on this data rank


# Ours #


def settings(folder: Path, layout: str, packing: bool, precision: str = "fp32") -> list[str]:
    output = folder / f"{layout}-{packing}-{precision}"
    return [
        f"model.name={folder / 'model'}", f"data.train={folder / 'train.jsonl'}",
        f"data.cache={folder / 'cache'}",
        f"data.seq_len={SEQ_LEN}", f"data.packing={str(packing).lower()}", f"layout={layout}",
        f"train.global_batch_size={GLOBAL_BATCH}", f"train.max_steps={STEPS}", f"train.precision={precision}",
        f"train.learning_rate={LEARNING_RATE}", f"train.adam_eps={EPSILON}", "train.weight_decay=0.1",
        "train.lr_scheduler=constant", "train.warmup_ratio=0", "train.max_grad_norm=1.0", "log.to=[jsonl]",
        "checkpoint.every=0", "checkpoint.async_save=false", f"output={output}", "output_exists=replace",
    ]  # fmt: skip


def train(words: list[str]) -> Trained:
    """Train on this rank."""
    phases.WATCHED_STEPS = 0  # counting memory would take as long as all else
    run = build.build(config.load(None, words))
    documents = documents_of(run)
    pieces: list[Any] = []
    parallel, clip = run.passes.parallel, run.optimizer.clip

    def keep_and_clip(norm: float, max_norm: float) -> None:
        if run.progress.step == 1:
            parameters = dict(parallel.named_parameters())
            for name, gradient in run.optimizer.named_gradients().items():
                if name in parallel.tied:  # a copy, summed with the original
                    continue
                for block in parallel.piece(name, parameters[name], gradient).blocks():
                    pieces.append((name, block.shape, block.offsets, block.tensor.clone()))
        clip(norm, max_norm)

    run.optimizer.clip = keep_and_clip  # type: ignore[method-assign]
    loop.train(run)
    rows = RunDir(run.folder.path).rows("train")
    return Trained([row["loss"] for row in rows], [row["grad_norm"] for row in rows], pieces, documents)


def whole(results: list[Trained]) -> Steps:
    """Put the gradients of all ranks together."""
    gradients: dict[str, Tensor] = {}
    for result in results:
        for name, shape, offsets, part in result.pieces:
            target = gradients.setdefault(name, torch.full(shape, float("nan"), dtype=part.dtype))
            for dim, (start, size) in enumerate(zip(offsets, part.shape, strict=True)):
                target = target.narrow(dim, min(start, target.shape[dim]), size)
            target.copy_(part)
    return Steps(results[0].losses, results[0].norms, gradients)


def documents_of(run: loop.Run) -> list[list[Document]]:
    """Return the documents of each step on this data rank."""
    steps = []
    for (batch, _), _ in zip(run.loader, range(STEPS), strict=False):
        documents = []
        for micro in batch.micro_batches:
            for row, lengths in enumerate(micro.documents):
                ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
                documents += [
                    (micro.input_ids[row, start:end], micro.labels[row, start:end])
                    for start, end in pairwise(ends)
                ]
        steps.append(documents)
    return steps


# The reference #


def reference(folder: Path, steps: list[list[Document]], dtype: torch.dtype = torch.float32) -> Steps:
    """Train by transformers and torch, without meshtune: eager attention and experts, one document a time."""
    shape = AutoConfig.from_pretrained(folder)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = auto_class(shape).from_pretrained(folder, dtype=dtype, **plain)
    with torch.device("meta"):  # what the family freezes stays so; from_pretrained forgets it
        built = dict(auto_class(shape).from_config(shape).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(built[name].requires_grad)
    model.train(not has_text_part(shape))  # in training some ask which tokens are of an image; none drops out
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)
    result = Steps([], [], {})
    for documents in steps:
        labels = sum(int((labels != -100).sum()) for _, labels in documents)
        total = 0.0
        for ids, targets in documents:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            (loss / labels).backward()
            total += float(loss.detach()) / labels
        if not result.gradients:
            named = model.named_parameters()
            result.gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        result.losses.append(total)
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        update.step()
        update.zero_grad()
    return result


# Comparison #


def compare(ours: Steps, theirs: Steps) -> dict[str, Any]:
    """Return the largest relative differences, and the parameter whose gradient differs most."""
    floor = theirs.norms[0] / 100
    gradients = {}
    for name in ours.gradients.keys() | theirs.gradients.keys():
        one, two = ours.gradients.get(name), theirs.gradients.get(name)
        if one is None or two is None:  # no gradient is a gradient of zeros
            one = torch.zeros_like(two) if one is None else one  # type: ignore[arg-type]
            two = torch.zeros_like(one) if two is None else two
        gradients[name] = float((one - two).norm()) / max(float(two.norm()), floor)
    worst = max(gradients, key=lambda name: gradients[name] if gradients[name] == gradients[name] else 9e9)
    values = {
        "loss": largest(ours.losses, theirs.losses),
        "norm": largest(ours.norms, theirs.norms),
        "gradient": gradients[worst],
    }
    right = all(value <= TOLERANCE for value in values.values())  # False for NaN
    return {"outcome": "right" if right else "WRONG", **values, "worst": worst}


def largest(ours: list[float], theirs: list[float]) -> float:
    if len(ours) != len(theirs):
        return float("inf")
    return max(abs(one - two) / abs(two) for one, two in zip(ours, theirs, strict=True))


# One family #


def make_folder(folder: Path, family: str) -> str:
    """Write the family's model with a tokenizer, and rows; return the name of the model's class."""
    rows = make_rows(24)
    for number, row in enumerate(rows):
        row["completion"] += " and" * (20 + number % 5)  # longer than the windows
    write_rows(folder / "train.jsonl", rows)
    texts = [f"{row['prompt']}\n{row['completion']}" for row in rows]
    model = tiny_model(tiny_config(family))
    if (count := sum(p.numel() for p in model.parameters())) > 2**25:
        raise ValueError(f"{count / 1e6:.0f} M parameters are not tiny")
    make_tokenizer(texts, VOCABULARY - 4).save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    return type(model).__name__


def run_family(family: str) -> dict[str, Any]:
    """Return what came of each way to train a family: {"<layout> packed": {"outcome", …}}."""
    started = time.monotonic()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found: dict[str, Any] = {"family": family, "runs": {}, **versions}
    with tempfile.TemporaryDirectory(prefix="family") as name:
        folder = Path(name)
        try:
            found["class"] = make_folder(folder, family)
        except Exception as error:
            found["untestable"] = f"{type(error).__name__}: {short(str(error))}"
            return found
        references: dict[bool, Steps] = {}
        for packing in (True, False):
            found["runs"][f"one {word(packing)}"] = one_rank(folder, packing, references)
        packing = found["runs"]["one packed"]["outcome"] in ("right", "WRONG")
        for layout, ranks in LAYOUTS.items():
            if packing in references:
                run = several_ranks(folder, layout, ranks, packing, references[packing])
                found["runs"][f"{layout} {word(packing)}"] = run
    found["seconds"] = round(time.monotonic() - started, 1)
    return found


def word(packing: bool) -> str:
    return "packed" if packing else "unpacked"


def short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}…"


def one_rank(folder: Path, packing: bool, references: dict[bool, Steps]) -> dict[str, Any]:
    """Train on this process; leave the reference in `references`."""
    words = settings(folder, "mb2-ga2", packing)
    try:
        ours = train(words)
    except UserError as error:
        return refused(error)
    except Exception as error:
        return failed(traceback.format_exc(), error)
    try:
        references[packing] = reference(folder / "model", ours.documents)
    except Exception as error:
        return {"outcome": "untestable", "why": f"transformers: {type(error).__name__}: {short(str(error))}"}
    run = compare(whole([ours]), references[packing])
    return run if run["outcome"] == "right" else in_double(run, folder, "mb2-ga2", packing, 1)


def several_ranks(folder: Path, layout: str, ranks: int, packing: bool, theirs: Steps) -> dict[str, Any]:
    """Train under a layout."""
    whole_layout = f"{layout}-mb1-ga{2 if 'zero' in layout else 4}"
    words = settings(folder, whole_layout, packing)
    try:
        settled = config.load(None, words)
        choose.attention_of(settled, choose.layout_of(settled, ranks), ranks)
    except UserError as error:
        return refused(error)
    except Exception as error:
        return failed(traceback.format_exc(), error)
    try:
        run = compare(whole(run_ranks(ranks, train, words, seconds=60)), theirs)
    except AssertionError as error:
        return failed(str(error), error)
    return run if run["outcome"] == "right" else in_double(run, folder, whole_layout, packing, ranks)


def in_double(single: dict[str, Any], folder: Path, layout: str, packing: bool, ranks: int) -> dict[str, Any]:
    """Repeat in fp64 what was beyond TOLERANCE in fp32: right, if the difference was rounding alone."""
    words = settings(folder, layout, packing, "fp64")
    try:
        with double():
            one = train(settings(folder, "mb2-ga2", packing, "fp64"))
            theirs = reference(folder / "model", one.documents, torch.float64)
            ours = [one] if ranks == 1 else run_ranks(ranks, train, words, seconds=60, forked=True)
    except Exception as error:
        return single | {"fp64": f"{type(error).__name__}: {short(str(error))}"}
    run = compare(whole(ours), theirs)
    values = {name: single[name] for name in ("loss", "norm", "gradient")}
    right = max(run["loss"], run["norm"], run["gradient"]) < DOUBLE_TOLERANCE
    return run | {"outcome": "right" if right else "WRONG", "fp32": values}


def refused(error: UserError) -> dict[str, Any]:
    return {"outcome": "refused", "sentences": list(error.problems)}


def failed(text: str, error: BaseException) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.strip()]
    return {"outcome": "traceback", "why": short(lines[-1]), "traceback": text[-6000:]}


# All families #


def warm_up() -> None:
    """Train once, so that the families, which are forks, find everything imported."""
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name), "llama")
        one_rank(Path(name), True, {})


def child(family: str, file: Path) -> None:
    os.setpgid(0, 0)  # so that its ranks end with it
    sys.stdout = sys.stderr = open(file.with_suffix(".log"), "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 1), os.dup2(sys.stderr.fileno(), 2)
    write(file, run_family(family))
    os._exit(0)


def write(file: Path, found: dict[str, Any]) -> None:
    aside = file.with_suffix(".part")
    aside.write_text(json.dumps(found, indent=1) + "\n")
    aside.rename(file)


def run_families(families: Iterable[str], out: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Yield what was found of each family, in the order in which they end; files that exist are read."""
    context = get_context("fork")
    waiting, running = list(families), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            family = waiting.pop(0)
            if (file := out / f"{family}.json").exists():
                yield json.loads(file.read_text())
                continue
            process = context.Process(target=child, args=(family, file))
            process.start()
            running[family] = process, time.monotonic()
        time.sleep(0.05)
        for family, (process, started) in [*running.items()]:
            late = time.monotonic() - started > SECONDS
            if process.is_alive() and not late:
                continue
            if late and process.pid:
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            del running[family]
            file = out / f"{family}.json"
            if not file.exists():
                why = f"it did not end within {SECONDS} s" if late else f"it ended with {process.exitcode}"
                write(file, {"family": family, "runs": {"one packed": {"outcome": "traceback", "why": why}}})
            yield json.loads(file.read_text())


def outcome_line(found: dict[str, Any]) -> str:
    """One line of progress: family, and each way with its outcome."""
    if "untestable" in found:
        return f"{found['family']:24} untestable: {found['untestable']}"
    parts = []
    for way, run in found["runs"].items():
        more = ""
        if run["outcome"] in ("right", "WRONG"):
            more = f" {max(run['loss'], run['norm'], run['gradient']):.0e}"
        elif run["outcome"] == "traceback":
            more = f" ({run['why']})"
        parts.append(f"{way}: {run['outcome']}{more}")
    return f"{found['family']:24} {found.get('seconds', '?')} s  " + " · ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--tenth", type=int, help="every tenth family, from this one on (0 to 9)")
    parser.add_argument("--out", type=Path, help="folder of the results; what is there is not run again")
    parser.add_argument("--done", action="store_true", help="only those that are in --out already")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    parser.add_argument("--page", type=Path, help="write the table here, such as docs/families.md")
    options = parser.parse_args()
    families = options.only.split(",") if options.only else FAMILIES
    if options.done:
        families = [family for family in families if (options.out / f"{family}.json").exists()]
    if options.tenth is not None:
        families = families[options.tenth % 10 :: 10]
    out = options.out or Path(tempfile.mkdtemp(prefix="families"))
    out.mkdir(parents=True, exist_ok=True)
    bad, results = 0, []
    warm_up()
    for found in run_families(families, out, options.jobs):
        print(outcome_line(found), flush=True)
        results.append(found)
        bad += any(run["outcome"] in ("WRONG", "traceback") for run in found["runs"].values())
    if options.page:
        left = [
            {"family": each, "runs": {}, "untestable": "not run"} for each in FAMILIES if each not in families
        ]
        options.page.write_text(page([*results, *left]), encoding="utf-8")
    print(f"{len(families)} families, {bad} wrong or with a traceback; {out}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
