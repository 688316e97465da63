"""Activation memory and time of each recompute mode, measured on the CPU: the table of docs/recompute.md.

    python benchmarks/recompute_memory.py [--layers 8] [--seq-len 512] [--threads 2]

The model is the 28 M Llama of the other benchmarks (hidden 512, 8 heads, 4 key-value heads, ffn 1408), its
micro-batch 4 rows of packed documents. "Kept" is the bytes of every tensor that the forward of the blocks
made and that is still there when it ends: what waits for the backward. Loss and logits are not part of it.
"""

import argparse
import statistics
import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from meshtune.attention.register import register
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.parallel.recompute import recompute_blocks

HIDDEN, HEADS, KV_HEADS, FFN = 512, 8, 4, 1408


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations made inside `with live:` and that still exist.

    Those of the model's parameters and buffers are left out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.own:
                storage = tensor.untyped_storage()
                self.storages[storage] = storage.nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


def build(mode: str, dropout: float, layers: int) -> PreTrainedModel:
    """A model in training mode with random weights. mode: token of a layout. dropout: of attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
        vocab_size=8192,
        attention_dropout=dropout,
    )
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
    layout = Layout.parse(mode)
    recompute_blocks(model, anatomy(model), layout.recompute, range(layers)[: layout.recompute_blocks])
    return model


def measure(mode: str, dropout: float, layers: int, seq: int, repeats: int) -> tuple[float, float]:
    """(Bytes kept per token and layer, median processor seconds of a forward and backward).

    mode: token of a layout. dropout: of attention. seq: tokens of a row. repeats: passes that are timed.
    """
    model = build(mode, dropout, layers)
    third = seq // 3
    documents = ((third, third, seq - 2 * third), (seq // 2, seq - seq // 2)) * 2
    ids = torch.randint(0, 8192, (4, seq))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])

    def forward() -> torch.Tensor:
        return model.base_model(
            input_ids=ids, position_ids=positions, documents=documents, use_cache=False
        ).last_hidden_state

    with Live(model) as live:
        hidden = forward()
    hidden_bytes = hidden.untyped_storage().nbytes()  # the result, not kept for the backward
    kept = (live.bytes - hidden_bytes) / (ids.numel() * layers)
    hidden.sum().backward()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        forward().sum().backward()
        seconds.append(time.process_time() - start)
    return kept, statistics.median(seconds)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--seq-len", type=int, default=512)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    setting = f"{options.threads} threads, {options.layers} layers, 4 x {options.seq_len} tokens, fp32"
    print(f"torch {torch.__version__}, {setting}\n")
    print("| attention dropout | recompute | kept, bytes per token and layer | share | time (none = 1) |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for dropout in (0.0, 0.1):
        baseline = None
        half = options.layers // 2
        for mode in ("none", "attention", f"selective{half}", "selective", "linear", f"full{half}", "full"):
            kept, seconds = measure(mode, dropout, options.layers, options.seq_len, options.repeats)
            baseline = baseline or (kept, seconds)
            shares = f"{kept / baseline[0]:.0%} | {seconds / baseline[1]:.2f}"
            print(f"| {dropout} | {mode} | {kept:,.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
