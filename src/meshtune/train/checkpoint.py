"""Checkpoints: whole or absent, checked before anything is applied, written while training continues.

    checkpoints/
      step-20/
        __0_0.distcp     tensors of rank 0, written by torch.distributed.checkpoint (one file a rank)
        .metadata        file and place of each piece of each tensor
        values.json      everything that isn't a tensor: step, loader state, schedule, layout, fingerprints
        manifest.json    size and hash of each file above, written last; names of tied tensors
      .tmp-step-30/      being written; renamed to step-30 when every byte is on the disk

The loop pays for one copy of the tensors into host memory; a thread writes that copy. Where there is no
memory for the copy, it is not made and the loop waits for the disk. A failure in the thread (a full disk) is
reported at the next `save` or `wait` and never ends the run: the checkpoints before it are whole.

The hashes find damage, not malice: whoever can change a file can change the manifest. So the content of a
checkpoint is not trusted either: see checkpoint_files.py.
"""

import errno
import json
import logging
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from meshtune import filesystem
from meshtune.errors import UserError
from meshtune.filesystem import sync
from meshtune.model.pieces import Piece
from meshtune.rundir import disk_is_full, saved_steps, write_atomically, write_text_atomically
from meshtune.train.checkpoint_files import (
    CANNOT_BE_READ,
    HASH,
    NotSaved,
    SafeReader,
    Written,
    damage,
    dealt,
    empty_here,
    free_bytes,
    metadata,
    mismatch,
    misnamed,
    piece_of,
    read,
    read_manifest,
    reason_of,
    separate_tied,
    size_and_hash,
    write,
)
from meshtune.units import human

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Checkpoints:
    """Saves and loads the checkpoints of one run, the folders step-<N> in `folder`.

    keep: how many of the newest are not removed, at least 1. asynchronous: `save` returns after copying the
    tensors into host memory; switched off for good where there is no memory for the copies. process_group:
    the ranks whose tensors make one checkpoint (a CPU backend such as gloo, with no other user), which all
    have to call save, reserve, newest_good, problems, values and load; None: this process has all tensors.
    report: gets one sentence for each failure that does not end the run, always in the caller's thread.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        asynchronous: bool = True,
        process_group: dist.ProcessGroup | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        assert keep >= 1
        self.folder = Path(folder)
        self._keep, self._asynchronous, self._group, self._report = keep, asynchronous, process_group, report
        self._rank = dist.get_rank(process_group) if process_group else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str | None] | None = None
        self._reserving: Future[str | None] | None = None
        self._copies = HostCopies()
        self._checked: set[int] = set()  # steps whose files this object has hashed and found whole
        # Tables of all ranks, which are made once (checkpoint_tables.py), with what they were made of.
        self._sizes: dict[Any, int] | None = None  # bytes of this rank's pieces
        self._dealt: set[Any] = set()  # of them, those that this rank writes
        self._written: Written | None = None  # by this rank, at the last save
        self._metadata = b""  # of that save, on rank 0
        # A single process is intended. Not around the calls: catch_warnings is not safe with other threads.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    # Saving #

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | Piece],
        values: Mapping[str, Any],
        *,
        protect: Collection[int] = (),
    ) -> list[str]:
        """Write the checkpoint of `step`, then remove all of later steps (of a run that was not resumed) and
        old ones beyond `keep`, but none in `protect`. One of the same step is replaced.

        tensors: by name; whole ones as they are; of a tensor that is sharded over ranks, every rank passes
        its Piece. Tensors with the same memory are written once. values: must survive JSON (keys are text,
        tuples become lists); `step` is added.

        A save waits for the one before it. Returns, and reports, a sentence for each failure since the last
        `save` or `wait`: with `asynchronous`, those of the save before this one. If writing fails,
        no checkpoint is removed.
        """
        text = json.dumps({"step": step, **values})
        problems = self.wait()
        pieces, tied = self._assigned(tensors)
        self._checked.discard(step)
        if self._asynchronous:
            problems += self._stop_copying(self._copies.allocate(pieces))
        if self._asynchronous:
            pieces = self._copies.copy(pieces)
            self._writing = self._thread.submit(self._write, step, pieces, tied, text, protect)
            return problems
        return problems + self._reported(self._write(step, pieces, tied, text, protect))

    def wait(self) -> list[str]:
        """Wait until the last save is on the disk; returns, and reports, the reason if it failed."""
        reserving, self._reserving = self._reserving, None
        problems = self._stop_copying(reserving.result()) if reserving else []
        writing, self._writing = self._writing, None
        return problems + self._reported(writing.result()) if writing else problems

    def reserve(self, tensors: Mapping[str, Tensor | Piece]) -> None:
        """Allocate memory for the host copies in the background, so that the first save is as fast as others.

        The operating system takes longer to hand out fresh memory than the copy takes. Call it when the
        optimizer state exists. Only shapes, dtypes and devices are read. If the copies would take more than
        half of the free memory, no copies are made: the system would have to swap, or to kill the run.
        """
        if self._asynchronous:
            pieces, _ = self._assigned(tensors)
            free = psutil.virtual_memory().available
            if self._bytes_on_host(sum(piece.tensor.nbytes for piece in pieces.values())) > free / 2:
                self._stop_copying(f"only {human(free)} are free")
            else:
                self._reserving = self._thread.submit(self._copies.allocate, pieces, touch=True)

    def _assigned(self, tensors: Mapping[str, Tensor | Piece]) -> tuple[dict[str, Piece], dict[str, str]]:
        """(pieces that this rank copies and writes, tied names of `separate_tied`), by name.

        A collective of the group. Pieces are dealt anew only if those of a rank have changed.
        """
        pieces, tied = separate_tied(tensors)
        keys = {name: (name, tuple(piece.offsets)) for name, piece in pieces.items()}
        sizes = {keys[name]: piece.tensor.nbytes for name, piece in pieces.items() if not empty_here(piece)}
        if not all(self._gather(sizes == self._sizes)):
            self._sizes, self._dealt = sizes, dealt(self._gather(sizes), self._rank)
        return {name: piece for name, piece in pieces.items() if keys[name] in self._dealt}, tied

    def _bytes_on_host(self, size_bytes: int) -> int:
        """Sum of `size_bytes` over the ranks of this host, which share its memory. A collective of the
        group.
        """
        host = socket.gethostname()
        return sum(size for name, size in self._gather((host, size_bytes)) if name == host)

    def clear_leftovers(self) -> None:
        """Remove half-written checkpoints of killed runs; only the run that writes may call it."""
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _reported(self, problem: str | None) -> list[str]:
        """Report the problem, if there is one; returns it as a list."""
        problems = [problem] if problem else []
        for sentence in problems:
            self._report(sentence)
        return problems

    def _stop_copying(self, reason: str | None) -> list[str]:
        """From now on write from the live tensors, and report why; with None for a reason do nothing."""
        if reason is None:
            return []
        self._asynchronous = False
        self._copies = HostCopies()
        return self._reported(
            f"There is no host memory for copies of the tensors in checkpoints ({reason}), so training waits "
            "while each is written (as with checkpoint.async_save: false)."
        )

    def _write(
        self,
        step: int,
        pieces: dict[str, Piece],
        tied: dict[str, str],
        values: str,
        protect: Collection[int],
    ) -> str | None:
        """Write one checkpoint under a temporary name, rename it, then delete others. A collective of the
        group.

        Deletes all later steps and those beyond the newest `keep`, but none in `protect`. pieces: those that
        this rank writes. tied: name -> name of the piece with the same memory. values: text of values.json.
        Returns why the checkpoint was not saved, with the remedy; None if it was.
        """
        temporary = self.folder / f".tmp-step-{step}"
        header = 2048  # bytes that torch writes next to each tensor, at most
        size_bytes = sum(self._gather(sum(piece.tensor.nbytes + header for piece in pieces.values())))
        try:
            self._on_all_ranks(lambda: self._make_folder(temporary, size_bytes))
            # A rank whose piece of a tied tensor is empty cannot see that it is tied: others can.
            tied = {name: first for part in self._gather(tied) for name, first in part.items()}
            untied = {name: piece for name, piece in pieces.items() if name not in tied}
            self._write_tensors(temporary, untied)
            parts = self._on_all_ranks(lambda: self._write_and_hash(temporary, values))
            files = {name: facts for part in parts for name, facts in part.items()}
            manifest = json.dumps({"hash": HASH, "files": files, "tied": tied}, indent=1)
            self._on_all_ranks(lambda: self._finish(step, temporary, manifest, protect))
        except NotSaved as error:
            self._written = None  # `_metadata` may not be of what was written
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            return error.sentence(step, size_bytes, self.folder, self.steps())
        return None

    def _make_folder(self, temporary: Path, size_bytes: int) -> None:
        """Make an empty folder, by rank 0; on each rank raise OSError if the disk lacks `size_bytes`.

        size_bytes: of all ranks together. Leftovers of killed runs are removed, but no whole checkpoint is.
        """
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clear_leftovers()
            temporary.mkdir()
        if free_bytes(self.folder) < size_bytes:
            raise OSError(errno.ENOSPC, "no space left on the disk")

    def _write_tensors(self, temporary: Path, pieces: dict[str, Piece]) -> None:
        """Write this rank's pieces into `temporary`; where another rank's or these are not those of the last
        save, make `.metadata` anew. A collective of the group.
        """
        parts = self._on_all_ranks(lambda: self._write_pieces(temporary, pieces))
        if all(parts):
            return
        written = self._gather_on_main(self._written)
        self._on_all_ranks(lambda: self._make_metadata(temporary, written))

    def _write_pieces(self, temporary: Path, pieces: dict[str, Piece]) -> bool:
        """Write this rank's pieces; whether the files have the same tensors at the same places as before."""
        before, self._written = self._written, None
        written = write(temporary, pieces, self._rank)
        self._written = written
        return written == before

    def _make_metadata(self, temporary: Path, written: list[Any]) -> None:
        """Make `_metadata`, on rank 0. written: by all ranks."""
        if self._rank == 0:
            self._metadata = metadata(temporary, written)

    def _write_and_hash(self, temporary: Path, values: str) -> dict[str, dict[str, Any]]:
        """Write .metadata and values.json (text `values`) on rank 0; {"size", "hash"} of each file that this
        rank wrote, by name.
        """
        names = [path.name for path in temporary.glob(f"__{self._rank}_*")]
        if self._rank == 0:
            write_atomically(temporary / ".metadata", self._metadata)
            write_text_atomically(temporary / "values.json", values)
            names += [".metadata", "values.json"]
        return {name: size_and_hash(temporary / name) for name in sorted(names)}

    def _finish(self, step: int, temporary: Path, manifest: str, protect: Collection[int]) -> None:
        """Rename the whole checkpoint to its final name, and only then delete others, as `_write` says.

        Only rank 0 does so, after writing `manifest`, the text of manifest.json.
        """
        if self._rank != 0:
            return
        write_text_atomically(temporary / "manifest.json", manifest)
        sync(temporary)
        if self._path(step).exists():
            self._discard(step)
        filesystem.replace(temporary, self._path(step))
        sync(self.folder)
        # Later steps belong to a run that this one did not resume: resuming from them would mix two runs.
        for other in self.steps():
            if other > step and other not in protect:
                self._discard(other)
        self.prune(step, protect)

    def prune(self, step: int, protect: Collection[int] = ()) -> None:
        """Delete the steps beyond the newest `keep` up to `step`, but none in `protect`, and leftovers.

        Only rank 0 does. Saves call it; so does a run that resumes, since the process before may have been
        killed in between.
        """
        if self._rank == 0:
            for other in [other for other in self.steps() if other <= step][: -self._keep]:
                if other not in protect:
                    self._discard(other)
            self.clear_leftovers()

    def _discard(self, step: int) -> None:
        """Rename a checkpoint that is to be deleted: a kill while deleting must not leave half of one."""
        try:
            self._path(step).rename(self.folder / f".tmp-gone-step-{step}")
        except OSError:  # a layer below, as in a container
            shutil.rmtree(self._path(step))

    def _on_all_ranks(self, work: Callable[[], Result]) -> list[Result]:
        """Results of `work` by rank; if the disk fails on one rank, all ranks raise NotSaved."""
        try:
            outcome = (work(), None)
        except (OSError, RuntimeError) as error:  # torch's writer raises both for the same full disk
            outcome = (None, (reason_of(error), not isinstance(error, OSError) or disk_is_full(error)))
        outcomes = self._gather(outcome)
        for _, failure in outcomes:
            if failure:
                reason, full = failure
                raise NotSaved(reason, full=full)
        return [result for result, _ in outcomes]

    def _gather(self, value: Any) -> list[Any]:
        """Values of all ranks of the group, by rank."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _gather_on_main(self, value: Any) -> list[Any]:
        """Values of all ranks of the group, by rank, on rank 0; elsewhere an empty list."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values or []

    # Loading #

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return saved_steps(self.folder)

    def newest_good(self) -> int | None:
        """The newest step whose files are all as they were written; newer, damaged ones are reported.

        Raises UserError if a file can't be read: it may be whole, and using an older checkpoint would end
        in deleting it.
        """
        self.wait()
        for step in reversed(self.steps()):
            problems = self.problems(step)
            if not problems:
                return step
            if unreadable := [sentence for sentence in problems if CANNOT_BE_READ in sentence]:
                remedy = "Run the command again once the disk answers, or move that checkpoint elsewhere."
                raise UserError([*unreadable, remedy])
            for sentence in problems:
                self._report(f"{sentence} Step {step} is skipped.")
        return None

    def problems(self, step: int) -> list[str]:
        """One sentence for each file of this checkpoint that is missing or changed; none if it is whole.

        With a process group, each rank reads a part of the files, and all ranks get all sentences.
        """
        if step in self._checked:
            return []
        ranks = dist.get_world_size(self._group) if self._group else 1
        try:
            files = list(read_manifest(self._path(step))["files"].items())
            damages = [damage(self._path(step) / name, facts) for name, facts in files[self._rank :: ranks]]
            damages += [] if any(damages) else [misnamed(self._path(step), step)]
        except UserError as error:
            damages = list(error.problems)
        sentences = (sentence for part in self._gather(damages) for sentence in part if sentence)
        problems = list(dict.fromkeys(sentences))
        if not problems:
            self._checked.add(step)
        return problems

    def values(self, step: int) -> dict[str, Any]:
        """The `values` passed to `save`, with `step`. Raises UserError unless the checkpoint is whole."""
        self.wait()
        if problems := self.problems(step):
            raise UserError(problems)
        return json.loads((self._path(step) / "values.json").read_text())

    @torch.no_grad()
    def load(self, step: int, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Any]:
        """Copy the checkpoint of `step` into `tensors`, in place, and return its values.

        The tensors may be on any device, be cut into other pieces than when saved, and have another
        floating-point dtype; the checkpoint may have more tensors. Raises UserError, before any tensor is
        changed, if a file is damaged, or naming every tensor that is missing or has another shape or kind;
        and, when some may be changed, if the disk fails while they are read.
        """
        values = self.values(step)
        manifest = read_manifest(self._path(step))
        pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
        source = {name: manifest["tied"].get(name, name) for name in pieces}
        reader = SafeReader(
            self._path(step), [name for name in manifest["files"] if name.endswith(".distcp")]
        )
        stored = reader.read_metadata().state_dict_metadata
        mismatches = [mismatch(name, piece, stored.get(source[name])) for name, piece in pieces.items()]
        problems = sorted({sentence for part in self._gather(mismatches) for sentence in part if sentence})
        if problems:
            raise UserError([f"{self._path(step)}: {sentence}" for sentence in problems])

        wanted: dict[str, Piece] = {}
        for name, piece in pieces.items():
            wanted.setdefault(source[name], piece)
        try:
            read(reader, wanted, self._group)
        except CheckpointException as error:
            raise UserError(f"{self._path(step)} could not be read: {reason_of(error)}.") from error
        for name, piece in pieces.items():  # tied when saved, two tensors now
            if wanted[source[name]] is not piece:
                piece.tensor.copy_(wanted[source[name]].tensor)
        return values

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"


# Copies in host memory #


class HostCopies:
    """One buffer for each piece, page-locked where it lies on a GPU; every save uses them again."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def allocate(self, pieces: Mapping[str, Piece], *, touch: bool = False) -> str | None:
        """Have a buffer for each piece, by its name, and for no others.

        touch: write to it too, so that the system provides the memory now. Returns the reason if the memory
        can't be allocated, else None.
        """
        for name in self.buffers.keys() - pieces.keys():
            del self.buffers[name]
        for name, tensor in ((name, piece.tensor) for name, piece in pieces.items()):
            old = self.buffers.get(name)
            if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.is_cuda and tensor.numel() > 0  # page-locked: copied at the bus's speed
                try:
                    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                except (RuntimeError, MemoryError) as error:
                    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
                self.buffers[name] = fresh.zero_() if touch else fresh
        return None

    @torch.no_grad()
    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copy pieces that have a buffer; returns the copies, once they are whole."""
        for name, piece in pieces.items():
            self.buffers[name].copy_(piece.tensor, non_blocking=True)
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return {name: replace(piece, tensor=self.buffers[name]) for name, piece in pieces.items()}
