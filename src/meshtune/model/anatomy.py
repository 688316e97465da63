"""Find the parts of a Hugging Face causal language model: the only place that knows families.

    body ┬ embed                    input ids -> hidden
         ├ blocks ┬ 0 ┬ attention   the transformer blocks, all alike
         │        ┆   └ mlp
         └ norm                     -> last_hidden_state
    head                            last_hidden_state -> logits (before the family's scaling or soft-capping)

Families are not listed by name. The parts are found from what transformers promises for every causal LM (its
input and output embeddings, the number of blocks in its configuration) and each is verified; a model that is
built differently is refused, so that no other module has to guess.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from meshtune.errors import UserError
from meshtune.placement.families import see
from meshtune.quantised.deferred import Deferred

MLP_NAMES = ("mlp", "feed_forward", "ffn")


@dataclass(frozen=True)
class Anatomy:
    """Paths of the parts of one model, for `model.get_submodule(path)`."""

    body: str  # "model", or "model.language_model" in one that also sees; its forward gives last_hidden_state
    embed: str  # "model.embed_tokens"
    blocks: str  # "model.layers", an nn.ModuleList
    norm: str  # "model.norm", the final norm; "" for a family without one
    head: str  # "lm_head"
    attention: str  # "self_attn", inside each block; "" for a family with recurrent blocks
    mlp: str  # "mlp", inside each block; "" where its matrices lie in the block itself (OPT)
    attentions: tuple[str, ...] = ()  # all modules of attention: "model.layers.0.self_attn"
    mixers: tuple[str, ...] = ()  # recurrent or convolutional ones: "model.layers.0.mamba"
    attention_problem: str | None = None  # why meshtune's attention can't be the model's, as "it …"
    first_position: int = 0  # position id of a document's first token


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find and verify the parts of `model`. Raises UserError with the reason if it is built differently."""
    from meshtune.compat import tested_versions, untested  # here: chains of imports stay short
    from meshtune.model.recorded import NoCopy, modules_of, recorded

    config = model.config.get_text_config()
    paths = {module: path for path, module in model.named_modules()}

    def refusal(reason: str, kind: str = "parts") -> UserError:
        beyond = untested(type(model))
        beyond = beyond and f"Note that {beyond} ({tested_versions()}). "
        return UserError(f"{type(model).__name__} can't be trained: {reason}. {beyond}{see(kind)}")

    embed, head = ends(model)
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise refusal("it has no plain embedding and output head")
    body = _body(model, paths[embed], paths[head])
    if not body:
        raise refusal(
            f"no module around its embedding, {paths[embed]!r}, is only its language model", "media"
        )
    if config.model_type == "reformer":
        raise refusal("it trains only on sequences of a multiple of its chunks' length", "not-built")

    container = paths[embed].rpartition(".")[0]
    layers = getattr(config, "num_hidden_layers", None)  # BLT has several configurations
    lists = _lists(model, container, body, layers)
    if len(lists) != 1:
        found = ", ".join(f"{path} ({len(of)})" for path, of in _module_lists(model, body).items())
        raise refusal(f"its {layers or ''} layers aren't one list of blocks (it has {found or 'none'})")
    blocks = model.get_submodule(lists[0])
    assert isinstance(blocks, nn.ModuleList)
    norms = _norms(model, lists[0].rpartition(".")[0], body)
    if len(norms) > 1:
        raise refusal(f"{' and '.join(norms)} could each be its final norm")
    try:
        mixing = recorded(model, body, paths[head], lists[0])
    except NoCopy as error:
        raise refusal(f"what its blocks do with tokens can't be recorded ({error})") from error
    prefix = getattr(config, "use_bidirectional_attention", None) is True  # in training, in its full model
    if prefix or not mixing.causal:
        remedy = "; set is_decoder to true in its config.json" * hasattr(config, "is_decoder")
        raise refusal(f"its attention is not causal{remedy}", "causal")
    mixers = modules_of(mixing.mixers, blocks)
    attending = _attending(blocks, {kind for _, kind in mixing.attention})
    attention = "" if model._is_stateful or mixers else _attention_of(blocks, attending, refusal)
    mlp = _one_child(blocks[0], lambda name, child: name in MLP_NAMES)
    return Anatomy(
        body=body,
        embed=paths[embed],
        blocks=lists[0],
        norm=norms[0] if norms else "",
        head=paths[head],
        attention=attention,
        mlp=mlp or "",
        attentions=tuple(f"{lists[0]}.{path}" for path in modules_of(mixing.attention, blocks)),
        mixers=tuple(f"{lists[0]}.{path}" for path in mixers),
        attention_problem=mixing.problem,
        first_position=_first_position(model.get_submodule(body)),
    )


def _attending(blocks: nn.Module, kinds: set[type[nn.Module]]) -> set[nn.Module]:
    """Return the modules of blocks that are or have modules of these classes."""
    return {module for module in blocks.modules() if any(type(part) in kinds for part in module.modules())}


def _attention_of(
    blocks: nn.ModuleList, attending: set[nn.Module], refusal: Callable[[str], UserError]
) -> str:
    """Return the name of the attention in each block. Raises a `refusal` if blocks have none or several."""
    names = [name for name, child in blocks[0].named_children() if child in attending]
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise refusal(f"its block {type(blocks[0]).__name__} has no single attention, but {found}")
    without = [index for index, block in enumerate(blocks) if names[0] not in block._modules]
    if without:
        raise refusal(f"block {without[0]} has no {names[0]!r}")
    return names[0]


def _module_lists(model: nn.Module, body: str) -> dict[str, nn.ModuleList]:
    """Return the lists of modules in the body that lie in no other list, by path."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.get_submodule(body).named_modules(prefix=body):
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{path}.") for path in lists):
            lists[name] = module
    return lists


def _lists(model: nn.Module, container: str, body: str, layers: int | None) -> list[str]:
    """Return the paths of the lists of `layers` modules next to the embedding, or if there is none, anywhere
    in the body. container: path of the module that has the embedding.
    """
    paths = [path for path, modules in _module_lists(model, body).items() if len(modules) == layers]
    return [path for path in paths if path.rpartition(".")[0] == container] or paths


def _norms(model: nn.Module, trunk: str, body: str) -> list[str]:
    """Return the paths of what may be the final norm, next to the blocks or directly in the body.

    trunk: path of the module that has the list of blocks.
    """
    for parent in dict.fromkeys((trunk, body)):
        children = model.get_submodule(parent).named_children()
        names = [name for name, child in children if is_norm(child) and not _has_list(child)]
        if len(names) > 1:  # LFM2's final one is called embedding_norm
            names = [name for name in names if not _is_embedding_norm(name)]
        if names:
            return [f"{parent}.{name}" for name in names]
    return []


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in module.modules())


def _first_position(body: nn.Module) -> int:
    """Return the position of a document's first token: RoBERTa's kin count from after the padding index."""
    for module in body.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def _body(model: PreTrainedModel, embed: str, head: str) -> str:
    """Return the path of the outermost module around the embedding that has the language model's own
    configuration and not the head; "" if there is none. embed, head: paths.
    """
    names, config = embed.split("."), model.config.get_text_config()
    around = [".".join(names[:length]) for length in range(1, len(names))]
    outside = [path for path in around if not head.startswith(f"{path}.")]
    if config is model.config:
        return outside[0] if outside else ""
    return next((path for path in outside if vars(model.get_submodule(path)).get("config") is config), "")


def language_model(model: PreTrainedModel) -> tuple[str, str] | None:
    """Return the paths of (body, head) in a model that may have other parts; None if they are not found."""
    paths = {module: path for path, module in model.named_modules()}
    embed, head = (paths.get(module, "") if module is not None else "" for module in ends(model))
    body = _body(model, embed, head) if embed and head else ""
    return (body, head) if body else None


def ends(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Return (embedding, output head), as transformers knows them; None for one that it does not. The head of
    a reward model is its score.
    """
    try:
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        return None, None
    return embed, getattr(model, "score", None) if head is None else head


def head_runner(parts: Anatomy) -> tuple[str, str]:
    """Return the paths of the module whose forward runs the head behind the body, "" for the whole model, and
    of its child in or around the body, which that forward calls.
    """
    body, head = parts.body.split("."), parts.head.split(".")
    common = next((n for n, (one, other) in enumerate(zip(body, head, strict=False)) if one != other), 0)
    return ".".join(body[:common]), ".".join(body[: common + 1])


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_embedding_norm(name: str) -> bool:
    # Bloom's word_embeddings_layernorm, Gemma3n's per_layer_…_norm
    return "embed" in name or "per_layer" in name


def _one_child(block: nn.Module, condition: Callable[[str, nn.Module], bool]) -> str | None:
    """Return the name of the only direct child of `block` that meets condition(name, child); None if none or
    several do.
    """
    names = [name for name, child in block.named_children() if condition(name, child)]
    return names[0] if len(names) == 1 else None


class StandIn(nn.Module):
    """Stand in for a module that this rank does not have: return the first argument.

    replaced: that module, whose plain attributes a body may read (the kind of a block).
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        vars(self).update(
            {name: value for name, value in vars(replaced).items() if isinstance(value, str | int | float)}
        )

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden


def attention_heads(model: PreTrainedModel) -> tuple[int, int]:
    """Return (query heads, key-value heads) of a block; where blocks differ, the largest numbers that divide
    those of each.
    """
    config = model.config.get_text_config()
    by_layer = getattr(config, "per_layer_config", None)
    layers = [by_layer[index] for index in range(config.num_hidden_layers)] if by_layer else [config]
    heads = [getattr(layer, "num_attention_heads", None) or 1 for layer in layers]  # 1: no attention
    kv_heads = [getattr(layer, "num_key_value_heads", None) for layer in layers]
    pairs = zip(kv_heads, heads, strict=True)
    return math.gcd(*heads), math.gcd(*(kv or own for kv, own in pairs))


def draws_random_numbers(modules: Iterable[nn.Module]) -> bool:
    """True if one of `modules` draws random numbers in training, by a positive dropout probability.

    Dropout is a module or a function call, whose probability families keep in an attribute with "drop" in its
    name.
    """
    return any(
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, int | float)
        and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    )


def attention_drops(model: PreTrainedModel) -> bool:
    """True if the attention of a model draws random numbers in training; False if it can't be told."""
    try:
        paths = anatomy(model).attentions
    except UserError:
        return False
    return draws_random_numbers(part for path in paths for part in model.get_submodule(path).modules())


def weight_shape(module: nn.Module, path: str) -> tuple[int, int]:
    """Return (rows, columns) of the weight of a submodule."""
    weight = module.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return rows, columns


# Models that also see or hear #

#     whole model ── set_aside ─┬─> the language part   all that training, sharding and planning see
#                               └─> parts set aside     towers and projectors: frozen, no memory on a device
#                    put_back       the whole model, to export it
#
# The names of the parameters stay those of the whole model. Parts set aside get the values of the model's
# files (`fill_aside`) as mappings of these files, in the dtype that they are stored in, as buffers: nothing
# casts, trains or shards them, and an export writes them as they were.


ASIDE = "set_aside"  # attribute of a model: path -> module or parameter that was set aside


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' Auto class that builds the whole model of `config`, with all its parts."""
    if is_scored(config):
        return AutoModelForSequenceClassification
    multimodal = has_text_part(config) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM


def is_scored(config: PretrainedConfig) -> bool:
    """True if `config` is of a reward model, which has a score instead of a vocabulary's head."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def has_text_part(config: PretrainedConfig) -> bool:
    """True if the configuration of the language model is a part of `config`."""
    try:
        return config.get_text_config() is not config
    except ValueError:  # it has several, as an encoder-decoder
        return False


class Absent(nn.Module):
    """Stand in for a part that was set aside; it can't run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @property
    def device(self) -> torch.device:
        """Return a device, for which Qwen2-Audio asks at every forward, though no input goes there."""
        return torch.device("cpu")

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{self.path} was set aside: only the language part of this model runs")


def set_aside(model: PreTrainedModel) -> PreTrainedModel:
    """Take all parts but the language model and its head out of `model`, in place; returns it.

    Nothing happens to a model that is a language model itself, and to one whose language part is not found,
    which `anatomy` refuses.
    """
    place = language_model(model) if has_text_part(model.config) else None
    if place is None:
        return model
    aside: dict[str, nn.Module | Tensor] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in list(module.named_children()):
            path = prefix + name
            if any(part.startswith(f"{path}.") for part in place):
                visit(child, f"{path}.")
            elif path not in place:
                aside[path] = _without_parameters(child)
                module._modules[name] = Absent(path)
        for name, parameter in list(module.named_parameters(recurse=False)):
            aside[prefix + name] = parameter.detach()
            del module._parameters[name]

    visit(model, "")
    vars(model)[ASIDE] = aside
    return model


def _without_parameters(part: nn.Module) -> nn.Module:
    """Turn the parameters of `part` into buffers, in place."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
    return part


def aside_of(model: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Return the modules and tensors that were set aside, by their path in the whole model."""
    return vars(model).get(ASIDE, {})


def aside_names(model: nn.Module) -> list[str]:
    """Return the names of the tensors that were set aside, as the whole model's state_dict has them."""
    return [name for name, _, _ in _owners(model)]


def _owners(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, dictionary that has it, key there) of each tensor that was set aside."""
    aside: dict[str, Any] = aside_of(model)
    for path, part in aside.items():
        if isinstance(part, Tensor):
            yield path, aside, path
            continue
        for prefix, module in part.named_modules(prefix=path):
            for name in [*module._buffers]:
                yield f"{prefix}.{name}", module._buffers, name


def fill_aside(model: nn.Module, values: Mapping[str, Tensor], *, keep: bool) -> None:
    """Give the tensors that were set aside those of `values`, by name, without a copy; others stay.

    keep: False to take only the dtype, on a rank that does not export them.
    """
    for name, owner, key in _owners(model):
        if name in values:
            value = values[name].detach().to(None if keep else "meta")
            owner[key] = value.make() if isinstance(value, Deferred) else value


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Make `model` whole inside the context."""
    aside, absent = aside_of(model), {}
    for path, part in aside.items():
        prefix, _, name = path.rpartition(".")
        parent = model.get_submodule(prefix)
        if isinstance(part, nn.Module):
            absent[path] = parent._modules[name]
            parent._modules[name] = part
        else:
            parent.register_buffer(name, part)
    try:
        yield
    finally:
        for path in aside:
            prefix, _, name = path.rpartition(".")
            parent = model.get_submodule(prefix)
            if path in absent:
                parent._modules[name] = absent[path]
            else:
                del parent._buffers[name]


def parts_kept(model: nn.Module) -> str | None:
    """Return a sentence on what is trained of a model that also sees or hears; None for any other."""
    names = [path.rpartition(".")[2] for path, part in aside_of(model).items() if _has_tensors(part)]
    if not names:
        return None
    return (
        f"The language part of {type(model).__name__} is trained, on text; {', '.join(names)} "
        f"{'is' if len(names) == 1 else 'are'} kept as in the model's files."
    )


def _has_tensors(part: nn.Module | Tensor) -> bool:
    return isinstance(part, Tensor) or bool(part.state_dict())
