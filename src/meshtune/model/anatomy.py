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

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.placement.rules import Traits, refusals

WORKS = "decoder-only transformers such as Llama, Qwen, Mistral, Gemma, Phi, OLMo, Cohere, GPT-2 and GPT-NeoX"
NOT_CAUSAL = {"xlnet"}  # two-stream attention over permutations, which no flag of the model shows
MLP_NAMES = ("mlp", "feed_forward", "ffn")


@dataclass(frozen=True)
class TensorStyle:
    """Sharding of a linear layer (weight [out, in]) by one word of transformers' tensor-parallel plans."""

    # Dimension of the weight that is sharded. None: the weight is replicated and multiplied with this rank's
    # part of the activations alone, so that its gradients are summed over the ranks.
    dim: int | None
    # dim 0: the output is all-gathered. dim 1: the input is whole on each rank, which takes its part of it.
    whole: bool = False


TENSOR_STYLES = {
    "colwise": TensorStyle(0),
    "colwise_gather_output": TensorStyle(0, whole=True),
    "colwise_rep": TensorStyle(0, whole=True),
    "rowwise": TensorStyle(1),
    "rowwise_split_input": TensorStyle(1, whole=True),
    "rowwise_rep": TensorStyle(1, whole=True),
    "replicated_with_grad_allreduce": TensorStyle(None),
}


@dataclass(frozen=True)
class Anatomy:
    """Paths of the parts of one model, for `model.get_submodule(path)`."""

    body: str  # "model"; its forward returns last_hidden_state
    embed: str  # "model.embed_tokens"
    blocks: str  # "model.layers", an nn.ModuleList
    norm: str  # "model.norm", the final norm; "" for a family without one
    head: str  # "lm_head"
    attention: str  # "self_attn", inside each block
    mlp: str  # "mlp", inside each block; "" where its matrices lie in the block itself (OPT)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find and verify the parts of `model`. Raises UserError with the reason if it is built differently."""
    config = model.config.get_text_config()
    paths = {module: path for path, module in model.named_modules()}

    def refusal(reason: str) -> UserError:
        return UserError(f"{type(model).__name__} can't be trained: {reason}. What works: {WORKS}.")

    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise refusal("it has no plain embedding and output head")
    container, _, _ = paths[embed].rpartition(".")
    if not container or container not in (body := container.split(".")[0], f"{body}.decoder"):
        raise refusal(f"its embedding is at {paths[embed]!r}, as in models that also see or hear")
    if config.model_type in NOT_CAUSAL or getattr(config, "use_bidirectional_attention", None):
        raise refusal("its attention is not causal")
    if model._is_stateful:
        raise refusal("its recurrent or convolutional blocks would mix the documents of a packed sequence")

    trunk = model.get_submodule(container)
    layers = config.num_hidden_layers
    lists = [
        name
        for name, child in trunk.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == layers
    ]
    if len(lists) != 1:
        raise refusal(
            f"{len(lists)} lists of {layers} blocks were found in {container!r}, where one was expected"
        )
    blocks = trunk.get_submodule(lists[0])
    assert isinstance(blocks, nn.ModuleList)

    norms = [
        name for name, child in trunk.named_children() if _is_norm(child) and not _is_embedding_norm(name)
    ]
    if len(norms) > 1:
        raise refusal(f"{' and '.join(norms)} could each be its final norm")
    attention = _one_child(blocks[0], lambda name, child: "attention" in type(child).__name__.lower())
    if attention is None:
        raise refusal(f"its block {type(blocks[0]).__name__} has no single attention")
    without = [index for index, block in enumerate(blocks) if attention not in dict(block.named_children())]
    if without:
        raise refusal(
            f"block {without[0]} has no {attention!r} (recurrent or convolutional blocks would mix documents)"
        )
    for path, module in blocks.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise refusal(f"its attention is not causal ({container}.{lists[0]}.{path})")
    mlp = _one_child(blocks[0], lambda name, child: name in MLP_NAMES)
    return Anatomy(
        body=body,
        embed=paths[embed],
        blocks=f"{container}.{lists[0]}",
        norm=f"{container}.{norms[0]}" if norms else "",
        head=paths[head],
        attention=attention,
        mlp=mlp or "",
    )


def _is_norm(module: nn.Module) -> bool:
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


class Capability(NamedTuple):
    """One row of `meshtune env --model`."""

    feature: str
    supported: bool
    why: str  # if supported, its extent or condition; else the reason and what to do instead


def capabilities(config: PretrainedConfig, *, trust_remote_code: bool = False) -> list[Capability]:
    """List what meshtune can do with a model of this configuration, from a build on meta (no weights).

    A model that can't be trained has one entry, with the reason.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    try:
        parts = anatomy(model)
    except UserError as error:
        return [Capability("training", False, str(error))]
    modes = "none, attention, selective, full" if uses_attention_interface(model) else "none, selective, full"
    return [
        Capability(
            "training", True, f"{type(model).__name__}: {config.get_text_config().num_hidden_layers} blocks"
        ),
        _packing(model),
        Capability("lora", True, f"all-linear adapts {_count_linears(model, parts)} matrices"),
        Capability("recompute", True, modes),
        Capability("compile", True, "train.compile=true compiles each block; attention runs as it is"),
        *_parallel_capabilities(traits(model)),
    ]


def traits(model: PreTrainedModel) -> Traits:
    """Return what decides which layouts `model` can take, before it is sharded. Raises as `anatomy` does."""
    parts, plan = anatomy(model), tensor_plan(model)
    heads, kv_heads = attention_heads(model)
    blocks = model.get_submodule(parts.blocks)
    split = {} if isinstance(plan, str) else plan
    whole_heads = repeated_heads(model, split, kv_heads + 1) if split else frozenset()
    return Traits(
        name=type(model).__name__,
        blocks=len(list(blocks.children())),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=_shape(model, parts.embed)[0],
        heads_cut=cuts_heads(split, parts),
        cuts=tuple(
            (_shape(blocks.get_submodule("0"), path)[dim], f"{('rows', 'columns')[dim]} of {path}")
            for path, word in split.items()
            if (dim := TENSOR_STYLES[word].dim) is not None and path not in whole_heads
        ),
        attention=uses_attention_interface(model),
        tensor=plan if isinstance(plan, str) else None,
        pipeline=_pipeline_problem(model, parts),
    )


class StandIn(nn.Module):
    """Stand in for a module that this rank does not have: return the first argument."""

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden


def _pipeline_problem(model: PreTrainedModel, parts: Anatomy) -> str | None:
    """Return why a model's blocks can't run on several stages; None if they can.

    They can't if the body does more than embed, run the blocks and normalise. That is tried: with these three
    replaced by stand-ins, as on a middle stage, hidden states must come through the body unchanged. Positions
    that the body adds to them, or a scale, would show.
    """
    probe = copy.deepcopy(model)
    blocks = [f"{parts.blocks}.{name}" for name, _ in model.get_submodule(parts.blocks).named_children()]
    for path in (parts.embed, parts.norm, *blocks):
        if path:
            probe.set_submodule(path, StandIn())
    for module in probe.modules():  # rotary frequencies: the body reads them, but their values don't matter
        module._buffers |= {
            name: torch.zeros_like(buffer, device="cpu")
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
    body: Any = probe.get_submodule(parts.body)
    hidden = torch.linspace(1, 2, 2 * probe.config.get_text_config().hidden_size).view(1, 2, -1)
    try:
        positions = torch.arange(2)[None]
        with torch.no_grad():
            out = body(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
        if not out.is_meta and torch.equal(out, hidden):
            return None
        problem = "changes hidden states outside its blocks (positions or a scale)"
    except Exception as error:  # each family fails in its own way without its modules
        problem = f"needs more than hidden states between its blocks ({type(error).__name__})"
    return (
        f"pp: {type(model).__name__} {problem}, so they can't run on several ranks. What works for it: data "
        "parallel (dp) and ZeRO (zero)."
    )


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """True if the family calls a registered attention function and passes its keyword arguments on."""
    return model._supports_attention_backend


def auto_attention(model: PreTrainedModel) -> str:
    """Return the implementation for model.attention=auto: ours if the family takes it, else transformers'."""
    return "meshtune" if uses_attention_interface(model) else str(model.config._attn_implementation)


def mask_only_pattern(config: PretrainedConfig, windows: Sequence[int | None]) -> str | None:
    """Return the attention pattern that a model applies only through its mask; None if there is none.

    Such a pattern is named in the configuration but does not show in `windows`, the sliding_window argument
    (tokens, or None) that the attention function gets in each layer. An attention implementation that builds
    no mask would ignore it, and the model would be silently wrong.
    """
    text = config.get_text_config(decoder=True)
    kinds = text.layer_types if hasattr(text, "layer_types") else None
    if kinds:
        passed = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return None if passed == list(kinds) else f"layers of {', '.join(sorted(set(kinds)))}"
    window = text.sliding_window if hasattr(text, "sliding_window") else None
    return f"a sliding window of {window}" if window and not any(windows) else None


def _packing(model: PreTrainedModel) -> Capability:
    if uses_attention_interface(model):
        return Capability("packing", True, "documents are kept apart inside the attention function")
    why = f"{type(model).__name__} computes its attention inside the model, so documents can't be kept apart"
    return Capability("packing", False, f"{why}; set data.packing=false and model.attention=eager")


def _count_linears(model: PreTrainedModel, parts: Anatomy) -> int:
    blocks = model.get_submodule(parts.blocks)
    return sum(
        isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" for module in blocks.modules()
    )


SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)  # of an axis, that `meshtune env --model` tries


def _parallel_capabilities(model_traits: Traits) -> list[Capability]:
    """List over how many ranks a model can be sharded on each axis, or why not."""

    def allowed(layout: Callable[[int], Layout]) -> tuple[list[str], str]:
        """Return (the sizes that are not refused, why the smallest is refused)."""
        attention = "meshtune" if model_traits.attention else "eager"
        reasons = {
            size: refusals(model_traits, layout(size), attention=attention, packing=False) for size in SIZES
        }
        return [str(size) for size in SIZES if not reasons[size]], " ".join(reasons[SIZES[0]])

    tp, no_tp = allowed(lambda size: Layout(tp=size, sp=True))
    pp, no_pp = allowed(lambda size: Layout(pp=size, schedule="gpipe"))
    cp, no_cp = allowed(lambda size: Layout(cp=size))
    ulysses, _ = allowed(lambda size: Layout(cp=size, cp_method="ulysses"))
    return [
        Capability("tensor", bool(tp), f"tp and sp over {', '.join(tp)} ranks" if tp else no_tp),
        Capability("pipeline", bool(pp), f"pp over up to {model_traits.blocks} ranks" if pp else no_pp),
        Capability(
            "context",
            bool(cp),
            f"cp over any number of ranks; ulysses over {', '.join(ulysses) or 'none'}" if cp else no_cp,
        ),
    ]


# tensor parallelism #


def tensor_plan(model: PreTrainedModel) -> dict[str, str] | str:
    """Return transformers' plan for the blocks: module inside a block -> word of TENSOR_STYLES.

    Or a sentence, the reason why a model can't be sharded by it: the plan is missing, needs what we don't
    have (experts, packed or latent projections), or leaves the gradient of some parameter undefined.
    Embedding and head are not in it: every family has them sharded along the vocabulary. Call it on a whole
    model.
    """
    parts = anatomy(model)
    plan = model.config.get_text_config().base_model_tp_plan or {}
    inside = f"{parts.blocks.removeprefix(f'{parts.body}.')}.*."
    words = {path.removeprefix(inside): word for path, word in plan.items() if path.startswith(inside)}
    blocks = list(model.get_submodule(parts.blocks).children())
    reason = _family_problem(model, parts, words)
    if reason := reason or next(
        filter(None, (_block_problem(block, parts, words) for block in blocks)), None
    ):
        return (
            f"{type(model).__name__} can't be cut by tensor parallelism: {reason}. "
            "What works for it: data parallel (dp) and ZeRO (zero); "
            "`meshtune env --model X` lists what else works."
        )
    present = {path for block in blocks for path, _ in block.named_modules()}
    return {path: word for path, word in words.items() if path in present}


def cuts_heads(plan: Mapping[str, str], parts: Anatomy) -> bool:
    """True if `plan` (of `tensor_plan`) shards the attention heads over the ranks; else each has them all."""
    words = [word for path, word in plan.items() if path.startswith(f"{parts.attention}.")]
    return any(TENSOR_STYLES[word] == TensorStyle(0) for word in words)


def repeated_heads(model: PreTrainedModel, plan: Mapping[str, str], tp: int) -> frozenset[str]:
    """Return the paths, inside a block, of the key and value projections that every rank has whole.

    Empty unless there are fewer key-value heads than `tp` ranks: then several ranks need the same head. plan:
    of `tensor_plan`.
    """
    heads, kv_heads = attention_heads(model)
    if kv_heads >= tp:
        return frozenset()
    name = anatomy(model).attention
    block = model.get_submodule(anatomy(model).blocks).get_submodule("0")
    styles = {path: TENSOR_STYLES[word] for path, word in plan.items() if path.startswith(f"{name}.")}
    (width,) = (
        _shape(block, path)[1] for path, style in styles.items() if style.dim == 1
    )  # heads · head_dim
    return frozenset(
        path
        for path, style in styles.items()
        if style == TENSOR_STYLES["colwise"] and _shape(block, path)[0] * heads == width * kv_heads
    )


def attention_heads(model: PreTrainedModel) -> tuple[int, int]:
    """Return (query heads, key-value heads) of a block."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


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


def _family_problem(model: PreTrainedModel, parts: Anatomy, words: Mapping[str, str]) -> str | None:
    """Return why no block of the family can be sharded; None if `_block_problem` is to decide.

    words: the plan's words of TENSOR_STYLES, by path inside a block; empty if transformers has no plan.
    """
    if not words:
        return "transformers has no plan for this family"
    if unknown := sorted(set(words.values()) - set(TENSOR_STYLES)):
        return f"its plan needs {', '.join(unknown)}, and only dense blocks are cut"
    if not uses_attention_interface(model):
        return "it computes its attention inside the model"
    if not parts.mlp or not parts.norm:
        return "its blocks have no single mlp, or it has no final norm"
    prefixes = tuple(f"{path}." for path in (parts.embed, parts.blocks, parts.norm, parts.head))
    stray = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    return f"{stray[0]} lies outside its embedding, blocks, norm and head" if stray else None


def _block_problem(block: nn.Module, parts: Anatomy, words: Mapping[str, str]) -> str | None:
    """Return why the plan can't shard `block`: a module's gradients would be undefined; None if it can.

    Outside attention and mlp every rank has whole hidden states of its tokens: any parameter is fine there.
    Inside, each must be in the plan; a norm's need not be if the plan all-gathers its activations. words: see
    `_family_problem`.
    """
    modules = dict(block.named_modules())
    owners = [path for path, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    for part in (parts.attention, parts.mlp):
        inside = [path for path in owners if path.startswith(f"{part}.")]
        styles = {path: TENSOR_STYLES[words[path]] for path in inside if path in words}
        if not {0, 1} <= {style.dim for style in styles.values()}:
            return f"its plan leaves out {part}"
        whole = all(style.whole for style in styles.values() if style.dim is not None)
        for path in [part, *inside]:
            module = modules[path]
            if path in styles:
                if styles[path].dim is not None and not isinstance(module, nn.Linear):
                    return f"{path} is a {type(module).__name__}, not a linear layer"
            elif path in owners and not (whole and _is_norm(module)):
                return f"its plan leaves out {path}"
    prefixes = (f"{parts.attention}.", f"{parts.mlp}.")
    outside = [path for path in owners if path in words and not path.startswith(prefixes)]
    return f"its plan cuts {outside[0]}, outside attention and mlp" if outside else None


def _shape(module: nn.Module, path: str) -> tuple[int, int]:
    """Return (rows, columns) of the weight of a submodule."""
    weight = module.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return rows, columns
