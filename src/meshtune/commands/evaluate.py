"""`meshtune eval`: held-out loss of a target."""

from meshtune.commands.options import AsJson, TargetWords, show, target_of


def evaluate(target: TargetWords, as_json: AsJson = False) -> None:
    """Loss and perplexity on held-out data, with answers compared word for word where asked
    (eval.exact_match=N).
    """
    name, overrides = target_of(target)
    from meshtune.api.evaluate import evaluated

    figures = evaluated(name, overrides)
    from meshtune.report.facts import facts_table

    show(figures, facts_table(figures, title="evaluation"), as_json=as_json)
