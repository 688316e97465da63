"""Which layouts a model can't be trained under, and why: each reason once, as a `Rule`.

    Traits, settings ──> rules ─┬─> refuses(columns): which of tens of thousands of layouts, for a search
                                └─> sentence(layout): why one can't be, with what works, in `refusals`

model/capabilities.py makes the Traits. A run, `meshtune env`, `meshtune plan explain` and the tables of
docs/parallelism.md ask `refusals`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from meshtune.layout import ZERO_BUBBLE, Layout
from meshtune.optimizers import OPTIMIZERS
from meshtune.placement.columns import Columns, Number
from meshtune.placement.experts import BalanceSpec, RouterTraits, balance_rules, expert_rules
from meshtune.placement.families import see
from meshtune.precision import SCALE_BLOCK
from meshtune.units import counted

ROUNDS = ("interleaved1f1b", "zb")  # the pipeline takes micro-batches in rounds of equal numbers


@dataclass(frozen=True)
class Traits:
    """The facts of a model that decide which layouts it can take."""

    name: str  # LlamaForCausalLM
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    heads_cut: bool = True  # tp shards the heads; False: every rank computes all of them, but `heads_fused`
    cuts: tuple[tuple[int, str], ...] = ()  # (size, name) of each dimension that tp must divide
    attention: str | None = None  # why it can't have meshtune's attention, "it …"; None: it can
    tensor: str | None = None  # why its matrices can't be cut; None: they can
    pipeline: str | None = None  # why its blocks can't run apart; None: they can
    context: str | None = None  # why a sequence can't be on several ranks, "carries …"; None: it can
    heads_fused: bool = False  # their projections are one matrix: tp shards them if it divides both numbers
    experts: int = 0  # that a block's tokens are sent to, split by `ep`; 0: none
    apart: str | None = None  # why its experts can't be on several ranks, "has …"; None: they can
    tiles: str | None = None  # why its MLPs can't run in tiles, "has …"; None: they can
    interrupts: str | None = None  # why the compiler can't go through a block, "has …"; None: it can
    draws: bool = False  # blocks draw random numbers in training
    routing: RouterTraits | None = None  # of its routers; None: it has none that transformers records
    prompts: str | None = None  # why two answers can't share a prompt, "has …"; None: they can

    def with_adapters(self, dropout: float) -> "Traits":
        """The same of a model whose adapters drop a share of their inputs."""
        return replace(self, draws=self.draws or dropout > 0)


UNCOMPILED = "The blocks run uncompiled: {}."  # with why


class Rule(NamedTuple):
    """One reason why a model can't be trained under some layouts."""

    reason: str  # without the numbers of a layout: a search counts layouts by it
    refuses: Callable[[Columns], Number]  # mask of the layouts that it refuses
    sentence: Callable[[Layout], str]  # reason and remedy for one layout that it refuses


def rules(
    traits: Traits,
    *,
    attention: str = "meshtune",
    packing: bool | str = True,
    shared_prompts: bool = False,
    compile: bool | str = False,
    optimizer: str = "adamw",
    step_in_backward: bool = False,
    tiled: bool = False,
    quantised: bool = False,
    fp8: bool = False,
    balance: BalanceSpec | None = None,
    ranks: int | None = None,
) -> Iterator[Rule]:
    """Every rule that a model and settings make; `Rule.refuses` tells which layouts it refuses.

    attention: the implementation that the model is built with, never "auto". packing, shared_prompts: of
    data. compile: train.compile; "auto" refuses nothing. optimizer, step_in_backward: of train. tiled: MLPs
    run in tiles (train.mlp_tile). quantised: matrices are held in 4 bits. fp8: matmuls are in 8-bit floats.
    balance: of the loads of experts; None: another program's.
    ranks: how many were started; None: no rule on their number.
    """
    if ranks is not None:
        yield Rule(
            "another number of ranks",
            lambda layouts: layouts.world != ranks,
            lambda layout: (
                f"Layout {layout} is for {counted(layout.world, 'rank')}, but {ranks} "
                f"{'was' if ranks == 1 else 'were'} started; start {layout.world} (--nproc "
                f"{layout.world}), or change the layout."
            ),
        )
    yield from _attention(traits, attention, packing)
    if shared_prompts and traits.prompts:
        why = f"{traits.name} {traits.prompts}, so that an answer can't have the prompt of another"
        yield Rule(
            why,
            lambda layouts: layouts.world > 0,
            lambda _: f"data.shared_prompts = true: {why}; leave it out.",
        )
    moments = "of their moments in 8 bits" if OPTIMIZERS[optimizer].in_blocks else ""
    yield from _tensor(traits, "in 4 bits" if quantised else moments)
    if traits.context:
        yield _whole_sequences(traits, traits.context)
    else:
        yield _ulysses(traits)
    yield from starmap(Rule, expert_rules(traits, in_backward=step_in_backward))
    if balance:
        yield from starmap(Rule, balance_rules(traits.name, traits.routing, balance))
    yield from _pipeline(traits)
    yield _every_block(traits)
    yield _inputs_that_stay(traits)
    if fp8:
        yield from _fp8(traits, compile, tiled)
    elif compile is True:
        yield from compile_rules(traits, tiled=tiled)
    if not OPTIMIZERS[optimizer].by_element:
        yield _whole_tensors(optimizer)
    if step_in_backward:
        yield from _IN_BACKWARD
    if tiled:
        yield from _tiles(traits)


def refusals(traits: Traits, layout: Layout, **settings: Any) -> list[str]:
    """Every reason why a model can't be trained under a layout, as sentences with what works instead.

    Empty: it can be trained. settings: those of `rules`.
    """
    return sentences(rules(traits, **settings), layout)


def tensor_problems(traits: Traits, tp: int) -> list[str]:
    """Sentences on why `tp` ranks can't share a model's matrices and vocabulary; empty: they can."""
    return sentences(_tensor(traits), Layout(tp=tp))


def sentences(every: Iterable[Rule], layout: Layout) -> list[str]:
    """Sentences of those rules in `every` that refuse the layout; none: they allow it."""
    row = Columns.of([layout])
    return [rule.sentence(layout) for rule in every if np.all(rule.refuses(row))]


def _nearest(every: Sequence[Rule], layout: Layout, field: str, values: Iterable[int]) -> int | None:
    """The value of `field`, of `values`, with which no rule in `every` refuses the layout; None: none.

    The other fields stay. It is the one nearest to the layout's own value; of two as near, the first.
    """
    tried = np.array([*values], dtype=float)
    columns = Columns.of([layout]).replace(**{field: tried})
    refused = np.any([np.broadcast_to(rule.refuses(columns), tried.shape) for rule in every], axis=0)
    wanted = getattr(layout, field)
    return min((int(value) for value in tried[~refused]), key=lambda value: abs(value - wanted), default=None)


def _attention(traits: Traits, attention: str, packing: bool | str) -> Iterator[Rule]:
    """Rules on the attention implementation, `attention`.

    "meshtune": one rule, against every layout, for a model that computes attention inside itself. Another:
    rules against packing (every layout), recompute=attention, cp and, where meshtune's would work, tp.
    """

    def everywhere(layouts: Columns) -> Number:
        return layouts.world > 0

    if attention == "meshtune":
        if traits.attention:
            yield Rule(
                f"{traits.name} can't have meshtune's attention: {traits.attention}",
                everywhere,
                lambda _: (
                    f"model.attention = meshtune: {traits.name} can't have it: {traits.attention}; use "
                    f"model.attention=auto with data.packing=false. {see('attention')}"
                ),
            )
        return
    other = f"the attention {attention} of {traits.name}"
    why = f" (it can't have meshtune's: {traits.attention})" if traits.attention else ""
    auto = None if traits.attention else "use model.attention=auto"
    more = f" {see('attention')}" if traits.attention else ""
    if packing:
        setting, remedy = "data.packing = true", "set data.packing=false"
        if isinstance(packing, str):
            setting, remedy = packing, "train another model"
        yield Rule(
            f"{other} can't keep packed documents apart (data.packing=false)",
            everywhere,
            lambda _: f"{setting}: {other} can't keep packed documents apart{why}; {auto or remedy}.{more}",
        )
    yield Rule(
        f"{other} can't be recomputed separately",
        lambda layouts: layouts.recomputation("attention_alone"),
        lambda layout: (
            f"recompute = {layout.recompute}: {other} can't be recomputed separately; use selective or full."
        ),
    )
    yield Rule(
        f"{other} sees the tokens of its own rank only, so no cp",
        lambda layouts: layouts.cp > 1,
        lambda layout: (
            f"cp={layout.cp}: {other} sees the tokens of its own rank only; "
            f"{auto or _without_cp(traits)}.{more}"
        ),
    )
    if auto:
        yield Rule(
            f"{other} needs all heads and tokens on one rank, so no tp",
            lambda layouts: layouts.tp > 1,
            lambda layout: f"tp={layout.tp}: {other} needs all heads and tokens on one rank; {auto}.",
        )


def _tensor(traits: Traits, scaled: str = "") -> list[Rule]:
    """Sizes of tp that the model's matrices and heads can't be cut into.

    scaled: words for what has a scale for SCALE_BLOCK columns, which a rank holds whole; "": nothing has.
    """
    if traits.tensor:
        why = traits.tensor
        return [Rule(why, lambda layouts: layouts.tp > 1, lambda _: why)]
    every: list[Rule] = []

    def add(what: str, misfits: Callable[[Number], Number], why: str | None = None) -> None:
        """Append a rule to `every`.

        what: the reason after "tp". misfits: True for a size of tp that the rule refuses; tp 1 never is. why:
        what the sentence says after "tp=2"; None: `what`.
        """

        def sentence(layout: Layout) -> str:
            near = _nearest(every, layout, "tp", range(2, layout.tp))
            remedy = f"try tp={near}" if near else "leave tp out"
            return f"tp={layout.tp} {why or what}; {remedy}."

        every.append(Rule(f"tp {what}", lambda layouts: (layouts.tp > 1) & misfits(layouts.tp), sentence))

    heads, kv_heads, vocabulary = traits.heads, traits.kv_heads, traits.vocabulary
    if traits.heads_cut:
        add(
            f"does not divide the {heads} attention heads",
            lambda tp: heads % tp != 0,
            why=f"does not divide {heads} attention heads",
        )
        add(
            f"neither divides the {kv_heads} key-value heads nor is a multiple of them",
            lambda tp: (heads % tp == 0) & (kv_heads % tp != 0) & (tp % kv_heads != 0),
            why=f"neither divides {kv_heads} key-value heads nor is a multiple of them",
        )
    for size, name in traits.cuts:
        add(f"does not divide the {size} {name}", lambda tp, size=size: size % tp != 0)
        if scaled and name.startswith("columns") and size % SCALE_BLOCK == 0:
            add(
                f"cuts the {size} {name} inside a block of {SCALE_BLOCK}, which shares a scale {scaled}",
                lambda tp, size=size: (size % tp == 0) & (size // SCALE_BLOCK % tp != 0),
            )
    add(
        f"leaves a rank without any of the {vocabulary} vocabulary entries",
        lambda tp: np.ceil(vocabulary / tp) * (tp - 1) >= vocabulary,
    )
    return every


def _whole_sequences(traits: Traits, why: str) -> Rule:
    """Context parallelism cuts sequences, which not every model can have."""
    return Rule(
        f"{traits.name} {why}, so no cp",
        lambda layouts: layouts.cp > 1,
        lambda layout: (
            f"cp={layout.cp}: {traits.name} {why}, so a rank can't have a part of a sequence; "
            f"{_without_cp(traits)}. {see('context')}"
        ),
    )


def _without_cp(traits: Traits) -> str:
    return f"leave cp out: dp{' and zero' if traits.pipeline else ', zero and pp'} work for it"


def _ulysses(traits: Traits) -> Rule:
    """Ulysses gives each rank some of the heads; all-gather takes any number."""

    def of_rank(tp: Number) -> Number:
        divides = (traits.heads % tp == 0) & (traits.kv_heads % tp == 0)
        cut = traits.heads_cut | (traits.heads_fused & divides)
        return np.where(cut, np.floor(traits.heads / tp), traits.heads)

    def refuses(layouts: Columns) -> Number:
        return (layouts.cp > 1) & layouts.ulysses & (of_rank(layouts.tp) % layouts.cp != 0)

    def sentence(layout: Layout) -> str:
        near = _nearest([rule], layout, "cp", range(2, layout.cp))
        remedy = f"try ulysses{near}, or cp{layout.cp}" if near else f"try cp{layout.cp}"
        heads = int(of_rank(layout.tp))
        which = f"each tensor-parallel rank's {heads}" if layout.tp > 1 else str(heads)
        return (
            f"ulysses{layout.cp} does not divide {which} attention heads; {remedy}, which takes any number."
        )

    reason = f"ulysses does not divide a tensor-parallel rank's part of the {traits.heads} attention heads"
    rule = Rule(reason, refuses, sentence)
    return rule


def _pipeline(traits: Traits) -> Iterator[Rule]:
    if traits.pipeline:
        why = traits.pipeline
        yield Rule(why, lambda layouts: layouts.pp > 1, lambda _: why)
        return

    def stages(layout: Layout) -> str:
        count = layout.stages
        near = traits.blocks * layout.pp // count
        plain = count > layout.pp <= traits.blocks  # one stage a rank would do
        remedy = f"try pp={near}" if near > 1 else "try 1f1b" if plain else "leave pp out"
        return (
            f"pp={layout.pp} with {layout.schedule} makes {count} stages of {traits.blocks} blocks, and "
            f"each needs at least one; {remedy}."
        )

    yield Rule(
        f"more stages than the {traits.blocks} blocks",
        lambda layouts: (layouts.pp > 1) & (layouts.pp * layouts.virtual_stages > traits.blocks),
        stages,
    )
    yield from _MICRO_BATCHES
    yield Rule(
        "zero-bubble schedules can't run with ZeRO-2 or -3",
        lambda layouts: layouts.runs(*ZERO_BUBBLE) & (layouts.zero >= 2),
        lambda layout: (
            f"The schedule {layout.schedule} with ZeRO-{layout.zero}: it computes the gradients of weights "
            "later, when they may have been freed, and they would be wrong; use zero1 with it, or 1f1b."
        ),
    )
    yield Rule(
        "zero-bubble schedules would recompute each block several times",
        lambda layouts: layouts.runs(*ZERO_BUBBLE) & layouts.recomputation("block"),
        lambda layout: (
            f"The schedule {layout.schedule} with recompute {layout.recomputation}: it goes through a "
            "block's backward once for its input and again for each group of its weights, and would run the "
            "block's forward every time; use attention or none, or 1f1b."
        ),
    )
    yield Rule(
        "zero-bubble schedules would gather the inputs of sp twice more",
        lambda layouts: layouts.runs(*ZERO_BUBBLE) & (layouts.sp_regather > 0),
        lambda layout: (
            f"The schedule {layout.schedule} with regather: it goes through a block's backward once for its "
            "input and again for its weights, and would gather the same tokens each time; drop regather, or "
            "use 1f1b."
        ),
    )


def _every_block(traits: Traits) -> Rule:
    """Return the rule that refuses a number of recomputed blocks that covers an average stage."""

    def sentence(layout: Layout) -> str:
        of_stage = traits.blocks / layout.stages
        fewer = math.ceil(of_stage) - 1
        remedy = f"or {layout.recompute}{fewer} or less" if fewer else "which says the same"
        return (
            f"{layout.recomputation} recomputes every block: "
            f"{counted(traits.blocks, 'block')} in {counted(layout.stages, 'stage')} are {of_stage:.3g} a "
            f"stage; write {layout.recompute}, {remedy}."
        )

    return Rule(
        "a number of recomputed blocks that covers a stage",
        lambda layouts: (
            np.isfinite(layouts.recompute_blocks)
            & (layouts.recompute_blocks * layouts.pp * layouts.virtual_stages >= traits.blocks)
        ),
        sentence,
    )


def _inputs_that_stay(traits: Traits) -> Rule:
    """Return the rule that refuses to offload where no input of a mean stage would leave its GPU."""

    def recomputing(layouts: Columns) -> Number:
        return np.minimum(layouts.recompute_blocks, traits.blocks / (layouts.pp * layouts.virtual_stages))

    return Rule(
        "nothing to offload: the input of a stage's last block stays on the GPU",
        lambda layouts: layouts.recomputation("host") & (recomputing(layouts) < 2),
        lambda layout: (
            f"recompute {layout.recomputation}: a stage keeps the input of its last recomputed block on the "
            f"GPU, and has {recomputing(Columns.of([layout]))[0]:.3g} of them, so that none would move; use "
            f"full{', fewer stages' * (layout.pp > 1)} or offload of 2 blocks or more."
        ),
    )


# What the schedules of torch.distributed.pipelining take.


def _too_few(layouts: Columns) -> Number:
    micro_batches = layouts.gradient_accumulation_steps
    few = layouts.runs("1f1b") & (micro_batches < layouts.pp)
    return few | (layouts.runs("dualpipev") & (micro_batches < layouts.pp * layouts.virtual_stages))


def _uneven_rounds(layouts: Columns) -> Number:
    micro_batches = layouts.gradient_accumulation_steps
    return layouts.runs(*ROUNDS) & (micro_batches % np.maximum(1, np.floor(micro_batches / layouts.pp)) != 0)


def _micro_batches(layout: Layout) -> str:
    steps = layout.gradient_accumulation_steps
    most = 2 * (steps + layout.stages)
    near = _nearest(_MICRO_BATCHES, layout, "gradient_accumulation_steps", range(1, most))
    return (
        f"The schedule {layout.schedule} with pp={layout.pp} can't run {steps} micro-batches a step; "
        f"try ga={near}, or gpipe, which takes any number."
    )


_MICRO_BATCHES = (
    Rule("fewer micro-batches than the schedule needs", _too_few, _micro_batches),
    Rule("the micro-batches do not make equal rounds of the pipeline", _uneven_rounds, _micro_batches),
)


def _whole_tensors(optimizer: str) -> Rule:
    """Return the rule of an optimizer whose update of a tensor reads all of it."""
    *others, last = (name for name, row in OPTIMIZERS.items() if row.by_element)
    return Rule(
        f"{optimizer} needs whole tensors",
        lambda layouts: (layouts.zero > 0) | (layouts.tp > 1) | (layouts.ep > 1),
        lambda layout: (
            f"train.optimizer = {optimizer} updates a matrix by its whole rows and columns, which {layout} "
            f"splits over ranks; use dp, pp or cp, or train.optimizer={', '.join(others)} or {last}."
        ),
    )


_IN_BACKWARD = (
    Rule(
        "train.step_in_backward needs one micro-batch a step",
        lambda layouts: (layouts.gradient_accumulation_steps > 1) | (layouts.pp > 1),
        lambda layout: (
            f"train.step_in_backward = true with {layout}: a gradient is complete once all micro-batches "
            f"have added to it, and {'a pipeline has' if layout.pp > 1 else 'a step has'} several; "
            f"use ga1{' without pp' * (layout.pp > 1)}, or leave train.step_in_backward out."
        ),
    ),
    Rule(
        "train.step_in_backward saves nothing in replicas of ZeRO shards",
        lambda layouts: (layouts.zero > 0) & (layouts.dp_replicate > 1),
        lambda layout: (
            f"train.step_in_backward = true with {layout}: where dp{layout.dp_replicate} all-reduces ZeRO's "
            "shards, FSDP2 keeps every gradient until the backward ends, and nothing would be saved; use "
            f"zero{layout.zero} over all data ranks, or dp, or leave train.step_in_backward out."
        ),
    ),
)


def _tiles(traits: Traits) -> Iterator[Rule]:
    """Rules on MLPs that run in tiles."""
    if why := traits.tiles or ("sends tokens to experts" if traits.experts else ""):
        why = f"{traits.name} {why}"
        yield Rule(
            f"no tiles of the MLP: {why}",
            lambda layouts: layouts.world > 0,
            lambda _: f"train.mlp_tile: {why}, so it can't run on a part of the tokens; leave it out.",
        )
    yield Rule(
        "zero-bubble schedules would run each tile of an MLP twice more",
        lambda layouts: layouts.runs(*ZERO_BUBBLE),
        lambda layout: (
            f"train.mlp_tile with the schedule {layout.schedule}: it computes the gradients of weights "
            "later, when a tile's tensors are gone; use 1f1b, or leave train.mlp_tile out."
        ),
    )
    if traits.draws:
        yield Rule(
            f"dropout in the blocks of {traits.name} can't be repeated in tiles with tp",
            lambda layouts: layouts.tp > 1,
            lambda layout: (
                f"train.mlp_tile with tp={layout.tp}: {traits.name} has dropout in its blocks, whose masks "
                "all ranks draw from one number a block, not a tile; use tp=1, a dropout of 0, or leave "
                "train.mlp_tile out."
            ),
        )


def _fp8(traits: Traits, compile: bool | str, tiled: bool) -> Iterator[Rule]:
    """Rules on matmuls in 8-bit floats: casts are only fast where a compiled block fuses them."""
    why = "Matmuls in 8-bit floats need compiled blocks: uncompiled, casts take longer than 8 bits save"
    if compile is False:
        yield Rule(
            "fp8 needs compiled blocks",
            lambda layouts: layouts.world > 0,
            lambda _: f"{why}; leave train.compile out, or use train.precision=bf16.",
        )
    for rule in compile_rules(traits, tiled=tiled):
        yield Rule(
            f"fp8 needs compiled blocks: {rule.reason}",
            rule.refuses,
            lambda _, reason=rule.reason: (
                f"{why}. Here {reason}; use train.precision=bf16, or a layout whose blocks can be compiled."
            ),
        )


def compiles(
    setting: bool | str, traits: Traits, layouts: Columns, *, processor: bool, tiled: bool = False
) -> Number:
    """Mask of the layouts whose blocks are compiled under train.compile = `setting`: with "auto" those that
    no rule refuses, on GPUs. processor: the ranks run on one. tiled: as in `rules`.
    """
    compiled = np.full(np.shape(layouts.tp), setting is True or (setting == "auto" and not processor))
    for rule in compile_rules(traits, tiled=tiled) if setting == "auto" else ():
        compiled = compiled & ~rule.refuses(layouts)
    return compiled


def uncompiled(
    setting: bool | str, traits: Traits, layout: Layout, *, processor: bool, tiled: bool = False
) -> str:
    """Why blocks run uncompiled on a GPU though `setting` leaves it open, in a clause; "": they don't."""
    row = Columns.of([layout])
    rules = compile_rules(traits, tiled=tiled) if setting == "auto" and not processor else ()
    return next((rule.reason for rule in rules if np.all(rule.refuses(row))), "")


def compile_rules(traits: Traits, *, tiled: bool = False) -> Iterator[Rule]:
    """Rules on what torch.compile can't make whole graphs of. tiled: as in `rules`."""
    without = "or leave train.compile out"
    if tiled:
        yield Rule(
            "tiles of the MLP can't be compiled",
            lambda layouts: layouts.world > 0,
            lambda _: (
                "train.compile = true with train.mlp_tile: each tile's backward runs inside that of the "
                f"block, which the compiler can't go through; leave train.mlp_tile out, {without}."
            ),
        )
    if traits.experts:
        yield Rule(
            "mixtures of experts can't be compiled",
            lambda layouts: layouts.world > 0,
            lambda _: (
                f"train.compile = true: {traits.name} sends other numbers of tokens to its experts in each "
                "step, which interrupts the compiler; leave train.compile out."
            ),
        )
    yield Rule(
        "zero-bubble schedules can't run compiled blocks",
        lambda layouts: layouts.runs(*ZERO_BUBBLE),
        lambda layout: (
            f"train.compile = true with the schedule {layout.schedule}: torch can't compute the gradients of "
            f"weights later in compiled blocks; use 1f1b, {without}."
        ),
    )
    yield Rule(
        "regather can't be compiled",
        lambda layouts: layouts.sp_regather > 0,
        lambda _: (
            "train.compile = true with regather: it changes what autograd saves inside a block, which the "
            f"compiler can't go through; drop regather, {without}."
        ),
    )
    if traits.interrupts:
        why = traits.interrupts
        yield Rule(
            f"{traits.name} {why}: blocks that are recomputed can't be compiled",
            lambda layouts: layouts.recomputation("block"),
            lambda layout: (
                f"train.compile = true with recompute {layout.recomputation}: {traits.name} {why}, which "
                "interrupts the compiler, and torch's checkpoint then runs the whole block uncompiled; use "
                f"none or attention, {without}."
            ),
        )
    if traits.draws:
        yield Rule(
            f"dropout in the blocks of {traits.name} can't be compiled with tp",
            lambda layouts: layouts.tp > 1,
            lambda layout: (
                f"train.compile = true with tp={layout.tp}: {traits.name} has dropout in its blocks, whose "
                "masks all ranks draw from one number, which the compiler can't go through; use tp=1, a "
                f"dropout of 0, {without}."
            ),
        )
