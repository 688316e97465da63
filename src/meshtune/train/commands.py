"""What the commands beside `train` do: from a target and settings to plain values.

A target is a run folder, a model or adapter folder, a hub id, or a config file:

    runs/x        its config.yaml, with the weights of model/ (or of a checkpoint)
    an adapter    the base model that it names, with the adapter on it
    a model       as it is
    config.yaml   the model it names, before training
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshtune import config as settings
from meshtune.config import Config
from meshtune.data import inspect
from meshtune.data.pack import Dataset
from meshtune.data.source import Example, Origin
from meshtune.data.template import Encoder
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy, capabilities
from meshtune.model.load import load, load_config, load_tokenizer, quiet, resize_embeddings
from meshtune.model.lora import merge_lora
from meshtune.model.save import adapter_base, load_adapter
from meshtune.parallel.attention import NAMES
from meshtune.parallel.mesh import join
from meshtune.rundir import RunDir
from meshtune.train import build
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.evaluate import Evaluation
from meshtune.train.export import push
from meshtune.train.generate import answers
from meshtune.train.step import OneDevice
from meshtune.train.trackers import Metrics
from meshtune.units import human


@dataclass(frozen=True)
class Target:
    """Settings, and where the weights are: a whole model or an adapter's folder, or a checkpoint of a run."""

    config: Config
    folder: Path | None = None  # model or adapter; None: config.model.name as it is
    run: RunDir | None = None
    step: int | None = None  # of the run's checkpoint to use


def target_of(name: str | None, overrides: Sequence[str], *, step: int | None = None) -> Target:
    """What a target's name stands for. Raises UserError where nothing usable is there."""
    path = Path(name).expanduser() if name else None
    if path and path.name == "model" and (path.parent / "config.yaml").exists():
        path = path.parent  # a run's model is prompted and evaluated as its run was
    if path is None or path.is_file():
        return Target(settings.load(path, overrides))
    if (path / "config.yaml").exists():
        run = RunDir(path)
        config = settings.load(run.config_file, overrides)
        if step is None and run.model.exists():
            return Target(config, run.model, run)
        found: list[str] = []
        step = Checkpoints(run.checkpoints, report=found.append).newest_good() if step is None else step
        if step is None:
            raise UserError([f"{path} holds neither model/ nor a whole checkpoint; train first.", *found])
        for sentence in found:  # an older checkpoint stands in for a damaged one: never without a word
            print(sentence, file=sys.stderr)
        return Target(config, None, run, step)
    if step is not None:
        raise UserError(f"--step {step}: {name} is no run folder.")
    folder = path if path.is_dir() else None
    adapter = folder is not None and (folder / "adapter_config.json").exists()
    base = adapter_base(folder) if adapter and folder else str(name)
    known: dict[Any, str] = {torch.float32: "fp32", torch.float64: "fp64"}
    precision = known.get(load_config(base).dtype, "bf16-pure")
    defaults = {"model": {"name": base}, "train": {"precision": precision}}
    return Target(settings.load(None, overrides, defaults), folder if adapter else None)


def open_model(
    target: Target, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Encoder]:
    """The target's model in evaluation mode on `device` (None: what its config says), tokenizer, encoder."""
    quiet()
    config, device = target.config, device or build.device_of(target.config)
    compute, _ = build.PRECISIONS[config.train.precision]
    unpacked = config.data.model_copy(update={"packing": False})  # generating packs nothing
    # However it was trained: one device runs it here.
    attention = build.attention_of(config.model_copy(update={"data": unpacked}), Layout())
    if target.step is not None and target.run is not None:
        tokenizer, encoder = build.tokenizer_of(config)
        model, _ = build.model_of(config, tokenizer, attention, device)
        weights = {f"model.{name}": p.data for name, p in model.named_parameters() if p.requires_grad}
        Checkpoints(target.run.checkpoints).load(target.step, weights)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute)
        return model.eval(), tokenizer, encoder
    trust = config.model.trust_remote_code
    adapter = target.folder is not None and (target.folder / "adapter_config.json").exists()
    whole = str(target.folder) if target.folder and not adapter else config.model.name
    model = load(
        whole,
        init="pretrained" if target.folder and not adapter else config.model.init,
        dtype=compute,
        device=device,
        attention=attention,
        trust_remote_code=trust,
        revision=None if target.folder and not adapter else config.model.revision,
        seed=config.train.seed,
    )
    tokenizer = load_tokenizer(str(target.folder or config.model.name), trust_remote_code=trust)
    encoder = Encoder(
        tokenizer,
        train_on=config.data.train_on,
        chat_template=config.data.chat_template,
        separator=config.data.separator,
        on_bad_row=config.data.on_bad_row,
    )
    if adapter and target.folder:
        load_adapter(model, target.folder)
    else:
        resize_embeddings(model, tokenizer)
    return model.eval(), tokenizer, encoder


def describe_data(config: Config, *, samples: int) -> dict[str, Any]:
    """What `meshtune data` shows; see data/inspect.py."""
    _, encoder = build.tokenizer_of(config)
    return inspect.describe(build.data_of(config, encoder), encoder.tokenizer, samples=samples)


def evaluate_target(name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Held-out loss and perplexity, and exact match where eval.exact_match asks for it."""
    target = target_of(name, overrides)
    config = target.config
    if not config.data.eval and not config.data.eval_split:
        raise UserError(
            "There is nothing to evaluate on; add data.eval=FILE (or data.eval_split) to the command."
        )
    model, tokenizer, encoder = open_model(target)
    if model.config._attn_implementation not in NAMES:
        config = config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})
    if config.data.eval:  # held-out data of its own: what was trained on may be gone
        update = {"train": config.data.eval, "eval": (), "eval_split": 0, "streaming": False}
        data = config.data.model_copy(update=update)
        held_out = build.data_of(config.model_copy(update={"data": data}), encoder).train
        assert isinstance(held_out, Dataset), "only streaming gives a stream"
    else:
        held_out = build.data_of(config, encoder).eval
    answer = partial(
        answers, model, tokenizer, max_new_tokens=config.eval.max_new_tokens, stop_ids=encoder.stop_ids
    )
    evaluation = Evaluation(
        passes=OneDevice(model, anatomy(model), model.device),
        model=model,
        world=join(Layout(), model.device),
        answer=answer,
        tokenizer=tokenizer,
        dataset=held_out,
        micro_batch_size=4,
        exact_match=config.eval.exact_match,
        stop_ids=encoder.stop_ids,
    )
    rows = Rows()
    evaluation.run(target.step or 0, Metrics([rows]))
    return {key: value for key, value in rows.last.items() if key not in ("kind", "step")}


class Rows:
    """A tracker that keeps the last row."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def log(self, row: dict[str, Any]) -> None:
        self.last = row

    def close(self, *, failed: bool = False) -> None:
        """Nothing to let go of."""


def generate_target(
    name: str | None,
    overrides: Sequence[str],
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """One answer per prompt, each wrapped as its run's training prompts were."""
    if not prompts:
        raise UserError("No prompt is given; use --prompt, or write prompts to stdin, one a line.")
    model, tokenizer, encoder = open_model(target_of(name, overrides))
    if not encoder.templated and encoder.train_on == "all":  # trained to go on with a text, not to answer
        encoder.separator = ""
    origin = Origin("prompt", 1)
    asked = [
        Example(
            origin,
            messages=({"role": "user", "content": prompt},),
            tools=None,
            prompt=None,
            completion=None,
            text=None,
        )
        if encoder.templated
        else Example(origin, messages=None, tools=None, prompt=prompt, completion="", text=None)
        for prompt in prompts
    ]
    return answers(
        model,
        tokenizer,
        [encoder.prompt_ids(example) for example in asked],
        max_new_tokens=max_new_tokens,
        stop_ids=encoder.stop_ids,
        temperature=temperature,
    )


def export_run(name: Path, to: Path, *, merge: bool, step: int | None, push_to: str | None) -> Path:
    """Write a Hugging Face folder from a run or an adapter folder; returns it. Raises UserError when `to` is
    taken.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not empty; name a new folder.")
    target = target_of(str(name), (), step=step)
    config = target.config
    adapter = target.folder is not None and (target.folder / "adapter_config.json").exists()
    adapted = adapter or (target.step is not None and config.method == "lora")
    if merge and not adapted:
        raise UserError(f"--merge: {name} holds no LoRA adapter; leave it out.")
    if target.folder and not merge:  # as it is
        shutil.copytree(target.folder, to, dirs_exist_ok=True)
    else:
        # in host memory: what several GPUs trained may fit on none of them
        model, tokenizer, encoder = open_model(target, torch.device("cpu"))
        if merge:
            merge_lora(model)
        ended = target.run.rows("end") if target.run else []
        exporter = build.exporter_of(config, model, tokenizer, encoder)
        steps = target.step or (ended[-1].get("model_step", 0) if ended else 0)
        replace(exporter, adapter=None if merge else exporter.adapter).write(to, steps=steps)
    if push_to:
        push(to, push_to, private=config.hub.private)
    return to


def describe_environment(model: str | None) -> dict[str, Any]:
    """Versions and devices, and what a model's family supports."""
    devices: dict[str, Any] = {
        "cpu": f"{os.cpu_count()} cores, {human(psutil.virtual_memory().total)}",
        "threads": torch.get_num_threads(),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, {human(properties.total_memory)}"
    found: dict[str, Any] = {
        "versions": build.versions() | {"executable": sys.executable},
        "devices": devices,
    }
    if model:
        config = load_config(model)
        found["type"] = config.model_type
        found["features"] = [
            {"feature": feature, "supported": supported, "why": why}
            for feature, supported, why in capabilities(config)
        ]
    return found
