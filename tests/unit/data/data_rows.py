"""Helpers of the data tests: an encoder of bytes, files of rows, data sets in memory."""

import json
from pathlib import Path

import numpy as np

from meshtune.data import prepare as preparing
from meshtune.data.example import Origin, Source
from meshtune.data.pack import Dataset, Document, in_memory, pack, singles
from meshtune.data.recipe import Recipe
from meshtune.objectives import OBJECTIVES


class Bytes:
    """Encodes prompt + completion + end (0) as bytes; completion and end are labelled. Counts examples."""

    fingerprint = "bytes"
    train_on = "completion"
    on_bad_row = "error"
    template_date = None
    objective = OBJECTIVES["sft"]

    def __init__(self) -> None:
        self.encoded = 0

    def split(self, example) -> list:
        return [example]

    def encode(self, examples) -> list[Document]:
        self.encoded += len(examples)
        documents = []
        for example in examples:
            prompt, answer = example.prompt.encode(), example.completion.encode() + b"\0"
            ids = np.frombuffer(prompt + answer, dtype=np.uint8).astype(np.int32)
            documents.append(Document(ids, np.arange(len(ids)) >= max(1, len(prompt))))
        return documents


def prepare(sources, encoder, *, cache_dir: Path, streaming: bool = False, **settings) -> preparing.Prepared:
    """The data of sources. settings: of a Recipe."""
    return preparing.prepare(Recipe(tuple(sources), encoder, **settings), cache_dir, streaming=streaming)


def write_rows(file: Path, rows: list[tuple[str, str]]) -> Source:
    """A jsonl file of prompts and completions, as a source."""
    file.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    return Source(str(file))


def numbered(count: int, start: int = 0, lengths: int = 40) -> list[tuple[str, str]]:
    """Rows that differ in text and length: row i begins with its number."""
    return [(f"{i}?", f"{i}" + "x" * (i * 7 % lengths)) for i in range(start, start + count)]


def memory(lengths: list[int], *, seq_len: int, packed: bool = True, seed: int = 0) -> Dataset:
    """Document d is d + 1 repeated; the second half of its tokens is labelled, never the first token."""
    documents = [
        Document(np.full(n, d + 1), np.arange(n) >= max(1, n // 2), origin=Origin("memory", d + 1))
        for d, n in enumerate(lengths)
    ]
    members, starts = pack(np.array(lengths), seq_len, seed) if packed else singles(len(lengths))
    return in_memory(documents, members, starts, seq_len=seq_len, packed=packed)


def texts(dataset: Dataset) -> list[str]:
    """The documents of a data set in the order of its sequences, decoded from `Bytes`."""
    stored = [d for s in range(len(dataset)) for d in dataset.documents(s)]
    return [bytes((d & 0x7F).astype(np.uint8)).decode().rstrip("\0") for d in stored]
