"""torchtitan's Llama and its training step, written down from its source, for the dry run's recorder.

Published peaks are of this program, not of meshtune's: its loss has all logits at once, and its selective
recomputation saves every second matmul. Source: pytorch/torchtitan of late 2024 (README.md says which files
of which version). Left out is what moves no bytes: initial values, data, logging.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshtune.dryrun.recorder import Recorder, visible_pairs
from meshtune.dryrun.substitutes import installed
from meshtune.dryrun.world import CPU, made_up
from meshtune.layout import Layout
from meshtune.meter.trace import OPTIMIZER, WEIGHTS, StepTrace


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama's sizes."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int


class RMSNorm(nn.Module):
    """torch.nn.RMSNorm, as its eager kernels compute it: in fp32, then cast."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(1e-5))
        return (wide * scale).type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding by complex numbers. x: [batch, seq, heads, head_dim]; turns: [seq, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, self.groups = shape.hidden // shape.heads, shape.heads // shape.kv_heads
        self.wq = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wk = nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (matrix(x).view(batch, seq, -1, self.head) for matrix in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (
            each[:, :, :, None].expand(-1, -1, -1, self.groups, -1).reshape(batch, seq, -1, self.head)
            for each in (k, v)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.w3 = nn.Linear(shape.hidden, shape.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, shape: Shape, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        turns = torch.empty(seq_len, shape.hidden // shape.heads // 2, dtype=torch.complex64)
        self.register_buffer("freqs_cis", turns)
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in range(shape.layers)})
        self.norm = RMSNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, self.freqs_cis)
        return self.output(self.norm(h))


SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


def every_second_matmul() -> Any:
    """Contexts of a selective checkpoint: attention and the odd ones of a block's matmuls are saved."""
    count: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        matmul = op == torch.ops.aten.mm.default
        count[context.is_recompute] += matmul
        saved = op in SAVED and not (matmul and count[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def split(model: Transformer, mesh: DeviceMesh) -> None:
    """Apply tensor and sequence parallelism, in place; the loss is of split logits."""
    to_whole = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for block in model.layers.values():
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": to_whole,
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        matrices = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        parallelize_module(block, mesh, plan | {name: ColwiseParallel() for name in matrices})


def parallelise(model: Transformer, mesh: DeviceMesh, recompute: str) -> None:
    """Apply tensor parallelism, recomputation ("selective": by operations, or "full") and FSDP2, in place."""
    if mesh["tp"].size() > 1:
        split(model, mesh["tp"])
    options: dict[str, Any] = {"context_fn": every_second_matmul} if recompute == "selective" else {}
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False, **options)
    sharded = {"mesh": mesh["dp"], "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for number, block in enumerate(model.layers.values()):
        fully_shard(block, **sharded, reshard_after_forward=number < len(model.layers) - 1)
    fully_shard(model, **sharded, reshard_after_forward=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> None:
    """Do as torchtitan's train.py, which frees the logits before the backward."""
    optimizer.zero_grad()
    logits = model(tokens)
    with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()


@contextmanager
def unseen_propagation() -> Iterator[None]:
    """Keep DTensor's rehearsals of operators, on tensors of all ranks' sizes, out of the recorder's sight."""
    kind: Any = ShardingPropagator
    seen = kind._propagate_tensor_meta_non_cached

    def unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return seen(*args)

    kind._propagate_tensor_meta_non_cached = unseen
    yield
    kind._propagate_tensor_meta_non_cached = seen


def causal_pairs(name: str, args: Any) -> float:
    """(Query, key) pairs of a call of attention over whole rows, for one head; as dryrun/recorder.py asks."""
    rows, _, seq_len, _ = args["backward" in name].shape
    return rows * visible_pairs([seq_len], None)


def trace(shape: Shape, layout: Layout, *, seq_len: int) -> list[StepTrace]:
    """Trace two steps of rank 0 under a layout of FSDP2 and tensor parallelism; call it in a process of its
    own.
    """
    dist.init_process_group("fake", rank=0, world_size=layout.world, store=FakeStore())
    mesh = init_device_mesh("cpu", (layout.dp_shard, layout.tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Transformer(shape, seq_len)
    parallelise(model, mesh, layout.recompute)
    steps = [StepTrace(1), StepTrace(2)]
    with unseen_propagation(), installed("cuda"), FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
        )
        tokens, labels = (torch.zeros(layout.micro_batch_size, seq_len, dtype=torch.long) for _ in range(2))
        for step in steps:
            recorder = Recorder(CPU, step, model, layout, pairs=causal_pairs, read=made_up)
            with recorder:
                recorder.tag([*model.parameters(), *model.buffers()], WEIGHTS)
                states = [value for state in optimizer.state.values() for value in state.values()]
                recorder.tag(states, OPTIMIZER)
                train_step(model, optimizer, tokens, labels)
    return steps
