"""A causal language model, its tokenizer and its configuration, from a hub id or a local folder.

    name ──> resolve() ──> a folder of safetensors, checked ──> load() ──> the unchanged Hugging Face model

A hub id is first downloaded to the hub's cache (configuration, tokenizer, safetensors; never a pickle), so
that one code path, with one set of checks, reads both. A folder from elsewhere runs no code: weights are
safetensors only, index files stay inside their folder, and Python files are used only with
`trust_remote_code`.

transformers' own `from_pretrained` does the reading: it builds on meta, renames keys where a family has
changed since its checkpoint was written, ties embeddings and makes the non-persistent buffers. Measured on
a 192 MB Llama (transformers 5.23), anonymous memory peaks at 1.05 × the model when it casts, and at 0.01 ×
when it doesn't, since the weights then stay a mapping of the file. On the CPU `_own` reads those in, for
1.02 ×; to another device they go straight from the file, one at a time. Casts are left to transformers, on
the CPU: a model built in the file's type instead would hold wrong constants (Gemma's scale of the
embeddings, rounded to bf16, in an fp32 model).
"""

import difflib
import fnmatch
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from meshtune.errors import UserError
from meshtune.model.hub import asking, local

logger = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SMALL = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
)  # configuration and tokenizer files of a hub repository
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def quiet() -> None:
    """No progress bars of transformers, which would break ours; downloads from the hub keep theirs."""
    transformers.utils.logging.disable_progress_bar()
    enable_progress_bars()


# The folder #


def resolve(
    name: str, *, revision: str | None = None, weights: bool, trust_remote_code: bool = False
) -> Path:
    """The local folder of `name`: itself, or the hub's snapshot of it, downloaded if need be.

    Raises UserError when there is neither.
    """
    if folder := local(name):
        if folder.is_dir():
            return folder
        raise UserError(f"{name} is a file; name the folder that holds config.json.")
    wanted = [*SMALL, *(["*.safetensors"] if weights else []), *(["*.py"] if trust_remote_code else [])]
    with asking(name, revision):
        # Sub-folders and "consolidated" files hold the same weights again in other formats.
        ignored = ["*/*", "consolidated*"]
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=ignored)
        )
    if weights and not list(folder.glob("*.safetensors")):
        _say_what_the_hub_has(name, revision)
    return folder


def _say_what_the_hub_has(name: str, revision: str | None) -> None:
    """Raise UserError when a repository has weights that are not read; where that can't be known, do nothing:
    reading the folder then says that there are none."""
    try:
        files = HfApi().list_repo_files(name, revision=revision)
    except Exception:  # no network, a server's error, no right: each has its own class, none of one family
        return
    top = [file for file in files if "/" not in file]
    if sentence := _unread(f"The hub's {name}", top, name, name.rpartition("/")[2] + "-safetensors"):
        raise UserError(sentence)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, but holds a {type(value).__name__}.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, index followed.

    Raises UserError where there are none (naming the remedy for pickles), one is missing, or one lies
    elsewhere.
    """
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{folder / INDEX} has no `weight_map` from tensor names to file names.")
        names = sorted(set(weight_map.values()))
    else:
        names = [path.name for path in folder.iterdir()]
        nothing = f"{folder} holds no weights ({WEIGHTS} or {INDEX}). To start from random ones: "
        raise UserError(
            _unread(str(folder), names, str(folder), f"{folder}-safetensors")
            or f"{nothing}model.init=random."
        )
    # Files of the hub's cache are links from snapshots/<revision>/ to blobs/ of the same repository.
    root = (folder.parent.parent if folder.parent.name == "snapshots" else folder).resolve()
    problems = []
    for name in names:
        file = folder / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            problems.append(
                f"{folder / INDEX} names {name!r}: only *.safetensors files in the same folder are read."
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


def _unread(who: str, files: Iterable[str], source: str, converted: str) -> str | None:
    """A sentence about the weights among `files` that are not read; None when there are none.

    source, converted: what to convert, a folder or a hub id, and the folder to write.
    """
    files = sorted(files)
    pickles = [file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in PICKLES)]
    if pickles:
        return (
            f"{who} holds its weights as a pickle ({', '.join(pickles[:3])}), which can run code; "
            "meshtune reads safetensors only. If you trust it, convert it once: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{source}', use_safetensors=False).save_pretrained('{converted}')\" "
            "and copy its tokenizer files there."
        )
    if any(file.endswith(".gguf") for file in files):
        return f"{who} holds GGUF weights, which are for inference; name the safetensors they came from."
    return None


def _check(folder: Path, config: PretrainedConfig) -> list[Path]:
    """Everything that must hold before `from_pretrained` sees the folder; returns its weight files."""
    problems = []
    if (folder / "adapter_config.json").is_file():
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


# Configuration, tokenizer, model #


def load_config(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PretrainedConfig:
    """The configuration of a causal language model.

    Raises UserError when it is missing, of an unknown type, or needs code that is not trusted.
    """
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    return read_config(folder / "config.json", name, trust_remote_code)


def read_config(file: Path, name: str, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration in `file`, of the model `name`. Raises as `load_config`."""
    folder = file.parent
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
            raise UserError(
                f"{name} is a LoRA adapter, not a model: name its base ({base}) as the model, or merge the "
                f"two with `meshtune export --merge` first."
            )
        raise UserError(
            f"{name} has no config.json, so it is not a model in Hugging Face's format; name the folder that "
            "holds one."
        )
    raw = _read_json(file)
    if "model_type" not in raw and "auto_map" not in raw:
        raise UserError(
            f"{file} names no `model_type`, so it is not the configuration of a transformers model; take the "
            "config.json that was published with the weights."
        )
    needs_code = "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING
    if needs_code and not trust_remote_code:
        raise UserError(
            f"{name} brings its own Python code, which is not run unless you say so; if you have read and "
            f"trust it, set model.trust_remote_code=true."
        )
    kind = raw.get("model_type")
    if not needs_code and kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys(), n=1)
        raise UserError(
            f"transformers {transformers.__version__} can't read {file}: it knows no model_type {kind!r}"
            + (f"; did you mean {near[0]}?" if near else "; a newer transformers may.")
        )
    source = folder if file.name == "config.json" else file
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # each family's configuration class checks itself in its own way
        raise UserError(f"transformers can't read {file}: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UserError(
            f"{name} ({config.model_type}) is an encoder-decoder; meshtune trains causal language models."
        )
    if not needs_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{name} ({config.model_type}) is not a causal language model that transformers knows."
        )
    return config


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model (or of an adapter's folder). Raises UserError when there is none."""
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (
        Exception
    ) as error:  # a missing file shows as OSError, ValueError, TypeError or ImportError, by family
        raise UserError(
            f"The tokenizer of {name} can't be loaded ({_first_line(error)}). A model's folder needs "
            f"tokenizer.json and tokenizer_config.json (or the family's own vocabulary files)."
        ) from error
    if len(tokenizer) == 0:
        raise UserError(f"The tokenizer of {name} is empty; the folder needs tokenizer.json.")
    return tokenizer


def load(
    name: str,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    attention: str = "meshtune",
    trust_remote_code: bool = False,
    revision: str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """The causal language model `name` (a hub id or a folder), in training mode, every parameter in `dtype`.

    `init="random"` needs only config.json and draws the family's own initialisation, the same for one `seed`.
    `attention` is a name that transformers knows or that was registered with its AttentionInterface.
    Non-persistent buffers keep the family's own dtype (rotary frequencies stay fp32 under bf16).

    Raises UserError for whatever is wrong with the folder, and for weights missing or of a wrong shape.
    """
    weights = init == "pretrained"
    folder = resolve(name, revision=revision, weights=weights, trust_remote_code=trust_remote_code)
    config = read_config(folder / "config.json", name, trust_remote_code)
    try:
        if weights:
            own = torch.device(device).type == "cpu"  # elsewhere moving copies them anyway
            model = _read(folder, config, dtype, attention, trust_remote_code, own=own)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
                )
    except (ValueError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} can't be built by transformers: {_first_line(error)}") from error
    model.config.name_or_path = name  # not the cache's folder: adapters record it as their base
    return model.to(device).train()  # type: ignore[arg-type]


def skeleton(
    name: str,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype,
    attention: str = "meshtune",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """The model `name` in training mode with every parameter on meta: no bytes, no values, nothing drawn.

    Its buffers are real and right, those too that no file holds (rotary frequencies, Gemma's scale of the
    embeddings), so that nothing has to be restored once the parameters get memory. Raises as `load`.
    """
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    config = read_config(folder / "config.json", name, trust_remote_code)
    try:
        with no_init_weights(), _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError) as error:
        raise UserError(f"{name} can't be built by transformers: {_first_line(error)}") from error
    model.tie_weights()
    if init == "pretrained" and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = name
    return model.train()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made meanwhile keep only the shapes of their parameters; a buffer is made as ever."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def mapped(
    name: str,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    revision: str | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The tensors of the model `name`, whole, by name, as a mapping of its files: tied ones under all names.

    In the type that they are stored in, so that reading a slice touches nothing else (the widest type, as
    memory, where a model's files mix several). With init="random" they are drawn in `dtype`, and memory too.
    Raises UserError as `load`.
    """
    if init == "random":
        model = load(
            name, init=init, dtype=dtype, attention="eager", trust_remote_code=trust_remote_code,
            revision=revision, seed=seed,
        )  # fmt: skip
    else:
        folder = resolve(name, revision=revision, weights=True, trust_remote_code=trust_remote_code)
        config = read_config(folder / "config.json", name, trust_remote_code)
        words = _stored_dtypes(weight_files(folder))
        stored = [dtype for dtype, word in SAFETENSORS_DTYPES.items() if word in words] or [torch.float32]
        widest = reduce(torch.promote_types, stored)
        model = _read(folder, config, widest, "eager", trust_remote_code, own=False)
    parameters = {key: p.detach() for key, p in model.named_parameters(remove_duplicate=False)}
    return {**model.state_dict(), **parameters}


def _read(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
    trust_remote_code: bool,
    *,
    own: bool,
) -> PreTrainedModel:
    files = _check(folder, config)
    try:
        stored = _stored_dtypes(files)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported below, in our words
        )
    except (SafetensorError, EOFError) as error:
        raise UserError(f"The weights in {folder} are damaged: {_first_line(error)}") from error
    model, report = loaded
    problems = []
    if missing := sorted(report["missing_keys"]):
        problems.append(
            f"{folder} lacks {len(missing)} tensors of a {config.model_type} model: {_few(missing)}."
        )
    for key, found, expected in sorted(report["mismatched_keys"])[:10]:
        problems.append(
            f"{folder}: {key} has shape {tuple(found)}, but config.json makes it {tuple(expected)}."
        )
    if problems:
        raise UserError(problems)
    if unexpected := sorted(report["unexpected_keys"]):
        logger.warning(
            "%s holds %d tensors that the model has no use for: %s", folder, len(unexpected), _few(unexpected)
        )
    if own and SAFETENSORS_DTYPES.get(dtype) in stored:
        _own(model)
    return model


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _stored_dtypes(files: Iterable[Path]) -> set[str]:
    stored = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118 (not a dict)
    return stored


def _own(model: nn.Module) -> None:
    """Copy weights out of the files that they are a mapping of, one at a time.

    Else whoever rewrites a file in place (`save_pretrained` into the base model's folder) would change, or
    with a shorter file crash, the run that reads it. The mapping is no anonymous memory, so there is no
    second copy.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


# Changes before training #


def resize_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Give tokens that have no embedding row one: the mean of the old rows, on input and output side.

    Never shrinks (many families round their rows up). `config.vocab_size` follows. Returns how many were
    added.
    """
    rows = tables(model)[0].num_embeddings
    added = max(tokenizer.get_vocab().values()) + 1 - rows
    if added <= 0:
        return 0
    resize_to(model, rows + added)
    embed, head = tables(model)
    changed: list[Tensor] = [embed.weight]
    if head.weight is not embed.weight:
        changed.append(head.weight)
    if head.bias is not None:
        changed.append(head.bias)
    with torch.no_grad():
        for table in changed:
            table[rows:] = table[:rows].mean(dim=0, dtype=torch.float64).to(table.dtype)
    return added


def resize_to(model: PreTrainedModel, rows: int) -> None:
    """Make the embeddings `rows` long, keeping what they hold, who is trainable, and who is tied to whom."""
    trainable = [table.weight.requires_grad for table in tables(model)]
    devices = [table.weight.device for table in tables(model) if table.weight.is_cuda]
    with torch.random.fork_rng(devices):  # what it draws is overwritten; adapters drawn later must not differ
        model.resize_token_embeddings(rows, mean_resizing=False)
    for table, grad in zip(tables(model), trainable, strict=True):
        table.weight.requires_grad_(grad)


def tables(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """The embedding and the output head. Raises UserError for a model without one."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} has no plain embedding and output head.")
    return embed, head


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze the parameters whose names match a glob (`model.layers.0.*`, `*norm*`); returns their names.

    Raises UserError for every pattern that matches nothing, naming near ones, and if nothing is left to
    train.
    """
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied head is found under both its names
    frozen: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
            problems.append(
                f"The pattern {pattern!r} matches no parameter; globs match names such as {', '.join(near)}."
            )
        frozen.update(matches)
    if problems:
        raise UserError(problems)
    for name in frozen:
        names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise UserError(f"With {len(frozen)} parameters frozen, nothing is left to train.")
    return sorted(frozen)
