"""Label real conversations under real templates, and compare with transformers and with TRL's masks.

    make templates                                   docs/templates.md: TRL's wheel and llama.cpp's sources
    python validation/templates.py --folder DIR      templates of a folder, to the terminal

Each template gets a small byte-level tokenizer with its special tokens, and 19 conversations under
train_on=completion and assistant. Of every row that is accepted,

- the tokens before the first label are those that transformers writes as the prompt of the last answer, up
  to a thought that the prompt opens;
- the labels have the whole answer and no header of a turn, and end at a token that generation stops at,
  where the template writes one;
- where TRL has a form of the template with generation marks and it makes the same tokens, the labels are
  its mask (`same_labels`).
"""

import argparse
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "unit" / "data"), str(ROOT / "tests")]

import chat_templates as trl  # noqa: E402
from corpus import CONVERSATIONS, TOOL, assistant, call, user  # noqa: E402
from small_tokenizer import make_tokenizer  # noqa: E402

from meshtune.data.encode import Document, Encoder  # noqa: E402
from meshtune.data.example import BadRow, Example, Origin  # noqa: E402
from meshtune.data.messages import MARKERS  # noqa: E402
from meshtune.errors import UserError  # noqa: E402

ROWS = {name: turns for name, turns in CONVERSATIONS.items() if name != "special tokens as text"}
ROWS["text beside a call"] = [user("Hi?"), assistant("Let me look.", tool_calls=[call("two")])]
ROWS["two answers in a row"] = [user("Hi?"), assistant("Yes"), assistant("Indeed")]
TOP = """\
# Chat templates

What becomes of {rows} conversations under {count} chat templates that people use: those in the wheel of TRL {trl} and in the
sources of llama.cpp (llama-cpp-python {llama}). `make templates` wrote this page with transformers {transformers}.

Every accepted row is compared with transformers' own prompt and, where TRL has a form of the template with generation marks
that makes the same tokens, label by label with its mask. [data.md](data.md#labels-train_on) says which rows are refused, and why.

{summary}

| template | from | `completion` | `assistant` | compared with TRL | verdict | most refused for |
| --- | --- | --- | --- | --- | --- | --- |
"""  # noqa: E501


class Found(NamedTuple):
    """The results of one template."""

    name: str
    source: str
    accepted: dict[str, int]  # rows, by train_on
    compared: int  # rows whose labels were compared with TRL's
    faults: list[str]
    reasons: Counter[str]
    ends: bool  # whether it ends an answer with a special token

    @property
    def verdict(self) -> str:
        if self.faults:
            return "**WRONG**: " + "; ".join(sorted(set(self.faults)))
        if not any(self.accepted.values()):
            return "refused"
        return "right" if self.ends else "right, without an end token"


def encoder_of(name: str, text: str, train_on: str) -> Encoder:
    """An encoder with a small tokenizer that has the special tokens that the template writes."""
    tokens = trl.special_tokens(text)
    tokenizer = make_tokenizer(*(token for token in tokens if token not in ("<s>", "</s>")))
    try:
        written = tokenizer.apply_chat_template(ROWS["one turn"], chat_template=text, tokenize=False)
    except Exception:  # a template may refuse the row
        written = ""
    more = [token for token in trl.SPECIAL.findall(str(written)) if token not in tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": more}, replace_extra_special_tokens=False)
    tokenizer.chat_template = text
    stops = [int(tokenizer.convert_tokens_to_ids(stop)) for stop in trl.STOPS.get(name, ())]
    return Encoder(tokenizer, train_on=train_on, chat_template=None, stops=stops)  # pyright: ignore[reportArgumentType]


def faults_of(encoder: Encoder, row: str, document: Document) -> Iterator[str]:
    """Yield what is wrong with the labels of a row's last answer."""
    tokenizer, turns = encoder.tokenizer, encoder._renderer.adapt(ROWS[row])
    last = max(index for index, message in enumerate(turns) if message["role"] == "assistant")
    options: dict[str, Any] = {"tools": [TOOL] if "call" in row else None, "return_dict": False}
    prompt = tokenizer.apply_chat_template(turns[:last], add_generation_prompt=True, **options)
    answers = [index for index in range(last + 1) if turns[index]["role"] == "assistant"]
    answers = answers if encoder.train_on == "assistant" else answers[-1:]
    labels = np.flatnonzero(document.labelled)
    breaks = np.flatnonzero(np.diff(labels) > 1)
    start = int(labels[breaks[-1] + 1] if len(breaks) else labels[0])
    before, written = document.ids[:start].tolist(), str(tokenizer.decode(prompt)).rstrip()
    opened = before == prompt[:start] and written.endswith(tuple(MARKERS))
    header = encoder._renderer.generation_prompt.strip()
    follows = turns[last - 1]["role"] != "user" and before[: len(prompt)] == prompt  # then a header
    if before != prompt and not opened and not follows and len(breaks) == len(answers) - 1:
        yield "another prompt than transformers'"
    text = str(tokenizer.decode(document.ids[start : labels[-1] + 1]))
    answer = ROWS[row][last]["content"].rpartition("</think>")[2].strip()
    if answer not in text:
        yield "the answer is not labelled whole"
    if header and text.lstrip().startswith(header):
        yield "a header is labelled"
    end = int(document.ids[labels[-1]])
    unstopped = any(name == "unstopped" for name, _ in document.notes)
    if encoder._endings.answer.token is not None and end not in encoder.stop_ids and not unstopped:
        yield "the labels do not end at a stop"


def marked(encoder: Encoder, row: str, name: str) -> tuple[list[int], list[int]] | None:
    """(ids, mask of the assistant's tokens) by TRL's form of the template; None without one."""
    file = trl.folder() / f"{name}_training.jinja"
    if not file.is_file():
        return None
    try:
        made: Any = encoder.tokenizer.apply_chat_template(
            encoder._renderer.adapt(ROWS[row]), tools=[TOOL] if "call" in row else None,
            chat_template=file.read_text("utf-8"), return_assistant_tokens_mask=True, return_dict=True,
        )  # fmt: skip
    except Exception:  # a template may refuse the row
        return None
    return made["input_ids"], made["assistant_masks"]


def same_labels(encoder: Encoder, document: Document, mask: list[int]) -> bool:
    """Whether TRL's mask has the labels of a document.

    It may have more: what the generation prompt writes (a header, an opened thought), and what follows the
    end marker; it may lack a token of the next turn at which an answer ends.
    """
    theirs = np.array(mask[: len(document.ids)], bool)
    if any(int(id) not in encoder.stop_ids for id in document.ids[document.labelled & ~theirs]):
        return False
    prompt = encoder._renderer.generation_prompt
    for place in np.flatnonzero(theirs & ~document.labelled):
        run = next((n for n in range(place, len(document.ids)) if document.labelled[n]), None)
        before = "" if run is None else str(encoder.tokenizer.decode(document.ids[place:run]))
        token = int(document.ids[place])
        behind = document.labelled[:place].any() and (
            encoder._tokens.is_blank(token) or token in encoder._tokens.special
        )
        if not (before and prompt.rstrip().endswith(before.rstrip())) and not behind:
            return False
    return True


def found(name: str, text: str, source: str) -> Found:
    """Label all rows under one template."""
    accepted, faults, reasons, compared, ends = {}, [], Counter(), 0, False
    for train_on in ("completion", "assistant"):
        accepted[train_on] = 0
        try:
            encoder = encoder_of(name, text, train_on)
        except UserError as error:
            reasons[str(error)] += 1
            continue
        ends = encoder.templated and encoder._endings.answer.token is not None
        for row, turns in ROWS.items():
            tools = [TOOL] if "call" in row else None
            example = Example(Origin(row, 1), messages=tuple(turns), tools=tools)
            (result,) = encoder.encode_each([example])
            if isinstance(result, BadRow):
                reasons[result.reason] += 1
                continue
            accepted[train_on] += 1
            faults += [f"{fault} ({row})" for fault in faults_of(encoder, row, result)]
            if train_on == "assistant" and (other := marked(encoder, row, name)):
                ids, mask = other
                if ids[: len(result.ids)] == result.ids.tolist() and any(mask):
                    compared += 1
                    if not same_labels(encoder, result, mask):
                        faults.append(f"other labels than TRL's ({row})")
    return Found(name, source, accepted, compared, faults, reasons, ends)


def line(one: Found) -> str:
    refused = ", ".join(f"{reason} {count}" for reason, count in one.reasons.most_common(2))
    taken = [f"{one.accepted[train_on]} of {len(ROWS)}" for train_on in ("completion", "assistant")]
    cells = [one.name, one.source, *taken, str(one.compared or "–"), one.verdict, refused or "–"]
    return f"| {' | '.join(cell.replace('|', '¦').replace(chr(10), ' ') for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="with *.jinja, also below it"
    )
    parser.add_argument("--sdist", type=Path, help="source distribution of llama-cpp-python")
    parser.add_argument("--page", type=Path, help="write the table to this page")
    given = parser.parse_args()
    every = [(name, trl.template(name), "TRL") for name in all_of_trl()]
    every += [(name, text, "llama.cpp") for name, text in of_sdist(given.sdist)] if given.sdist else []
    for folder in given.folder:
        every += [
            (file.stem, file.read_text("utf-8"), folder.name) for file in sorted(folder.rglob("*.jinja"))
        ]
    results = []
    for name, text, source in every:
        results.append(found(name, text, source))
        print(line(results[-1]), flush=True)
    kinds = Counter(one.verdict.split(":")[0].split(",")[0].strip("*") for one in results)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    rows = sum(sum(one.accepted.values()) for one in results)
    summary += (
        f"; {rows:,} rows accepted, {sum(one.compared for one in results):,} compared with TRL's masks."
    )
    print(summary)
    if given.page:
        top = TOP.format(
            rows=len(ROWS), count=len(results), trl=version("trl"),
            llama=given.sdist.name.removesuffix(".tar.gz").rpartition("-")[2],
            transformers=version("transformers"), summary=summary,
        )  # fmt: skip
        given.page.write_text(top + "\n".join(map(line, results)) + "\n", encoding="utf-8")
    sys.exit(any(one.faults for one in results))


def of_sdist(file: Path) -> list[tuple[str, str]]:
    """(name, text) of the templates in a source distribution of llama-cpp-python."""
    with tarfile.open(file) as archive:
        members = [one for one in archive if re.search(r"/models/templates/[^/]+\.jinja$", one.name)]
        files = {Path(one.name).stem: archive.extractfile(one) for one in members}
        return [(name, file.read().decode("utf-8")) for name, file in sorted(files.items()) if file]


def all_of_trl() -> list[str]:
    return [file.stem for file in sorted(trl.folder().glob("*.jinja")) if not file.stem.endswith("_training")]


if __name__ == "__main__":
    main()
