"""Words of a command line that no command can take."""

import os

import pytest

from meshtune.commands.env import env
from meshtune.commands.generate import generated
from meshtune.errors import UserError

NOT_UTF8 = os.fsdecode(b"a\xff")


def test_a_prompt_that_is_not_utf8_is_named() -> None:
    with pytest.raises(UserError, match="Prompt 2 has bytes that are not UTF-8"):
        generated(None, [], ["fine", NOT_UTF8], max_new_tokens=1, temperature=0.0)


def test_a_temperature_that_is_nearly_zero_is_refused() -> None:
    with pytest.raises(UserError, match="use 0 for the likeliest token"):
        generated(None, [], ["fine"], max_new_tokens=1, temperature=1e-320)


def test_a_models_name_is_no_markup(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    folder = tmp_path / "[" / "b]m"
    LlamaConfig(num_hidden_layers=1).save_pretrained(folder)
    env(model=str(folder))
    assert "b]m" in capsys.readouterr().out.replace("\n", "")
