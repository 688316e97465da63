"""The training that is planned: a model's work, and the settings that cost time or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.launch.installed import FLASH_4, newest_flash
from meshtune.layout import Layout
from meshtune.objectives import OBJECTIVES
from meshtune.optimizers import checkpoint_bytes
from meshtune.placement.census import takes_flash
from meshtune.placement.columns import Columns
from meshtune.placement.experts import BalanceSpec, splittable
from meshtune.placement.rules import Rule, Traits, compiles, rules, sentences
from meshtune.plan.hardware import Gpu, attention_kernel
from meshtune.plan.programs import MESHTUNE, Tool
from meshtune.plan.work import Work, attended, with_score
from meshtune.precision import DTYPE_BYTES, PRECISIONS, SCALE_BLOCK
from meshtune.units import Number, count, few

if TYPE_CHECKING:
    from meshtune.placement.census import Census
    from meshtune.placement.numbers import ModelNumbers
    from meshtune.plan.cluster import Cluster

UNDROPPED = "lora.dropout=0"  # the setting for adapters without dropout


@dataclass(frozen=True)
class Workload:
    """A model, a global batch and the settings that cost time or memory; the cluster is not part of it."""

    model: str  # its name or folder, for sentences
    work: Work  # adapters included
    traits: Traits
    seq_len: int  # tokens
    global_batch_size: int  # sequences
    objective: str = "sft"  # as in the settings; `work` has its passes
    mean_document_tokens: float | None = None  # as in seconds.step.step; None: whole sequences
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    optimizer: str = "adamw"
    step_in_backward: bool = False
    mlp_tile: int | None = None  # tokens of a rank that an MLP runs on at a time; None: all
    offload: str = "none"  # train.offload
    balance: BalanceSpec = BalanceSpec()  # noqa: RUF009 - a frozen value
    compile: bool | Literal["auto"] = False  # "auto": `compiles` says under which layouts
    packing: bool = True
    shared_prompts: bool = False
    attention: str = "meshtune"  # implementation that the model is built with
    flash: int | None = 4  # newest version of FlashAttention that it can run; None: other kernels run
    positions: int | None = None  # tokens of the longest document that its positions are made for; None: any
    filled: float = 1  # share of the sequences' tokens that aren't padding: speed and MFU count these
    notes: tuple[str, ...] = ()  # sentences on the model that every answer says
    tool: Tool = MESHTUNE  # that runs it

    @property
    def tokens(self) -> float:
        """Tokens per optimizer step, without padding."""
        return self.global_batch_size * self.seq_len * self.filled

    @property
    def summed_dtype(self) -> str:
        """The dtype that gradients are summed in."""
        return PRECISIONS[self.precision].summed(self.reduce_dtype)

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: the trained weights and their optimizer states."""
        trained = float(self.work.parameters) * float(self.work.trainable)
        return checkpoint_bytes(trained, self.precision, self.optimizer)

    @property
    def document_tokens(self) -> float | None:
        """Mean length of the documents in a sequence, which none can exceed; None: whole sequences.

        A pair lies in one sequence: where no length is known, each side is a half of it.
        """
        if self.mean_document_tokens:
            return min(self.mean_document_tokens, float(self.seq_len))
        documents = OBJECTIVES[self.objective].documents
        return self.seq_len / documents if documents > 1 else None

    def block_flops(self, document_tokens: float | None = None, *, backward: bool = True) -> float:
        """Model FLOPs per token of an average block, forward and backward, without recomputation.

        Matmuls (no gradients of frozen weights) and causal attention in documents of this mean length, in
        tokens; None: whole sequences, whatever `self.document_tokens` is. backward: False: only the forward.
        """
        documents = document_tokens or self.seq_len
        matmuls = sum(
            2 * gemm.rows * gemm.cols * gemm.count * (1 + backward * (gemm.trainable + gemm.input_gradient))
            for gemm in self.work.matrices
        )
        cores = sum(
            2
            * (1 + 2 * backward * core.backward)
            * core.count
            * core.query_heads
            * (core.qk_dim + core.v_dim)
            * attended(documents, core.window)
            for core in self.work.cores
        )
        return float(matmuls + cores)

    @property
    def head_flops(self) -> float:
        """Model FLOPs per token of the head, forward and backward."""
        return float(2 * self.work.vocabulary * self.work.hidden * (2 + self.work.head_trainable))

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per token, forward and backward, without recomputation (docs/mfu.md).

        The forward over mismatched answers counts; a second forward of the head is a recomputation.
        """
        labelled = self.work.labelled / self.filled
        blocks = self.work.blocks * self.block_flops(self.document_tokens)
        forward = self.work.blocks * self.block_flops(self.document_tokens, backward=False)
        forward += labelled * 2 * self.work.vocabulary * self.work.hidden
        return float(blocks + labelled * self.head_flops + self.work.mismatched * forward)

    @property
    def reads_reference(self) -> bool:
        """Whether a reference model reads all rows before the first step."""
        return OBJECTIVES[self.objective].reference

    def of_batch(self, size: int) -> Workload:
        """The same with a global batch of `size` sequences."""
        return replace(self, global_batch_size=size)

    def of_labels(
        self, share: float | None, longest: int | None = None, tokens: float | None = None
    ) -> Workload:
        """The same with labels on a share of a sequence's tokens; None: not known, as they are.

        longest: tokens of the longest sequence, which micro-batches are as wide as; None: seq_len. tokens: of
        a step, without padding; None: all that the sequences have room for.
        """
        longest = longest or self.seq_len
        labelled = self.work.labelled if share is None else share * self.seq_len / longest
        filled = 1 if tokens is None else tokens / (self.global_batch_size * longest)
        return replace(self, seq_len=longest, filled=filled, work=replace(self.work, labelled=labelled))

    def compiles(self, gpu: Gpu, layouts: Columns) -> Number:
        """Mask of the layouts whose blocks are compiled on GPUs of a kind."""
        tiled = self.mlp_tile is not None
        return compiles(self.compile, self.traits, layouts, processor=gpu.processor, tiled=tiled)

    def under(self, gpu: Gpu, layout: Layout) -> Workload:
        """The same with train.compile decided for a layout on GPUs of a kind."""
        if self.compile != "auto":
            return self
        return self.compiled() if self.compiles(gpu, Columns.of([layout]))[0] else self.uncompiled()

    def uncompiled(self) -> Workload:
        """The same without train.compile, where that is still to be decided."""
        return replace(self, compile=False)

    def compiled(self) -> Workload:
        """The same under train.compile: `work` has what compiled blocks save."""
        if self.compile is True:
            return self
        return replace(self, work=self.work.compiled(fp8=PRECISIONS[self.precision].fp8), compile=True)

    def run_by(self, tool: Tool) -> Workload:
        """The same, run by another program: predicted with its constants, only under its layouts. Raises
        UserError for an objective whose passes in other programs are not known.
        """
        if tool is MESHTUNE:
            return self
        if self.objective != "sft":
            raise UserError(
                f"--for {tool.name} plans objective=sft: passes and memory of {tool.title} for objective="
                f"{self.objective} are not known. Leave --for out."
            )
        return replace(
            self,
            tool=tool,
            work=replace(self.work, traced={}, whole_heads=None) if tool.own_blocks else self.work,
            reduce_dtype=tool.reduce_dtype or self.reduce_dtype,
            attention=tool.name,
            step_in_backward=False,
            mlp_tile=None,
            offload="none",
            compile=self.compile is True,  # it compiles only where it is told to
        )

    @property
    def stack(self) -> str:
        """The stack of stacks.toml that predicts memory and time, once train.compile is decided: `under`."""
        assert self.compile != "auto"
        return self.tool.compiled if self.compile else self.tool.stack

    def fuses(self, cluster: Cluster) -> bool:
        """Whether this engine compiles its loss and its updates."""
        return self.tool is MESHTUNE and self.compile is True and not cluster.gpu.processor

    def slices(self, cluster: Cluster) -> bool:
        """Whether this engine's updates in one pass run uncompiled, on a slice at a time."""
        return self.tool is MESHTUNE and not self.fuses(cluster)

    def loss_memory(self, cluster: Cluster) -> float:
        """Bytes of a GPU by which this engine cuts the compiled loss; 0 where it is not compiled."""
        return cluster.memory * self.fuses(cluster)

    @property
    def flash_heads(self) -> list[Number]:
        """Sizes of the heads that FlashAttention runs on GPUs, one for each kind of layer that it runs."""
        if self.flash is None or self.attention != "meshtune":
            return []
        element, cores = DTYPE_BYTES[PRECISIONS[self.precision].compute], self.work.cores
        fits = (core.flash and np.all(takes_flash(core.qk_dim, core.v_dim, element)) for core in cores)
        return [np.maximum(core.qk_dim, core.v_dim) for core, fit in zip(cores, fits, strict=True) if fit]

    def attention_kernel(self, gpu: Gpu) -> str:
        """Name of the attention kernel (kernels.toml) that runs on GPUs of a kind."""
        heads = self.flash_heads
        return attention_kernel(self.tool.stack, gpu, self.flash if heads else None, heads)

    def attention_note(self, gpu: Gpu) -> str:
        """A sentence on the version of FlashAttention that is predicted, where GPUs of a kind run a newer one
        than torch's; "" elsewhere.
        """
        newest = replace(self, flash=4).attention_kernel(gpu)
        if newest != "flash-4" or gpu.attention_kernel or self.flash is None:
            return ""
        if (kernel := self.attention_kernel(gpu)) == "flash-2":
            return f"FlashAttention 4 may be faster than torch's on {gpu.name}: {FLASH_4}."
        return f"Predicted with FlashAttention {kernel[-1]}{f' ({FLASH_4})' * (kernel == newest)}."

    def rules(self) -> Iterator[Rule]:
        """Rules on the layouts that the model can be trained under, by this engine or by the tool."""
        if self.tool is MESHTUNE:
            yield from rules(
                self.traits, attention=self.attention, packing=self.packing,
                shared_prompts=self.shared_prompts, compile=self.compile,
                optimizer=self.optimizer, step_in_backward=self.step_in_backward,
                tiled=self.mlp_tile is not None,
                quantised=any(gemm.quantised for gemm in self.work.matrices),
                fp8=bool(PRECISIONS[self.precision].fp8), balance=self.balance,
            )  # fmt: skip
        else:  # its attention and its compiled blocks are its own
            yield from rules(replace(self.traits, attention=None))
            yield from self.tool.rules(int(self.work.blocks), self.seq_len)
            if not self.tool.replicates_keys:
                yield whole_key_heads(self.tool.title, self.traits.kv_heads)

    def refusals(self, layout: Layout) -> list[str]:
        """Sentences that say why the model can't be trained under a layout; none: it can."""
        return sentences(self.rules(), layout)


def whole_key_heads(tool: str, kv_heads: int) -> Rule:
    """Tensor-parallel ranks that would share a key-value head: transformers' attention has no such ranks.

    tool: its name, for the sentence.
    """
    return Rule(
        f"{tool} gives each tensor-parallel rank whole key-value heads, and tp does not divide {kv_heads}",
        lambda layouts: kv_heads % layouts.tp != 0,
        lambda layout: (
            f"{tool} gives each tensor-parallel rank whole key-value heads, and tp{layout.tp} does not "
            f"divide {kv_heads}; try tp{math.gcd(kv_heads, layout.tp)}."
        ),
    )


def here(_: Config) -> Tool:
    """Return this engine, which runs every config."""
    return MESHTUNE


class Uncounted(UserError):
    """Error: the FLOPs of the model are unknown, so that it can't be planned."""


def work_of(config: Config, census: Census) -> Work:
    """The work of a model with the passes of the objective, adapters with dropout and matrices in 4 bits."""
    objective = OBJECTIVES[config.objective]
    work = Work.of(with_score(census) if objective.scores else census)
    dropped = config.adapts and bool(config.lora.dropout)
    work = replace(work, imbalance=config.experts.imbalance, dropped=dropped)
    if config.quantise:
        work = work.quantised(DTYPE_BYTES[config.quantise])
    if objective.rows == "answers":
        return work
    if objective.scores:  # read at one token of a document
        return replace(work, labelled=objective.documents / config.data.seq_len)
    return replace(work, head_forwards=2.0, mismatched=float(objective.mismatched))


def workload_of(config: Config, numbers: ModelNumbers) -> Workload:
    """The workload of a config and of its model's numbers; the data need not exist. Raises Uncounted for a
    model that can't be planned.
    """
    model = config.model
    if numbers.census.unsupported:
        raise Uncounted(
            f"{model.name} can't be planned: {numbers.census.unsupported}. Name a layout to train it "
            "(layout=zero3x8-mb1)."
        )
    beyond = positions_note(
        model.name, config.data.seq_len, numbers.positions, config.data.mean_document_tokens
    )
    if PRECISIONS[config.train.precision].fp8:
        numbers.census.check_fp8(model.name)
    workload = Workload(
        model=model.name,
        work=work_of(config, numbers.census),
        objective=config.objective,
        traits=numbers.traits,
        attention=numbers.attention if model.attention == "auto" else model.attention,
        positions=numbers.positions,
        seq_len=config.data.seq_len,
        global_batch_size=config.global_batch_size,
        mean_document_tokens=config.data.mean_document_tokens,
        precision=config.train.precision,
        reduce_dtype=config.train.reduce_dtype,
        optimizer=config.train.optimizer,
        step_in_backward=config.train.step_in_backward,
        mlp_tile=config.train.mlp_tile,
        offload=config.train.offload,
        balance=BalanceSpec(**config.experts.balancing),
        packing=config.data.packing,
        shared_prompts=config.data.shared_prompts,
        flash=None if numbers.dropout else newest_flash(),
        compile="auto" if config.train.compile == "auto" else False,
    )
    uncounted = untraced_note(workload), dropout_note(numbers)
    # Experts of a model's own kind are 1 here; those with a norm inside can have adapters, and no ep.
    ours, ep = numbers.traits.experts > 1, config.partial_layout.given.get("ep")
    notes = numbers.text_part, experts_note(numbers), dora_note(config)
    notes = *notes, *method_notes(config, numbers.census, ours), objective_note(workload)
    notes = *notes, *uncounted, beyond, imbalance_note(config, numbers.traits, ep)
    workload = replace(workload, notes=(*numbers.changes, *filter(None, notes)))
    return workload.compiled() if config.train.compile is True else workload


def objective_note(workload: Workload) -> str | None:
    """Sentences on the passes that an objective adds to those of sft; None for sft."""
    objective = OBJECTIVES[workload.objective]
    if objective.rows == "answers":
        return None
    twice = "the head's forward runs twice, first for the log-probabilities of whole answers"
    said = ["the head has one output" if objective.scores else twice]
    if objective.mismatched:
        said.append("a step has one more forward, without gradients, over mismatched answers")
    if objective.reference:
        said.append("before the first step a reference of the same size reads every row once")
    if objective.documents > 1 and not workload.mean_document_tokens:
        said.append("each side of a pair is half a sequence long (or set data.mean_document_tokens)")
    if workload.shared_prompts:
        said.append("memory is without the copies of keys and values that answers to a shared prompt read")
    return f"objective={workload.objective}: {'; '.join(said)}."


EXPERTS_NOT_MEASURED = (
    "No measured run of meshtune validates predicted times of a mixture of experts; those of other programs "
    "with a balanced router are 20 % off on average. The simulated peaks of small ones in bf16 are up to 5 % "
    "larger than predicted."
)


def experts_note(numbers: ModelNumbers) -> str | None:
    """Sentences on what a plan of a mixture of experts leaves out; None for any other model."""
    census, traits = numbers.census, numbers.traits
    if not census.sparse:
        return None
    problems = {"tp": traits.tensor, "pp": traits.pipeline, "cp": traits.context}
    axes = [axis for axis, problem in problems.items() if problem is None]
    axes += ["ep"] * splittable(traits)
    return (
        f"{traits.name} is a mixture of experts: a token uses {count(census.total - census.idle)} of its "
        f"{count(census.total)} parameters. Its layouts are of {', '.join(['dp', *axes])} and ZeRO. "
        f"{EXPERTS_NOT_MEASURED}"
    )


def imbalance_note(config: Config, traits: Traits, ep: int | None) -> str | None:
    """A sentence on experts.imbalance where no ranks split the experts; else None. ep: None: to be chosen."""
    if config.experts.imbalance == 1 or (ep != 1 and splittable(traits)):
        return None
    why = "without ep in the layout each rank has all experts"
    if not splittable(traits):
        why = f"{traits.name} has no experts that several ranks split"
    return f"experts.imbalance={config.experts.imbalance:g} has no effect: {why}."


def untraced_note(workload: Workload) -> str | None:
    """A sentence on activations that were not traced in the workload's compute dtype; None if they were."""
    dtype = PRECISIONS[workload.precision].compute
    if DTYPE_BYTES[dtype] in workload.work.traced:
        return None
    return (
        f"The activations of {workload.traits.name} could not be traced in {dtype}: memory is predicted with "
        "a Llama's, and may be far too small. Check a layout with meshtune dryrun."
    )


def dropout_note(numbers: ModelNumbers) -> str | None:
    """A sentence on what dropout of the attention's weights adds and no plan counts; None without it."""
    if not numbers.dropout:
        return None
    return (
        f"The attention of {numbers.traits.name} has dropout, and runs without fast kernels. Memory and time "
        "are predicted as with them: peaks of small models are up to 8 % larger in meshtune dryrun."
    )


def dora_note(config: Config) -> str | None:
    """A sentence on what predicted times leave out of DoRA; None for other methods."""
    if not config.adapts or not config.lora.use_dora:
        return None
    return (
        "lora.use_dora: each forward also computes the norms of all adapted rows, and rescales their "
        "outputs. Predicted times leave that out; they are too short, most with few tokens a micro-batch."
    )


def wide_note(config: Config, census: Census) -> str | None:
    """A sentence on the blocks' frozen weights that method=qlora leaves as they are; None below 1 %."""
    frozen = [p for block in census.blocks for p in block.parameters if not p.trainable]
    whole = [p for p in frozen if len(p.shape) > 1 and not p.in_4_bits]
    share = sum(p.count for p in whole) / max(1, sum(p.count for p in frozen))
    if not config.quantise or share < 0.01:
        return None
    return (
        "method=qlora holds linear layers and experts in 4 bits whose columns are a multiple of "
        f"{SCALE_BLOCK}. Of the "
        f"blocks' frozen weights {share:.0%} stay in {config.quantise}: "
        f"{few(list(dict.fromkeys(p.name for p in whole)))}."
    )


def method_notes(config: Config, census: Census, ours: bool) -> Iterator[str | None]:
    """Yield sentences on weights that the method or precision leaves out, None for each that does not apply.

    ours: True for a model whose experts can have adapters.
    """
    yield wide_note(config, census)
    yield adapters_note(config, census, ours)
    yield fp8_note(config, census)


def adapters_note(config: Config, census: Census, ours: bool) -> str | None:
    """A sentence on experts next to adapters of other matrices; None where they have some, are trained whole,
    or are none. ours: see `method_notes`.
    """
    parameters = [p for block in census.blocks for p in block.parameters]
    other = [p for p in parameters if not p.linear and ("experts" in p.name or len(p.shape) == 3)]
    of_experts = [p for p in parameters if p.experts] if ours else other if census.sparse else []
    whole = bool(config.modules_to_save)
    have = any(p.kind == "adapter" or (whole and p.trainable) for p in of_experts)
    if not config.adapts or not of_experts or have:
        return None
    remedy = "lora.target_modules=[all-linear,experts] gives them some"
    return (
        f"Experts, {count(sum(p.count for p in of_experts))} of {count(census.total)} parameters, have no "
        f"adapters: {remedy if ours else f'those of {census.family} can have none; method=full trains them'}."
    )


def fp8_note(config: Config, census: Census) -> str | None:
    """A sentence on the matrices that are multiplied with in 8 bits; None without any."""
    if not PRECISIONS[config.train.precision].fp8:
        return None
    narrow, matrices, share = census.fp8
    return (
        f"train.precision={config.train.precision} multiplies with {narrow:,} of the blocks' {matrices:,} "
        f"matrices in 8-bit floats: {share:.0%} of the FLOPs of matmuls with weights. All else is as in bf16."
    )


def positions_note(
    name: str, seq_len: int, positions: int | None, document_tokens: float | None
) -> str | None:
    """A sentence if documents are longer than the model's positions reach; None if they aren't.

    name: of the model. positions: as in ModelNumbers. document_tokens: of a document; None: not known, up to
    whole sequences.
    """
    if positions is None or min(seq_len, document_tokens or seq_len) <= positions:
        return None
    return (
        f"data.seq_len={seq_len} goes beyond the {positions:,} positions of {name} "
        "(max_position_embeddings): longer documents need more, such as by a scaled rotary embedding "
        "(rope_scaling in its config.json)."
    )


def lighter_workloads(
    config: Config, numbers_of: Callable[[Config], ModelNumbers], tool_of: Callable[[Config], Tool] = here
) -> dict[str, Callable[[], Workload]]:
    """Functions that make workloads which need less memory, by the setting that asks for them: adapters
    without dropout, and adapters in place of all weights.

    Those that the config has already, or its tool can't train, are left out. numbers_of: returns the numbers
    of a config's model. tool_of: returns the tool that runs a config. The functions raise Uncounted as
    `workload_of`.
    """
    lighter = MESHTUNE.methods[MESHTUNE.methods.index(config.method) + 1 :]
    others: dict[str, dict[str, Any]] = {}
    if config.adapts and config.lora.dropout:
        others[UNDROPPED] = {"lora": config.lora.model_copy(update={"dropout": 0.0})}
    for method in lighter:
        if method in tool_of(config).methods:
            others[f"method={method}"] = {"method": method}

    def make(fields: dict[str, Any]) -> Workload:
        other = config.model_copy(update=fields)
        return workload_of(other, numbers_of(other)).run_by(tool_of(other))

    return {setting: partial(make, fields) for setting, fields in others.items()}
