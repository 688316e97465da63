"""`meshtune generate` and `meshtune.generate`: conversations, files of prompts, answers to a file."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import refuses, says

import meshtune
from meshtune.api import generate as api
from meshtune.api.answer import open_answerer
from meshtune.commands.generate import generate
from meshtune.data.example import Example, Origin
from meshtune.data.prompts import prompts_of
from meshtune.errors import UserError
from meshtune.train.generate import TextStream

CHATML = "data.chat_template=chatml"
ASKED = [{"role": "user", "content": "Say red"}]


@pytest.fixture
def model(tiny: Path) -> str:
    return str(tiny / "model")


@pytest.fixture
def answered(model: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command on the tiny model with a template; returns its JSON document."""

    def run(*overrides: str, **options: Any) -> Any:
        capsys.readouterr()
        generate([model, CHATML, *overrides], **{"max_new_tokens": 4, "as_json": True, **options})
        return json.loads(capsys.readouterr().out)

    return run


def rows_file(folder: Path, *rows: Any) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.ci
def test_a_prompt_a_conversation_and_python_give_the_same_answer(answered, model, tmp_path):
    (row,) = answered(prompt=["Say red"])
    assert answered(messages=[json.dumps(ASKED)]) == [{"messages": ASKED, "answer": row["answer"]}]
    (tmp_path / "asked.json").write_text(json.dumps(ASKED))
    assert answered(messages=[str(tmp_path / "asked.json")])[0]["answer"] == row["answer"]
    options = {"max_new_tokens": 4, "overrides": [CHATML]}
    for prompts in ("Say red", ASKED):
        assert meshtune.generate(model, prompts, **options) == [row["answer"]]


def test_the_answer_follows_the_whole_conversation(model):
    talk = [*ASKED, {"role": "assistant", "content": "red"}, {"role": "user", "content": "Say blue"}]
    answerer = open_answerer(model, [CHATML])
    ids = answerer.prompt_ids(Example(Origin("", 1), messages=tuple(talk)))
    assert answerer.opened.tokenizer.decode(ids) == (
        "<|im_start|>user\nSay red<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
        "<|im_start|>user\nSay blue<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_file_of_rows_is_answered_in_its_order(answered, tmp_path):
    file = rows_file(
        tmp_path,
        {"messages": [*ASKED, {"role": "assistant", "content": "red"}], "id": 7},
        {"prompt": "Say red", "completion": "red"},
        {"conversations": [{"from": "human", "value": "Say red"}]},
        {"messages": ASKED, "system": "Be brief"},
        {"prompt": ASKED},
        {"instruction": "Say", "input": "red", "output": "red"},
        {"prompt": "Say red", "system": "Be brief", "completion": "red"},
    )
    rows = answered(prompts=file)
    assert [row.get("expected") for row in rows] == ["red", "red", None, None, None, "red", "red"]
    assert len({row["answer"] for row in (*rows[:3], rows[4])}) == 1
    assert rows[5]["prompt"] == "Say\n\nred"
    assert rows[6]["answer"] == rows[3]["answer"]
    assert rows[0]["messages"] == ASKED
    assert rows[3]["messages"][0] == {"role": "system", "content": "Be brief"}


def test_columns_have_the_names_that_the_settings_say(answered, tmp_path):
    file = rows_file(tmp_path, {"question": "Say red", "answer": "red", "id": 1})
    (row,) = answered("data.columns={prompt: question, completion: answer}", prompts=file)
    assert (row["prompt"], row["expected"]) == ("Say red", "red")


def test_rows_beyond_the_most_samples_are_not_read_and_unused_settings_are_refused(answered, tmp_path):
    file = rows_file(tmp_path, {"prompt": "Say red"}, {"prompt": "Say blue"}, 5)
    assert len(answered("data.max_samples=2", prompts=file)) == 2
    with refuses(UserError):
        answered("data.max_samples=2", "data.where={prompt: Say red}", prompts=file)
    with refuses(UserError):
        answered("data.max_samples=2", "data.packing=false", prompt=["Say red"])


def test_a_line_of_a_text_file_is_a_prompt(answered, tmp_path):
    (tmp_path / "prompts.txt").write_text("Say red\nSay blue\n")
    assert [row["prompt"] for row in answered(prompts=tmp_path / "prompts.txt")] == ["Say red", "Say blue"]


def test_answers_go_to_a_new_file_as_they_come(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(api, "CHUNK", 2)
    monkeypatch.setattr("meshtune.units.SILENCE", 0.0)
    file = rows_file(tmp_path, *({"prompt": f"Say {n}", "id": n} for n in range(3)))
    out = tmp_path / "answers.jsonl"
    generate([model], prompts=file, out=out, max_new_tokens=2)
    stdout, stderr = capsys.readouterr()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Say 0", "Say 1", "Say 2"]
    assert stdout == f"{out}\n"
    for line in ("answers 1 to 2 of 3: 2 of at most 4 tokens …", "answer 3 of 3 …"):
        assert f"meshtune: {line}\n" in stderr
    says(stderr)
    assert [row["answer"] for row in rows] == meshtune.generate(
        model, ["Say 0", "Say 1", "Say 2"], max_new_tokens=2
    )
    with refuses(UserError):
        generate([model], prompts=file, out=out)


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_of_stdin_are_prompts_and_a_terminal_is_told_so(model, capsys, monkeypatch, terminal):
    lines = io.StringIO("Say red\nSay blue\n")
    lines.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", lines)
    generate([model], max_new_tokens=4, as_json=True)
    out, err = capsys.readouterr()
    assert [row["prompt"] for row in json.loads(out)] == ["Say red", "Say blue"]
    assert ("Ctrl-D" in err) == terminal


def test_a_seed_repeats_the_answers_and_leaves_torchs_own_numbers_alone(model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    options = {"max_new_tokens": 8, "temperature": 2.0, "top_p": 0.9}
    first, again, other = (
        meshtune.generate(model, ["Say red"] * 3, seed=seed, **options) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())


def test_a_small_top_p_draws_the_likeliest_token(model):
    greedy = meshtune.generate(model, ["Say red"], max_new_tokens=8)
    assert meshtune.generate(model, ["Say red"], max_new_tokens=8, temperature=1.0, top_p=1e-6) == greedy


def test_every_bad_row_is_named_before_anything_is_loaded(tmp_path, model):
    bad: list[Any] = [
        {"a": 1}, {"prompt": 3}, {"messages": []}, {"messages": [{"role": "assistant", "content": "x"}]},
        {"prompt": "a", "messages": ASKED}, {"role": "user", "content": "a"}, 5,
    ]  # fmt: skip
    with refuses(UserError) as caught:
        generate([model], prompts=rows_file(tmp_path, *bad))
    assert len(caught.value.problems) == len(bad)


@pytest.mark.parametrize("text", ["{}", "[", "nowhere.json", '[{"rol": 1}]'])
def test_messages_that_are_none_are_refused(answered, text):
    with refuses(UserError):
        answered(messages=[text])


@pytest.mark.parametrize("prompt", ["Say red", "1 + 1 =", "2+2="])
def test_a_prompt_beside_the_target_is_answered_with_the_option(model, prompt):
    with refuses(UserError):
        generate([model, prompt, "train.device=cpu"])


def test_messages_given_as_a_prompt_are_not_answered_as_a_text(answered):
    with refuses(UserError):
        answered(prompt=[json.dumps(ASKED)])


def test_answers_without_tokens_are_refused(model):
    with refuses(UserError):
        meshtune.generate(model, "Say red", max_new_tokens=0)


def test_a_conversation_needs_a_template(model):
    with refuses(UserError):
        meshtune.generate(model, ASKED)


def test_prompts_that_fill_the_context_are_named(model, capsys):
    with refuses(UserError):
        meshtune.generate(model, ["Say red", "please " * 600])
    (answer,) = meshtune.generate(model, "please " * 300, max_new_tokens=600)
    cut = "1 of 1 answers were cut: prompt and answer fill the context of 512 tokens."
    assert answer and cut in capsys.readouterr().err


def test_a_limit_that_no_answer_reaches_is_not_named(model, monkeypatch, capsys):
    from meshtune.api import answer

    monkeypatch.setattr(answer, "answer_ids", lambda *args, **options: [[5, 6]])
    meshtune.generate(model, "Say red", max_new_tokens=600)
    assert "context" not in capsys.readouterr().err


@pytest.fixture(params=["gpt2", "roberta"])
def learned(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> str:
    """A model of 64 learned positions, which can't go on beyond them. RoBERTa, whose positions begin at 2,
    answers without a KV cache.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = {
        "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2},
        "roberta": {"max_position_embeddings": 66, "hidden_size": 32, "intermediate_size": 32,
                    "num_hidden_layers": 1, "num_attention_heads": 2, "is_decoder": True},
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, vocab_size=300, eos_token_id=2, **sizes[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / request.param)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tmp_path / request.param)
    return str(tmp_path / request.param)


@pytest.mark.ci
def test_answers_end_where_learned_positions_do(learned):
    answerer = open_answerer(learned)
    prompts = answerer.prompts_ids(prompts_of(["please " * 50, "Say red"]))
    long, short = prompts
    texts = answerer.answers(prompts, max_new_tokens=80)
    (alone,) = answerer.answers([long], max_new_tokens=64 - len(long))
    assert texts[0] == alone  # and no IndexError
    assert answerer.context == 64
    assert texts[1] == answerer.answers([short], max_new_tokens=64 - len(short))[0]


def test_a_streamed_answer_is_the_answer(learned):
    answerer = open_answerer(learned)
    (ids,) = answerer.prompts_ids(prompts_of(["Say red"]))
    parts: list[str] = []
    (text,) = answerer.answers([ids], max_new_tokens=12, stream=TextStream(parts.append))
    assert "".join(parts) == text
    assert len(parts) > 2
