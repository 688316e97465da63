"""The comparison that code goes through which no test of meshtune has run: forks of transformers' files."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import FAMILIES
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from meshtune import compat
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy
from meshtune.train.self_check import beyond_tested, check

Change = Callable[[str], str]  # of a file's text


@pytest.fixture(autouse=True)
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the installed versions count as tested: only the forks' own code is not."""
    monkeypatch.setattr(compat, "version", compat.pairs()["development"].__getitem__)


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[[ModuleType, Change], Any]]:
    """Return a function: a file of transformers and a change of its text -> the changed module."""
    made = []

    def build(original: ModuleType, change: Change) -> Any:
        text = Path(original.__file__ or "").read_text()
        text = re.sub(r"from \.\.\.(?=\w)", "from transformers.", text).replace(
            "from ... ", "from transformers "
        )
        text = re.sub(r"from \.(?=\w)", f"from {original.__package__}.", text)
        made.append(name := f"fork_of_{original.__name__.rpartition('.')[2]}")
        (file := tmp_path / f"{name}.py").write_text(change(text))
        sys.modules[name] = module = ModuleType(name)
        module.__file__ = str(file)
        exec(compile(file.read_text(), file, "exec"), vars(module))
        return module

    yield build
    for name in made:
        del sys.modules[name]


def replaced(*pairs: tuple[str, str]) -> Change:
    def change(text: str) -> str:
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        return text

    return change


def cache_renamed(text: str) -> str:
    """Call the cache `memory` in Llama's attention and blocks."""
    start, end = text.index("class LlamaAttention("), text.index("class LlamaPreTrainedModel(")
    inside = re.sub(r"^ *@deprecate_kwarg.*\n", "", text[start:end], flags=re.MULTILINE)
    inside = re.sub(r"\b(cache|past_key_values)\b", "memory", inside)
    after = re.sub(r"(cache|past_key_values)=(\1),(?=\s+use_cache)", r"memory=\2,", text[end:])
    assert "memory" in inside and "memory=" in after
    return text[:start] + inside + after


SOFTCAP = "softcap=self.attn_logit_softcapping,"


def model_of(kind: Any, family: str) -> Any:
    with torch.device("meta"):
        return kind._from_config(FAMILIES[family]())


def test_a_fork_that_changes_nothing_passes(fork: Any) -> None:
    model = model_of(fork(modeling_llama, replaced()).LlamaForCausalLM, "llama")
    check(model, "meshtune")
    assert beyond_tested(model)
    assert not beyond_tested(model_of(modeling_llama.LlamaForCausalLM, "llama"))


@pytest.mark.parametrize(
    ("original", "family", "change", "said"),
    [
        pytest.param(
            modeling_gemma2, "gemma2",
            replaced(
                (SOFTCAP, ""),
                ("if softcap is not None:", "if (softcap := module.attn_logit_softcapping) is not None:"),
            ),
            "would train wrong",
            id="a softcap that is not passed on",
        ),
        pytest.param(
            modeling_gemma2, "gemma2",
            replaced((SOFTCAP, f"cap={SOFTCAP[8:]}"), ("softcap: float | None", "cap: float | None"),
                     ("if softcap is not None:", "if (softcap := cap) is not None:")),
            "does not support: cap=",
            id="a renamed argument",
        ),
        pytest.param(
            modeling_llama, "llama",
            replaced(("        attn_weights = attn_weights + attention_mask", "        pass")),
            "not causal. Note that its code is not that of transformers",
            id="a mask that is ignored",
        ),
    ],
)  # fmt: skip
def test_a_fork_that_computes_something_else_is_refused(
    fork: Any, original: ModuleType, family: str, change: Change, said: str
) -> None:
    module = fork(original, change)
    kind = module.LlamaForCausalLM if original is modeling_llama else module.Gemma2ForCausalLM
    with pytest.raises(UserError, match=said):
        check(model_of(kind, family), "meshtune")


def test_rows_without_padding_are_compared_where_documents_are_not_packed(fork: Any) -> None:
    """transformers gives their SDPA no mask, for which Doge of 5.17 made one in which all tokens see all."""
    call = "        attn_output, attn_weights = attention_interface("
    own = "        if attention_mask is None: attention_mask = query_states.new_zeros(1, 1, 1, 1)"
    module = fork(modeling_llama, replaced((call, f"{own}\n{call}")))
    with pytest.raises(UserError, match="would train wrong"):
        check(model_of(module.LlamaForCausalLM, "llama"), "sdpa")


def test_blocks_that_differ_by_their_index_are_compared(fork: Any) -> None:
    """Odd blocks add the value of the token before, which packed rows take from another document."""
    call = "        attn_output, attn_weights = attention_interface("
    before = "torch.nn.functional.pad(value_states, (0, 0, 1, 0))[:, :, :-1]"
    own = f"        if self.layer_idx % 2:\n            value_states = value_states + {before}\n"
    module = fork(modeling_llama, replaced((call, own + call)))
    with torch.device("meta"):
        model = module.LlamaForCausalLM._from_config(FAMILIES["llama"](num_hidden_layers=12))
    with pytest.raises(UserError, match="would train wrong"):
        check(model, "meshtune")


def test_a_hybrid_model_with_many_blocks_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "family_tested", lambda _: False)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    kinds = (["conv", "conv", "full_attention"] * 4)[:10]
    config = Lfm2Config(**sizes, vocab_size=99, num_hidden_layers=10, layer_types=kinds, pad_token_id=0)
    with torch.device("meta"):
        model = Lfm2ForCausalLM._from_config(config)
    assert len(anatomy(model).mixers) == 7
    check(model, "meshtune")


def test_a_reward_model_is_compared_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own forward gives the score of the last token only."""
    monkeypatch.setattr(compat, "family_tested", lambda _: False)
    config = FAMILIES["llama"](num_labels=1, pad_token_id=0, architectures=["LlamaForSequenceClassification"])
    with torch.device("meta"):
        model = modeling_llama.LlamaForSequenceClassification._from_config(config)
    check(model, "meshtune")


def test_the_cache_name_does_not_matter(fork: Any) -> None:
    module = fork(modeling_llama, cache_renamed)
    own, theirs = (anatomy(model_of(each.LlamaForCausalLM, "llama")) for each in (module, modeling_llama))
    assert own == theirs and own.attention == "self_attn"


def test_a_version_beyond_the_tested_ones_is_compared_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "99.1")
    compared = []
    monkeypatch.setattr("meshtune.train.self_check.differences", lambda *_: compared.append(1) or {})
    model = model_of(modeling_llama.LlamaForCausalLM, "llama")
    for _ in range(2):  # once in a process
        check(model, "meshtune")
    assert compared == [1] and "99.1" in beyond_tested(model)
