"""Make the models that the tests beside it compare with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The reference: what transformers makes of the folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
