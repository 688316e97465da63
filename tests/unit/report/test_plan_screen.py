"""The first screen of a plan: the answer within 24 lines, a command to be copied, kinds of layouts."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
from known import known
from terminal import printed

from meshtune.config import Config, load
from meshtune.layout import Layout, in_words
from meshtune.plan.answer import KIN, KIND, Answer, offer_of
from meshtune.plan.cluster import cluster_of
from meshtune.plan.cost import RunLength
from meshtune.plan.search import search
from meshtune.plan.workload import Workload
from meshtune.report.plan import documents
from meshtune.report.plan.screen import CommandLine
from meshtune.sections import ClusterConfig

COLUMNS = "data.columns={prompt: question, completion: a long name of a column, system: another}"
WORDS = [
    "run.yaml",
    COLUMNS,
    "model.name=llama-3.1-8b",
    "cluster.gpu=h100-sxm",
    "cluster.gpus=16",
    "layout=auto",
]


def settings(*words: str) -> Config:
    return load(None, ["model.name=llama-3.1-8b", *words])


@pytest.fixture(scope="module")
def answer() -> Answer:
    model = known("llama-3.1-8b")
    workload = Workload("meta-llama/Llama-3.1-8B", model.work, model.traits, 4096, 64)
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=16, price_per_gpu_hour=2.5))
    length = RunLength(2000, 2000 * workload.tokens)
    offer = offer_of(search(workload, cluster), length=length)
    return Answer(workload, (offer,), offer, length=length)


def lines_of(answer: Answer, line: CommandLine, width: int = 80) -> list[str]:
    text = printed(documents.answer(answer, line=line, whole=False), width)
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [80, 200])
def test_24_lines_hold_the_answer_and_the_whole_command(answer: Answer, width: int) -> None:
    line = CommandLine.of(["meshtune", "plan", *WORDS], WORDS, settings("data.train=rows.jsonl"))
    lines = lines_of(answer, line, width)
    screen, choice = "\n".join(lines[:24]), answer.choice
    assert {line for line in lines if len(line) > width} <= {f"    {shlex.quote(COLUMNS)} \\"}
    assert "…" not in screen
    words = " ".join(screen.split())
    for fact in (
        str(choice.layout), in_words(choice.layout), f"{choice.tokens_per_second_per_gpu:,.0f} tokens/s/GPU",
        "79.1 GiB", "free", answer.run.sentence(), answer.faster[0], answer.safer[0].setting,
    ):  # fmt: skip
        assert fact in words, fact
    copied = screen[screen.index("  srun") :].replace("\\\n", " ").split("\n\n")[0]
    train = ["python", "-m", "meshtune", "train", "run.yaml", COLUMNS, "model.name=meta-llama/Llama-3.1-8B"]
    nodes = "srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8"
    assert shlex.split(copied) == [*nodes.split(), *train, f"layout={choice.layout}"]


def test_what_training_needs_besides_is_said(answer: Answer) -> None:
    line = CommandLine.of(["meshtune"], WORDS, settings())
    assert "Add data.train=FILE, the rows to train on." in lines_of(answer, line)
    assert "Add data.train" not in "".join(lines_of(answer, replace(line, lacks="")))


def test_layouts_of_a_kind_are_one_row_with_their_number(answer: Answer) -> None:
    plan = answer.plan
    found = answer.kinds(6)
    assert len(found) == 6 and found[0][0].layout == answer.choice.layout

    def kind(layout: Layout) -> tuple:
        return tuple(getattr(layout, name) for name in KIND)

    assert len({kind(choice.layout) for choice, _ in found}) == 6
    chosen = found[0][0]
    near = np.flatnonzero(plan.seconds.total <= (1 + KIN) * chosen.seconds.total)
    alike = [place for place in near if kind(plan.choice(int(place)).layout) == kind(chosen.layout)]
    assert found[0][1] == len(alike) - 1 > 0
    assert len(answer.kinds(10_000)) == len({kind(plan.choice(place).layout) for place in range(len(plan))})


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp2-zero3x8-tp4-sp-mb2-ga3-full", "2 replicas · ZeRO-3 in 8 shards · tensor and sequence parallel"
         " over 4 · micro-batch 2 · 3 accumulated · recompute: full"),
        ("zero1x2-ulysses2-pp4-zbv-mb1-ga8", "ZeRO-1 in 4 shards · context parallel over 2 (ulysses) · 8"
         " pipeline stages on 4 ranks (zbv) · micro-batch 1 · 8 accumulated"),
        ("mb4-ga1-selective3", "micro-batch 4 · recompute: selective, 3 blocks"),
    ],
)  # fmt: skip
def test_a_layout_in_words(layout: str, words: str) -> None:
    assert in_words(Layout.parse(layout)) == words
