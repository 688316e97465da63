"""A file of replayed steps for PyTorch's memory_viz (https://pytorch.org/memory_viz).

It is what a GPU would have recorded: events of the allocator, and its segments at the end, in the format of
torch.cuda.memory._dump_snapshot (torch 2.13, torch/cuda/memory.py, `_snapshot`).
An allocation's two frames name

    module:number of the operation:operator          model.layers.3.mlp.up_proj:1204:aten.mm.default
    step and phase:micro-batch:category of the bytes  step 2 forward:0:activations
"""

import pickle
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from meshtune.dryrun.allocator import Event, Replay, Segment
from meshtune.dryrun.requests import COMPUTE, StorageKey, WorkspaceKey, replay_steps
from meshtune.dryrun.workspaces import Workspaces
from meshtune.meter.trace import StepTrace

Frames = list[dict[str, Any]]
POOL = (0, 0)  # torch's default one
OUTSIDE = "unknown"  # category of what isn't a tensor; the viewer looks for this word


def write_snapshot(
    file: Path,
    steps: Sequence[StepTrace],
    workspaces: Workspaces | None = None,
    *,
    expandable: bool = True,
) -> None:
    """Replay steps on torch's allocator, and write for memory_viz what it did. Others: of `replay_steps`."""
    replays = replay_steps(steps, workspaces=workspaces, expandable=expandable, record=True)
    file.write_bytes(pickle.dumps(snapshot(steps, replays), protocol=4))  # the newest that the viewer reads


def snapshot(steps: Sequence[StepTrace], replays: Sequence[Replay]) -> dict[str, Any]:
    """The snapshot as plain values.

    replays: with `record`; at least one, fewer than steps if memory ran out.
    """
    names = Names(steps)
    streams = {stream: number for number, stream in enumerate(names.streams(replays))}
    events = [event for each in replays for event in each.events]
    return {
        "segments": [_segment(each, names, streams) for each in replays[-1].segments],
        "device_traces": [[_event(event, time, names, streams) for time, event in enumerate(events)]],
        "allocator_settings": {},
        "external_annotations": [],
    }


class Names:
    """Frames and categories of allocations, by key. One list for all events of an allocation."""

    def __init__(self, steps: Sequence[StepTrace]) -> None:
        self.steps = {step.step: step for step in steps}
        self.known: dict[Hashable, tuple[Frames, str]] = {None: ([], OUTSIDE)}

    def of(self, key: Hashable, at: int) -> tuple[Frames, str]:
        """(Frames, category) of an allocation. at: its operation, when it is first asked for."""
        if key not in self.known:
            self.known[key] = self._storage(key, at) if isinstance(key, StorageKey) else self._workspace(key)
        return self.known[key]

    def _storage(self, key: StorageKey, at: int) -> tuple[Frames, str]:
        step = self.steps[key.step]
        storage = step.storages[key.storage]
        phase = storage.phase or (step.operations[at].phase if at >= 0 else "begin")
        if at < 0:
            made_by = f"{storage.name or storage.category} {storage.dtype}{[*storage.shape]}"
        else:  # FSDP2 gives a storage its memory back without an operation
            made_by = storage.made_by or "resize_"
        frames = [
            _frame(storage.module or storage.name or "outside of modules", at, made_by),
            _frame(f"step {key.step} {phase}", max(storage.micro_batch, 0), storage.category),
        ]
        return frames, storage.category

    def _workspace(self, key: Hashable) -> tuple[Frames, str]:
        assert isinstance(key, WorkspaceKey)
        frames = [_frame("workspace", max(key.operation, 0), key.name)]
        if key.step in self.steps:
            operation = self.steps[key.step].operations[key.operation]
            frames.append(_frame(operation.module, key.operation, operation.name))
        return frames, OUTSIDE

    def streams(self, replays: Iterable[Replay]) -> list[str]:
        """Streams in the order of their first event, that which computes first."""
        used = dict.fromkeys(event.stream for each in replays for event in each.events)
        return [COMPUTE, *(stream for stream in used if stream != COMPUTE)]


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _event(event: Event, time: int, names: Names, streams: dict[str, int]) -> dict[str, Any]:
    frames, category = names.of(event.key, event.at)
    found = {
        "action": event.action,
        "addr": event.address,
        "size": event.bytes,
        "stream": streams[event.stream],
        "time_us": time,
        "frames": frames,
        "category": category,
        "pool_id": POOL,
    }
    return found | {"device_free": 0} if event.action == "oom" else found


def _segment(segment: Segment, names: Names, streams: dict[str, int]) -> dict[str, Any]:
    asked = sum(block.asked for block in segment.blocks)
    active = sum(block.bytes for block in segment.blocks if block.allocated)
    return {
        "device": 0,
        "address": segment.blocks[0].address,
        "total_size": sum(block.bytes for block in segment.blocks),
        "allocated_size": active,
        "active_size": active,
        "requested_size": asked,
        "stream": streams[segment.stream],
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": POOL,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.bytes,
                "requested_size": block.asked,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": names.of(block.key, -1)[0] if block.allocated else [],
            }
            for block in segment.blocks
        ],
    }
