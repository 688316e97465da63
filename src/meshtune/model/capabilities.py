"""List what works for a model: the facts that decide which layouts it can take, and the rows of `meshtune
env --model`.
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtune.errors import UserError
from meshtune.experts.routers import routers_of, routing_of
from meshtune.layout import Layout
from meshtune.model.anatomy import (
    Anatomy,
    StandIn,
    anatomy,
    attention_drops,
    attention_heads,
    draws_random_numbers,
    parts_kept,
    weight_shape,
)
from meshtune.model.documents import depends_on_length
from meshtune.model.load import on_meta
from meshtune.model.recorded import EXPERTS
from meshtune.model.tensor_plan import (
    TENSOR_STYLES,
    cuts_heads,
    fused_projections,
    repeated_heads,
    tensor_plan,
)
from meshtune.placement.families import see
from meshtune.placement.rules import Traits, refusals


class Capability(NamedTuple):
    """One row of `meshtune env --model`."""

    feature: str
    supported: bool
    why: str  # if supported, its extent or condition; else the reason and what to do instead


def capabilities(config: PretrainedConfig, *, trust_remote_code: bool = False) -> list[Capability]:
    """List what meshtune can do with a model of this configuration, from a build on meta (no weights).

    A model that can't be trained has one entry, with the reason.
    """
    model = on_meta(config, trust_remote_code=trust_remote_code)
    try:
        parts = anatomy(model)
    except UserError as error:
        return [Capability("training", False, str(error))]
    model_traits = traits(model)
    modes = f"none,{' attention,' * (not model_traits.attention)} selective, linear, full"
    return [
        Capability("training", True, f"{model_traits.name}: {model_traits.blocks} blocks"),
        *([Capability("text part", True, kept)] if (kept := parts_kept(model)) else []),
        _packing(model_traits, recurrent=bool(parts.mixers)),
        Capability("lora", True, f"all-linear adapts {_count_linears(model, parts)} matrices"),
        Capability("recompute", True, modes),
        _compile(model_traits),
        *_parallel_capabilities(model_traits),
    ]


def traits(model: PreTrainedModel) -> Traits:
    """Return what decides which layouts `model` can take, before it is sharded. Raises as `anatomy` does."""
    parts, plan = anatomy(model), tensor_plan(model)
    heads, kv_heads = attention_heads(model)
    blocks = model.get_submodule(parts.blocks)
    split = {} if isinstance(plan, str) else plan
    experts, apart = _experts(blocks)
    whole_heads = repeated_heads(model, split, kv_heads + 1) if split else frozenset()
    fused = fused_projections(model, split) if split else ()
    # The first block that has a path: some have an mlp, others a mixture of experts
    owners = {path: block for block in reversed([*blocks.children()]) for path, _ in block.named_modules()}
    return Traits(
        name=type(model).__name__,
        blocks=len(list(blocks.children())),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=weight_shape(model, parts.embed)[0],
        heads_cut=cuts_heads({path: TENSOR_STYLES[word] for path, word in split.items()}, parts),
        heads_fused=any(each.rows.startswith(f"{parts.attention}.") for each in fused),
        cuts=tuple(
            (weight_shape(owners[path], path)[dim], f"{('rows', 'columns')[dim]} of {path}")
            for path, word in split.items()
            if (dim := TENSOR_STYLES[word].dim) is not None and path not in whole_heads
        ),
        attention=parts.attention_problem,
        tensor=plan if isinstance(plan, str) else None,
        pipeline=_pipeline_problem(model, parts),
        context=None if parts.attention else "carries a state from token to token",
        experts=experts,
        apart=apart,
        tiles=_untileable(blocks, parts),
        interrupts=_interrupts(model, parts),
        draws=draws_random_numbers(blocks.modules()),
        routing=routing_of(model, routers_of(model, parts.blocks)),
        prompts=_prompts_problem(model, parts),
    )


def _experts(blocks: nn.Module) -> tuple[int, str | None]:
    """Return (number that divides the experts of each block that has some, why they can't be on several
    ranks); (0, None) without experts.

    Those can that transformers runs by `use_experts_implementation`: stacked weights, called with rows, the
    experts of each and their weights.
    """
    named = [module for path, module in blocks.named_modules() if EXPERTS.search(path)]
    stacked: list[Any] = [module for module in blocks.modules() if hasattr(module, "is_concatenated")]
    if not named and not stacked:
        return 0, None
    if not stacked:
        return 1, "has experts of its own kind, without transformers' use_experts_implementation"
    normed = any(vars(module).get("has_post_expert_norm") for module in stacked)
    why = "has a norm inside its experts, which all ranks would share" if normed else None
    return math.gcd(*(module.num_experts for module in stacked)), why


def _prompts_problem(model: PreTrainedModel, parts: Anatomy) -> str | None:
    """Return why two answers can't share a prompt that is computed once; None if they can."""
    if parts.mixers:
        return "has recurrent or convolutional layers"
    if any(map(depends_on_length, model.modules())):
        return "has rotary embeddings that depend on the length of a document"
    return None


def _untileable(blocks: nn.Module, parts: Anatomy) -> str | None:
    """Return why MLPs of blocks can't run on some tokens at a time, experts apart; None if they can."""
    if any(EXPERTS.search(path) for path, _ in blocks.named_modules()):
        return None
    if not parts.mlp or not all(parts.mlp in block._modules for block in blocks.children()):
        return "has no MLP that is a module of each block"
    if not parts.attention:
        return "has recurrent or convolutional layers"
    if len(inspect.signature(blocks.get_submodule(f"0.{parts.mlp}").forward).parameters) > 1:
        return "gives its MLPs more than hidden states"
    return None


def _interrupts(model: PreTrainedModel, parts: Anatomy) -> str | None:
    """Return why the compiler can't go through a block; None if it can."""
    if parts.mixers:
        return "has recurrent or convolutional layers, which get each document as a row"
    inside = [vars(module) for path in parts.attentions for module in model.get_submodule(path).modules()]
    if attention_drops(model):
        return "has dropout in its attention, which runs document by document"
    if any("v_head_dim" in own and own["v_head_dim"] != own.get("qk_head_dim") for own in inside):
        return "has values of another size than keys, so that attention runs document by document"
    if any(own.get("attn_logit_softcapping") for own in inside):
        return "has a softcap in its attention, which flex attention computes on GPUs"
    return None


class _SecondInput(Exception):
    """A block is given hidden states besides those of the block before."""


class _Recorder(StandIn):
    """Record the order of the calls, and what is given and returned; each returns other hidden states."""

    def __init__(self, replaced: nn.Module, name: str, calls: list[tuple[str, Tensor, Tensor]]) -> None:
        super().__init__(replaced)
        self.name, self.calls = name, calls

    def forward(self, hidden: Any, *others: Any, **named: Any) -> Any:
        for other in (*others, *named.values()):
            if isinstance(other, Tensor) and other.shape == hidden.shape:  # Zamba2's embeddings
                raise _SecondInput
        out = hidden * 1.5 + len(self.calls)
        self.calls.append((self.name, hidden.clone(), out.clone()))
        return out


def _pipeline_problem(model: PreTrainedModel, parts: Anatomy) -> str | None:
    """Return why a model's blocks can't run on several stages; None if they can.

    Between the stages only hidden states are sent: the body must hand each block the output of the one
    before, and its norm that of the last, once each and in this order, and return the norm's output. That is
    tried, with recorders in their places. What the body does before its first block (positions, a scale) runs
    on the first stage, and must need no parameter, since other stages run it too and discard the result.
    """
    probe, calls = copy.deepcopy(model), []
    problem = _shared_by_blocks(model.get_submodule(parts.blocks))
    blocks = [f"{parts.blocks}.{name}" for name, _ in model.get_submodule(parts.blocks).named_children()]
    order = [*blocks, *([parts.norm] if parts.norm else [])]
    for path in order:
        probe.set_submodule(path, _Recorder(probe.get_submodule(path), path, calls))
    probe.set_submodule(parts.embed, StandIn(probe.get_submodule(parts.embed)))
    for module in probe.modules():  # such as rotary frequencies; a table of positions must be seen, if used
        module._buffers |= {
            name: torch.ones_like(buffer, device="cpu")
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
    body: Any = probe.get_submodule(parts.body)
    hidden = torch.linspace(1, 2, 2 * probe.config.get_text_config().hidden_size).view(1, 2, -1)
    given = hidden.clone()
    try:
        positions = torch.arange(2)[None]
        with torch.no_grad():
            out = body(inputs_embeds=given, position_ids=positions, use_cache=False).last_hidden_state
        problem = problem or _broken_chain(calls, order, out)
        if problem is None and not torch.equal(given, hidden):
            problem = "changes its embeddings in place"
    except _SecondInput:
        problem = problem or "gives its blocks hidden states besides those of the block before"
    except Exception as error:  # each family fails in its own way without its modules
        problem = problem or f"needs more than hidden states between its blocks ({type(error).__name__})"
    if problem is None:
        return None
    return (
        f"pp: {type(model).__name__} {problem}, so they can't run on several ranks. What works for it: data "
        f"parallel (dp) and ZeRO (zero). {see('stages')}"
    )


def _shared_by_blocks(blocks: nn.Module) -> str | None:
    """Return which parameter is in two blocks: stages would each have a gradient of it; None: none is."""
    owners: dict[int, str] = {}
    for number, block in blocks.named_children():
        for name, parameter in block.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                return f"has blocks {owners[id(parameter)]} and {number} that share {name}"
    return None


def _broken_chain(
    calls: Sequence[tuple[str, Tensor, Tensor]], order: Sequence[str], out: Tensor
) -> str | None:
    """Return what a body does besides handing hidden states from module to module; None for nothing.

    calls: (module, input, output), in their order. order: the modules in that of the chain. out: the body's
    output.
    """
    names = [name for name, _, _ in calls]
    if names != list(order):
        extra = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        return f"runs {extra[0]} more than once" if extra else "does not run its blocks one after the other"
    if any(given.is_meta for _, given, _ in calls):
        return "needs parameters besides its embedding before its blocks (positions)"
    links = [*(given for _, given, _ in calls[1:]), out]
    if any(not torch.equal(made, taken) for (_, _, made), taken in zip(calls, links, strict=True)):
        return "changes hidden states between or after its blocks"
    return None


def auto_attention(model: PreTrainedModel, model_traits: Traits) -> str:
    """Return the implementation for model.attention=auto: ours if the family takes it, else transformers'."""
    return str(model.config.get_text_config()._attn_implementation) if model_traits.attention else "meshtune"


def _compile(model_traits: Traits) -> Capability:
    if model_traits.experts:
        return Capability("compile", False, refusals(model_traits, Layout(), compile=True)[0])
    why = "in every recompute mode"
    if model_traits.interrupts:
        why = f"with recompute none or attention: it {model_traits.interrupts}"
    return Capability("compile", True, f"train.compile=true compiles each block {why}")


def _packing(model_traits: Traits, *, recurrent: bool) -> Capability:
    if model_traits.attention is None:
        apart = "documents are kept apart inside the attention function"
        rows = "; recurrent layers get each as a row of its own" if recurrent else ""
        return Capability("packing", True, apart + rows)
    why = f"{model_traits.name} can't have meshtune's attention, which keeps documents apart"
    remedy = "set data.packing=false and model.attention=auto"
    return Capability("packing", False, f"{why}: {model_traits.attention}; {remedy}")


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
        attention = "eager" if model_traits.attention else "meshtune"
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
