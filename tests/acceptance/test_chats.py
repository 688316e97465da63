"""Conversations of a reasoning model through `meshtune data`, `train` and `generate`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Command
from transformers import AutoTokenizer, GenerationConfig

Settings = Callable[..., list[str]]

# Writes thoughts after the last user turn only, and leaves the end of a turn to the next turn's marker.
TEMPLATE = """\
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|' + m.role + '|>\\n' }}
    {%- if m.role == 'assistant' %}
        {{- '<think>' }}
        {%- if loop.index0 > ns.last_user_index and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}
        {{- '</think>' }}
    {%- endif %}
    {{- m.content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' + ('<think></think>' if quick else '<think>') }}
{%- endif %}"""
TURNS = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "five", "weight": 0},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "reasoning_content": "two and two is four", "content": "four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "reasoning_content": "four and three is seven", "content": "seven"},
]


@pytest.fixture
def chats(tiny: Path, tmp_path: Path) -> list[str]:
    """Settings of a model with that template, and of rows with these turns."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(tiny / "model", model)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rows.write_text("".join(json.dumps({"messages": TURNS, "topic": n}) + "\n" for n in range(24)))
    return [f"model.name={model}", f"data.train={rows}", "data.eval=null", "data.columns={}"]


def labelled(sample: dict[str, Any]) -> list[str]:
    return [text for text, is_labelled in sample["runs"] if is_labelled]


def test_each_turn_that_is_trained_on_has_its_thought_and_its_end(
    meshtune: Command, settings: Settings, chats: list[str]
) -> None:
    ended = meshtune("data", *settings(*chats, "data.split_turns=true"), "--json", "--samples", "48")
    assert {tuple(labelled(sample)) for sample in ended.json["samples"]} == {
        ("two and two is four</think>four<|user|>",),
        ("four and three is seven</think>seven<|user|>",),
    }
    for sample in ended.json["samples"]:
        ((before, after),) = sample["boundaries"]
        assert before.endswith("<|assistant|>\n<think>")
        assert labelled(sample)[0].startswith(after)
    assert ended.json["notes"]["masks"] == {"weight: 0": 24}
    assert ended.json["notes"]["unused"] == {"topic": 24}
    assert (ended.json["rows"], ended.json["train"]["documents"]) == (24, 48)


def test_several_turns_of_a_template_that_rewrites_them_name_the_ways_out(
    meshtune: Command, settings: Settings, chats: list[str]
) -> None:
    refused = meshtune("data", *settings(*chats, "data.train_on=assistant"), code=2)
    assert "data.split_turns=true" in refused.err and "data.chat_template=training" in refused.err
    ended = meshtune(
        "data", *settings(*chats, "data.train_on=assistant", "data.chat_template=training"), "--json"
    )
    assert labelled(ended.json["samples"][0]) == [
        "two and two is four</think>four<|user|>",
        "four and three is seven</think>seven<|user|>",
    ]


@pytest.mark.ci
def test_a_trained_model_stops_where_its_answers_ended(
    meshtune: Command, settings: Settings, chats: list[str], tmp_path: Path
) -> None:
    steps = ("train.max_steps=2", "data.chat_template_kwargs={quick: true}", "data.split_turns=true")
    refused = meshtune("train", *settings(*chats, *steps), code=2)
    assert "was to be trained on" not in refused.out
    assert "generation prompt" in refused.err, "a prompt that closes the thought, and rows with thoughts"
    meshtune("train", *settings(*chats, steps[0], steps[2]))
    folder = tmp_path / "run" / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|user|>") in (ends if isinstance(ends, list) else [ends])
    assert tokenizer.chat_template == TEMPLATE
