"""Sources to tokenised, packed data on disk, written once and memory-mapped by every process.

    read ─1000 rows─> encode ──> overlong? labelled? ──> tokens.npy    (streams through: memory is bounded)
                                                            │ lengths
                             eval_split, weights, packing <─┘ ──> members and starts of train and eval

The cache folder is named by the fingerprint of everything that decides its content. It is written beside
under another name, flushed to disk and renamed, so it is whole or absent: of two processes that write it at
the same time, one wins and the other uses the winner's. A lock lets the second wait instead of doing the work
twice; without locks (some network file systems) the result is the same. manifest.json holds the size of each
file and the figures that are shown; a folder that does not match its manifest is removed and written again.
No file here can hold code: arrays load with allow_pickle=False.
"""

import fcntl
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.documents import ROWS_AT_ONCE, Overlong, Tally, Usable, usable
from meshtune.data.example import SHOWN, OnBadRow, Source, notes_sentences
from meshtune.data.pack import Dataset, pack, permutation, singles, stored
from meshtune.data.readers import fingerprint, read
from meshtune.data.stream import Stream
from meshtune.errors import UserError
from meshtune.rundir import flush

if TYPE_CHECKING:
    from meshtune.data.encode import Encoder

CACHE_VERSION = 2  # raise it when the files' format or the code that decides their content changes
STALE_SECONDS = 24 * 3600  # age at which an unfinished folder must be that of a killed process


@dataclass(frozen=True)
class Prepared:
    """Training data, held-out data and their figures."""

    train: Dataset | Stream
    eval: Dataset | None  # None: nothing is held out
    stats: dict[str, Any]  # JSON-able; `sentences` writes it as text


def prepare(
    sources: Sequence[Source],
    encoder: "Encoder",
    *,
    seq_len: int,
    packing: bool = True,
    overlong: Overlong = "cut",
    seed: int = 0,
    eval_split: float = 0,
    eval_sources: Sequence[Source] = (),
    on_bad_row: OnBadRow = "error",
    cache_dir: str | Path,
    streaming: bool = False,
) -> Prepared:
    """Training and held-out data from the cache, which is written first where it is missing.

    `eval_split` is the fraction of the training documents that is held out if below 1, else their number; the
    seed chooses them. `eval_sources`, instead of it, are held-out data of their own. A source of weight w is
    passed through w times per epoch (a fraction of a pass reads a part fixed by the seed). `on_bad_row` is
    for rows that can't be read; the encoder has its own for labels that can't be exact. With `streaming` the
    training data is a Stream, weights are shares of its rows, and only `eval_sources` go to disk. Raises
    UserError for bad rows and settings, documents longer than `seq_len` tokens under overlong="error", a
    cache folder that can't be written, and if no document is left.
    """
    _check_settings(sources, eval_split, eval_sources, seq_len, streaming)
    build = _Build(encoder, seq_len, packing, overlong, seed, eval_split, on_bad_row)
    if not streaming:
        return _cached(build, sources, eval_sources, Path(cache_dir).expanduser())
    stream = Stream(tuple(sources), encoder, seq_len, packing, overlong, seed, on_bad_row)
    stats = _stats(Tally(), build, {})
    if not eval_sources:
        return Prepared(stream, None, stats)
    held_out = prepare(
        eval_sources, encoder, seq_len=seq_len, packing=packing, overlong=overlong, seed=seed,
        on_bad_row=on_bad_row, cache_dir=cache_dir,
    )  # fmt: skip
    assert isinstance(held_out.train, Dataset)
    return Prepared(stream, held_out.train, stats | {"eval": held_out.stats["train"]})


@dataclass(frozen=True)
class _Build:
    """The settings of `prepare` that decide a cache's content."""

    encoder: "Encoder"
    seq_len: int
    packing: bool
    overlong: Overlong
    seed: int
    eval_split: float
    on_bad_row: OnBadRow


def _cached(
    build: _Build, sources: Sequence[Source], eval_sources: Sequence[Source], cache_dir: Path
) -> Prepared:
    """Open the cache of these sources, written first if missing or damaged; add cache, seconds to stats."""
    settings = [build.seq_len, build.packing, build.overlong, build.seed, build.eval_split, build.on_bad_row]
    recipe = {
        "version": CACHE_VERSION,
        "sources": [_identity(source) for source in sources],
        "eval_sources": [_identity(source) for source in eval_sources],
        "encoder": build.encoder.fingerprint,
        "settings": settings,
    }
    key = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=16).hexdigest()
    folder = cache_dir / key
    started, state = time.perf_counter(), "found"
    prepared = _open(folder)
    if prepared is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder):
                prepared = _open(folder)  # another process may have written it while this one waited
                if prepared is None:
                    _discard(folder)
                    _make(folder, build, sources, eval_sources)
                    prepared = _open(folder)
        except OSError as error:
            if error.filename is not None and not str(error.filename).startswith(str(folder.parent)):
                raise
            raise UserError(
                f"The data cache in {folder.parent} cannot be written ({error.strerror or error}): make room "
                "there, or name another folder by data.cache."
            ) from error
        assert prepared is not None, "a cache that was just written must open"
        state = "made"
    prepared.stats.update(cache=state, seconds=time.perf_counter() - started)
    return prepared


def sentences(stats: dict[str, Any]) -> list[str]:
    """Lines for the log: size, labels and packing of the data, and every document or row cut or dropped."""
    lines = []
    for name in ("train", "eval"):
        if part := stats[name]:
            how = (
                f"packed into {part['sequences']:,} sequences of {stats['seq_len']:,}"
                if part["packed"]
                else "one per sequence"
            )
            full = f", {part['efficiency']:.1%} full" if part["packed"] else ""
            lines.append(
                f"{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, "
                f"{part['label_tokens'] / part['tokens']:.1%} labelled; {how}{full}"
            )
    cut = stats["cut"]
    if cut["documents"]:
        lines.append(
            f"cut to {stats['seq_len']:,} tokens: {cut['documents']:,} documents, which lost "
            f"{cut['tokens']:,} tokens ({cut['label_tokens']:,} of them labelled)"
        )
    for reason, lost in stats["dropped"].items():
        lines.append(f"dropped, {reason}: {lost['documents']:,} documents ({lost['tokens']:,} tokens)")
    for reason, rows in stats["bad_rows"].items():
        lines.append(f"bad rows skipped, {reason}: {rows:,}")
    return [*lines, *notes_sentences(stats["notes"])]


def _make(folder: Path, build: _Build, sources: Sequence[Source], eval_sources: Sequence[Source]) -> None:
    """Write the cache aside and rename it to `folder`; delete unfinished ones older than STALE_SECONDS."""
    for unfinished in folder.parent.glob(f".{folder.name}.*"):
        if unfinished.is_dir() and time.time() - unfinished.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(unfinished, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(aside, build, sources, eval_sources)
        for path in [*aside.iterdir(), aside]:
            flush(path)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            return  # another process has written it meanwhile, from the same recipe
        flush(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(aside: Path, build: _Build, sources: Sequence[Source], eval_sources: Sequence[Source]) -> None:
    """Write arrays and manifest of the encoded, split, packed sources to `aside`. Raises as `prepare`."""
    tally = Tally()
    files: dict[str, int] = {}  # file -> its index in Dataset.files
    lengths, labels, origins, source_of = [], [], [], []  # per document, a batch of documents at a time
    with _Array(aside / "tokens.npy", np.dtype(np.uint32)) as tokens:
        for number, source in enumerate([*sources, *eval_sources]):
            for batch in _documents(source, build, tally):
                tokens.append(np.concatenate([stored(ids, labelled) for _, ids, labelled in batch]))
                lengths.append(np.array([len(ids) for _, ids, _ in batch], dtype=np.int64))
                labels.append(np.array([labelled.sum() for *_, labelled in batch], dtype=np.int64))
                places = [(files.setdefault(at.file, len(files)), at.line) for at, *_ in batch]
                origins.append(np.array(places, dtype=np.int64))
                source_of.append(np.full(len(batch), number))
    if tally.overlong:
        raise UserError([*tally.overlong, "Raise data.seq_len, or set data.overlong to cut or drop."])
    if not lengths:
        raise UserError(["No document is left to train on.", *sentences(_stats(tally, build, {}))])
    length, label, source_number = (np.concatenate(batches) for batches in (lengths, labels, source_of))
    offsets = np.concatenate([[0], np.cumsum(length)])
    for name, array in (("offsets", offsets), ("labels", label), ("origins", np.concatenate(origins))):
        np.save(aside / f"{name}.npy", array, allow_pickle=False)
    train, held_out = _split(source_number, len(sources), build)
    parts = {}
    passes = list(_passes(train, source_number, [source.weight for source in sources], build.seed))
    for name, rounds in (("train", passes), ("eval", [held_out] if len(held_out) else [])):
        if not rounds:
            continue
        members, starts = _sequences(rounds, length, build)
        np.save(aside / f"{name}_members.npy", members, allow_pickle=False)
        np.save(aside / f"{name}_starts.npy", starts, allow_pickle=False)
        parts[name] = {
            "digest": _digest(tokens.digest, offsets, members, starts),
            "packed": build.packing,
            "documents": len(members),
            "sequences": len(starts) - 1,
            "tokens": int(length[members].sum()),
            "label_tokens": int(label[members].sum()),
        }
        widest = int(np.diff(np.concatenate([[0], np.cumsum(length[members])])[starts]).max())
        parts[name]["efficiency"] = parts[name]["tokens"] / (parts[name]["sequences"] * widest)
    manifest = {
        "version": CACHE_VERSION,
        "sizes": {path.name: path.stat().st_size for path in sorted(aside.iterdir())},
        "files": list(files),
        "stats": _stats(tally, build, parts),
    }
    (aside / "manifest.json").write_text(json.dumps(manifest))


def _documents(source: Source, build: _Build, tally: Tally) -> Iterator[list[Usable]]:
    """Yield the source's usable documents, a batch at a time; stop after SHOWN overlong ones."""
    examples = read(
        source,
        on_bad_row=build.on_bad_row,
        needs_answer=build.encoder.train_on != "all",
        dropped=tally.bad_rows,
        notes=tally.notes,
    )
    while rows := list(islice(examples, ROWS_AT_ONCE)):
        batch = usable(rows, build.encoder, seq_len=build.seq_len, overlong=build.overlong, tally=tally)
        if len(tally.overlong) >= SHOWN:
            return
        if batch:
            yield batch


def _split(source_number: np.ndarray, sources: int, build: _Build) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the documents to train on and of those held out, each in the order they were read.

    `source_number` int [documents]: source of each; numbers below `sources` are training sources. Raises
    UserError if no document is left to train on.
    """
    candidates = np.flatnonzero(source_number < sources)
    held_out = np.flatnonzero(source_number >= sources)
    if build.eval_split:
        wanted = build.eval_split * len(candidates) if build.eval_split < 1 else build.eval_split
        count = max(1, round(wanted))
        taken = np.zeros(len(candidates), dtype=bool)
        taken[permutation(len(candidates), "split", build.seed)[:count]] = True
        candidates, held_out = candidates[~taken], candidates[taken]
    if not len(candidates):
        raise UserError(
            f"No document is left to train on: {len(held_out):,} are held out (data.eval_split "
            f"= {build.eval_split:g}); lower it, or add training data."
        )
    return candidates, held_out


def _passes(
    documents: np.ndarray, source_number: np.ndarray, weights: Sequence[float], seed: int
) -> Iterator[np.ndarray]:
    """Yield the documents of each pass of an epoch, from the sources whose weight exceeds the passes so far.

    `documents` are indices into `source_number`, whose values are indices into `weights`. The rest of a
    weight below one pass takes that fraction of the source's documents, chosen by the seed.
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
    rounds: Sequence[np.ndarray], lengths: np.ndarray, build: _Build
) -> tuple[np.ndarray, np.ndarray]:
    """Pack each pass in `rounds` by itself, so that a document and its copy never share a sequence.

    rounds: document indices of each pass. lengths: tokens of every document, by its index. Returns (members,
    starts) of all passes, as in `Dataset`.
    """
    members, starts = [], [np.zeros(1, dtype=np.int64)]
    for turn, documents in enumerate(rounds):
        if build.packing:
            inner, begins = pack(lengths[documents], build.seq_len, build.seed, turn)
        else:
            inner, begins = singles(len(documents))
        members.append(documents[inner])
        starts.append(begins[1:] + starts[-1][-1])
    return np.concatenate(members), np.concatenate(starts)


def _stats(tally: Tally, build: _Build, parts: dict[str, Any]) -> dict[str, Any]:
    """`Prepared.stats` without cache and seconds; `parts` has the figures of train and eval."""
    return tally.values() | {"seq_len": build.seq_len, "train": parts.get("train"), "eval": parts.get("eval")}


def _open(folder: Path) -> Prepared | None:
    """The cache, None if it is absent or damaged (a file is missing or has another size than was written)."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if any((folder / name).stat().st_size != size for name, size in manifest["sizes"].items()):
            return None
        arrays = {
            Path(name).stem: np.load(folder / name, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for name in manifest["sizes"]
        }
        stats = manifest["stats"]
        parts = {
            name: Dataset(
                tokens=arrays["tokens"],
                offsets=arrays["offsets"],
                labels=arrays["labels"],
                origins=arrays["origins"],
                files=tuple(manifest["files"]),
                members=arrays[f"{name}_members"],
                starts=arrays[f"{name}_starts"],
                seq_len=stats["seq_len"],
                packed=stats[name]["packed"],
                digest=stats[name]["digest"],
            )
            for name in ("train", "eval")
            if stats[name]
        }
        return Prepared(train=parts["train"], eval=parts.get("eval"), stats=stats)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock file of `folder`; the system releases it when the process dies."""
    with (folder.parent / f".{folder.name}.lock").open("wb") as file:
        with suppress(OSError):  # no locks on some network file systems; the rename keeps the folder whole
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(folder: Path) -> None:
    """Remove a damaged folder; it is renamed first, so that no process opens a half removed one."""
    if folder.exists():
        away = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        folder.rename(away / "damaged")
        shutil.rmtree(away, ignore_errors=True)


class _Array:
    """1-d .npy file that grows; leaving the context writes its final size into the header (numpy pads it)."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self._size = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._write_header()
        self._begin = self._file.tell()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._size,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self._dtype).data
        self._file.write(data)
        self._hash.update(data)
        self._size += len(values)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> "_Array":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._begin, "the final header must have the size of the first"


def _digest(tokens: str, *arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(tokens.encode(), digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return digest.hexdigest()


def _identity(source: Source) -> list[Any]:
    return [fingerprint(source), source.format, source.split, source.weight, source.columns, source.where]


def _check_settings(
    sources: Sequence[Source],
    eval_split: float,
    eval_sources: Sequence[Source],
    seq_len: int,
    streaming: bool,
) -> None:
    """Raise UserError with every setting of `prepare` that is invalid by itself or beside another."""
    problems = [f"{s.path}: weight {s.weight:g} must be above 0." for s in sources if s.weight <= 0]
    if not sources:
        problems.append("There is no training data: name a file, a folder or a hub data set in data.train.")
    if eval_split and eval_sources:
        problems.append(f"Give data.eval or data.eval_split ({eval_split:g}), not both.")
    if eval_split < 0 or (eval_split > 1 and eval_split != int(eval_split)):
        problems.append(
            f"data.eval_split = {eval_split:g} must be a fraction below 1, or a whole number of documents."
        )
    if eval_split and streaming:
        problems.append(
            f"data.eval_split = {eval_split:g} needs the number of documents, which data.streaming does not "
            "know; give data.eval."
        )
    if seq_len < 2:
        problems.append(f"data.seq_len = {seq_len} must be at least 2: a token, and the next as its label.")
    if problems:
        raise UserError(problems)
