"""Models that also see or hear: their language part is trained, the other parts are set aside.

    whole model ── set_aside ─┬─> the language part   all that training, sharding and planning see
                              └─> parts set aside     towers and projectors: frozen, no memory on a device
                   put_back       the whole model, to export it

The names of the parameters stay those of the whole model. Parts set aside get the values of the model's files
(`fill_aside`) as mappings of these files, in the dtype that they are stored in, as buffers: nothing casts,
trains or shards them, and an export writes them as they were.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from meshtune.model.anatomy import language_model

ASIDE = "set_aside"  # attribute of a model: path -> module or parameter that was set aside


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' Auto class that builds the whole model of `config`, with all its parts."""
    multimodal = has_text_part(config) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM


def has_text_part(config: PretrainedConfig) -> bool:
    """True if the configuration of the language model is a part of `config`."""
    try:
        return config.get_text_config() is not config
    except ValueError:  # it has several, as an encoder-decoder
        return False


class Absent(nn.Module):
    """Stand in for a part that was set aside; it can't run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @property
    def device(self) -> torch.device:
        """Return a device, for which Qwen2-Audio asks at every forward, though no input goes there."""
        return torch.device("cpu")

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{self.path} was set aside: only the language part of this model runs")


def set_aside(model: PreTrainedModel) -> PreTrainedModel:
    """Take all parts but the language model and its head out of `model`, in place; returns it.

    Nothing happens to a model that is a language model itself, and to one whose language part is not found,
    which `anatomy` refuses.
    """
    place = language_model(model) if has_text_part(model.config) else None
    if place is None:
        return model
    aside: dict[str, nn.Module | Tensor] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in list(module.named_children()):
            path = prefix + name
            if any(part.startswith(f"{path}.") for part in place):
                visit(child, f"{path}.")
            elif path not in place:
                aside[path] = _without_parameters(child)
                module._modules[name] = Absent(path)
        for name, parameter in list(module.named_parameters(recurse=False)):
            aside[prefix + name] = parameter.detach()
            del module._parameters[name]

    visit(model, "")
    vars(model)[ASIDE] = aside
    return model


def _without_parameters(part: nn.Module) -> nn.Module:
    """Turn the parameters of `part` into buffers, in place."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
    return part


def aside_of(model: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Return the modules and tensors that were set aside, by their path in the whole model."""
    return vars(model).get(ASIDE, {})


def aside_names(model: nn.Module) -> list[str]:
    """Return the names of the tensors that were set aside, as the whole model's state_dict has them."""
    return [name for name, _, _ in _owners(model)]


def _owners(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, dictionary that has it, key there) of each tensor that was set aside."""
    aside: dict[str, Any] = aside_of(model)
    for path, part in aside.items():
        if isinstance(part, Tensor):
            yield path, aside, path
            continue
        for prefix, module in part.named_modules(prefix=path):
            for name in [*module._buffers]:
                yield f"{prefix}.{name}", module._buffers, name


def fill_aside(model: nn.Module, values: Mapping[str, Tensor], *, keep: bool) -> None:
    """Give the tensors that were set aside those of `values`, by name, without a copy; others stay.

    keep: False to take the dtype alone, on a rank that does not export them.
    """
    for name, owner, key in _owners(model):
        if name in values:
            owner[key] = values[name].detach().to(None if keep else "meta")


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Make `model` whole inside the context."""
    aside, absent = aside_of(model), {}
    for path, part in aside.items():
        prefix, _, name = path.rpartition(".")
        parent = model.get_submodule(prefix)
        if isinstance(part, nn.Module):
            absent[path] = parent._modules[name]
            parent._modules[name] = part
        else:
            parent.register_buffer(name, part)
    try:
        yield
    finally:
        for path in aside:
            prefix, _, name = path.rpartition(".")
            parent = model.get_submodule(prefix)
            if path in absent:
                parent._modules[name] = absent[path]
            else:
                del parent._buffers[name]


def parts_kept(model: nn.Module) -> str | None:
    """Return a sentence on what is trained of a model that also sees or hears; None for any other."""
    names = [path.rpartition(".")[2] for path, part in aside_of(model).items() if _has_tensors(part)]
    if not names:
        return None
    return (
        f"The language part of {type(model).__name__} is trained, on text; {', '.join(names)} "
        f"{'is' if len(names) == 1 else 'are'} kept as in the model's files."
    )


def _has_tensors(part: nn.Module | Tensor) -> bool:
    return isinstance(part, Tensor) or bool(part.state_dict())
