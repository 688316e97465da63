"""Configurations that `plan export` writes for another trainer come back unchanged from `migrate`."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtune.config import SETTINGS, Config, load
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.length import in_steps
from meshtune.tools.export import Exported, export
from meshtune.tools.migrate import Migrated, migrate
from meshtune.tools.planned import row_format

COMMON = [
    "model.name=org/m", "model.revision=abc", "data.train=[{path: rows.jsonl, format: messages}]",
    "data.seq_len=512", "data.train_on=assistant", "train.max_steps=70",
    "train.learning_rate=3e-5", "train.weight_decay=0.1", "train.max_grad_norm=0.5",
    "train.adam_betas=[0.8, 0.95]", "train.adam_eps=1e-6", "train.seed=7", "checkpoint.every=11",
    "checkpoint.keep=2", "log.every=5", "log.to=[console, jsonl, tensorboard]", "output=o",
]  # fmt: skip
LORA = ["method=lora", "lora.r=4", "lora.alpha=8"]
OPTIONS = [
    "lora.use_rslora=true",
    "lora.use_dora=true",
    "lora.modules_to_save=[lm_head]",
    "train.neftune_alpha=5",
]
VARIANTS = {
    "full": ["train.warmup_ratio=0.1"],
    "lora": [*LORA, "lora.dropout=0.1", "lora.target_modules=[q_proj, v_proj]", *OPTIONS],
    "all-linear": [*LORA, "train.warmup_steps=3", "train.warmup_ratio=0.03"],
    "qlora": ["method=qlora", *LORA[1:]],
    "epochs": ["train.max_steps=null", "train.num_epochs=2"],
    "evaluated": ["data.eval=[{path: held.jsonl, format: messages}]", "eval.every=9"],
    "split": ["data.eval_split=0.1", "eval.every=9", "train.lr_scheduler=linear"],
    "alpaca": ["data.train=[{path: a.jsonl, format: alpaca}]", "data.packing=false", "hub.push_to=me/x"],
    "text": ["data.train=[{path: a.jsonl, format: text, columns: {text: body}}]", "data.train_on=all"],
    "pure": ["train.precision=bf16-pure", "data.streaming=true"],
    "fp32": ["train.precision=fp32", "train.compile=true"],
}
LAYOUTS = {
    "axolotl": """mb2-ga4 dp4-mb1-ga2-full zero2x8-mb1-ga1 zero3x4-mb2-ga2-full dp2-zero2x4-mb1-ga1
        zero3x4-tp2-mb1-ga1 zero3x4-cp2-mb1-ga2-selective""",
    "accelerate": """mb2-ga4 dp4-mb1-ga2-full zero2x8-mb1-ga1-full dp2-zero2x4-mb1-ga1 zero3x4-tp2-mb2-ga2
        zero2x4-cp2-mb1-ga2""",
    "llamafactory": """mb2-ga4 dp4-mb1-ga2-full zero1x4-mb1-ga1 zero2x8-mb1-ga1 zero3x4-mb2-ga2-full
        dp2-tp4-mb1-ga2 zero2x4-tp2-mb1-ga1""",
}


def exported(tool: str, config: Config) -> Exported:
    return export(tool, config, Layout.parse(config.layout), blocks=61, gpus_per_node=8)


def back(tool: str, written: Exported, config: Config, folder: Path) -> Migrated:
    """The exported files, migrated; accelerate's scripts have the model, the rows and LoRA of `config`."""
    for name, content in written.files.items():
        (folder / name).write_text(content)
    if tool != "accelerate":
        return migrate(folder / f"{tool}.yaml", gpus=Layout.parse(config.layout).world)
    own = {name: config.model_dump(mode="json")[name] for name in ("model", "data", "method", "lora")}
    own = own if config.adapts else {name: own[name] for name in own if name != "lora"}
    overrides = [f"{name}={yaml.safe_dump(value, default_flow_style=True)}" for name, value in own.items()]
    return migrate(
        folder / "training_arguments.yaml", tool="transformers",
        launcher=folder / "accelerate.yaml", overrides=overrides,
    )  # fmt: skip


def meaning(config: Config) -> dict[str, Any]:
    """The settings, with the same value for each way to write it."""
    tree = in_steps(config).model_dump()
    data, train = tree["data"], tree["train"]
    sources = (*config.data.train, *config.data.eval)
    for given, source in zip(sources, (*data["train"], *data["eval"]), strict=True):
        source["path"] = Path(source["path"]).name  # LLaMA-Factory's are beside its dataset_info.json
        source["format"] = row_format(config.data, given)
        source |= {name: source[name] or data[name] for name in ("columns", "roles")}
    data |= {"format": "", "columns": {}, "roles": {}, "mean_document_tokens": None}
    tree["experts"]["imbalance"] = 1.0  # of plans
    data["overlong"] = {"cut": "auto"}.get(data["overlong"], data["overlong"])  # of conversations
    built_in = {file.stem: file.read_text() for file in Path(str(files("meshtune.data"))).glob("templates/*")}
    data["chat_template"] = built_in.get(data["chat_template"], data["chat_template"])
    train |= {"global_batch_size": config.global_batch_size, "global_batch_tokens": None}
    train["compile"] = train["compile"] is True  # "auto" is written as false: tools compile where told to
    train["reduce_dtype"] = (
        None  # no tool has a key; differences.toml names it for the layouts that it is for
    )
    return tree


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Setting -> its two values, where they differ."""
    before, after = meaning(one), meaning(other)
    sections = ("model", "lora", "experts", "data", "train", "eval", "checkpoint", "log", "hub")
    pairs = {f"{s}.{key}": (value, after[s][key]) for s in sections for key, value in before[s].items()}
    pairs |= {key: (before[key], after[key]) for key in ("method", "layout", "output")}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def lost(tool: str, variant: str, layout: str) -> bool:
    """True if the export refuses the settings, or has no key for them."""
    if variant == "pure":
        return tool == "accelerate" or (tool == "llamafactory" and ("zero" in layout or "tp" in layout))
    if variant == "qlora":
        return "tp" in layout
    return (variant, tool) == ("fp32", "axolotl") and "cp" in layout


@pytest.mark.parametrize(
    ("tool", "variant", "text"),
    [
        (tool, variant, layout)
        for tool, layouts in LAYOUTS.items()
        for variant in VARIANTS
        for layout in layouts.split()
        if not lost(tool, variant, layout)
    ],
)
def test_an_exported_config_comes_back(tool: str, variant: str, text: str, tmp_path: Path) -> None:
    layout = Layout.parse(text)
    batch = f"train.global_batch_size={layout.global_batch_size}"
    settings = [*COMMON, *VARIANTS[variant], f"layout={text}", batch]
    config = load(None, settings)
    differ = differences(config, back(tool, exported(tool, config), config, tmp_path).config())
    if tool == "axolotl" and config.eval.every:  # it has no key for that
        assert differ.pop("eval.at_start") == (False, True)
    assert differ == {}


@pytest.mark.parametrize(
    "text", ["dp4-mb1-ga2", "zero1x4-tp2-mb1-ga1", "zero2x8-mb1-ga2", "zero3x4-ulysses2-mb2-ga1"]
)
def test_deepspeeds_file_gives_the_layout_back(text: str, tmp_path: Path) -> None:
    layout = Layout.parse(text)
    config = load(None, [*COMMON, f"layout={text}", f"train.global_batch_size={layout.global_batch_size}"])
    exported = export("deepspeed", config, layout, blocks=61, gpus_per_node=8)
    (tmp_path / "deepspeed.json").write_text(exported.files["deepspeed.json"])
    micro, accumulated = layout.micro_batch_size, layout.gradient_accumulation_steps
    (tmp_path / "trainer.yaml").write_text(
        f"per_device_train_batch_size: {micro}\ngradient_accumulation_steps: {accumulated}\n"
    )
    back = migrate(
        tmp_path / "trainer.yaml", tool="transformers", gpus=layout.world,
        launcher=tmp_path / "deepspeed.json",
        overrides=["model.name=m", "data.train=a.jsonl"],
    )  # fmt: skip
    assert back.settings["layout"] == text


# Every setting, every key #

DATA = Path(__file__).parents[2] / "data"
FILES = sorted((DATA / "migrate").glob("*.[jy]*"))
LINES = [
    re.split(r" (?=[a-z_]+(?:\.[a-z_]+)?=)", line)
    for line in (DATA / "samples_of_settings.txt").read_text().splitlines()[1:]
]


PLAIN = [*COMMON, "layout=mb1-ga8", "train.global_batch_size=8"]


def sample(line: list[str], *more: str) -> Config:
    return load(None, [*COMMON, "layout=mb2-ga4", "train.global_batch_size=8", *line, *more])


def named(setting: str, sentences: tuple[str, ...]) -> list[str]:
    """The sentences that name a setting."""
    section, _, name = setting.rpartition(".")
    pattern = rf"(?<![\w.])({re.escape(setting)}(?!\.?\w)|{name}=)" if section else rf"(?<![\w.]){name}\b"
    return [sentence for sentence in sentences if re.search(pattern, sentence)]


def test_every_setting_has_a_sample() -> None:
    given = {setting.partition("=")[0] for line in LINES for setting in line}
    plain = {name for name in SETTINGS if "." in name and not re.match(r"cluster|data\.(train|eval)\.", name)}
    assert plain - given == set()


def unnamed(tool: str, config: Config, folder: Path) -> dict[str, Any] | None:
    """Settings that an export changes without one sentence on it, or that it keeps and calls lost.

    None where the export is refused.
    """
    try:
        written = exported(tool, config)
    except UserError:
        return None
    differ = differences(config, back(tool, written, config, folder).config())
    if tool == "axolotl":  # in the format of its prompts, which migrate says that it does not read
        differ.pop("data.separator", None)
    told = [
        name
        for said in written.missing
        if said.startswith("Not carried over")
        for name in re.findall(r"\w+\.\w+", said)
    ]
    kept = {name: "is carried over" for name in told if name not in differ}
    return {key: pair for key, pair in differ.items() if len(named(key, written.missing)) != 1} | kept


@pytest.mark.parametrize("line", LINES, ids=" ".join)
@pytest.mark.parametrize("tool", LAYOUTS)
def test_every_setting_comes_back_or_is_named_once(tool: str, line: list[str], tmp_path: Path) -> None:
    config = sample(line)
    if (left := unnamed(tool, config, tmp_path)) is None:
        with pytest.raises(UserError, match=re.escape(line[0].partition("=")[0])):
            exported(tool, config)
    assert not left


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("tool", LAYOUTS)
def test_a_migrated_file_comes_back_or_its_losses_are_named_once(
    tool: str, file: Path, tmp_path: Path
) -> None:
    assert not unnamed(tool, migrate(file, gpus=8).config(), tmp_path)


def test_axolotls_keys_without_a_setting_are_named_once(tmp_path: Path) -> None:
    file, given = tmp_path / "theirs.yaml", (DATA / "migrate" / "axolotl-fft-fsdp.yaml").read_text()
    given = given.replace("paged_adamw_8bit", "adamw_torch")  # whose states FSDP2 of axolotl doesn't shard
    file.write_text(given + "wandb_entity: team\nwandb_project: p\n")
    missing = " ".join(exported("axolotl", migrate(file, gpus=8).config()).missing)
    assert [missing.count(key) for key in ("special_tokens.pad_token", "wandb_entity")] == [1, 1]


@pytest.mark.parametrize("tool", ["torchtitan", "megatron"])
def test_every_setting_is_in_the_files_of_a_tool_or_named(tool: str) -> None:
    silent, usual = [], exported(tool, load(None, PLAIN))
    for line in LINES:
        if line[0].startswith(("data.", "train.global_batch", "experts.imbalance", "output_exists")):
            continue
        try:
            written = exported(tool, load(None, [*PLAIN, *line]))
        except UserError:
            continue
        if written.files == usual.files and not named(line[0].partition("=")[0], written.missing):
            silent.append(line[0])
    assert silent == []
