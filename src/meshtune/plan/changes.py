"""Change one thing, predict it, print it in one sentence.

    changes ──> Change ──> predicted, searched ──> Outcome ──> levers, remedies; advice.faster

A Change with a layout is predicted under it, many in one call: another micro-batch, recomputation, schedule,
degree of tp, cp, pp or ZeRO (accumulation and data ranks follow, so that the global batch and the number of
GPUs stay), or a setting under which the layout stays. The others are settings under which the best layout is
searched for, one by one: a search for the first that fits stops there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, NamedTuple

from meshtune.errors import NothingFits, UserError
from meshtune.layout import MODEL_AXES, RECOMPUTATIONS, RECOMPUTE, SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.optimizers import IN_16_BITS, OPTIMIZERS, caution, that_may_fit
from meshtune.placement.columns import Columns, Number, at
from meshtune.placement.experts import splittable
from meshtune.plan.candidates import nearest_sizes
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import GIGA, catalogue
from meshtune.plan.memory.timeline import CATEGORIES, CATEGORY_NAMES, EVENTS
from meshtune.plan.phrases import indivisible, memory_limit, memory_need, sequences
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import Choice, Plan, best_fitting, choice_of, peak, search, times
from meshtune.plan.seconds.step import TIE
from meshtune.plan.workload import UNDROPPED, Workload
from meshtune.precision import FP8_ERROR, NF4_ERROR, PRECISIONS, narrower
from meshtune.units import counted, human

# Returns functions that make workloads which need less, by the setting for them.
Lighter = Callable[[], Mapping[str, Callable[[], Workload]]]
Count = Callable[[str], None]  # gets a line on how far a search is
FACTORS = (2, 4, 8)  # of the micro-batch size, up and down
VIRTUAL_STAGES = (2, 4, 8)
TWICE = "twice the global batch"
BATCHES = ("batch", "other batch")  # kinds of changes of it
MORE_GPUS = (2, 3, 4, 6, 8, 12, 16)  # times the cluster's
# Tokens. 8,192 rows run matmuls at full rate. Inner tensors of an 8B's tile: 1.8 GB, with sp or without. Half
# the tile halves them, and doubles the traffic of the sums of weights' gradients.
MLP_TILE = 8192
SHORTER = (2, 4, 8, 16)  # parts of the sequence length
REMEDIES = (
    "budget", "nearest batch", "tiles", "offload", "states", "GPUs", "sequence", "sums", "moments",
    "precision", "optimizer", "method", "kind",
)  # fmt: skip
OTHER_OPTIMIZER = "Another optimizer needs a learning rate of its own (train.learning_rate)."
FOUR_BITS = f"method=qlora rounds frozen weights to 4 bits, by {NF4_ERROR:.0%} of their size."
NOTABLE_SAVING = 0.05  # of the peak
NEXT_TRY = 0.85  # of the predicted peak of a run that ran out of memory: the most that another may need


def silent(_: str) -> None:
    """Take a sentence that nobody wants."""


class Change(NamedTuple):
    """One change, not yet predicted."""

    kind: str  # changes of one kind are alternatives to each other
    words: str  # "recomputation none instead of full"
    setting: str  # "train.compile=true"; "": only the layout changes
    workload: Workload
    cluster: Cluster
    layout: Layout | None = None  # None: the best one is searched for
    fixed: Mapping[str, Any] = {}  # fields that its layouts have
    where: Callable[[Columns], Number] | None = None  # mask of its layouts; None: all with `fixed`


class Outcome(NamedTuple):
    """A predicted change."""

    change: Change
    choice: Choice
    before: Choice | None = None  # what it is compared with; None: nothing

    @classmethod
    def of_layout(cls, words: str, workload: Workload, choice: Choice, before: Choice | None) -> Outcome:
        """Only another layout, as a search predicted it."""
        return cls(Change("layout", words, "", workload, choice.cluster, choice.layout), choice, before)

    @property
    def setting(self) -> str:
        """Overrides that ask for it, "train.compile=true layout=zero3x8-mb1-ga8"; no layout if it stays."""
        setting, same = self.change.setting, self.before and self.before.layout == self.choice.layout
        return setting if setting and same else f"{setting} layout={self.choice.layout}".strip()

    @property
    def remedy(self) -> str:
        """Overrides, the memory they need and the change of step time: "layout=… (63.3 GiB, +2% time)"."""
        time, memory = "", self.choice.memory
        if self.before and self.choice.cluster.timed:
            time = f", {self.choice.seconds.total / self.before.seconds.total - 1:+.0%} time"
        host = f", {human(memory.host)} of host memory a rank" if memory.host else ""
        return f"{self.setting} ({human(memory.peak)}{host}{time})"

    @property
    def speed(self) -> float:
        """Tokens per second and GPU over those before, less 1."""
        assert self.before
        return self.choice.tokens_per_second_per_gpu / self.before.tokens_per_second_per_gpu - 1

    @property
    def freed(self) -> float:
        """Bytes of the peak that the change saves; below 0: more are needed."""
        assert self.before
        return self.before.memory.peak - self.choice.memory.peak

    @property
    def gain(self) -> str:
        """A clause on the speed, where the cluster is `timed`, and memory that it gains or costs."""
        tokens = "the same speed"
        if abs(self.speed) >= TIE:
            tokens = f"{abs(self.speed):.1%} {'more' if self.speed > 0 else 'fewer'} tokens per second"
        needed, before = human(self.choice.memory.peak), human(self.choice.memory.peak + self.freed)
        memory = f"{needed} instead of {before}" if needed != before else f"{needed} as before"
        held, less = (float(one.memory.host) if one else 0.0 for one in (self.choice, self.before))
        memory += f" and {human(held)} of host memory a rank" * (held > less and human(held) != human(less))
        fits = "" if self.choice.fits else ", which does not fit"
        return f"{tokens}, {memory}{fits}" if self.choice.cluster.timed else f"{memory}{fits}"

    def sentence(self) -> str:
        """The change, how to ask for it, and what it gains and costs."""
        return f"{self.change.words} ({self.setting}): {self.gain}."

    def as_dict(self) -> dict[str, Any]:
        """The change as a lever in the JSON document; shares and bytes."""
        return {
            "change": self.change.words,
            "setting": self.setting,
            "speed": self.speed if self.choice.cluster.timed else None,
            "freed": self.freed,
            "fits": self.choice.fits,
        }


# what can be changed #


def changes(
    workload: Workload,
    cluster: Cluster,
    layout: Layout | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    lighter: Lighter = dict,
    undropped: Workload | None = None,
) -> Iterator[Change]:
    """Yield every change, the least of each kind first.

    layout: yield changes to it that the model can be trained under, and settings under which it stays; None:
    yield settings; the layout is searched for under each of them. fixed: as in `search`. lighter: each
    workload is made when its turn comes. undropped: the workload with adapters without dropout.
    """
    for kind, words, other in neighbours(layout, int(workload.work.blocks)) if layout else ():
        if not workload.refusals(other):
            yield Change(kind, words, "", workload, cluster, other)
    more = layout and replace(layout, gradient_accumulation_steps=2 * layout.gradient_accumulation_steps)
    for words, size in other_batches(workload.global_batch_size).items():
        if not layout or words == TWICE:
            setting, kind = f"train.global_batch_size={size}", "batch" if words == TWICE else "other batch"
            yield Change(kind, words, setting, workload.of_batch(size), cluster, more)
    compiled = workload.compiled()
    if not workload.compile and not (layout and compiled.refusals(layout)):
        yield Change("compile", "compiled blocks", "train.compile=true", compiled, cluster, layout)
    if undropped:
        words = "adapters without dropout, which regularises them"
        yield Change("dropout", words, UNDROPPED, undropped, cluster, layout)
    if layout:
        yield from _sums(workload, cluster, layout)
    if cluster.nodes > 1 and layout:
        twice = replace(cluster, network=2 * cluster.network)
        setting = f"cluster.network={twice.network / GIGA:g}"
        yield Change("network", "twice the network", setting, workload, twice, layout)
    if not layout:
        yield from _in_8_bits(workload, cluster)
        yield from _reshaping(workload, cluster, fixed or {}, lighter)
        yield from _usual(workload, cluster)


def _sums(workload: Workload, cluster: Cluster, layout: Layout | None = None) -> Iterator[Change]:
    """Yield sums of gradients in 16 bits, and AdamW's moments, where they are in 32."""
    rounded = replace(workload, reduce_dtype="bf16")
    if workload.tool is MESHTUNE and workload.summed_dtype != rounded.summed_dtype:
        words, setting = "gradients summed in 16 bits, which rounds them", "train.reduce_dtype=bf16"
        yield Change("sums", words, setting, rounded, cluster, layout)
    name = IN_16_BITS.get(workload.optimizer)
    if workload.tool is MESHTUNE and name and PRECISIONS[workload.precision].trained != "bfloat16":
        words, other = "moments in 16 bits, rounded by chance", replace(workload, optimizer=name)
        yield Change("moments", words, f"train.optimizer={name}", other, cluster, layout)


def _in_8_bits(workload: Workload, cluster: Cluster) -> Iterator[Change]:
    """Yield matmuls in 8-bit floats, where blocks may be compiled and GPUs have units for them."""
    of_bf16 = workload.tool is MESHTUNE and workload.precision == "bf16" and workload.compile
    matrices = workload.work.matrices
    fits = any(gemm.fp8 for gemm in matrices) and not any(gemm.quantised for gemm in matrices)
    if of_bf16 and cluster.gpu.fp8 and fits:
        work = workload.work.compiled(fp8="tensorwise")
        narrow = replace(workload, precision="fp8", work=work, compile=True)
        words = f"matmuls in 8-bit floats, which round their operands by {FP8_ERROR:.0%}"
        yield Change("fp8", words, "train.precision=fp8", narrow, cluster)


def other_batches(size: int) -> dict[str, int]:
    """Global batches to compare, in sequences: a quarter to four times `size`."""
    sizes = {"a quarter of": size // 4, "half": size // 2, "twice": 2 * size, "four times": 4 * size}
    return {f"{times} the global batch": other for times, other in sizes.items() if other}


def _usual(workload: Workload, cluster: Cluster) -> Iterator[Change]:
    """Yield the well-known kinds of layout."""
    node, one_rank = cluster.node, dict.fromkeys(MODEL_AXES, 1)
    zero = [(f"ZeRO-{n} over all GPUs", one_rank | {"zero": n, "dp_replicate": 1}, None) for n in (1, 2, 3)]
    for words, fixed, where in (
        ("plain data parallel", one_rank | {"dp_shard": 1, "ep": 1}, lambda layouts: layouts.zero == 0),
        *zero,
        (
            "HSDP with ZeRO-3 shards inside a node", one_rank | {"zero": 3},
            lambda layouts: (layouts.dp_replicate > 1) & (layouts.dp_shard <= node),
        ),
        ("tensor parallel over the whole node", one_rank | {"tp": min(node, cluster.gpus)}, None),
        ("pipeline parallel without cp", {"cp": 1}, lambda layouts: layouts.pp > 1),
        ("context parallel without tp or pp", {"pp": 1, "tp": 1}, lambda layouts: layouts.cp > 1),
        *([("all experts on each rank", {"ep": 1}, None)] * splittable(workload.traits)),
    ):  # fmt: skip
        yield Change("usual", words, "", workload, cluster, fixed=fixed, where=where)


def _reshaping(
    workload: Workload, cluster: Cluster, fixed: Mapping[str, Any], lighter: Lighter
) -> Iterator[Change]:
    """Yield changes of settings that usually need another layout."""
    if cluster.memory_budget:
        unbounded = replace(cluster, memory_budget=None)
        yield Change("budget", "no memory budget", "cluster.memory_budget_gib=null", workload, unbounded)
    batch = workload.global_batch_size
    for size in sorted(nearest_sizes(batch, cluster, fixed), key=lambda size: abs(size - batch)):
        words = f"{sequences(size)} instead of {batch}, shared by more data ranks"
        setting = f"train.global_batch_size={size}"
        yield Change("nearest batch", words, setting, workload.of_batch(size), cluster)
    if workload.tool is MESHTUNE and not workload.mlp_tile and workload.seq_len > MLP_TILE:
        words, other = f"MLPs in tiles of {MLP_TILE} tokens", replace(workload, mlp_tile=MLP_TILE)
        yield Change("tiles", words, f"train.mlp_tile={MLP_TILE}", other, cluster)
    if workload.tool is MESHTUNE and not cluster.gpu.processor:  # processors compute in the host's memory
        words = "inputs of recomputed blocks in the host's memory"
        yield Change("offload", words, "", workload, cluster, fixed={"recompute": "offload"})
        if workload.offload == "none":
            words, other = "optimizer states in the host's memory", replace(workload, offload="optimizer")
            yield Change("states", words, "train.offload=optimizer", other, cluster)
    for factor in () if cluster.gpu.processor else MORE_GPUS:  # processors share one memory
        more = replace(cluster, gpus=cluster.gpus * factor)
        yield Change("GPUs", f"{factor} x the GPUs", f"cluster.gpus={more.gpus}", workload, more)
    for parts in (parts for parts in SHORTER if workload.seq_len % parts == 0):
        shorter = replace(workload, seq_len=workload.seq_len // parts)
        words = f"sequences of {shorter.seq_len} tokens"
        yield Change("sequence", words, f"data.seq_len={shorter.seq_len}", shorter, cluster)
    yield from _sums(workload, cluster)
    for name in narrower(workload.precision):
        if name in workload.tool.precisions:
            other = replace(workload, precision=name)
            yield Change("precision", f"precision {name}", f"train.precision={name}", other, cluster)
    for name in that_may_fit(workload.optimizer) if workload.tool is MESHTUNE else ():
        other = replace(workload, optimizer=name)
        yield Change("optimizer", f"optimizer {name}", f"train.optimizer={name}", other, cluster)
    for setting, make in lighter().items():
        yield Change("method", setting, setting, make(), cluster)
    for gpu in sorted(catalogue().values(), key=lambda gpu: gpu.memory):
        if gpu.memory > 1.1 * cluster.memory and not gpu.processor:
            node = gpu.node if cluster.node == cluster.gpu.node else cluster.node
            larger = replace(
                cluster, gpu=gpu, memory=gpu.memory, link=gpu.link, network=gpu.network, node=node,
                host_memory=None, ram=None,
            )  # fmt: skip
            yield Change("kind", f"GPUs of {human(gpu.memory)}", f"cluster.gpu={gpu.name}", workload, larger)


def neighbours(layout: Layout, blocks: int) -> Iterator[tuple[str, str, Layout]]:
    """(kind, change, layout) for layouts with the same GPUs and global batch that differ in one thing.

    blocks: of the model.
    """
    for kind, change, fields in _fields(layout, blocks):
        try:
            other = replace(layout, **fields)
        except UserError:  # such as regather under full recomputation
            continue
        if other != layout:
            yield kind, change, other


def _fields(layout: Layout, blocks: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kind, change, fields of the layout that it sets) of each neighbour, contradictory ones among them."""
    size, steps = layout.micro_batch_size, layout.gradient_accumulation_steps
    sizes = [(size * n, steps // n) for n in FACTORS if steps % n == 0]
    sizes += [(size // n, steps * n) for n in FACTORS if size % n == 0]
    for micro, rest in sizes:
        fields = {"micro_batch_size": micro, "gradient_accumulation_steps": rest}
        yield "micro-batch", f"micro-batch {micro} instead of {size}", fields
    modes = [mode for mode in RECOMPUTE if mode == layout.recompute or not RECOMPUTATIONS[mode].host]
    for mode, some in product(modes, (None, *range(1, math.ceil(blocks / layout.stages)))):
        change = f"recomputation {mode}{some or ''} instead of {layout.recomputation}"
        yield "recomputation", change, {"recompute": mode, "recompute_blocks": some}
    for schedule in SCHEDULES if layout.pp > 1 else ():
        for virtual in VIRTUAL_STAGES if schedule in VIRTUAL_SCHEDULES else (1,):
            stages = f" with {virtual} stages a rank" if virtual > 1 else ""
            fields = {"schedule": schedule, "virtual_stages": virtual}
            yield "schedule", f"schedule {schedule}{stages} instead of {layout.schedule}", fields
    for axis in MODEL_AXES:
        degree = getattr(layout, axis)
        for other in (2 * degree, degree // 2 if degree % 2 == 0 else 0):
            if other and (data := _other_data_ranks(layout, degree, other)):
                fields = data | _axis(layout, axis, other)
                if fields.get("dp_shard", layout.dp_shard) * fields.get("cp", layout.cp) == 1:
                    fields["zero"] = 0
                yield axis, f"{axis} {other} instead of {degree}", fields
    for other in (2 * layout.ep, layout.ep // 2):
        if other and layout.token_ranks > 1:
            yield "ep", f"experts over {other} ranks instead of {layout.ep}", {"ep": other}
    ranks = layout.data_ranks
    now = _sharded(layout.zero, layout.shard_ranks)
    for zero in (0, 1, 2, 3) if layout.parameter_ranks > 1 else ():
        shards = ranks if zero else 1
        fields = {"zero": zero, "dp_shard": shards, "dp_replicate": ranks // shards}
        yield "ZeRO", f"{_sharded(zero, shards * layout.cp)} instead of {now}", fields
    for shards in (2 * layout.dp_shard, layout.dp_shard // 2) if layout.zero else ():
        if shards * layout.cp > 1 and shards and ranks % shards == 0:
            fields = {"dp_shard": shards, "dp_replicate": ranks // shards}
            yield "ZeRO", f"{shards * layout.cp} shards instead of {layout.shard_ranks}", fields


def _other_data_ranks(layout: Layout, degree: int, other: int) -> dict[str, Any]:
    """Fields that keep GPUs and global batch where an axis goes from `degree` to `other`.

    Accumulation changes, else the micro-batch; {} if neither can.
    """
    fields: dict[str, Any] = {}
    axis = "dp_shard" if layout.zero else "dp_replicate"
    ranks = getattr(layout, axis) * degree
    if ranks % other:
        return {}
    fields[axis] = ranks // other
    for name in ("gradient_accumulation_steps", "micro_batch_size"):
        sequences = getattr(layout, name) * other
        if sequences % degree == 0:
            return fields | {name: sequences // degree}
    return {}


def _axis(layout: Layout, axis: str, degree: int) -> dict[str, Any]:
    """The axis's degree, and the fields that belong to it."""
    if axis == "tp":
        return {"tp": degree, "sp": degree > 1, "sp_regather": layout.sp_regather and degree > 1}
    if degree > 1:
        return {axis: degree}
    belongs = {"cp": {"cp_method": "allgather"}, "pp": {"schedule": "1f1b", "virtual_stages": 1}}
    return {axis: 1} | belongs[axis]


def _sharded(zero: int, shards: int) -> str:
    return f"ZeRO-{zero} in {shards} shards" if zero else "no ZeRO"


# predictions #


def best_layout(change: Change, fixed: Mapping[str, Any] | None = None) -> tuple[Choice | None, str]:
    """(Best layout under a change, ""); or if none fits (the one that needs least or None, why not, as the
    end of a sentence). fixed: as in `search`.
    """
    workload, cluster = change.workload, change.cluster
    try:
        cluster = cluster.of_size(cluster.gpus)
        plan = search(workload, cluster, fixed={**(fixed or {}), **change.fixed}, where=change.where)
    except UserError as error:
        reason, batch = error.problems[0], workload.global_batch_size
        if change.fixed.keys() >= set(MODEL_AXES):
            data_ranks = cluster.gpus // math.prod(change.fixed[axis] for axis in MODEL_AXES)
            reason = indivisible(batch, data_ranks) if batch % data_ranks else reason
        return None, f"is not possible: {reason}"
    if len(plan):
        return plan.choice(0), ""
    for choice in plan.nearest(1):
        need, limit = memory_need(choice.memory, cluster), memory_limit(cluster)
        return choice, f"does not fit: {choice.layout} needs {need}; {limit}."
    return None, f"is not possible{_most_refused(plan)}"


def _most_refused(plan: Plan) -> str:
    """The end of a sentence: what refuses most layouts of a plan without any that needs too much memory.

    Where the GPUs can't share the global batch and no degree of tp was fixed, the sentence says that only
    data ranks that divide the batch were considered.
    """
    refused = max(plan.rejected, key=lambda rejected: rejected.count, default=None)
    if not refused:
        return " here."
    batch = plan.workload.global_batch_size
    limited = batch % plan.cluster.gpus and "tp" not in plan.fixed
    where = f"where the data ranks divide {sequences(batch)}, " if limited else ""
    return f": {where}{refused.reason.rstrip('.')}."


def searched(
    some: Iterable[Change], fixed: Mapping[str, Any] | None = None, before: Choice | None = None
) -> Iterator[Outcome]:
    """Yield the best layout under each change, one by one; none where nothing fits. fixed: as in `search`."""
    for change in some:
        choice, against = best_layout(change, fixed)
        if choice and not against:
            yield Outcome(change, choice, before)


def predicted(some: Sequence[Change], before: Choice) -> Iterator[Outcome]:
    """Yield each change of `before` under its layout; neighbours with the same settings are one call."""
    for _, group in groupby(some, key=lambda change: (id(change.workload), id(change.cluster))):
        alike = list(group)
        workload, cluster = alike[0].workload, alike[0].cluster
        layouts = [change.layout or before.layout for change in alike]
        columns = Columns.of(layouts)
        seconds, memory = times(workload, cluster, columns), peak(workload, cluster, columns)
        for place, (change, layout) in enumerate(zip(alike, layouts, strict=True)):
            choice = choice_of(workload, cluster, layout, at(seconds, place), at(memory, place))
            yield Outcome(change, choice, before)


# filters and sorts: the three levers of a layout #


def levers(workload: Workload, choice: Choice, most: int = 3) -> list[Outcome]:
    """The changes that gain most, at most `most`, each of another kind.

    Of a layout that fits: the fastest that fit, then, if fewer than `most` gain TIE, those that free most.
    Of one that does not: the fastest that then fit, then those that free most. workload: with the layout's
    global batch.
    """
    outcomes = list(predicted(list(changes(workload, choice.cluster, choice.layout)), choice))
    least_speed = TIE if choice.fits else -1.0
    fast = [one for one in outcomes if one.choice.fits and one.speed >= least_speed]
    faster = _best_of_kinds(fast, lambda outcome: outcome.speed)
    kinds, least = {outcome.change.kind for outcome in faster}, NOTABLE_SAVING * choice.memory.peak
    light = [one for one in outcomes if one.freed >= least and one.change.kind not in kinds]
    return [*faster, *_best_of_kinds(light, lambda outcome: outcome.freed)][:most]


def _best_of_kinds(outcomes: Iterable[Outcome], value: Callable[[Outcome], float]) -> list[Outcome]:
    """The outcome with the largest value of each kind, the largest first; the first of equal ones."""
    best: dict[str, Outcome] = {}
    for outcome in sorted(outcomes, key=value, reverse=True):
        best.setdefault(outcome.change.kind, outcome)
    return list(best.values())


# nothing fits, or a run was out of memory #


def remedies(
    workload: Workload, cluster: Cluster, lighter: Lighter = dict, count: Count = silent
) -> Iterator[Outcome]:
    """Yield the least change of each kind of REMEDIES, and each method, under which something fits.

    Nothing is fixed.
    """
    some = (change for change in changes(workload, cluster, lighter=lighter) if change.kind in REMEDIES)
    tried = itertools.count()
    for _, alternatives in groupby(some, key=lambda one: one.setting if one.kind == "method" else one.kind):
        for change in alternatives:
            now = change.setting or change.words
            count(f"searching for what would fit: {counted(next(tried), 'change')} tried, now {now}")
            if outcome := next(searched([change]), None):
                yield outcome
                break


class Refused(UserError):
    """Error: every layout is refused, whatever memory it needs."""


def empty_plan_error(plan: Plan, lighter: Lighter | None = dict, count: Count = silent) -> UserError:
    """Return the error for an empty plan: NothingFits, or Refused with the reasons if no layout can run.

    lighter, count: as in `remedies`; None: without what would fit, which takes some twenty searches.
    """
    if len(plan.near.tp):
        return NothingFits([*least_need(plan), *(what_would_fit(plan, lighter, count) if lighter else ())])
    where = f"{plan.cluster.gpus} x {plan.cluster.gpu.name}"
    if plan.fixed:
        refused = f"No layout of {where} with the fields of it that are fixed can train {plan.workload.model}"
        return Refused(f"{refused}: {sentence}" for sentence in refusals(plan))
    return Refused(
        f"{plan.workload.model} can't be trained under any layout of {where}: {'; '.join(_reasons(plan))}."
    )


def refusals(plan: Plan) -> list[str]:
    """Sentences that refuse the examples of a plan in which every layout is refused, each once."""
    examples = [Layout.parse(rejected.example) for rejected in plan.rejected]
    return list(dict.fromkeys(sentence for one in examples for sentence in plan.workload.refusals(one)))


def least_need(plan: Plan) -> list[str]:
    """Sentences that say how much the smallest layout needs."""
    workload, cluster = plan.workload, plan.cluster
    sentences = [
        f"No layout of {cluster.gpus} x {cluster.gpu.name} fits {workload.model} at {workload.seq_len} tokens"
        f"{' with the fields of it that are fixed' * bool(plan.fixed)}; {memory_limit(cluster)}."
    ]
    if nearest := plan.nearest(1):
        need = memory_need(nearest[0].memory, cluster)
        sentences.append(f"The layout that needs least is {nearest[0].layout}: {need}.")
    else:
        sentences += [f"{reason}." for reason in _reasons(plan)[:4]]
    return sentences


def what_would_fit(plan: Plan, lighter: Lighter, count: Count) -> list[str]:
    """Sentences on the `remedies` that would fit; where the plan has fixed fields, the best layout without
    them is one more.
    """
    fitting = list(remedies(plan.workload, plan.cluster, lighter, count))
    if plan.fixed and (free := best_fitting(plan.workload, plan.cluster)):
        fitting.insert(0, Outcome.of_layout("no field fixed", plan.workload, free, None))
    if not fitting:
        return ["None of the changes that were tried would fit."]
    fits = "; ".join(outcome.remedy for outcome in fitting)
    return [f"What would fit: {fits}.", *_cautions(fitting, plan.workload)]


def _reasons(plan: Plan) -> list[str]:
    """Reasons for which layouts were refused, each with their number and an example."""
    return [
        f"{rejected.reason.rstrip('.')} ({counted(rejected.count, 'layout')}, such as {rejected.example})"
        for rejected in plan.rejected
    ]


def _cautions(outcomes: Sequence[Outcome], workload: Workload) -> list[str]:
    """The cautions of precisions and optimizers that the outcomes offer."""
    changed = [one.change for one in outcomes if one.change.kind in ("precision", "optimizer")]
    cautions = [caution(change.workload.precision, change.workload.optimizer) for change in changed]
    rule = OPTIMIZERS[workload.optimizer].constants
    other = any(OPTIMIZERS[change.workload.optimizer].constants != rule for change in changed)
    if any(one.change.setting == "method=qlora" for one in outcomes):
        cautions.append(FOUR_BITS)
    return list(filter(None, (*cautions, OTHER_OPTIMIZER * other)))


def out_of_memory(failed: Choice, workload: Workload, lighter: Lighter = dict) -> list[str]:
    """Sentences for a run that ran out of memory: its predicted peak by category, and what needs less.

    That is at most NEXT_TRY of the predicted peak: up to two other layouts or, if there is none, `remedies`.
    failed: the run's layout and what was predicted for it. lighter: as in `remedies`.
    """
    memory = failed.memory
    bytes_of = {category: getattr(memory, category) for category in CATEGORIES}
    largest_first = sorted(CATEGORIES, key=lambda category: -bytes_of[category])
    listed = ", ".join(
        f"{CATEGORY_NAMES[category]} {human(bytes_of[category])}"
        for category in largest_first
        if bytes_of[category] >= 1
    )
    predicted = (
        f"Predicted for {failed.layout}: a peak of {human(memory.peak)} (at: {EVENTS[int(memory.event)]}): "
        f"{listed}. The largest part is {CATEGORY_NAMES[largest_first[0]]}."
    )
    smaller = replace(failed.cluster, memory=min(failed.cluster.memory, NEXT_TRY * memory.peak))
    others = search(workload, replace(smaller, memory_margin=0.0)).best(2)
    fitting = [Outcome.of_layout("less memory", workload, choice, failed) for choice in others]
    if not (fitting := fitting or list(remedies(workload, smaller, lighter))):
        return [predicted, "None of the changes that were tried needs less."]
    listed = "; ".join(outcome.remedy for outcome in fitting)
    return [predicted, f"What needs less, fastest first: {listed}.", *_cautions(fitting, workload)]
