"""From plain values to this rank's parallel model, optimizer and passes: one path for any number of ranks.

    ModelSpec ─> skeleton (parameters on meta) ─> cut: this rank's stages, split and sharded  (`structure`)
                                               ─> place: their memory
                 mapped files or drawn values  ─> fill: this rank's slices of each parameter
                 OptimizerSpec                 ─> Optimizer over them ─> Passes               (`ready`)

Takes no settings, tokenizer, run folder or tracker.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from meshtune.attention import flash
from meshtune.attention.register import keep_documents_apart, register
from meshtune.experts.register import use_products
from meshtune.experts.routers import freeze_routers, router_paths
from meshtune.launch.installed import FLASH_4
from meshtune.layout import ZERO_BUBBLE, Layout
from meshtune.meter.phases import PhaseMemory
from meshtune.model.anatomy import anatomy, aside_names, attention_drops, fill_aside
from meshtune.model.body import ATTENTION_NAMES, cast_position_tables
from meshtune.model.census_cache import LoraShape
from meshtune.model.files import refuse_coarse, resolve
from meshtune.model.load import drawn, freeze, grow_embeddings, mapped, skeleton, train_tables
from meshtune.model.lora import (
    add_lora,
    frozen_matrices,
    initial_adapters,
    initial_magnitude,
    lora_layers,
    modules_named,
)
from meshtune.model.pieces import Piece, StoredTensors, fill, joined, materialise, whole_pieces
from meshtune.model.trace import census_of
from meshtune.optim.optimizer import Optimizer, key_of, parts_of
from meshtune.parallel.apply import Cut, Finish, Parallel, cut, place
from meshtune.parallel.mesh import World
from meshtune.parallel.noise import Neftune
from meshtune.parallel.zero import local
from meshtune.placement.census import Census, head_shards
from meshtune.placement.experts import BalanceSpec
from meshtune.placement.share import census_stages, stage_of_rank
from meshtune.precision import PRECISIONS
from meshtune.quantised import nf4
from meshtune.routers.balance import Balance, balance_of
from meshtune.train.loss import TokenLoss, head_loss
from meshtune.train.preference import Preference, PreferenceSpec
from meshtune.train.step import Passes


@dataclass(frozen=True, kw_only=True)
class LoraSpec(LoraShape):
    """Low-rank adapters (Hu et al. 2021); the other parameters are frozen."""

    alpha: float = 32.0  # an adapter's output is scaled by alpha / r
    use_rslora: bool = False  # by alpha / √r


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer and its constants."""

    name: str = "adamw"  # a row of optimizers.OPTIMIZERS
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    in_backward: bool = False  # each update is made once its gradient is complete
    offload: bool = False  # states, and masters next to the parameters, are kept in host memory


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model to train, as plain values."""

    source: str | PretrainedConfig  # a hub id, a folder, or (with init="random") a configuration
    init: Literal["pretrained", "random"] = "pretrained"
    draw_on: str = "cpu"  # where random weights are drawn; a GPU draws other values than transformers, sooner
    revision: str | None = None
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)  # values in config.json, of a named source
    attention: str = "meshtune"  # the name of a registered attention function
    kernels: str = "cpu"  # the kind of device whose attention kernels run: "cpu" or "cuda"
    memory: float = 0.0  # bytes of the GPU; 0: it runs on a processor
    precision: str = "bf16"  # a row of precision.PRECISIONS
    reduce_dtype: str = "fp32"  # gradients of several micro-batches or ranks are summed in it
    lora: LoraSpec | None = None  # None: all parameters are trained
    quantise: str = ""  # dtype, by torch's name, of frozen matrices before 4 bits; "": they stay
    freeze: tuple[str, ...] = ()  # globs of parameter names
    embeddings: int = 0  # rows that the embedding must have at least: the tokenizer's tokens
    label_smoothing: float = 0.0  # of the training loss; evaluation has none
    neftune_alpha: float = 0.0  # of the noise on the embeddings in training
    compile: bool = False  # block by block
    mlp_tile: int | None = None  # tokens that an MLP runs on at a time; None: all
    preference: PreferenceSpec | None = None  # what is learned; None: the labelled tokens
    balance: BalanceSpec = BalanceSpec()  # noqa: RUF009 - a frozen value
    freeze_router: bool | None = None  # of a mixture of experts; None: next to adapters
    seed: int = 0  # of random weights and NEFTune's noise

    @property
    def scored(self) -> bool:
        """Whether the head is one output."""
        return bool(self.preference and self.preference.row.scores)

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, PRECISIONS[self.precision].compute)

    @property
    def trained_dtype(self) -> torch.dtype:
        return getattr(torch, PRECISIONS[self.precision].trained)

    @property
    def loading_dtype(self) -> torch.dtype:
        """The dtype that weights are read as: a frozen base's is that of the passes."""
        return self.compute_dtype if self.lora else self.trained_dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients of micro-batches and ranks add up."""
        return getattr(torch, PRECISIONS[self.precision].summed(self.reduce_dtype))


@dataclass(frozen=True)
class RankModel:
    """One rank's part of a model, ready to train."""

    spec: ModelSpec
    whole: PreTrainedModel  # the unsharded model, its parameters on meta: names, shapes, configuration
    census: Census  # of the whole model
    parallel: Parallel
    optimizer: Optimizer
    passes: Passes
    added_embeddings: int  # rows that the embedding gained
    flash: int | None = None  # version of FlashAttention that its attention runs; None: another kernel
    flash_notes: Sequence[str] = ()  # as `flash_of` returns them

    def memory(self, **options: Any) -> PhaseMemory:
        """Make what watches this rank's memory. options: of PhaseMemory."""
        return PhaseMemory(
            self.parallel.modules, self.optimizer, self.parallel.world.device,
            buffers=self.parallel.receive_buffers, **options,
        )  # fmt: skip

    def pieces(self, state: dict[str, Tensor]) -> dict[str, Tensor | Piece]:
        """Optimizer.state's tensors as pieces of the whole model's, under the names they have there."""
        parameters, pieces = dict(self.parallel.named_parameters()), {}
        for key, tensor in state.items():
            kind, name, state_name = parts_of(key)
            whole_key = key_of(kind, self.parallel.tied.get(name, name), state_name)
            if whole_key not in pieces:  # a tied copy on the same rank (V schedules) is the same tensor
                own, shape = local(parameters[name]), tensor.shape
                if shape == own.shape and tensor.ndim > 0:
                    pieces[whole_key] = self.parallel.piece(name, parameters[name], tensor)
                elif len(shape) == own.ndim and shape[:-1] == own.shape[:-1] and tensor.ndim > 0:
                    whole = self.parallel.piece(name, parameters[name], own)
                    pieces[whole_key] = whole.in_blocks(tensor)
                else:  # a scalar, a row or a column: whole on every rank that has the parameter
                    pieces[whole_key] = tensor
        return pieces


def rank_model(
    spec: ModelSpec,
    world: World,
    *,
    optimizer: OptimizerSpec,
    tokens_per_sequence: int = 2048,
    token_loss: TokenLoss | None = None,
) -> RankModel:
    """Build this rank's part of the model on `world.device` under `world.layout`; every rank calls it.

    tokens_per_sequence: sequence length by whose FLOPs blocks are given to pipeline stages. token_loss:
    instead of the cross entropy. The whole model
    never exists on any rank of several. Adapters are drawn from torch's global generator. Raises UserError
    for whatever is wrong with the model's files, and for a family whose attention pattern can't be kept.
    """
    made = structure(spec, world, tokens_per_sequence=tokens_per_sequence, token_loss=token_loss)
    version, notes = flash_of(spec, made, world)
    # Masters of a whole model that stay in host memory are loaded there; those of adapters are small.
    masters = spec.trained_dtype != spec.compute_dtype and not world.layout.zero
    loaded_on_host = optimizer.offload and masters and not spec.lora
    parallel = place(made.cut, world, torch.device("cpu") if loaded_on_host else world.device)
    models = [made.whole, *(stage.model for stage in parallel.stages)]
    adapters = initial_adapters(made.whole)
    fill_values(spec, parallel.named_pieces(), models, adapters, export=world.main)
    own = [stage.model for stage in parallel.stages]
    balance = balance_of(spec.balance, made.whole, own, world, sums=token_loss is not None)
    model = ready(spec, made, parallel, optimizer, balance)
    if loaded_on_host:
        parallel.modules.to(world.device)
    return replace(model, flash=version, flash_notes=notes)


@dataclass(frozen=True)
class Structure:
    """One rank's part of a model before it has memory."""

    whole: PreTrainedModel  # the unsharded model, its parameters on meta
    census: Census  # of the whole model
    cut: Cut
    added_embeddings: int  # rows that the embedding gained
    objective: TokenLoss | Preference | None  # instead of the cross entropy


def structure(
    spec: ModelSpec,
    world: World,
    *,
    tokens_per_sequence: int,
    token_loss: TokenLoss | None = None,
    counted: Census | None = None,
) -> Structure:
    """Cut this rank's part of the model out of its skeleton, without memory; every rank calls it.

    counted: the census of the model before its embedding grows, where it is at hand: counting takes seconds.
    The other arguments and the errors are those of `rank_model`.
    """
    layout = world.layout
    objective = token_loss or (Preference(spec.preference, world.cp) if spec.preference else None)
    if spec.init == "pretrained" and not spec.lora and isinstance(spec.source, str):
        refuse_coarse(resolve(spec.source, revision=spec.revision, weights=False))
    whole, added = trainable_skeleton(spec)
    census = counted if counted and not added else census_of(whole)
    if PRECISIONS[spec.precision].fp8:
        census.check_fp8(whole.name_or_path or census.family)
    stage_blocks = census_stages(census, layout, tokens_per_sequence)
    stages = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, world.pp.index)
    made = cut(
        lambda: trainable_skeleton(spec)[0],
        world,
        {stage: stage_blocks[stage] for stage in stages},
        finish=loss_of(layout, spec, objective),
        compute_dtype=spec.compute_dtype,
        reduce_dtype=spec.sum_dtype,
        compile=spec.compile,
        mlp_tile=spec.mlp_tile,
        quantise=bool(spec.quantise),
        fp8_recipe=PRECISIONS[spec.precision].fp8,
        emulate=spec.kernels == "cpu",
    )
    return Structure(whole, census, made, added, objective)


def ready(
    spec: ModelSpec,
    made: Structure,
    parallel: Parallel,
    optimizer: OptimizerSpec,
    balance: Balance | None = None,
) -> RankModel:
    """Give this rank's part of the model, with memory and values, its optimizer and passes."""
    trained = optimizer_of(spec, optimizer, parallel, blocks=f"{anatomy(made.whole).blocks}.")
    noise = Neftune(spec.neftune_alpha, spec.seed) if spec.neftune_alpha else None
    passes = Passes(parallel, trained, made.objective, noise, balance)
    return RankModel(spec, made.whole, made.census, parallel, trained, passes, made.added_embeddings)


def flash_of(spec: ModelSpec, made: Structure, world: World) -> tuple[int | None, list[str]]:
    """Choose the version of FlashAttention for a model, the same on all ranks. Every rank calls it.

    Returns it, None where the model's attention runs another kernel, and sentences on newer ones that don't
    run: refused, not installed, or not by all ranks.
    """
    layout = world.layout
    ulysses = layout.cp if layout.cp_method == "ulysses" else 1  # ranks that it gives heads
    shapes = dict.fromkeys(
        shape.on_rank(int(head_shards(block.whole_heads, layout.tp)) * ulysses)
        for block in made.census.blocks
        for shape in block.attention
        if flash.runs(shape, spec.compute_dtype)
    )
    ours = spec.attention in ATTENTION_NAMES and not attention_drops(made.whole)
    if world.device.type != "cuda" or not shapes or not ours:
        flash.restore()
        return None, []
    versions, pairs = flash.versions_here(world.device), spec.preference and spec.preference.row.documents > 1
    apart = bool(layout.cp > ulysses or pairs)  # a rejected answer may have another document's prompt
    version, notes = flash.choose(versions, shapes, spec.compute_dtype, world.device, apart=apart)
    if not versions and 4 in flash.versions_for(world.device):
        notes = [f"FlashAttention 4 may be faster than torch's 2 on this GPU: {FLASH_4}."]
    chosen = world.all_gather_object((version, notes))
    if len(on_ranks := {number for number, _ in chosen}) > 1:
        flash.restore()
        version, found = flash.BUILT_IN, " and ".join(map(str, sorted(on_ranks)))
        both = f"Ranks would run FlashAttention {found}: all run {version}. Install the same on all machines."
        notes = [*dict.fromkeys(note for _, of_rank in chosen for note in of_rank), both]
    return version, notes


def single_model(
    spec: ModelSpec, device: torch.device, *, modules_to_save: Collection[str] = ()
) -> PreTrainedModel:
    """The whole model with its weights on one device, with adapters and frozen parameters, in training mode
    and without an optimizer: for commands that generate, evaluate or export. Adapters are drawn anew.

    modules_to_save: of an adapter that is loaded later, next to layers in 4 bits; these stay as they are.
    """
    model, _ = trainable_skeleton(spec)
    adapters = initial_adapters(model)
    if spec.quantise:
        if not spec.lora:
            model.requires_grad_(False)
            for path in modules_named(model, modules_to_save):
                model.get_submodule(path).requires_grad_(True)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        nf4.quantise_weights(model, frozen_matrices(model), shapes, {})
    materialise(model, device)
    fill_values(spec, whole_pieces(model), [model], adapters, export=True)
    return model


def trainable_skeleton(spec: ModelSpec) -> tuple[PreTrainedModel, int]:
    """(The whole model in training mode, its parameters on meta, with adapters and frozen parameters; rows
    that its embedding gained).
    """
    from meshtune.train.self_check import check  # here: chains of imports stay short

    register()
    model = skeleton(
        spec.source,
        init=spec.init,
        dtype=spec.loading_dtype,
        attention=spec.attention,
        trust_remote_code=spec.trust_remote_code,
        revision=spec.revision,
        overrides=spec.overrides,
        scored=spec.scored,
    )
    check(model, spec.attention)
    parts = anatomy(model)
    keep_documents_apart(model, parts, spec.kernels)
    use_products(model, spec.kernels, spec.compute_dtype)
    added = grow_embeddings(model, spec.embeddings)
    cast_position_tables(model, spec.compute_dtype)
    if spec.lora:
        targets = spec.lora.target_modules
        add_lora(
            model,
            lora_rank=spec.lora.r,
            alpha=spec.lora.alpha,
            dropout=spec.lora.dropout,
            target_modules="all-linear" if targets == "all-linear" else list(targets),
            use_rslora=spec.lora.use_rslora,
            use_dora=spec.lora.use_dora,
            layers_to_transform=spec.lora.layers_to_transform,
            modules_to_save=spec.lora.modules_to_save,
            apart=router_paths(model, parts.blocks) if spec.freeze_router is not False else (),
            dtype=spec.trained_dtype,
        )
        if added:
            train_tables(model)
    if spec.freeze:
        freeze(model, spec.freeze)
    freeze_routers(model, parts.blocks, spec.freeze_router, adapts=spec.lora is not None)
    for parameter in model.parameters():
        dtype = spec.trained_dtype if parameter.requires_grad else spec.compute_dtype
        parameter.data = parameter.data.to(dtype)
    return model, added


def fill_values(
    spec: ModelSpec,
    pieces: Iterable[tuple[str, Piece]],
    models: Sequence[PreTrainedModel],
    adapters: Mapping[str, Tensor],
    *,
    export: bool,
) -> None:
    """Overwrite pieces of parameters, and the buffers of `models`, with the values of the model's files or
    with drawn ones. A drawn parameter is freed before the next one is drawn.

    pieces: (name of the parameter, its piece), with those of adapters. adapters: values of A and B, by name.
    export: True to give the first of `models` the values of the parts that were set aside.
    """
    aside, kept = set(aside_names(models[0])), {}
    quantised = getattr(torch, spec.quantise) if spec.quantise else spec.loading_dtype
    pieces, adapters = [*joined(pieces, quantised)], dict(adapters)
    dora = {
        f"{path}.weight": (f"{path}.lora_magnitude_vector", layer)
        for path, layer in lora_layers(models[0]).items()
        if layer.lora_magnitude_vector is not None
    }
    in_4_bits = {
        f"{path}.weight" for model in models for path, module in model.named_modules()
        if isinstance(module, nf4.Nf4Linear)
    }  # fmt: skip

    def add_magnitude(weight_name: str, weight: Tensor) -> None:
        name, layer = dora[weight_name]
        if weight_name in in_4_bits:
            weight = nf4.whole(nf4.codes_of(weight, quantised, weight.device), quantised)
        weight = weight.to(quantised)
        adapters[name] = initial_magnitude(layer, weight)

    source: dict[str, Any] = {
        "dtype": spec.loading_dtype, "trust_remote_code": spec.trust_remote_code, "revision": spec.revision,
        "overrides": spec.overrides, "scored": spec.scored, "seed": spec.seed,
    }  # fmt: skip
    if spec.init == "random":

        def receive(names: Sequence[str], whole: Tensor) -> None:
            for name in dora.keys() & names:
                add_magnitude(name, whole)
            kept.update({name: whole for name in names if export and name in aside})
            own = [(name, piece) for name, piece in pieces if name in names]
            fill(own, StoredTensors(dict.fromkeys(names, whole)))

        values = drawn(spec.source, receive, device=torch.device(spec.draw_on), **source)
        pieces = [(name, piece) for name, piece in pieces if name in adapters]
    else:
        values = mapped(spec.source, **source)
        for name in dora.keys() & {name for name, _ in pieces}:
            add_magnitude(name, values[name])
    fill_aside(models[0], {**values, **kept}, keep=export)
    weights = StoredTensors({**values, **adapters})
    fill(pieces, weights, free=True)
    for model in models:
        weights.copy_buffers(model)


def loss_of(layout: Layout, spec: ModelSpec, objective: TokenLoss | Preference | None) -> Finish:
    """The summed loss of a micro-batch from its last hidden states. Zero-bubble schedules run its backward
    twice. For CUDA it is compiled where the blocks are.
    """
    return partial(
        head_loss,
        single_backward=layout.schedule not in ZERO_BUBBLE,
        smoothing=spec.label_smoothing,
        fused=spec.compile and spec.kernels == "cuda",
        memory=spec.memory,
        objective=objective,
    )


def optimizer_of(spec: ModelSpec, values: OptimizerSpec, parallel: Parallel, blocks: str) -> Optimizer:
    """The optimizer of this rank's trainable parameters.

    Without ZeRO it makes masters, and casts the parameters in place, if the trained and the compute dtype
    differ; with ZeRO FSDP2 casts them for the passes and sums their gradients. values: its constants. blocks:
    prefix of the names of the blocks' parameters.
    Gradients of several micro-batches, data or context ranks are summed in spec.sum_dtype, if it is wider
    than theirs.
    """
    world = parallel.world
    compute = spec.trained_dtype if world.layout.zero else spec.compute_dtype
    several = world.parameter_ranks > 1 or world.layout.gradient_accumulation_steps > 1
    return Optimizer(
        parallel.named_parameters(),
        betas=values.betas,
        eps=values.eps,
        weight_decay=values.weight_decay,
        name=values.name,
        blocks=blocks,
        compute_dtype=compute if compute != spec.trained_dtype else None,
        sum_dtype=spec.sum_dtype if several and spec.sum_dtype.itemsize > compute.itemsize else None,
        copies=parallel.copies(),
        piece=lambda name, *own: (parallel.tied.get(name, name), parallel.piece(name, *own)),
        seed=spec.seed,
        compiled=spec.compile and spec.kernels == "cuda",
        in_backward=values.in_backward,
        late=parallel.partial,
        offload=world.device if values.offload else None,
    )
