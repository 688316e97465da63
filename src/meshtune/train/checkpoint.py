"""Checkpoints: whole or absent, checked before anything is applied, written beside the training loop.

    checkpoints/
      step-20/
        __0_0.distcp     tensors of rank 0, written by torch.distributed.checkpoint (one file a rank)
        .metadata        which piece of which tensor lies where
        values.json      everything that is no tensor: step, loader state, schedule, layout, fingerprints
        manifest.json    size and hash of each file above, written last; names of tied tensors
      .tmp-step-30/      being written; renamed to step-30 when every byte is on the disk

The loop pays for one copy of the tensors into host memory; a thread writes that copy. Where there is no
memory for the copy, it is not made and the loop waits for the disk. What goes wrong in the thread (a full
disk) is told at the next `save` or `wait` and never ends the run: the checkpoints before it are whole.

The hashes find damage, not malice: who can change a file can change the manifest. So nothing in a checkpoint
is trusted to be harmless either: see unpickle.py.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import socket
import stat
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from meshtune.errors import UserError
from meshtune.model.pieces import Piece
from meshtune.rundir import flush, write_text_atomically
from meshtune.train.unpickle import SafeReader
from meshtune.units import human

HASH = "xxh3_128"  # damage has no intent; sha256 takes 20 times as long where the CPU has no SHA instructions
logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class _NotSaved(Exception):
    """Why a checkpoint could not be written; the run goes on."""


class Checkpoints:
    """The checkpoints of one run.

    `keep` is how many of the newest stay. With `asynchronous`, `save` returns after copying the tensors.
    `process_group` (of a CPU backend such as gloo, used by nobody else) joins the ranks whose tensors make
    one checkpoint; None means that this process holds everything. `report` gets one sentence for each thing
    that went wrong without ending the run, always in the caller's thread.
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
        self._buffers: dict[str, Tensor] = {}
        self._checked: set[int] = set()  # steps found whole by this object: hashing them once is enough
        # One process is what we mean. Not around the calls: catch_warnings is not safe beside other threads.
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
        """Write the checkpoint of `step`, then remove old ones beyond `keep`, but no step in `protect`.

        A plain tensor is whole; of what several ranks hold together each gives its Piece. `values` must
        survive JSON (keys are text, tuples come back as lists). Tensors that share their memory are written
        once. A save waits for the one before it. Returns, and reports, what went wrong since the last `save`
        or `wait`: with `asynchronous` that is about the save before this one.
        """
        text = json.dumps({"step": step, **values})
        problems = self.wait()
        own, tied = self._dealt(tensors)
        self._checked.discard(step)
        if self._asynchronous:
            problems += self._without_copies(self._prepare(own))
        if self._asynchronous:
            own = self._stage(own)
            self._writing = self._thread.submit(self._write, step, own, tied, text, protect)
            return problems
        return problems + self._tell(self._write(step, own, tied, text, protect))

    def wait(self) -> list[str]:
        """Wait until the last save is on the disk; returns, and reports, why it is not if it failed."""
        reserving, self._reserving = self._reserving, None
        problems = self._without_copies(reserving.result()) if reserving else []
        writing, self._writing = self._writing, None
        return problems + self._tell(writing.result()) if writing else problems

    def reserve(self, tensors: Mapping[str, Tensor | Piece]) -> None:
        """Make memory for the host copies in the background, so that the first save is no longer than others.

        Touching fresh memory takes the operating system longer than the copy. Call it when the optimizer
        state exists. Only shapes, types and devices are read. Where the copies would take more than half of
        the free memory there will be none: the system would have to swap, or to kill the run.
        """
        if self._asynchronous:
            own, _ = self._dealt(tensors)
            free = psutil.virtual_memory().available
            if self._on_this_machine(sum(piece.tensor.nbytes for piece in own.values())) > free / 2:
                self._without_copies(f"only {human(free)} are free")
            else:
                self._reserving = self._thread.submit(self._prepare, own, touch=True)

    def _dealt(self, tensors: Mapping[str, Tensor | Piece]) -> tuple[dict[str, Piece], dict[str, str]]:
        """`_apart`, with only those pieces that this rank is to copy and write. All ranks must ask.

        A piece that several ranks have goes to the one that has least to do so far, the largest first.
        """
        own, tied = _apart(tensors)
        mine = {
            (name, tuple(piece.offsets)): piece.tensor.nbytes
            for name, piece in own.items()
            if not _idle(piece)
        }
        everyone = self._gather(mine)
        sizes = {key: size for part in everyone for key, size in part.items()}
        owners: dict[Any, list[int]] = {key: [] for key in sizes}
        for rank, part in enumerate(everyone):
            for key in part:
                owners[key].append(rank)
        loads, dealt = [0] * len(everyone), set()
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            rank = min(owners[key], key=loads.__getitem__)
            loads[rank] += sizes[key]
            if rank == self._rank:
                dealt.add(key)
        return {name: piece for name, piece in own.items() if (name, tuple(piece.offsets)) in dealt}, tied

    def _on_this_machine(self, size_bytes: int) -> int:
        """What the ranks of this machine, which share its memory, need together. All ranks must ask."""
        everyone = self._gather((socket.gethostname(), size_bytes))
        return sum(size for host, size in everyone if host == socket.gethostname())

    def clear_leftovers(self) -> None:
        """Remove what killed runs left half-written. Each save does it too; only the run that writes may."""
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _tell(self, problem: str | None) -> list[str]:
        problems = [problem] if problem else []
        for sentence in problems:
            self._report(sentence)
        return problems

    def _without_copies(self, reason: str | None) -> list[str]:
        """Where there is a reason for it, write from the live tensors from now on, and tell so."""
        if reason is None:
            return []
        self._asynchronous = False
        self._buffers.clear()
        return self._tell(
            f"There is no host memory for copies of what checkpoints hold ({reason}), so training waits "
            "while each is written (as with checkpoint.async_save: false)."
        )

    def _prepare(self, pieces: Mapping[str, Piece], *, touch: bool = False) -> str | None:
        """Let `_buffers` hold host memory for each of these tensors, and for no others.

        Returns why that memory can't be had, if it can't.
        """
        for name in self._buffers.keys() - pieces.keys():
            del self._buffers[name]
        for name, tensor in ((name, piece.tensor) for name, piece in pieces.items()):
            old = self._buffers.get(name)
            if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.is_cuda and tensor.numel() > 0  # page-locked: copied at the bus's speed
                try:
                    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                except (RuntimeError, MemoryError) as error:
                    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
                self._buffers[name] = fresh.zero_() if touch else fresh
        return None

    @torch.no_grad()
    def _stage(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copies of this rank's pieces in the buffers made for them, which the next save uses again."""
        for name, piece in pieces.items():
            self._buffers[name].copy_(piece.tensor, non_blocking=True)
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return {name: replace(piece, tensor=self._buffers[name]) for name, piece in pieces.items()}

    def _write(
        self,
        step: int,
        pieces: dict[str, Piece],
        tied: dict[str, str],
        values: str,
        protect: Collection[int],
    ) -> str | None:
        """Write one checkpoint aside and rename it; returns the sentence that says why it was not saved."""
        aside = self.folder / f".tmp-step-{step}"
        header = 2048  # torch's own, of each tensor, at most
        size_bytes = sum(self._gather(sum(piece.tensor.nbytes + header for piece in pieces.values())))
        try:
            self._together(lambda: self._make_room(aside, size_bytes))
            # A rank whose piece of a tied tensor is empty cannot see that it is tied: others can.
            tied = {name: same for others in self._gather(tied) for name, same in others.items()}
            own = {name: piece for name, piece in pieces.items() if name not in tied}
            parts = self._together(lambda: self._write_files(aside, own, values))
            files = {name: facts for part in parts for name, facts in part.items()}
            manifest = json.dumps({"hash": HASH, "files": files, "tied": tied}, indent=1)
            self._together(lambda: self._finish(step, aside, manifest, protect))
        except _NotSaved as error:
            if self._rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            kept = ", ".join(str(other) for other in self.steps()) or "none"
            free = human(_free_bytes(self.folder))
            return (
                f"The checkpoint of step {step} was not saved: {error}. "
                f"It needs about {human(size_bytes)}, and {free} are free in {self.folder}. "
                f"The earlier ones are whole (steps: {kept}) and the run goes on. "
                "Free some space, or keep fewer (checkpoint.keep) or write elsewhere (output)."
            )
        return None

    def _make_room(self, aside: Path, size_bytes: int) -> None:
        """An empty folder on a disk that can hold the checkpoint; no old one is removed for it."""
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clear_leftovers()
            aside.mkdir()
        if _free_bytes(self.folder) < size_bytes:
            raise OSError("no space left on the disk")

    def _write_files(self, aside: Path, pieces: dict[str, Piece], values: str) -> dict[str, dict[str, Any]]:
        """Write this rank's files; returns their sizes and hashes by name."""
        dcp_save(
            {name: piece.tensor for name, piece in pieces.items()},
            storage_writer=FileSystemWriter(aside),
            planner=_SavePieces(pieces),
            process_group=self._group,
            no_dist=self._group is None,
        )
        names = [path.name for path in aside.glob(f"__{self._rank}_*")]
        if self._rank == 0:
            write_text_atomically(aside / "values.json", values)
            names += [".metadata", "values.json"]
        return {name: _size_and_hash(aside / name) for name in sorted(names)}

    def _finish(self, step: int, aside: Path, manifest: str, protect: Collection[int]) -> None:
        """Give the checkpoint its name, now that it is whole, and only then remove what it replaces."""
        if self._rank != 0:
            return
        write_text_atomically(aside / "manifest.json", manifest)
        flush(aside)
        if self._path(step).exists():
            self._set_aside(step)
        aside.rename(self._path(step))
        flush(self.folder)
        # Later steps are of a run that this one did not continue: going on from them would mix two histories.
        stale = [other for other in self.steps() if other > step]
        old = [other for other in self.steps() if other <= step][: -self._keep]
        for other in stale + old:
            if other not in protect:
                self._set_aside(other)
        self.clear_leftovers()

    def _set_aside(self, step: int) -> None:
        """Take the name of what is to be deleted: a kill while deleting must not leave half a checkpoint."""
        self._path(step).rename(self.folder / f".tmp-gone-step-{step}")

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returned on every rank; when the disk failed one rank, all raise _NotSaved."""
        try:
            mine = (work(), None)
        except (OSError, CheckpointException) as error:
            mine = (None, _reason(error))
        everyone = self._gather(mine)
        for _, reason in everyone:
            if reason:
                raise _NotSaved(reason)
        return [result for result, _ in everyone]

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        everyone = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    # Loading #

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        found = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(step) for step in found if step.isdecimal())

    def newest_good(self) -> int | None:
        """The newest step whose files are all as they were written; damaged ones after it are reported."""
        self.wait()
        for step in reversed(self.steps()):
            problems = self.problems(step)
            if not problems:
                return step
            for sentence in problems:
                self._report(f"{sentence} Step {step} is passed over.")
        return None

    def problems(self, step: int) -> list[str]:
        """Sentences that name each file of this checkpoint that is missing or changed; none when it is whole.

        With a process group the ranks share the work, and all get all sentences.
        """
        if step in self._checked:
            return []
        ranks = dist.get_world_size(self._group) if self._group else 1
        try:
            files = list(self._manifest(step)["files"].items())
            mine = [_damage(self._path(step) / name, facts) for name, facts in files[self._rank :: ranks]]
        except UserError as error:
            mine = list(error.problems)
        found = (sentence for part in self._gather(mine) for sentence in part if sentence)
        problems = list(dict.fromkeys(found))
        if not problems:
            self._checked.add(step)
        return problems

    def values(self, step: int) -> dict[str, Any]:
        """What `save` was given as `values`, with `step`. Raises UserError unless the checkpoint is whole."""
        self.wait()
        if problems := self.problems(step):
            raise UserError(problems)
        return json.loads((self._path(step) / "values.json").read_text())

    @torch.no_grad()
    def load(self, step: int, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Any]:
        """Copy the checkpoint of `step` into `tensors`, in place, and return its values.

        The tensors may lie on any device, be cut into other pieces than when saved, and be of another
        floating-point type; the checkpoint may hold more than is asked for. Raises UserError, before anything
        is written into a tensor, when a file is damaged, or naming every tensor that is missing or has
        another shape or kind.
        """
        values = self.values(step)
        manifest = self._manifest(step)
        pieces = {name: _piece(tensor) for name, tensor in tensors.items()}
        source = {name: manifest["tied"].get(name, name) for name in pieces}
        reader = SafeReader(
            self._path(step), [name for name in manifest["files"] if name.endswith(".distcp")]
        )
        stored = reader.read_metadata().state_dict_metadata
        mine = [_mismatch(name, piece, stored.get(source[name])) for name, piece in pieces.items()]
        problems = sorted({sentence for part in self._gather(mine) for sentence in part if sentence})
        if problems:
            raise UserError([f"{self._path(step)}: {sentence}" for sentence in problems])

        wanted: dict[str, Piece] = {}
        for name, piece in pieces.items():
            wanted.setdefault(source[name], piece)
        try:
            dcp_load(
                {name: piece.tensor for name, piece in wanted.items()},
                storage_reader=reader,
                planner=_LoadPieces(wanted),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            raise UserError(f"{self._path(step)} could not be read: {_reason(error)}.") from error
        for name, piece in pieces.items():  # tied when saved, apart now
            if wanted[source[name]] is not piece:
                piece.tensor.copy_(wanted[source[name]].tensor)
        return values

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint: {"hash", "files": {name: {"size", "hash"}}, "tied": {name: name}}."""
        path = self._path(step) / "manifest.json"
        if not self._path(step).is_dir():
            there = ", ".join(str(other) for other in self.steps()) or "none"
            raise UserError(f"{self._path(step)} does not exist. Checkpoints there: {there}.")
        try:
            manifest = json.loads(path.read_text())
            files, tied = manifest["files"], manifest["tied"]
            plain = all(name == os.path.basename(name) and name not in ("", ".", "..") for name in files)
            sized = all(facts.keys() == {"size", "hash"} for facts in files.values())
            complete = {".metadata", "values.json"} <= files.keys() and manifest["hash"] == HASH
            if not (plain and sized and complete and all(isinstance(name, str) for name in tied.values())):
                raise ValueError("it is not what this version writes")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is missing or damaged ({error!r}).") from error
        return manifest


class _SavePieces(DefaultSavePlanner):
    """Writes this rank's pieces, which no other rank writes."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, piece) for name, piece in self._pieces.items() if not _idle(piece)]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].tensor


class _LoadPieces(DefaultLoadPlanner):
    """Reads what this rank's pieces overlap, however they were cut when they were written."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, piece in self._pieces.items()
                if not _idle(piece)
                for item in create_read_items_for_chunk_list(name, stored[name], [_chunk(piece)])
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].tensor


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


def _write_item(name: str, piece: Piece) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(piece),
        properties=TensorProperties.create_from_tensor(piece.tensor),
        size=torch.Size(piece.shape),
    )
    index = MetadataIndex(name, torch.Size(piece.offsets))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _idle(piece: Piece) -> bool:
    """Whether there is nothing of the tensor on this rank, while others have it."""
    return piece.tensor.numel() == 0 and math.prod(piece.shape) > 0


def _piece(tensor: Tensor | Piece) -> Piece:
    """A plain tensor as the only piece of itself."""
    if isinstance(tensor, Piece):
        return tensor
    return Piece(tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())


def _apart(tensors: Mapping[str, Tensor | Piece]) -> tuple[dict[str, Piece], dict[str, str]]:
    """(pieces by name, without those that are the very memory of an earlier one; those: -> its name)."""
    first: dict[Any, str] = {}
    own: dict[str, Piece] = {}
    tied: dict[str, str] = {}
    for name, piece in ((name, _piece(tensor)) for name, tensor in tensors.items()):
        data = piece.tensor
        memory = (data.device, data.data_ptr(), data.dtype, data.shape, data.stride(), piece.shape)
        same = name if data.numel() == 0 or data.is_meta else first.setdefault(memory, name)
        if same == name:
            own[name] = piece
        else:
            tied[name] = same
    return own, tied


def _mismatch(name: str, piece: Piece, stored: Any) -> str | None:
    """Why this tensor cannot be filled from the checkpoint; None when it can."""
    if not isinstance(stored, TensorStorageMetadata):
        return f"it has no tensor {name!r}."
    if tuple(stored.size) != tuple(piece.shape):
        return f"{name!r} has shape {list(stored.size)} there and {list(piece.shape)} here."
    there, here = stored.properties.dtype, piece.tensor.dtype
    if there != here and not (there.is_floating_point and here.is_floating_point):
        return f"{name!r} is {there} there and {here} here."
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
        return f"{name!r} is incomplete there."
    return None


def _damage(path: Path, facts: dict[str, Any]) -> str | None:
    """What is wrong with one file of a checkpoint, given the size and hash that it should have."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            return f"{path} is damaged: it is no regular file."
        if about.st_size != facts["size"]:
            return f"{path} is damaged: it has {about.st_size} bytes, {facts['size']} were written."
        if _size_and_hash(path) != facts:
            return f"{path} is damaged: its content is not what was written ({HASH} differs)."
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    return None


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
        return {"size": file.tell(), "hash": digest}


def _free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds the folder, or would hold it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _reason(error: BaseException) -> str:
    """The first cause in words: torch wraps failures of ranks, and hides the disk's error behind its own."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror.lower() if cause.strerror else str(cause)
        cause = cause.__context__
    return f"{type(error).__name__}: {error}".strip().rstrip(".")
