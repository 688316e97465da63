"""Evaluate: held-out loss of a target."""

from collections.abc import Callable
from typing import Any

from meshtune.errors import UserError


def evaluated(
    name: str | None, overrides: list[str], show: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The row of `eval_row`, without kind and step: held-out loss, perplexity and, if asked for, exact match;
    "lost": sentences on documents that were cut or dropped, where data.eval has some.

    name, overrides: as `target_of` takes them. Held-out data are data.eval, else a part of data.train
    (data.eval_split, which data.eval in `overrides` replaces). show: is called with the batches, then the
    prompts, done so far. Raises UserError without either, and where
    `name` holds no model.
    """
    from meshtune.api.resolve import data_of
    from meshtune.api.target import open_model, target_of
    from meshtune.data.pack import Dataset
    from meshtune.data.prepare import lost_sentences
    from meshtune.model.body import ATTENTION_NAMES
    from meshtune.train.evaluate import Evaluation
    from meshtune.train.trackers import Metrics

    if any(override.startswith("data.eval=") for override in overrides):
        overrides = ["data.eval_split=0", *overrides]
    target = target_of(name, overrides)
    config = target.config
    if config.objective != "sft":
        raise UserError(
            f"The run was trained with objective={config.objective}, whose evaluations are in its report; "
            "`meshtune eval` takes the loss of answers: add objective=sft data.eval=FILE, with rows of "
            "prompts and answers."
        )
    if not config.data.eval and not config.data.eval_split:
        raise UserError(
            "There is nothing to evaluate on; add data.eval=FILE (or data.eval_split) to the command."
        )
    opened = open_model(target)
    data = config.data
    if opened.model.config._attn_implementation not in ATTENTION_NAMES:
        data = data.model_copy(update={"packing": False})
    if data.eval:  # held-out data of its own: what was trained on may be gone
        data = data.model_copy(update={"train": data.eval, "eval": (), "eval_split": 0, "streaming": False})
        prepared = data_of(data, opened.encoder, seed=config.train.seed)
        held_out, lost = prepared.train, [*lost_sentences(prepared.stats)]
        lost += ["a larger data.seq_len keeps more"] * bool(prepared.stats["cut"]["documents"])
        assert isinstance(held_out, Dataset), "only streaming gives a stream"
    else:
        held_out, lost = data_of(data, opened.encoder, seed=config.train.seed).eval, []
    evaluation = Evaluation(
        parallel=opened.parallel,
        tokenizer=opened.tokenizer,
        dataset=held_out,
        micro_batch_size=4,
        max_new_tokens=config.eval.max_new_tokens,
        exact_match=config.eval.exact_match,
        stop_ids=opened.encoder.stop_ids,
    )
    rows = Rows(show)
    evaluation.run(target.step or 0, Metrics([rows]))
    figures = {key: value for key, value in rows.last.items() if key not in ("kind", "step")}
    return figures | ({"lost": lost} if lost else {})


class Rows:
    """A tracker that keeps the last row that was logged, in `last`; {} before any."""

    shows_progress = True  # takes the rows of kind "evaluating"

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self.show = show  # gets how far an evaluation is
        self.last: dict[str, Any] = {}

    def log(self, row: dict[str, Any]) -> None:
        if row["kind"] != "evaluating":
            self.last = row
        elif self.show:
            self.show(f"evaluating: {row['done']:,} of {row['total']:,} {row['unit']}")

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: there is no file or connection to close."""
