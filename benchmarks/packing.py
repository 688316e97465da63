"""How full packed and padded sequences are, and how long packing takes: the figures of docs/data.md.

    python benchmarks/packing.py --data train.jsonl

GSM8K's questions and answers, with a byte-level BPE of 8,192 tokens trained on them. Printed are the number
of sequences of each length, the share of their tokens that is not padding and the seconds of packing; the
same share for a stream, and without packing for steps of 8 sequences in two micro-batches and in one; and
the seconds of packing a million documents of lengths drawn from GSM8K's.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
from single_device import set_up

from meshtune.data.encode import Encoder
from meshtune.data.example import Source
from meshtune.data.loader import Loader
from meshtune.data.pack import Dataset, pack
from meshtune.data.prepare import Prepared, prepare
from meshtune.data.recipe import Recipe, Stream
from meshtune.model.load import load_tokenizer

SEQ_LENS, STREAMED, MILLION = (512, 1024, 2048), 1024, 10**6


def prepared_rows(work: Path, seq_len: int, *, packing: bool = True, streaming: bool = False) -> Prepared:
    """GSM8K in sequences of `seq_len` tokens, with nothing cached. work: written by `set_up`."""
    encoder = Encoder(load_tokenizer(str(work / "model")), train_on="completion", chat_template=None)
    source = Source(str(work / "train.jsonl"), columns=(("prompt", "question"), ("completion", "answer")))
    recipe = Recipe((source,), encoder, seq_len=seq_len, packing=packing)
    return prepare(recipe, tempfile.mkdtemp(dir=work), streaming=streaming)


def packing_seconds(lengths: np.ndarray, seq_len: int) -> float:
    started = time.perf_counter()
    pack(lengths, seq_len, 0)
    return time.perf_counter() - started


def columns_filled(prepared: Prepared, micro_batch_size: int) -> float:
    """Share of the columns of an epoch's micro-batches that is not padding, with 8 sequences a step."""
    loader = Loader(prepared.train, global_batch_size=8, micro_batch_size=micro_batch_size, seed=0, epochs=1)
    tokens = columns = 0
    for batch, _ in loader:
        tokens += batch.tokens
        columns += sum(micro.input_ids.numel() for micro in batch.micro_batches)
    return tokens / columns


def stream_filled(stream: Stream, rows: int) -> float:
    """Share of the tokens of a stream's first pass over its `rows` rows that is not padding."""
    windows = (window for window, _, _ in stream.windows(stream.start()))
    of_one_pass = -(-rows // stream.window)
    packed = list(itertools.islice(windows, of_one_pass))
    tokens = sum(window.token_count for window in packed)
    return tokens / sum(len(window) * stream.seq_len for window in packed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        set_up(work, options.data, needed=1)
        padded = prepared_rows(work, 2048, packing=False)
        assert isinstance(padded.train, Dataset)
        lengths = np.diff(padded.train.offsets)
        print(f"{len(lengths):,} documents of {lengths.mean():.0f} tokens on average")
        for seq_len in SEQ_LENS:
            part = prepared_rows(work, seq_len).stats["train"]
            seconds = packing_seconds(lengths.clip(max=seq_len), seq_len)
            print(f"{seq_len}: {part['sequences']:,} sequences, {part['efficiency']:.1%}, {seconds:.2f} s")
        for micro_batch_size in (4, 8):
            print(
                f"padded, micro-batches of {micro_batch_size}: {columns_filled(padded, micro_batch_size):.1%}"
            )
        stream = prepared_rows(work, STREAMED, streaming=True).train
        assert isinstance(stream, Stream)
        print(f"streamed, {STREAMED}: {stream_filled(stream, len(lengths)):.1%}")
        drawn = np.random.default_rng(0).choice(lengths, MILLION).clip(max=SEQ_LENS[0])
        for seq_len in SEQ_LENS:
            print(f"{MILLION:,} documents into {seq_len}: {packing_seconds(drawn, seq_len):.1f} s")


if __name__ == "__main__":
    main()
