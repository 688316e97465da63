"""Objectives by the name in `objective`: the rows that each reads, and the passes that it needs. Torch-free.

The losses are in train/preference.py; the planner counts the passes.
"""

from dataclasses import dataclass
from typing import Literal

from meshtune.errors import Table

# answers: one answer to each prompt; pairs: a chosen and a rejected one; judged: one, and whether it is good
Rows = Literal["answers", "pairs", "judged"]
PROMPTS_AT_ONCE = 64  # of an evaluation, whose answers one rank generates together


@dataclass(frozen=True)
class Objective:
    """Rows and passes of an objective."""

    rows: Rows = "pairs"
    reference: bool = False  # log-probabilities of a reference model, computed once before the first step
    # Each prompt with the next row's answer: a pass without gradients before a step's first backward.
    mismatched: bool = False
    prompts: bool = False  # tokens of the chosen answer's prompt have a loss too
    scores: bool = False  # the head is one output, read at the last token of an answer

    @property
    def documents(self) -> int:
        """Documents of one row, which lie in one packed sequence."""
        return 2 if self.rows == "pairs" else 1

    @property
    def unit(self) -> str:
        """The unit that a loss is a mean over."""
        return {"answers": "label token", "pairs": "pair", "judged": "answer"}[self.rows]


OBJECTIVES = Table(
    "objective",
    {
        "sft": Objective("answers"),
        "dpo": Objective(reference=True),  # Rafailov et al. 2023
        "kto": Objective("judged", reference=True, mismatched=True),  # Ethayarajh et al. 2024
        "orpo": Objective(prompts=True),  # Hong et al. 2024
        "simpo": Objective(),  # Meng et al. 2024
        "reward": Objective(scores=True),  # Bradley and Terry 1952
    },
)


# Adapters start at zero and are few: they take a rate at which all weights would diverge.
LEARNING_RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}  # default peak, by method
# Preferences move a trained model little. These are the rates of TRL's DPO trainer and of its LoRA examples.
PREFERENCE_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


def default_rate(method: str, objective: str = "sft") -> float:
    """Default peak learning rate. A reward model learns a new head, at the rates of sft."""
    return (LEARNING_RATES if objective in ("sft", "reward") else PREFERENCE_RATES)[method]
