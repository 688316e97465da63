"""Choose the chat template: the tokenizer's own, a built-in or a file, with the tokens that it declares."""

import json
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshtune.data.tokens import id_bound
from meshtune.data.training import training_template
from meshtune.errors import UserError, check_file, expanded, written
from meshtune.setting_types import is_template

HEADER = r"^\s*-?\s*(special tokens|an answer ends with):[ \t]*(.*?)\s*$"  # of a template's opening comments
COMMENT = r"\s*\{#[-+]?(.*?)[-+]?#\}"
BUILT_IN = Path(__file__).parent / "templates"


def built_in_templates() -> list[str]:
    """The names that `data.chat_template` knows."""
    return sorted(file.stem for file in BUILT_IN.glob("*.jinja"))


def apply_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[str]:
    """Set the tokenizer's chat template; return the tokens added to its vocabulary.

    `chat_template` is a built-in's name, "training" (see training.py), a file or the Jinja text; None (the
    tokenizer's own) and "none" (no template) change nothing. The comments at its beginning may say
    `special tokens: A B`, which are added where missing, and `an answer ends with: A`, which becomes the
    tokenizer's eos token, so that generation stops where training ends an answer (`eos` keeps the one there
    is). The model's embeddings must then be resized. A second call with the same template adds nothing.

    Raises UserError for a name that is neither built in nor a file, if the template needs an eos token that
    the tokenizer lacks, and for an end token that is in neither the vocabulary nor the comment.
    """
    if chat_template is None or chat_template == "none":
        return []
    if chat_template == "training":
        tokenizer.chat_template = training_template(tokenizer)
        return []
    text = _template_text(chat_template)
    header = _header(text)
    tokens = header.get("special tokens", "").replace(",", " ").split()
    end = header.get("an answer ends with", "eos")
    if end == "eos" and tokenizer.eos_token is None and "eos_token" in text:
        raise UserError(
            f"The chat template {chat_template} ends answers with the eos token, but the tokenizer has none. "
            "Use data.chat_template=chatml, which brings its own."
        )
    before = tokenizer.get_vocab()
    if end not in ("eos", *tokens, *before):
        raise UserError(
            f"The chat template {chat_template} says in its opening comments that an answer ends with "
            f"{written(end)}, which the tokenizer's vocabulary does not have. Name a token of it, or let the "
            f"comment add one: special tokens: {end}."
        )
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    missing = [token for token in tokens if token not in special]
    if missing:
        _place_behind(tokenizer, [token for token in missing if token not in before])
        # A token that the vocabulary has as plain text is not split off whole until it is marked special.
        tokenizer.add_special_tokens(
            {"additional_special_tokens": missing}, replace_extra_special_tokens=False
        )
    if end != "eos":
        tokenizer.eos_token = end
    tokenizer.chat_template = text
    return [token for token in tokens if token not in before]


def _header(text: str) -> dict[str, str]:
    """The entries of HEADER in the comments at the beginning of a template, by their names."""
    entries, at = [], 0
    while comment := re.compile(COMMENT, re.DOTALL).match(text, at):
        entries += re.findall(HEADER, comment[1], re.M | re.I)
        at = comment.end()
    return {name.lower(): value for name, value in entries}


def _place_behind(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Give new tokens ids behind the largest one, where the vocabulary has gaps.

    The libraries take the number of tokens as the next id, which another token then has. The new ones are put
    into the vocabulary itself, since tokenizer.json keeps ids of no others. Raises UserError for a tokenizer
    to which that can't be done.
    """
    bound = id_bound(tokenizer)
    if not tokens or bound == len(tokenizer):
        return
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend else {}
    if not isinstance(state.get("model", {}).get("vocab"), dict):
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} tokens and ids up to {bound - 1:,}, so "
            f"{', '.join(tokens)} can't be added behind them. Use a template without new tokens, such as "
            "data.chat_template=alpaca."
        )
    state["model"]["vocab"] |= {token: bound + number for number, token in enumerate(tokens)}
    backend.model = type(backend).from_str(json.dumps(state)).model


def check_variables(variables: Mapping[str, Any], template: str | None) -> None:
    """Raise UserError for variables (data.chat_template_kwargs) that the template does not read.

    template: its source; None: no template is in force.
    """
    if not variables:
        return
    if template is None:
        raise UserError(
            f"data.chat_template_kwargs has {', '.join(variables)}, but no chat template is in force."
        )
    own = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if taken := [name for name in variables if name in own or name == "messages"]:
        raise UserError(f"data.chat_template_kwargs has {', '.join(taken)}, which meshtune sets itself.")
    if unread := [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise UserError(
            f"data.chat_template_kwargs has {', '.join(unread)}, which the chat template does not read."
        )


def _template_text(chat_template: str) -> str:
    if is_template(chat_template):
        return chat_template
    if chat_template in built_in_templates():
        return (BUILT_IN / f"{chat_template}.jinja").read_text(encoding="utf-8")
    file = expanded(chat_template)
    try:
        check_file(file)
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"The chat template {file} is not UTF-8 text.") from None
    except OSError:
        raise UserError(
            f"data.chat_template={chat_template[:80]} is neither a file nor a built-in template "
            f"({', '.join(built_in_templates())}). null uses the tokenizer's own, training "
            "its training form, none uses none."
        ) from None
