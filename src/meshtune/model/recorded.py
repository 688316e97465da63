"""Record what the modules of a model's blocks do with tokens, in a forward of a small copy of the model.

    with_small_copy(model, …, use)        what `use` makes of it; self_check.py also uses it
    recorded(model, body, head, blocks)   paths of attention and of mixers, and what prevents packing

A module mixes tokens if its output at later positions changes with its input at the first. It is attention
if it calls the attention function that is registered with transformers, or keeps a tensor with one entry a
token in the cache that it is given. Any other is a recurrent or convolutional mixer: its state has one size
whatever the number of tokens. Neither the names of classes nor those of arguments decide.
"""

import copy
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from meshtune.compat import HARMLESS, MUST_BE_OFF, parameters_on_meta, untested
from meshtune.model.documents import separate_documents
from meshtune.model.pieces import materialise

RECORDER = "meshtune_recorder"  # name of the attention function of the recorded forward
TOKENS = 13  # of it: a number that no size of a small copy has
NO_MATTER = ("dtype", "_name_or_path", "transformers_version")  # settings without a meaning here
Kind = frozenset[tuple[str, type[nn.Module]]]  # path inside a block, and the module's class


class Mixing(NamedTuple):
    """The modules inside a block that mix tokens; "": the block does so itself."""

    attention: Kind
    mixers: Kind
    causal: bool  # True if no token sees a later one
    problem: str | None  # why meshtune's attention can't be the model's, as "it …"


def modules_of(kind: Kind, blocks: nn.Module) -> list[str]:
    """Return the paths in a list of blocks of the modules of a kind of `Mixing`."""
    return [
        f"{name}.{path}".rstrip(".")
        for name, block in blocks.named_children()
        for path, module in block.named_modules()
        if (path, type(module)) in kind
    ]


_recorded: dict[Hashable, Mixing] = {}  # in this process, by class, structure and settings without sizes


def recorded(model: PreTrainedModel, body: str, head: str, blocks: str) -> Mixing:
    """Return what a small copy of `model` does; models that differ only in sizes are recorded once.

    body, head, blocks: paths. Raises NoCopy if no copy can run.
    """
    # LoRA's layers stand for linear ones, and have no children that mix tokens.
    structure = frozenset(
        (path.partition(".")[2], type(module))
        for path, module in model.get_submodule(blocks).named_modules()
        if next(module.children(), None) and not type(module).__module__.startswith("meshtune.")
    )
    settings = model.config.get_text_config(decoder=True).to_dict()
    words = {name: _word(value) for name, value in settings.items() if name not in NO_MATTER}
    key = (type(model), structure, json.dumps(words))
    if key not in _recorded:
        _recorded[key] = with_small_copy(
            model, body, head, blocks, lambda small: _record(small, body, blocks)
        )
    return _recorded[key]


def _word(value: Any) -> Any:
    """Return what a setting says besides sizes: words and flags, and whether there is a number."""
    if isinstance(value, list | tuple):
        return sorted({str(each) for each in value if isinstance(each, str | bool)})
    return value if isinstance(value, str | bool) else value is None


def _record(small: Any, body: str, blocks: str) -> Mixing:
    """Return what the modules of `small` do; its attention and its mixers are others afterwards."""
    ids = random_ids(small, TOKENS, seed=0)[None]
    language: Any = small.get_submodule(body)
    calling: set[nn.Module] = set()

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        calling.add(module)
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True).transpose(1, 2), None

    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, eager_mask)
    set_attention(small, RECORDER)
    layers = small.get_submodule(blocks)
    with _Watch(layers) as watch:
        language(input_ids=ids, use_cache=False)
    attention = {module for module in watch.found if calling & set(module.modules())}
    calling.clear()  # the registered function lives on
    attention |= _keeping_each_token(language, ids, watch.found.keys() - attention)
    places = {module: path.partition(".")[2] for path, module in layers.named_modules()}
    attending, mixing = (
        frozenset((places[module], type(module)) for module in kind)
        for kind in (attention, watch.found.keys() - attention)
    )
    if besides := [each.__name__ for path, each in attending if not path]:
        problem = f"{besides[0]} mixes tokens besides its attention"
    elif (small._is_stateful or language._is_stateful) and not mixing:
        problem = "its attention carries a state besides keys and values"
    else:
        separate_documents(layers, modules_of(mixing, layers))  # they get no arguments of attention
        problem = attention_problem(language, ids, len(modules_of(attending, layers)))
    return Mixing(attending, mixing, _is_causal(language, ids), problem)


@torch.no_grad()
def _is_causal(language: Any, ids: Tensor) -> bool:
    """Return True if no token but the last changes with the last, in the family's eager attention."""
    set_attention(language, "eager")
    other = torch.cat([ids[:, :-1], ids[:, -1:] - 1], 1)
    one, two = (language(input_ids=each, use_cache=False)[0].flip(1) for each in (ids, other))
    return not _later_differ(one, two)


class _Watch:
    """Find the smallest modules of blocks that mix tokens, while a forward runs.

    When a module has run, it runs again with another first token, and then once more with the mixing modules
    in it made to mix nothing: if later tokens still change, it mixes tokens besides them, and stands for all.
    """

    def __init__(self, blocks: nn.Module) -> None:
        self.blocks = blocks
        self.found: dict[nn.Module, tuple[list[Tensor], Any]] = {}  # and their (inputs, output)
        self.stubs: dict[nn.Module, tuple[list[Tensor], Any]] | None = None  # None: the forward itself runs
        self.mixed_before = False  # True if a stub was given other later tokens

    def __enter__(self) -> "_Watch":
        modules = (module for path, module in self.blocks.named_modules() if path)
        self.hooks = [module.register_forward_hook(self._ran, with_kwargs=True) for module in modules]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _ran(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if _is_hidden(value)]
        if self.stubs is not None:
            if module not in self.stubs:
                return None  # its output stays
            before, kept = self.stubs[module]
            self.mixed_before |= any(map(_later_differ, given, before))
            return _with_first_of(out, kept)
        result = _first(out)
        if not given or not _is_hidden(result):
            return None
        inside = set(module.modules())
        inner = {each: ran for each, ran in self.found.items() if each in inside}

        def again(stubs: dict[nn.Module, Any]) -> bool:
            return _later_differ(_first(self._again(module, args, kwargs, stubs)), result)

        self.mixed_before = False
        if again({}) and (not inner or again(inner) or self.mixed_before):
            for each in inner:
                del self.found[each]
            self.found[module] = given, out
        return None

    @torch.no_grad()
    def _again(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stubs: Any) -> Any:
        self.stubs = stubs
        try:
            return module(
                *map(_other_first, args), **{name: _other_first(value) for name, value in kwargs.items()}
            )
        finally:
            self.stubs = None


def _is_hidden(value: Any) -> bool:
    """True for floats [1, TOKENS, size]."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == (1, TOKENS)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple | list) and out else out


def _other_first(value: Any) -> Any:
    """Return hidden states with another first token; other values as they are."""
    return torch.cat([-value[:, :1].flip(-1), value[:, 1:]], 1) if _is_hidden(value) else value


def _with_first_of(out: Any, kept: Any) -> Any:
    """Return the output `kept` with the first token of `out`, as of a module that mixes no tokens."""
    tokens = torch.cat([_first(out)[:, :1], _first(kept)[:, 1:]], 1)
    return tokens if isinstance(out, Tensor) else type(out)([tokens, *out[1:]])


def _later_differ(one: Tensor, two: Tensor) -> bool:
    difference = (one[:, 1:] - two[:, 1:]).abs().max()
    return bool(difference > 1e-4 * two[:, 1:].abs().max())  # less is rounding: experts get other groups


def _keeping_each_token(body: Any, ids: Tensor, modules: set[nn.Module]) -> set[nn.Module]:
    """Return those of `modules` that keep a tensor with an entry for each token in what they are given, and
    all of them where the model has no cache at all.
    """
    found: set[nn.Module] = set()
    known: dict[nn.Module, set[int]] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        known[module] = {id(tensor) for tensor in _tensors((args, kwargs), set())}

    def after(module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        new = [tensor for tensor in _tensors((args, kwargs), set()) if id(tensor) not in known[module]]
        if any(TOKENS in tensor.shape for tensor in new):
            found.add(module)

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(after, with_kwargs=True) for module in modules]
    if modules:
        with suppress(Exception):  # some families can't make their cache; what was kept until then counts
            output = body(input_ids=ids, use_cache=True)
            if len(output) == 1 and not body._is_stateful:  # only hidden states: it has no cache
                found |= modules
    for hook in hooks:
        hook.remove()
    return found


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that an object holds, also in its attributes and elements."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, nn.Module | type):
        seen.add(id(value))
        if isinstance(value, dict | list | tuple):
            inner = list(value.values() if isinstance(value, dict) else value)
        else:
            inner = list(getattr(value, "__dict__", {}).values())
        for each in inner:
            yield from _tensors(each, seen)


# What a family gives to its attention function #

#     attention_problem(small, language, layers)   asked of a forward of a small copy, whose attention reports
#
# transformers' flag `_supports_attention_backend` is not enough: some families that have it drop
# keyword arguments on the way, pass a mask of their own, or add arguments that change the result.


PROBE = "meshtune_probe"

# Arguments of meshtune's attention itself.
KNOWN = {"documents", "scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"}


def unsupported(attention_mask: Any, is_causal: bool | None, others: Mapping[str, Any]) -> list[str]:
    """Return the arguments that would change the result and that meshtune's attention does not know.

    others: keyword arguments besides those in KNOWN; None and the HARMLESS ones pass, and those in
    MUST_BE_OFF if they are False.
    """
    found = [
        f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
        for name, value in others.items()
        if name not in HARMLESS and value is not None and not (name in MUST_BE_OFF and value is False)
    ]
    if attention_mask is not None:
        found.append("attention_mask (describe padding by `documents`)")
    if is_causal is False:
        found.append("is_causal=False")
    return found


def no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any) -> None:
    """Build no mask: `documents`, the window and causality are all that the attention needs.

    Raises NotImplementedError for what these can't express: a padding mask, or a model's own pattern laid
    over the causal one (Hugging Face sets `use_vmap` exactly then).
    """
    if attention_mask is not None or use_vmap:
        what = "an attention_mask" if attention_mask is not None else "a pattern over the causal one"
        raise NotImplementedError(
            f"meshtune's attention was given {what}: describe padding by `documents`, "
            "or use model.attention=sdpa."
        )


# The attention in layers of other kinds (`layer_types`); None: there is none.
ATTENTION_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
ATTENTION_OF |= dict.fromkeys(("linear_attention", "conv", "mamba", "recurrent", "mlp", "moe"))


INSIDE = "it computes its attention inside the model"


class _Given:
    """The arguments of each layer's attention in one forward."""

    def __init__(self) -> None:
        self.documents = object()  # the sentinel that must reach every layer
        self.windows: list[int | None] = []
        self.dropped = False
        self.problems: dict[str, None] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """Record one call, and return an output of the right shape."""
        others = {name: argument for name, argument in given.items() if name not in KNOWN}
        self.problems |= dict.fromkeys(unsupported(attention_mask, given.get("is_causal"), others))
        self.dropped |= given.get("documents") is not self.documents
        self.windows.append(given.get("sliding_window"))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@torch.no_grad()
def attention_problem(language: Any, ids: Tensor, layers: int) -> str | None:
    """Return why meshtune's attention can't be that of a model, as "it …"; None if it can, also where the
    model has no attention.

    language: body of a small copy that ran with another attention function and a mask; it uses PROBE
    afterwards. ids: [1, tokens]. layers: number of its modules of attention.
    """
    given = _Given()
    AttentionInterface.register(PROBE, given.attend)
    AttentionMaskInterface.register(PROBE, no_mask)
    set_attention(language, PROBE)
    try:
        language(input_ids=ids, use_cache=False, documents=given.documents)
    except Exception as error:  # each family fails in its own way without a mask
        if given.problems:
            return f"it gives its attention function {', '.join(given.problems)}"
        if not language._supports_attention_backend:
            return INSIDE
        reason = " ".join(str(error).split())[:120]
        if isinstance(error, NotImplementedError) or "documents" in reason:  # no_mask's, or no such argument
            return f"it can't run with another attention function ({type(error).__name__}: {reason})"
        return "it reads its attention mask, such as to select tokens, and meshtune's attention has none"
    if not given.windows and layers:
        return INSIDE
    if len(given.windows) != layers:
        return "its layers do not call the registered attention function once each"
    if given.problems:
        return f"it gives its attention function {', '.join(given.problems)}"
    if given.dropped:
        return "its blocks do not pass keyword arguments on to their attention"
    hidden = mask_only_pattern(language.config, given.windows)
    return f"it has {hidden}, which it does not pass to its attention function" if hidden else None


def set_attention(model: nn.Module, name: str) -> None:
    """Make all parts of a model use the attention function of this name, unchecked."""
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def mask_only_pattern(config: PretrainedConfig, windows: Sequence[int | None]) -> str | None:
    """Return the attention pattern that a model applies only through its mask; None if there is none.

    Such a pattern is named in the configuration but does not show in `windows`, the sliding_window argument
    (tokens, or None) that the attention function gets in each layer. An attention implementation that builds
    no mask would ignore it, and the model would be silently wrong.
    """
    text = config.get_text_config(decoder=True)
    if kinds := attention_kinds(text):
        passed = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return None if passed == kinds else f"layers of {', '.join(sorted(set(kinds)))}"
    window = text.sliding_window if hasattr(text, "sliding_window") else None
    return f"a sliding window of {window}" if window and not any(windows) else None


def attention_kinds(text: PretrainedConfig) -> list[str]:
    """Kind of each layer's attention, of those that have one; empty if the configuration names none."""
    kinds = text.layer_types if hasattr(text, "layer_types") else None
    found = (ATTENTION_OF.get(kind, kind) for kind in kinds or ())
    return [kind for kind in found if kind is not None]


# A small copy of a model: the same classes, one block of each kind, real weights on the CPU #

# It costs a fraction of a second whatever the model's size, and shows what the installed code does. Sizes
# in the configuration are divided by one factor, which keeps their products (heads × head size = hidden
# size); counts stay, but for experts and vocabulary. Which integer is a size is read off its name; a copy
# that can't be built or run with one factor is tried with a smaller one.


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
