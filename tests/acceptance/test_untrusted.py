"""Nothing that comes from elsewhere runs code: a canary in each place stays silent, and the user is told.

The canary creates a file. `test_the_canary_sings_when_it_is_read_without_care` shows that it would.
"""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from families import FAMILIES
from golden import refuses
from loading import load
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from transformers import PreTrainedTokenizerFast

from meshtune.data.encode import Encoder
from meshtune.data.example import Example, Origin
from meshtune.errors import UserError
from meshtune.model.load import load_config, load_tokenizer
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.checkpoint_files import read_metadata, size_and_hash

CODE = """
from pathlib import Path
Path({path!r}).touch()
"""


class Canary:
    """Creates the file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def sung(tmp_path):
    """The file that the canary writes; the test fails if it did."""
    path = tmp_path / "the-canary-sang"
    yield path
    assert not path.exists()


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A good checkpoint of step 1."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", asynchronous=False)
    assert checkpoints.save(1, {"weight": torch.ones(4)}, {}) == []
    return tmp_path / "checkpoints" / "step-1"


def sign(folder: Path) -> None:
    """Give the manifest the sizes and hashes of what is there now: whoever plants a canary can do that."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: size_and_hash(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def is_refused(folder: Path, match: str) -> None:
    """Reading the checkpoint raises UserError and leaves the tensor as it was."""
    read = {"weight": torch.zeros(4)}
    with pytest.raises(UserError, match=match):
        Checkpoints(folder.parent).load(1, read)
    assert not read["weight"].any()


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
    sign(folder)


def move_data_to(folder: Path, relative_path: str) -> None:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = relative_path

    change_metadata(folder, change)


# Checkpoints #


def test_the_canary_sings_when_it_is_read_without_care(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path / "song")))
    assert (tmp_path / "song").exists()


@pytest.mark.parametrize("where", ["whole", "planner_data", "storage_meta", "tensor", "key"])
def test_a_canary_in_the_metadata(checkpoint, sung, where):
    def plant(metadata: Metadata) -> Any:
        if where == "whole":
            return Canary(sung)
        if where == "tensor":
            metadata.state_dict_metadata["weight"] = Canary(sung)  # type: ignore[assignment]
        elif where == "key":
            metadata.storage_data[Canary(sung)] = None
        else:
            setattr(metadata, where, Canary(sung))

    change_metadata(checkpoint, plant)
    is_refused(checkpoint, r"\.metadata was refused: it names (posix|os)\.system")


@pytest.mark.parametrize(
    "stream",
    [
        b"cbuiltins\neval\n(S'open({path!r}, \"w\")'\ntR.",
        b"ctorch\nSize.__class__\n.",
        b"ctorch.serialization\nload\n.",
        b"cnumpy\nsave\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
    ],
)
def test_a_metadata_pickle_may_name_nothing_but_what_it_needs(checkpoint, sung, stream):
    (checkpoint / ".metadata").write_bytes(stream.replace(b"{path!r}", repr(str(sung)).encode()))
    sign(checkpoint)
    is_refused(checkpoint, r"\.metadata was refused: it names ")


@pytest.mark.parametrize(
    "stream", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(None), b"\x80\x04."]
)
def test_metadata_that_is_none_is_refused_in_words(checkpoint, stream):
    (checkpoint / ".metadata").write_bytes(stream)
    sign(checkpoint)
    is_refused(checkpoint, r"\.metadata was refused")


@pytest.mark.parametrize(
    ("of", "name", "refusal"),
    [
        (_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST", "it holds no checkpoint metadata"),
        (torch.Size, "numel", "it names an attribute numel"),
    ],
)
def test_attributes_are_read_of_one_enum_only(of: type, name: str, refusal: str) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(its class, its name)."""

    class Member:
        def __reduce__(self) -> tuple[Callable, tuple]:
            return getattr, (of, name)

    with pytest.raises(UserError, match=refusal):
        read_metadata(pickle.dumps(Member()), (), "x")


def test_a_canary_in_a_data_file(checkpoint, sung):
    stream = io.BytesIO()
    torch.save(Canary(sung), stream)
    (checkpoint / "__0_0.distcp").write_bytes(stream.getvalue())

    def fit(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.length = len(stream.getvalue())

    change_metadata(checkpoint, fit)
    is_refused(checkpoint, r"could not be read: .*(Weights only|weights_only)")


def test_a_canary_among_pickled_extras(tmp_path, checkpoint, sung):
    """DCP reads what is no tensor with pickle: optimizer or trainer extras, as other tools save them."""
    for path in checkpoint.iterdir():
        if path.name != "manifest.json" and path.name != "values.json":
            path.unlink()
    state = {"weight": torch.ones(4), "trainer": Canary(sung)}
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    sign(checkpoint)
    is_refused(checkpoint, r"'trainer' is a pickled object, not a tensor")


@pytest.mark.parametrize("there", ["../outside.distcp", "/etc/passwd", "values.json", "sub/__0_0.distcp"])
def test_metadata_that_points_elsewhere(checkpoint, there):
    (checkpoint.parent / "outside.distcp").write_bytes((checkpoint / "__0_0.distcp").read_bytes())
    move_data_to(checkpoint, there)
    is_refused(checkpoint, r"which is not a file of this checkpoint")


def test_a_data_file_that_is_a_link(checkpoint):
    outside = checkpoint.parent / "outside.distcp"
    (checkpoint / "__0_0.distcp").rename(outside)
    (checkpoint / "__0_0.distcp").symlink_to(outside)
    is_refused(checkpoint, r"__0_0.distcp is damaged: it is not a regular file")


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "..", ""])
def test_a_manifest_that_names_files_elsewhere(checkpoint, name):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"size": 1, "hash": "0"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    is_refused(checkpoint, r"manifest.json is missing or damaged")


def test_data_that_asks_for_a_transformation(checkpoint):
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd/1"]

    change_metadata(checkpoint, change)
    is_refused(checkpoint, r"to be read through")


# Model folders #


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama as a Hugging Face folder, with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM

    letters = {letter: i for i, letter in enumerate(["<unk>", "<eos>", *map(chr, range(32, 127))])}
    words = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    place = tmp_path / "model"
    AutoModelForCausalLM.from_config(FAMILIES["llama"]()).save_pretrained(place)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(
        place
    )
    return place


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_folder_loads_before_anything_is_planted(folder):
    assert load(str(folder), dtype=torch.float32, attention="eager").num_parameters() > 0
    assert len(load_tokenizer(str(folder))) == 97


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_canary_in_pickled_weights(folder, sung, name):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Canary(sung)}, folder / name)
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "rng_state.pth", "training_args.bin"])
def test_pickles_beside_safetensors_are_not_read(folder, sung, name):
    torch.save({"lm_head.weight": Canary(sung)}, folder / name)
    load(str(folder), dtype=torch.float32, attention="eager")


@pytest.mark.parametrize(
    "there", ["../outside.safetensors", "{root}/outside.safetensors", "link.safetensors"]
)
def test_an_index_that_points_outside(folder, there):
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "link.safetensors").symlink_to(outside)
    index = {"weight_map": {"lm_head.weight": there.format(root=folder.parent)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


def test_a_checkpoint_inside_a_model_folder(folder, sung):
    """transformers takes a folder with a .metadata for a distributed checkpoint."""
    (folder / ".metadata").write_bytes(pickle.dumps(Canary(sung)))
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


def test_a_model_that_brings_its_own_code(folder, sung):
    (folder / "own.py").write_text(CODE.format(path=str(sung)) + "class Own: pass\n")
    names = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    edit(folder / "config.json", auto_map=names, model_type="own")
    for read in (load_config, lambda name: load(name, dtype=torch.float32, attention="eager")):
        with refuses(UserError):
            read(str(folder))


def test_a_known_model_that_brings_its_own_code_is_read_without_it(folder, sung):
    (folder / "own.py").write_text(CODE.format(path=str(sung)) + "class Own: pass\n")
    edit(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert type(load(str(folder), dtype=torch.float32, attention="eager")).__name__ == "LlamaForCausalLM"


def test_a_tokenizer_that_brings_its_own_code(folder, sung):
    (folder / "own.py").write_text(CODE.format(path=str(sung)) + "class Own: pass\n")
    (folder / "tokenizer.json").unlink()
    edit(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["own.Own", "own.Own"]},
        tokenizer_class="Own",
    )
    with refuses(UserError):
        load_tokenizer(str(folder))


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
    "{{ raise_exception.__globals__['__builtins__'].open('PATH', 'w') }}",
    "{{ lipsum.__globals__['os'].popen('touch PATH') }}",
    "{{ messages.__class__.__base__ }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(messages) }}",
    "{% set x = messages.append(1) %}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_chat_template_that_wants_out_of_its_sandbox(folder, sung, escape):
    (folder / "chat_template.jinja").write_text(escape.replace("PATH", str(sung)))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat_template
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    example = Example(Origin("here", 1), messages, None, None, None, None)
    with refuses(UserError):
        Encoder(tokenizer, train_on="assistant", chat_template=None).encode([example])
