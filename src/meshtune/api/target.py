"""A target, the model that something works on: a run folder, a model or adapter folder, a hub id, a config.

runs/x        its config.yaml, with the weights of model/ (or of a checkpoint)
an adapter    the base model that it names, with the adapter on it
a model       as it is
config.yaml   the model it names, before training
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshtune import config as settings
from meshtune.api import output, resolve
from meshtune.api.choose import attention_of
from meshtune.attention.register import register
from meshtune.config import Config
from meshtune.data.encode import Encoder
from meshtune.data.template import apply_template
from meshtune.data.tokens import id_bound
from meshtune.errors import UserError, expanded
from meshtune.filesystem import paths_named
from meshtune.layout import Layout
from meshtune.model.adapter import adapter_base, adapter_settings, digest_of_base, load_adapter, method_of
from meshtune.model.anatomy import anatomy, is_scored
from meshtune.model.files import ADAPTER_CONFIG
from meshtune.model.load import load_config, load_tokenizer, quiet
from meshtune.model.save import FILES
from meshtune.parallel.apply import Parallel, cut, place
from meshtune.parallel.mesh import join
from meshtune.precision import PRECISIONS, UNMIXED
from meshtune.routers.balance import load_biases
from meshtune.rundir import RunDir
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.loss import head_loss
from meshtune.train.model import single_model
from meshtune.train.run_row import device_of
from meshtune.units import notice
from meshtune.yaml_tree import leaves, overridden

# Settings of data that prompts are wrapped by, and those that a file of prompts is read by.
PROMPTING = {
    "chat_template", "chat_template_kwargs", "template_date", "control_tokens", "separator", "train_on"
}  # fmt: skip
PROMPT_FILES = {"columns", "roles", "max_samples"}


@dataclass(frozen=True)
class Target:
    """Settings, and where the weights are: in `folder`, in checkpoint `step` of `run`, or in neither.

    At most one of `folder` and `step` is set; without them config.model.name is taken as it is.
    """

    config: Config
    folder: Path | None = None  # of a whole model or an adapter
    run: RunDir | None = None  # None: the target isn't a run folder
    step: int | None = None  # of the run's checkpoint to use
    base_named: bool = False  # True if the user named the base, in the place of the recorded one

    @property
    def adapted(self) -> bool:
        """Whether `folder` holds an adapter."""
        return self.folder is not None and is_adapter(self.folder)

    @property
    def loaded_config(self) -> Config:
        """The settings, with a whole model's folder as model.name: what it was trained from may be gone."""
        if self.folder is None or self.adapted:
            return self.config
        of_folder = {"name": str(self.folder), "init": "pretrained", "revision": None, "overrides": {}}
        model = self.config.model.model_copy(update=of_folder)
        return self.config.model_copy(update={"model": model})


def target_of(name: str | None, overrides: Sequence[str], *, step: int | None = None) -> Target:
    """Find the settings and weights that `name` names; no weights are loaded.

    name: a run, model or adapter folder, a config file, a hub id; RUN/model means the run; None: only
    `overrides` name the model. overrides: section.key=value, which change the run's or file's settings. step:
    of the run's checkpoint to use; None: model/, or without it the newest whole checkpoint (damaged ones that
    are newer are printed on stderr). Raises UserError if a run has neither, if `step` is given and `name` is
    not a run folder, and for overrides of what weights that are there decide.
    """
    path = expanded(name) if name else None
    if path and path.name == "model" and (path.parent / "config.yaml").exists():
        path = path.parent  # a run's model is prompted and evaluated as its run was
    if step is not None and not (path and (path / "config.yaml").exists()):
        raise UserError(f"--step {step}: {name or 'the model'} is not a run folder.")
    if path is None or path.is_file():
        return Target(settings.load(path, overrides))
    if (path / "config.yaml").exists():
        run = RunDir(path)
        whole = step is None and run.model.exists() and not is_adapter(run.model)
        # A base is read for an adapter and a checkpoint; model.name is where it is now.
        of_base = ("model.name", "model.revision") if whole else ()
        refuse_decided(path, overrides, ("model.init", "model.overrides", *of_base))
        named = "name" in given_model(overrides)
        config = output.at_its_place(settings.load(run.config_file, overrides), run)
        if not whole:
            refuse_moved(str(path), config.model.name)
        if step is None and run.model.exists():
            return Target(config, run.model, run, base_named=named)
        damaged: list[str] = []
        step = Checkpoints(run.checkpoints, report=damaged.append).newest_good() if step is None else step
        if step is None:
            raise UserError([f"{path} holds neither model/ nor a whole checkpoint; train first.", *damaged])
        for sentence in damaged:  # an older checkpoint stands in for a damaged one: print why
            notice(sentence)
        return Target(config, None, run, step, base_named=named)
    folder = path if path.is_dir() else None
    adapter = folder is not None and is_adapter(folder)
    refuse_decided(folder or str(name), overrides, ("model.init",) if adapter else ("model.name",))
    given = given_model(overrides)
    recorded = adapter_base(folder) if adapter and folder else {"name": str(name)}
    if "name" in given:
        recorded.pop("revision", None)  # of the base that it names
    base = {**recorded, **given}
    if adapter:
        refuse_moved(str(name), base["name"])
    precision = stored_precision(base["name"], base.get("revision"))
    defaults: dict[str, Any] = {"model": recorded, "train": {"precision": precision}}
    if adapter and folder:
        defaults |= method_of(folder)
        scores = adapter_settings(folder).get("task_type") == "SEQ_CLS"
    else:
        scores = is_scored(load_config(base["name"], revision=base.get("revision")))
    if scores:
        defaults["objective"] = "reward"
    config = settings.load(None, overrides, defaults)
    return Target(config, folder if adapter else None, base_named="name" in given)


def given_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The section.key=value words as nested values."""
    given: dict[str, Any] = {}
    for override in overrides:
        given = overridden(given, override)
    return given


def given_model(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of section `model` among section.key=value words."""
    model = given_settings(overrides).get("model")
    return model if isinstance(model, dict) else {}


def refuse_moved(name: str, base: str, setting: str = "model.name") -> None:
    """Raise UserError if the base that a run or an adapter records is a path where nothing is any more.

    setting: that can name it.
    """
    path = expanded(base)
    if not path.exists() and (path.is_absolute() or base.startswith(".") or base.count("/") > 1):
        here = "" if path.is_absolute() else f" (from {Path.cwd()})"
        raise UserError(
            f"{name} was trained on {base}, where nothing is now{here}. Name the folder that the base is in: "
            f"{setting}=FOLDER."
        )


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists()


def refuse_decided(name: str | Path, overrides: Sequence[str], more: Sequence[str]) -> None:
    """Raise UserError for the overrides that have no effect on weights that are there.

    name: of a run, model or adapter folder, or a hub id. more: settings that these weights decide, besides
    those that all do.
    """
    decided = ("method", "lora", "model.freeze", *more)
    keys = [".".join(map(str, leaf.path)) for leaf in leaves(given_settings(overrides), ())]
    if problems := [
        f"{key} has no effect on {name}: its weights are there already; leave it out."
        for key in keys
        if f"{key}.".startswith(tuple(f"{setting}." for setting in decided))
    ]:
        raise UserError(problems)


def refuse_unused(overrides: Sequence[str], *, of_file: bool) -> None:
    """Raise UserError for the settings of data among `overrides` that answers to prompts don't depend on.

    of_file: the prompts are rows of a file.
    """
    used = PROMPTING | (PROMPT_FILES if of_file else set())
    place = "prompts of a file" if of_file else "prompts outside a file"
    unused = given_settings(overrides).get("data", {}).keys() - used
    if unused:
        raise UserError([f"data.{name} has no effect on {place}; leave it out." for name in sorted(unused)])


def stored_precision(name: str, revision: str | None = None) -> str:
    """The precision whose weights are held in the dtype of the model's config.json; bf16-pure without one.

    For a dtype that nothing is computed in (float16) it is bf16-pure too, with a line on stderr.
    """
    dtype = load_config(name, revision=revision).dtype or torch.bfloat16
    stored = str(dtype).removeprefix("torch.")
    if stored not in UNMIXED:
        notice(f"{name} is stored in {stored}; it is computed in bfloat16.")
        stored = "bfloat16"
    return UNMIXED[stored]


class Opened(NamedTuple):
    """A target's model on one device, in evaluation mode, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder  # turns prompts into token ids, as in training

    @property
    def parallel(self) -> Parallel:
        """The model under the layout of one rank; built anew at every access."""
        blocks = range(len(self.model.get_submodule(anatomy(self.model).blocks)))  # type: ignore[arg-type]
        world = join(Layout(), self.model.device)
        made = cut(
            lambda: self.model, world, {0: blocks}, finish=head_loss,
            compute_dtype=self.model.dtype, reduce_dtype=None,
        )  # fmt: skip
        return place(made, world)


def recorded_base(target: Target) -> str | None:
    """Digest of the base that the target's adapter, or its checkpoint, was trained on; None if it needs none,
    or if it was not recorded.
    """
    if target.folder and target.adapted:
        return digest_of_base(target.folder)
    return output.frozen_base(target.config, target.run) if target.run and target.step is not None else None


def tokenizer_name(target: Target) -> str:
    """Folder or hub id of the target's tokenizer: its base's for an adapter without one, as peft saves it."""
    without = target.folder and target.adapted and not any((target.folder / name).is_file() for name in FILES)
    return target.config.model.name if without or not target.folder else str(target.folder)


def subject_of(target: Target) -> str:
    """Name of the target's folder, for a sentence."""
    return str(target.run.path if target.run else target.folder)


def open_model(
    target: Target, device: str | None = None, *, merging: bool = False, precision: str | None = None
) -> Opened:
    """Load the target's model on one device, in the compute dtype, whatever layout it was trained with.

    A LoRA adapter stays unmerged. merging: an adapter that is not a run's checkpoint stays in fp32.
    precision: None for that of the config, in which weights in 4 bits were read whatever it is. device:
    "auto", "cuda" or "cpu"; None: train.device of the target's config. Raises UserError if the device is
    missing or the checkpoint is damaged or does not fit the model.
    """
    with paths_named(target.config):
        return _opened(target, device, merging, precision)


def _opened(target: Target, device: str | None, merging: bool, precision: str | None) -> Opened:
    """As `open_model`. Raises OSError for a path that can't be used."""
    register()
    quiet()
    config, place = target.loaded_config, device_of(device or target.config.train.device)
    output.check_base(config, recorded_base(target), subject_of(target), named=target.base_named)
    for sentence in resolve.override_sentences(config.model):
        notice(sentence)
    unpacked = config.data.model_copy(update={"packing": False})  # generating packs nothing
    attention, _ = attention_of(config.model_copy(update={"data": unpacked}), Layout(), 1)
    spec = resolve.model_spec(config, attention, place.type)
    spec = replace(spec, precision=precision or spec.precision)
    if spec.quantise and target.run:  # from the dtype that the run quantised from
        spec = replace(spec, quantise=settings.load(target.run.config_file).quantise)
    if PRECISIONS[spec.precision].fp8:
        notice(
            f"train.precision={spec.precision} is of training: here the weights are multiplied in bfloat16."
        )
    if target.step is not None and target.run is not None:
        tokenizer = resolve.tokenizer_of(config.model, config.data)
        apply_template(tokenizer, config.data.chat_template)
        model = single_model(replace(spec, embeddings=id_bound(tokenizer)), place)
        weights = {f"model.{name}": p.data for name, p in model.named_parameters() if p.requires_grad}
        values = Checkpoints(target.run.checkpoints).load(target.step, weights)
        load_biases(model, values.get("expert_bias") or [])
    else:
        tokenizer = load_tokenizer(tokenizer_name(target), **config.model.access)
        apply_template(tokenizer, config.data.chat_template)  # its tokens need rows of the embedding
        precision = UNMIXED[PRECISIONS[spec.precision].compute]
        spec = replace(spec, precision=precision, lora=None, freeze=())
        if target.folder and target.adapted:  # it brings the rows that were added with it
            model = single_model(spec, place, modules_to_save=config.modules_to_save)
            load_adapter(model, target.folder)
        else:
            spec = replace(spec, quantise="")  # weights without adapters
            model = single_model(replace(spec, embeddings=id_bound(tokenizer)), place)
    if target.step is not None or (target.run and target.adapted and not merging):  # as the run cast them
        for parameter in filter(Tensor.is_floating_point, model.parameters()):
            parameter.data = parameter.data.to(spec.compute_dtype)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    stops = [eos] if isinstance(eos, int) else eos or []
    return Opened(model.eval(), tokenizer, resolve.encoder_of(tokenizer, config, stops))
