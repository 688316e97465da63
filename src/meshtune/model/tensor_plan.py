"""How tensor parallelism cuts the matrices of a block: transformers' plan, and fused projections.

    config.base_model_tp_plan ─> tensor_plan ─> {"self_attn.q_proj": "colwise", …} or why there is none
                                     └─ tensor_styles(tp) ─> {"self_attn.q_proj": TensorStyle(0), …}

Phi-3 has queries, keys and values in one matrix, and gate and up in another, as GLM does. transformers' plan
cuts such a matrix as if it were one projection and all-gathers its output, so that every rank computes all
heads. Where tp divides each of the projections, a rank takes its rows of each instead: nothing is gathered.
"""

import copy
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtune.model.anatomy import (
    Anatomy,
    anatomy,
    attention_heads,
    is_norm,
    weight_shape,
)
from meshtune.placement.families import see
from meshtune.placement.split import pieces


@dataclass(frozen=True)
class TensorStyle:
    """Sharding of a linear layer (weight [out, in]) by one word of transformers' tensor-parallel plans."""

    # Dimension of the weight that is sharded. None: the weight is replicated and multiplied with this rank's
    # part of the activations only, so that its gradients are summed over the ranks.
    dim: int | None
    # dim 0: the output is all-gathered. dim 1: the input is whole on each rank, which takes its part of it.
    whole: bool = False
    parts: tuple[int, ...] = ()  # rows of each of the projections that are fused in the matrix; (): it is one


EXPERT_WORDS = ("moe_", "packed_", "grouped_")  # of transformers' plans, that cut no dense matrix
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")  # in the path of a mixture's routed experts and their weights
TENSOR_STYLES = {
    "colwise": TensorStyle(0),
    "colwise_gather_output": TensorStyle(0, whole=True),
    "colwise_rep": TensorStyle(0, whole=True),
    "rowwise": TensorStyle(1),
    "rowwise_split_input": TensorStyle(1, whole=True),
    "rowwise_rep": TensorStyle(1, whole=True),
    "replicated_with_grad_allreduce": TensorStyle(None),
    "mla_kv_a_proj": TensorStyle(None),
}
# Words that transformers' plans leave out, by the name in attention. Latent projections (DeepSeek's MLA) and
# their norms are whole on each rank, which uses them for its own heads.
LATENT_WORDS = dict.fromkeys(
    ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), "replicated_with_grad_allreduce"
)
# Where a plan has no word for attention, as those of DeepSeek-V3 and GPT-OSS
ATTENTION_WORDS = LATENT_WORDS | {
    "o_proj": "rowwise",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "sinks"), "colwise"),
}


def tensor_plan(model: PreTrainedModel) -> dict[str, str] | str:
    """Return transformers' plan for the blocks: module inside a block -> word of TENSOR_STYLES.

    Or a sentence, the reason why a model can't be sharded by it: the plan is missing, has experts outside the
    mlp, or leaves the gradient of some parameter undefined. Those inside stay whole.
    Embedding and head are not in it: every family has them sharded along the vocabulary. Call it on a whole
    model.
    """
    parts = anatomy(model)
    words = _words(model, parts)
    blocks = list(model.get_submodule(parts.blocks).children())
    reason = _family_problem(model, parts, words)
    experts = parts.attention and any(word.startswith(EXPERT_WORDS) for word in words.values())
    kind = "experts" if experts else "tensor"
    if reason := reason or next(
        filter(None, (_block_problem(block, parts, words) for block in blocks)), None
    ):
        return (
            f"{type(model).__name__} can't be cut by tensor parallelism: {reason}. "
            f"What works for it: data parallel (dp) and ZeRO (zero). {see(kind)}"
        )
    present = {path for block in blocks for path, _ in block.named_modules()}
    return {path: word for path, word in words.items() if path in present}


def head_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Return the parameters of attention modules themselves, by path inside a block, that the plan cuts: with
    a number for each query head, such as attention sinks.
    """
    parts = anatomy(model)
    words = _words(model, parts)
    blocks = model.get_submodule(parts.blocks).children()
    names = {name for block in blocks for name, _ in block.named_parameters()}
    return frozenset(name for name, word in words.items() if name in names and word == "colwise")


def _words(model: PreTrainedModel, parts: Anatomy) -> dict[str, str]:
    """Return the plan's word of each path inside a block, whether the block has it or not; also those that
    the plan leaves out of attention.
    """
    plan = model.config.get_text_config().base_model_tp_plan
    if not plan:
        return {}
    inside = f"{parts.blocks.removeprefix(f'{parts.body}.')}.*."
    words = {path.removeprefix(inside): word for path, word in plan.items() if path.startswith(inside)}
    if words.get(parts.attention) == "local_params":  # its own parameters; each has a word
        del words[parts.attention]
    own = f"{parts.attention}.", f"{parts.mlp}."
    named = any(path.startswith(own[0]) for path in words)
    more = LATENT_WORDS if named else ATTENTION_WORDS
    words = {
        path: word for path, word in words.items() if not (path.startswith(own[1]) and EXPERTS.search(path))
    }
    return {f"{own[0]}{name}": word for name, word in more.items()} | words


def is_mixture(block: nn.Module, parts: Anatomy) -> bool:
    """True if the block's mlp is a mixture of experts. It runs on each tp rank's own tokens, and every rank
    has all routed experts.
    """
    mlp = block._modules.get(parts.mlp)
    return mlp is not None and any(EXPERTS.search(path) for path, _ in mlp.named_modules())


def cut_parts(block: nn.Module, parts: Anatomy, words: Collection[str]) -> list[str]:
    """Return the paths of the modules in a block that have a part of their matrices on each rank, and so take
    the tokens of all ranks: attention and mlp, or attention and shared experts. words: paths that have one.
    """
    if not is_mixture(block, parts):
        return [parts.attention, parts.mlp]
    inside = [path for path, _ in block.named_modules() if path.startswith(f"{parts.mlp}.") and path in words]
    return [parts.attention, *dict.fromkeys(path.rpartition(".")[0] for path in inside)]


@dataclass(frozen=True)
class Fused:
    """A matrix whose rows are several projections, one after the other, and the matrix that takes its output
    when these are joined: qkv_proj and o_proj, or gate_up_proj and down_proj.
    """

    rows: str  # path inside the block of the matrix that is cut by rows
    columns: str  # of the one that is cut by columns
    units: tuple[int, ...]  # of each projection: heads, or features
    unit_rows: int  # rows of a unit

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each projection."""
        return tuple(units * self.unit_rows for units in self.units)

    def fits(self, tp: int) -> bool:
        """True if each of `tp` ranks can have equal units of every projection."""
        return all(units % tp == 0 for units in self.units)


def fused_projections(model: PreTrainedModel, plan: Mapping[str, str]) -> tuple[Fused, ...]:
    """Find the fused projections in a block's attention and mlp. plan: of `tensor_plan`.

    A matrix whose output the plan all-gathers is one if it has the rows of queries, keys and values, or twice
    the columns of the next matrix, and if the module, run with a rank's rows of each, gives that
    rank's part of what it gives with all of them; other orders of rows do not.
    """
    parts = anatomy(model)
    block = model.get_submodule(parts.blocks).get_submodule("0")
    found = (
        _fused(block, parts.attention, plan, attention_heads(model)),
        _fused(block, parts.mlp, plan, None),
    )
    return tuple(fused for fused in found if fused is not None)


def tensor_styles(model: PreTrainedModel, plan: Mapping[str, str], tp: int) -> dict[str, TensorStyle]:
    """Return how each matrix of a block is cut over `tp` ranks, by its path inside the block. plan: of
    `tensor_plan`.
    """
    styles = {path: TENSOR_STYLES[word] for path, word in plan.items()}
    for fused in fused_projections(model, plan):
        if fused.fits(tp):
            styles |= {fused.rows: TensorStyle(0, parts=fused.parts), fused.columns: TensorStyle(1)}
    return styles


def cuts_heads(styles: Mapping[str, TensorStyle], parts: Anatomy) -> bool:
    """True if the attention heads are cut over the ranks; else each has them all. styles: by path."""
    inside = [style for path, style in styles.items() if path.startswith(f"{parts.attention}.")]
    return any(style.dim == 0 and not style.whole for style in inside)


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
        weight_shape(block, path)[1] for path, style in styles.items() if style.dim == 1
    )  # heads · head_dim
    return frozenset(
        path
        for path, style in styles.items()
        if style == TENSOR_STYLES["colwise"] and weight_shape(block, path)[0] * heads == width * kv_heads
    )


def _family_problem(model: PreTrainedModel, parts: Anatomy, words: Mapping[str, str]) -> str | None:
    """Return why no block of the family can be sharded; None if `_block_problem` is to decide.

    words: the plan's words of TENSOR_STYLES, by path inside a block; empty if transformers has no plan.
    """
    if not parts.attention:
        return "its recurrent or convolutional layers are not cut"
    if not words:
        return "transformers has no plan for this family"
    if unknown := sorted(set(words.values()) - set(TENSOR_STYLES)):
        lie = "its experts lie outside its mlp, and " * all(word.startswith(EXPERT_WORDS) for word in unknown)
        return f"{lie}its plan needs {', '.join(unknown)}"
    if parts.attention_problem:
        return parts.attention_problem
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
    if is_mixture(block, parts) and (
        reason := _mixture_problem(block.get_submodule(parts.mlp), words, parts.mlp)
    ):
        return reason
    for part in cut_parts(block, parts, words):
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
            elif path in owners and not (whole and is_norm(module)):
                direct = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
                if any(words.get(name) != "colwise" for name in direct):  # one number for each head
                    return f"its plan leaves out {path}"
    prefixes = (f"{parts.attention}.", f"{parts.mlp}.")
    outside = [path for path in owners if path in words and not path.startswith(prefixes)]
    return f"its plan cuts {outside[0]}, outside attention and mlp" if outside else None


def _mixture_problem(mlp: nn.Module, words: Mapping[str, str], path: str) -> str | None:
    """Return why a mixture of experts can't run on a rank's own tokens; None if it can."""
    if len(inspect.signature(mlp.forward).parameters) > 1:
        return f"{path} takes more than hidden states"
    direct = [name for name, _ in mlp.named_children() if f"{path}.{name}" in words]
    return f"its plan cuts {path}.{direct[0]}, next to experts" if direct else None


# fused projections #


class RankConfig:
    """A model's configuration with the attention heads of one rank; all else is the shared one's."""

    def __init__(self, config: Any, tp: int) -> None:
        """tp: ranks; it divides the query and the key-value heads."""
        self._shared = config
        self.num_attention_heads = config.num_attention_heads // tp
        self.num_key_value_heads = config.num_key_value_heads // tp

    def __getattr__(self, name: str) -> Any:
        if name == "_shared":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self._shared, name)


def take_heads(attention: Any, tp: int) -> None:
    """Make an attention module with fused projections find one rank's heads in their output, in place."""
    attention.config = RankConfig(attention.config, tp)
    for name in ("num_heads", "num_attention_heads", "num_key_value_heads"):
        if name in vars(attention):
            setattr(attention, name, getattr(attention, name) // tp)


def _fused(
    block: nn.Module, part: str, plan: Mapping[str, str], heads: tuple[int, int] | None
) -> Fused | None:
    """Return the fused projections of one part of a block; None if its first matrix is one projection.

    part: name of the attention or mlp. heads: (query heads, key-value heads) of the attention; None: the mlp.
    """
    inside = {path: TENSOR_STYLES[word] for path, word in plan.items() if path.startswith(f"{part}.")}
    rows = [path for path, style in inside.items() if style == TensorStyle(0, whole=True)]
    columns = [path for path, style in inside.items() if style == TensorStyle(1, whole=True)]
    if (len(rows), len(columns), len(inside)) != (1, 1, 2):
        return None
    (height, _), (_, width) = weight_shape(block, rows[0]), weight_shape(block, columns[0])
    units = (heads[0], heads[1], heads[1]) if heads else (width, width)
    fused = Fused(rows[0], columns[0], units, width // units[0])
    return fused if sum(fused.parts) == height and _is_cut_alike(block.get_submodule(part), fused) else None


class _Given(nn.Module):
    """Stand in for the first matrix: return the output that it was given."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out

    def forward(self, _: Tensor) -> Tensor:
        return self.out


class _Taken(nn.Module):
    """Stand in for the last matrix: keep the input."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return x


def _is_cut_alike(module: nn.Module, fused: Fused) -> bool:
    """True if a rank's rows of each projection give its part of what enters the last matrix; tried without
    weights, on numbers for two tokens, with the smallest tp.

    module: the attention or mlp.
    """
    tp = next((size for size in range(2, max(fused.units) + 1) if fused.fits(size)), None)
    if tp is None:
        return False
    out = torch.arange(2.0 * sum(fused.parts)).sin().view(1, 2, -1)
    try:
        parts = _last_input(module, fused, out, 1).chunk(tp, dim=-1)
        for index, part in enumerate(parts):
            rows = torch.cat([out[..., run.start : run.stop] for run in pieces(fused.parts, tp, index)], -1)
            torch.testing.assert_close(_last_input(module, fused, rows, tp), part)
    except Exception:  # with rows in another order each family differs, or fails, in its own way
        return False
    return True


@torch.no_grad()
def _last_input(module: nn.Module, fused: Fused, out: Tensor, tp: int) -> Tensor:
    """Return the input [1, 2, features] of the last matrix of attention or mlp where the first one gives
    `out` [1, 2, rows].

    tp: ranks that share the heads in `out`; 1 for all of them.
    """
    kept = [*module.parameters(), vars(module).get("config")]
    probe: Any = copy.deepcopy(module, {id(value): value for value in kept}).eval()
    probe.set_submodule(fused.rows.rpartition(".")[2], _Given(out))
    probe.set_submodule(fused.columns.rpartition(".")[2], taken := _Taken())
    hidden = torch.zeros(1, 2, 1)
    if len(fused.units) == 2:
        probe(hidden)
    else:
        take_heads(probe, tp)
        probe.config._attn_implementation = "eager"
        angles = torch.arange(2.0 * fused.unit_rows).view(1, 2, -1)
        rotary = angles.cos(), angles.sin()
        probe(hidden_states=hidden, position_embeddings=rotary, attention_mask=None)
    return taken.x
