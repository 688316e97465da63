"""The row that begins metrics.jsonl: what was run, on what, and what the planner predicted for it."""

from __future__ import annotations

import socket
import uuid
from typing import TYPE_CHECKING, Any

from meshtune.addresses import public
from meshtune.launch.rank import cores
from meshtune.meter.rows import time_now
from meshtune.model.identity import BASE_DIGEST
from meshtune.train.provenance import device_name, git_facts, versions
from meshtune.train.updates import rate_in_words
from meshtune.yaml_tree import read_yaml

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.data.prepare import Prepared
    from meshtune.parallel.mesh import World
    from meshtune.rundir import Row, RunDir
    from meshtune.train.loop import Run
    from meshtune.train.model import RankModel


def run_row(config: Config, run: Run, model: RankModel, prepared: Prepared, resumed: int | None) -> Row:
    """Facts of one start of a run; {} on ranks other than the main one. Every rank calls it.

    resumed: step of the checkpoint that the run goes on from, None for a new run.
    """
    hosts = hosts_of(run.world)
    if not run.world.main:
        return {}
    return {
        **identity(run.folder),
        **facts_of(config, model, prepared),
        "total_steps": run.steps,
        BASE_DIGEST: run.exporter.base_digest,
        "learning_rate": rate_in_words(config),
        "schedule_steps": config.train.lr_decay_steps or run.steps,
        "resumed_from": resumed,
        **hosts,
        **predicted(run.folder),
    }


def facts_of(config: Config, model: RankModel, prepared: Prepared | None) -> Row:
    """Facts of a run, or of a benched layout, that begins now on this rank's device.

    prepared: the data; None: random tokens.
    """
    world = model.parallel.world
    return {
        "started": time_now(),
        "model": public(config.model.name),
        "method": config.method,
        "parameters": model.census.total,
        "trainable_parameters": model.census.trainable,
        "precision": config.train.precision,
        "layout": str(world.layout),
        "world": world.size,
        "global_batch_size": config.global_batch_size,
        "seq_len": config.data.seq_len,
        "seed": config.train.seed,
        "data": [public(source.path) for source in config.data.train],
        "data_digest": prepared and prepared.digest,
        "label_share": prepared and prepared.train.label_share,
        "loss_function": model.passes.token_loss and model.passes.token_loss.name,
        "device": device_name(world.device),
        "device_type": world.device.type,
        "cores": cores(),
        **versions(),
        **git_facts(),
    }


def hosts_of(world: World) -> dict[str, Any]:
    """Name of the main rank's host, and the number of hosts of all ranks. Every rank calls it."""
    names = world.all_gather_object(socket.gethostname())
    return {"host": names[0], "nodes": len(set(names))}


def identity(folder: RunDir) -> dict[str, Any]:
    """Id of the run in a folder, which it keeps however often it goes on, and the number of this start."""
    starts = folder.rows("run")
    before = starts[-1] if starts else {}
    return {"id": before.get("id") or uuid.uuid4().hex, "start": len(starts) + 1}


def predicted(folder: RunDir) -> dict[str, Any]:
    """`predicted` of the folder's plan.yaml; {} for a model or devices that the planner can't predict."""
    plan = read_yaml(folder.plan_file)
    return {"predicted": plan["predicted"]} if "predicted" in plan else {}
