"""Configurations that `plan export` writes for another trainer come back unchanged from `migrate`."""

from pathlib import Path

import pytest

from meshtune.config import load
from meshtune.layout import Layout
from meshtune.tools.export import export
from meshtune.tools.migrate import migrate

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


def lost(tool: str, variant: str, layout: str) -> bool:
    """True if the export refuses the settings, or has no key for them."""
    if variant == "pure":
        return tool == "accelerate" or (tool == "llamafactory" and ("zero" in layout or "tp" in layout))
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
    for name, content in export(tool, config, layout, blocks=61, gpus_per_node=8).files.items():
        (tmp_path / name).write_text(content)
    if tool == "accelerate":  # whose scripts have the model, the rows and LoRA
        own = [each for each in settings if each.startswith(("model.", "data.", "method", "lora."))]
        files = {"launcher": tmp_path / "accelerate.yaml", "overrides": own}
        back = migrate(tmp_path / "training_arguments.yaml", tool="transformers", **files)
    else:
        back = migrate(tmp_path / f"{tool}.yaml", gpus=layout.world)
    before, after = config.model_dump(), back.config().model_dump()
    for source in (*after["data"]["train"], *after["data"]["eval"]):
        source["path"] = Path(source["path"]).name  # LLaMA-Factory's are beside its dataset_info.json
    differ = {
        f"{section}.{key}": (value, after[section][key])
        for section in ("model", "lora", "data", "train", "eval", "checkpoint", "log", "hub")
        for key, value in before[section].items()
        if value != after[section][key]
    }
    if tool == "axolotl" and config.eval.every:  # it has no key for that
        assert differ.pop("eval.at_start") == (False, True)
    differ |= {k: (before[k], after[k]) for k in ("method", "layout", "output") if before[k] != after[k]}
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
