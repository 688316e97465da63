"""Derive a Census: build the model on the meta device, run one forward of a few tokens, record its matmuls.

Each parameter that is multiplied with becomes a matrix of the census, with autograd's own answer to whether
its input needs a gradient; an attention function that stands in for the real one records heads, sizes and
window of each layer.

The forward is watched above and below autograd (matmuls.py), and both counts must agree. A matmul without a
parameter must be attention written out (scores, then values) or an outer product (rotary tables, which are
not counted); anything else is reported as unsupported, so that no family is counted wrongly in silence.
"""

import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.errors import UserError
from meshtune.experts.adapters import stacked_weights
from meshtune.experts.register import use_products
from meshtune.model.anatomy import Anatomy, anatomy, attention_heads, auto_class, ends, set_aside
from meshtune.model.body import cast_parameters, text_forward
from meshtune.model.fused import STAND_IN, experts_without_values
from meshtune.model.lora import Adapters, is_only_called
from meshtune.model.recorded import attention_kinds
from meshtune.model.saved_tensors import Saved, saved_by_block
from meshtune.model.tensor_plan import (
    TENSOR_STYLES,
    TensorStyle,
    fused_projections,
    head_parameters,
    repeated_heads,
    tensor_plan,
)
from meshtune.model.watch import (
    TOKENS,
    BareMatmul,
    DispatchedMatmuls,
    ParameterMatmuls,
    mixers_apart,
    recurrent_matrices,
)
from meshtune.placement.census import Attention, Block, Census, EndBytes, Matrix, Parameter, SavedBytes
from meshtune.placement.numbers import READS_VALUES

# LoRA's parameters, of linear layers and of experts' stacked weights
ADAPTER = re.compile(r"((?P<module>.+)[._]lora_(?P<which>A|B|magnitude_vector))(\..+)?")
TRACED_MODELS = 16
traced_models: dict[Hashable, Census] = {}  # the last of this process, by all that a census depends on
IN_BLOCK = re.compile(r"(?P<blocks>.+?)\.(?P<index>\d+)\.(?P<name>.+)")

Builder = Callable[[str | None], PreTrainedModel]  # attention implementation, None: the family's -> model
Core = tuple[str, Attention]  # an attention core of a traced forward, after the path of its module


@dataclass(frozen=True)
class Traced:
    """Everything that a traced forward recorded."""

    model: PreTrainedModel  # on meta
    parts: Anatomy | None  # None in a model that we count but can't train
    frozen: Collection[str]  # names of parameters and adapters without gradient
    adapters: Adapters
    unsupported: str | None = None  # why its FLOPs can't be trusted; None if they can
    matrices: Sequence[Matrix] = ()  # in the order of the forward
    cores: Sequence[Core] = ()
    saved: Mapping[str, tuple[tuple[int, SavedBytes], ...]] = field(default_factory=dict)  # by block path
    ends: tuple[tuple[int, EndBytes], ...] = ()  # see Census
    of_one_row: Mapping[str, tuple[tuple[int, SavedBytes], ...]] = field(default_factory=dict)  # like saved


def census(
    config: PretrainedConfig, *, frozen: Collection[str] = (), adapters: Mapping[str, int] | None = None
) -> Census:
    """Count the causal LM that transformers builds from `config`; see `trace`.

    frozen: names of parameters without gradient, those of adapters being <module>.lora_A and <module>.lora_B.
    adapters: rank of the LoRA pair of each adapted module, by the module's name.
    """

    def build(attention: str | None) -> PreTrainedModel:
        whole = auto_class(config).from_config(copy.deepcopy(config), attn_implementation=attention)
        return set_aside(whole)

    return trace(build, frozenset(frozen), Adapters(dict(adapters or {})))


def census_of(model: PreTrainedModel) -> Census:
    """Count an existing model with its frozen parameters and LoRA adapters; equal models are traced once.

    Call it before the model is wrapped or sharded.
    """
    # A census depends neither on the dtype nor on where the model was read from.
    settings = model.config.to_dict() | {"dtype": None, "_name_or_path": None}
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters())
    key = (type(model), json.dumps(settings, default=str, sort_keys=True), shapes, _drops(model))
    if key not in traced_models:
        while len(traced_models) >= TRACED_MODELS:
            traced_models.pop(next(iter(traced_models)))
        traced_models[key] = _traced_census(model)
    return traced_models[key]


def _drops(model: nn.Module) -> bool:
    """Whether adapters of a model drop elements of their inputs."""
    return any(vars(module).get("lora_dropout") for module in model.modules())


def _traced_census(model: PreTrainedModel) -> Census:
    ranks: dict[str, int] = {}
    dora = any(name.endswith(".lora_magnitude_vector") for name, _ in model.named_parameters())
    frozen: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        adapter = ADAPTER.fullmatch(name)
        if not parameter.requires_grad:
            frozen.add(adapter[1] if adapter else name)
        if not adapter:
            shapes[name] = tuple(parameter.shape)
        elif adapter["which"] == "A":
            ranks[adapter["module"]] = parameter.shape[-2]

    def build(attention: str | None) -> PreTrainedModel:
        fresh = set_aside(
            type(model)._from_config(copy.deepcopy(model.config), attn_implementation=attention)
        )
        same = {name: tuple(parameter.shape) for name, parameter in fresh.named_parameters()} == shapes
        assert same, "census_of needs the model as its config builds it"
        return fresh

    return trace(build, frozenset(frozen), Adapters(ranks, dora, _drops(model)))


def trace(build: Builder, frozen: frozenset[str], adapters: Adapters) -> Census:
    """Count the model that `build(attention)` makes, with the attention implementation of that name.

    Several implementations are tried, with and without a mask; if none can be counted, `unsupported` of the
    result says why. frozen: names of parameters and adapters without gradient. adapters: the model is built
    without them.
    """
    reasons = []
    for attention, with_mask in ((STAND_IN, False), (STAND_IN, True), ("eager", True), ("eager", False)):
        try:
            traced = _forward(build, attention, with_mask, frozen, adapters)
            if traced.unsupported is None:
                return _census(traced)
        except Exception as error:  # each family has its own ways to refuse an implementation or a mask
            reasons.append(f"its forward cannot be traced on meta ({type(error).__name__}: {error})")
            if "out of meta tensor" in str(error):
                reasons[-1] = READS_VALUES
            continue
        reasons.insert(0, traced.unsupported)  # tells more than an implementation that was refused
    model = built_on_meta(build, "eager", frozen)
    return _census(Traced(model, _parts(model), frozen, adapters, unsupported=reasons[0]))


def _forward(
    build: Builder,
    attention: str,
    with_mask: bool,
    frozen: frozenset[str],
    adapters: Adapters,
) -> Traced:
    """Run one forward with an attention implementation and record it.

    with_mask: True to pass a 4-d mask. build, frozen, adapters: see `trace`. Registers STAND_IN anew.
    Activations are recorded under STAND_IN, or with the family's attention. Raises as the model's forward.
    """
    cores: list[Core] = []
    paths: dict[nn.Module, str] = {}

    def stand_in(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Record one layer's core; [batch, heads, tokens, size] in, [batch, tokens, heads, size] out."""
        gradients = (query.requires_grad, key.requires_grad, value.requires_grad)
        heads, window = query.shape[1], kwargs.get("sliding_window")
        flash = kwargs.get("softcap") is None
        core = Attention(heads, key.shape[1], query.shape[-1], value.shape[-1], window, gradients, flash)
        cores.append((paths[module], core))
        out = query.new_empty(query.shape[0], query.shape[2], heads, value.shape[-1])
        return out.detach().requires_grad_(any(gradients)), None

    AttentionInterface.register(STAND_IN, stand_in)
    model = built_on_meta(build, attention, frozen)
    paths |= {module: name for name, module in model.named_modules()}
    recorded = ParameterMatmuls(model, frozen, adapters.ranks)
    parts = _parts(model)
    mixers = parts if parts and parts.mixers else None
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(experts_without_values())
        dispatched = stack.enter_context(DispatchedMatmuls(recorded))
        if mixers:
            stack.enter_context(mixers_apart(model, mixers, dispatched))
        with recorded:
            text_forward(model, **inputs(1, TOKENS, with_mask))
    written_out, unexplained = _attention_written_out(dispatched.bare)
    cores += written_out
    reason = _unsupported_reason(model, dispatched, cores, unexplained, mixers, written_out=bool(written_out))
    recurrent = recurrent_matrices(model, mixers) if mixers and reason is None else []
    if isinstance(recurrent, str):
        reason, recurrent = recurrent, []
    saved: tuple[Any, ...] = ()
    if parts and reason is None and attention == STAND_IN and not written_out:
        given = partial(inputs, with_mask=with_mask)
        saved = saved_by_block(copy.deepcopy(model), parts, frozen, adapters, given)
    elif parts and reason is None and parts.attention_problem:
        several, one = (saved_by_own_attention(build, parts, frozen, adapters, rows) for rows in (2, 1))
        saved = (*several, one[0])
    return Traced(model, parts, frozen, adapters, reason, [*recorded.matrices, *recurrent], cores, *saved)


def _parts(model: PreTrainedModel) -> Anatomy | None:
    """Return the anatomy of a model; None of one that we count but can't train."""
    with suppress(UserError):
        return anatomy(model)


def _attention_written_out(matmuls: list[BareMatmul]) -> tuple[list[Core], list[BareMatmul]]:
    """Split matmuls into attention cores, scores [tokens, tokens] and then values, and the rest."""
    cores, rest = [], []
    scores: BareMatmul | None = None
    for matmul in matmuls:
        heads, m, k, n = matmul.shape
        if (m, n) == (TOKENS, TOKENS) and k != TOKENS and scores is None:
            scores = matmul
        elif (m, k) == (TOKENS, TOKENS) and scores and scores.shape[0] == heads:
            module, _, _ = matmul.after.rpartition(".")
            path, _, _ = module.rpartition(".")  # the last matrix's module lies in the attention module
            gradients = (*scores.gradients, matmul.gradients[1])
            cores.append((path, Attention(heads, heads, scores.shape[2], n, None, gradients)))
            scores = None
        else:
            rest.append(matmul)
    return cores, rest + ([scores] if scores else [])


def _unsupported_reason(
    model: PreTrainedModel,
    dispatched: DispatchedMatmuls,
    cores: list[Core],
    unexplained: list[BareMatmul],
    mixers: Anatomy | None,
    *,
    written_out: bool,
) -> str | None:
    """Return why the FLOPs of a traced forward can't be trusted; None if they can.

    unexplained: matmuls that belong to no parameter and no core. mixers: of a model with recurrent mixers.
    written_out: True if the family computes attention itself, so that no window was recorded.
    """
    if dispatched.unknown:
        return f"it uses operations that the census cannot count: {', '.join(sorted(dispatched.unknown))}"
    if unexplained:
        shape = list(unexplained[0].shape)
        return f"it multiplies activations outside attention, as in [batch, m, k, n] = {shape}"
    base = [matrix for matrix in dispatched.recorded.matrices if matrix.kind != "adapter"]
    if dispatched.parameter_flops != round(TOKENS * sum(matrix.forward for matrix in base)):
        return "its matmuls with parameters are not those of its matrices"
    config = model.config.get_text_config(decoder=True)
    kinds = attention_kinds(config)
    layers = len(mixers.attentions) if mixers else config.num_hidden_layers
    if len(cores) != layers:
        return f"{len(cores)} attention cores were traced in {layers} layers"
    if written_out and any("window" in key and value for key, value in config.to_dict().items()):
        return "its attention has a window that only its configuration names"
    windows = ["full_attention" if core.window is None else "sliding_attention" for _, core in cores]
    if kinds and windows != kinds:
        return f"it has other attention ({', '.join(sorted(set(kinds)))}) than was traced"
    return None


# From what was recorded to a Census #


def _census(traced: Traced) -> Census:
    model = traced.model
    embedding, head = ends(model)
    assert isinstance(embedding, nn.Embedding)
    head_weight = None if head is None else head.get_parameter("weight")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, kinds = _matrices_by_block(traced, head_name=names.get(id(head_weight)))
    blocks_path = traced.parts and traced.parts.blocks
    cores: dict[str, list[Attention]] = defaultdict(list)
    for path, core in traced.cores:
        block, _ = _in_block(path, blocks_path)
        assert block and block in matrices, f"{path} is in no block"
        cores[block].append(core)
    parameters = _parameters_by_block(traced, kinds)
    paths = (matrices.keys() | parameters.keys()) - {"", "head"}
    blocks = [
        Block(
            matrices=tuple(matrices.get(path, ())),
            attention=tuple(cores.get(path, ())),
            parameters=tuple(parameters.get(path, ())),
            saved=traced.saved.get(path, ()),
            saved_of_one_row=traced.of_one_row.get(path, ()),
        )
        for path in sorted(paths, key=_path_and_index)
    ]
    head_matrix = matrices["head"][-1] if "head" in matrices else None
    return Census(
        family=model.config.model_type,
        hidden=embedding.embedding_dim,
        vocabulary=embedding.num_embeddings,
        blocks=tuple(blocks),
        outside=tuple(matrices.get("", ())),
        head=head_matrix,
        parameters_outside=tuple(parameters.get("", ())),
        tied=head_weight is embedding.weight,
        ends=traced.ends,
        unsupported=traced.unsupported or (None if head_matrix else "it has no head that the census knows"),
    )


def _in_block(name: str, blocks: str | None) -> tuple[str, str]:
    """Split the name of a module or parameter into (path of its block, name inside it); else ("", "").

    blocks: path of the list of blocks; None: any list, in a model whose parts are not known.
    """
    match = IN_BLOCK.fullmatch(name)
    if match is None or (blocks or match["blocks"]) != match["blocks"]:
        return "", ""
    return f"{match['blocks']}.{match['index']}", match["name"]


def _matrices_by_block(
    traced: Traced, head_name: str | None
) -> tuple[dict[str, list[Matrix]], dict[str, str]]:
    """Return (matrices by the block's path, "head" or "" for outside; kind of parameter by module path).

    head_name: name of the head's weight; None if there is no head.
    """
    blocks = traced.parts and traced.parts.blocks
    in_attention = tuple({f"{path}." for path, _ in traced.cores})
    matrices: dict[str, list[Matrix]] = {}
    kinds: dict[str, str] = {}
    for matrix in traced.matrices:
        module = matrix.name.rpartition(".")[0]
        block, name = _in_block(matrix.name, blocks)
        if matrix.name == head_name:
            matrices.setdefault("head", []).append(replace(matrix, kind="head"))
            kinds.setdefault(module, "head")
        elif not block:
            matrices.setdefault("", []).append(matrix)
        else:
            kind = matrix.kind
            if kind != "adapter":
                kind = kinds[module] = "attention" if matrix.name.startswith(in_attention) else "mlp"
            matrices.setdefault(block, []).append(replace(matrix, name=name, kind=kind))
    for name, module in traced.model.named_modules():
        if isinstance(module, nn.Embedding):
            kinds[name] = "embedding"
    return matrices, kinds


def _parameters_by_block(traced: Traced, kinds: Mapping[str, str]) -> dict[str, list[Parameter]]:
    """Return the parameters, adapters included, by the path of their block; "" for outside.

    kinds: of parameters, by module path; in other modules vectors are norms, the rest "other".
    """
    styles, fused, after_blocks = _tensor_styles(traced.model, traced.parts)
    blocks = traced.parts and traced.parts.blocks
    of_heads = head_parameters(traced.model) if styles else frozenset()
    stacked = stacked_weights(traced.model)
    parameters: dict[str, list[Parameter]] = {}

    def add(module: str, leaf: str, kind: str, shape: Sequence[int], trainable: bool) -> None:
        """Append the parameter `leaf` (weight, bias, lora_A …) of a module; shape: whole."""
        block, inside = _in_block(f"{module}.{leaf}", blocks)
        name = inside or f"{module}.{leaf}"
        path = name.rpartition(".")[0]
        style, heads = styles.get(path, (TensorStyle(None), 0))
        dim = {"weight": style.dim, "bias": 0, "lora_A": 1, "lora_B": 0, "lora_magnitude_vector": 0}.get(leaf)
        cut = 0 if name in of_heads else style.dim if dim == style.dim else None
        whole = style.whole and leaf == "weight"
        linear = isinstance(traced.model.get_submodule(module), nn.Linear)
        layer = f"{module}.{leaf}" in stacked or (linear and is_only_called(traced.model, module))
        entry = Parameter(
            name, kind, tuple(shape), trainable, cut, heads, whole, fused=fused.get(path, ()),
            last=module in after_blocks, linear=layer or not block or len(shape) == 1 or kind == "adapter",
        )  # fmt: skip
        parameters.setdefault(block, []).append(entry)

    shapes: dict[str, torch.Size] = {}
    for name, parameter in traced.model.named_parameters():
        module, _, leaf = name.rpartition(".")
        shapes[name] = parameter.shape
        kind = kinds.get(module, "norm" if parameter.ndim == 1 else "other")
        add(module, leaf, kind, parameter.shape, parameter.requires_grad)
    for module, rank in traced.adapters.ranks.items():
        if module in stacked:
            experts, rows, cols = stacked[module].shape
            path, _, leaf = module.rpartition(".")
            for name, shape in (f"{leaf}_lora_A", (rank, cols)), (f"{leaf}_lora_B", (rows, rank)):
                add(path, name, "adapter", (experts, *shape), f"{path}.{name}" not in traced.frozen)
            continue
        rows, cols = shapes[f"{module}.weight"][-2:]
        if isinstance(traced.model.get_submodule(module), Conv1D):  # its weight is [in, out]
            rows, cols = cols, rows
        shapes_of = {"lora_A": (rank, cols), "lora_B": (rows, rank)}
        for leaf, shape in (
            shapes_of | ({"lora_magnitude_vector": (rows,)} if traced.adapters.dora else {})
        ).items():
            add(module, leaf, "adapter", shape, f"{module}.{leaf}" not in traced.frozen)
    return parameters


def _tensor_styles(
    model: PreTrainedModel, parts: Anatomy | None
) -> tuple[dict[str, tuple[TensorStyle, int]], dict[str, tuple[int, ...]], set[str]]:
    """Return how tensor parallelism shards each module, `Parameter.fused` of the modules where it is set, and
    the paths of the modules after the blocks.

    The first is (style, key-value heads in the module's output or 0) by the path inside a block or, outside
    of blocks, by the whole path; empty for a model that can't be sharded.
    """
    if parts is None:
        return {}, {}, set()
    plan, after_blocks = tensor_plan(model), {parts.norm, parts.head}
    if isinstance(plan, str):
        return {}, {}, after_blocks
    kv_heads = attention_heads(model)[1]
    repeated = repeated_heads(model, plan, kv_heads + 1)
    inside = {path: (TENSOR_STYLES[word], kv_heads if path in repeated else 0) for path, word in plan.items()}
    ends = dict.fromkeys((parts.embed, parts.head), (TensorStyle(0), 0))
    pairs = fused_projections(model, plan)
    fused = {path: pair.units for pair in pairs for path in (pair.rows, pair.columns)}
    return inside | ends, fused, after_blocks


def _path_and_index(block: str) -> tuple[str, int]:
    path, _, index = block.rpartition(".")
    return path, int(index)


# Families that compute attention themselves #


def built_on_meta(build: Builder, attention: str | None, frozen: Collection[str]) -> PreTrainedModel:
    """Build the model on meta, parameters in bf16, in training mode; only those `frozen` have no gradient."""
    with torch.device("meta"):
        model = build(attention)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    cast_parameters(model, torch.bfloat16)
    use_products(model)
    return model.train()


def inputs(rows: int, tokens: int, with_mask: bool) -> dict[str, Tensor]:
    """Inputs of a forward on meta: `rows` of `tokens`, and with a mask if `with_mask`."""
    given = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long, device="meta")}
    if with_mask:  # 4-d: passed on as it is, where a family would read the values of one that it makes itself
        given["attention_mask"] = torch.zeros(rows, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
    return given


def saved_by_own_attention(
    build: Builder, parts: Anatomy, frozen: Collection[str], adapters: Adapters, rows: int
) -> Saved:
    """Return what `saved_by_block` does, of a family whose attention can't be replaced; empty if untraced.

    A run has the family's attention and a mask. Some families read the mask's values, which meta tensors do
    not have, or want another one. build, frozen, adapters: as in `trace`. parts: of the model.
    """
    for attention, with_mask in product((None, STAND_IN), (False, True)):
        try:
            model = built_on_meta(build, attention, frozen)
        except (KeyError, ValueError):  # it knows no STAND_IN
            continue
        found = saved_by_block(model, parts, frozen, adapters, partial(inputs, with_mask=with_mask), rows)
        if found[0]:
            return found
    return {}, ()
