"""A tokenizer that is written and read back is the one that was trained with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshtune.data.template import apply_template
from meshtune.errors import UserError
from meshtune.model.save import check_written, write_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
TEXT = "<s>[INST] Hi there [/INST]</s> you"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tokenizer as Mistral's first: words begin with ▁, and `legacy` puts one behind each special token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(["▁Hi▁there▁[INST]▁you▁[/INST]▁how▁are▁you"] * 8, trainer)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, replace]
    tree = json.loads(tokenizer.to_str()) | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        "chat_template": TEMPLATE,
    }
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "own": "kept"}
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def read_back(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    folder.mkdir()
    write_tokenizer(tokenizer, folder)
    return AutoTokenizer.from_pretrained(folder)


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_where_nothing_was_added_the_files_are_the_bases_own(base: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    again = read_back(tokenizer, tmp_path / "written")
    assert ids(again, TEXT) == ids(tokenizer, TEXT) and again.chat_template == TEMPLATE
    assert (tmp_path / "written/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    own, written = (
        json.loads((f / "tokenizer_config.json").read_text()) for f in (base, tmp_path / "written")
    )
    assert written == {name: value for name, value in own.items() if name != "chat_template"}


@pytest.mark.parametrize("template", ["chatml", "mistral", None])
def test_a_tokenizer_with_another_template_is_read_back(
    base: Path, tmp_path: Path, template: str | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    if template:
        apply_template(tokenizer, template)
    else:  # data.chat_template = none
        tokenizer.chat_template = None
    again = read_back(tokenizer, tmp_path / "written")
    assert ids(again, TEXT + "<|im_end|>x") == ids(tokenizer, TEXT + "<|im_end|>x")
    assert (again.chat_template, again.eos_token) == (tokenizer.chat_template, tokenizer.eos_token)
    check_written(tokenizer, ["Hi there"])


def test_a_tokenizer_that_would_be_another_one_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    apply_template(tokenizer, "chatml")
    tokenizer.name_or_path = ""  # its base is not known, so that `legacy` is lost
    with pytest.raises(UserError, match=r"is saved as another one: .*<s>"):
        check_written(tokenizer, [])


def test_the_class_and_the_ends_are_written_where_config_json_has_them(base: Path, tmp_path: Path) -> None:
    """An adapter's folder has no config.json, from which the class would follow."""
    (base / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    tokenizer = AutoTokenizer.from_pretrained(base)
    again = read_back(tokenizer, tmp_path / "written")
    assert type(again) is type(tokenizer) and again.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.parametrize("added", [False, True])
def test_the_files_depend_on_the_tokenizer_only(base: Path, tmp_path: Path, added: bool) -> None:
    """Neither on how it was read nor on where: the hub switched off, another folder of the same files."""
    shutil.copytree(base, tmp_path / "moved")
    folders = []
    for place, offline in ((base, False), (base, True), (tmp_path / "moved", True)):
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=offline)
        if added:
            apply_template(tokenizer, "chatml")
        folders.append(tmp_path / f"written-{len(folders)}")
        write_tokenizer(tokenizer, folders[-1])
    first, *others = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert others == [first, first]
    assert b"local_files_only" not in first["tokenizer_config.json"]


def test_added_tokens_are_written_in_the_form_of_the_bases_files(base: Path, tmp_path: Path) -> None:
    """transformers 4 knows neither the class that 5 writes nor a list of extra_special_tokens."""
    own = json.loads((base / "tokenizer_config.json").read_text())
    older = own | {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["[INST]"]}
    (base / "tokenizer_config.json").write_text(json.dumps(older))
    tokenizer = AutoTokenizer.from_pretrained(base)
    apply_template(tokenizer, "chatml")
    again = read_back(tokenizer, tmp_path / "written")
    settings = json.loads((tmp_path / "written/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["[INST]", "<|im_start|>", "<|im_end|>"]
    assert "extra_special_tokens" not in settings
    assert again.get_added_vocab() == tokenizer.get_added_vocab()
