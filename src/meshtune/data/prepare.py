"""Sources to tokenised, packed data on disk, written once and memory-mapped by every process.

    read ─1000 rows─> encode ──> overlong? labelled? ──> tokens.npy    (streams through: memory is bounded)
                                                            │ lengths
                             eval_split, weights, packing <─┘ ──> members and starts of train and eval

The cache folder (cache.py) is named by the fingerprint of everything that decides its content, of the files
their content itself: a copy or a touched file finds it. A damaged one is removed and written again.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from meshtune.addresses import public
from meshtune.data.cache import GrowingArray, discard, lock, mapped, open_folder, write_folder
from meshtune.data.example import DOCUMENTS, Source, Tally, notes_sentences
from meshtune.data.files import DataFile, files, is_hub
from meshtune.data.pack import SIDES, Dataset, permutation
from meshtune.data.readers import hub_revision
from meshtune.data.recipe import Recipe, Stream
from meshtune.errors import UserError, expanded
from meshtune.filesystem import concerns
from meshtune.rundir import disk_is_full, room
from meshtune.units import counted, few

# Progress #


SOON = 2.0  # seconds before anything is shown
EVERY = 30.0  # seconds between lines where there is no terminal


class Progress:
    """Shows the share of the data files that has been read, tokens per second and the time that is left."""

    def __init__(self, data_files: Sequence[DataFile]) -> None:
        self._files = data_files
        self._started = self._printed = time.monotonic()
        self._hashed = 0  # bytes
        self._console = Console(stderr=True)
        columns = (TextColumn("preparing data"), BarColumn(), TextColumn("{task.description}"))
        self._bar = None
        if self._console.is_terminal:
            self._bar = Bar(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("", total=1.0) if self._bar else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def hashed(self, size: int) -> None:
        """Show how much of the files has been hashed. size: bytes more."""
        self._hashed += size
        total = max(1, sum(file.size for file in self._files))
        self._show(self._hashed / total, f"{self._hashed / total:.0%} of the files hashed")

    def show(self, tokens: int) -> None:
        """Show how far tokenising is. tokens: so far."""
        self._show(self._share(), self.text(tokens, max(1e-9, time.monotonic() - self._started)))

    def _show(self, share: float, text: str) -> None:
        now = time.monotonic()
        if now - self._started < SOON:
            return
        if self._bar and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=share, description=text)
        elif now - self._printed >= EVERY:
            self._printed = now
            print(f"preparing data: {text}", file=sys.stderr, flush=True)

    def text(self, tokens: int, seconds: float) -> str:
        """Share, rate and time left, after `seconds` with `tokens` tokens."""
        share = self._share()
        left = seconds / share * (1 - share) if share else 0.0
        minutes, rest = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
        return f"{share:.0%}, {tokens / seconds:,.0f} tokens/s, {clock} left"

    def _share(self) -> float:
        """Share (0 to 1) of the bytes of all files that have been read."""
        total = sum(file.size for file in self._files)
        return sum(file.size * file.share for file in self._files) / total if total else 0.0


# Preparing #


CACHE_VERSION = 10  # raise it when the files' format or the code that decides their content changes


@dataclass(frozen=True)
class Prepared:
    """Training data, held-out data and their figures."""

    train: Dataset | Stream
    eval: Dataset | None  # None: nothing is held out
    stats: dict[str, Any]  # JSON-able; `sentences` writes it as text

    @property
    def sequences(self) -> int | None:
        """Sequences of one epoch; None of a stream."""
        return len(self.train) if isinstance(self.train, Dataset) else None

    @property
    def longest_document(self) -> int | None:
        """Tokens of the longest training or held-out document; None of a stream."""
        held_out = 0 if self.eval is None else self.eval.longest_document
        return max(self.train.longest_document, held_out) if isinstance(self.train, Dataset) else None

    @property
    def digest(self) -> str:
        """Digest of the tokens and sequences of both parts and of seq_len; for a stream, of the names of its
        sources and how they are read.
        """
        parts = [self.train.digest, self.eval and self.eval.digest, self.train.seq_len]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def prepare(recipe: Recipe, cache_dir: str | Path, *, streaming: bool = False) -> Prepared:
    """Training and held-out data from the cache, which is written first where it is missing.

    With `streaming` the training data is a Stream, weights are shares of its rows, and only `eval_sources` go
    to disk. Raises UserError for bad rows and settings, documents longer than `seq_len` tokens under
    overlong="error", a cache folder that can't be written, and if no document is left.
    """
    _check_settings(recipe)
    if not streaming:
        return _cached(recipe, expanded(cache_dir))
    stream = Stream(**vars(recipe))
    stats = _stats(stream.unused_columns(), recipe)
    for source in recipe.sources:
        files(source, stats["not_read"])
    if not recipe.eval_sources:
        return Prepared(stream, None, stats)
    evaluation = replace(recipe, sources=recipe.eval_sources, eval_sources=(), eval_split=0)
    held_out = _cached(evaluation, expanded(cache_dir))
    assert isinstance(held_out.train, Dataset)
    both = held_out.stats["notes"]["unused"] | stats["notes"]["unused"]
    notes = held_out.stats["notes"] | {"unused": both}
    counted = held_out.stats | {"train": None, "eval": held_out.stats["train"], "notes": notes}
    counted["not_read"] = stats["not_read"] + counted["not_read"]
    return Prepared(stream, held_out.train, counted)


_Listing = list[tuple[Source, list[DataFile]]]  # training sources, then those of evaluation, with their files


def _fingerprint(recipe: Recipe, listing: _Listing, cache_dir: Path, progress: Progress) -> str:
    """Digest of the settings and of what the sources' files hold."""
    identities = [_identity(*entry, cache_dir, progress) for entry in listing]
    content = {
        "version": CACHE_VERSION,
        "sources": identities[: len(recipe.sources)],
        "eval_sources": identities[len(recipe.sources) :],
        "encoder": recipe.encoder.fingerprint,
        "settings": [
            recipe.seq_len, recipe.packing, recipe.overlong, recipe.seed, recipe.eval_split, recipe.on_bad_row
        ],
    }  # fmt: skip
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _identity(
    source: Source, data_files: Sequence[DataFile], cache_dir: Path, progress: Progress
) -> list[Any]:
    """Return what decides a source's rows: the files' content and how they are read, not where they are."""
    settings = {name: value for name, value in vars(source).items() if name != "path"}
    if is_hub(source.path):
        return [source.path, hub_revision(source), settings]
    return [[[file.kind, file.content(cache_dir, progress.hashed)] for file in data_files], settings]


def _cached(recipe: Recipe, cache_dir: Path) -> Prepared:
    """Open the cache of these sources, written first if missing or damaged; add cache, seconds to stats."""
    started, state = time.perf_counter(), "found"
    not_read: list[str] = []
    listing: _Listing = [
        (source, files(source, not_read)) for source in (*recipe.sources, *recipe.eval_sources)
    ]
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _progress(listing) as progress:
            folder = cache_dir / _fingerprint(recipe, listing, cache_dir, progress)
        prepared = _open(folder, recipe, listing)
        if prepared is None:
            with lock(folder):
                prepared = _open(folder, recipe, listing)  # another process may have written it meanwhile
                if prepared is None:
                    discard(folder)
                    write_folder(folder, lambda aside: _write(aside, recipe, listing))
                    if folder != cache_dir / _fingerprint(recipe, listing, cache_dir, progress):
                        discard(folder)
                        raise UserError("A data file changed while it was read; try again once it is whole.")
                    prepared = _open(folder, recipe, listing)
                    state = "made"
    except OSError as error:
        if error.filename is not None and not concerns(error, cache_dir):
            raise
        remedy = f"{room(error)} Or name" if disk_is_full(error) else "Name"
        raise UserError(
            f"The data cache in {cache_dir} cannot be written ({error.strerror or error}). {remedy} another "
            "folder by data.cache."
        ) from error
    assert prepared is not None, "a cache that was just written must open"
    prepared.stats.update(cache=state, seconds=time.perf_counter() - started, not_read=not_read)
    return prepared


def sentences(stats: dict[str, Any]) -> list[str]:
    """Lines for the log: size, labels and packing of the data, and every document or row cut or dropped."""
    lines = []
    for name in ("train", "eval"):
        if part := stats[name]:
            how = (
                f"packed into {counted(part['sequences'], 'sequence')} of {stats['seq_len']:,}"
                if part["packed"]
                else "one per sequence"
            )
            full = f", {part['efficiency']:.1%} full" if part["packed"] else ""
            documents = counted(part["documents"], DOCUMENTS[stats["kind"]])
            good = f" ({part['good']:,} good)" if stats["kind"] == "judged" else ""
            lines.append(
                f"{name}: {documents}{good}, {counted(part['tokens'], 'token')}, "
                f"{part['label_tokens'] / part['tokens']:.1%} labelled; {how}{full}"
            )
    lines += lost_sentences(stats)
    if split := stats["split"]:
        pieces, documents = counted(split["pieces"], "piece"), counted(split["documents"], "document")
        lines.append(f"split into pieces of at most {stats['seq_len']:,} tokens: {documents}, into {pieces}")
    for reason, rows in stats["bad_rows"].items():
        lines.append(f"bad rows skipped, {reason}: {rows:,}")
    if day := stats["template_date"]:
        lines.append(f"the chat template writes the date: {day} in the whole run (data.template_date)")
    return [*stats["not_read"], *lines, *notes_sentences(stats["notes"])]


def lost_sentences(stats: dict[str, Any]) -> Iterator[str]:
    """Yield a line on documents that lost tokens behind seq_len, and on those dropped for each reason."""
    name = DOCUMENTS[stats["kind"]]
    if (cut := stats["cut"])["documents"]:
        lost = f"{counted(cut['tokens'], 'token')} ({cut['label_tokens']:,} of them labelled)"
        documents = counted(cut["documents"], name)
        yield f"cut to {stats['seq_len']:,} tokens: {documents}, which lost {lost}"
    for reason, dropped in stats["dropped"].items():
        documents, tokens = counted(dropped["documents"], name), counted(dropped["tokens"], "token")
        yield f"dropped, {reason}: {documents} ({tokens})"


def _write(aside: Path, recipe: Recipe, listing: _Listing) -> dict[str, Any]:
    """Write arrays of the encoded, split, packed sources to `aside`; return the manifest.

    Raises as `prepare`.
    """
    tally = Tally()
    digest = _write_documents(aside, recipe, listing, tally)
    tally.refuse_overlong(recipe.encoder.objective.rows)
    offsets = mapped(aside / "offsets.npy")
    if len(offsets) == 1:
        read = tally.examples + tally.bad_rows.total() + tally.notes.left_out.total()
        paths = [str(file) for _, data_files in listing for file in data_files]
        empty = [] if read else [f"There are no rows in {few(paths)}."]
        lost = tally.cut.documents or tally.dropped
        remedy = [f"Raise data.seq_len={recipe.seq_len}, or look at the rows with meshtune data."] * bool(
            lost
        )
        said = sentences(_stats(tally, recipe))
        raise UserError(["No document is left to train on.", *empty, *said, *remedy])
    length, source_number = np.diff(offsets).astype(np.int32), mapped(aside / "sources.npy")
    train, held_out = _split(source_number, mapped(aside / "origins.npy"), recipe)
    digests = {}
    passes = list(_passes(train, source_number, [source.weight for source in recipe.sources], recipe.seed))
    for name, rounds in (("train", passes), ("eval", [held_out] if len(held_out) else [])):
        if not rounds:
            continue
        members, starts = _sequences(rounds, length, recipe)
        np.save(aside / f"{name}_members.npy", members, allow_pickle=False)
        np.save(aside / f"{name}_starts.npy", starts, allow_pickle=False)
        digests[name] = _digest(digest, offsets, members, starts)
    return {
        "version": CACHE_VERSION,
        "files": public(_names(listing)),
        "stats": _stats(tally, recipe),
        "digests": digests,
    }


def _write_documents(aside: Path, recipe: Recipe, listing: _Listing, tally: Tally) -> str:
    """Write tokens and, of each document, its end, labels, sides, origin, source and cut answer; return the
    digest of tokens and sides.

    They go to disk as they come, so memory does not grow with the rows.
    """
    numbers: dict[str, int] = {name: number for number, name in enumerate(_names(listing))}
    with (
        GrowingArray(aside / "tokens.npy", np.dtype(np.uint32)) as tokens,
        GrowingArray(aside / "offsets.npy", np.dtype(np.int64)) as offsets,
        GrowingArray(aside / "labels.npy", np.dtype(np.int32)) as labels,
        GrowingArray(aside / "sides.npy", SIDES) as sides,
        GrowingArray(aside / "origins.npy", np.dtype(np.int64), columns=2) as origins,
        GrowingArray(aside / "sources.npy", np.dtype(np.int32)) as sources,
        GrowingArray(aside / "answer_rests.npy", np.dtype(np.uint32)) as rests,
        GrowingArray(aside / "rest_offsets.npy", np.dtype(np.int64)) as rest_offsets,
        _progress(listing) as progress,
    ):
        ends = np.zeros(2, np.int64)  # of the tokens, and of the rests
        offsets.append(ends[:1])
        rest_offsets.append(ends[1:])
        for number, (source, data_files) in enumerate(listing):
            for batch in recipe.documents(source, tally, data_files):
                if not batch:
                    continue
                lengths = [(len(one.ids), len(one.answer_rest)) for one in batch]
                all_ends = ends + np.cumsum(lengths, axis=0)
                tokens.append(np.concatenate([one.stored for one in batch]))
                offsets.append(all_ends[:, 0])
                rests.append(np.concatenate([one.answer_rest for one in batch]))
                rest_offsets.append(all_ends[:, 1])
                labels.append(np.array([one.labelled.sum() for one in batch]))
                sides.append(np.array([one.sides for one in batch], SIDES))
                places = [(numbers[one.origin.file], one.origin.line) for one in batch]
                origins.append(np.array(places, dtype=np.int64))
                sources.append(np.full(len(batch), number))
                ends = all_ends[-1]
                if source.max_samples:  # rows after these are not read
                    for file in data_files:
                        file.share = max(file.share, (batch[-1].origin.row + 1) / source.max_samples)
                progress.show(int(ends[0]))
    # Without pairs and judgements the digest is that of earlier versions: their runs continue.
    return tokens.digest + (sides.digest if recipe.encoder.objective.rows != "answers" else "")


def _progress(listing: _Listing) -> Progress:
    return Progress([file for _, data_files in listing for file in data_files])


def _names(listing: _Listing) -> list[str]:
    """The files as `Origin.file` names them, in the order in which they are read."""
    return [file.path for _, data_files in listing for file in data_files]


def _split(source_number: np.ndarray, origins: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the documents to train on and of those held out, each in the order they were read.

    Whole rows are held out: the documents of one row (data.split_turns) stay together. source_number: int
    [documents], source of each; the training sources come first. origins: as in `Dataset`. Raises UserError
    if no document is left to train on.
    """
    candidates = np.flatnonzero(source_number < len(recipe.sources))
    held_out = np.flatnonzero(source_number >= len(recipe.sources))
    if recipe.eval_split:
        of_another = np.any(np.diff(origins[candidates], axis=0) != 0, axis=1)
        of_another |= np.diff(source_number[candidates]) != 0
        row = np.concatenate([[0], np.cumsum(of_another)])  # of each candidate
        rows = int(row[-1]) + 1
        wanted = recipe.eval_split * rows if recipe.eval_split < 1 else recipe.eval_split
        taken = np.zeros(rows, dtype=bool)
        taken[permutation(rows, "split", recipe.seed)[: max(1, round(wanted))]] = True
        candidates, held_out = candidates[~taken[row]], candidates[taken[row]]
    if not len(candidates):
        raise UserError(
            f"No document is left to train on: {len(held_out):,} are held out (data.eval_split "
            f"= {recipe.eval_split:g}); lower it, or add training data."
        )
    return candidates, held_out


def _passes(
    documents: np.ndarray, source_number: np.ndarray, weights: Sequence[float], seed: int
) -> Iterator[np.ndarray]:
    """Yield the documents of each pass of an epoch, from the sources whose weight exceeds the passes so far.

    `documents` are indices into `source_number`, whose values are indices into `weights`. A fractional
    rest (0.3 of weight 2.3) takes 30 % of the source's documents, chosen by the seed.
    """
    remaining = dict(enumerate(weights))
    while any(weight > 0 for weight in remaining.values()):
        chosen = [documents[:0]]
        for source, weight in remaining.items():
            candidates = documents[source_number[documents] == source]
            if weight >= 1:
                chosen.append(candidates)
            elif weight > 0:
                count = max(1, round(weight * len(candidates)))
                part = permutation(len(candidates), "weight", seed, source)[:count]
                chosen.append(candidates[np.sort(part)])
            remaining[source] = weight - 1
        yield np.concatenate(chosen)


def _sequences(
    rounds: Sequence[np.ndarray], lengths: np.ndarray, recipe: Recipe
) -> tuple[np.ndarray, np.ndarray]:
    """Pack each pass in `rounds` separately, so that a document and its copy never share a sequence.

    rounds: document indices of each pass. lengths: tokens of every document, by its index. Returns (members,
    starts) of all passes, as in `Dataset`.
    """
    members, starts = [], [np.zeros(1, dtype=np.int64)]
    for turn, documents in enumerate(rounds):
        inner, begins = recipe.sequences(lengths[documents], turn)
        members.append(documents[inner])
        starts.append(begins[1:] + starts[-1][-1])
    return np.concatenate(members), np.concatenate(starts)


def _stats(tally: Tally, recipe: Recipe) -> dict[str, Any]:
    """`Prepared.stats` without cache, seconds and the figures of train and eval."""
    objective = recipe.encoder.objective
    facts = {"seq_len": recipe.seq_len, "template_date": recipe.encoder.template_date, "not_read": []}
    facts |= {"kind": objective.rows, "trained_prompts": objective.prompts}
    return tally.values() | facts | {"train": None, "eval": None}


def _open(folder: Path, recipe: Recipe, listing: _Listing) -> Prepared | None:
    """The cache, None if it is absent or damaged. listing: the files that it was written from, or copies."""
    opened = open_folder(folder)
    if opened is None:
        return None
    manifest, arrays = opened
    parts = {
        name: Dataset(
            tokens=arrays["tokens"],
            offsets=arrays["offsets"],
            labels=arrays["labels"],
            sides=arrays["sides"],
            origins=arrays["origins"],
            answer_rests=arrays["answer_rests"],
            rest_offsets=arrays["rest_offsets"],
            files=tuple(_names(listing)),
            members=arrays[f"{name}_members"],
            starts=arrays[f"{name}_starts"],
            seq_len=recipe.seq_len,
            packed=recipe.packing,
            digest=digest,
            objective=recipe.encoder.objective,
        )
        for name, digest in manifest["digests"].items()
    }
    stats = manifest["stats"] | {name: data.figures for name, data in parts.items()}
    return Prepared(train=parts["train"], eval=parts.get("eval"), stats=stats)


def _digest(tokens: str, *arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(tokens.encode(), digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return digest.hexdigest()


def _check_settings(recipe: Recipe) -> None:
    """Raise UserError with every setting of a recipe that is invalid without the others."""
    split, seq_len = recipe.eval_split, recipe.seq_len
    problems = [f"{s.path}: weight {s.weight:g} must be above 0." for s in recipe.sources if s.weight <= 0]
    if not recipe.sources:
        problems.append("There is no training data: name a file, a folder or a hub data set in data.train.")
    if split < 0 or (split > 1 and split != int(split)):
        problems.append(
            f"data.eval_split = {split:g} must be a fraction below 1, or a whole number of documents."
        )
    if seq_len < 2:
        problems.append(f"data.seq_len = {seq_len} must be at least 2: a token, and the next as its label.")
    if problems:
        raise UserError(problems)
