"""The parallel plan as one frozen value.

    Layout.parse("dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full").world == 32

A layout string is tokens joined by `-`. One table, `TOKENS`, says how each is read and written. A
`PartialLayout` is what a config or a command line may say: any field may be left out or `auto`, and
`complete` fills it in.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from string import digits
from typing import Any, NamedTuple

from meshtune.errors import Table, UserError, did_you_mean, nearest, written
from meshtune.tools.table import unknown_setting

# Operators whose outputs modes save, by name: some exist only once their module is imported. Attention stands
# there by the kernels that it calls. Batched matmuls are not here: a block's only ones are the scores of an
# attention without a fused kernel, far too large to keep.
MATMULS = frozenset({
    "aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", "aten._grouped_mm.default",
})  # fmt: skip
ATTENTION_KERNELS = frozenset({
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "meshtune.attention.default",
})  # fmt: skip


@dataclass(frozen=True)
class Recomputation:
    """One mode: the tensors that a block saves, and the operations that its backward runs again.

    mode        saves                                   runs again
    none        everything                              -
    attention   everything but attention's statistics   the attention core
    selective   outputs of matmuls and of attention     the rest of the block
    linear      outputs of attention, the block's input the rest of the block, its matmuls included
    full        the block's input                       the block
    offload     the same, in host memory                the block

    From the least to the most that is run again: `Layout.recompute` is compared by this order.
    parallel/recompute.py makes it so.
    """

    saves: str  # what a block's forward saves: its bytes are in plan/memory/activations.py
    attention: bool = False  # the backward runs the attention core again
    block: bool = False  # the backward goes through the block's forward again, but for what was saved
    matmuls: bool = False  # and through all its matmuls; only with `block`, a share (Machine.selective)
    keeps: Collection[str] = ()  # only with `block`: operators whose outputs are saved, by name
    host: bool = False  # what is saved waits in host memory (parallel/offload.py)
    searched_from: float = 0  # tokens of documents from which the planner's search offers it; inf: never

    @property
    def attention_alone(self) -> bool:
        """True if it is the attention function that recomputes, not the block."""
        return self.attention and not self.block

    @property
    def keeps_matmuls(self) -> bool:
        """True if blocks run again, but not their matmuls."""
        return self.block and not self.matmuls


RECOMPUTATIONS = Table(
    "recompute",
    {
        "none": Recomputation("everything"),
        # saves 4 bytes a head where scores are never written to memory: not worth a search
        "attention": Recomputation("all but statistics", attention=True, searched_from=math.inf),
        "selective": Recomputation("outputs", block=True, keeps=MATMULS | ATTENTION_KERNELS),
        # An 8B's core is a quarter of its block's forward there, and hardly pays below. Searching one more
        # mode takes a third longer.
        "linear": Recomputation(
            "attention outputs", block=True, matmuls=True, keeps=ATTENTION_KERNELS, searched_from=16_384
        ),
        "full": Recomputation("block input", attention=True, block=True, matmuls=True),
        # only where asked for, and advised where nothing else fits
        "offload": Recomputation(
            "block input", attention=True, block=True, matmuls=True, host=True, searched_from=math.inf
        ),
    },
)

CP_METHODS = ("allgather", "ulysses")
TORCH_SCHEDULES = {  # ours -> what torch.distributed.pipelining calls them
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
SCHEDULES = tuple(TORCH_SCHEDULES)
VIRTUAL_SCHEDULES = ("interleaved1f1b", "loopedbfs", "zb")  # the ones that take v > 1
V_SCHEDULES = ("zbv", "dualpipev")  # two stages a rank: down the ranks and up again
ALL_AHEAD = ("gpipe", "loopedbfs")  # all forwards of a step before its backwards
ZERO_BUBBLE = ("zb", *V_SCHEDULES)  # the backward of weights runs later than that of activations
RECOMPUTE = tuple(RECOMPUTATIONS)
BY_BLOCK = tuple(name for name, mode in RECOMPUTATIONS.items() if mode.block)  # may be only of some blocks
CHOICES = {
    "cp_method": CP_METHODS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
}  # field -> its values
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # sizes, outer to inner: tp ranks are neighbours
DATA_AXES = ("dp_replicate", "dp_shard")  # whose ranks read different sequences
PARAMETER_AXES = (*DATA_AXES, "cp")  # whose ranks work on other tokens with the same parameters
MOST_EXPERTS = 4096  # no model has more in a block
BEYOND = 10**7  # every number of a layout is below it
MODEL_AXES = tuple(axis for axis in reversed(AXES) if axis not in DATA_AXES)  # whose ranks share sequences


@dataclass(frozen=True)
class Layout:
    """A parallel layout: sizes of the axes, and the settings that belong to them. Raises UserError when the
    fields contradict each other.

    Expert parallelism (`ep`) has no axis: its groups are runs of `ep` consecutive ranks of a stage, so that
    neighbours come first (tp with sp, then cp, dp_shard, dp_replicate). Rank e of a group holds the e-th of
    `ep` equal parts of the experts. The same experts are on the ranks that are equal modulo `ep`: ZeRO shards
    them over `expert_shards` of these, and the rest are replicas. In the order of the world a stage's ranks
    are [replicas, expert_shards, ep].
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 0  # what dp_shard and cp shard: 1 optimizer state, 2 + gradients, 3 + parameters
    cp: int = 1
    cp_method: str = "allgather"
    tp: int = 1
    sp: bool = False
    sp_regather: bool = False  # save this rank's tokens of what sp gathers, and gather again in the backward
    ep: int = 1  # ranks that split a block's experts: some of the data, context and, with sp, tensor ranks
    pp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    recompute: str = "none"
    recompute_blocks: int | None = None  # how many of each stage, from its first on; None: all

    def __post_init__(self) -> None:
        if problems := list(contradictions(self)):
            raise UserError(problems)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    @property
    def world(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def parameter_ranks(self) -> int:
        """Ranks that work on other tokens with the same parameters."""
        return math.prod(getattr(self, axis) for axis in PARAMETER_AXES)

    @property
    def shard_ranks(self) -> int:
        """Ranks that ZeRO shards over: of `parameter_ranks` those of one replica."""
        return self.parameter_ranks // self.dp_replicate

    @property
    def token_ranks(self) -> int:
        """Ranks of a stage that have tokens of their own; `ep` is taken out of them."""
        return self.parameter_ranks * (self.tp if self.sp else 1)

    @property
    def expert_shards(self) -> int:
        """Ranks that ZeRO shards an expert over: those of one replica that hold the same experts."""
        return max(1, self.token_ranks // self.dp_replicate // self.ep) if self.zero else 1

    def expert_groups(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(Ranks that have all experts of a block together, ranks that hold the same experts as `rank`), both
        ascending, with `rank`.
        """
        stage, first = self.world // self.pp, rank - rank % self.ep
        start, stop = (rank // stage * stage + end for end in (0, stage))
        return tuple(range(first, first + self.ep)), tuple(range(start + rank % self.ep, stop, self.ep))

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages that each rank has."""
        return 2 if self.schedule in V_SCHEDULES else self.virtual_stages

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def recomputation(self) -> str:
        """Mode, and number of blocks unless all recompute: full, full8."""
        return f"{self.recompute}{self.recompute_blocks or ''}"

    @property
    def global_batch_size(self) -> int:
        """Sequences in one optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_ranks

    def __str__(self) -> str:
        return "-".join(text for token in TOKENS if (text := token.write(self)))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout that `text` names; what it leaves out is 1 (or `none`, or 1f1b)."""
        return cls(**parse_fields(text))


class Token(NamedTuple):
    """One kind of token in a layout string."""

    example: str  # for errors
    pattern: str  # regular expression that matches the whole token
    read: Callable[..., dict[str, Any]]  # the pattern's groups -> fields of Layout
    write: Callable[[Layout], str]  # the token; "" where the layout does not need it


TOKENS = (
    Token("dp2", r"dp(\d+)", lambda size: {"dp_replicate": int(size)},
          lambda x: f"dp{x.dp_replicate}" if x.dp_replicate > 1 else ""),
    Token("zero3x4", r"zero([123])x(\d+)", lambda stage, size: {"zero": int(stage), "dp_shard": int(size)},
          lambda x: f"zero{x.zero}x{x.dp_shard}" if x.zero else ""),
    Token("cp2", r"(cp|ulysses)(\d+)",
          lambda kind, size: {"cp": int(size), "cp_method": "ulysses" if kind == "ulysses" else "allgather"},
          lambda x: f"{'ulysses' if x.cp_method == 'ulysses' else 'cp'}{x.cp}" if x.cp > 1 else ""),
    Token("tp2", r"tp(\d+)", lambda size: {"tp": int(size)}, lambda x: f"tp{x.tp}" if x.tp > 1 else ""),
    Token("sp", r"sp", lambda: {"sp": True}, lambda x: "sp" if x.sp else ""),
    Token("regather", r"regather", lambda: {"sp_regather": True},
          lambda x: "regather" if x.sp_regather else ""),
    Token("ep8", r"ep(\d+)", lambda size: {"ep": int(size)}, lambda x: f"ep{x.ep}" if x.ep > 1 else ""),
    Token("pp2", r"pp(\d+)", lambda size: {"pp": int(size)}, lambda x: f"pp{x.pp}" if x.pp > 1 else ""),
    Token("1f1b", "(" + "|".join(SCHEDULES) + ")", lambda name: {"schedule": name},
          lambda x: x.schedule if x.pp > 1 else ""),
    Token("v2", r"v(\d+)", lambda count: {"virtual_stages": int(count)},
          lambda x: f"v{x.virtual_stages}" if x.virtual_stages > 1 else ""),
    Token("mb1", r"mb(\d+)", lambda size: {"micro_batch_size": int(size)},
          lambda x: f"mb{x.micro_batch_size}"),
    Token("ga4", r"ga(\d+)", lambda count: {"gradient_accumulation_steps": int(count)},
          lambda x: f"ga{x.gradient_accumulation_steps}"),
    Token("full8", "(" + "|".join(RECOMPUTE) + r")(\d*)",
          lambda name, count: {"recompute": name} | ({"recompute_blocks": int(count)} if count else {}),
          lambda x: x.recomputation if x.recompute != "none" else ""),
)  # fmt: skip


def parse_fields(text: str) -> dict[str, Any]:
    """The fields that a layout string names. Raises UserError for unknown and repeated tokens, all at
    once.
    """
    values: dict[str, Any] = {}
    problems = []
    for word in text.strip().split("-"):
        if re.search(r"\d{8}", word):
            problems.append(f"Layout '{text[:200]}': '{word[:40]}' has a number of more than 7 digits.")
            continue
        for token in TOKENS:
            if match := re.fullmatch(token.pattern, word):
                named = token.read(*match.groups())
                if repeated := values.keys() & named.keys():
                    problems.append(f"Layout '{text}' sets {', '.join(sorted(repeated))} twice.")
                values |= named
                break
        else:
            problems.append(f"Layout '{text}': '{word}' {misread(word)}")
    if problems:
        raise UserError(problems)
    return values


def misread(word: str) -> str:
    """Clause on a word that isn't a token: its size is missing, or which tokens are near."""
    for sized in (f"{word}2", f"{word}x2"):
        if _is_token(sized):
            size = "number" if word in ("v", "mb", "ga") else "number of ranks"
            return f"lacks its {size}; write it as in {sized}."
    if match := re.fullmatch(r"(fsdp|ddp)_?(\d+)?", word, re.IGNORECASE):
        shards = match[1].lower() == "fsdp"
        ours = f"{'zero3x' if shards else 'dp'}{match[2] or 8}"
        return f"isn't a token: {'FSDP is ZeRO-3' if shards else 'DDP is dp'}; write {ours}."
    examples = [token.example for token in TOKENS]
    size = word[len(word.rstrip(digits)) :]
    names = [*(example.rstrip(digits) for example in examples), *SCHEDULES, *RECOMPUTE]
    near = nearest(word, [next(filter(_is_token, (name + size, name, f"{name}2"))) for name in names])
    return "isn't a token" + did_you_mean(near, f"; tokens look like {', '.join(examples)}.")


def _is_token(word: str) -> bool:
    return any(re.fullmatch(token.pattern, word) for token in TOKENS)


def contradictions(layout: Layout) -> Iterator[str]:
    """Sentences, with the remedy, on what is wrong with a layout for any model and machine."""
    numbers = {f.name: getattr(layout, f.name) for f in fields(layout) if f.type in (int, "int")}
    if layout.recompute_blocks is not None:
        numbers["recompute_blocks"] = layout.recompute_blocks
    if wrong := {name: value for name, value in numbers.items() if type(value) is not int}:
        yield from (
            f"{name} is {written(value)}; it must be a whole number." for name, value in wrong.items()
        )
        return
    for name, value in numbers.items():
        if name != "zero" and value < 1:
            yield f"{name} is {value}; it must be at least 1."
        elif value >= BEYOND:
            yield f"{name} is {str(value)[:40]}; it must be below {BEYOND:,}."
    for row in fields(layout):
        if row.type in (bool, "bool") and type(value := getattr(layout, row.name)) is not bool:
            yield f"{row.name} is {written(value)}; it must be true or false."
    if layout.zero not in (0, 1, 2, 3):
        yield f"zero is {layout.zero}; it must be 0, 1, 2 or 3."
    elif layout.dp_shard > 1 and not layout.zero:
        yield (
            f"dp_shard={layout.dp_shard} without zero, which says what it shards; write zero3x4 for ZeRO-3 "
            "over 4 ranks, dp4 for plain data parallel."
        )
    elif layout.zero and layout.dp_shard == 1 and layout.cp == 1:
        yield (
            f"zero={layout.zero} with dp_shard=1 and cp=1 has one rank to shard over; write zero3x4 for "
            "ZeRO-3 over 4 ranks, zero3x1-cp4 for ZeRO-3 over 4 context-parallel ranks, or leave zero out."
        )
    for name, allowed in CHOICES.items():
        if getattr(layout, name) not in allowed:
            yield f"{name} is '{getattr(layout, name)}'; it must be one of {', '.join(allowed)}."
    if layout.sp and layout.tp == 1:
        yield "sp splits the sequence over the tensor-parallel ranks and needs tp > 1; add tp2, or drop sp."
    if layout.sp_regather and not layout.sp:
        yield "regather gathers again what sp gathers and needs sp; write tp2-sp-regather, or drop regather."
    if layout.sp_regather and layout.recompute in BY_BLOCK:
        yield (
            f"regather with recompute {layout.recomputation}: a block that runs again gathers again "
            "anyway; drop regather, or use recompute none or attention."
        )
    if layout.recompute_blocks is not None and layout.recompute not in BY_BLOCK:
        yield (
            f"recompute_blocks is {layout.recompute_blocks} with recompute {layout.recompute}: only "
            f"{', '.join(BY_BLOCK[:-1])} and {BY_BLOCK[-1]} recompute some blocks and save the others; use "
            "one of these, or leave the number out."
        )
    if layout.cp == 1 and layout.cp_method != "allgather":
        yield f"cp_method={layout.cp_method} needs cp > 1; write ulysses2, or leave it out."
    if layout.pp == 1 and layout.schedule != "1f1b":
        yield f"schedule {layout.schedule} needs pp > 1; add pp2, or leave the schedule out."
    if layout.virtual_stages > 1 and (layout.pp == 1 or layout.schedule not in VIRTUAL_SCHEDULES):
        yield (
            f"v{layout.virtual_stages} needs pp > 1 and one of {', '.join(VIRTUAL_SCHEDULES)}; "
            f"{' and '.join(V_SCHEDULES)} always have two stages a rank."
        )
    if layout.ep > 1 and min(getattr(layout, axis) for axis in AXES) > 0:
        yield from _expert_contradictions(layout)


def expert_sizes(layout: Layout) -> list[int]:
    """Sizes of ep that a layout's ranks can have, from 2 to MOST_EXPERTS, whatever its own is.

    They divide the ranks that have tokens of their own. Under ZeRO a group is inside a replica, or has whole
    ones.
    """
    ranks = layout.token_ranks
    inside = ranks // layout.dp_replicate if layout.zero else ranks
    return [size for size in range(2, min(ranks, MOST_EXPERTS) + 1) if ep_fits(size, ranks, inside)]


def ep_fits(ep: Any, ranks: Any, inside: Any) -> Any:
    """True if groups of `ep` ranks make `ranks`, and are inside runs of `inside` ranks or have whole ones.

    Arguments may be arrays. inside: ranks of a replica under ZeRO, else `ranks`.
    """
    return (inside % ep == 0) | ((ep % inside == 0) & (ranks % ep == 0))


def _expert_contradictions(layout: Layout) -> Iterator[str]:
    if layout.tp > 1 and not layout.sp:
        yield (
            f"ep={layout.ep} with tp={layout.tp} and without sp: tensor-parallel ranks would send the same "
            "tokens to experts; add sp, or leave ep out."
        )
    elif layout.ep not in (sizes := expert_sizes(layout)):
        replicas = f" in {layout.dp_replicate} replicas" * (layout.dp_replicate > 1 and layout.zero > 0)
        ranks = f"{layout.token_ranks} rank{'s' * (layout.token_ranks > 1)}{replicas}"
        yield (
            f"ep={layout.ep} can't be taken out of {ranks} (dp x zero x cp, and tp with sp); "
            f"{one_of('ep', sizes)}."
        )


def one_of(axis: str, sizes: Sequence[int]) -> str:
    """Clause with the sizes that an axis can have: "ep can be 2, 4 or 8"."""
    *others, last = sizes or [1]
    if others:
        return f"{axis} can be {', '.join(map(str, others))} or {last}"
    return f"{axis} can be {last}" if sizes else f"leave {axis} out"


AUTO = "auto"
BELONGS = {  # field -> what only has a meaning with it
    "dp_replicate": ("ep",),
    "dp_shard": ("zero", "ep"),
    "cp": ("cp_method", "zero", "ep"),
    "tp": ("sp", "sp_regather", "ep"),
    "sp": ("sp_regather", "ep"),
    "pp": ("schedule", "virtual_stages"),
    "recompute": ("recompute_blocks",),
}


def _undetermined(name: str, open_fields: Collection[str]) -> bool:
    """True if the field `name` can't be validated before an open field is chosen: itself, or one that it
    belongs to (BELONGS). open_fields: names of the fields that are still to choose.
    """
    return any(owner in open_fields and name in (owner, *dependent) for owner, dependent in BELONGS.items())


def _known(fixed: Mapping[str, Any], open_fields: Collection[str]) -> Layout:
    """The fixed fields that can be validated already, as a layout; all others have their defaults.

    open_fields: names of the fields that are still to choose. Where zero or schedule is one of them, but the
    fixed dp_shard or virtual_stages needs it, the first value that is valid with that is filled in. Raises
    UserError for contradictions.
    """
    valid = {name: value for name, value in fixed.items() if not _undetermined(name, open_fields)}
    if valid.get("dp_shard", 1) != 1 and ("zero" in open_fields or "zero" in fixed):
        valid["zero"] = fixed.get("zero", 1)  # undetermined only where cp is, to which it may belong too
    if "schedule" in open_fields and valid.get("virtual_stages", 1) != 1:
        valid["schedule"] = VIRTUAL_SCHEDULES[0]
    return Layout(**valid)


@dataclass(frozen=True)
class PartialLayout:
    """A layout with only some fields fixed.

    A string fixes all fields (those it leaves out have their defaults: sizes of 1) but micro-batch and
    accumulation, which are open unless it names them; `auto` fixes nothing; a mapping fixes what it names,
    and a field it leaves out is as in a string. In a mapping, an axis that is `auto` opens what belongs to
    it (BELONGS) and is not named, such as sp to tp.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)  # field -> value, where one was named
    open: frozenset[str] = frozenset()  # fields to choose, besides micro-batch and accumulation

    @classmethod
    def parse(cls, value: "str | Mapping[str, Any]") -> "PartialLayout":
        every = frozenset(row.name for row in fields(Layout))
        if value == AUTO:
            return cls(open=every)
        if isinstance(value, str):
            fixed = parse_fields(value)
        else:
            if unknown := sorted(name for name in value if name not in every):
                settings = [f"layout.{row.name}" for row in fields(Layout)]
                raise UserError(unknown_setting(["layout", name], settings, []) for name in unknown)
            fixed = {name: entry for name, entry in value.items() if entry != AUTO}
            open_fields = {name for name, entry in value.items() if entry == AUTO}
            dependent = {name for axis in open_fields for name in BELONGS.get(axis, ())}
            open_fields |= dependent - value.keys()
            _known(fixed, open_fields)
            return cls(fixed, frozenset(open_fields))
        Layout(**fixed)  # contradictions are said at once, before anything is loaded
        return cls(fixed)

    @property
    def known(self) -> Layout:
        """The layout of the fixed fields, those left out that an open axis decides."""
        return _known(self.fixed, self.open)

    @property
    def given(self) -> dict[str, Any]:
        """Every field that is not to choose, with its value."""
        open_fields = self.open | ({"micro_batch_size", "gradient_accumulation_steps"} - self.fixed.keys())
        return {
            row.name: self.fixed.get(row.name, row.default)
            for row in fields(Layout)
            if row.name in self.fixed or row.name not in open_fields
        }

    @property
    def world(self) -> int | None:
        """Ranks that it is for; None where that is to choose."""
        return None if self.open & {*AXES} else self.known.world

    @property
    def whole(self) -> bool:
        """Whether nothing is left to choose but what follows from the global batch."""
        sized = {"micro_batch_size", "gradient_accumulation_steps"} & self.fixed.keys()
        return not self.open and bool(sized)

    def complete(self, *, devices: int, global_batch_size: int) -> Layout:
        """Fill in the open fields by rule, without a search; the fixed ones stay.

        Where a data axis is open, the data ranks are `devices` over the other axes, rounded down: as dp_shard
        if that is open and zero is fixed above 0, else as dp_replicate. Other open fields get their defaults.
        If micro-batch and accumulation are open, micro-batch is the largest of 1 to 4 that divides a data
        rank's sequences and leaves no fewer micro-batches than pipeline stages, else 1. Accumulation is
        the rest; if only one of the two is open, it is the rest.

        devices: not compared with the size of a layout whose axes are all fixed. global_batch_size: sequences
        per optimizer step. Raises UserError if micro-batch, accumulation and data ranks can't make it.
        """
        layout = self.known
        if self.open & {"dp_replicate", "dp_shard"}:
            data = max(1, devices // (layout.world // layout.dp_replicate))
            zero = self.fixed.get("zero", 0) if "dp_shard" in self.open else 0
            copies = self.fixed.get("dp_replicate", 1 if zero else data)
            shards = data // copies if zero else 1
            if shards > 1 or (zero and layout.cp > 1):
                layout = replace(layout, dp_shard=shards, zero=zero)
            layout = replace(layout, dp_replicate=copies)
        layout = replace(layout, ep=self.fixed.get("ep", 1))
        each_rank, rest = divmod(global_batch_size, layout.data_ranks)
        if rest:
            raise UserError(
                f"The global batch of {global_batch_size} sequences does not divide over {layout.data_ranks} "
                f"data ranks (dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}); set "
                f"train.global_batch_size to {max(1, each_rank) * layout.data_ranks}, or change the layout."
            )
        micro, accumulation = (self.fixed.get(n) for n in ("micro_batch_size", "gradient_accumulation_steps"))
        if micro is None:
            # A pipeline needs no fewer micro-batches than it has stages.
            fitting = [n for n in range(1, 5) if each_rank % n == 0]
            filling = [n for n in fitting if each_rank // n >= layout.stages]
            micro = each_rank // accumulation if accumulation else max(filling or fitting[:1])
        if accumulation is None:
            accumulation = each_rank // micro
        if micro * accumulation != each_rank or micro < 1:
            near = max(n for n in range(1, each_rank + 1) if each_rank % n == 0 and n <= max(1, micro))
            raise UserError(
                f"micro_batch_size {micro} x gradient_accumulation_steps {accumulation} x "
                f"{layout.data_ranks} data ranks = "
                f"{micro * accumulation * layout.data_ranks} sequences, but train.global_batch_size is "
                f"{global_batch_size}; try mb{near}-ga{each_rank // near}."
            )
        return replace(layout, micro_batch_size=micro, gradient_accumulation_steps=accumulation)


def as_mapping(layout: Layout) -> dict[str, Any]:
    """A layout's fields as plain values, for YAML and JSON."""
    return asdict(layout)


def in_words(layout: Layout) -> str:
    """A layout's axes, batches and recomputation: "ZeRO-3 in 16 shards · 4 sequences at once"."""
    shards = f"ZeRO-{layout.zero} in {layout.shard_ranks} shards" if layout.zero else ""
    sequence = " and sequence" if layout.sp else ""
    some = layout.recompute_blocks
    blocks = f", {some} block{'s' * (some > 1)}" if some else ""
    parts = {
        f"{layout.dp_replicate} replicas": layout.dp_replicate > 1,
        shards: layout.zero,
        f"tensor{sequence} parallel over {layout.tp}": layout.tp > 1,
        f"context parallel over {layout.cp} ({layout.cp_method})": layout.cp > 1,
        f"experts over {layout.ep}": layout.ep > 1,
        f"{layout.stages} pipeline stages on {layout.pp} ranks ({layout.schedule})": layout.pp > 1,
        f"micro-batch {layout.micro_batch_size}": True,
        f"{layout.gradient_accumulation_steps} accumulated": layout.gradient_accumulation_steps > 1,
        f"recompute: {layout.recompute}{blocks}": layout.recompute != "none",
    }
    return " · ".join(part for part, there in parts.items() if there)
