"""Evaluate: held-out loss of a target."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshtune.config import Config
from meshtune.errors import UserError, expanded
from meshtune.layout import Layout

if TYPE_CHECKING:
    from meshtune.api.target import Target
    from meshtune.data.encode import Encoder
    from meshtune.data.prepare import Prepared

MICRO_BATCH = 4  # sequences of a forward pass


def evaluated(
    name: str | None, overrides: list[str], show: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The row of `eval_row`, without kind and step, and of a reward model, which has no labels, without their
    number: held-out loss, perplexity or what a loss on whole answers measures, and, if asked for, exact
    match; "lost": sentences on documents that were cut or dropped, where data.eval has some.

    name, overrides: as `target_of` takes them. Held-out data are data.eval, else a part of data.train
    (data.eval_split, which data.eval in `overrides` replaces). show: is called with the batches, then the
    prompts, done so far. Raises UserError without either, and where
    `name` holds no model, or nothing to compare it with by an objective with a reference.
    """
    from meshtune.api.resolve import preference_of
    from meshtune.api.target import open_model, target_of
    from meshtune.model.body import ATTENTION_NAMES
    from meshtune.train.evaluate import Evaluation
    from meshtune.train.preference import Preference
    from meshtune.train.trackers import Metrics

    named = any(override.startswith("data.eval=") for override in overrides)
    target = target_of(name, ["data.eval_split=0", *overrides] if named else overrides)
    config = target.config
    if not config.data.eval and not config.data.eval_split:
        raise UserError(
            "There is nothing to evaluate on; add data.eval=FILE (or data.eval_split) to the command."
        )
    preference = preference_of(config)
    if preference and preference.row.reference:
        # First: the reference and the trained weights are never in memory together.
        (held_out, lost), opened = compared(target, preference.reference, named), open_model(target)
    else:
        opened = open_model(target)
        if opened.model.config._attn_implementation not in ATTENTION_NAMES:
            config = config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})
        held_out, lost = held_out_of(config, opened.encoder)
    evaluation = Evaluation(
        parallel=opened.parallel,
        tokenizer=opened.tokenizer,
        dataset=held_out.eval,
        micro_batch_size=MICRO_BATCH,
        max_new_tokens=config.eval.max_new_tokens,
        exact_match=config.eval.exact_match,
        stop_ids=opened.encoder.stop_ids,
        objective=Preference(preference) if preference else None,
    )
    rows = Rows(show)
    evaluation.run(target.step or 0, Metrics([rows]))
    left_out = {"kind", "step", *(["label_tokens"] if preference and preference.row.scores else [])}
    figures = {key: value for key, value in rows.last.items() if key not in left_out}
    return figures | ({"lost": lost} if lost else {})


def held_out_of(config: Config, encoder: "Encoder", *, whole: bool = False) -> "tuple[Prepared, list[str]]":
    """(Data with the held-out rows as `eval`, sentences on documents of data.eval that were cut or dropped).

    whole: read data.eval together with data.train, as a run does, which has reported what was lost; else
    without: what was trained on may be gone.
    """
    from meshtune.api.resolve import data_of
    from meshtune.data.pack import Dataset
    from meshtune.data.prepare import lost_sentences

    data, seed = config.data, config.train.seed
    if whole or not data.eval:
        return data_of(data, encoder, seed=seed), []
    data = data.model_copy(update={"train": data.eval, "eval": (), "eval_split": 0, "streaming": False})
    prepared = data_of(data, encoder, seed=seed)
    assert isinstance(prepared.train, Dataset), "only streaming gives a stream"
    lost = [*lost_sentences(prepared.stats)]
    lost += ["a larger data.seq_len keeps more"] * bool(prepared.stats["cut"]["documents"])
    return replace(prepared, eval=prepared.train), lost


def compared(target: "Target", reference: str, named: bool) -> "tuple[Prepared, list[str]]":
    """As `held_out_of`, with the reference's log-probabilities: of the run's cache or, where that has not all
    of them, computed by the reference, which is loaded and freed.

    reference: "base" or the name of a model. named: data.eval is not the run's. Raises UserError for a target
    that is its own reference, and for a base that has changed or is gone.
    """
    from meshtune.api import output, resolve
    from meshtune.api.choose import attention_of
    from meshtune.api.target import recorded_base, refuse_moved, subject_of
    from meshtune.data.files import check_there
    from meshtune.data.tokens import id_bound
    from meshtune.model.load import quiet
    from meshtune.parallel.mesh import join
    from meshtune.train.reference import reference_of
    from meshtune.train.run_row import device_of

    config, setting = target.loaded_config, f"{target.config.objective}.reference"
    if reference == "base":
        config = target.config
        if target.run is None and not target.adapted:
            raise UserError(
                f"{config.model.name} is not a run: it was trained from no other model that its rewards "
                f"could be relative to. Name one: {setting}=MODEL."
            )
        subject, base = subject_of(target), recorded_base(target)
        refuse_moved(subject, config.model.name, setting)
        base = base or (output.base_of(target.run) if target.run else None)
        output.check_base(config, base, subject, named=target.base_named, remedy=f"{setting}=FOLDER")
    try:  # the run's own data, whose values are known
        check_there(config.data)
        whole = not named
    except UserError:
        whole = False
    quiet()
    device, size = device_of(config.train.device), config.global_batch_size
    micro_batch = MICRO_BATCH if size % MICRO_BATCH == 0 else 1
    layout = Layout(micro_batch_size=micro_batch, gradient_accumulation_steps=size // micro_batch)
    tokenizer = resolve.tokenizer_of(config.model, config.data)
    encoder = resolve.encoder_of(tokenizer, config, resolve.stops_of(config.model))
    prepared, lost = held_out_of(config, encoder, whole=whole)
    attention, _ = attention_of(config, Layout(), 1)
    spec = resolve.model_spec(config, attention, device.type, embeddings=id_bound(tokenizer))
    cache = expanded(config.data.cache, "data.cache")
    values = reference_of(spec, prepared, join(layout, device), cache=cache, steps=None)
    assert values is not None, "the objective has a reference"
    values.compute_apart(config.data.seq_len)
    return values.given(prepared), lost


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
