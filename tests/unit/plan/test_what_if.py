"""Plans around an answer, for the sliders of its page."""

from dataclasses import replace

import pytest

from meshtune.plan.answer import Answer
from meshtune.plan.cluster import cluster_of
from meshtune.plan.models import models
from meshtune.plan.offers import offer_of
from meshtune.plan.search import search
from meshtune.plan.what_if import what_if
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

MODEL = models()["llama-3.2-1b"]


def answer_of(gpus: int, batch: int = 8, seq_len: int = 2048, **cluster) -> Answer:
    workload = Workload("llama-3.2-1b", MODEL.work, MODEL.traits, seq_len, batch)
    offer = offer_of(search(workload, cluster_of(ClusterConfig(gpu="h100-sxm", gpus=gpus, **cluster))))
    return Answer(workload, (offer,), offer)


@pytest.mark.ci
def test_every_combination_is_a_search_of_its_own_and_the_middle_one_is_the_answer():
    answer = answer_of(4)
    known = {(8, 2): None}  # what was searched for already is taken as it is
    around = what_if(answer, known)
    assert around.choices[2, 8, 2048] is None
    assert (around.gpus, around.batches, around.seq_lens) == ((1, 2, 4, 8), (4, 8, 16), (1024, 2048, 4096))
    assert len(around.choices) == 36
    assert around.choices[4, 8, 2048] is answer.choice
    for gpus, batch, seq_len in ((1, 16, 4096), (8, 4, 1024)):
        workload = replace(answer.workload.of_batch(batch), seq_len=seq_len)
        best = search(workload, answer.choice.cluster.of_size(gpus)).choice(0)
        assert around.choices[gpus, batch, seq_len] == best


@pytest.mark.all
def test_what_is_no_whole_number_or_no_whole_node_is_left_out():
    around = what_if(answer_of(2, batch=1, seq_len=1023), {})
    assert (around.gpus, around.batches, around.seq_lens) == ((1, 2, 4), (1, 2), (1023, 2046))
    assert what_if(answer_of(24, batch=24), {}).gpus == (6, 24, 48)  # 12 fill no nodes of 8


@pytest.mark.ci
@pytest.mark.parametrize("memory", [16])
def test_where_nothing_fits_there_is_no_layout(memory):
    around = what_if(answer_of(2, memory_gib=memory), {})
    assert around.choices[1, 8, 2048] is None and around.choices[2, 8, 2048] is not None
