"""Bytes that each ZeRO stage keeps, measured: the table of docs/parallelism.md.

    python benchmarks/zero_memory.py [docs/parallelism.md]

On 4 CPU ranks a small Llama takes one step and three of the four micro-batches of a second one. What tensors
then exist beside inputs and buffers is compared with `placement.share` and with the ZeRO paper's figures
(Rajbhandari et al. 2020, figure 1: 2 + 2 + 12 bytes per parameter, of which a stage keeps one N-th).
"""

import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from meshtune.layout import Layout
from meshtune.model.trace import census
from meshtune.optim.optimizer import Optimizer, local
from meshtune.parallel import zero
from meshtune.parallel.mesh import join, parameter_mesh
from meshtune.parallel.replicas import Replicas
from meshtune.placement.share import share
from meshtune.placement.states import States
from meshtune.precision import PRECISIONS
from meshtune.rundir import write_text_atomically

RANKS = 4
KINDS = ("weights", "gathered", "gradients", "optimizer")
LAYOUTS = ("dp4", "zero1x4", "zero2x4", "zero3x4")
PAPER = {
    0: (2, 2, 12),
    1: (2, 2, 12 / RANKS),
    2: (2, 2 / RANKS, 12 / RANKS),
    3: (2 / RANKS, 2 / RANKS, 12 / RANKS),
}


def main(file: str = "docs/parallelism.md") -> None:
    page = Path(file).read_text(encoding="utf-8")
    begin, end = "<!-- begin zero -->\n", "<!-- end zero -->"
    before, _, rest = page.partition(begin)
    write_text_atomically(Path(file), before + begin + table() + end + rest.partition(end)[2])


def table() -> str:
    """Bytes per parameter, as Markdown."""
    model = census(config())
    lines = [
        "| layout | weights | gathered | gradients | optimizer | measured | ours | paper |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for text in LAYOUTS:
        layout = Layout.parse(f"{text}-ga4")
        found = on_ranks(f"{text}-ga4")
        kinds = " | ".join(f"{getattr(found, kind) / model.total:g}" for kind in KINDS)
        ours = sum(share(model, layout, 0).bytes) / model.total
        measured = sum(found) / model.total
        lines.append(f"| `{text}` | {kinds} | {measured:g} | {ours:g} | {sum(PAPER[layout.zero]):g} |")
    return "\n".join(lines) + "\n"


def on_ranks(text: str) -> States:
    """Bytes that rank 0 measures, on RANKS forked ranks. text: the layout, with its accumulation steps."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, f"file://{folder}/rendezvous", text, answers) for rank in range(RANKS)]
        processes = [context.Process(target=one_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        found = answers.get()
        for process in processes:
            process.join()
    return found


def one_rank(rank: int, rendezvous: str, text: str, answers: Any) -> None:
    """Measure on one rank and end the process; rank 0 puts its result into `answers`.

    rendezvous: init_method of the process group. text: the layout.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    found = measure(text, "bf16")
    if rank == 0:
        answers.put(found)
    dist.barrier()
    os._exit(0)


def config() -> LlamaConfig:
    """A small Llama whose sizes are all multiples of RANKS, so that no shard is padded."""
    return LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


class Whole(nn.Module):
    """A model and its loss in one forward, as FSDP2 wants its root."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config(), dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits.float().square().mean()


def measure(text: str, precision: str) -> States:
    """Bytes of model states that exist on this rank before the last micro-batch of a layout's second step."""
    layout = Layout.parse(text)
    world = join(layout, torch.device("cpu"))
    others = tensors()  # what the process had before; held, so that no address is used again
    dtypes = PRECISIONS[precision]
    compute, trained = getattr(torch, dtypes.compute), getattr(torch, dtypes.trained)
    root = Whole(trained)
    mesh = parameter_mesh(world)
    sums = torch.float32 if compute == torch.bfloat16 else None
    if mesh is not None and layout.zero:
        blocks = root.get_submodule("model.model.layers").children()
        zero.shard(root, blocks, mesh, layout.zero, compute_dtype=compute, reduce_dtype=sums)
    parameters = list(root.parameters())  # as they lie between steps
    optimizer = Optimizer(
        root.named_parameters(),
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        compute_dtype=compute if not layout.zero and compute != trained else None,
        sum_dtype=None if layout.zero else sums,
    )
    steps = layout.gradient_accumulation_steps
    replicas = None
    if mesh is not None and not layout.zero:
        replicas = Replicas([([*root.parameters()], mesh)])
        replicas.watch(optimizer)
        replicas.begin(steps)
    for last in range(1, steps + 1):
        micro_batch(root, layout, last=last == steps)
    if replicas is not None:
        replicas.finish()
    optimizer.step(1e-3)
    if replicas is not None:
        replicas.begin(steps)
    for _ in range(steps - 1):
        micro_batch(root, layout, last=False)
    return by_kind(root, parameters, optimizer, compute, others)


def micro_batch(root: nn.Module, layout: Layout, *, last: bool) -> None:
    """Run a forward and backward. last: True for the step's last micro-batch, which syncs gradients."""
    zero.before_backward(root, layout.zero, last=last)
    root(torch.arange(32)[None]).backward()


def by_kind(
    root: nn.Module,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    compute: torch.dtype,
    others: Sequence[Tensor],
) -> States:
    """Bytes by kind of all floating-point CPU tensors that exist beside `others`, each storage once.

    parameters, optimizer: give weights, gradients and optimizer state. Tensors in none of these are FSDP2's:
    gathered parameters in the compute dtype (`compute`), and in a bf16 run whole gradients that wait for the
    step's last micro-batch, in fp32. Where gradients are shards already, what is left in fp32 is the buffer
    of the last collective and not counted.
    """
    weights, gradients = storages(parameters), storages(optimizer.gradients())
    everything = storages(tensors()) | gradients
    state = storages(list(optimizer.state().values())).keys() - weights.keys()
    known = weights.keys() | gradients.keys() | state
    rest = everything.keys() - known - storages([*root.buffers(), *others]).keys()
    gathered = {key for key in rest if everything[key][1] == compute}
    waiting = gradients.keys() or rest - gathered
    kinds = (weights.keys(), waiting, state, gathered)
    sizes = [sum(everything[key][0] for key in kind) for kind in kinds]
    return States(*sizes)


def tensors() -> list[Tensor]:
    """All tensors of this process that the garbage collector tracks."""
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]


def storages(of: Sequence[Tensor]) -> dict[int, tuple[int, torch.dtype]]:
    """Address -> (bytes, dtype) of the storages of floating-point CPU tensors; scalars are left out."""
    found = {}
    for tensor in of:
        each = local(tensor)
        if each.is_floating_point() and each.device.type == "cpu" and each.ndim:
            storage = each.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = (storage.nbytes(), each.dtype)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
