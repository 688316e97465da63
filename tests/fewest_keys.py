"""Files of other trainers with the fewest keys that `meshtune migrate` takes, as trees."""

from typing import Any

AXOLOTL = {"base_model": "m", "datasets": [{"path": "rows.jsonl"}], "learning_rate": 1e-4}
TRL = {"model_name_or_path": "m", "dataset_name": "org/rows", "max_length": 64, "output_dir": "out"}
FACTORY = {"model_name_or_path": "m", "stage": "sft", "dataset": "a", "cutoff_len": 64}
TORCHTUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.qwen2.qwen2_0_5b"},
    "checkpointer": {"checkpoint_dir": "m"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "batch_size": 2,
}
