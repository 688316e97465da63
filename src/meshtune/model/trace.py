"""Deriving a Census: build the model on meta, run one forward of a few tokens, note what is multiplied with
what.

Whatever multiplies a parameter is a matrix of the census, with autograd's own answer to whether its input
needs a gradient; an attention function that stands in for the real one reports heads, sizes and window of
each layer.

Two views of the same forward check each other. Above autograd, every call that takes a parameter says which
one, and whether its input needs a gradient. Below it, every matrix product that the hardware would see is
counted. A product that belongs to no parameter must be attention written out (scores, then values) or an
outer product (rotary tables: nobody counts those); anything else is reported as unsupported, so no family is
counted wrongly in silence.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.errors import UserError
from meshtune.model.anatomy import (
    TENSOR_STYLES,
    TensorStyle,
    anatomy,
    attention_heads,
    repeated_heads,
    tensor_plan,
)
from meshtune.model.kept import STAND_IN, kept_by_blocks
from meshtune.model.kept import TOKENS as KEPT_TOKENS
from meshtune.placement.census import Attention, Block, Census, Kept, Matrix, Parameter

TOKENS = 13  # of the traced forward; a prime that is no head size, so that shapes with it are recognised
ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\..+)?")  # the names of LoRA's parameters
IN_BLOCK = re.compile(r"(?P<blocks>.+?)\.(?P<index>\d+)\.(?P<name>.+)")

A = torch.ops.aten
FROM_0 = slice(0, 2)  # the tensors that are multiplied
FROM_1 = slice(1, 3)  # the same where the first one is added
PRODUCTS = {A.mm: FROM_0, A.addmm: FROM_1, A.bmm: FROM_0, A.baddbmm: FROM_1, A._grouped_mm: FROM_0}
MULTIPLY: dict[Any, slice] = {
    nn.functional.linear: FROM_0,  # its weight is [out, in], all others' [(experts,) in, out]
    torch.addmm: FROM_1,
    torch.baddbmm: FROM_1,
    Tensor.baddbmm: FROM_1,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), FROM_0
    ),
    **dict.fromkeys((torch._grouped_mm, nn.functional.grouped_mm), FROM_0),  # pyright: ignore[reportPrivateImportUsage]
}
CASTS = {
    Tensor.to,
    Tensor.type,
    Tensor.float,
    Tensor.type_as,
}  # some routers multiply with their weight in fp32


@dataclass(frozen=True)
class Core:
    """An attention core as seen: where, and what it is made of."""

    path: str  # of the attention module
    attention: Attention


@dataclass(frozen=True)
class Product:
    """A matrix product without a parameter, batch · [m, k] @ [k, n], the next after the matrix `after`."""

    after: str
    shape: tuple[int, int, int, int]  # batch, m, k, n
    gradients: tuple[bool, bool]  # whether its two operands need theirs


class Weights(TorchFunctionMode):
    """Notes each multiplication with a parameter, and whether its input needs a gradient."""

    def __init__(self, model: nn.Module, frozen: Collection[str], adapters: Mapping[str, int]) -> None:
        super().__init__()
        self.frozen = frozen
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.casts: list[Tensor] = []  # of parameters; kept, since an id is only unique among the living
        self.adapters = adapters
        self.matrices: list[Matrix] = []
        self.inside = False  # a multiplication that has been noted is being carried out
        self.gradients = (True, True)  # of the operands of the multiplication at hand

    def _name(self, tensor: Tensor) -> str | None:
        """The parameter that this tensor is, or is a view of."""
        found = self.names.get(id(tensor))
        return found if found or tensor._base is None else self.names.get(id(tensor._base))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CASTS and (name := self._name(args[0])):
            out = func(*args, **kwargs)
            self.names[id(out)] = name
            self.casts.append(out)
            return out
        if func not in MULTIPLY:
            return func(*args, **kwargs)
        x, weight = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][MULTIPLY[func]][:2]
        self.gradients = (x.requires_grad, weight.requires_grad)
        name = self._name(weight)
        if name is None:
            return func(*args, **kwargs)
        rows, cols = weight.shape[-2:] if func is nn.functional.linear else reversed(weight.shape[-2:])
        count = x.numel() / cols / TOKENS
        matrix = Matrix(
            name,
            kind="other",
            rows=rows,
            cols=cols,
            count=int(count) if count == int(count) else count,
            trainable=weight.requires_grad,
            input_gradient=x.requires_grad,
        )
        self.matrices.append(matrix)
        self.inside = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.inside = False
        if rank := self.adapters.get(name.rpartition(".")[0]):
            a, b = self._adapt(matrix, rank)
            self.matrices += [a, b]
            if b.trainable or b.input_gradient:  # as adding the adapter's output does
                out = out if out.requires_grad else out.detach().requires_grad_()
        return out

    def _adapt(self, matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
        names = [f"{matrix.name.rpartition('.')[0]}.lora_{which}" for which in "AB"]
        a, b = (
            replace(matrix, name=name, kind="adapter", trainable=name not in self.frozen) for name in names
        )
        a = replace(a, rows=rank)
        return a, replace(b, cols=rank, input_gradient=a.input_gradient or a.trainable)


class Products(TorchDispatchMode):
    """Counts every matrix product below autograd; keeps those that no parameter explains."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.noted = 0  # FLOPs of products with a parameter
        self.bare: list[Product] = []
        self.unknown: set[str] = set()  # other operations that cost FLOPs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in PRODUCTS:
            first, second = args[PRODUCTS[packet]][:2]
            m, k, n = first.shape[-2], first.shape[-1], second.shape[-1]
            batch = first.shape[0] if first.ndim == 3 else 1
            if self.weights.inside:
                self.noted += 2 * batch * m * k * n
            elif k > 1:  # else an outer product, as of positions and frequencies
                last = self.weights.matrices[-1].name if self.weights.matrices else ""
                self.bare.append(Product(last, (batch, m, k, n), self.weights.gradients))
        elif packet in flop_registry:
            self.unknown.add(str(packet))
        return func(*args, **(kwargs or {}))


def census(
    config: PretrainedConfig, *, frozen: Collection[str] = (), adapters: Mapping[str, int] | None = None
) -> Census:
    """The census of the causal LM that transformers builds from `config`.

    adapters: rank of the LoRA pair beside each module named. frozen: names of parameters without gradient,
    an adapter's being <module>.lora_A and <module>.lora_B.
    """

    def build(attention: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)

    return trace(build, frozenset(frozen), dict(adapters or {}))


def census_of(model: PreTrainedModel) -> Census:
    """The census of an existing model as it stands, frozen parameters and LoRA included.

    To be called before the model is wrapped, sharded or cut.
    """
    adapters: dict[str, int] = {}
    frozen: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        found = ADAPTER.fullmatch(name)
        if not parameter.requires_grad:
            frozen.add(f"{found['module']}.lora_{found['which']}" if found else name)
        if not found:
            shapes[name] = tuple(parameter.shape)
        elif found["which"] == "A":
            adapters[found["module"]] = parameter.shape[0]

    def build(attention: str) -> PreTrainedModel:
        built = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=attention)
        same = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()} == shapes
        assert same, "census_of wants the model as its config builds it"
        return built

    return trace(build, frozenset(frozen), adapters)


def trace(
    build: Callable[[str], PreTrainedModel], frozen: frozenset[str], adapters: Mapping[str, int]
) -> Census:
    """The census of the model that `build` makes, on the meta device, with the attention implementation
    named.

    frozen: names of parameters and adapters without gradient. adapters: LoRA rank by module.
    """
    reasons = []
    for attention, with_mask in ((STAND_IN, False), (STAND_IN, True), ("eager", True), ("eager", False)):
        try:
            found = _attempt(build, attention, with_mask, frozen, adapters)
        except Exception as error:  # each family has its own ways to refuse an implementation or a mask
            reasons.append(f"its forward cannot be traced on meta ({type(error).__name__}: {error})")
            continue
        if found.unsupported is None:
            return found
        reasons.insert(0, found.unsupported)  # says more than an implementation that was refused
    return _sorted(_on_meta(build, "eager", frozen), frozen, adapters, [], [], reasons[0], {})


def _on_meta(
    build: Callable[[str], PreTrainedModel], attention: str, frozen: frozenset[str]
) -> PreTrainedModel:
    with torch.device("meta"):
        model = build(attention)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.train()
    return model.bfloat16()  # pyright: ignore[reportCallIssue]


def _attempt(
    build: Callable[[str], PreTrainedModel],
    attention: str,
    with_mask: bool,
    frozen: frozenset[str],
    adapters: Mapping[str, int],
) -> Census:
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
        """Notes one layer's core; [batch, heads, tokens, size] in, [batch, tokens, heads, size] out."""
        gradients = (query.requires_grad, key.requires_grad, value.requires_grad)
        heads, window = query.shape[1], kwargs.get("sliding_window")
        core = Attention(heads, key.shape[1], query.shape[-1], value.shape[-1], window, gradients)
        cores.append(Core(paths[module], core))
        out = query.new_empty(query.shape[0], query.shape[2], heads, value.shape[-1])
        return out.detach().requires_grad_(any(gradients)), None

    AttentionInterface.register(STAND_IN, stand_in)
    model = _on_meta(build, attention, frozen)
    paths |= {module: name for name, module in model.named_modules()}
    weights = Weights(model, frozen, adapters)
    with torch.device("meta"), Products(weights) as products, weights:
        model(**_inputs(TOKENS, with_mask), use_cache=False)
    written_out, rest = _written_out(products.bare)
    cores += written_out
    reason = _reason(model, weights, products, cores, rest, blind=bool(written_out))
    by_block = {}
    if reason is None and attention == STAND_IN and not written_out:
        with suppress(UserError):  # a model that we count but can't train
            inputs = _inputs(KEPT_TOKENS, with_mask)
            by_block = kept_by_blocks(copy.deepcopy(model), frozen, adapters, inputs)
    return _sorted(model, frozen, adapters, weights.matrices, cores, reason, by_block)


def _inputs(tokens: int, with_mask: bool) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long, device="meta")}
    if with_mask:  # of four dimensions: passed on as it is, where a family would look into one that it makes
        inputs["attention_mask"] = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
    return inputs


def _written_out(products: list[Product]) -> tuple[list[Core], list[Product]]:
    """Attention cores written out as two products, scores [tokens, tokens] and then values; and the rest."""
    cores, rest = [], []
    waiting: Product | None = None
    for product in products:
        heads, m, k, n = product.shape
        if (m, n) == (TOKENS, TOKENS) and k != TOKENS and waiting is None:
            waiting = product
        elif (m, k) == (TOKENS, TOKENS) and waiting and waiting.shape[0] == heads:
            path = product.after.rpartition(".")[0].rpartition(".")[0]  # what holds the last matrix's module
            gradients = (*waiting.gradients, product.gradients[1])
            cores.append(Core(path, Attention(heads, heads, waiting.shape[2], n, None, gradients)))
            waiting = None
        else:
            rest.append(product)
    return cores, rest + ([waiting] if waiting else [])


def _reason(
    model: PreTrainedModel,
    weights: Weights,
    products: Products,
    cores: list[Core],
    rest: list[Product],
    *,
    blind: bool,
) -> str | None:
    """Why the FLOPs of what was seen can't be trusted, if they can't.

    blind: attention was written out, so that no window shows.
    """
    if products.unknown:
        return f"it uses operations that the census cannot count: {', '.join(sorted(products.unknown))}"
    if rest:
        return f"it multiplies activations outside attention, as in [batch, m, k, n] = {list(rest[0].shape)}"
    base = [matrix for matrix in weights.matrices if matrix.kind != "adapter"]
    if products.noted != TOKENS * sum(matrix.forward for matrix in base):
        return "its products with parameters are not those of its matrices"
    config = model.config.get_text_config(decoder=True)
    kinds: list[str] = config.layer_types if hasattr(config, "layer_types") and config.layer_types else []
    if len(cores) != config.num_hidden_layers:
        return f"{len(cores)} attention cores were seen in {config.num_hidden_layers} layers"
    if blind and any("window" in key and value for key, value in config.to_dict().items()):
        return "its attention has a window that only its configuration knows"
    windows = ["full_attention" if core.attention.window is None else "sliding_attention" for core in cores]
    if kinds and windows != kinds:
        return f"it has other attention ({', '.join(sorted(set(kinds)))}) than was seen"
    return None


def _sorted(
    model: PreTrainedModel,
    frozen: Collection[str],
    adapters: Mapping[str, int],
    matrices: list[Matrix],
    cores: list[Core],
    unsupported: str | None,
    kept: Mapping[str, tuple[tuple[int, Kept], ...]],
) -> Census:
    """Everything that was seen, by block."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    head_weight = None if head is None else head.weight
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    head_name = names.get(id(head_weight))
    attention_paths = tuple({core.path + "." for core in cores})
    blocks: dict[str, Block] = {}
    outside: list[Matrix] = []
    kinds: dict[str, str] = {}  # by module path
    head_matrix = None

    def block(name: str) -> tuple[str, str]:
        """(block, name inside it); both empty where the name is in no block."""
        found = IN_BLOCK.fullmatch(name)
        return (f"{found['blocks']}.{found['index']}", found["name"]) if found else ("", "")

    for matrix in matrices:
        place, name = block(matrix.name)
        if matrix.name == head_name:
            head_matrix = replace(matrix, kind="head")
            kinds.setdefault(matrix.name.rpartition(".")[0], "head")
            continue
        if not place:
            outside.append(matrix)
            continue
        kind = "attention" if matrix.name.startswith(attention_paths) else "mlp"
        if matrix.kind != "adapter":
            kinds[matrix.name.rpartition(".")[0]] = kind
            matrix = replace(matrix, kind=kind)
        old = blocks.setdefault(place, Block((), (), ()))
        blocks[place] = replace(old, matrices=(*old.matrices, replace(matrix, name=name)))
    for core in cores:
        place, _ = block(core.path)
        blocks[place] = replace(blocks[place], attention=(*blocks[place].attention, core.attention))
    kinds |= {name: "embedding" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}

    parameters: dict[str, list[Parameter]] = {}
    shapes: dict[str, torch.Size] = {}
    cuts, after_blocks = _cuts(model)

    def note(module: str, leaf: str, kind: str, shape: Sequence[int], trainable: bool) -> None:
        place, inside = block(f"{module}.{leaf}")
        name = inside or f"{module}.{leaf}"
        style, heads = cuts.get(name.rpartition(".")[0], (TensorStyle(None), 0))
        along = {"weight": style.dim, "bias": 0, "lora_A": 1, "lora_B": 0}.get(leaf)
        cut = style.dim if along == style.dim else None
        gathered = style.whole and leaf == "weight"
        entry = Parameter(name, kind, tuple(shape), trainable, cut, heads, gathered, module in after_blocks)
        parameters.setdefault(place, []).append(entry)

    for name, parameter in model.named_parameters():
        kind = kinds.get(name.rpartition(".")[0], "norm" if parameter.ndim == 1 else "other")
        shapes[name] = parameter.shape
        module, _, leaf = name.rpartition(".")
        note(module, leaf, kind, parameter.shape, parameter.requires_grad)
    for module, rank in adapters.items():
        rows, cols = shapes[f"{module}.weight"][-2:]
        if isinstance(model.get_submodule(module), Conv1D):  # its weight is [in, out]
            rows, cols = cols, rows
        for leaf, shape in (("lora_A", (rank, cols)), ("lora_B", (rows, rank))):
            note(module, leaf, "adapter", shape, f"{module}.{leaf}" not in frozen)
    for place in parameters.keys() - {""}:
        old = blocks.get(place, Block((), (), ()))
        blocks[place] = replace(old, parameters=tuple(parameters[place]), kept=kept.get(place, ()))
    return Census(
        family=model.config.model_type,
        hidden=embedding.embedding_dim,
        vocabulary=embedding.num_embeddings,
        blocks=tuple(blocks[place] for place in sorted(blocks, key=_index)),
        outside=tuple(outside),
        head=head_matrix,
        parameters_outside=tuple(parameters.get("", [])),
        tied=head_weight is embedding.weight,
        unsupported=unsupported or (None if head_matrix else "it has no head that the census knows"),
    )


def _cuts(model: PreTrainedModel) -> tuple[dict[str, tuple[TensorStyle, int]], set[str]]:
    """How tensor parallelism cuts each module, by its path inside a block or, outside, its whole path, with
    the key-value heads in what it makes; and the paths of what comes after the blocks.
    """
    try:
        parts, plan = anatomy(model), tensor_plan(model)
    except UserError:  # a model that we count but can't train
        return {}, set()
    last = {parts.norm, parts.head}
    if isinstance(plan, str):
        return {}, last
    kv_heads = attention_heads(model)[1]
    repeated = repeated_heads(model, plan, kv_heads + 1)
    inside = {path: (TENSOR_STYLES[word], kv_heads if path in repeated else 0) for path, word in plan.items()}
    return inside | dict.fromkeys((parts.embed, parts.head), (TensorStyle(0), 0)), last


def _index(place: str) -> tuple[str, int]:
    path, _, index = place.rpartition(".")
    return path, int(index)
