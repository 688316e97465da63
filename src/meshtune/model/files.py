"""The files of a model: a hub id or a local folder -> a folder of safetensors, checked.

A hub id is first downloaded to the hub's cache (configuration, tokenizer, safetensors; never a pickle), so
that one code path, with one set of checks, reads both. A folder from elsewhere runs no code: weights are
safetensors only, index files stay inside their folder, and Python files are used only with
`trust_remote_code`.
"""

import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import PretrainedConfig

from meshtune.errors import UserError, reason_of, type_name
from meshtune.model.hub import hub_errors, local_path, reachable

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of a folder with a peft adapter
SAFETENSORS_DTYPES = {  # the word of a safetensors header for each dtype
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
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
            return folder
        raise UserError(f"{name} is a file; name the folder that holds config.json.")
    wanted = [*SMALL, *(["*.safetensors"] if weights else []), *(["*.py"] if trust_remote_code else [])]
    with hub_errors(name, revision):
        # Sub-folders and "consolidated" files hold the same weights again in other formats.
        ignored = ["*/*", "consolidated*"]
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
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, but holds {type_name(value)}.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, index followed.

    Raises UserError where there are none (naming the remedy for pickles), one is missing, or one lies
    elsewhere.
    """
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{folder / INDEX} has no `weight_map` from tensor names to file names.")
        names = sorted(set(weight_map.values()))
    else:
        names = [path.name for path in folder.iterdir()]
        nothing = f"{folder} holds no weights ({WEIGHTS} or {INDEX}). To start from random ones: "
        raise UserError(
            _unread_weights(str(folder), names, str(folder), f"{folder}-safetensors")
            or f"{nothing}model.init=random."
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
    return [folder / name for name in names]


def _unread_weights(
    subject: str, files: Iterable[str], name_or_folder: str, output_folder: str
) -> str | None:
    """A sentence about the weights among `files` that are not read; None when there are none.

    subject: of the sentence. name_or_folder: hub id or folder to convert. output_folder: the folder to write;
    both stand in the command that the sentence gives as the remedy.
    """
    files = sorted(files)
    pickles = [file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in PICKLES)]
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
    return None


def checked_weight_files(folder: Path, config: PretrainedConfig) -> list[Path]:
    """The weight files of a model folder, after every check that must come before `from_pretrained` reads it.

    Raises UserError as `weight_files`, and for adapters, distributed checkpoints, redirected or quantised
    weights.
    """
    problems = []
    if (folder / ADAPTER_CONFIG).is_file():
        # from_pretrained would also load the adapter, and through it whatever base it names.
        problems.append(f"{folder} holds a peft adapter beside a model; move adapter_config.json elsewhere.")
    if (folder / ".metadata").exists():
        # from_pretrained would take it for a torch.distributed.checkpoint, whose .metadata is a pickle.
        problems.append(
            f"{folder} holds a .metadata file of a distributed checkpoint; export that to safetensors first."
        )
    settings = config.to_dict()
    if settings.get("transformers_weights"):
        problems.append(f"{folder}/config.json redirects `transformers_weights`; remove that key.")
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method", "an unknown method")
        problems.append(f"{folder} is quantised ({method}); train the unquantised model it was made from.")
    if problems:
        raise UserError(problems)
    return weight_files(folder)
