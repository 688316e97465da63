"""A small copy of a model: the same classes, one block of each kind, real weights on the CPU.

It costs a fraction of a second whatever the model's size, and shows what the installed code does: which
modules mix tokens (recorded.py), and whether packed training equals the unmodified model (self_check.py).

Sizes in the configuration are divided by one factor, which keeps their products (heads × head size = hidden
size); counts stay, but for experts and vocabulary. Which integer is a size is read off its name; a copy that
can't be built or run with one factor is tried with a smaller one.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from meshtune.compat import parameters_on_meta, untested
from meshtune.model.pieces import materialise

HIDDEN = 256  # least hidden size of a copy, unless the model's own is smaller
MOST_DIVIDED = 32
WINDOW = 16  # tokens of a sliding window or chunk
VOCABULARY = 256
BY_INDEX = 8  # blocks of a copy of untested code; families repeat their kinds of blocks after 6 at most
MOST = 100e6  # parameters of a copy
GAIN = 1.5  # of weights drawn: large enough that attention is far from uniform and soft caps bite

SIZE = re.compile(  # whole words of a name
    r"(^|_)(size|dim|rank|width|channels|inner|hidden|embd|dff|ff|ssm|state|lru|lowrank|section|model|d"
    r"|headdim)(_|$)"
)
NO_SIZE = re.compile(
    r"vocab|kernel|position|window|chunk|patch|token|num_|n_head|image|group_size|block_size|type|pad|local_"
    r"|d_conv|conv(1d)?_(size|width)|max_|factor|axial|top_?k|expand|bucket|hash|byte"
)
SPAN = re.compile(r"window(_size)?$|attention_chunk|local_attn_chunk")  # tokens that a layer sees
EXPERTS = re.compile(r"experts$")
CHOSEN = re.compile(r"top_?k|experts_per_tok|moe_k$|n_group|expert_group|shared_experts")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")

T = TypeVar("T")


class NoCopy(Exception):
    """No small copy of a model can be built, or none can run."""


def with_small_copy(model: PreTrainedModel, body: str, head: str, blocks: str, use: Callable[[Any], T]) -> T:
    """Return what `use` makes of a small copy of `model`, which is on the CPU, in fp32 and eval mode.

    body, head, blocks: paths. Of a model that also sees or hears, only the body and the head get weights.
    Raises NoCopy with the reasons if `use` fails with every size.
    """
    kept, layers = _blocks_kept(model, blocks), len(list(model.get_submodule(blocks).children()))
    whole = model.config.get_text_config(decoder=True) is model.config
    parts = [""] if whole else [body, head]
    hidden = model.get_input_embeddings().get_parameter("weight").shape[1]
    failures = []
    with _isolated():
        for factor, number in _attempts(hidden, kept, layers, by_index=bool(untested(type(model)))):
            try:
                return use(_build(model, parts, blocks, number, factor))
            except Exception as error:  # each family has its own ways to refuse a size
                failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    raise NoCopy("; ".join(dict.fromkeys(failures)))


def _attempts(hidden: int, kept: int, layers: int, *, by_index: bool) -> Iterator[tuple[int, int]]:
    """Yield (factor of the sizes, number of blocks): smaller factors, then all blocks.

    by_index: True if blocks of one kind may differ by their index; then there are BY_INDEX first.
    """
    largest = min(MOST_DIVIDED, max(1, hidden // HIDDEN)).bit_length() - 1
    more = max(kept, min(layers, BY_INDEX)) if by_index else kept
    for number in dict.fromkeys((more, kept)):
        for power in range(largest, -1, -1):
            yield 2**power, number
    yield 2**largest, layers


@contextmanager
def _isolated() -> Iterator[None]:
    """Compute on the CPU with gradients, whatever modes the caller is in; its random numbers stay."""
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def _build(model: PreTrainedModel, parts: Sequence[str], blocks: str, kept: int, factor: int) -> Any:
    layers = len(list(model.get_submodule(blocks).children()))
    config = small_config(model.config, layers, kept, factor)
    with no_init_weights(), parameters_on_meta():
        small: Any = type(model)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    if len(list(small.get_submodule(blocks).children())) != kept:
        raise NoCopy(f"its configuration does not say how to build {kept} of {layers} blocks")
    count = sum(parameter.numel() for part in parts for parameter in small.get_submodule(part).parameters())
    if count > MOST:
        raise NoCopy(f"a small copy has {count / 1e6:.0f} million parameters")
    for part in parts:
        materialise(small.get_submodule(part), torch.device("cpu"))
    small.tie_weights()
    _draw([small.get_submodule(part) for part in parts])
    return small.eval()


def random_ids(model: PreTrainedModel, tokens: int, seed: int) -> Tensor:
    """Return ids [tokens] that a model has embeddings of, without the first ones: they may be special."""
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    return torch.randint(3, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _draw(modules: Sequence[nn.Module]) -> None:
    """Fill matrices so that their outputs are about GAIN times their inputs, and vectors around 1 (norms)."""
    generator = torch.Generator().manual_seed(1)
    for parameter in dict.fromkeys(parameter for module in modules for parameter in module.parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * GAIN / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)


def small_config(config: PretrainedConfig, layers: int, kept: int, factor: int) -> PretrainedConfig:
    """Return a copy of `config` with sizes divided by `factor` and the first `kept` of its `layers`."""
    config = copy.deepcopy(config)
    values = list(_values(config.get_text_config(decoder=True)))
    chosen = [value for _, name, value in values if CHOSEN.search(name) and isinstance(value, int)]
    experts = 4 * max([2, *(value for value in chosen if value < 64)])
    for place, name, value in values:
        if _is_by_layer(name, value, layers):
            value = value[:kept]
        if SIZE.search(name) and not NO_SIZE.search(name):
            value = (
                [_divided(each, factor) for each in value]
                if isinstance(value, list)
                else _divided(value, factor)
            )
        elif not _is_count(value):
            pass
        elif "vocab_size" in name:
            value = min(value, VOCABULARY)
        elif name == "pad_token_id":
            value = min(value, VOCABULARY - 1)
        elif name in LAYERS and value == layers:
            value = kept
        elif SPAN.search(name):
            value = min(value, WINDOW)
        elif EXPERTS.search(name) and not CHOSEN.search(name):
            value = min(value, experts)
        place[name] = value
    return config


def _is_by_layer(name: str, value: Any, layers: int) -> bool:
    """True if a value has an entry for each layer; lists of floats and of sections of heads have not."""
    return (
        isinstance(value, list | tuple) and len(value) == layers and "section" not in name
        and not any(isinstance(each, float) for each in value)
    )  # fmt: skip


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divided(value: Any, factor: int) -> Any:
    return max(1, value // factor) if _is_count(value) and value > 1 else value


def _values(config: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (dictionary that holds it, name, value) of each value of a configuration and of those inside."""
    place = config if isinstance(config, dict) else vars(config)
    for name, value in list(place.items()):
        if isinstance(value, dict):
            yield from _values(value)
        elif isinstance(name, str) and not name.startswith("_"):
            yield place, name, value


def _blocks_kept(model: PreTrainedModel, blocks: str) -> int:
    """Return the number of first blocks that have every kind: other modules, or other words in the lists
    of the configuration that have an entry for each block.
    """
    found = list(model.get_submodule(blocks).children())
    config = model.config.get_text_config(decoder=True)
    lists = [
        value for _, name, value in _values(config)
        if _is_by_layer(name, value, len(found))
        and all(isinstance(each, str | bool) or each in (0, 1) for each in value)
    ]  # fmt: skip
    kinds = [
        (tuple((path, type(module)) for path, module in block.named_modules()), *words)
        for block, *words in zip(found, *lists, strict=True)
    ]
    return next(number for number in range(len(kinds) + 1) if set(kinds[:number]) == set(kinds))
