"""The setting that an unknown key probably means: another trainer's name of it, or a misspelt one."""

import difflib
from collections.abc import Sequence

# Setting <- its names in other trainers (axolotl, LLaMA-Factory, TRL, Hugging Face, torchtune, Megatron).
OTHER_NAMES = {
    "model.name": "base_model model_name_or_path pretrained_model_name_or_path",
    "data.train": "datasets dataset train_file dataset_name",
    "data.eval": "test_datasets",
    "data.eval_split": "val_set_size val_size",
    "data.seq_len": "sequence_len cutoff_len max_length max_seq_len max_seq_length seq_length",
    "data.packing": "sample_packing neat_packing packed",
    "data.train_on": "train_on_inputs assistant_only_loss completion_only_loss",
    "data.chat_template": "template",
    "layout.micro_batch_size": (
        "micro_batch_size per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu"
    ),
    "train.global_batch_size": "batch_size train_batch_size",
    "layout.gradient_accumulation_steps": "gradient_accumulation_steps",
    "layout.recompute": "gradient_checkpointing activation_checkpointing recompute_granularity",
    "layout.tp": "tensor_parallel_size tp_size tensor_model_parallel_size",
    "layout.pp": "pipeline_parallel_size",
    "layout.cp": "context_parallel_size cp_size",
    "layout.dp_shard": "dp_shard_size",
    "layout.dp_replicate": "dp_replicate_size",
    "train.num_epochs": "num_train_epochs epochs num_epochs",
    "train.max_steps": "max_steps steps train_iters",
    "train.learning_rate": "lr learning_rate",
    "train.lr_scheduler": "lr_scheduler_type lr_scheduler",
    "train.warmup_ratio": "warmup_ratio",
    "train.warmup_steps": "warmup_steps",
    "train.weight_decay": "weight_decay",
    "train.max_grad_norm": "clip_grad max_grad_norm gradient_clipping",
    "train.precision": "bf16 fp16 dtype mixed_precision",
    "train.optimizer": "optim",
    "train.seed": "seed",
    "train.compile": "torch_compile",
    "method": "adapter finetuning_type use_peft",
    "lora.r": "lora_r lora_rank rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules lora_target",
    "eval.every": "eval_steps evals_per_epoch",
    "checkpoint.every": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint",
    "log.every": "logging_steps",
    "log.to": "report_to",
    "output": "output_dir",
    "hub.push_to": "push_to_hub",
}
SETTING_OF = {name: ours for ours, names in OTHER_NAMES.items() for name in names.split()}


def unknown_setting(path: Sequence[str], settings: Sequence[str], sections: Sequence[str]) -> str:
    """Return a sentence that names the setting which the unknown key at `path` probably means.

    path: ["train", "lr"]. settings: every key of the tree, dotted. sections: the keys of its top level, which
    the sentence lists if no setting is near.
    """
    name, key = path[-1], ".".join(path)
    if name in SETTING_OF:
        return f"{key} is no setting; did you mean {SETTING_OF[name]}?"
    if exact := [setting for setting in settings if setting.rsplit(".", 1)[-1] == name]:
        return f"{key} is no setting; did you mean {exact[0]}?"
    section = ".".join(path[:-1])
    siblings = [setting for setting in settings if section and setting.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, siblings or settings, n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(key, [s for s in settings if not key.startswith(f"{s}.")], n=1)
    if near:
        return f"{key} is no setting; did you mean {near[0]}?"
    if siblings:
        names = ", ".join(setting.rsplit(".", 1)[1] for setting in siblings)
        return f"{key} is no setting; {section} has: {names}."
    return f"{key} is no setting; sections: {', '.join(sections)}."
