"""Each row of setting_partners.py: a setting without its partner is refused, with it the setting is taken."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from meshtune import config, setting_partners
from meshtune.api.settings import config_of
from meshtune.errors import UserError
from meshtune.setting_partners import NEEDS

DATA = ("data.train=rows.jsonl", "data.eval=held.jsonl")

# (The setting that has no effect, beside what else, what makes it take effect), by dotted key and value.
CASES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("model.revision=main", ("model.name=.",), ("model.name=a/model",)),
    ("lora.r=8", (), ("method=lora",)),
    ("lora.alpha=64", (), ("method=lora",)),
    ("lora.dropout=0.1", (), ("method=lora",)),
    ("lora.target_modules=[q_proj]", (), ("method=lora",)),
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
    ("train.lr_decay_steps=5", ("train.lr_scheduler=constant",), ("train.lr_scheduler=linear",)),
    ("eval.every=5", ("data.train=a",), ("data.eval=b",)),
    ("eval.at_start=true", ("data.train=a",), ("data.eval_split=0.1",)),
    ("eval.samples=2", ("data.train=a",), ("data.eval=b",)),
    ("eval.exact_match=2", ("data.train=a",), ("data.eval=b",)),
    ("eval.keep_best=true", ("data.train=a", "eval.every=5"), ("data.eval=b",)),
    ("eval.early_stopping=2", ("data.train=a", "eval.every=5"), ("data.eval=b",)),
    ("eval.keep_best=true", DATA, ("eval.every=5",)),
    ("eval.early_stopping=2", DATA, ("eval.every=0.5 epoch",)),
    ("eval.max_new_tokens=9", DATA, ("eval.samples=1",)),
    ("eval.every=0.5 epoch", ("data.streaming=true",), ("eval.every=5",)),
    ("checkpoint.every=0.5 epoch", ("data.streaming=true",), ("checkpoint.every=5",)),
    ("log.project=mine", (), ("log.to=[wandb]",)),
    ("log.name=first", (), ("log.to=[mlflow]",)),
    ("log.tags=[baseline]", (), ("log.to=[console,wandb]",)),
    ("log.group=sizes", (), ("log.to=[wandb,mlflow]",)),
    ("log.memory=true", ("log.to=[tensorboard]",), ("log.to=[console]",)),
    ("hub.private=false", (), ("hub.push_to=me/tuned",)),
    ("output_exists=extend", ("checkpoint.resume=never",), ("output_exists=new",)),
]  # fmt: skip
# Settings that take effect by themselves, or that are judged where their table is: schedules.py,
# optimizers.py, layout.py, precision.py.
ALONE = """
    model model.name model.init model.attention model.trust_remote_code model.freeze method lora data
    data.train data.train.path data.train.weight data.train.split data.train.format data.train.columns
    data.train.roles data.train.where data.eval data.eval.path data.eval.split data.eval.format
    data.eval.columns data.eval.roles data.eval.where data.chat_template data.seq_len
    data.mean_document_tokens data.packing data.overlong data.on_bad_row data.streaming data.max_samples
    data.cache train train.global_batch_size train.max_steps train.learning_rate train.lr_scheduler
    train.min_lr_ratio train.lr_scheduler_kwargs train.warmup_steps train.weight_decay
    train.max_grad_norm train.neftune_alpha train.label_smoothing train.precision train.reduce_dtype
    train.optimizer train.adam_betas train.adam_eps
    train.seed train.compile train.max_nonfinite_steps train.device eval layout cluster cluster.gpu
    cluster.gpus cluster.gpus_per_node cluster.memory_gib cluster.link cluster.network
    cluster.network_share cluster.price_per_gpu_hour cluster.hardware cluster.efficiency checkpoint
    checkpoint.keep checkpoint.async_save checkpoint.save_on_signal checkpoint.resume log log.every
    log.to hub hub.push_to output
"""


def load(*words: str) -> config.Config:
    return config.load(None, ["model.name=a/model", *words])


@pytest.mark.parametrize(("idle", "beside", "mended"), CASES)
def test_a_setting_that_can_not_take_effect_is_refused_with_the_remedy(
    idle: str, beside: tuple[str, ...], mended: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        load(*beside, idle)
    name = "data.eval.weight" if "weight" in idle else idle.partition("=")[0]
    said = [f": {need.reason}; {need.remedy}." for need in NEEDS if fnmatch(name, need.setting)]
    (sentence,) = [problem for problem in refused.value.problems if problem.startswith(f"{name}=")]
    assert sentence.endswith(tuple(said))
    if mended:
        load(*beside, idle, *mended)


@pytest.mark.parametrize(
    ("file", "words", "left_out"),
    [
        (
            "data: {train: a, eval: b}\neval: {every: 5, samples: 2, exact_match: 9, max_new_tokens: 16}",
            ("eval.samples=0", "eval.exact_match=0"),
            ["eval.max_new_tokens=16 of the config is left out: no answers are asked for."],
        ),
        (
            "data: {train: a}\nlog: {to: [console, wandb], project: p, tags: [x]}",
            ("log.to=[console]",),
            [
                f"log.{pair} of the config is left out: "
                "only W&B and MLflow show it, and log.to names neither."
                for pair in ("project=p", 'tags=["x"]')
            ],
        ),
        (
            "data: {train: a}\nmethod: lora\nlora: {r: 8, alpha: 32}",
            ("method=full",),
            ["lora.r=8 of the config is left out: method is full."],
        ),
    ],
)
def test_switching_a_feature_off_leaves_out_its_settings_of_the_file(
    file: str, words: tuple[str, ...], left_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{name: a/model}}\n{file}\n")
    read = config.load(path, words)
    assert capsys.readouterr().err.splitlines() == left_out
    path.write_text(read.to_yaml())  # what the run folder records
    assert config.load(path) == read
    assert not capsys.readouterr().err


def test_a_rank_but_the_first_prints_no_line_on_a_setting_that_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = {"model": {"name": "a/model"}, "method": "lora", "lora": {"r": 8}}
    assert config_of(file, ["method=full"]) == config.load(None, ["model.name=a/model"])  # from Python
    assert capsys.readouterr().err == "lora.r=8 of the config is left out: method is full.\n"
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
    with pytest.raises(UserError, match=r"lora.r=8 has no effect: method is full"):
        config.load(path, words)


def test_every_row_has_a_case() -> None:
    met = {id(need) for need in NEEDS for idle, beside, _ in CASES if refuses(need, *beside, idle)}
    assert [need.setting for need in NEEDS if id(need) not in met] == []


def refuses(need: setting_partners.Need, *words: str) -> bool:
    with pytest.raises(UserError) as refused:
        load(*words)
    beginning, end = need.setting.removesuffix("*"), f": {need.reason}; {need.remedy}."
    return any(text.startswith(beginning) and text.endswith(end) for text in refused.value.problems)


def test_every_setting_has_a_row_or_takes_effect_alone() -> None:
    """A new setting: a row of NEEDS with a case here, or a name in ALONE."""
    rows = {need.setting for need in NEEDS}
    listed = (Path(__file__).parents[1] / "data" / "settings.txt").read_text().split("\n")
    settings = {line for line in listed if line and not line.startswith("#")}
    rowed = {name for name in settings for pattern in rows if fnmatch(name, pattern)}
    assert settings - rowed - set(ALONE.split()) == set()
    assert (rows - {"lora.*"}) | set(ALONE.split()) <= settings


def test_the_defaults_ask_for_nothing() -> None:
    assert [*setting_partners.without_effect(load())] == []
    read = load(*DATA, "eval.every=5")
    assert config.Config.model_validate(read.model_dump(mode="json")) == read
