"""Seconds that rank 0 of a large world spends on a checkpoint's tables, at its first save and at its second.

    python benchmarks/checkpoint_tables.py [--ranks 512] [--tensors 1165]

Rank 0 is real; what it would get from the others by collectives is made here. Each rank has a piece of each
tensor, as under ZeRO; 1,165 are the weights and the optimizer states of an 8B Llama. Printed are the
seconds in which the training loop waits (`save`), and those of the thread that writes, less the writing.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.storage import WriteResult

from meshtune.model.pieces import Piece
from meshtune.train import checkpoint, checkpoint_files
from meshtune.train.checkpoint_files import Written


class FirstOfMany(checkpoint.Checkpoints):
    """Rank 0 of `ranks`, the others of which have pieces as large as its own, and write them."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder, asynchronous=False)
        self.ranks = ranks

    def _gather(self, value: Any) -> list[Any]:
        if not isinstance(value, dict) or not value:
            return [value] * self.ranks
        others = range(1, self.ranks)
        return [value, *({(name, (rank,)): size for (name, _), size in value.items()} for rank in others)]

    def _gather_on_main(self, value: Any) -> list[Any]:
        return [value, *(_moved(value, rank) for rank in range(1, self.ranks))]


def _moved(written: Written, rank: int) -> Written:
    """The same pieces, of another rank."""
    names = [item.index.fqn for item in written.items]
    items = [checkpoint_files._write_item(name, Piece((2**20,), (rank,), torch.empty(1))) for name in names]
    results = [
        WriteResult(item.index, result.size_in_bytes, result.storage_data)
        for item, result in zip(items, written.results, strict=True)
    ]
    return Written(items, results)


def pieces(tensors: int) -> dict[str, Piece]:
    return {f"tensor.{number}": Piece((2**20,), (0,), torch.ones(1)) for number in range(tensors)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a checkpoint's tables.")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=1165)
    options = parser.parse_args()
    spent: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        def measured(*values: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*values)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

        return measured

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = FirstOfMany(Path(folder), options.ranks)
        for step in (1, 2):
            spent.clear()
            with (
                patch.object(checkpoints, "_assigned", timed("dealing", checkpoints._assigned)),
                patch.object(checkpoints, "_write_tensors", timed("writing", checkpoints._write_tensors)),
                patch.object(checkpoint, "write", timed("files", checkpoint.write)),
            ):
                checkpoints.save(step, pieces(options.tensors), {})
            table = spent["writing"] - spent["files"]
            print(
                f"save {step}: {1000 * spent['dealing']:,.0f} ms of the training loop, "
                f"{1000 * table:,.0f} ms of the writing thread"
            )


if __name__ == "__main__":
    main()
