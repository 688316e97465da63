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
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshtune import config as settings
from meshtune.attention.register import register
from meshtune.config import Config
from meshtune.data import inspect
from meshtune.data.example import Example, Origin
from meshtune.data.pack import Dataset
from meshtune.data.template import Encoder
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.adapter import adapter_base, load_adapter
from meshtune.model.anatomy import anatomy, capabilities
from meshtune.model.body import ATTENTION_NAMES
from meshtune.model.load import load, load_config, load_tokenizer, quiet
from meshtune.model.lora import merge_lora
from meshtune.model.pieces import whole_pieces
from meshtune.model.trainable import embeddings_needed, resize_embeddings
from meshtune.parallel.apply import Parallel, apply
from meshtune.parallel.mesh import join
from meshtune.rundir import RunDir
from meshtune.train import build, choose, inputs
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.evaluate import Evaluation
from meshtune.train.export import push
from meshtune.train.generate import answers
from meshtune.train.loss import head_loss
from meshtune.train.metrics import Metrics
from meshtune.train.model import single_model
from meshtune.units import human


@dataclass(frozen=True)
class Target:
    """Settings, and where the weights are: a whole model or an adapter's folder, or a checkpoint of a run."""

    config: Config
    folder: Path | None = None  # model or adapter; None: config.model.name as it is
    run: RunDir | None = None
    step: int | None = None  # of the run's checkpoint to use

    @property
    def adapted(self) -> bool:
        """Whether `folder` holds an adapter."""
        return self.folder is not None and (self.folder / "adapter_config.json").exists()


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


class Opened(NamedTuple):
    """A target's model on one device, in evaluation mode, with what reads and prompts it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder

    @property
    def parallel(self) -> Parallel:
        """The model as the layout of one rank."""
        blocks = range(len(self.model.get_submodule(anatomy(self.model).blocks)))  # type: ignore[arg-type]
        return apply(
            lambda: self.model, join(Layout(), self.model.device), {0: blocks}, finish=head_loss,
            compute_dtype=self.model.dtype, reduce_dtype=None,
        )  # fmt: skip


def open_model(target: Target, device: torch.device | None = None) -> Opened:
    """Load the target's model on `device` (None: what its config says). However it was trained, one device
    runs it.
    """
    register()
    quiet()
    config, device = target.config, device or choose.device_of(target.config.train.device)
    unpacked = config.data.model_copy(update={"packing": False})  # generating packs nothing
    attention = choose.attention_of(config.model_copy(update={"data": unpacked}), Layout(), 1)
    spec = build.model_spec(config, attention)
    if target.step is not None and target.run is not None:
        tokenizer = inputs.tokenizer_of(config.model, config.data)
        encoder = inputs.encoder_of(tokenizer, config.data)
        model = single_model(replace(spec, embeddings=embeddings_needed(tokenizer)), device)
        weights = {f"model.{name}": p.data for name, p in model.named_parameters() if p.requires_grad}
        Checkpoints(target.run.checkpoints).load(target.step, weights)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(spec.compute_dtype)
        return Opened(model.eval(), tokenizer, encoder)
    adapter = target.folder if target.adapted else None
    folder = None if adapter else target.folder
    model = load(
        str(folder) if folder else config.model.name,
        init="pretrained" if folder else config.model.init,
        dtype=spec.compute_dtype,
        device=device,
        attention=attention,
        trust_remote_code=config.model.trust_remote_code,
        revision=None if folder else config.model.revision,
        seed=config.train.seed,
    )
    tokenizer = load_tokenizer(
        str(target.folder or config.model.name), trust_remote_code=config.model.trust_remote_code
    )
    encoder = inputs.encoder_of(tokenizer, config.data)
    if adapter:
        load_adapter(model, adapter)
    else:
        resize_embeddings(model, tokenizer)
    return Opened(model.eval(), tokenizer, encoder)


def describe_data(config: Config, *, samples: int) -> dict[str, Any]:
    """The description that `meshtune data` shows; see data/inspect.py."""
    encoder = inputs.encoder_of(inputs.tokenizer_of(config.model, config.data), config.data)
    prepared = inputs.data_of(config.data, encoder, seed=config.train.seed)
    return inspect.describe(prepared, encoder.tokenizer, samples=samples)


def evaluate_target(name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Held-out loss and perplexity, and exact match where eval.exact_match asks for it."""
    target = target_of(name, overrides)
    config = target.config
    if not config.data.eval and not config.data.eval_split:
        raise UserError(
            "There is nothing to evaluate on; add data.eval=FILE (or data.eval_split) to the command."
        )
    opened = open_model(target)
    data = config.data
    if opened.model.config._attn_implementation not in ATTENTION_NAMES:
        data = data.model_copy(update={"packing": False})
    if data.eval:  # held-out data of its own: what was trained on may be gone
        data = data.model_copy(update={"train": data.eval, "eval": (), "eval_split": 0, "streaming": False})
        held_out = inputs.data_of(data, opened.encoder, seed=config.train.seed).train
        assert isinstance(held_out, Dataset), "only streaming gives a stream"
    else:
        held_out = inputs.data_of(data, opened.encoder, seed=config.train.seed).eval
    evaluation = Evaluation(
        parallel=opened.parallel,
        tokenizer=opened.tokenizer,
        dataset=held_out,
        micro_batch_size=4,
        max_new_tokens=config.eval.max_new_tokens,
        exact_match=config.eval.exact_match,
        stop_ids=opened.encoder.stop_ids,
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
    opened = open_model(target_of(name, overrides))
    encoder = opened.encoder
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
        opened.parallel,
        opened.tokenizer,
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
    adapted = target.adapted or (target.step is not None and config.method == "lora")
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
        exporter = build.exporter_of(
            config, model, tokenizer, encoder, pieces=lambda: dict(whole_pieces(model)),
            world=join(Layout(), model.device), dtype=model.dtype,
        )  # fmt: skip
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
