"""Where a model family keeps its parts: the one place that knows families.

    body ┬ embed                    input ids -> hidden
         ├ blocks ┬ 0 ┬ attention   the transformer blocks, all alike
         │        ┆   └ mlp
         └ norm                     -> last_hidden_state
    head                            last_hidden_state -> logits (before the family's scaling or soft-capping)

Nothing here is listed by family name. The parts are found from what transformers promises for every causal
language model (the embedding and head that it names, the number of blocks in its configuration) and each
finding is verified; a model that is built differently is refused, so that nothing downstream has to guess.
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
    """What one word of transformers' tensor-parallel plans does to a linear layer, weight [out, in].

    dim: the dimension of the weight that is cut; None: every rank has all of it, but for its own part of the
    activations alone, so that gradients add up over the ranks. whole: the output (dim 0) is made whole again,
    or the input (dim 1) is whole and each rank takes its own part.
    """

    dim: int | None
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
    """Paths of the parts of one model; `model.get_submodule(path)` gives each."""

    body: str  # "model"; its forward returns last_hidden_state
    embed: str  # "model.embed_tokens"
    blocks: str  # "model.layers", an nn.ModuleList
    norm: str  # "model.norm", the final norm; "" for a family without one
    head: str  # "lm_head"
    attention: str  # "self_attn", inside each block
    mlp: str  # "mlp", inside each block; "" where its matrices lie in the block itself (OPT)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find and verify the parts of `model`. Raises UserError, saying what is unusual, where it can't."""
    config = model.config.get_text_config()
    paths = {module: path for path, module in model.named_modules()}

    def refuse(reason: str) -> UserError:
        return UserError(f"{type(model).__name__} can't be trained: {reason}. What works: {WORKS}.")

    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise refuse("it has no plain embedding and output head")
    container, _, _ = paths[embed].rpartition(".")
    if not container or container not in (body := container.split(".")[0], f"{body}.decoder"):
        raise refuse(f"its embedding is at {paths[embed]!r}, as in models that also see or hear")
    if config.model_type in NOT_CAUSAL or getattr(config, "use_bidirectional_attention", None):
        raise refuse("its attention is not causal")
    if model._is_stateful:
        raise refuse("its recurrent or convolutional blocks would mix the documents of a packed sequence")

    trunk = model.get_submodule(container)
    layers = config.num_hidden_layers
    lists = [
        name
        for name, child in trunk.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == layers
    ]
    if len(lists) != 1:
        raise refuse(
            f"{len(lists)} lists of {layers} blocks were found in {container!r}, where one was expected"
        )
    blocks = trunk.get_submodule(lists[0])
    assert isinstance(blocks, nn.ModuleList)

    norms = [name for name, child in trunk.named_children() if _is_norm(child) and not _of_embedding(name)]
    if len(norms) > 1:
        raise refuse(f"{' and '.join(norms)} could each be its final norm")
    attention = _one_child(blocks[0], lambda name, child: "attention" in type(child).__name__.lower())
    if attention is None:
        raise refuse(f"its block {type(blocks[0]).__name__} has no single attention")
    others = [index for index, block in enumerate(blocks) if attention not in dict(block.named_children())]
    if others:
        raise refuse(
            f"block {others[0]} has no {attention!r} (recurrent or convolutional blocks would mix documents)"
        )
    for path, module in blocks.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise refuse(f"its attention is not causal ({container}.{lists[0]}.{path})")
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


def _of_embedding(name: str) -> bool:
    return (
        "embed" in name or "per_layer" in name
    )  # Bloom's word_embeddings_layernorm, Gemma3n's per_layer_…_norm


def _one_child(block: nn.Module, wanted) -> str | None:
    found = [name for name, child in block.named_children() if wanted(name, child)]
    return found[0] if len(found) == 1 else None


class Capability(NamedTuple):
    """One row of `meshtune env --model`."""

    feature: str
    supported: bool
    why: str  # why not and what to do instead, or what to know


def capabilities(config: PretrainedConfig, *, trust_remote_code: bool = False) -> list[Capability]:
    """What meshtune can do with a model of this configuration, derived from a build on meta (no weights, no
    memory)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    try:
        found = anatomy(model)
    except UserError as error:
        return [Capability("training", False, str(error))]
    return [
        Capability(
            "training", True, f"{type(model).__name__}: {config.get_text_config().num_hidden_layers} blocks"
        ),
        _packing(model),
        Capability("lora", True, f"all-linear adapts {_linears(model, found)} matrices"),
        Capability(
            "recompute",
            True,
            "none, attention, selective, full" if own_attention(model) else "none, selective, full",
        ),
        Capability("compile", True, "train.compile=true compiles each block; attention runs as it is"),
        *_cut(traits(model)),
    ]


def traits(model: PreTrainedModel) -> Traits:
    """What decides which layouts `model` can take. Ask before anything is cut; raises as `anatomy` does."""
    found, plan = anatomy(model), tensor_plan(model)
    heads, kv_heads = attention_heads(model)
    blocks = model.get_submodule(found.blocks)
    split = {} if isinstance(plan, str) else plan
    whole_heads = repeated_heads(model, split, kv_heads + 1) if split else frozenset()
    return Traits(
        name=type(model).__name__,
        blocks=len(list(blocks.children())),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=_shape(model, found.embed)[0],
        heads_cut=cuts_heads(split, found),
        cuts=tuple(
            (_shape(blocks.get_submodule("0"), path)[dim], f"{('rows', 'columns')[dim]} of {path}")
            for path, word in split.items()
            if (dim := TENSOR_STYLES[word].dim) is not None and path not in whole_heads
        ),
        attention=own_attention(model),
        tensor=plan if isinstance(plan, str) else None,
        pipeline=_pipeline_problem(model, found),
    )


class StandIn(nn.Module):
    """In the place of a module that is not here: gives back what it is given first."""

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden


def _pipeline_problem(model: PreTrainedModel, found: Anatomy) -> str | None:
    """Why a model's blocks can't run apart: its body does more than embed, run the blocks and normalise.

    Tried, not listed: with these replaced by stand-ins, hidden states must come through the body unchanged,
    as on a stage in the middle. Positions that are added to them, or a scale, would show.
    """
    probe = copy.deepcopy(model)
    blocks = [f"{found.blocks}.{name}" for name, _ in model.get_submodule(found.blocks).named_children()]
    for path in (found.embed, found.norm, *blocks):
        if path:
            probe.set_submodule(path, StandIn())
    for module in probe.modules():  # rotary frequencies: their values don't matter here, but they are used
        module._buffers |= {
            k: torch.zeros_like(b, device="cpu") for k, b in module._buffers.items() if b is not None
        }
    body: Any = probe.get_submodule(found.body)
    hidden = torch.linspace(1, 2, 2 * probe.config.get_text_config().hidden_size).view(1, 2, -1)
    try:
        positions = torch.arange(2)[None]
        with torch.no_grad():
            out = body(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
        if not out.is_meta and torch.equal(out, hidden):
            return None
        what = "changes hidden states outside its blocks (positions or a scale)"
    except Exception as error:  # each family stumbles in its own way over what is not there
        what = f"needs more than hidden states between its blocks ({type(error).__name__})"
    return (
        f"pp: {type(model).__name__} {what}, so they can't run on several ranks. What works for it: data "
        "parallel (dp) and ZeRO (zero)."
    )


def own_attention(model: PreTrainedModel) -> bool:
    """Whether the family calls a registered attention function and hands it its keyword arguments."""
    return model._supports_attention_backend


def auto_attention(model: PreTrainedModel) -> str:
    """What model.attention=auto is: ours where the family takes it, else what transformers built it with."""
    return "meshtune" if own_attention(model) else str(model.config._attn_implementation)


def hidden_pattern(config: PretrainedConfig, windows: Sequence[int | None]) -> str | None:
    """What the configuration says of the attention that its attention function is not told; None when
    nothing.

    `windows` are those that the function was given, layer by layer. A family that lays its window, or another
    pattern, only into a mask would be silently wrong with an attention that builds none.
    """
    text = config.get_text_config(decoder=True)
    kinds = text.layer_types if hasattr(text, "layer_types") else None
    if kinds:
        seen = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return None if seen == list(kinds) else f"layers of {', '.join(sorted(set(kinds)))}"
    window = text.sliding_window if hasattr(text, "sliding_window") else None
    return f"a sliding window of {window}" if window and not any(windows) else None


def _packing(model: PreTrainedModel) -> Capability:
    if own_attention(model):
        return Capability("packing", True, "documents are kept apart inside the attention function")
    why = f"{type(model).__name__} computes its attention inside the model, so documents can't be kept apart"
    return Capability("packing", False, f"{why}; set data.packing=false and model.attention=eager")


def _linears(model: PreTrainedModel, found: Anatomy) -> int:
    blocks = model.get_submodule(found.blocks)
    return sum(
        isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" for module in blocks.modules()
    )


SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)


def _cut(of: Traits) -> list[Capability]:
    """Over how many ranks a model can be cut in each way, or why not."""

    def ask(cut: Callable[[int], Layout]) -> tuple[list[str], str]:
        """The sizes that are not refused, and what is said of the first."""
        attention = "meshtune" if of.attention else "eager"
        said = {size: refusals(of, cut(size), attention=attention, packing=False) for size in SIZES}
        return [str(size) for size in SIZES if not said[size]], " ".join(said[SIZES[0]])

    tp, no_tp = ask(lambda size: Layout(tp=size, sp=True))
    pp, no_pp = ask(lambda size: Layout(pp=size, schedule="gpipe"))
    cp, no_cp = ask(lambda size: Layout(cp=size))
    ulysses, _ = ask(lambda size: Layout(cp=size, cp_method="ulysses"))
    return [
        Capability("tensor", bool(tp), f"tp and sp over {', '.join(tp)} ranks" if tp else no_tp),
        Capability("pipeline", bool(pp), f"pp over up to {of.blocks} ranks" if pp else no_pp),
        Capability(
            "context",
            bool(cp),
            f"cp over any number of ranks; ulysses over {', '.join(ulysses) or 'none'}" if cp else no_cp,
        ),
    ]


# tensor parallelism #


def tensor_plan(model: PreTrainedModel) -> dict[str, str] | str:
    """How transformers' own plan cuts the blocks of `model`: module inside a block -> word of TENSOR_STYLES.

    Or a sentence that says why nobody can vouch for a cut: the plan is missing, needs what we have not
    (experts, packed or latent projections), or leaves open what some parameter's gradient would be. Embedding
    and head are not in it: they are cut along the vocabulary in every family. Ask before anything is cut.
    """
    found = anatomy(model)
    plan = model.config.get_text_config().base_model_tp_plan or {}
    inside = f"{found.blocks.removeprefix(f'{found.body}.')}.*."
    words = {path.removeprefix(inside): word for path, word in plan.items() if path.startswith(inside)}
    blocks = list(model.get_submodule(found.blocks).children())
    reason = _unplanned(model, found, words)
    if reason := reason or next(filter(None, (_unvouched(block, found, words) for block in blocks)), None):
        return (
            f"{type(model).__name__} can't be cut by tensor parallelism: {reason}. "
            "What works for it: data parallel (dp) and ZeRO (zero); meshtune env --model says what else."
        )
    present = {path for block in blocks for path, _ in block.named_modules()}
    return {path: word for path, word in words.items() if path in present}


def cuts_heads(plan: Mapping[str, str], found: Anatomy) -> bool:
    """Whether each rank computes some of the attention heads; else all are computed everywhere."""
    words = [word for path, word in plan.items() if path.startswith(f"{found.attention}.")]
    return any(TENSOR_STYLES[word] == TensorStyle(0) for word in words)


def repeated_heads(model: PreTrainedModel, plan: Mapping[str, str], tp: int) -> frozenset[str]:
    """The key and value projections inside a block, where there are fewer key-value heads than `tp` ranks.

    Several ranks then need the same head, so every rank keeps these matrices whole.
    """
    heads, kv_heads = attention_heads(model)
    if kv_heads >= tp:
        return frozenset()
    name = anatomy(model).attention
    block = model.get_submodule(anatomy(model).blocks).get_submodule("0")
    own = {path: TENSOR_STYLES[word] for path, word in plan.items() if path.startswith(f"{name}.")}
    (out,) = (_shape(block, path)[1] for path, style in own.items() if style.dim == 1)  # heads · head_dim
    return frozenset(
        path
        for path, style in own.items()
        if style == TENSOR_STYLES["colwise"] and _shape(block, path)[0] * heads == out * kv_heads
    )


def attention_heads(model: PreTrainedModel) -> tuple[int, int]:
    """Query heads, and key-value heads, of every block."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def draws(modules: Iterable[nn.Module]) -> bool:
    """Whether one of `modules` draws random numbers in training.

    Its dropout may be a module or a call; families keep a call's probability in an attribute named so.
    """
    return any(
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, int | float)
        and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    )


def _unplanned(model: PreTrainedModel, found: Anatomy, words: Mapping[str, str]) -> str | None:
    """What the family as a whole lacks, if something."""
    if not words:
        return "transformers has no plan for this family"
    if unknown := sorted(set(words.values()) - set(TENSOR_STYLES)):
        return f"its plan needs {', '.join(unknown)}, and only dense blocks are cut"
    if not own_attention(model):
        return "it computes its attention inside the model"
    if not found.mlp or not found.norm:
        return "its blocks have no single mlp, or it has no final norm"
    parts = tuple(f"{part}." for part in (found.embed, found.blocks, found.norm, found.head))
    stray = [name for name, _ in model.named_parameters() if not name.startswith(parts)]
    return f"{stray[0]} lies outside its embedding, blocks, norm and head" if stray else None


def _unvouched(block: nn.Module, found: Anatomy, words: Mapping[str, str]) -> str | None:
    """The first module of `block` whose gradients would not be known, as a reason.

    Outside attention and mlp every rank has whole hidden states of its tokens: any parameter is fine there.
    Inside, each must be in the plan; but where the plan makes activations whole again, so may a norm's be.
    """
    modules = dict(block.named_modules())
    owners = [path for path, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    for part in (found.attention, found.mlp):
        inside = [path for path in owners if path.startswith(f"{part}.")]
        own = {path: TENSOR_STYLES[words[path]] for path in inside if path in words}
        if not {0, 1} <= {style.dim for style in own.values()}:
            return f"its plan leaves out {part}"
        whole = all(style.whole for style in own.values() if style.dim is not None)
        for path in [part, *inside]:
            module = modules[path]
            if path in own:
                if own[path].dim is not None and not isinstance(module, nn.Linear):
                    return f"{path} is a {type(module).__name__}, not a linear layer"
            elif path in owners and not (whole and _is_norm(module)):
                return f"its plan leaves out {path}"
    parts = (f"{found.attention}.", f"{found.mlp}.")
    outside = [path for path in owners if path in words and not path.startswith(parts)]
    return f"its plan cuts {outside[0]}, outside attention and mlp" if outside else None


def _shape(module: nn.Module, path: str) -> tuple[int, int]:
    weight = module.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return rows, columns
