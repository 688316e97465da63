"""Prepared data as a document, for `meshtune data`: figures, lengths, and samples with labels marked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.text import Text

from meshtune.data.example import DOCUMENTS
from meshtune.errors import quoted
from meshtune.report.draw.document import Document, InTerminal, Notes
from meshtune.report.draw.table import Column, Table
from meshtune.units import counted, printable

BAR_WIDTH = 40  # characters of the longest bar
LABELLED_STYLE = "bold green"
DEFINED = {  # sentence by the name of what a row becomes
    "document": "A document is a row (or a turn of it) as the model reads it; the loss is over its labelled "
    "tokens only.",
    "pair": "A pair is two documents in one sequence: the chosen answer with its prompt, then the rejected "
    "one with its prompt, which data.shared_prompts computes once. Their labelled tokens are compared.",
    "answer": "An answer is a document with its prompt, and good or bad; its labelled tokens count.",
}
LONG = {"document": "documents", "pair": "sides of pairs", "answer": "answers"}
BEGIN, END = "[[", "]]"  # around labelled text on terminals without colours


def document(description: Mapping[str, Any]) -> Document:
    """Figures, sentences on them and on rows left out, a histogram of training document lengths, and samples.

    description: as `data.inspect.describe` returns it.
    """
    cut = description["cut"]
    parts = (
        figures(description),
        Notes([*_explained(description)]),
        Notes([*map(printable, description["sentences"])], "yellow"),
        histogram(
            description["train"]["histogram"],
            description["seq_len"] * bool(cut["documents"]),
            DOCUMENTS[description["kind"]],
        ),
        InTerminal(Samples(description["samples"])),
    )
    return Document("Data", parts, description)


@dataclass(frozen=True)
class Samples:
    """Documents with their labels in colour or, without colours, in brackets."""

    samples: Sequence[Mapping[str, Any]]  # as `describe` returns them

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.is_terminal and not console.no_color
        legend = Text("this colour", LABELLED_STYLE) if coloured else Text(f"{BEGIN}brackets{END}")
        yield Text("Samples; labelled text is in ").append(legend).append(".")
        for sample in self.samples:
            yield Rule(Text(printable(f"{sample['place']}: {_size(sample)}")), align="left")
            for answer in sample.get("sides", [sample]):
                if name := answer.get("name"):
                    yield Text(f"{name}: {_size(answer)}", "bold")
                yield Text.assemble(
                    *(marked(printable(text), labelled, coloured) for text, labelled in answer["runs"])
                )
                for before, after in answer["boundaries"]:
                    sides = (quoted(printable(side)) for side in (before, after))
                    yield Text(f"labels begin between {' and '.join(sides)}")


def _size(answer: Mapping[str, Any]) -> str:
    return f"{answer['tokens']:,} tokens, {answer['label_tokens']:,} labelled"


def marked(text: str, labelled: bool, coloured: bool) -> Text:
    """Text of a run of tokens, its labels by a colour or, without one, by brackets."""
    if coloured or not labelled:
        return Text(text, LABELLED_STYLE if labelled else "dim")
    return Text(f"{BEGIN}{text}{END}")


def figures(description: Mapping[str, Any]) -> Table:
    """Counts of documents, sequences and tokens, one column for each split."""
    splits = [name for name in ("train", "eval") if description[name]]
    name = DOCUMENTS[description["kind"]]
    judged = [("good answers", "good", "{:,}")] * (description["kind"] == "judged")
    rows = [
        (title, *(form.format(description[name][key]) for name in splits))
        for title, key, form in (
            (f"{name}s", "documents", "{:,}"),
            *judged,
            ("sequences", "sequences", "{:,}"),
            ("tokens", "tokens", "{:,}"),
            ("labelled tokens", "label_tokens", "{:,}"),
            ("labelled share of the tokens", "label_share", "{:.1%}"),
            (f"tokens per {name}", "mean_length", "{:,.0f}"),
            ("data.mean_document_tokens", "mean_document_tokens", "{:,.0f}"),
            (f"longest {name}", "longest", "{:,}"),
        )
    ]
    if any(description[name]["packed"] for name in splits):
        title = f"filled share of {description['seq_len']:,} tokens a sequence"
        rows.append((title, *(f"{description[name]['efficiency']:.1%}" for name in splits)))
    title = f"Data: {counted(description['rows'], 'row')} read ({description['of']})"
    return Table.of_rows(title, ("", *splits), rows, ("",))


def histogram(bars: Sequence[Mapping[str, int]], cut_to: int = 0, name: str = "document") -> Table:
    """The number of documents by length, with a bar for each range of lengths.

    cut_to: tokens that longer documents were cut to; 0: none was. name: of a document.
    """
    most = max(bar["documents"] for bar in bars)
    lengths, drawn = [], []
    for bar in bars:
        full, part = divmod(round(bar["documents"] / most * BAR_WIDTH * 8), 8)
        drawn.append("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else ""))
        lengths.append(f"{bar['from']:,}–{bar['to']:,}" if bar["from"] < bar["to"] else f"{bar['to']:,}")
    counts = [f"{bar['documents']:,}" for bar in bars]
    columns = (Column("", lengths), Column("", drawn, words=True, style="cyan"), Column("", counts))
    title = f"{name.capitalize()} lengths in tokens{f', longer ones cut to {cut_to:,}' * bool(cut_to)}"
    return Table(title, columns)


def _explained(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences that tell figures apart that look alike."""
    train, seq_len, cut = description["train"], description["seq_len"], description["cut"]
    name, prompts = DOCUMENTS[description["kind"]], description["trained_prompts"]
    yield DEFINED[name] + " The prompts of chosen answers are trained on too, by cross entropy." * prompts
    if cut["documents"]:
        yield (
            f"Lengths are those after the cut: before, {counted(cut['documents'], name)} had more than "
            f"{seq_len:,} tokens, {seq_len + cut['tokens'] / cut['documents']:,.0f} on average."
        )
    if train["packed"]:
        yield (
            f"A sequence is one row of a batch: {name}s packed into at most {seq_len:,} tokens. "
            "train.global_batch_size counts sequences."
        )
    else:
        yield f"Without packing each {name} is a sequence; train.global_batch_size counts sequences."
    yield (
        f"tokens per {name} is the mean over {name}s; data.mean_document_tokens is the mean over tokens, "
        f"in which long {LONG[name]} count more (attention costs that much, and `meshtune plan` takes it)."
    )
