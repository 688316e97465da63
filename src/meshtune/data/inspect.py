"""Figures and samples of prepared data, for `meshtune data` (report/data.py draws them)."""

from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import place_of
from meshtune.data.pack import LABELLED, Dataset, ids_of_stored, permutation
from meshtune.data.preferences import SIDES
from meshtune.data.prepare import Prepared, sentences
from meshtune.data.recipe import Stream
from meshtune.data.tokens import common_prefix

BARS = 12  # most bars of the histogram
BOUNDARY = 30  # characters shown on each side of the place where labels begin


def describe(
    prepared: Prepared, tokenizer: PreTrainedTokenizerBase, samples: int = 3, max_samples: int | None = None
) -> dict[str, Any]:
    """Figures and samples of prepared data, JSON-able.

    rows, bad_rows, cut, dropped, seq_len, train, eval, seconds, cache are those of `Prepared.stats`; `train`
    and `eval` gain label_share (0 to 1), mean_length, mean_document_tokens, longest and histogram, lengths in
    tokens. The key `samples` has `samples` training documents (or all, if fewer), drawn from all: each
    with place, tokens, label_tokens, `runs`: [text, labelled] pairs whose texts join to the whole, and
    `boundaries`: [text before, text behind] each place where labels begin; of preferences also `sides`, each
    with name (chosen and rejected, or good or bad), tokens, label_tokens, runs and boundaries of its own.

    A stream has no length: its first window is read and counted, without seconds and cache. The key `of`
    names the rows that were counted (max_samples: the setting); `sentences` are on rows left out or cut.
    """
    if isinstance(prepared.train, Stream):
        train, of = _first_window(prepared.train), f"the first {prepared.train.window:,} rows of a stream"
        part = train.figures | {"digest": prepared.train.digest}
        stats = prepared.stats | prepared.train.tally.values() | {"train": part}
    else:
        of = f"at most the first {max_samples:,} of each source" if max_samples else "all rows"
        train, stats = prepared.train, dict(prepared.stats)
    for name, dataset in (("train", train), ("eval", prepared.eval)):
        if dataset is not None:
            stats[name] = stats[name] | _lengths(dataset)
    chosen = train.members[permutation(len(train.members), "samples", 0)[:samples]].tolist()
    shown = [_sample(train, document, tokenizer, str(stats["kind"])) for document in chosen]
    return stats | {"of": of, "sentences": sentences(stats | {"train": None, "eval": None}), "samples": shown}


def runs(stored: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """(text, labelled) of each run of equally labelled tokens; the texts join to the text of the whole.

    stored: uint32 [tokens], as in `Dataset.tokens`; at least one. The whole is decoded, then cut where the
    text of the tokens before the cut ends: a run decoded separately would lose the space before its first
    word under some tokenizers, or half of a character that two tokens share.
    """
    ids, labelled = ids_of_stored(stored).astype(np.int64).tolist(), stored >= LABELLED
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


def _sample(dataset: Dataset, document: int, tokenizer: PreTrainedTokenizerBase, kind: str) -> dict[str, Any]:
    """Origin, size and text of one document, as in `describe`.

    document: its index in `dataset.offsets`. kind: of the rows (`objectives.Rows`).
    """
    tokens = dataset.tokens[dataset.offsets[document] : dataset.offsets[document + 1]]
    file, line = dataset.origins[document].tolist()
    first, _, shared, _, good = dataset.sides[document].tolist()
    answers = [tokens[:first], np.append(tokens[:shared], tokens[first:])] if first else [tokens]
    names = SIDES if first else ["good" if good else "bad"] * (kind == "judged")
    described = [_answer(answer, tokenizer) for answer in answers]
    sides = [{"name": name} | answer for name, answer in zip(names, described, strict=False)]
    place = place_of(dataset.files[file], line, ":")
    whole = {key: sum((answer[key] for answer in described[1:]), described[0][key]) for key in described[0]}
    whole["tokens"] = len(tokens)  # shared ones once
    return {"place": place} | whole | ({"sides": sides} if sides else {})


def _answer(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Size and text of the stored tokens of one answer with its prompt, as in `describe`."""
    parts = runs(tokens, tokenizer)
    return {
        "tokens": len(tokens),
        "label_tokens": int((tokens >= LABELLED).sum()),
        "runs": [list(run) for run in parts],
        "boundaries": [
            [before[-BOUNDARY:], after[:BOUNDARY]]
            for (before, _), (after, labelled) in pairwise(parts)
            if labelled
        ],
    }
