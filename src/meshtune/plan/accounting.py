"""Memory accounting of a software stack, as data: bytes per parameter, per activation, per logit.

stacks.toml has a `memory` table for each stack; `engine_accounting` is this engine without a GPU's overhead.
The formulas of memory/ read these values instead of branching by stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from meshtune.errors import Table
from meshtune.optimizers import BUCKET_ELEMENTS, OPTIMIZERS, updated_by
from meshtune.placement.census import BackwardBytes, BlockPeaks
from meshtune.placement.columns import Columns, Number
from meshtune.placement.states import LOSS_CHUNK_TOKENS, Copies, copies_of, loss_chunk_tokens
from meshtune.plan.hardware import memory_of
from meshtune.plan.work import Kept, Traced, Work
from meshtune.precision import PRECISIONS

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.workload import Workload


Context = Literal["gathered", "copied", "sent on"]  # what context parallelism does with keys and values


class Saved(NamedTuple):
    """Bytes that a block's forward saves per token, by what they grow with."""

    outside: float  # per hidden feature, outside attention and MLP (sp splits it)
    entering: float  # per hidden feature of the inputs of the first matrices that tp cuts
    queries: float  # per feature of the queries
    keys: float  # per feature of keys and values
    heads: float  # per attention head
    output: float  # per feature of the attention core's output
    wide: float  # per widened feature of the MLP
    scores: float  # per head and key, where attention scores are written to memory
    constant: float = 0  # per token
    narrow: float = 0  # per feature that the MLP's last matrix reads

    def per_token(self, work: Work, seq_len: Number) -> Kept:
        """Bytes per token that an average block of a plain decoder saves.

        seq_len: keys per query where scores are written to memory; of no effect where `scores` is 0.
        """
        queries = sum(core.count * core.query_heads * core.qk_dim for core in work.cores)
        outputs = sum(core.count * core.query_heads * core.v_dim for core in work.cores)
        keys = sum(core.count * core.key_heads * (core.qk_dim + core.v_dim) for core in work.cores)
        heads = sum(core.count * core.query_heads for core in work.cores)
        read = sum(matrix.count * matrix.cols for matrix in work.matrices if matrix.cut == "cols")
        return Kept(
            outside=self.outside * work.hidden + self.constant,
            entering=self.entering * work.hidden,
            attention=0.0,
            mlp=self.wide * work.wide + self.narrow * (read - outputs),
            core=self.queries * queries + self.keys * keys + self.output * outputs,
            keys=self.keys * keys,
            statistics=self.heads * heads + self.scores * heads * seq_len,
        )


# Hugging Face's Llama with a flash kernel, bf16, measured to the byte: 20h + 4·h_kv + 8f + 4a + 8
EAGER = Saved(outside=12, entering=4, queries=2, keys=2, heads=4, output=2, wide=4, scores=0, constant=8)


class Peaks(NamedTuple):
    """Bytes per token of `BlockPeaks`, for a number of keys."""

    forward: Number
    forward_again: Number
    forward_alone: Number
    backward: tuple[BackwardBytes, ...]  # as of `BlockPeaks`, `keys` multiplied with them
    gathered: tuple[BackwardBytes, ...]
    masks: Number
    saves_input: Number  # 1 or 0

    @property
    def numbers(self) -> tuple[Number, ...]:
        """All but those of the backward."""
        return self.forward, self.forward_again, self.forward_alone, self.masks, self.saves_input

    @classmethod
    def of(cls, traced: BlockPeaks, keys: Number) -> Peaks:
        """Return them with `keys` a token."""
        forward, again, alone = (
            per_token + per_key * keys
            for per_token, per_key in (traced.forward, traced.forward_again, traced.forward_alone)
        )
        backward, gathered = (
            tuple(time._replace(keys=time.keys * keys) for time in times)
            for times in (traced.backward, traced.gathered)
        )
        return cls(forward, again, alone, backward, gathered, traced.masks * keys, float(traced.saves_input))


def _by_rows(layouts: Columns, one: Iterable[Number], several: Iterable[Number]) -> Iterator[Number]:
    """Choose for each layout by the rows of its micro-batches."""
    for of_one, of_several in zip(one, several, strict=True):
        yield np.where(layouts.micro_batch_size > 1, of_several, of_one)


SAVED = {"saved", "selected"}  # fields of Accounting that are a Saved


@dataclass(frozen=True)
class Accounting:
    """Rules by which one stack in one precision uses memory; the keys of a `memory` table in stacks.toml.

    Defaults are this engine's, without a GPU's overhead.
    """

    precision: Copies
    element: float = 2  # bytes of an element of activations
    bucket_elements: float = BUCKET_ELEMENTS  # whose gradients an update converts at a time
    slice_bytes: float = 0.0  # made for each element of a slice of an update that is not compiled
    offload: bool = False  # the optimizer's states are in host memory, and masters that ZeRO does not shard
    in_backward: bool = False  # a gradient is freed once it is complete, behind its update
    mlp_tile: float = math.inf  # tokens of a rank that an MLP runs on at a time
    shards_masters: bool = True  # ZeRO's shards are the masters; weights are gathered from them (FSDP)
    frees_added_gradients: bool = False  # with a sum: freed once added, else kept until the next ones
    whole_vocabulary_gradients: bool = False  # embedding's and head's: made whole, then added to a sum

    # Bytes per parameter, and per parameter of ZeRO's shard, of contiguous communication and optimizer
    # buffers. The caching allocator reserves them separately: they never reuse activation memory.
    flat_buffers: float = 0.0
    flat_shard_buffers: float = 0.0

    # Bytes per element of one tensor for each shape of a weight's gradient, those of a block and of the head.
    shape_buffers: float = 0.0

    regathers_inputs: bool = False  # the stack always runs sp as sp_regather does
    context_keys: Context = "gathered"  # what attention saves of the keys of cp's ranks: `from_other_ranks`
    wide_masks: bool = False  # an eager block saves dropout's masks as wide as its inputs
    saved: Saved | None = None  # by a block; None: as the model was traced, or EAGER
    selected: Saved | None = None  # by a block under selective recomputation; None: all matmul outputs

    # Tokens whose logits exist at a time; inf: all, and no hidden states are copied.
    loss_chunk: float = LOSS_CHUNK_TOKENS
    loss_memory: float = 0.0  # of states.loss_chunk_tokens, where tp does not split the vocabulary
    # Bytes per logit of these tokens:
    logit: float = 8  # at the peak of the loss
    logit_split: float = 0.0  # added to `logit` where tp splits the vocabulary
    gathers_logits: bool = False  # each tp rank holds all logits: the split head's output is gathered
    logit_head_backward: float = 0.0  # still held while the gradients of the head are computed
    fused_norms: bool = False  # a norm saves its input as it is; else copies in fp32

    ends_apart: bool = True  # ZeRO-3 holds neither embedding nor head in the backward, and them not together
    gathered_groups: float = 2  # blocks whose whole weights ZeRO-3 holds at a time
    reduce_bytes: float = 4  # of an element of a gradient in its reduce-scatter or all-reduce; 0: in place
    receive_buffers: float = math.inf  # micro-batches that a pipeline rank can receive at once, at most
    keeps_sent: float = 1.0  # 1: the output that a stage sent stays until its backward; 0: it doesn't
    stage_cut: str = "blocks"  # how a pipeline is cut, see Stages.cut: blocks, slots or matmuls

    reserved: float = 0.0  # share of activations, logits and communication that the allocator holds on top
    own_streams: float = 0.0  # 1: and what FSDP2's streams keep for themselves (memory/tensors.py)
    context: float = 0.0  # bytes outside the allocator
    workspace: float = 0.0  # bytes in the allocator that are in no tensor of the model
    communicator: float = 0.0  # bytes of each process group (placement/ranks.py)

    @property
    def flex(self) -> bool:
        """True if flex attention runs cores that no flash kernel knows, as this engine's does on CUDA."""
        return self.context_keys == "copied" and not self.wide_masks

    def chunk_tokens(self, work: Work, layouts: Columns) -> Number:
        """Tokens whose logits exist at a time."""
        if not self.loss_memory:
            return self.loss_chunk
        whole = loss_chunk_tokens(self.loss_memory, work.vocabulary, self.element)
        return np.where(layouts.tp > 1, self.loss_chunk, whole)

    def gathers_shards(self, layouts: Columns) -> Number:
        """True where weights are gathered from shards, as FSDP does."""
        return (layouts.zero > 0) & self.shards_masters

    def regathers(self, layouts: Columns) -> Number:
        """True where the inputs of attention and MLP are saved split by sp and gathered in the backward."""
        return (layouts.sp > 0) & ((layouts.sp_regather > 0) | self.regathers_inputs)

    def saved_per_token(
        self, work: Work, layouts: Columns, seq_len: Number, *, fullest: bool = False
    ) -> Kept:
        """Bytes per token that a block saves: as `saved` has it, without that as it was traced, or EAGER.

        Experts' part is that of the rank with most rows. fullest: of the block that saves most, not of the
        average one.
        """
        several, one = self._traced(work)
        if several is None or one is None:
            kept = (self.saved or EAGER).per_token(work, seq_len)
        elif fullest and one is several:
            kept = several.fullest.with_keys(seq_len)
        else:
            kept = Kept(*_by_rows(layouts, one.kept, several.kept)).with_keys(seq_len)
        more = work.most_rows(layouts) - 1
        return kept._replace(mlp=kept.mlp + more * self.element * work.expert_features)

    def _traced(self, work: Work) -> tuple[Traced | None, Traced | None]:
        """Traces with (several rows, one row) a micro-batch; None if nothing was, or the stack saves
        by its own rule.
        """
        several = None if self.saved else work.traced.get(int(self.element))
        one = several and work.traced_of_one_row.get(int(self.element), several)
        if self.wide_masks and several and one:
            return several.wide_masks or several, one.wide_masks or one
        return several, one

    def traced_peaks(self, work: Work, layouts: Columns, seq_len: Number) -> Peaks | None:
        """Most bytes per token of a block's passes; None if they were not traced or the stack saves by its
        own rule.
        """
        several, one = ((traced and traced.peaks) for traced in self._traced(work))
        if several is None or one is None:
            return None
        found, of_one = Peaks.of(several, seq_len), Peaks.of(one, seq_len)
        if one is several:
            return found
        forward, again, alone, masks, saves_input = _by_rows(layouts, of_one.numbers, found.numbers)
        rows = layouts.micro_batch_size > 1
        backward, gathered = (
            (
                *(time._replace(outside=np.where(rows, -np.inf, time.outside)) for time in ones),
                *(time._replace(outside=np.where(rows, time.outside, -np.inf)) for time in others),
            )
            for ones, others in ((of_one.backward, found.backward), (of_one.gathered, found.gathered))
        )
        return Peaks(forward, again, alone, backward, gathered, masks, saves_input)

    def gradient_replicas(self, layouts: Columns) -> Number:
        """Ranks that all-reduce each block's gradients; 1 where FSDP reduces them."""
        return np.where(self.gathers_shards(layouts), 1.0, layouts.parameter_ranks)


def engine_accounting(
    precision: str, reduce_dtype: str = "fp32", optimizer: str = "adamw", **others: Any
) -> Accounting:
    """Accounting of this engine (optim/, train/loss.py, parallel/), without a GPU's overhead.

    precision, reduce_dtype, optimizer: as in the settings. others: more fields of Accounting, but not
    `precision`, `element` and `reduce_bytes`, which follow from the settings.
    """
    copies = copies_of(precision, reduce_dtype, optimizer)
    trained = PRECISIONS[precision].trained
    row = OPTIMIZERS[updated_by(optimizer, trained)]
    in_16 = trained == "bfloat16" and row.slice_bytes_in_16
    others = {"bucket_elements": row.bucket_elements, "slice_bytes": in_16 or row.slice_bytes, **others}
    return Accounting(copies, element=copies.weight, reduce_bytes=copies.accumulated, **others)


def stack_accounting(
    stack: str, precision: str, reduce_dtype: str = "fp32", optimizer: str = "adamw"
) -> Accounting:
    """Accounting of a stack of stacks.toml in this precision (fp32, fp16, bf16 …).

    8-bit matmuls are counted as bf16 with what the stack's table of fp8 changes, if it has one. Fields that
    its tables leave out are as in `engine_accounting`; but if the stack has bytes of its own for the
    precision (a `precision` key), reduce_dtype and optimizer have no effect, and those fields are
    Accounting's defaults. Raises UserError for a precision that the stack has no table of.
    """
    eight_bits = precision in ("fp8", "fp8-rowwise", "mxfp8")
    return _stack_accounting(stack, "bf16" if eight_bits else precision, reduce_dtype, optimizer, eight_bits)


@cache
def _stack_accounting(
    stack: str, precision: str, reduce_dtype: str, optimizer: str, eight_bits: bool
) -> Accounting:
    fields: dict[str, Any] = {}
    by_precision: Table[dict[str, Any]] = Table(f"precision of the stack {stack}", {})
    for key, value in memory_of(stack).items():
        by_kind = isinstance(value, dict) and key not in SAVED
        (by_precision if by_kind else fields)[key] = value
    changed = by_precision.pop("fp8", {})
    fields |= by_precision[precision] | (changed if eight_bits else {})
    for key in SAVED & fields.keys():
        fields[key] = Saved(**{name: float(number) for name, number in fields[key].items()})
    copies = fields.pop("precision", None)
    if copies is None:
        return engine_accounting(precision, reduce_dtype, optimizer, **fields)
    return Accounting(Copies(*copies), **fields)


def accounting_of(workload: Workload, cluster: Cluster) -> Accounting:
    """Accounting of the workload's stack on the cluster's devices.

    A processor has no CUDA context or communicators, and the system's allocator: no overhead is counted. Its
    dropout saves wide masks.
    """
    accounting = stack_accounting(
        workload.stack, workload.precision, workload.reduce_dtype, workload.optimizer
    )
    accounting = replace(
        accounting,
        loss_memory=workload.loss_memory(cluster),
        in_backward=workload.step_in_backward,
        offload=workload.offload != "none",
        mlp_tile=workload.mlp_tile or math.inf,
        slice_bytes=accounting.slice_bytes * workload.slices(cluster),
    )
    if cluster.gpu.processor:
        return replace(
            accounting,
            reserved=0.0,
            own_streams=0.0,
            context=0.0,
            communicator=0.0,
            wide_masks=True,
        )
    return accounting
