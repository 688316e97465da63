"""Each need of a setting (setting.Need): the setting is refused without it, and accepted with it."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from golden import refuses, says

from meshtune import config
from meshtune.api.settings import config_of
from meshtune.errors import UserError
from meshtune.setting import Need, declared, facts, unmet

CONSTANT = ("train.lr_scheduler=constant",)
DATA = ("data.train=rows.jsonl", "data.eval=held.jsonl")

# (The setting that has no effect, beside what else, what makes it take effect), by dotted key and value.
CASES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("model.revision=main", ("model.name=.",), ("model.name=a/model",)),
    ("lora.r=8", (), ("method=lora",)),
    ("lora.alpha=64", (), ("method=lora",)),
    ("lora.dropout=0.1", (), ("method=lora",)),
    ("lora.target_modules=[q_proj]", (), ("method=lora",)),
    ("dpo.beta=0.2", (), ("objective=dpo",)),
    ("dpo.label_smoothing=0.1", ("objective=dpo", "dpo.loss_type=ipo"), ("dpo.loss_type=robust",)),
    ("kto.beta=0.2", (), ("objective=kto",)),
    ("orpo.beta=0.2", (), ("objective=orpo",)),
    ("simpo.gamma=1", (), ("objective=simpo",)),
    ("reward.center_coefficient=0.1", (), ("objective=reward",)),
    ("experts.balance=bias", ("method=lora",), ("method=full",)),
    ("experts.aux_loss=0.1", (), ("experts.balance=loss",)),
    ("experts.bias_rate=0.1", (), ("experts.balance=bias",)),
    ("eval.samples=2", ("objective=reward", *DATA), ("objective=dpo",)),
    ("eval.exact_match=2", ("objective=reward", *DATA), ("objective=dpo",)),
    ("data.train_on=all", ("objective=dpo",), ("objective=sft",)),
    ("data.split_turns=true", ("objective=dpo",), ("objective=sft",)),
    ("data.overlong=split", ("objective=dpo",), ("objective=sft",)),
    ("data.shared_prompts=true", ("objective=kto",), ("objective=dpo",)),
    ("data.streaming=true", ("objective=dpo",), ("objective=orpo",)),
    ("train.label_smoothing=0.1", ("objective=dpo",), ("objective=sft",)),
    ("data.format=text", ("data.train={path: a, format: alpaca}",), ("data.train=a",)),
    ("data.columns={text: body}", ("data.train={path: a, columns: {text: b}}",), ("data.train=a",)),
    ("data.roles={bot: assistant}", ("data.train={path: a, roles: {}}",), ("data.train=a",)),
    ("data.where={language: en}", ("data.train={path: a, where: {}}",), ("data.train=a",)),
    ("data.eval={path: a, weight: 2}", (), ()),
    ("data.eval_split=0.1", DATA, ("data.eval=null",)),
    ("data.eval_split=0.1", ("data.streaming=true",), ("data.streaming=false",)),
    ("data.roles={bot: assistant}", ("data.format=text",), ("data.format=messages",)),
    ("data.chat_template_kwargs={thinking: no}", ("data.chat_template=none",), ("data.chat_template=null",)),
    ("data.separator=x", ("data.chat_template=chatml",), ("data.chat_template=none",)),
    ("data.train_on=assistant", ("data.format=tokens",), ("data.format=messages",)),
    ("data.split_turns=true", ("data.format=tokens",), ("data.format=sharegpt",)),
    ("data.split_turns=true", ("data.train_on=all",), ("data.train_on=assistant",)),
    ("train.global_batch_tokens=4096", ("train.global_batch_size=2",), ("train.global_batch_size=null",)),
    ("train.num_epochs=2", ("data.streaming=true",), ("data.streaming=false",)),
    ("train.warmup_ratio=0.1", ("train.warmup_steps=5",), ("train.warmup_steps=null",)),
    ("train.adam_betas=[0.8, 0.9]", ("train.optimizer=adafactor",), ("train.optimizer=lion",)),
    ("train.adam_eps=1e-6", ("train.optimizer=lion",), ("train.optimizer=adamw",)),
    ("train.min_lr_ratio=0.1", ("train.lr_scheduler=inverse_sqrt",), ("train.lr_scheduler=linear",)),
    ("train.warmup_ratio=0.1", CONSTANT, ("train.lr_scheduler=linear",)),
    ("train.warmup_steps=5", CONSTANT, ("train.lr_scheduler=constant_with_warmup",)),
    *(
        (f"train.lr_scheduler_kwargs.{name}={value}", CONSTANT, (f"train.lr_scheduler={kind}",))
        for kind, name, value in (
            ("cosine", "num_cycles", 2), ("polynomial", "power", 2), ("inverse_sqrt", "timescale", 9),
            ("warmup_stable_decay", "num_decay_steps", 9), ("warmup_stable_decay", "num_stable_steps", 9),
            ("warmup_stable_decay", "warmup_type", "cosine"), ("warmup_stable_decay", "decay_type", "cosine"),
        )
    ),
    (
        "train.lr_scheduler_kwargs.warmup_lr_rate=0.1", CONSTANT,
        ("train.lr_scheduler=cosine_warmup_with_min_lr", "train.min_lr_ratio=0.1"),
    ),
    ("train.lr_decay_steps=5", ("train.lr_scheduler=constant",), ("train.lr_scheduler=linear",)),
    ("eval.every=5", ("data.train=a",), ("data.eval=b",)),
    ("eval.at_start=true", ("data.train=a",), ("data.eval_split=0.1",)),
    ("eval.samples=2", ("data.train=a",), ("data.eval=b",)),
    ("eval.exact_match=2", ("data.train=a",), ("data.eval=b",)),
    ("eval.keep_best=true", ("data.train=a", "eval.every=5"), ("data.eval=b",)),
    ("eval.early_stopping=2", ("data.train=a", "eval.every=5"), ("data.eval=b",)),
    ("eval.keep_best=true", DATA, ("eval.every=5",)),
    ("eval.early_stopping=2", DATA, ("eval.every=0.5 epoch",)),
    ("train.total_tokens=1e9", ("data.packing=false",), ("data.packing=true",)),
    ("eval.max_new_tokens=9", DATA, ("eval.samples=1",)),
    ("eval.every=0.5 epoch", ("data.streaming=true",), ("eval.every=5",)),
    ("checkpoint.every=0.5 epoch", ("data.streaming=true",), ("checkpoint.every=5",)),
    ("log.project=mine", (), ("log.to=[wandb]",)),
    ("log.name=first", (), ("log.to=[mlflow]",)),
    ("log.tags=[baseline]", (), ("log.to=[console,wandb]",)),
    ("log.group=sizes", (), ("log.to=[trackio]",)),
    ("log.textfile_directory=metrics", (), ("log.to=[prometheus]",)),
    ("log.memory=true", ("log.to=[tensorboard]",), ("log.to=[console]",)),
    ("hub.private=false", (), ("hub.push_to=me/tuned",)),
    ("output_exists=extend", ("checkpoint.resume=never",), ("output_exists=new",)),
]  # fmt: skip
NEEDS = [
    (f"{key}.{need.part}" if need.part else key, need)
    for key, field in declared(config.Config)
    for need in facts(field).needs
]


def load(*words: str) -> config.Config:
    return config.load(None, ["model.name=a/model", *words])


@pytest.mark.parametrize(("idle", "beside", "mended"), CASES)
def test_a_setting_that_can_not_take_effect_is_refused_with_the_remedy(
    idle: str, beside: tuple[str, ...], mended: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        load(*beside, idle)
    name = "data.eval.weight" if "weight" in idle else idle.partition("=")[0]
    said = [f": {need.answer}." for pattern, need in NEEDS if fnmatch(name, pattern)]
    (sentence,) = [problem for problem in refused.value.problems if problem.startswith(f"{name}=")]
    assert sentence.endswith(tuple(said))
    if mended:
        load(*beside, idle, *mended)


SWITCHED = "eval: {every: 1, samples: 1, exact_match: 4, keep_best: true, max_new_tokens: 16}"
SCHEDULE = "train: {min_lr_ratio: 0.1, lr_scheduler_kwargs: {num_cycles: 2}, warmup_steps: 5}"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "data: {train: a, eval: b}\neval: {every: 5, samples: 2, exact_match: 9, max_new_tokens: 16}",
            "eval.samples=0 eval.exact_match=0",
        ),
        ("data: {train: a}\nlog: {to: [console, wandb], project: p, tags: [x]}", "log.to=[console]"),
        ("data: {train: a}\nmethod: lora\nlora: {r: 8, alpha: 32}", "method=full"),
        (f"data: {{train: a, eval: b}}\n{SWITCHED}", "data.eval=[]"),
        (f"data: {{train: a, eval: b}}\n{SWITCHED}", "data.eval=null"),
        (f"data: {{train: a, eval_split: 0.1}}\n{SWITCHED}", "data.eval_split=0"),
        (
            "data: {train: a, eval_split: 0.1}\neval: {every: 5}",
            "data.streaming=true data.eval=b train.max_steps=5",
        ),
        ("train: {adam_betas: [0.8, 0.9], adam_eps: 1.0e-6}", "train.optimizer=adafactor"),
        (SCHEDULE, "train.lr_scheduler=constant"),
        (
            "train: {lr_scheduler: polynomial, lr_scheduler_kwargs: {power: 2}}",
            "train.lr_scheduler=inverse_sqrt train.lr_scheduler_kwargs={timescale: 9}",
        ),
    ],
)
def test_switching_a_feature_off_leaves_out_its_settings_of_the_file(
    file: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{name: a/model}}\n{file}\n")
    read = config.load(path, re.split(r" (?=[a-z]+\.)", words))
    says(capsys.readouterr().err)
    path.write_text(read.to_yaml())  # what the run folder records
    assert config.load(path) == read
    assert not capsys.readouterr().err


def test_a_rank_but_the_first_prints_no_line_on_a_setting_that_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = {"model": {"name": "a/model"}, "method": "lora", "lora": {"r": 8}}
    assert config_of(file, ["method=full"]) == config.load(None, ["model.name=a/model"])  # from Python
    says(capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    config_of(file, ["method=full"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("method: full\nlora: {r: 8}", ("train.seed=1",)),  # idle in the file by itself
        ("method: lora", ("method=full", "lora.r=8")),  # idle on the command line
    ],
)
def test_a_setting_that_is_idle_where_it_is_written_stays_refused(
    file: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{name: a/model}}\n{file}\n")
    with refuses(UserError):
        config.load(path, words)


def test_streaming_over_rows_that_are_held_out_asks_for_others_and_says_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name: a/model}\ndata: {train: a, eval_split: 0.1}\n"
        "eval: {every: 0.5 epoch, keep_best: true, samples: 1, max_new_tokens: 16}\n"
    )
    with refuses(UserError):
        config.load(path, ["data.streaming=true", "train.max_steps=5"])
    assert not capsys.readouterr().err


@pytest.mark.ci
def test_every_need_has_a_case() -> None:
    untested = [
        name
        for name, need in NEEDS
        if not any(is_refused_by(name, need, *beside, idle) for idle, beside, _ in CASES)
    ]
    assert len(NEEDS) > 50 and untested == []


def is_refused_by(name: str, need: Need, *words: str) -> bool:
    with pytest.raises(UserError) as refused:
        load(*words)
    beginning, end = name.removesuffix("*"), f": {need.answer}."
    return any(text.startswith(beginning) and text.endswith(end) for text in refused.value.problems)


def test_the_defaults_ask_for_nothing() -> None:
    assert [*unmet(load())] == []
    read = load(*DATA, "eval.every=5")
    assert config.Config.model_validate(read.model_dump(mode="json")) == read
