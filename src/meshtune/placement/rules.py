"""Which layouts a model can take, and why not: arithmetic on a model's Traits, without torch.

    anatomy.traits(model) ─> Traits ─┐
                   Layout, settings ─┴─> refusals: every reason at once, each with the nearest that works

`meshtune env` and the tables of docs/parallelism.md ask `refusals` too, so they say what a run would.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshtune.layout import Layout
from meshtune.placement.share import stage_count
from meshtune.recomputation import RECOMPUTATIONS

ZERO_BUBBLE = ("zb", "zbv", "dualpipev")  # the backward of weights runs later than that of activations
ROUNDS = ("interleaved1f1b", "zb")  # micro-batches go round in equal groups


@dataclass(frozen=True)
class Traits:
    """What of a model decides which layouts it can take.

    heads_cut: whether tp gives each rank its own heads (else all compute all of them). cuts: what tp cuts
    evenly, as (size, name). attention: the family calls a registered attention function, so it can have
    ours. tensor and pipeline: why its matrices can't be cut, or its blocks run apart; None: they can.
    """

    name: str  # LlamaForCausalLM
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    heads_cut: bool = True
    cuts: tuple[tuple[int, str], ...] = ()
    attention: bool = True
    tensor: str | None = None
    pipeline: str | None = None


def refusals(
    traits: Traits,
    layout: Layout,
    *,
    attention: str = "meshtune",
    packing: bool = True,
    compile: bool = False,
    ranks: int | None = None,
) -> list[str]:
    """Every reason why a model can't be trained under a layout, as sentences with what works instead.

    attention: the implementation that the model is built with. packing, compile: the settings of that name.
    ranks: how many were started; None: as many as the layout wants.
    """
    return [
        *_ranks(layout, ranks),
        *_attention(traits, layout, attention, packing),
        *tensor_problems(traits, layout.tp),
        *_context(traits, layout),
        *_pipeline(traits, layout),
        *_compiled(layout, compile),
    ]


def _ranks(layout: Layout, ranks: int | None) -> Iterator[str]:
    if ranks is not None and ranks != layout.world:
        yield (
            f"Layout {layout} is for {layout.world} ranks, but {ranks} were started; start {layout.world} "
            f"(--nproc {layout.world}), or change the layout."
        )


def _attention(traits: Traits, layout: Layout, attention: str, packing: bool) -> Iterator[str]:
    """What needs our attention function, where the model has another."""
    if attention == "meshtune":
        if not traits.attention:
            yield (
                f"model.attention = meshtune: {traits.name} computes its attention inside the model; use "
                "model.attention=auto with data.packing=false."
            )
        return
    runs = f"the attention {attention} of {traits.name}"
    auto = "use model.attention=auto" if traits.attention else None
    if packing:
        remedy = auto or "set data.packing=false"
        yield f"data.packing = true: {runs} can't keep packed documents apart; {remedy}."
    if RECOMPUTATIONS[layout.recompute].attention_alone:
        yield f"recompute = {layout.recompute}: {runs} can't be recomputed by itself; use selective or full."
    if layout.cp > 1:
        remedy = auto or "leave cp out: dp, zero and pp work for it"
        yield f"cp={layout.cp}: {runs} sees the tokens of its own rank only; {remedy}."
    if layout.tp > 1 and auto:
        yield f"tp={layout.tp}: {runs} takes all heads and tokens to be here; {auto}."


def tensor_problems(traits: Traits, tp: int) -> Iterator[str]:
    """Why `tp` ranks can't share a model's matrices."""
    if tp == 1:
        return
    if traits.tensor:
        yield traits.tensor
        return
    near = max(n for n in range(1, tp + 1) if n == 1 or not any(_misfits(traits, n)))
    remedy = f"try tp={near}" if near > 1 else "leave tp out"
    yield from (f"{misfit}; {remedy}." for misfit in _misfits(traits, tp))


def _misfits(traits: Traits, tp: int) -> Iterator[str]:
    """What does not divide over `tp` ranks."""
    if traits.heads_cut:
        if traits.heads % tp:
            yield f"tp={tp} does not divide {traits.heads} attention heads"
        elif traits.kv_heads % tp and tp % traits.kv_heads:
            yield f"tp={tp} neither divides {traits.kv_heads} key-value heads nor is a multiple of them"
    yield from (f"tp={tp} does not divide the {size} {name}" for size, name in traits.cuts if size % tp)
    if -(-traits.vocabulary // tp) * (tp - 1) >= traits.vocabulary:
        yield f"tp={tp} leaves a rank without any of {traits.vocabulary} words"


def _context(traits: Traits, layout: Layout) -> Iterator[str]:
    """Ulysses gives each rank some of the heads; all-gather takes any number."""
    heads = traits.heads // layout.tp if traits.heads_cut else traits.heads
    if layout.cp == 1 or layout.cp_method != "ulysses" or not heads % layout.cp:
        return
    near = max(n for n in range(1, layout.cp) if heads % n == 0)
    remedy = f"try ulysses{near}, or cp{layout.cp}" if near > 1 else f"try cp{layout.cp}"
    each = f"each tensor-parallel rank's {heads}" if layout.tp > 1 else str(heads)
    yield f"ulysses{layout.cp} does not divide {each} attention heads; {remedy}, which takes any number."


def _pipeline(traits: Traits, layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    if traits.pipeline:
        yield traits.pipeline
        return
    stages = stage_count(layout)
    if stages > traits.blocks:
        near = traits.blocks * layout.pp // stages
        plain = stages > layout.pp <= traits.blocks  # one stage a rank would do
        remedy = f"try pp={near}" if near > 1 else "try 1f1b" if plain else "leave pp out"
        yield (
            f"pp={layout.pp} with {layout.schedule} makes {stages} stages of {traits.blocks} blocks, and "
            f"each needs at least one; {remedy}."
        )
    steps = layout.gradient_accumulation_steps
    if not _runs(layout, steps):
        near = min(
            (n for n in range(1, 2 * (steps + stages)) if _runs(layout, n)), key=lambda n: abs(n - steps)
        )
        yield (
            f"The schedule {layout.schedule} with pp={layout.pp} can't run {steps} micro-batches a step; "
            f"try ga={near}, or gpipe, which takes any number."
        )
    if layout.schedule in ZERO_BUBBLE and layout.zero >= 2:
        yield (
            f"The schedule {layout.schedule} with ZeRO-{layout.zero}: it computes the gradients of weights "
            "later, when they may have been let go, and they would be wrong; use zero1 with it, or 1f1b."
        )
    if layout.schedule in ZERO_BUBBLE and RECOMPUTATIONS[layout.recompute].by_operation:
        yield (
            f"The schedule {layout.schedule} with recompute {layout.recompute}: it goes through the backward "
            "twice, and torch's selective recomputation allows that once; use full or attention, or 1f1b."
        )


def _runs(layout: Layout, micro_batches: int) -> bool:
    """Whether a schedule of torch.distributed.pipelining takes so many micro-batches a step."""
    if layout.schedule == "1f1b":
        return micro_batches >= layout.pp
    if layout.schedule == "dualpipev":
        return micro_batches >= stage_count(layout)
    if layout.schedule in ROUNDS:
        return micro_batches % max(1, micro_batches // layout.pp) == 0
    return True


def _compiled(layout: Layout, compile: bool) -> Iterator[str]:
    cut = [f"{axis}={getattr(layout, axis)}" for axis in ("tp", "cp", "pp") if getattr(layout, axis) > 1]
    if compile and cut:
        yield (
            f"train.compile = true with {', '.join(cut)}: only whole blocks are compiled, alone or "
            "under data parallelism (dp, zero); leave train.compile out."
        )
