"""Figures of prepared data, and samples with their labelled text in colour, for `meshtune data`.

prepare() ──> describe() ──> a JSON-able dict ──> show() on a terminal
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import place_of
from meshtune.data.pack import LABELLED, Dataset, permutation
from meshtune.data.prepare import Prepared, sentences
from meshtune.data.recipe import Stream
from meshtune.data.tokens import common_prefix
from meshtune.errors import quoted
from meshtune.units import counted, printable

BARS = 12  # most bars of the histogram
BAR_WIDTH = 40  # characters of the longest bar
LABELLED_STYLE = "bold green"
BEGIN, END = "[[", "]]"  # around labelled text where there are no colours
BOUNDARY = 30  # characters shown on each side of the place where labels begin


def describe(
    prepared: Prepared, tokenizer: PreTrainedTokenizerBase, *, samples: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Figures and samples of prepared data, JSON-able.

    rows, bad_rows, cut, dropped, seq_len, train, eval, seconds, cache are those of `Prepared.stats`; `train`
    and `eval` gain label_share (0 to 1), mean_length, mean_document_tokens, longest and histogram, lengths in
    tokens. The key `samples` has `samples` training documents (or all, if fewer), chosen by the seed: each
    with place, tokens, label_tokens, `runs`: [text, labelled] pairs whose texts join to the whole, and
    `boundaries`: [text before, text behind] each place where labels begin.

    A stream has no length: its first window is read and counted, without seconds and cache. The key `of`
    names the rows that were counted.
    """
    if isinstance(prepared.train, Stream):
        train, of = _first_window(prepared.train), f"the first {prepared.train.window:,} rows of a stream"
        part = {
            "digest": prepared.train.digest,
            "packed": train.packed,
            "documents": len(train.members),
            "sequences": len(train),
            "tokens": train.token_count,
            "label_tokens": train.label_tokens,
            "efficiency": train.efficiency,
        }
        stats = prepared.stats | prepared.train.tally.values() | {"train": part}
    else:
        train, of, stats = prepared.train, "all rows", dict(prepared.stats)
    for name, dataset in (("train", train), ("eval", prepared.eval)):
        if dataset is not None:
            stats[name] = stats[name] | _lengths(dataset)
    chosen = train.members[permutation(len(train.members), "samples", seed)[:samples]].tolist()
    return stats | {"of": of, "samples": [_sample(train, document, tokenizer) for document in chosen]}


def show(description: dict[str, Any], console: Console) -> None:
    """Print what `describe` returned: figures, a histogram of training document lengths, and the samples."""
    console.print(_figures(description))
    for line in _explained(description):
        console.print(Text(line, "dim"))
    for line in sentences(description | {"train": None, "eval": None}):
        console.print(Text(printable(line), "yellow"))
    console.print(histogram_table(description["train"]["histogram"]))
    coloured = console.is_terminal and not console.no_color
    legend = Text("this colour", LABELLED_STYLE) if coloured else Text(f"{BEGIN}brackets{END}")
    console.print(Text("Samples; labelled text is in ").append(legend).append("."))
    for sample in description["samples"]:
        heading = f"{sample['place']}: {sample['tokens']:,} tokens, {sample['label_tokens']:,} labelled"
        console.rule(Text(printable(heading)), align="left")
        parts = [marked(printable(text), labelled, coloured) for text, labelled in sample["runs"]]
        console.print(Text.assemble(*parts))
        for before, after in sample["boundaries"]:
            sides = (quoted(printable(side)) for side in (before, after))
            console.print(Text(f"labels begin between {' and '.join(sides)}"))


def marked(text: str, labelled: bool, coloured: bool) -> Text:
    """Text of a run of tokens, its labels by a colour or, without one, by brackets."""
    if coloured or not labelled:
        return Text(text, LABELLED_STYLE if labelled else "dim")
    return Text(f"{BEGIN}{text}{END}")


def runs(stored: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """(text, labelled) of each run of equally labelled tokens; the texts join to the text of the whole.

    stored: uint32 [tokens], as in `Dataset.tokens`; at least one. The whole is decoded, then cut where the
    text of the tokens before the cut ends: a run decoded separately would lose the space before its first
    word under some tokenizers, or half of a character that two tokens share.
    """
    ids, labelled = (stored & ~LABELLED).astype(np.int64).tolist(), stored >= LABELLED
    ends = [*(np.flatnonzero(np.diff(labelled)) + 1).tolist(), len(ids)]
    whole, pieces, start = str(tokenizer.decode(ids)), [], 0
    for end in ends:
        stop = max(start, common_prefix(whole, str(tokenizer.decode(ids[:end]))))
        pieces.append((whole[start:stop], bool(labelled[end - 1])))
        start = stop
    return pieces


def _first_window(stream: Stream) -> Dataset:
    windows = stream.windows(stream.start())
    dataset, *_ = next(windows)
    windows.close()
    return dataset


def _lengths(dataset: Dataset) -> dict[str, Any]:
    lengths = np.diff(dataset.offsets)[dataset.members]
    counts, edges = np.histogram(lengths, bins=_edges(int(lengths.max())))
    return {
        "label_share": dataset.label_tokens / dataset.token_count,
        "mean_length": float(lengths.mean()),
        "mean_document_tokens": dataset.mean_document_tokens,
        "longest": int(lengths.max()),
        "histogram": [
            {"from": int(low), "to": int(high) - 1, "documents": int(count)}
            for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
    }


def _edges(longest: int) -> np.ndarray:
    """Edges of at most BARS equally wide bins from 1 to `longest`, of a round width (1, 2 or 5 x 10^n)."""
    for width in (digit * 10**power for power in range(9) for digit in (1, 2, 5)):
        if width * BARS >= longest:
            return np.arange(1, longest + width + 1, width)
    raise AssertionError("no document has 10**9 tokens")


def _sample(dataset: Dataset, document: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Origin, size and text of one document, as in `describe`. document: its index in `dataset.offsets`."""
    tokens = dataset.tokens[dataset.offsets[document] : dataset.offsets[document + 1]]
    file, line = dataset.origins[document].tolist()
    parts = runs(tokens, tokenizer)
    return {
        "place": place_of(dataset.files[file], line, ":"),
        "tokens": len(tokens),
        "label_tokens": int(dataset.labels[document]),
        "runs": [list(run) for run in parts],
        "boundaries": [
            [before[-BOUNDARY:], after[:BOUNDARY]]
            for (before, _), (after, labelled) in pairwise(parts)
            if labelled
        ],
    }


def _figures(description: dict[str, Any]) -> Table:
    table = Table(
        title=f"Data: {counted(description['rows'], 'row')} read ({description['of']})", title_justify="left"
    )
    table.add_column("")
    splits = [name for name in ("train", "eval") if description[name]]
    for name in splits:
        table.add_column(name, justify="right")
    for title, key, form in (
        ("documents", "documents", "{:,}"),
        ("sequences", "sequences", "{:,}"),
        ("tokens", "tokens", "{:,}"),
        ("labelled tokens", "label_tokens", "{:,}"),
        ("labelled share of the tokens", "label_share", "{:.1%}"),
        ("tokens per document", "mean_length", "{:,.0f}"),
        ("data.mean_document_tokens", "mean_document_tokens", "{:,.0f}"),
        ("longest document", "longest", "{:,}"),
    ):
        table.add_row(title, *(form.format(description[name][key]) for name in splits))
    if any(description[name]["packed"] for name in splits):
        title = f"packing efficiency, seq_len {description['seq_len']:,}"
        table.add_row(title, *(f"{description[name]['efficiency']:.1%}" for name in splits))
    return table


def _explained(description: dict[str, Any]) -> Iterator[str]:
    """Yield sentences that tell figures apart that look alike."""
    train, seq_len = description["train"], description["seq_len"]
    yield (
        "A document is a row (or a turn of it) as the model reads it; the loss is over its labelled tokens "
        "only."
    )
    if train["packed"]:
        yield (
            f"A sequence is one row of a batch: documents packed into at most {seq_len:,} tokens. "
            "train.global_batch_size counts sequences."
        )
    else:
        yield "Without packing each document is a sequence; train.global_batch_size counts sequences."
    yield (
        "tokens per document is the mean over documents; data.mean_document_tokens is the mean over tokens, "
        "in which long documents count more (attention costs that much, and `meshtune plan` takes it)."
    )


def histogram_table(bars: list[dict[str, int]]) -> Table:
    most = max(bar["documents"] for bar in bars)
    table = Table(title="Document lengths in tokens", title_justify="left", box=None, show_header=False)
    table.add_column(justify="right")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right")
    for bar in bars:
        full, part = divmod(round(bar["documents"] / most * BAR_WIDTH * 8), 8)
        drawn = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
        lengths = f"{bar['from']:,}–{bar['to']:,}" if bar["from"] < bar["to"] else f"{bar['to']:,}"
        table.add_row(lengths, drawn, f"{bar['documents']:,}")
    return table
