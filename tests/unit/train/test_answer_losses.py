"""Losses on whole answers from hidden states on: as Liger's chunked losses have them, and a chunk at a time.

Liger gets each answer as a padded row, we all of them packed into one sequence. Its losses need neither a GPU
nor triton: `pip install --no-deps liger-kernel`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from forward import summed_loss
from test_loss import VOCABULARY, Watch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from meshtune.attention.register import register
from meshtune.data.batch import IGNORE, MicroBatch, answers_of, micro_batch_of
from meshtune.data.pack import Document, in_memory
from meshtune.model.anatomy import anatomy
from meshtune.objectives import OBJECTIVES
from meshtune.train.loss import head_loss
from meshtune.train.preference import Preference, PreferenceSpec

register()

PAIRS = (4, 3, 9), (2, 8, 1), (5, 2, 6)  # tokens of a prompt, and of its answers: chosen, rejected
KL = 0.7  # of kto
CASES: dict[str, tuple[PreferenceSpec, str, dict[str, Any]]] = {  # ours, the class of Liger's, its arguments
    "dpo": (PreferenceSpec("dpo", beta=0.3, sft_weight=0.2), "DPO",
            {"beta": 0.3, "alpha": 0.2, "compute_nll_loss": True}),
    "hinge": (PreferenceSpec("dpo", loss_type="hinge"), "DPO", {"loss_type": "hinge"}),
    "robust": (PreferenceSpec("dpo", loss_type="robust", label_smoothing=0.2), "DPO",
               {"loss_type": "robust", "label_smoothing": 0.2}),
    "kto": (PreferenceSpec("kto"), "KTO", {"use_ref_model": True}),
    "orpo": (PreferenceSpec("orpo", beta=0.4), "ORPO", {"beta": 0.4}),
    "simpo": (PreferenceSpec("simpo", beta=2.0, gamma=0.7, label_smoothing=0.1, sft_weight=0.3), "SimPO",
              {"beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1, "alpha": 0.3}),
}  # fmt: skip


def packed(objective: str) -> MicroBatch:
    """PAIRS in one sequence; of kto each answer separately, good or bad."""
    row, documents = OBJECTIVES[objective], []
    for prompt, *answers in PAIRS:
        marks = [np.arange(prompt + answer) >= prompt for answer in answers]
        for sides in [marks] if row.documents == 2 else [[mark] for mark in marks]:
            labelled = np.concatenate(sides)
            documents.append(
                Document(
                    np.random.default_rng(len(documents)).integers(3, VOCABULARY, len(labelled), np.int32),
                    labelled, first=len(sides[0]) if row.documents == 2 else 0, good=sides[0] is marks[0],
                    prompt=prompt if row.prompts else 0,
                )
            )  # fmt: skip
    members, starts = np.arange(len(documents)), np.array([0, len(documents)])
    data = in_memory(documents, members, starts, seq_len=64, packed=True, objective=row)
    return micro_batch_of([(data, 0)], units_per_token=answers_of([(data, 0)])[1])


def test_only_one_chunk_of_logits_exists_in_both_forwards_of_the_head() -> None:
    model, batch = AutoModelForCausalLM.from_config(FAMILIES["llama"]()), packed("dpo")
    with Watch() as watch:
        summed_loss(
            model, anatomy(model), batch, chunk_tokens=8, objective=Preference(PreferenceSpec("dpo"))
        ).backward()
    assert 0 < watch.logits_bytes <= 8 * VOCABULARY * 4
    rows = [rows for rows, columns in watch.products if columns == VOCABULARY]
    assert sum(rows) == 2 * batch.label_tokens == 2 * sum(sum(answers) for _, *answers in PAIRS)


@pytest.mark.needs("liger_kernel")
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_ligers(case: str) -> None:
    from liger_kernel import chunked_loss  # pyright: ignore[reportMissingImports]

    spec, name, arguments = CASES[case]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    batch, head, preference = packed(spec.objective), model.lm_head.weight, Preference(spec)
    hidden = torch.randn(*batch.input_ids.shape, head.shape[1], requires_grad=True)
    of_reference, its_head = torch.randn_like(hidden), head.detach() + 0.05 * torch.randn_like(head)
    lengths = [prompt + answer for prompt, *answers in PAIRS for answer in answers]
    ends = np.cumsum(lengths).tolist()
    spans = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    answers, labels = batch.answers, batch.labels[0]
    assert answers is not None
    targets = torch.where(answers.segments[0] % 2 == 1, labels, IGNORE)  # without prompts
    logs = (of_reference[0] @ its_head.T).log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    known = torch.stack([logs[span][targets[span] != IGNORE].sum() for span in spans])
    batch = replace(batch, answers=answers._replace(reference=known.double()))
    preference.kl = KL
    loss = head_loss(model, anatomy(model), hidden, batch, chunk_tokens=8, objective=preference) / batch.units
    gradients = torch.autograd.grad(loss, (hidden, head))

    def rows(tensor: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """The columns of each answer, the chosen ones first."""
        return pad_sequence([tensor[span] for span in (*spans[::2], *spans[1::2])], True, padding)

    inputs, reference = rows(hidden[0]), [rows(of_reference[0]), its_head]
    given = [head, inputs, rows(targets, IGNORE), None]
    if name == "KTO":
        good = torch.arange(len(spans)) < len(spans) // 2
        given = [inputs, head, *given[2:], good, *reference, None, torch.tensor(KL)]
    given += {"DPO": reference, "ORPO": [rows(labels, IGNORE)]}.get(name, [])
    expected, *_ = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**arguments, compiled=False)(*given)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for own, its in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert (own - its).norm() <= 1e-5 * its.norm()
