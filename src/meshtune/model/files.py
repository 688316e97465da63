"""The files of a model: a hub id or a local folder -> a folder of safetensors, checked.

A hub id is first downloaded to the hub's cache (configuration, tokenizer, safetensors; never a pickle), so
that one code path, with one set of checks, reads both. A folder from elsewhere runs no code: weights are
safetensors only, index files stay inside their folder, and Python files are used only with
`trust_remote_code`.
"""

import copy
import fnmatch
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from meshtune.errors import UserError, check_fetched, reason_of, type_name
from meshtune.model.hub import hub_errors, local_path, reachable
from meshtune.units import counted, few

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of a folder with a peft adapter
SAFETENSORS_DTYPES = {  # the word of a safetensors header for each dtype
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
# Where tools write that weights are quantised: transformers, MLX, llm-compressor; ModelOpt, AutoGPTQ, AWQ.
QUANTISED_KEYS = ("quantization_config", "quantization", "compression_config")
QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Methods whose weights are read, by the word for them in a model's configuration
EIGHT_BITS = ("fp8", "fbgemm_fp8", "FP8", "float-quantized", "int-quantized", "naive-quantized")
FEW_BITS = ("bitsandbytes", "gptq", "awq", "pack-quantized")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")  # what transformers calls a file of several
ORIGINAL = "consolidated*"  # the same weights under the names of Meta's and Mistral's own code
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STATE_FILES = ("training_args*", "optimizer*", "scheduler*", "rng_state*", "random_states*")  # no weights
PARTS = ("*.incomplete", "*.part", "*.partial", "*.crdownload", "*.aria2", "*.tmp")  # of downloads
OTHERS = ("*.h5", "*.msgpack", "*.npz", "*.onnx", "*.distcp", "*.nemo")
# Configuration and tokenizer files of a hub repository.
SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def resolve(
    name: str, *, revision: str | None = None, weights: bool, trust_remote_code: bool = False
) -> Path:
    """The local folder of `name`: itself, unchecked, or the hub's snapshot of it, downloaded if need be.

    weights: True to download its safetensors too. trust_remote_code: True to download its Python files too.
    Raises UserError if `name` is neither, or a file, or if the hub has its weights in other formats only.
    """
    if folder := local_path(name):
        if folder.is_dir():
            check_fetched(path for path in folder.iterdir() if path.is_symlink())
            return folder
        raise UserError(f"{name} is a file; name the folder that holds config.json.")
    wanted = [*SMALL, *(["*.safetensors"] if weights else []), *(["*.py"] if trust_remote_code else [])]
    with hub_errors(name, revision):
        # Sub-folders and "consolidated" files hold the same weights again in other formats.
        ignored = ["*/*", ORIGINAL]
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=ignored,
                local_files_only=not reachable(),
            )
        )
    if weights and not list(folder.glob("*.safetensors")):
        _refuse_other_formats(name, revision)
    return folder


def weights_here(name: str, revision: str | None = None) -> list[Path]:
    """The safetensors files of a local folder, or of a hub model as far as its cache has it: never downloads.

    [] if some are missing or damaged.
    """
    try:
        folder = local_path(name) or snapshot_download(name, revision=revision, local_files_only=True)
        files = weight_files(Path(folder))
        list(tensors_in(files))  # their headers are whole
    except (UserError, SafetensorError, OSError, ValueError):  # of the hub: nothing is stored, no such name
        return []
    return files


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[Path, str, Any]]:
    """Yield (file, name, slice) of each tensor in safetensors files; the slice reads nothing until indexed.

    Raises UserError for a file system that can't map files into memory.
    """
    for file in files:
        try:
            opened = safe_open(file, framework="pt")
        except OSError as error:
            if "os error 19" not in str(error):  # ENODEV
                raise
            raise UserError(
                f"{file} can't be mapped into memory ({error}), as on some mounts of buckets; copy the model "
                "to a local disk."
            ) from error
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield file, name, tensors.get_slice(name)


def _refuse_other_formats(name: str, revision: str | None) -> None:
    """Raise UserError if a hub repository holds weights in formats that are not read (pickles, GGUF).

    Call it only where no safetensors were found, which it does not check. Does nothing if the repository's
    list of files can't be had: reading the folder then reports that there are no weights.
    """
    try:
        files = HfApi().list_repo_files(name, revision=revision)
    except Exception:  # no network, a server's error, no right: each has its own class, none of one family
        return
    top = [file for file in files if "/" not in file]
    if sentence := _unread_weights(f"The hub's {name}", top, name, name.rpartition("/")[2] + "-safetensors"):
        raise UserError(sentence)


def read_json(path: Path) -> dict[str, Any]:
    check_fetched([path])
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, but holds {type_name(value)}.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, index followed; without one, all the shards of one model.

    Raises UserError where there are none (naming what is there instead), one is missing, is a pointer of Git
    LFS, or lies elsewhere.
    """
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{folder / INDEX} has no `weight_map` from tensor names to file names.")
        names = sorted(set(weight_map.values()))
    elif not (names := _shards(folder)):
        raise UserError(
            _unread_here(folder)
            or ((folder / ADAPTER_CONFIG).is_file() and adapter_alone(folder, str(folder)))
            or _elsewhere(folder)
            or f"{folder} holds no weights ({WEIGHTS} or {INDEX}). To start from random ones: "
            "model.init=random."
        )
    # Files of the hub's cache are links from snapshots/<revision>/ to blobs/ of the same repository.
    root = (folder.parent.parent if folder.parent.name == "snapshots" else folder).resolve()
    problems = []
    for name in names:
        file = folder / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            problems.append(
                f"{folder / INDEX} names {name}: only *.safetensors files in the same folder are read."
            )
        elif not file.resolve().is_relative_to(root):
            problems.append(
                f"{file} is a link to {file.resolve()}, outside the model's folder; copy the file there."
            )
        elif not file.is_file():
            problems.append(
                f"{folder / INDEX} names {name}, which is not in {folder}; the download is incomplete."
            )
    if problems:
        raise UserError(problems)
    check_fetched(folder / name for name in names)
    return [folder / name for name in names]


def _unread_here(folder: Path) -> str | None:
    """The sentence of `_unread_weights` on a model's files in `folder`, an adapter's left out."""
    adapter = (folder / ADAPTER_CONFIG).is_file()
    inside = [path.name for path in folder.iterdir() if not (adapter and path.match("adapter_model.*"))]
    return _unread_weights(str(folder), inside, str(folder), f"{folder}-safetensors")


def adapter_alone(folder: Path, name: str) -> str:
    """Sentence that refuses a folder with an adapter as a model. name: of the folder as the user wrote it."""
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    return (
        f"{name} is a LoRA adapter, not a model: name its base ({base}) as the model, or merge the two with "
        "`meshtune export --merge` first."
    )


def _shards(folder: Path) -> list[str]:
    """Names of the shards of one model in a folder without an index; [] if they are not complete."""
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if SHARD.fullmatch(name) and not fnmatch.fnmatch(name, ORIGINAL)]
    return [] if not shards or _absent_shards(shards) else shards


def _absent_shards(shards: list[str]) -> str | None:
    """Clause on what is missing of shards to make one model; None if nothing is. shards: at least one."""
    parts = [match.groups() for match in map(SHARD.fullmatch, shards) if match]
    if len(stems := {(stem, count) for stem, _, count in parts}) > 1:
        return f"the index ({INDEX}): these are shards of {len(stems)} models"
    stem, count = stems.pop()
    there = {int(number) for _, number, _ in parts}
    absent = [number for number in range(1, int(count) + 1) if number not in there]
    names = few([f"{stem}-{number:05}-of-{count}.safetensors" for number in absent])
    return f"{names}; the download is incomplete" if names else None


def _elsewhere(folder: Path) -> str | None:
    """A sentence on weights in the folders inside `folder`; None if there are none."""
    if (folder / "zero_to_fp32.py").is_file():
        return (
            f"{folder} is a checkpoint of DeepSpeed, not a model. Gather its weights: "
            f"python {folder}/zero_to_fp32.py {folder} {folder} --safe_serialization"
        )
    parents = {path.parent for path in folder.glob("*/*.distcp")}
    if sharded := sorted(path for path in parents if not any(map(path.match, STATE_FILES))):
        return (
            f"{folder} holds its weights as a distributed checkpoint in {sharded[0]}. Gather them: "
            f"accelerate merge-weights {sharded[0]} {folder}"
        )
    kinds = ("*.safetensors", *PICKLES)
    weights = (path for kind in kinds for path in folder.glob(f"*/{kind}"))
    inside = sorted({path.parent for path in weights if not any(map(path.match, STATE_FILES))})
    models = [path for path in inside if (path / "config.json").is_file()]
    if not models:
        return (
            f"{folder} itself holds no weights; those in {few([str(path) for path in inside], 3)} have no "
            "config.json with them: name a folder that holds both."
            if inside
            else None
        )
    names = few([str(path) for path in models], 3)
    return f"{folder} itself holds no weights, but {names} {'does' if len(models) == 1 else 'do'}: name that."


def _unread_weights(
    subject: str, files: Iterable[str], name_or_folder: str, output_folder: str
) -> str | None:
    """A sentence about the weights among `files` that are not read; None when there are none.

    subject: of the sentence. name_or_folder: hub id or folder to convert. output_folder: the folder to write;
    both stand in the command that the sentence gives as the remedy.
    """

    def of(*patterns: str) -> list[str]:
        return [file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)]

    files = sorted(files)
    original = [file for file in of(ORIGINAL) if file.endswith((".safetensors", ".pth"))]
    safetensors = [file for file in of("*.safetensors") if file not in original]
    if shards := [file for file in safetensors if SHARD.fullmatch(file)]:
        return (
            f"{subject} holds {counted(len(shards), 'shard')} of a model ({few(shards, 3)}), and lacks "
            f"{_absent_shards(shards) or INDEX}."
        )
    if safetensors:
        remedy = (
            f"no {WEIGHTS}: rename it if it is the whole model."
            if len(safetensors) == 1
            else f"no index ({INDEX}) of them; take it from where the files are from."
        )
        return f"{subject} holds {few(safetensors, 3)}, but {remedy}"
    pickles = [file for file in of(*PICKLES) if file not in {*original, *of(*STATE_FILES)}]
    if original and not pickles:
        return (
            f"{subject} holds its weights in their makers' own format ({few(original, 3)}), with other names "
            "than Hugging Face's; take the repository that has them for transformers (its id often ends in "
            "-hf), or convert them with the family's script in transformers (convert_…_weights_to_hf.py)."
        )
    if pickles:
        return (
            f"{subject} holds its weights as a pickle ({', '.join(pickles[:3])}), which can run code; "
            "meshtune reads safetensors only. If you trust it, convert it once: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{name_or_folder}', use_safetensors=False)"
            f".save_pretrained('{output_folder}')\" "
            "and copy its tokenizer files there."
        )
    if any(file.endswith(".gguf") for file in files):
        return f"{subject} holds GGUF weights, which are for inference; name the safetensors they came from."
    if parts := of(*PARTS):
        return f"{subject} holds a download that did not end ({few(parts, 3)}); download it again."
    if others := of(*OTHERS):
        return (
            f"{subject} holds its weights in a format that is not read ({few(others, 3)}); meshtune reads "
            "safetensors: name a folder that holds them."
        )
    return None


def checked_weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, after every check that must come before `from_pretrained` reads it.

    Raises UserError as `weight_files`, and for adapters, distributed checkpoints, redirected weights, and
    those that are quantised in a form that is not read.
    """
    problems = []
    whole = (folder / WEIGHTS).is_file() or (folder / INDEX).is_file() or _shards(folder)
    if (folder / ADAPTER_CONFIG).is_file() and (whole or _unread_here(folder)):
        # from_pretrained would also load the adapter, and through it whatever base it names.
        problems.append(f"{folder} holds a peft adapter next to a model; move adapter_config.json elsewhere.")
    if (folder / ".metadata").exists():
        # from_pretrained would take it for a torch.distributed.checkpoint, whose .metadata is a pickle.
        problems.append(
            f"{folder} holds a .metadata file of a distributed checkpoint; export that to safetensors first."
        )
    if read_json(folder / "config.json").get("transformers_weights"):
        problems.append(f"{folder}/config.json redirects `transformers_weights`; remove that key.")
    if (found := quantisation(folder)) and found.method not in EIGHT_BITS + FEW_BITS:
        problems.append(quantised(folder, found.method))
    if problems:
        raise UserError(problems)
    return weight_files(folder)


def quantised(folder: Path, what: str) -> str:
    """Sentence that refuses quantised weights. what: the method, or what was found of it."""
    return (
        f"{folder} is quantised ({what}) in a form that is not read. Train the unquantised model it was made "
        "from, or a version of it in NF4 (bitsandbytes), fp8, GPTQ or AWQ."
    )


def refuse_coarse(folder: Path) -> None:
    """Raise UserError if the weights of a model folder are too coarse to train all of them."""
    if (found := quantisation(folder)) and found.method in FEW_BITS:
        raise UserError(
            f"{folder} is quantised ({found.method}), too coarsely for method=full, which would train what "
            "is left of its weights. Set method=qlora or method=lora, which train adapters next to them, or "
            "train the unquantised model it was made from."
        )


class Quantisation(NamedTuple):
    """How a model's weights are quantised, as its configuration or a file next to it says."""

    method: str  # its name as the tools write it, or where it is written
    settings: Mapping[str, Any]


def quantisation(folder: Path) -> Quantisation | None:
    """Return how the weights in a model folder are quantised; None if no file names a quantisation."""
    settings = read_json(folder / "config.json")
    text = settings.get("text_config")
    for part in (settings, text if isinstance(text, dict) else {}):
        for key in QUANTISED_KEYS:
            if part.get(key):
                return _quantisation(part[key], f"{key} in config.json")
    for name in QUANTISED_FILES:
        if (folder / name).is_file():
            values = read_json(folder / name)
            values = values.get("quantization", values)
            # ModelOpt also writes its file where only the cache of keys and values is quantised.
            if not isinstance(values, dict) or values.get("quant_algo", name):
                return _quantisation(values, name)
    return None


def _quantisation(values: Any, otherwise: str) -> Quantisation:
    """Read the settings of a quantisation as tools write them. otherwise: the method where none is named."""
    settings = values if isinstance(values, dict) else {}
    # compressed-tensors and ModelOpt name the form of the weights next to their own name
    form = "format" if settings.get("quant_method") == "compressed-tensors" else "quant_method"
    names = (settings.get(key) for key in ("quant_algo", form, "format", "mode"))
    bits = f"{settings['bits']} bits" if "bits" in settings else otherwise
    return Quantisation(str(next((name for name in names if name), bits)), settings)


# Settings of generation, and the length of the context #


def stop_tokens(name: str, *, trust_remote_code: bool = False, revision: str | None = None) -> list[int]:
    """The ids that a model's generation_config.json names as eos_token_id; [] without such a file."""
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    if not (folder / "generation_config.json").is_file():
        return []
    eos = read_generation_config(folder).eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


def context_of(config: PreTrainedConfig, first_position: int = 0) -> int | None:
    """Tokens of the longest document that a model's positions are made for; None without such a limit.

    first_position: of the document's first token. Scaled rotary embeddings reach as far as their factor times
    the length they were trained with.
    """
    text = config.get_text_config()
    size = getattr(text, "max_position_embeddings", None)
    if not isinstance(size, int) or size <= 0:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]  # by kind of layer
    reach = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or size))
        for kind in kinds
        if kind.get("factor")
    ]
    return max([size, *reach]) - first_position


def read_generation_config(folder: Path) -> GenerationConfig:
    """The generation settings in a model's folder. Raises UserError if its file is damaged."""
    file = folder / "generation_config.json"
    read_json(file)  # its own check, in our words
    try:
        generation = GenerationConfig.from_pretrained(folder)
        savable(generation).validate(strict=True)  # as save_pretrained, which comes after training
    except Exception as error:  # it checks itself in many ways
        raise UserError(f"transformers can't use {file}: {reason_of(error)} Mend or remove it.") from error
    eos = generation.eos_token_id
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise UserError(
            f"{file}: eos_token_id is {reprlib.repr(eos)}; it must be a token's id, or a list of them."
        )
    return generation


def generation_config(model: PreTrainedModel, stop_ids: Sequence[int]) -> GenerationConfig:
    """Return a copy of the model's generation settings whose end tokens are `stop_ids`, then the old ones.

    do_sample becomes True where settings of sampling differ from transformers' defaults.
    """
    generation = savable(model.generation_config or GenerationConfig())
    if stop_ids:
        old = generation.eos_token_id
        ends = list(dict.fromkeys([*stop_ids, *([old] if isinstance(old, int) else old or [])]))
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return generation


def savable(generation: GenerationConfig) -> GenerationConfig:
    """Return a copy that transformers saves: do_sample is True where settings of sampling are there, as the
    base model's author meant it.
    """
    copied = copy.deepcopy(generation)
    if copied.do_sample is not True:
        defaults = ((copied.temperature, 1.0), (copied.top_p, 1.0), (copied.top_k, 50))
        sampling = any(value is not None and value != default for value, default in defaults)
        try:
            copied.validate(strict=True)
        except ValueError:
            sampling = True
        copied.do_sample = True if sampling else copied.do_sample
    return copied
