"""Rows of preferences: each tool's form of them, what is labelled, and which are refused."""

import io
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from chat_templates import template
from corpus import assistant, user
from data_rows import prepare
from golden import refuses, says
from rich.console import Console
from small_tokenizer import make_tokenizer
from trl.data_utils import apply_chat_template, extract_prompt

from meshtune.data.batch import held_out_mismatched
from meshtune.data.encode import Encoder
from meshtune.data.example import Source
from meshtune.data.inspect import describe
from meshtune.data.loader import Loader
from meshtune.data.pack import LABELLED, PROMPT, Dataset, Document, ids_of_stored, in_memory
from meshtune.data.prepare import Prepared, sentences
from meshtune.errors import UserError
from meshtune.objectives import OBJECTIVES
from meshtune.report.data import document

SYSTEM = {"role": "system", "content": "You are kind"}
PAIR = {"chosen": [user("Hi"), assistant("Hello")], "rejected": [user("Hi"), assistant("No")]}
FULL = {side: [SYSTEM, *messages] for side, messages in PAIR.items()}
ANSWERS = {"chosen": "Hello", "rejected": "No"}
HUMAN = "\n\nHuman: Hi\n\nAssistant:"


def encoder_of(objective: str, **settings: Any) -> Encoder:
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>", eos_token="<|im_end|>")
    tokenizer.chat_template = template("plain_chatml")
    settings = {"train_on": "completion", "chat_template": None} | settings
    return Encoder(tokenizer, objective=OBJECTIVES[objective], **settings)


@pytest.fixture
def prepared_of(tmp_path):
    def prepared_of(
        *rows: dict[str, Any], objective="dpo", columns=None, encoder=None, row_format="auto", **settings: Any
    ) -> Prepared:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = Source(str(file), columns=tuple((columns or {}).items()), format=row_format)
        encoder = encoder or encoder_of(objective, on_bad_row=settings.get("on_bad_row", "error"))
        settings = {"seq_len": 256, "cache_dir": tmp_path / "cache"} | settings
        return prepare([source], encoder, **settings)

    return prepared_of


def texts(data: Dataset, encoder: Encoder | None = None) -> list[tuple[str, str]]:
    """(whole text, labelled text) of each answer, in the order of the sequences."""
    tokenizer = (encoder or encoder_of("dpo")).tokenizer
    answers = [answer for sequence in range(len(data)) for answer in data.answers(sequence)]
    masks = [(answer & LABELLED) != 0 for answer in answers]
    return [
        (str(tokenizer.decode(ids_of_stored(a))), str(tokenizer.decode(ids_of_stored(a[mask]))))
        for a, mask in zip(answers, masks, strict=True)
    ]


def of_trl(pair: Any) -> list[str]:
    """The text of each side, as TRL renders it."""
    rendered: Any = apply_chat_template(extract_prompt(pair), encoder_of("dpo").tokenizer)
    return [rendered["prompt"] + rendered[side] for side in ("chosen", "rejected")]


PARTS = {side: [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
         for side, messages in PAIR.items()}  # fmt: skip
FORMS = {  # row -> the same pair as TRL's implicit prompt, names of columns
    "trl": ({"prompt": "Hi"} | ANSWERS, PAIR, {}),
    "trl, messages": ({"prompt": [user("Hi")]} | {s: m[1:] for s, m in PAIR.items()}, PAIR, {}),
    "trl, implicit": (PAIR, PAIR, {}),
    "trl, repeated": ({"prompt": [user("Hi")]} | PAIR, PAIR, {}),
    "trl, system in the prompt": ({"prompt": [SYSTEM, user("Hi")]} | PAIR, FULL, {}),
    "ultrafeedback": ({"prompt": "Hi", "messages": PAIR["chosen"], "score_chosen": 8.0} | PAIR, PAIR, {}),
    "json text, as in csv": ({side: json.dumps(messages) for side, messages in PAIR.items()}, PAIR, {}),
    "axolotl, chat template": (
        {"messages": [SYSTEM, user("Hi")]} | {s: m[1] for s, m in PAIR.items()}, FULL, {}
    ),
    "axolotl, intel": (
        {"system": "You are kind", "question": "Hi"} | ANSWERS, FULL, {"prompt": "question"}
    ),
    "axolotl, argilla": (
        {"instruction": "Hi", "chosen_response": "Hello", "rejected_response": "No"}, PAIR,
        {"instruction": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    ),
    "llama-factory, sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}], "system": "You are kind"}
        | {side: {"from": "gpt", "value": text} for side, text in ANSWERS.items()}, FULL, {},
    ),
    "llama-factory, alpaca": ({"instruction": "Hi", "input": ""} | ANSWERS, PAIR, {}),
    "llama-factory, v1": (
        {f"{side}_messages": messages for side, messages in PARTS.items()}, PAIR,
        {side: f"{side}_messages" for side in PARTS},
    ),
    "a copy of one side": ({"messages": PAIR["chosen"]} | PAIR, PAIR, {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_tools_pairs_become_both_sides_as_trl_renders_them(prepared_of, form) -> None:
    row, pair, columns = FORMS[form]
    data = prepared_of(row, columns=columns).train

    (chosen, rejected) = texts(data)
    assert [chosen[0], rejected[0]] == of_trl(pair)
    assert [chosen[1], rejected[1]] == ["Hello<|im_end|>", "No<|im_end|>"]
    (first, labels, *_), whole = data.sides[0].tolist(), len(data.documents(0)[0])
    assert (first, labels, len(data.documents(0))) == (len(data.answers(0)[0]), 2, 1)
    assert data.longest_document == max(first, whole - first)
    assert data.mean_document_tokens == pytest.approx((first**2 + (whole - first) ** 2) / whole)


def test_the_prompt_is_what_both_sides_share_and_every_answer_behind_it_is_labelled(prepared_of) -> None:
    begin = [user("Hi"), assistant("Hello"), user("So?")]
    row = {
        "chosen": [*begin, assistant("Yes"), user("?"), assistant("Done")],
        "rejected": [*begin, assistant("No"), user("!")],
    }
    chosen, rejected = texts(prepared_of(row).train)
    assert chosen[1] == "Yes<|im_end|>Done<|im_end|>" and rejected[1] == "No<|im_end|>"


def test_the_mark_of_a_trained_prompt_is_on_the_chosen_side_only(prepared_of) -> None:
    data = prepared_of({"prompt": "Hi"} | ANSWERS, objective="orpo").train
    chosen, rejected = data.answers(0)
    prompt = len(chosen) - 3  # without the answer's two tokens and the line break behind them
    assert ((chosen & PROMPT) != 0).tolist() == [0 < at < prompt for at in range(len(chosen))]
    assert not (rejected & PROMPT).any() and not (chosen & rejected[: len(chosen)] & PROMPT & LABELLED).any()
    plain = prepared_of({"prompt": "Hi"} | ANSWERS).train
    assert np.array_equal(ids_of_stored(data.tokens), ids_of_stored(plain.tokens))
    assert not (plain.tokens & PROMPT).any() and data.digest != plain.digest


# Texts #


def test_texts_are_cut_where_the_assistant_begins_never_inside_a_word(prepared_of) -> None:
    said = {"chosen": f"{HUMAN} I am fine", "rejected": f"{HUMAN} I am four"}
    encoder = encoder_of("dpo", chat_template="none")
    assert [answer for _, answer in texts(prepared_of(said, encoder=encoder).train, encoder)] == [
        " I am fine<|im_end|>", " I am four<|im_end|>",
    ]  # fmt: skip
    rendered = dict(zip(ANSWERS, of_trl(PAIR), strict=True))
    assert [answer for _, answer in texts(prepared_of(rendered).train)] == ["Hello<|im_end|>", "No<|im_end|>"]


def test_a_prompt_that_both_texts_begin_with_is_not_written_twice(prepared_of) -> None:
    prompt = "What is two plus two?"
    prepared = prepared_of({"prompt": prompt, "chosen": f"{prompt} Four", "rejected": f"{prompt} Two"})
    whole, answer = texts(prepared.train)[0]
    assert whole.count(prompt) == 1 and answer == "Four<|im_end|>"
    says(sentences(prepared.stats))
    echo = prepared_of({"prompt": "Hello", "chosen": "Hello there", "rejected": "Hello?"})  # answers
    assert texts(echo.train)[0][1] == "Hello there<|im_end|>"


# Refusals #


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "Hi", "chosen": "No", "rejected": "No"}, {}),
        ({"prompt": "Hi", "chosen": "No", "rejected": " "}, {}),
        ({"prompt": [user("Hi")], "chosen": [assistant("No")], "rejected": [assistant("")]}, {}),
        ({"prompt": "Hi", "chosen": "No", "rejected": None}, {}),
        ({"chosen": PAIR["chosen"], "rejected": [user("Ho"), assistant("No")]}, {}),
        ({"chosen": PAIR["chosen"], "rejected": [*PAIR["chosen"], user("?"), assistant("No")]}, {}),
        ({"chosen": PAIR["chosen"], "rejected": [user("Hi")]}, {}),
        ({"chosen": [assistant("Yes")], "rejected": [assistant("No")]}, {}),
        ({"prompt": "Ho"} | PAIR, {}),
        ({"prompt": "Hi", "chosen": [assistant("Yes") | {"weight": 0}], "rejected": "No"}, {}),
        ({"chosen": "The answer is 42", "rejected": "The answer is 43"}, {}),
        ({"chosen": f"{HUMAN} a\n\nHuman: b", "rejected": f"{HUMAN} a\n\nHuman: c"}, {}),
        ({"question": "Hi"} | ANSWERS, {}),
        ({"instruction": "Hi", "chosen_response": "a", "rejected_response": "b"}, {}),
        ({"prompt": "Hi", "completion": "No", "label": True}, {}),
        ({"prompt": "Hi", "completion": "No"}, {"objective": "kto"}),
        ({"prompt": "Hi", "completion": "No", "label": 3}, {"objective": "kto"}),
        ({"prompt": "Hi"} | ANSWERS, {"objective": "sft"}),
        ({"text": "Hi"}, {"row_format": "text"}),
    ],
)  # fmt: skip
def test_rows_without_two_answers_to_one_prompt_are_refused(prepared_of, row, settings) -> None:
    with refuses(UserError):
        prepared_of(row, **settings)


def test_bad_pairs_are_left_out_and_counted(prepared_of) -> None:
    bad = [
        {"prompt": "Hi", "chosen": "No", "rejected": "No"},
        {"chosen": "a", "rejected": "b", "prompt": None},
    ]
    unwritten = {"prompt": [user("Hi")], "chosen": [assistant("No")], "rejected": [assistant(" ")]}
    prepared = prepared_of(*bad, unwritten, {"prompt": "Hi"} | ANSWERS, on_bad_row="skip")
    says(sentences(prepared.stats))


# Judged answers #


@pytest.mark.parametrize("label", [True, False, 1, 0, "True", "false", "0", 1.0])
def test_an_answer_is_good_or_bad_as_its_label_says(prepared_of, label) -> None:
    good = label in (True, "True")
    row = {"prompt": "Hi", "completion": "Hello"}
    data = prepared_of(row | {"label": label}, objective="kto").train
    assert data.sides.tolist() == [(0, 2, 0, 0.0, good)]
    assert texts(data) == [(of_trl(PAIR)[0], "Hello<|im_end|>")]
    turns = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
    row = {"conversations": turns, "kto_tag": label}
    other = prepared_of(row, objective="kto", columns={"label": "kto_tag"}).train
    assert np.array_equal(other.tokens, data.tokens) and np.array_equal(other.sides, data.sides)
    swapped = prepared_of({"prompt": "Hi", "completion": "Hello", "label": not good}, objective="kto")
    assert swapped.train.digest != data.digest


@pytest.mark.parametrize("row", [PAIR, dict(zip(ANSWERS, of_trl(PAIR), strict=True))])
def test_a_pair_is_a_good_and_a_bad_answer_where_answers_are_judged(prepared_of, row) -> None:
    prepared = prepared_of(row, objective="kto", packing=False)
    assert [one[-1] for one in prepared.train.sides.tolist()] == [True, False]
    assert not prepared.train.sides["first"].any()
    assert [answer for _, answer in texts(prepared.train)] == ["Hello<|im_end|>", "No<|im_end|>"]
    says(sentences(prepared.stats))


# Lengths, held-out pairs, streams #


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "seq_len", "kept"),
    [
        (1, 3, 30, 20, [(6, 14)]), (1, 30, 3, 20, [(14, 6)]), (1, 30, 31, 20, [(10, 10)]),
        (1, 30, 31, 21, [(11, 10)]), (1, 7, 7, 20, [(10, 10)]), (7, 30, 31, 20, [(10, 10)]),
        (12, 30, 31, 20, []),  # no answer is left
        (1, 30, 40, 200, [(33, 43)]),
    ],
)  # fmt: skip
def test_a_pair_that_is_cut_shares_the_sequence(prepared_of, prompt, chosen, rejected, seq_len, kept) -> None:
    """A side has a token of each letter of the prompt, a line break, one of each letter, and the end."""
    row = {"prompt": "z" * prompt, "chosen": "q" * chosen, "rejected": "z" * rejected}
    encoder, short = encoder_of("dpo", chat_template="none"), {"prompt": "z", "chosen": "q", "rejected": "z"}
    settings = {"encoder": encoder, "packing": False, "overlong": "cut"}
    data = prepared_of(short, row, seq_len=seq_len, **settings).train
    sides = [tuple(map(len, data.answers(sequence))) for sequence in range(len(data))]
    assert sides[1:] == kept
    labelled = [[int((side & LABELLED != 0).sum()) for side in data.answers(s)] for s in range(len(data))]
    assert data.labels.tolist() == [sum(pair) for pair in labelled]
    assert data.sides["labels"].tolist() == [pair[0] for pair in labelled]


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_a_shared_prompt_is_stored_once_but_for_its_last_token(prepared_of, objective) -> None:
    rows = [FULL, {side: [user("Say it"), assistant(f"So {side}")] for side in PAIR}]
    encoder = encoder_of(objective, shared_prompts=True)
    prepared, whole = prepared_of(*rows, encoder=encoder), prepared_of(*rows, objective=objective).train
    data = prepared.train
    given = zip(data.answers(0), data.shared(0), whole.answers(0), strict=True)
    for number, (answer, shared, expected) in enumerate(given):
        assert number % 2 == (shared > 0)
        first = data.answers(0)[number - 1][:shared] & ~PROMPT
        assert np.array_equal(np.append(first, answer), expected)
        assert not answer[0] & LABELLED and (not shared or answer[1] & LABELLED)
    shared = sum(data.shared(0))
    assert data.token_count == whole.token_count - shared and data.label_tokens == whole.label_tokens
    assert data.longest_document == whole.longest_document
    pairs = whole.mean_document_tokens * whole.token_count - (data.sides["shared"] ** 2).sum()
    assert data.mean_document_tokens * data.token_count == pytest.approx(pairs)
    samples = describe(prepared, encoder.tokenizer)["samples"]
    assert sum(sample["tokens"] for sample in samples) == data.token_count
    assert {side["runs"][0][1] for sample in samples for side in sample["sides"]} == {False}


def test_sides_that_differ_behind_the_cut_only_are_dropped(prepared_of) -> None:
    encoder, same = encoder_of("dpo", chat_template="none"), "z" * 30
    rows = [{"prompt": "z", "chosen": f"{same}q", "rejected": f"{same}y"}, {"prompt": "Hi"} | ANSWERS]
    says(sentences(prepared_of(*rows, seq_len=20, overlong="cut", encoder=encoder).stats))


def test_pairs_that_are_too_long_are_dropped_counted_or_refused(prepared_of) -> None:
    rows = [{"prompt": "Hi"} | ANSWERS, {"prompt": "Hi" * 20, "chosen": "Yes" * 40, "rejected": "No" * 40}]
    for overlong in ("auto", "cut"):
        says(sentences(prepared_of(*rows, seq_len=64, overlong=overlong).stats))
    with refuses(UserError):
        prepared_of(*rows, seq_len=64, overlong="error")


def test_pairs_stay_whole_in_packs_held_out_parts_and_streams(prepared_of) -> None:
    rows = [{"prompt": f"{i}?", "chosen": f"{i}" + "y" * (i % 7), "rejected": f"{i}no"} for i in range(40)]
    prepared = prepared_of(*rows, seq_len=128, eval_split=8)
    every = []
    for data in (prepared.train, prepared.eval):
        for sequence in range(len(data)):
            answers, documents = data.answers(sequence), data.documents(sequence)
            pairs = list(zip(answers[::2], answers[1::2], strict=True))
            assert all(np.array_equal(np.concatenate(p), d) for p, d in zip(pairs, documents, strict=True))
            every += [tuple(answer.tobytes() for answer in pair) for pair in pairs]
    assert len(set(every)) == len(every) == 40 and len(prepared.train.members) == 32
    again = prepared_of(*rows, seq_len=128, eval_split=8)
    assert (again.stats["cache"], again.digest) == ("found", prepared.digest)
    assert np.array_equal(again.train.sides, prepared.train.sides)
    window, *_ = next(iter(prepared_of(*rows, seq_len=128, streaming=True).train.windows(
        {"rows": [0], "passes": [0], "taken": [0]})))  # fmt: skip
    streamed = [window.answers(sequence) for sequence in range(len(window))]
    found = {tuple(a.tobytes() for a in each[i : i + 2]) for each in streamed for i in range(0, len(each), 2)}
    assert found == set(every)


# Shown #


@pytest.mark.parametrize("objective", ["orpo", "kto"])
def test_meshtune_data_shows_each_side_and_what_is_labelled(prepared_of, objective) -> None:
    prepared = prepared_of({"prompt": "Hi"} | ANSWERS, objective=objective, packing=objective == "orpo")
    described = describe(prepared, encoder_of(objective).tokenizer)
    file = io.StringIO()
    Console(file=file, width=200).print(document(described))
    lines = [line for line in file.getvalue().splitlines() if line.strip()]
    says("\n".join("rows.jsonl:1" if "rows.jsonl" in line else line for line in lines))
    assert json.loads(json.dumps(described)) == described


def test_a_batch_of_one_judged_row_is_refused(prepared_of) -> None:
    rows = [{"prompt": "Hi", "completion": answer, "label": True} for answer in ("Hello", "No", "Yes")]
    data = prepared_of(*rows, objective="kto", packing=False).train
    loader = partial(Loader, data, micro_batch_size=1, seed=0, epochs=1)
    (batch, _), *_ = loader(global_batch_size=3)
    assert sum(each.units for each in batch.mismatched) == 3
    with pytest.raises(UserError, match="a global batch has one row"):
        next(iter(loader(global_batch_size=1)))


def test_held_out_prompts_get_the_answer_of_the_next_row_however_rows_are_packed() -> None:
    documents = [Document(np.arange(4), np.arange(4) > 1)] * 3
    data = in_memory(documents, np.array([1, 0, 2]), np.array([0, 2, 3]), seq_len=8, packed=True)
    keys = held_out_mismatched(data).keys
    assert keys is not None and keys.tolist() == [1 * 3 + 1, 2 * 3 + 2, 3 * 3 + 0]
