"""LoRA: a low-rank addition to linear layers that stay as they are (Hu et al. 2021, arXiv:2106.09685).

    y = W x + b + s · B A dropout(x)    A [r, in] random, B [out, r] zero: no change at first

s is alpha / r, or alpha / √r (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).

DoRA (Liu et al. 2024, arXiv:2402.09353) trains the norm of each row of the weight apart from its direction:

    y = m / |W + s · B A| · (W + s · B A) x + b    m [out], the rows' norms at first; |…| has no gradient

The layer keeps its name, the behaviour of its class and its own parameters; it gains `lora_A` and `lora_B`
(and `lora_magnitude_vector`, m), so that checkpoints, sharding and tensor-parallel plans still find
`…q_proj.weight`. Only the adapters and the modules of `modules_to_save` are trainable. The arithmetic
(dtypes, order, initialisation) is peft's, and the results are equal to the last bits.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtune.errors import UserError, did_you_mean, nearest
from meshtune.experts.adapters import TARGET, adapted_weights, draw, stacked_weights
from meshtune.model.anatomy import anatomy, ends
from meshtune.precision import FP8_MULTIPLE, takes_fp8
from meshtune.quantised import nf4
from meshtune.quantised.fp8 import Fp8Linear
from meshtune.quantised.nf4 import Nf4Linear
from meshtune.setting import is_regular_expression


class _Lora(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Parameter  # [r, in]
    lora_B: nn.Parameter  # [out, r]
    lora_magnitude_vector: nn.Parameter | None  # [out], of DoRA
    lora_scale: float
    lora_dropout: float
    lora_in_place = True  # False: the output of W is kept as it is (recompute: selective)
    lora_fuses = True  # False: compiled as it is, too, since a sum apart takes more memory (recompute)
    lora_all_reduce: Callable[[Tensor], Tensor] | None  # sums over the ranks that have the other columns of W

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # in a view of an output in place, autograd would copy the whole
        return self.adapted(rows, super().forward(rows), self.bias).unflatten(0, x.shape[:-1])

    def adapted(self, x: Tensor, base: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output [tokens, out], from that of its own weight and, if it is not None, its bias,
        which is overwritten where that is allowed.
        """
        dropped = F.dropout(x.to(self.lora_A.dtype), self.lora_dropout, self.training)
        plain = self.lora_magnitude_vector is None and base.dtype == self.lora_B.dtype
        if plain and self.lora_fuses and torch.compiler.is_compiling():
            # Compiled, an addmm copies `base` first. A sum behind a view isn't made one: it is fused with
            # what reads it.
            change = F.linear(F.linear(dropped, self.lora_A) * self.lora_scale, self.lora_B)
            return (base[None] + change[None])[0]
        if plain:
            add = base.addmm_ if self.lora_in_place else base.addmm
            return add(F.linear(dropped, self.lora_A), self.lora_B.t(), alpha=self.lora_scale)
        change = F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.lora_scale
        if self.lora_magnitude_vector is not None:
            if self.lora_dropout and self.training:  # as peft: W and B A see the same dropped inputs
                seen = matmul_of(self, dropped)
            else:
                seen = base if bias is None else base - bias
            change = self.lora_magnitude_vector / self.row_norms() * (seen + change) - seen
        return (base + change).to(base.dtype)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the norm of each row of W + s · B A, [out], in the adapter's dtype.

        Of each row |w + s b A|² = |w|² + 2 s b (A w) + s² b (A Aᵀ) bᵀ: no matrix of W's size is made.
        """
        a, b, scale = self.lora_A, self.lora_B, self.lora_scale
        weight = weight_of(self)
        products = 2 * scale * (weight.to(a.dtype) @ a.T) + scale**2 * (b @ (a @ a.T))
        squares = norms(weight).square() + (products * b).sum(1)
        if self.lora_all_reduce:
            squares = self.lora_all_reduce(squares)
        return squares.sqrt().to(b.dtype)


def by_rows(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight of a linear layer as [out, in], a view."""
    return weight.T if isinstance(layer, Conv1D) else weight


def weight_of(layer: Any) -> Tensor:
    """Return the weight of an adapted layer as [out, in]: a view, or dequantised in the adapter's dtype."""
    dtype = layer.lora_A.dtype
    return layer.dequantised(dtype) if isinstance(layer, Nf4Linear) else by_rows(layer, layer.weight)


def frozen_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the blocks' linear layers that method=qlora holds in 4 bits: they are not trained,
    nothing but their own matmul reads their weight, and blocks of neighbours divide its columns.
    """
    blocks = f"{anatomy(model).blocks}."
    return [
        name for name, module in model.named_modules()
        if name.startswith(blocks) and isinstance(module, nn.Linear) and is_only_called(model, name)
        and module.weight.shape[1] % nf4.BLOCK == 0
        and not any(weight.requires_grad for weight in (module.weight, module.bias) if weight is not None)
    ]  # fmt: skip


def frozen_matrices(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights that method=qlora holds in 4 bits: of `frozen_linears`, and those of
    the blocks' experts that are not trained and whose columns are divided likewise.
    """
    blocks = f"{anatomy(model).blocks}."
    of_experts = {
        name: model.get_parameter(name) for name in stacked_weights(model) if name.startswith(blocks)
    }
    return [f"{path}.weight" for path in frozen_linears(model)] + [
        name for name, weight in of_experts.items()
        if weight.shape[-1] % nf4.BLOCK == 0 and not weight.requires_grad
    ]  # fmt: skip


def fp8_linears(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of the blocks' linear layers that multiply in 8-bit floats: nothing but their own
    matmul reads their weight, and it is large enough.

    shapes: of the whole model's parameters, by name; the model's own may be a tp rank's parts.
    """
    blocks = f"{anatomy(model).blocks}."
    return [
        name for name, module in model.named_modules()
        if name.startswith(blocks) and isinstance(module, nn.Linear) and takes_fp8(*shapes[f"{name}.weight"])
        and all(size % FP8_MULTIPLE == 0 for size in module.weight.shape) and is_only_called(model, name)
    ]  # fmt: skip


def is_only_called(model: nn.Module, path: str) -> bool:
    """True for a linear layer whose weight is read by nn.Linear's own forward, and by no other code."""
    layer, (parent, _, name) = model.get_submodule(path), path.rpartition(".")
    kind = next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))
    own = kind.__module__.partition(".")[0] in ("torch", "meshtune") or "super().forward(" in _source(kind)
    return own and name not in _read_weights(type(model.get_submodule(parent)))


@cache
def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the submodules whose weight the code of a module reads."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]  # long, and read none
    return frozenset(re.findall(r"self\.(\w+)\.weight\b", "".join(map(_source, own))))


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made without a file
        return ""


def matmul_of(layer: Any, x: Tensor) -> Tensor:
    """Return the matmul of rows x and the weight of a linear layer, in the dtype of x."""
    if isinstance(layer, Nf4Linear | Fp8Linear):
        return layer.matmul(x)
    return F.linear(x, by_rows(layer, layer.weight).to(x.dtype))


def without_bias(layer: Any, x: Tensor) -> Tensor:
    """Return the output of a linear layer, with or without an adapter, less its bias."""
    rows = x.flatten(0, -2) if isinstance(layer, _Lora) else x
    product = matmul_of(layer, rows)
    if not isinstance(layer, _Lora):
        return product
    return layer.adapted(rows, product, None).unflatten(0, x.shape[:-1])


def norms(rows: Tensor) -> Tensor:
    """Return the norm of each row, in at least fp32."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))


class Adapters(NamedTuple):
    """The adapters of a model that is counted without weights."""

    # Of the pair of each adapted module, or parameter of experts, by its name
    ranks: Mapping[str, int] = MappingProxyType({})
    dora: bool = False  # True if they have a magnitude vector
    dropout: bool = False  # True if their inputs go through dropout

    def add_to(self, model: nn.Module) -> None:
        """Add them to a model, in place."""
        stacked, dropout = stacked_weights(model), 0.5 * self.dropout
        for name, rank in self.ranks.items():
            if name in stacked:
                stacked[name].adapt(rank, rank, None)
            else:
                adapt(model.get_submodule(name), rank, rank, dropout, use_dora=self.dora)


class LoraLinear(_Lora, nn.Linear):
    """nn.Linear with an adapter; weight [out, in]."""


class LoraNf4Linear(_Lora, Nf4Linear):
    """Nf4Linear with an adapter."""


class LoraConv1D(_Lora, Conv1D):
    """GPT-2's Conv1D with an adapter; weight [in, out]."""


ALL_LINEAR = "all-linear"
READ = ".dt_proj"  # a linear layer of Mamba's mixers that is never called: they read its weight
ADAPTED = {nn.Linear: LoraLinear, Nf4Linear: LoraNf4Linear, Conv1D: LoraConv1D}


def add_lora(
    model: PreTrainedModel,
    *,
    lora_rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: Literal["all-linear"] | list[str] = "all-linear",
    use_rslora: bool = False,
    use_dora: bool = False,
    layers_to_transform: Collection[int] | None = None,
    modules_to_save: Collection[str] = (),
    apart: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Freeze `model` and add adapters to the targets, in place; returns the names of the linear layers, then
    of the stacked parameters of experts.

    lora_rank, alpha, use_rslora: r and s above. use_dora: True for m. target_modules: names or endings of
    names ("q_proj", "self_attn.o_proj"), regular expressions of whole names (".*mlp.(up|down)_proj"),
    "all-linear", every linear layer but the output head, or "experts", the weights of a mixture's experts
    (adapters.py). Names and expressions mean these too, but one that linear layers have, as "down_proj", only
    if it contains "experts".
    layers_to_transform: indices of the blocks that get adapters; None: all, and layers outside of blocks too.
    modules_to_save: names or endings of the modules that are trained whole, and get no adapters; one of a
    tied embedding and head means both, which stay tied. apart: paths of modules in which "all-linear" means
    no layer. dtype: of the adapters; None: the weight's, but at least fp32. A is drawn from torch's global
    generator.

    Raises UserError for a rank below 1, a dropout outside [0, 1), names of no linear layer or module, blocks
    that are not there, and a module that shares its weight with another one.
    """
    problems = []
    if lora_rank < 1:
        problems.append(f"lora.r={lora_rank} must be at least 1.")
    if not 0 <= dropout < 1:
        problems.append(f"lora.dropout={dropout} must be at least 0 and below 1.")
    names, unknown = _targets(model, target_modules)
    saved, unfit = _saved(model, modules_to_save)
    without = [*saved, *(apart if ALL_LINEAR in target_modules else ())]
    targets = {*names} & {*stacked_weights(model)}
    names = [name for name in names if not any(f"{name}.".startswith(f"{path}.") for path in without)]
    if whole := targets - {*names}:
        problems.append(
            f"lora.modules_to_save trains {min(whole)} whole, and lora.target_modules gives it an adapter; "
            "leave it out of one."
        )
    if layers_to_transform is not None:
        names, absent = _in_layers(model, names, layers_to_transform)
        unknown += absent
    stacked = {path: weights for path, weights in stacked_weights(model).items() if path in names}
    for setting in ["lora.dropout"] * (dropout > 0) + ["lora.use_dora"] * use_dora if stacked else ():
        problems.append(
            f"{setting}: adapters of experts have none, as in peft; leave it out, or {TARGET} out of "
            "lora.target_modules."
        )
    if problems := problems + unknown + unfit:
        raise UserError(problems)
    model.requires_grad_(False)
    for path in saved:
        model.get_submodule(path).requires_grad_(True)
    alpha *= math.sqrt(lora_rank) if use_rslora else 1  # adapt divides by lora_rank
    for name in names:
        if name in stacked:
            stacked[name].adapt(lora_rank, alpha, dtype)
        else:
            adapt(model.get_submodule(name), lora_rank, alpha, dropout, dtype, use_dora=use_dora)
    return names


def is_named(path: str, names: Collection[str]) -> bool:
    """True if a module is meant by one of `names`, whole names or endings at a dot."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def tied_tables(model: PreTrainedModel) -> set[str]:
    """Return the paths of embedding and head if they share their weight, else none."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embed.weight:
        return set()
    return {path for path, module in model.named_modules() if module is embed or module is head}


def modules_named(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return the paths of the modules that `names` mean, in the model's order.

    Of an embedding and a head that share their weight, both, if one is meant.
    """
    paths = [path for path, _ in model.named_modules()]
    meant = {path for path in paths if is_named(path, names)}
    meant |= pair if (pair := tied_tables(model)) & meant else set()
    return [path for path in paths if path in meant]


def _saved(model: PreTrainedModel, modules_to_save: Collection[str]) -> tuple[list[str], list[str]]:
    """Return (paths of the modules that `modules_to_save` means, problems): a sentence for a name without a
    module, a module without parameters, and one whose parameter is another module's too, unless the two are
    embedding and head.
    """
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    pair, problems = tied_tables(model), []
    for name in modules_to_save:
        found = modules_named(model, [name])
        if not any([*model.get_submodule(path).parameters()] for path in found):
            leaves = sorted(
                {name.rpartition(".")[0].rpartition(".")[2] for name, _ in model.named_parameters()}
            )
            hint = did_you_mean(nearest(name, leaves))
            problems.append(f"lora.modules_to_save: no module with parameters is called {name}{hint}")
        for path in (path for path in found if path not in pair):
            for shared in (owners[id(p)] for p in model.get_submodule(path).parameters()):
                if outside := [other for other in shared if not other.startswith(f"{path}.")]:
                    problems.append(
                        f"lora.modules_to_save: {path} shares its weight with {outside[0]}, and peft would "
                        "train a copy that isn't shared any more; leave it out."
                    )
    return modules_named(model, modules_to_save), problems


def _in_layers(
    model: PreTrainedModel, names: list[str], layers: Collection[int]
) -> tuple[list[str], list[str]]:
    """Return (those of `names` that are in these blocks, problems): a sentence for blocks that are not there,
    or have none of `names`.
    """
    path = anatomy(model).blocks
    last = len(model.get_submodule(path)) - 1  # type: ignore[arg-type]
    if absent := [index for index in layers if not 0 <= index <= last]:
        return names, [
            f"lora.layers_to_transform: the model has layers 0 to {last}; there is no "
            f"{', '.join(map(str, absent))}."
        ]
    chosen = [name for name in names if any(name.startswith(f"{path}.{index}.") for index in layers)]
    problem = "lora.layers_to_transform: none of these layers has a module of lora.target_modules."
    return chosen, [] if chosen else [problem]


def _targets(model: PreTrainedModel, target_modules: str | list[str]) -> tuple[list[str], list[str]]:
    """Return (names of the linear layers that the targets mean, in the model's order, then of the stacked
    parameters of experts; problems).

    A problem is a sentence, for a target that names nothing, or an output head that is tied.
    """
    head, stacked = ends(model)[1], stacked_weights(model)
    linears = {name: module for name, module in model.named_modules() if type(module) in ADAPTED}
    targets = [target_modules] if isinstance(target_modules, str) else target_modules
    problems, selected = [], set()
    for target in targets:
        if target == ALL_LINEAR:
            selected |= {n for n, module in linears.items() if module is not head and not n.endswith(READ)}
            continue
        if target == TARGET:
            selected |= {*stacked}
            if not stacked:
                problems.append(
                    f"lora.target_modules: {model.name_or_path or type(model).__name__} has no {TARGET}, or "
                    "experts of its own kind, which get no adapters; leave it out."
                )
            continue
        matches = _matching(target, [*linears])
        if not matches or TARGET in target:
            matches += _matching(target, [*stacked])
        if not matches and is_regular_expression(target):
            problems.append(
                f"lora.target_modules: {target} is neither a linear layer's name nor a regular expression "
                f"that matches one; names look like {next(iter(linears), 'nothing here')}."
            )
        elif not matches:
            leaves = sorted({name.rpartition(".")[2] for name in (*linears, *stacked)})
            hint = did_you_mean(nearest(target, leaves))
            problems.append(
                f"lora.target_modules: no linear layer is called {target}; "
                f"there are {', '.join(leaves)}{hint}"
            )
        if unused := [name for name in matches if name.endswith(READ)]:
            problems.append(
                f"lora.target_modules: {unused[0]} is never called, only its weight is read, so that an "
                "adapter would have no effect; leave it out."
            )
        selected.update(matches)
    tied = head.weight is model.get_input_embeddings().weight if head is not None else False
    if tied and any(linears.get(name) is head for name in selected):
        problems.append(
            "lora.target_modules: the output head is tied to the embedding and can't be adapted separately."
        )
    return [name for name in (*linears, *stacked) if name in selected], problems


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that end with a text at a dot, or else those that it matches whole as a regular expression,
    as peft reads it.
    """
    try:
        ending = [name for name in names if is_named(name, [pattern])]
        return ending or [name for name in names if re.fullmatch(pattern, name)]
    except re.error:
        return []


def adapt(
    module: Any,
    lora_rank: int,
    alpha: float,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    *,
    use_dora: bool = False,
) -> None:
    """Add an adapter to one linear layer (nn.Linear or Conv1D), in place; its own weight is not frozen.

    The arguments are those of `add_lora`.
    """
    weight = module.weight
    rows, columns = weight.shape  # [out, in] of a Linear
    kind = ADAPTED[type(module)]
    if kind is LoraConv1D:
        rows, columns = columns, rows
    elif kind is LoraNf4Linear:
        columns *= 2  # two in a byte
    dtype = dtype or (weight.dtype if weight.dtype.itemsize >= 4 else torch.float32)
    module.lora_A = nn.Parameter(torch.empty(lora_rank, columns, dtype=dtype, device=weight.device))
    module.lora_B = nn.Parameter(torch.zeros(rows, lora_rank, dtype=dtype, device=weight.device))
    nn.init.kaiming_uniform_(module.lora_A, a=math.sqrt(5))
    module.lora_scale = alpha / lora_rank
    module.lora_dropout = dropout
    module.lora_all_reduce = None
    magnitude = nn.Parameter(norms(by_rows(module, weight.detach())).to(dtype)) if use_dora else None
    module.register_parameter("lora_magnitude_vector", magnitude)
    # A change of class, not a patched method: deepcopy, pickling and torch.compile follow it automatically.
    module.__class__ = ADAPTED[type(module)]


def initial_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return initial values by name for adapters on meta: lora_A random, lora_B zero; whole, on CPU.

    They are those of `add_lora` on a real device: the same numbers in the same order, from torch's global
    generator.
    """
    values: dict[str, Tensor] = {}
    for name, layer in lora_layers(model).items():
        values[f"{name}.lora_A"] = torch.empty_like(layer.lora_A, device="cpu")
        values[f"{name}.lora_B"] = torch.zeros_like(layer.lora_B, device="cpu")
        nn.init.kaiming_uniform_(values[f"{name}.lora_A"], a=math.sqrt(5))
    for name, weights in adapted_weights(model).items():
        a, b = weights.pair
        values[f"{name}_lora_A"] = torch.empty_like(a, device="cpu")
        values[f"{name}_lora_B"] = torch.zeros_like(b, device="cpu")
        draw(values[f"{name}_lora_A"])
    return values


def initial_magnitude(layer: _Lora, weight: Tensor) -> Tensor:
    """Return the norm of each row of the layer's weight, [out], in at least fp32.

    weight: whole; rows that it lacks (of added tokens) are the mean of the others.
    """
    rows = by_rows(layer, weight)
    added = len(layer.lora_B) - len(rows)
    if not added:
        return norms(rows)
    mean = rows.double().mean(0, keepdim=True).to(rows.dtype)
    return torch.cat([norms(rows), norms(mean).expand(added)])


def shortest_endings(names: Collection[str], every: Collection[str]) -> list[str]:
    """Return the shortest endings of dotted names that mean `names` and no other name of `every`, sorted."""

    def endings(name: str) -> Iterator[str]:
        parts = name.split(".")
        return (".".join(parts[-count:]) for count in range(1, len(parts) + 1))

    taken = {ending for other in set(every) - set(names) for ending in endings(other)}
    return sorted({next(ending for ending in endings(name) if ending not in taken) for name in names})


def lora_layers(model: nn.Module) -> dict[str, _Lora]:
    """Return the layers of `model` that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _Lora)}


@torch.no_grad()
def merge_lora(model: nn.Module, dtype: torch.dtype | None = None) -> float | None:
    """Add every adapter to the weights that it adapts, in at least fp32, and remove it, in place.

    Layers and experts in 4 bits get weights in the embedding's dtype. Returns the norm of what rounding
    theirs to `dtype` (None: the embedding's) changes, over that of the weights; None without any.
    """
    kept = next(model.parameters()).dtype
    changed = norm = 0.0
    owners: dict[int, str] = {}
    for name, layer in lora_layers(model).items():
        if (owner := owners.setdefault(id(layer.weight), name)) != name:
            raise UserError(
                f"The adapters can't be merged: {owner} and {name} share one weight, and each has an adapter "
                "of its own. Use the adapters as they are, with PEFT."
            )

    def rounded(weight: Tensor) -> Tensor:
        nonlocal norm, changed
        norm += float(weight.square().sum())
        changed += float((weight.to(dtype or kept).to(weight.dtype) - weight).square().sum())
        return weight.to(kept)

    for weights in stacked_weights(model).values():
        weights.merge(rounded)
    quantised = {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    for name, layer in (lora_layers(model) | quantised).items():
        module: Any = layer  # pyright does not see that it is a Linear or Conv1D too
        if name in quantised:
            module.restore(torch.float32)
        merged = by_rows(module, module.weight)
        if isinstance(layer, _Lora):
            wide = torch.promote_types(module.lora_A.dtype, torch.float32)
            delta = module.lora_B.to(wide) @ module.lora_A.to(wide) * module.lora_scale  # [out, in]
            sums = merged.to(wide) + delta
            if module.lora_magnitude_vector is not None:
                sums *= (module.lora_magnitude_vector.to(wide) / norms(sums))[:, None]
            merged.copy_(sums.to(merged.dtype))
            del module.lora_A, module.lora_B, module.lora_magnitude_vector
            del module.lora_scale, module.lora_dropout, module.lora_all_reduce
        if name in quantised:
            module.weight.data = rounded(module.weight.data)
        module.__class__ = Conv1D if isinstance(layer, Conv1D) else nn.Linear
    return math.sqrt(changed / norm) if norm else None
