"""The optimizer of a run: parameters may compute in a lower precision than they are trained in.

    precision   parameters  masters  gradients                           exp_avg, exp_avg_sq
    fp32, fp64  fp32, fp64  -        as the parameters                   as the parameters
    bf16        bf16        fp32     bf16, summed in fp32 if accumulated fp32
    bf16-pure   bf16        -        bf16, summed in fp32 if accumulated bf16

(AdamW's two states; the others' are in optimizers.py. Muon updates the blocks' matrices, AdamW the rest.)

Masters are the parameters as they were read: the model is loaded in fp32, its storage becomes the master and
the module gets a rounded copy, so nothing is held twice. `step` turns gradients into fp32 one bucket at a
time and frees them as it goes; the bf16 parameters are rounded from the masters once per step, never in the
forward pass.

Parameters that ZeRO shards (zero.py) hold fp32 shards, from which FSDP2 gathers them in bf16: the shards are
the masters, so that this is the case of the first line. An update acts on each element separately, so that
everything here is this rank's own shard, a plain tensor.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.model.pieces import Piece
from meshtune.optim.host import HostStates
from meshtune.optim.one_pass import RULES, OnePass
from meshtune.optim.updates import UPDATES, zeros
from meshtune.optimizers import BUCKET_ELEMENTS, OPTIMIZERS, updated_by
from meshtune.parallel.zero import local
from meshtune.placement.census import is_matrix


def decays(name: str, parameter: Tensor) -> bool:
    """True if weight decay acts: on 2 or more dimensions, unless the name ends with "bias".

    So norms and biases do not decay, as with transformers.Trainer.
    """
    return parameter.ndim >= 2 and not name.endswith("bias")


@dataclass
class Bucket:
    """Parameters that are stepped together; the three lists are parallel."""

    number: int  # among the optimizer's
    row: str  # of OPTIMIZERS, by which they are updated
    names: list[str]
    parameters: list[nn.Parameter]
    trained: list[Tensor]  # the masters; without masters the parameters, or this rank's shards of DTensors
    update: torch.optim.Optimizer | OnePass  # over `trained`


def of_whole(name: str, parameter: nn.Parameter, tensor: Tensor) -> tuple[str, Piece]:
    """A name and a tensor that is a whole parameter, as a piece of it."""
    return name, Piece(tuple(tensor.shape), (0,) * tensor.ndim, tensor)


class Optimizer:
    """Masters, gradient sums and updates of those of `named_parameters` that require gradients.

    name: a row of OPTIMIZERS. weight_decay: decoupled, on the parameters for which `decays` is true.
    blocks: prefix of the names of the blocks' parameters, for a row that updates only their matrices.
    compute_dtype: the parameters are cast to it at once, in place, and their old storage becomes the master
    weights; None: no masters, the parameters are trained as they are.
    sum_dtype: dtype in which the gradients of several micro-batches add up. Where a parameter has another, a
    hook moves each new .grad into a sum and leaves .grad None. None: autograd adds, in the parameters' dtype.
    copies: parameter name -> number of ranks that hold the same gradient, so that `local_squared_norm`,
    summed over all ranks, counts it once; 1 for a name left out, infinite for a gradient that is not to be
    counted.
    piece: gives the whole parameter's name and the piece of it that a trained tensor of one is; None: each is
    whole. seed: of what rounds by chance. compiled: an update is one kernel a parameter, where it can be.
    in_backward: `complete` updates a parameter and frees its gradient, after `begin`. late: names of
    parameters whose gradient is complete only after the backward; `step` updates those. offload: device of
    the updates, where states, and masters, are kept in host memory (host.py); None: they are not.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        name: str = "adamw",
        blocks: str = "",
        compute_dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype | None = None,
        copies: Mapping[str, float] | None = None,
        piece: Callable[[str, nn.Parameter, Tensor], tuple[str, Piece]] = of_whole,
        seed: int = 0,
        compiled: bool = False,
        in_backward: bool = False,
        late: Collection[str] = (),
        offload: torch.device | None = None,
    ) -> None:
        self.copies = copies or {}
        self.in_backward, self.late = in_backward, late
        self.rate: float | None = None  # of the updates in this backward; None: gradients are only freed
        self.norms: dict[str, Tensor] = {}  # of the gradients that this backward has freed
        self.factor = 1.0  # by which the step's gradients are still to be multiplied
        self.piece, self.own = piece, {"seed": seed, "compiled": compiled}
        constants = {"betas": betas, "eps": eps}
        trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.has_masters, self.buckets = compute_dtype is not None, []
        self.host = HostStates(offload) if offload else None
        for row, updated in by_row(name, trainable, blocks).items():
            size = OPTIMIZERS[row].bucket_elements if compute_dtype else None
            size = 1 if in_backward else BUCKET_ELEMENTS if offload else size
            for part in buckets(updated, size):
                self.buckets.append(self._bucket(part, row, constants, weight_decay, compute_dtype))
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.sum_dtype = sum_dtype
        self.summed = [p for _, p in trainable if sum_dtype not in (None, p.dtype)]
        for parameter in self.summed:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _bucket(
        self,
        named: list[tuple[str, nn.Parameter]],
        row: str,
        constants: Mapping[str, Any],
        weight_decay: float,
        compute_dtype: torch.dtype | None,
    ) -> Bucket:
        """Make a bucket of (name, parameter) pairs, cast to compute_dtype in place if it is given.

        row: of OPTIMIZERS. constants: betas and eps; the row's are used.
        """
        names, parameters = [name for name, _ in named], [p for _, p in named]
        trained: list[Tensor] = [p.data if compute_dtype else local(p) for p in parameters]
        if compute_dtype:
            for parameter in parameters:
                parameter.data = parameter.data.to(self.host.device if self.host else None, compute_dtype)
        decay = [weight_decay if decays(n, t) else 0.0 for n, t in zip(names, trained, strict=True)]
        taken = {key: constants[key] for key in OPTIMIZERS[row].constants}
        if row in RULES:
            wholes, pieces = zip(*map(self.piece, names, parameters, trained), strict=True)
            update = OnePass(row, wholes, pieces, decay, **taken, **self.own)
        else:
            groups = [
                {
                    "params": [t for t, d in zip(trained, decay, strict=True) if d == each],
                    "weight_decay": each,
                }
                for each in dict.fromkeys(decay)
            ]
            update = UPDATES[row](groups, **taken)
        if self.host is not None:
            self.host.hold(len(self.buckets), row, trained, update.state, masters=self.has_masters)
        return Bucket(len(self.buckets), row, names, parameters, trained, update)

    def _add(self, parameter: Tensor) -> None:
        """Hook after a micro-batch's backward: add .grad to the parameter's sum, and set it to None."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if parameter in self.sums:
            self.sums[parameter].add_(parameter.grad)
        else:
            self.sums[parameter] = parameter.grad.to(self.sum_dtype)
        parameter.grad = None

    def add_up(self) -> None:
        """Run `_add` for all, after a backward that runs no hooks (the halves of zero-bubble schedules)."""
        for parameter in self.summed:
            if parameter.grad is not None:
                self._add(parameter)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of each trained parameter; under ZeRO the sharded one."""
        for bucket in self.buckets:
            yield from zip(bucket.names, bucket.parameters, strict=True)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The step's gradient so far, in the dtype in which it is summed; None where there is none."""
        return self.sums.get(parameter, parameter.grad)

    def replace_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Make `gradient`, of any dtype, what `gradient(parameter)` gives; .grad becomes None."""
        self.sums[parameter], parameter.grad = gradient, None

    def named_gradients(self, among: Collection[str] | None = None) -> dict[str, Tensor]:
        """This rank's shards of the step's gradients so far, by name, in the dtype in which they add up.

        Plain tensors that share the gradients' memory. among: names of parameters; None: all. Parameters that
        are frozen or have no gradient yet are left out.
        """
        self.add_up()
        gradients = (
            (name, self.gradient(parameter))
            for bucket in self.buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
            if among is None or name in among
        )
        return {name: local(gradient) for name, gradient in gradients if gradient is not None}

    def gradients(self) -> list[Tensor]:
        """The step's gradients that exist so far; DTensors under ZeRO and tensor parallelism."""
        self.add_up()
        every = (self.gradient(parameter) for bucket in self.buckets for parameter in bucket.parameters)
        return [gradient for gradient in every if gradient is not None]

    def local_squared_norm(self) -> Tensor:
        """The sum of the squares of all gradients' elements, a scalar in fp64: this rank's share of it. Those
        that the backward has freed count.
        """
        norms = self.norms | _norms(self.named_gradients())
        names = [name for name, _ in self.named_parameters() if name in norms]
        if not names:
            return torch.zeros((), dtype=torch.float64)
        every = torch.stack([norms[name] for name in names]).double()
        return (every.square() / every.new_tensor([self.copies.get(name, 1) for name in names])).sum()

    def scale(self, factor: float) -> None:
        """Multiply this rank's gradients by `factor` in the next update."""
        self.factor *= factor

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale this rank's gradients by max_norm / (norm + 1e-6) if that is below 1.

        norm: the L2 norm of all ranks' gradients. max_norm: 0 leaves the gradients as they are. The formula
        is torch.nn.utils.clip_grad_norm_'s.
        """
        if max_norm and (factor := max_norm / (norm + 1e-6)) < 1:
            self.scale(factor)

    def begin(self, learning_rate: float | None, factor: float = 1.0) -> None:
        """Prepare a backward that updates parameters, with gradients times `factor`, and frees their
        gradients. None: it only frees them.
        """
        self.rate, self.factor, self.norms = learning_rate, factor, {}

    def watch(self) -> None:
        """Call `complete` behind each gradient; once, where nothing else completes gradients."""
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.complete)

    @torch.no_grad()
    def complete(self, parameter: Tensor) -> None:
        """Update a parameter whose gradient is complete, if that is to be in the backward, on the stream on
        which the gradient is made.
        """
        assert isinstance(parameter, nn.Parameter)
        gradient = self.gradient(parameter)
        if not self.in_backward or gradient is None:
            return
        bucket = self.bucket_of[parameter]
        (name,) = bucket.names
        if self.host is not None:
            self.host.settle()
        if name in self.late:  # as a view it would keep the memory of all gradients of its group
            gradient = gradient.clone()
            if parameter in self.sums:
                self.sums[parameter] = gradient
            else:
                parameter.grad = gradient
            return
        assert name not in self.norms, f"the gradient of {name} came in two parts, and its update is made"
        self.norms |= _norms({name: local(gradient)})
        del gradient
        if self.rate is None:
            self._taken(parameter)
        else:
            self._update(bucket, self.rate)
            if self.host is not None and isinstance(parameter, DTensor):
                self.host.settle()  # on a stream that only FSDP2's next reduce-scatter uses

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Make one update, free all gradients, and round the masters into the parameters."""
        updated = [bucket for bucket in self.buckets if self._has_gradient(bucket)]
        for bucket, after in zip(updated, [*updated[1:], None], strict=False):
            self._update(bucket, learning_rate, after)
        if self.host is not None:
            self.host.settle()
        self.factor, self.rate = 1.0, None

    def _has_gradient(self, bucket: Bucket) -> bool:
        return any(self.gradient(parameter) is not None for parameter in bucket.parameters)

    def _update(self, bucket: Bucket, learning_rate: float, after: Bucket | None = None) -> None:
        """Update the parameters of a bucket that have a gradient, and free it. after: the next bucket, whose
        states come from the host meanwhile.
        """
        if self.host is not None:
            self.host.use(bucket.number)
            if after is not None:
                self.host.bring(after.number)
        if isinstance(bucket.update, OnePass):
            rounded = [p.data if self.has_masters else None for p in bucket.parameters]
            gradients = [self._taken(parameter) for parameter in bucket.parameters]
            bucket.update.step(gradients, rounded, learning_rate, self.factor)
        else:
            self._step(bucket, bucket.update, learning_rate)
            self._publish(bucket)
        if self.host is not None:
            self.host.give_back(bucket.number)

    def _step(self, bucket: Bucket, update: torch.optim.Optimizer, learning_rate: float) -> None:
        """Make one update of a library's optimizer, which wants gradients in the trained tensors' dtype."""
        for group in update.param_groups:
            group["lr"] = learning_rate
        for parameter, trained in zip(bucket.parameters, bucket.trained, strict=True):
            gradient = self._taken(parameter)
            trained.grad = None if gradient is None else gradient.to(trained.dtype)
            gradient = None  # it may be the last to hold it
        gradients = [trained.grad for trained in bucket.trained if trained.grad is not None]
        if self.factor != 1 and gradients:
            if bucket.row == "adamw" and gradients[0].dtype == torch.float32:  # its kernel divides by this
                update.grad_scale = gradients[0].new_full((), 1 / self.factor, dtype=torch.float32)  # type: ignore[attr-defined]
            else:
                torch._foreach_mul_(gradients, self.factor)  # pyright: ignore[reportPrivateImportUsage]
        update.step()
        update.grad_scale = None  # type: ignore[attr-defined]
        for trained in bucket.trained:
            trained.grad = None

    def _taken(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's shard of the step's gradient, which the parameter and the sums give up."""
        gradient, parameter.grad = self.sums.pop(parameter, parameter.grad), None
        return None if gradient is None else local(gradient)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters, as after a step and after a checkpoint was read into the
        masters.
        """
        for bucket in self.buckets:
            self._publish(bucket)

    def _publish(self, bucket: Bucket) -> None:
        if self.has_masters:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [p.data for p in bucket.parameters], bucket.trained
            )

    def zero_grad(self) -> None:
        """Forget the gradients, as when a step is not applied."""
        self.factor, self.rate = 1.0, None
        self.sums.clear()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def state(self, *, materialise: bool = False) -> dict[str, Tensor]:
        """The trained tensors and the optimizer's state, live, by name: `model.<parameter>`,
        `optimizer.<parameter>.exp_avg` …

        With masters, `model.<parameter>` is the master: `publish` makes the parameters from it.

        Before its first step a parameter has no state; `materialise` adds zeros for it, to the optimizer too,
        as loading a checkpoint needs.
        """
        if self.host is not None:
            self.host.synchronize()
        return self._live(materialise=materialise)

    def _live(self, *, materialise: bool = False) -> dict[str, Tensor]:
        """`state`, without waiting for copies to the host."""
        tensors: dict[str, Tensor] = {}
        for bucket in self.buckets:
            names = {state.name for state in OPTIMIZERS[bucket.row].states}
            for name, trained in zip(bucket.names, bucket.trained, strict=True):
                tensors[f"model.{name}"] = trained
                every = bucket.update.state
                state = every[trained] if trained in every or materialise else {}
                if materialise and not state:
                    state.update(zeros(bucket.row, trained))
                tensors |= {f"optimizer.{name}.{key}": state[key] for key in state if key in names}
        return tensors

    def on_device(self) -> dict[str, Tensor]:
        """`state` without what is in host memory."""
        state = self._live()
        return state if self.host is None else {k: v for k, v in state.items() if not self.host.has(v)}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it keeps."""
        return self.host.bytes if self.host is not None else 0


def _norms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The L2 norm of each gradient, at least in fp32."""
    if not gradients:
        return {}
    dtype = torch.promote_types(next(iter(gradients.values())).dtype, torch.float32)
    every = torch._foreach_norm([*gradients.values()], dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return dict(zip(gradients, every, strict=True))


def parts_of(key: str) -> tuple[str, str, str]:
    """("model" or "optimizer", parameter name, state name or "") of a key of `Optimizer.state`."""
    kind, _, name = key.partition(".")
    name, _, state_name = (name, "", "") if kind == "model" else name.rpartition(".")
    return kind, name, state_name


def key_of(kind: str, name: str, state_name: str) -> str:
    """Key of `Optimizer.state`, the inverse of `parts_of`; an empty `state_name` is left out."""
    return ".".join(part for part in (kind, name, state_name) if part)


def by_row(
    optimizer: str, named: list[tuple[str, nn.Parameter]], blocks: str
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return the (name, parameter) pairs that each row of OPTIMIZERS updates under train.optimizer, before
    they are cast to the dtype of the passes.

    blocks: prefix of the names of the blocks' parameters.
    """
    own = OPTIMIZERS[optimizer]
    rows: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        shape = tuple(parameter.shape)
        matrix = name.startswith(blocks) and is_matrix(name, shape)
        taken = optimizer if own.takes(shape, in_blocks_of_model=matrix) else str(own.rest)
        row = updated_by(taken, str(parameter.dtype).removeprefix("torch."))
        rows.setdefault(row, []).append((name, parameter))
    return rows


def buckets(
    named: list[tuple[str, nn.Parameter]], elements: int | None
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield runs of neighbouring (name, parameter) pairs of at most `elements` of this rank's elements.

    A larger parameter is a run of its own. None: all parameters in one run. No parameters: no run.
    """
    run: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        own = local(parameter).numel()
        if run and elements and size + own > elements:
            yield run
            run, size = [], 0
        run.append((name, parameter))
        size += own
    if run:
        yield run
