"""Layouts that a tool can't run, or would run as another layout, which is planned itself.

The planner refuses by these rules before it ranks, an export before it writes. Settings that a tool can't
have are in differences.toml.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from meshtune.config import Config
from meshtune.layout import AXES, SCHEDULES, V_SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.placement.columns import Columns, Number
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.tools.planned import kinds_of_rows

# The export to every tool writes these or refuses them itself. Anything else is refused for all, so that none
# can leave out what it doesn't know.
EXPORTED_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPORTED_RECOMPUTATIONS = ("none", "attention", "selective", "full")
LOOPED = (*VIRTUAL_SCHEDULES, *V_SCHEDULES)  # that torchtitan runs with several stages a rank
ENDS = 2  # layers that embedding and head count as, one each, when torchtitan cuts stages


def rules_of(name: str, config: Config, blocks: int, seq_len: int) -> Iterator[Rule]:
    """Every rule on the layouts that a tool runs. blocks: of the model. seq_len: in tokens."""
    tool = TOOLS[name].title
    match name:
        case "accelerate":
            yield from fsdp_rules(tool)
            yield selective(tool, "recomputes whole blocks or nothing")
        case "axolotl":
            yield from fsdp_rules(tool)
            yield from axolotl_rules(tool, config)
        case "deepspeed":
            yield from engine_rules(tool)
            yield from ulysses_rules(tool)
        case "llamafactory":
            yield from engine_rules(tool)
            yield from llama_factory_rules(tool, config)
        case "megatron":
            yield from megatron_rules(tool, config, seq_len)
            yield from pipeline_rules(tool, blocks)
        case "torchtitan":
            yield from torchtitan_rules(tool)
            yield stages_rule(tool, blocks)
            yield pieces_rule(tool, seq_len)
    yield from unknown_fields(tool)


def rule(title: str, refuses: Callable[[Columns], Number], advice: Callable[[Layout], str]) -> Rule:
    """A rule with the sentence `title; advice.`; advice: what to do instead of one layout that it refuses."""
    return Rule(title, refuses, lambda layout: f"{title}; {advice(layout)}.")


def unknown_fields(tool: str) -> Iterator[Rule]:
    """Rules on axes and recomputation modes that no export writes."""
    for axis in AXES:
        if axis not in EXPORTED_AXES:
            yield rule(
                f"{axis} can't be exported to {tool}",
                lambda layouts, axis=axis: getattr(layouts, axis) > 1,
                lambda layout, axis=axis: f"choose a layout without {axis}={getattr(layout, axis)}",
            )
    *others, last = EXPORTED_RECOMPUTATIONS
    yield rule(
        "recomputation that only meshtune runs",
        lambda layouts: ~np.any([layouts.recomputes(name) for name in EXPORTED_RECOMPUTATIONS], axis=0),
        lambda layout: f"instead of recompute={layout.recompute} use {', '.join(others)} or {last}",
    )


def zero1(tool: str) -> Rule:
    return rule(
        f"{tool}'s FSDP has no ZeRO-1",
        lambda layouts: layouts.zero == 1,
        lambda layout: (
            f"write zero2x{layout.dp_shard}, which needs less memory and reduces gradients once per "
            "micro-batch, or use deepspeed"
        ),
    )


def sequence_parallelism(tool: str) -> Rule:
    """Sequence parallelism of the tensor-parallel ranks, which the tp of transformers and DeepSpeed lacks."""
    return rule(
        f"{tool} splits no sequences over tensor-parallel ranks",
        lambda layouts: layouts.sp > 0,
        lambda layout: f"write tp{layout.tp} without sp{' and regather' if layout.sp_regather else ''}",
    )


def parts_of_blocks(tool: str) -> Iterator[Rule]:
    """Recomputation of the attention core, or of whole blocks in some blocks only."""
    yield rule(
        f"{tool} can't recompute the attention core only",
        lambda layouts: layouts.recomputes("attention"),
        lambda layout: f"fused kernels never keep the scores, so write {replace(layout, recompute='none')}",
    )
    yield rule(
        f"{tool} recomputes in every block or in none",
        lambda layouts: np.isfinite(layouts.recompute_blocks),
        lambda layout: f"write {replace(layout, recompute_blocks=None)}",
    )


def selective(tool: str, why: str) -> Rule:
    """Selective recomputation. why: a clause on what the tool has instead."""
    return rule(
        f"{tool} {why}, so no selective recomputation",
        lambda layouts: layouts.recomputes("selective"),
        lambda _: "write full or none instead of selective",
    )


def one_sequence(title: str, refuses: Callable[[Columns], Number]) -> Rule:
    """Micro-batches of several sequences, where the tool takes one."""
    return rule(
        title,
        refuses,
        lambda layout: (
            f"write mb1-ga{layout.micro_batch_size * layout.gradient_accumulation_steps} instead of "
            f"mb{layout.micro_batch_size}-ga{layout.gradient_accumulation_steps}"
        ),
    )


def fsdp_rules(tool: str) -> Iterator[Rule]:
    """Rules on layouts that accelerate's FSDP2 can't run, whichever tool starts it."""
    yield rule(
        f"{tool} trains without pipeline parallelism",
        lambda layouts: layouts.pp > 1,
        lambda layout: (
            f"pp{layout.pp} needs torchtitan or megatron, or a layout such as "
            f"zero3x{layout.dp_shard * layout.pp}"
        ),
    )
    yield rule(
        f"{tool}'s context parallelism with FSDP gathers keys and values, so no ulysses",
        lambda layouts: (layouts.cp > 1) & layouts.ulysses,
        lambda layout: f"for ulysses{layout.cp} use deepspeed, or plan cp{layout.cp}",
    )
    yield rule(
        f"{tool} combines tp and cp only with sharded data parallelism",
        lambda layouts: (layouts.dp_replicate > 1) & (layouts.dp_shard == 1) & (layouts.tp * layouts.cp > 1),
        lambda layout: f"write zero3x{layout.dp_replicate} instead of dp{layout.dp_replicate}",
    )
    yield zero1(tool)
    yield sequence_parallelism(tool)
    yield from parts_of_blocks(tool)


def axolotl_rules(tool: str, config: Config) -> Iterator[Rule]:
    if config.data.packing:
        yield one_sequence(
            f"{tool} packs under context parallelism with one sequence per micro-batch",
            lambda layouts: (layouts.cp > 1) & (layouts.micro_batch_size > 1),
        )
    if config.train.precision == "fp32":
        yield rule(
            f"{tool}'s context parallelism is ring flash attention, which has no fp32",
            lambda layouts: layouts.cp > 1,
            lambda _: "set train.precision=bf16",
        )


def engine_rules(tool: str) -> Iterator[Rule]:
    """Rules on layouts that DeepSpeed's engine can't run, whichever tool starts it, but for those on cp."""
    yield rule(
        f"{tool} pipelines models written as its PipelineModule, not Hugging Face models",
        lambda layouts: layouts.pp > 1,
        lambda layout: (
            f"for pp{layout.pp} use torchtitan or megatron, or a layout such as "
            f"zero3x{layout.dp_shard * layout.pp}"
        ),
    )
    yield rule(
        f"{tool} shards over all data ranks",
        lambda layouts: (layouts.dp_replicate > 1) & (layouts.dp_shard > 1),
        lambda layout: (
            f"write zero{layout.zero}x{layout.data_ranks} instead of "
            f"dp{layout.dp_replicate}-zero{layout.zero}x{layout.dp_shard}"
        ),
    )
    yield sequence_parallelism(tool)
    yield from parts_of_blocks(tool)
    yield selective(tool, "recomputes whole blocks or nothing")


def ulysses_rules(tool: str) -> Iterator[Rule]:
    yield rule(
        f"{tool}'s context parallelism is Ulysses",
        lambda layouts: (layouts.cp > 1) & ~layouts.ulysses,
        lambda layout: f"for cp{layout.cp} use accelerate or torchtitan, or plan ulysses{layout.cp}",
    )
    yield rule(
        f"{tool} runs Ulysses or AutoTP, not both",
        lambda layouts: (layouts.cp > 1) & (layouts.tp > 1),
        lambda layout: f"drop ulysses{layout.cp} or tp{layout.tp}",
    )


def llama_factory_rules(tool: str, config: Config) -> Iterator[Rule]:
    yield rule(
        f"{tool}'s trainer has no context parallelism",
        lambda layouts: layouts.cp > 1,
        lambda layout: (
            f"for {'ulysses' if layout.cp_method == 'ulysses' else 'cp'}{layout.cp} use accelerate "
            "or deepspeed"
        ),
    )
    if config.train.precision == "bf16-pure":
        yield rule(
            f"{tool} has no pure_bf16 under DeepSpeed",
            lambda layouts: (layouts.zero > 0) | (layouts.tp > 1),
            lambda _: "set train.precision=bf16, or plan plain data parallelism",
        )


# Megatron-LM #


def megatron_rules(tool: str, config: Config, seq_len: int) -> Iterator[Rule]:
    yield rule(
        f"Megatron-FSDP, {tool}'s ZeRO-2 and -3, runs without pipeline stages",
        lambda layouts: (layouts.zero >= 2) & (layouts.pp > 1),
        lambda layout: (
            f"with pp{layout.pp} write zero1x{layout.dp_shard}, or "
            f"zero{layout.zero}x{layout.dp_shard * layout.pp} without pp"
        ),
    )
    yield rule(
        f"{tool} cuts a sequence into 2 x cp pieces, which do not divide data.seq_len = {seq_len}",
        lambda layouts: (layouts.cp > 1) & (seq_len % (2 * layouts.cp) != 0),
        lambda layout: f"with cp{layout.cp} try {nearest_multiple(seq_len, 2 * layout.cp)}",
    )
    if "text" not in kinds_of_rows(config):
        yield one_sequence(
            f"{tool}'s --sft takes one sequence per micro-batch", lambda layouts: layouts.micro_batch_size > 1
        )
    yield selective(tool, "recomputes the attention core or whole blocks")


def nearest_multiple(length: int, pieces: int) -> int:
    return max(1, round(length / pieces)) * pieces


def pipeline_rules(tool: str, blocks: int) -> Iterator[Rule]:
    """Rules on schedules, and on the layers and micro-batches that they take."""
    yield rule(
        f"{tool} has no schedules but 1F1B and interleaved 1F1B",
        lambda layouts: (layouts.pp > 1) & ~layouts.runs("1f1b", "interleaved1f1b"),
        lambda layout: (
            f"instead of {layout.schedule} write 1f1b, or interleaved1f1b with "
            f"v{max(2, layout.stages_per_rank)}"
        ),
    )
    yield rule(
        f"{tool} gives all stages of a rank equal numbers of layers, and {blocks} can't be cut so",
        lambda layouts: ~cuts(blocks, layouts.pp, layouts.virtual_stages),
        lambda layout: (
            f"instead of {layout.pp} x {layout.stages_per_rank} stages write {nearest_stages(blocks, layout)}"
        ),
    )

    def broken_rounds(layouts: Columns) -> Number:
        steps = layouts.gradient_accumulation_steps
        return (layouts.pp > 1) & (layouts.virtual_stages > 1) & (np.fmod(steps, layouts.pp) != 0)

    yield rule(
        f"{tool} interleaves stages over groups of pp micro-batches",
        broken_rounds,
        lambda layout: (
            f"ga{layout.gradient_accumulation_steps} is not a multiple of {layout.pp}, try "
            f"ga{-(-layout.gradient_accumulation_steps // layout.pp) * layout.pp}"
        ),
    )


def cuts(blocks: int, pp: Number, stages_per_rank: Number) -> Number:
    """True if such a number of stages per rank has whole layers, without more of them on the fullest rank."""
    fullest = stages_per_rank * np.ceil(blocks / (pp * stages_per_rank))
    whole = (blocks % stages_per_rank == 0) & (blocks >= pp * stages_per_rank)
    return whole & (fullest == np.ceil(blocks / pp))


def nearest_stages(blocks: int, layout: Layout) -> str:
    """Return a number of stages per rank that cuts the layers, as a token, or the plain schedule."""
    fitting = [count for count in range(2, blocks // layout.pp + 1) if cuts(blocks, layout.pp, count)]
    nearest = min(fitting, key=lambda count: abs(count - layout.stages_per_rank), default=None)
    return f"v{nearest}" if nearest else "1f1b"


# torchtitan #


def torchtitan_rules(tool: str) -> Iterator[Rule]:
    yield rule(
        f"{tool}'s context parallelism gathers keys and values, so no ulysses",
        lambda layouts: (layouts.cp > 1) & layouts.ulysses,
        lambda layout: f"for ulysses{layout.cp} use deepspeed or megatron, or plan cp{layout.cp}",
    )
    yield zero1(tool)
    yield rule(
        f"{tool}'s Transformers backend always splits sequences with tp",
        lambda layouts: (layouts.tp > 1) & (layouts.sp == 0),
        lambda layout: f"write tp{layout.tp}-sp",
    )
    yield rule(
        f"{tool} keeps what it gathers for attention and MLP until their backward, so no regather",
        lambda layouts: layouts.sp_regather > 0,
        lambda layout: f"write tp{layout.tp}-sp without regather",
    )
    yield from parts_of_blocks(tool)


def default_stages(schedule: str) -> int:
    """Stages per rank unless layers per stage are set."""
    return 2 if schedule in LOOPED else 1


def stages_rule(tool: str, blocks: int) -> Rule:
    """Numbers of stages that no number of layers per stage gives, or that leave a stage without a layer."""

    def refuses(layouts: Columns) -> Number:
        stages = layouts.pp * layouts.virtual_stages
        per_stage = np.ceil((blocks + ENDS) / stages)
        default = np.where(layouts.runs(*(name for name in SCHEDULES if name in LOOPED)), 2, 1)
        counted = np.ceil((blocks + ENDS) / per_stage) != stages
        return (layouts.pp > 1) & (layouts.virtual_stages != default) & counted

    return rule(
        f"{tool} derives stages from layers per stage, and no number of them cuts {blocks} layers, embedding "
        "and head into that many stages",
        refuses,
        lambda layout: (
            f"for {layout.stages} stages write v{default_stages(layout.schedule)} instead of "
            f"v{layout.virtual_stages}"
        ),
    )


def pieces_rule(tool: str, seq_len: int) -> Rule:
    """Sequences that its pieces for tp and cp don't divide."""

    def pieces(tp: Number, cp: Number) -> Number:
        return tp * np.where(cp > 1, 2 * cp, 1)

    return rule(
        f"{tool} cuts a sequence into tp x 2 cp pieces, which do not divide data.seq_len = {seq_len}",
        lambda layouts: seq_len % pieces(layouts.tp, layouts.cp) != 0,
        lambda layout: (
            f"for {int(pieces(layout.tp, layout.cp))} pieces try "
            f"{nearest_multiple(seq_len, int(pieces(layout.tp, layout.cp)))}"
        ),
    )
