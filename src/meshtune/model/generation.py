"""Settings of generation: read from generation_config.json, checked, and written as an export has them; the
length of the context.
"""

import copy
import reprlib
from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from meshtune.errors import UserError, reason_of
from meshtune.model.files import read_json, resolve


def stop_tokens(name: str, *, trust_remote_code: bool = False, revision: str | None = None) -> list[int]:
    """The ids that a model's generation_config.json names as eos_token_id; [] without such a file."""
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    if not (folder / "generation_config.json").is_file():
        return []
    eos = read_generation_config(folder).eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


def context_of(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest document that a model's positions are made for; None without such a limit.

    Scaled rotary embeddings reach as far as their factor times the length they were trained with.
    """
    text = config.get_text_config()
    size = getattr(text, "max_position_embeddings", None)
    if not isinstance(size, int) or size <= 0:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]  # by kind of layer
    reach = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or size))
        for kind in kinds
        if kind.get("factor")
    ]
    return max([size, *reach])


def read_generation_config(folder: Path) -> GenerationConfig:
    """The generation settings in a model's folder. Raises UserError if its file is damaged."""
    file = folder / "generation_config.json"
    read_json(file)  # its own check, in our words
    try:
        generation = GenerationConfig.from_pretrained(folder)
        savable(generation).validate(strict=True)  # as save_pretrained, which comes after training
    except Exception as error:  # it checks itself in many ways
        raise UserError(f"transformers can't use {file}: {reason_of(error)} Mend or remove it.") from error
    eos = generation.eos_token_id
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise UserError(
            f"{file}: eos_token_id is {reprlib.repr(eos)}; it must be a token's id, or a list of them."
        )
    return generation


def generation_config(model: PreTrainedModel, stop_ids: Sequence[int]) -> GenerationConfig:
    """Return a copy of the model's generation settings whose end tokens are `stop_ids`, then the old ones.

    do_sample becomes True where settings of sampling differ from transformers' defaults.
    """
    generation = savable(model.generation_config or GenerationConfig())
    if stop_ids:
        old = generation.eos_token_id
        ends = list(dict.fromkeys([*stop_ids, *([old] if isinstance(old, int) else old or [])]))
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return generation


def savable(generation: GenerationConfig) -> GenerationConfig:
    """Return a copy that transformers saves: do_sample is True where settings of sampling are there, as the
    base model's author meant it.
    """
    copied = copy.deepcopy(generation)
    if copied.do_sample is not True:
        defaults = ((copied.temperature, 1.0), (copied.top_p, 1.0), (copied.top_k, 50))
        sampling = any(value is not None and value != default for value, default in defaults)
        try:
            copied.validate(strict=True)
        except ValueError:
            sampling = True
        copied.do_sample = True if sampling else copied.do_sample
    return copied
