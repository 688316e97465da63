"""The numbers of a model that planning needs, from its config.json; cached on disk.

name ──> config.json ──> key ─┬─ in the cache, or in counts.xz ─> ModelNumbers, without torch
                              └─ transformers builds it on meta ─> census, traits ──> ModelNumbers
"""

import hashlib
import inspect
import json
import lzma
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from meshtune import __version__
from meshtune.config import Config
from meshtune.errors import UserError, expanded
from meshtune.model.hub import ask_once, hub_errors, local_path
from meshtune.objectives import OBJECTIVES
from meshtune.placement.census import Census
from meshtune.placement.experts import RouterTraits
from meshtune.placement.numbers import ModelNumbers
from meshtune.placement.rules import Traits
from meshtune.rundir import write_text_atomically

COUNTS = "counts.xz"  # a line for each model: the hash of its inputs, then its numbers as JSON


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """The settings of LoRA that decide its parameters and what its forward saves."""

    r: int = 16  # rank
    dropout: float = 0.0
    use_dora: bool = False
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"  # or endings of layers' names
    layers_to_transform: tuple[int, ...] | None = None  # blocks with adapters; None: all
    modules_to_save: tuple[str, ...] = ()  # names or endings of modules that are trained whole


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Changes that a config makes to a model before it is counted."""

    overrides: Mapping[str, Any] = field(default_factory=dict)  # other values in its configuration
    freeze: tuple[str, ...] = ()  # globs of parameter names
    lora: LoraShape | None = None  # None: no adapters
    embeddings: int = 0  # rows that the embedding must have
    freeze_router: bool | None = None  # of a mixture of experts; None: next to adapters


def numbers_of(
    config: Config, *, file: Path | None = None, log: Callable[[str], None] = lambda _: None
) -> ModelNumbers:
    """Return the numbers of the model that `config` trains, its adapters and frozen parameters included.

    The data set and the weights need not exist; the tokenizer is read where tokens of the chat template make
    the embedding grow, which adapters then train whole. The numbers are cached in the folder `data.cache`.
    file, log, errors: see `model_numbers`.
    """
    model, template = config.model, config.data.chat_template
    if OBJECTIVES[config.objective].scores:
        from meshtune.model.load import check_scored

        named = file or config_file(model.name, model.revision)
        check_scored(named, model.name, model.trust_remote_code, model.overrides)
    grows = config.adapts and template not in (None, "none", "training")
    rows = _rows_needed(config) if grows else 0
    variant = Variant(
        overrides=model.overrides,
        freeze=model.freeze,
        lora=lora_shape(config) if config.adapts else None,
        embeddings=rows or 0,
        freeze_router=config.experts.freeze_router,
    )
    cache_dir = expanded(config.data.cache, "data.cache")
    numbers = model_numbers(model.name, variant, **model.access, cache_dir=cache_dir, file=file, log=log)
    if config.adapts:
        numbers = replace(numbers, traits=numbers.traits.with_adapters(config.lora.dropout))
    census = numbers.census
    tables = [each for each in census.parameters_outside if each.shape[0] == census.vocabulary]
    if rows is not None or all(table.trainable for table in tables):  # these are counted already
        return numbers
    note = (
        f"data.chat_template={template}: the tokenizer can't be read here. If it lacks tokens of the "
        "template, training also updates the whole embedding and head, which this plan leaves out."
    )
    return replace(numbers, changes=(*numbers.changes, note))


def lora_shape(config: Config) -> LoraShape:
    """The adapters of the config's `lora` section; the counted model has a head in place of a score."""
    shape = LoraShape(**{field.name: getattr(config.lora, field.name) for field in fields(LoraShape)})
    return replace(shape, modules_to_save=tuple(n for n in shape.modules_to_save if n != "score"))


def _rows_needed(config: Config) -> int | None:
    """Return the rows that the embedding must have for the tokens of the tokenizer and of the chat template;
    None if the tokenizer can't be read.
    """
    from meshtune.data.template import apply_template
    from meshtune.data.tokens import id_bound
    from meshtune.model.load import load_tokenizer

    model = config.model
    try:
        tokenizer = load_tokenizer(model.name, **model.access)
        apply_template(tokenizer, config.data.chat_template)
    except UserError:  # such as a configuration without a tokenizer; a run says what is wrong
        return None
    return id_bound(tokenizer)


def model_numbers(
    name: str,
    variant: Variant = Variant(),
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path,
    file: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> ModelNumbers:
    """Return the numbers of a causal language model, from `cache_dir` or by building it on meta.

    name: a hub id, a folder, or a configuration file. file: its configuration; None: that of `config_file`.
    log: called with a line before work that takes seconds.
    The file in `cache_dir` is named by a hash of all that the numbers depend on; one that can't be read is
    replaced, and a failure to write it is ignored. A model with remote code is not cached. A hub model's
    config.json is downloaded if it is missing.

    Raises UserError for what isn't a model, or none that meshtune trains, and as `add_lora` and `freeze`.
    """
    file = file or config_file(name, revision)
    remote = trust_remote_code and file.is_file() and b'"auto_map"' in file.read_bytes()  # has its own code
    inputs = None if remote else inputs_of(file, variant)
    cached = cache_dir / f"census-{_key(inputs)}.json"
    if inputs and (numbers := _read(cached)):
        return numbers
    if not (numbers := shipped(inputs)):
        log(f"Building {name} without weights to count its parameters and FLOPs; the counts are cached.")
        if remote and not local_path(name):
            file = _config_with_code(name, revision)
        numbers = build_and_count(name, file, variant, trust_remote_code=trust_remote_code)
    if inputs:
        with suppress(OSError):  # a full or read-only disk costs time, not the answer
            write_text_atomically(cached, json.dumps(asdict(numbers), separators=(",", ":")))
    return numbers


def config_file(name: str, revision: str | None = None) -> Path:
    """Return the model's configuration file, downloaded if the hub's cache lacks it: the hub is asked once.

    That of a local folder may be missing. Raises UserError as `local_path` and `hub_errors`.
    """
    if path := local_path(name):
        return path / "config.json" if path.is_dir() else path
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with hub_errors(name, revision):
        stored = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(stored, str):
            return Path(stored)
        ask_once(name, revision)
        return Path(hf_hub_download(name, "config.json", revision=revision))


def _config_with_code(name: str, revision: str | None) -> Path:
    """Download a hub model's small files and code; return its config.json, which lies next to the code."""
    from meshtune.model.files import resolve

    return resolve(name, revision=revision, weights=False, trust_remote_code=True) / "config.json"


def inputs_of(file: Path, variant: Variant) -> str | None:
    """Return what a user gives that decides the numbers, as JSON.

    None if `file`, the configuration, can't be read as JSON; `build_and_count` then raises the error.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return inputs_of_fields(content, variant)


def inputs_of_fields(content: Any, variant: Variant) -> str:
    """Return `inputs_of` for the content of a configuration file."""
    fields = asdict(variant)
    if variant.freeze_router is None:  # counts.xz has hashes without it
        del fields["freeze_router"]
    return json.dumps([content, fields], sort_keys=True)


def _key(inputs: str | None) -> str:
    """Hash `inputs`, versions and the code of model/ and experts/, which decide the numbers together."""
    # A checkout on PYTHONPATH has no metadata of its own.
    versions = [__version__, *map(version, ("transformers", "torch"))]
    digest = hashlib.sha256(json.dumps([inputs, versions]).encode())
    package = Path(__file__).parents[1]
    sources = {Path(inspect.getfile(kind)) for kind in (Census, Traits, RouterTraits)}
    sources |= {*package.glob("model/*.py"), *package.glob("experts/*.py")}
    for source in sorted(sources):  # else an edit between two versions of meshtune would go unnoticed
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def shipped(inputs: str | None) -> ModelNumbers | None:
    """Return the numbers that counts.xz has for these inputs: of models.toml's models, whole and with LoRA.

    They are those of any version, which tests hold: scripts/model_counts.py writes the file.
    """
    found = inputs and _shipped_lines().get(hashlib.sha256(inputs.encode()).hexdigest().encode())
    return TypeAdapter(ModelNumbers).validate_json(found, strict=True) if found else None


@cache
def _shipped_lines() -> dict[bytes, bytes]:
    """The numbers in counts.xz, as JSON, by the hash of their inputs."""
    lines = lzma.decompress(files("meshtune.model").joinpath(COUNTS).read_bytes()).splitlines()
    return {line[:64]: line[64:] for line in lines}


def build_and_count(
    name: str, file: Path, variant: Variant, *, trust_remote_code: bool = False
) -> ModelNumbers:
    """Build the model on meta from its configuration, with adapters and frozen parameters, and count it.

    file: its configuration, config.json. name: as the user wrote it, for errors. Writes nothing. Raises
    UserError as `model_numbers`.
    """
    from meshtune.experts.routers import freeze_routers, router_paths
    from meshtune.model import load
    from meshtune.model.anatomy import anatomy, attention_drops, parts_kept
    from meshtune.model.capabilities import auto_attention, traits
    from meshtune.model.files import context_of
    from meshtune.model.load import on_meta, read_changed
    from meshtune.model.lora import add_lora
    from meshtune.model.trace import census_of

    config, changes = read_changed(file, name, trust_remote_code, variant.overrides)
    model = on_meta(config, name=name, trust_remote_code=trust_remote_code)
    added = load.grow_embeddings(model, variant.embeddings)
    model_traits = traits(model)  # of the model without adapters
    text_part, dropout = parts_kept(model), attention_drops(model)
    attention, blocks = auto_attention(model, model_traits), anatomy(model).blocks
    if lora := variant.lora:
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        add_lora(
            model,
            lora_rank=lora.r,
            alpha=1,
            dropout=lora.dropout,
            target_modules=targets,
            use_dora=lora.use_dora,
            layers_to_transform=lora.layers_to_transform,
            modules_to_save=lora.modules_to_save,
            apart=router_paths(model, blocks) if variant.freeze_router is not False else (),
        )
        if added:
            load.train_tables(model)
    if variant.freeze:
        load.freeze(model, variant.freeze)
    freeze_routers(model, blocks, variant.freeze_router, adapts=variant.lora is not None)
    return ModelNumbers(
        census_of(model), model_traits, attention, text_part, context_of(config), dropout, changes
    )


def stored(inputs: str | None, cache_dir: Path) -> ModelNumbers | None:
    """Return the numbers that the cache or counts.xz has for these inputs, without torch."""
    return _read(cache_dir / f"census-{_key(inputs)}.json") or shipped(inputs)


def _read(file: Path) -> ModelNumbers | None:
    """Read a cached file; None if it is missing or holds anything else."""
    try:
        return TypeAdapter(ModelNumbers).validate_json(file.read_bytes(), strict=True)
    except (OSError, ValueError):
        return None
