"""Write a tokenizer so that it is read back as the one that was trained with.

The base's own files are copied where nothing was added to its vocabulary: `save_pretrained` writes them in
the form of the installed transformers, which older ones read otherwise, and leaves out settings (`legacy`).
Where tokens were added, settings that it leaves out are put back.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshtune.errors import UserError, quoted

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
READ = ("tokenizer_class", "bos_token", "eos_token", "unk_token", "pad_token")
READING = ("is_local", "local_files_only")  # how and where transformers read it: nothing of the tokenizer
FILES = (CONFIG, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model")


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files, with the chat template that it has now, to a folder."""
    tokenizer.save_pretrained(folder)
    base, saved = Path(tokenizer.name_or_path), _settings(folder)
    _write(saved, folder)
    if not tokenizer.name_or_path or not (base / CONFIG).is_file():
        return
    own = _settings(base)
    if "auto_map" in own:  # code of its own, which may not be run here
        return
    own.pop("chat_template", None)  # it stands in a file of its own
    names = [
        name for name in dict.fromkeys([*FILES, *tokenizer.vocab_files_names.values()]) if name != CONFIG
    ]
    if _same(tokenizer, base):
        # The class and these tokens may follow from config.json, which an adapter's folder has not.
        own = {name: saved[name] for name in READ if name in saved} | own
        for name in names:
            (folder / name).unlink(missing_ok=True)
            if (base / name).is_file():
                shutil.copyfile(base / name, folder / name)
        _write(own, folder)
        return
    both = {name: value for name, value in own.items() if name != "added_tokens_decoder"} | saved
    for settings in (_older(both, own), both):  # the older form where it is read as the same tokenizer
        _write(settings, folder)
        if _same(tokenizer, folder):
            return


def _older(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The settings with the class of the base's, `own`, and the name of added special tokens that
    transformers 4 reads, if the base's have no newer name.
    """
    older = settings | {name: own[name] for name in ("tokenizer_class",) if name in own}
    if "extra_special_tokens" not in own and isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def _settings(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / CONFIG).read_text("utf-8"))
    return {name: value for name, value in settings.items() if name not in READING}


def _write(settings: dict[str, Any], folder: Path) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def check_written(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
    """Raise UserError if a tokenizer that is written and read back makes other ids of one of the texts, or of
    words between its special tokens.
    """
    special = [str(token) for token in tokenizer.all_special_tokens]
    texts = [*texts, *(f"{token}Hello{token} there" for token in special)]
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(tokenizer, Path(name))
        if "auto_map" in json.loads((Path(name) / CONFIG).read_text("utf-8")):
            return
        again = _read(Path(name))
    for text in texts:
        ids, others = (one(text, add_special_tokens=False)["input_ids"] for one in (tokenizer, again))
        if ids != others:
            raise UserError(
                f"The tokenizer is saved as another one: {quoted(text[:60])} has {len(ids)} tokens now, "
                f"and {len(others)} others when it is read back. Save it by transformers, and train with the "
                "copy."
            )


def _same(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Whether a tokenizer has the class and the tokens of that in a folder."""

    def tokens(one: PreTrainedTokenizerBase) -> tuple[Any, ...]:
        added = {id: (str(token), token.special) for id, token in one.added_tokens_decoder.items()}
        return (
            type(one),
            len(one),
            added,
            {name: str(token) for name, token in one.special_tokens_map.items()},
        )

    return tokens(tokenizer) == tokens(_read(folder))


def _read(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
