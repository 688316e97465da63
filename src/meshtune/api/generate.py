"""Generate: answer prompts with a target."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshtune.errors import UserError
from meshtune.units import LOADING, on_screen, working

if TYPE_CHECKING:
    from meshtune.data.example import Example
    from meshtune.data.prompts import Prompt
    from meshtune.train.generate import Sampling

CHUNK = 512  # prompts that are answered before the first of them is given out


def generate(
    model: str | os.PathLike[str] | None,
    prompts: "Prompt | Sequence[Prompt]",
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Answers in the order of the prompts, without the prompts and the stop token.

    model: a run, model or adapter folder, a hub id or a config file; None: only `overrides`
    (section.key=value, as in train.device=cpu) name the model. prompts: texts, conversations (lists of
    messages {role, content}), or one of these. A text is wrapped as in training: by the chat template, or
    followed by the separator, which a model that was trained on whole texts does not get. temperature: 0
    is greedy. top_p, seed: see `Sampling`. Raises UserError without prompts, for those that the model
    can't take, and where `model` holds none.
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        prompts = cast("list[Prompt]", [prompts])
    on_screen(f"{LOADING['generate']} …")
    from meshtune.train.generate import Sampling

    rows = answer_rows(
        None if model is None else str(model), cast("Sequence[Prompt]", prompts), overrides=overrides,
        max_new_tokens=max_new_tokens, sampling=Sampling(temperature, top_p, seed),
    )  # fmt: skip
    return [row["answer"] for row in rows]


def answer_rows(
    name: str | None,
    prompts: "Sequence[Prompt]",
    file: Path | None = None,
    *,
    max_new_tokens: int,
    sampling: "Sampling",
    overrides: Sequence[str] = (),
    log: Callable[[str], None] = on_screen,
) -> Iterator[dict[str, Any]]:
    """Yield {prompt | messages, answer} for each prompt, then for each row of `file`, and `expected` where
    the row has it; CHUNK at a time, as they are answered.

    file: see `read_prompts`; its columns have the names that data.columns says, and data.max_samples counts
    where `overrides` has it. name, overrides: see `target_of` and `refuse_unused`. log: as of `working`; it
    counts answers and their tokens. Every prompt is checked before the first is answered. Raises UserError as
    `generate`.
    """
    from meshtune.api.answer import Answerer
    from meshtune.api.target import given_settings, open_model, refuse_unused, target_of
    from meshtune.data.example import Source
    from meshtune.data.prompts import prompts_of, read_prompts

    if not (prompts or file):
        raise UserError("No prompt is given; use --prompt, or write prompts to stdin, one a line.")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; an answer has at least 1.")
    examples, target = prompts_of(prompts), target_of(name, overrides)
    refuse_unused(overrides, of_file=file is not None)
    if file:
        data, given = target.config.data, given_settings(overrides).get("data", {})
        source = Source(
            str(file), columns=tuple(data.columns.items()), roles=tuple(data.roles.items()),
            max_samples=data.max_samples if "max_samples" in given else None,  # a run's is of its own rows
        )  # fmt: skip
        rows, unused = read_prompts(source)
        examples += rows
        if unused:
            print(f"{file}: columns that are not used: {', '.join(unused)}", file=sys.stderr)
    with working(LOADING["generate"], lambda _: None):  # the callers printed it already
        answerer = Answerer(open_model(target))
    ids = answerer.prompts_ids(examples)
    for first in range(0, len(ids), CHUNK):
        if sampling.seed is not None and first:
            sampling = replace(sampling, seed=sampling.seed + 1)
        chunk = ids[first : first + CHUNK]
        last = first + len(chunk)
        place = f"answers {first + 1:,} to {last:,}" if len(chunk) > 1 else f"answer {last:,}"
        with working(f"{place} of {len(ids):,}", log) as count:
            texts = answerer.answers(
                chunk, max_new_tokens=max_new_tokens, sampling=sampling,
                advance=partial(count_tokens, count, f"{place} of {len(ids):,}"),
            )  # fmt: skip
        for example, text in zip(examples[first:], texts, strict=False):
            yield row_of(example, text)
    if answerer.cut:
        print(
            f"{answerer.cut:,} of {len(ids):,} answers were cut: prompt and answer fill the context of "
            f"{answerer.context:,} tokens.",
            file=sys.stderr,
        )


def count_tokens(count: Callable[[str], None], place: str, *, done: int, total: int) -> None:
    """Show how many of the tokens that answers may have are done, after the place of the answers."""
    count(f"{place}: {done:,} of at most {total:,} tokens …")


def row_of(example: "Example", answer: str) -> dict[str, Any]:
    """{prompt | messages, answer}, and `expected` where the example has it."""
    from meshtune.data.prompts import expected, question

    asked = {"messages": list(question(example))} if example.messages else {"prompt": example.prompt}
    text = expected(example)
    return {**asked, **({"expected": text} if text else {}), "answer": answer}
