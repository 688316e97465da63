"""`meshtune eval`: held-out loss of a target."""

from typing import Any

from meshtune.commands.options import AsJson, TargetWords, show, target_of
from meshtune.units import duration, working

# As the lines of a run have them; numbers without a format are counts.
FORMATS = {
    "loss": "{:.4f}".format,
    "perplexity": "{:.4g}".format,
    "exact_match": "{:.1%}".format,
    "rewards/accuracies": "{:.1%}".format,
    "seconds": duration,
}
IN_SENTENCES = ("lost", "answers_cut", "prompts_without_room")
NAMES = {"exact_match": "exact match", "label_tokens": "labelled tokens", "seconds": "time"}


def evaluate(target: TargetWords, as_json: AsJson = False) -> None:
    """Loss and perplexity (or rewards) on held-out data, with answers compared word for word where asked
    (eval.exact_match=N).
    """
    name, overrides = target_of(target, "name one, and rows to evaluate on by data.eval=FILE.")
    from meshtune.api.evaluate import evaluated

    with working("loading the model and evaluating it") as show_count:
        figures = evaluated(name, overrides, show_count)
    from meshtune.meter.rows import unfinished_answers
    from meshtune.report.draw.document import Document, Notes
    from meshtune.report.draw.table import facts

    notes = [*figures.get("lost", ()), unfinished_answers(figures)]
    parts = (facts(rounded(figures), title="evaluation"), Notes([*filter(None, notes)]))
    show(Document("evaluation", parts, figures), as_json=as_json)


def rounded(figures: dict[str, Any]) -> dict[str, str]:
    numbers = {name: value for name, value in figures.items() if name not in IN_SENTENCES}
    return {
        NAMES.get(name, name): FORMATS.get(name, ("{:.4g}" if isinstance(value, float) else "{:,}").format)(
            value
        )
        for name, value in numbers.items()
    }
