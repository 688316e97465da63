"""A layout is built from each rank's slices, and exported as the folder that one device writes."""

import ctypes
import gc
import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import cases
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from meshtune import config
from meshtune.api import build
from meshtune.model.pieces import StoredTensors
from meshtune.parallel.zero import local

# One folder from all ranks #


def export(words: list[str], folder: Path) -> None:
    run = build.build(config.load(None, words))
    run.exporter.write(folder, steps=0)
    assert (folder / "README.md").is_file()  # on no rank does it end before the folder is there


def exported(folder: Path, layout: str, ranks: int, words: list[str]) -> Path:
    words = [*words, f"layout={layout}", f"output={folder / layout}"]
    run_ranks(ranks, export, words, folder / f"model-{layout}")
    return folder / f"model-{layout}"


METHODS = {
    "full": [],
    "lora": ["method=lora", "lora.r=4"],
    "bf16": ["train.precision=bf16"],
    "random": ["model.init=random", "train.seed=7"],
}
LAYOUTS = {"zero1x3": 3, "pp2": 2, "zero3x2-tp2": 4}  # 3: uneven pieces


@pytest.mark.parametrize("method", cases(METHODS, ci=["full"]))
def test_every_layout_exports_what_one_device_does(method, settings, tmp_path):
    """Before the first step: so also what each has loaded and drawn is the same, bit by bit."""
    words = settings("train.global_batch_size=12", *METHODS[method])
    one = exported(tmp_path, "dp1", 1, words)
    tensors = {path.name: load_file(path) for path in one.glob("*.safetensors")}
    assert sum(len(each) for each in tensors.values()) > 10
    for layout, ranks in LAYOUTS.items():
        ours = exported(tmp_path, layout, ranks, words)
        assert {path.name for path in ours.iterdir()} == {path.name for path in one.iterdir()}, layout
        for path in one.iterdir():
            mine = ours / path.name
            if path.suffix == ".safetensors":
                found = load_file(mine)
                assert found.keys() == tensors[path.name].keys(), layout
                for name, tensor in tensors[path.name].items():
                    same = found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
                    assert same, f"{layout}: {name}"
            elif path.suffix == ".json":
                assert json.loads(mine.read_text()) == json.loads(path.read_text()), f"{layout}: {path.name}"
            elif path.name != "README.md":  # which is for readers
                assert mine.read_bytes() == path.read_bytes(), f"{layout}: {path.name}"


# Memory of a rank while it builds #


def anonymous() -> int:
    """Bytes of memory that are this process's own, and no mapping of a file."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def read_of(file: Path) -> int:
    """Bytes of a mapped file that this process has read: its pages."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    return 1024 * sum(int(re.findall(r"^Rss:\s+(\d+)", each, re.M)[0]) for each in maps if str(file) in each)


def build_watched(words: list[str], weights: Path) -> tuple[int, int, int]:
    """(bytes of parameters that this rank keeps, the most memory that building added, bytes of the file that
    it read)
    """
    build.build(config.load(None, words))  # what is counted and cached once (5 to 11 MB) is not a parameter
    gc.collect()
    weights.touch()  # so that they are hashed again
    ctypes.CDLL(None).malloc_trim(0)  # else pages that are free now would be used again, uncounted
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    read = [0]
    with patch.object(StoredTensors, "copy_buffers", lambda *_: read.append(read_of(weights))):  # the last
        run = build.build(config.load(None, words))
    peak = max(peak, anonymous())
    done.set()
    watcher.join()
    kept = sum(local(p).nbytes for p in run.passes.parallel.stages[0].parameters())
    return kept, peak - before, max(read)


SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64
}  # fmt: skip
EXPERTS = {"num_hidden_layers": 8, "intermediate_size": 512, "moe_intermediate_size": 512}
LARGE = {
    "llama": partial(LlamaConfig, **SIZES, num_hidden_layers=16, intermediate_size=1408),
    "qwen3_moe": partial(Qwen3MoeConfig, **SIZES, **EXPERTS, num_experts=8, num_experts_per_tok=2),
    "mixtral": partial(MixtralConfig, **SIZES, **EXPERTS, num_local_experts=8),
}


@pytest.fixture(scope="module")
def large(request, tiny) -> Iterator[Path]:
    """A model of 52 to 60 M parameters, about 220 MB in fp32, with the tiny one's tokenizer, where the system
    maps single pages, not pages of 2 MB. Building takes some 6 MB besides parameters, whatever the model.
    """
    family, dtype = request.param
    with TemporaryDirectory(dir="/dev/shm") as folder:
        AutoModelForCausalLM.from_config(LARGE[family]()).to(dtype).save_pretrained(folder)
        for file in (tiny / "model").glob("tokenizer*"):
            Path(folder, file.name).write_bytes(file.read_bytes())
        yield Path(folder)


@pytest.mark.all
@pytest.mark.parametrize(
    ("large", "layout"),
    [
        (("llama", torch.float32), "zero3x2"),
        (("llama", torch.bfloat16), "tp2"),
        (("qwen3_moe", torch.float32), "zero3x2-ep2"),
        (("mixtral", torch.bfloat16), "zero3x2-ep2"),
    ],
    indirect=["large"],
    ids=str,
)
def test_building_reads_and_takes_little_more_than_a_rank_keeps(layout, large, settings, tmp_path):
    words = settings(f"layout={layout}", f"model.name={large}", f"output={tmp_path / 'large'}")
    file = large / "model.safetensors"
    share = file.stat().st_size / 2
    for kept, added, read in run_ranks(2, build_watched, words, file, fresh=True, seconds=300):
        assert 0.9 * kept < added <= 1.1 * kept, f"{added / kept:.3f} times the {kept / 1e6:.1f} MB it keeps"
        most = (2 if "tp" in layout else 1.3) * share  # columns of tp share pages; and 64 KiB for each tensor
        assert 0.9 * share < read <= most, f"{read / 1e6:.1f} MB of the file, {share / 1e6:.1f} a rank"
