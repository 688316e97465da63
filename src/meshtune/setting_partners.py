"""Settings that have no effect alone: what each needs beside it, and what to do without.

A setting that takes effect by itself is not here; nor are the fields of a layout (layout.py). A value that is
a setting's default asks for nothing.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from meshtune.errors import UserError, expanded
from meshtune.schedules import SCHEDULES, Schedule
from meshtune.setting import Section
from meshtune.setting_types import epochs_of
from meshtune.yaml_tree import merge, without

HELD_OUT = "there are no held-out rows", "set data.eval or data.eval_split, or leave it out"
ONE_EVALUATION = (
    "with eval.every=0 there is only the last evaluation",
    "set eval.every, such as eval.every=100",
)
STREAMED = "with data.streaming the length of an epoch is unknown"
Settings = TypeVar("Settings", bound=Section)
CONVERSATIONS = ("messages", "sharegpt", "prompt-completion", "alpaca", "auto")  # formats that may have them


class Need(NamedTuple):
    """Partner without which a setting has no effect."""

    setting: str  # dotted; lora.*: every one of that section
    met: Callable[[Any], bool]  # by the Config
    reason: str  # clause on why it has no effect
    remedy: str  # imperative
    # True: refused even where an override took the effect: it did not switch the feature off, and without the
    # setting the run would do something else.
    relied_on: bool = False
    late: bool = False  # judged by `load`, not by Config: train(eval_data=…) gives a Config its rows


def held_out(config: Any) -> bool:
    """True unless the rows are named and none of them are held out; a plan needs none."""
    return bool(not config.data.train or config.data.eval or config.data.eval_split)


def evaluates_often(config: Any) -> bool:
    return bool(config.eval.every)


def formats(config: Any) -> set[str]:
    """The formats that the rows are read in; "auto" where a source's is found from its columns."""
    sources = (*config.data.train, *config.data.eval)
    return {source.format or config.data.format for source in sources} or {config.data.format}


def some_source_lacks(name: str) -> Callable[[Any], bool]:
    """Function: config -> True if a source, or none, has no setting `name` of its own."""

    def lacks(config: Any) -> bool:
        sources = (*config.data.train, *config.data.eval)
        return not sources or any(getattr(source, name) is None for source in sources)

    return lacks


def is_hub_model(config: Any) -> bool:
    return not expanded(config.model.name).exists()


def schedule_has_a_length(config: Any) -> bool:
    kind, fixed = config.train.lr_scheduler, config.train.warmup_steps is not None
    return kind != "constant" and not (kind == "constant_with_warmup" and fixed)


def schedule_of(config: Any) -> Schedule:
    return SCHEDULES[config.train.lr_scheduler]


def schedules(fits: Callable[[Schedule], Any]) -> str:
    """Names of the schedules that fit, as a list in words."""
    return ", ".join(name for name, row in SCHEDULES.items() if fits(row))


NEEDS = (
    Need("model.revision", is_hub_model, "model.name is a local folder",
         "leave it out"),
    Need("lora.*", lambda config: config.method == "lora", "method is full",
         "set method=lora, or leave it out"),
    *(
        Need(f"data.{name}", some_source_lacks(name), "each source has its own",
             "leave it out")
        for name in ("format", "columns", "roles", "where")
    ),
    Need("data.eval.weight", lambda config: False, "held-out rows are evaluated once each", "leave it out"),
    Need("data.eval_split", lambda config: not config.data.eval, "data.eval names the held-out rows",
         "keep one of them"),
    Need("data.eval_split", lambda config: not config.data.streaming,
         "data.streaming does not know the number of documents", "give data.eval instead", relied_on=True),
    Need("data.roles", lambda config: not formats(config).isdisjoint(CONVERSATIONS),
         "rows of data.format are no conversations", "leave it out"),
    Need("data.chat_template_kwargs", lambda config: config.data.chat_template != "none",
         "data.chat_template is none", "leave it out, or name a template"),
    Need("data.separator", lambda config: config.data.chat_template in (None, "none"),
         "data.chat_template names a template", "leave it out"),
    Need("data.train_on", lambda config: not formats(config) <= {"tokens"},
         "rows of input_ids have their labels", "leave it out"),
    Need("data.split_turns", lambda config: not formats(config).isdisjoint(CONVERSATIONS),
         "rows of data.format are no conversations", "leave it out"),
    Need("data.split_turns", lambda config: config.data.train_on != "all",
         "data.train_on=all labels everything", "give one"),
    Need("train.global_batch_tokens", lambda config: not config.train.global_batch_size,
         "train.global_batch_size sets the batch", "keep one"),
    Need("train.num_epochs", lambda config: not config.data.streaming, STREAMED,
         "set train.max_steps or train.total_tokens instead"),
    Need("train.total_tokens", lambda config: config.data.packing,
         "without data.packing sequences differ in length, so the tokens of a step are unknown",
         "set train.max_steps or train.num_epochs instead", relied_on=True),
    Need("train.warmup_ratio", lambda config: config.train.warmup_steps is None,
         "train.warmup_steps sets the warm-up", "keep one"),
    Need("train.lr_decay_steps", schedule_has_a_length,
         "the learning rate does not depend on the length of its schedule", "leave it out"),
    *(
        Need(f"train.adam_{name}", lambda config, name=name: name in config.train.constants,
             f"train.optimizer has no {name}", "leave it out")
        for name in ("betas", "eps")
    ),
    Need("train.min_lr_ratio", lambda config: bool(schedule_of(config).floor),
         "train.lr_scheduler has no lowest rate", f"leave it out, or use {schedules(lambda row: row.floor)}"),
    *(
        Need(f"train.{name}",
             lambda config, name=name: schedule_of(config).warmup or not getattr(config.train, name),
             "train.lr_scheduler has no warm-up", "leave it out, or use constant_with_warmup")
        for name in ("warmup_ratio", "warmup_steps")
    ),
    *(
        Need(f"train.lr_scheduler_kwargs.{name}",
             lambda config, name=name: name in schedule_of(config).arguments,
             f"train.lr_scheduler takes no {name}",
             f"leave it out, or use {schedules(lambda row, name=name: name in row.arguments)}")
        for name in sorted({name for row in SCHEDULES.values() for name in row.arguments})
    ),
    *(
        Need(f"eval.{name}", held_out, *HELD_OUT, late=True)
        for name in ("every", "at_start", "samples", "exact_match", "keep_best", "early_stopping")
    ),
    Need("eval.keep_best", evaluates_often, *ONE_EVALUATION),
    Need("eval.early_stopping", evaluates_often, *ONE_EVALUATION),
    Need("eval.max_new_tokens", lambda config: bool(config.eval.samples or config.eval.exact_match),
         "no answers are asked for", "set eval.samples or eval.exact_match"),
    *(
        Need(f"{name}.every",
             lambda config, name=name: not (config.data.streaming and epochs_of(getattr(config, name).every)),
             STREAMED, f"give it in steps, such as {name}.every=200", relied_on=True)
        for name in ("eval", "checkpoint")
    ),
    *(
        Need(f"log.{name}", lambda config: not {"wandb", "mlflow", "trackio"}.isdisjoint(config.log.to),
             "only W&B, MLflow and Trackio show it, and log.to names none of them",
             "add wandb, mlflow or trackio to log.to")
        for name in ("project", "name", "tags", "group")
    ),
    Need("log.textfile_directory", lambda config: "prometheus" in config.log.to,
         "log.to has no prometheus", "add prometheus to log.to"),
    Need("hub.private", lambda config: config.hub.push_to is not None, "nothing is uploaded",
         "set hub.push_to, or leave it out"),
    Need("log.memory", lambda config: "console" in config.log.to,
         "log.to has no console", "add console to log.to"),
    Need("output_exists",
         lambda config: config.output_exists != "extend" or config.checkpoint.resume != "never",
         "checkpoint.resume=never forbids to go on with a run", "leave one out"),
)  # fmt: skip


def without_effect(config: Section, *, late: bool, remedy: str = "") -> Iterator[str]:
    """Yield a sentence for each setting that lacks what it needs to take effect.

    late: of the needs that are late, or of the others. remedy: another one, before that of the need.
    """
    for key, value, need in unmet(config):
        if need.late == late:
            yield f"{key}={shown(value)} has no effect: {need.reason}; {remedy}{need.remedy}."


def unmet(config: Section) -> Iterator[tuple[str, Any, Need]]:
    """Yield (dotted key, value, its need) for each setting that lacks what it needs to take effect."""
    for need in NEEDS:
        for key, value in changed(config, need.setting.split(".")):
            if not need.met(config):
                yield key, value, need


def switched_off(
    kind: type[Section], before: Mapping[str, Any], after: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, str]:
    """Dotted key -> sentence, for each setting that lost its effect when settings were laid over a tree, and
    for those that need one of these.

    kind: class of the whole tree. before, after: without and with the settings `given`. One of these, one
    that had no effect before, or one that is relied on, is not among them: it is to be refused.
    """
    lost: dict[str, str] = {}
    if not given or "model" not in after:
        return lost
    with suppress(ValidationError, UserError):  # a wrong value, which is reported with all others
        kept = {key for key, *_ in unmet(unchecked(kind, merge({"model": after["model"]}, before)))}
        more = True
        while more:  # what is left out may be what another setting needs
            more = False
            for key, value, need in unmet(unchecked(kind, after)):
                path = key.split(".")
                if not (key in kept or key in lost or need.relied_on or sets(given, path)):
                    lost[key] = f"{key}={shown(value)} of the config is left out: {need.reason}."
                    after, more = without(after, path), True
    return lost


def sets(tree: Any, path: Sequence[str]) -> bool:
    """True if the tree has a value at `path`, or one that is no mapping in place of what is above it."""
    for name in path:
        if not isinstance(tree, Mapping):
            return True
        if name not in tree:
            return False
        tree = tree[name]
    return True


def unchecked(kind: type[Settings], tree: Mapping[str, Any]) -> Settings:
    """The settings of a tree, each validated, but not whether they take effect beside each other."""
    fields = {
        name: TypeAdapter(info.annotation).validate_python(tree[name])
        for name, info in kind.model_fields.items()
        if name in tree and info.annotation
    }
    return kind.model_construct(**fields)


def changed(
    section: Section | Mapping[str, Any], path: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) at `path` if the value is not the default; of sources, for each one."""
    first, *rest = path
    if isinstance(section, Mapping):
        if first in section:
            yield f"{prefix}{first}", section[first]
        return
    fields = type(section).model_fields
    for name in fields if first == "*" else [first]:
        value = getattr(section, name)
        if not rest:
            if value != fields[name].get_default(call_default_factory=True):
                yield f"{prefix}{name}", value
            continue
        for inner in value if isinstance(value, tuple) else (value,):
            yield from changed(inner, rest, f"{prefix}{name}.")


def shown(value: Any) -> str:
    """The value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
