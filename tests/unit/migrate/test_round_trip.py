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
VARIANTS = {
    "full": ["train.warmup_ratio=0.1"],
    "lora": [
        "method=lora",
        "lora.r=4",
        "lora.alpha=8",
        "lora.dropout=0.1",
        "lora.target_modules=[q_proj, v_proj]",
    ],
    "all-linear": [
        "method=lora",
        "lora.r=4",
        "lora.alpha=8",
        "train.warmup_steps=3",
        "train.warmup_ratio=0.03",
    ],
    "evaluated": ["data.eval=[{path: held.jsonl, format: messages}]", "eval.every=9"],
    "split": ["data.eval_split=0.1", "eval.every=9", "train.lr_scheduler=linear"],
    "alpaca": ["data.train=[{path: a.jsonl, format: alpaca}]", "data.packing=false", "hub.push_to=me/x"],
    "text": ["data.train=[{path: a.jsonl, format: text, columns: {text: body}}]", "data.train_on=all"],
    "pure": ["train.precision=bf16-pure", "data.streaming=true"],
    "fp32": ["train.precision=fp32", "train.compile=true"],
}
LAYOUTS = ["mb2-ga4", "dp4-mb1-ga2-full", "zero2x8-mb1-ga1", "zero3x4-mb2-ga2-full"]


CASES = [
    (tool, variant, layout)
    for tool in ("axolotl", "llamafactory")
    for variant in VARIANTS
    for layout in LAYOUTS
    if (tool, variant, layout[:4]) != ("llamafactory", "pure", "zero")  # refused by the export
]


@pytest.mark.parametrize(("tool", "variant", "text"), CASES)
def test_an_exported_config_comes_back(tool: str, variant: str, text: str, tmp_path: Path) -> None:
    layout = Layout.parse(text)
    settings = [
        *COMMON,
        *VARIANTS[variant],
        f"layout={text}",
        f"train.global_batch_size={layout.global_batch_size}",
    ]
    config = load(None, settings)
    for name, content in export(tool, config, layout, blocks=61, gpus_per_node=8).files.items():
        (tmp_path / name).write_text(content)
    back = migrate(tmp_path / f"{tool}.yaml", gpus=layout.world)
    before, after = config.model_dump(), back.config().model_dump()
    for source in (*after["data"]["train"], *after["data"]["eval"]):
        source["path"] = Path(source["path"]).name  # LLaMA-Factory's are beside its dataset_info.json
    differ = {
        f"{section}.{key}": (value, after[section][key])
        for section in ("model", "lora", "train", "eval", "checkpoint", "log", "hub")
        for key, value in before[section].items()
        if value != after[section][key]
    }
    if tool == "axolotl" and config.eval.every:  # it has no key for that
        assert differ.pop("eval.at_start") == (False, True)
    differ |= {f"data.{k}": (v, after["data"][k]) for k, v in before["data"].items() if v != after["data"][k]}
    differ |= {k: (before[k], after[k]) for k in ("method", "layout", "output") if before[k] != after[k]}
    assert differ == {}
