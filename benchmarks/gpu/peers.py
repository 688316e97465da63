"""Other ways to train the same model on the same number of tokens, one in a process of its own.

    hand      a loop that one would write by hand: the model compiled, bf16 autocast, fused AdamW
    trainer   transformers.Trainer: bf16 autocast, fused AdamW; with peft where `lora`
    liger     the same with use_liger_kernel
    trl       SFTTrainer on ready batches

    python benchmarks/gpu/peers.py '{"name": "hand", "folder": "…", …}'     prints one line of JSON

Weights are fp32, the optimizer's state too; each sequence is one document of random tokens, all labelled.
"""

import json
import statistics
import sys
import time
from typing import Any

WARM_UP = 4  # steps that are not timed: compilation, choice of kernels, first allocations
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_of(case: dict[str, Any]) -> Any:
    """The model of a case with random weights; frozen ones under LoRA are bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(case["folder"])
    dtype = torch.bfloat16 if case["lora"] else torch.float32
    with torch.device(device()):  # drawn there: a processor takes minutes for 8B
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))
    return model.train()


def rows_of(case: dict[str, Any]) -> Any:
    """Random tokens: one row for each sequence of all steps."""
    import torch

    number = (case["steps"] + WARM_UP) * case["accumulation"] * case["micro_batch"]
    return torch.randint(3, case["words"], (number, case["seq_len"]))


def run_hand(case: dict[str, Any]) -> list[float]:
    """Train by hand; returns the times at which steps ended."""
    import torch

    where, model = device(), model_of(case)
    compiled = torch.compile(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    rows, ends = rows_of(case), []
    sequences = case["accumulation"] * case["micro_batch"]
    for step in rows.split(sequences):
        for ids in step.split(case["micro_batch"]):
            ids = ids.to(where)
            with torch.autocast(where, dtype=torch.bfloat16):
                loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / case["accumulation"]).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        ends.append(time.perf_counter())
    return ends


def run_trainer(case: dict[str, Any]) -> list[float]:
    """Train by transformers.Trainer or SFTTrainer; returns the times at which steps ended."""
    from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())

    options: dict[str, Any] = {
        "output_dir": f"{case['folder']}/{case['name']}", "per_device_train_batch_size": case["micro_batch"],
        "gradient_accumulation_steps": case["accumulation"], "max_steps": case["steps"] + WARM_UP,
        "learning_rate": 1e-5, "optim": "adamw_torch_fused", "bf16": True, "report_to": "none",
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": device() == "cpu",
        "gradient_checkpointing": False,
    }  # fmt: skip
    rows = rows_of(case)
    if case["name"] == "trl":
        from datasets import Dataset
        from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

        settings = SFTConfig(
            **options, max_length=case["seq_len"], dataset_kwargs={"skip_prepare_dataset": True}
        )
        data: Any = Dataset.from_dict({"input_ids": rows.tolist()})
        tokenizer = AutoTokenizer.from_pretrained(case["folder"])
        trainer: Any = SFTTrainer(
            model=model_of(case), args=settings, train_dataset=data, processing_class=tokenizer
        )
    else:
        settings = TrainingArguments(**options, use_liger_kernel=case["name"] == "liger")
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model_of(case), args=settings, train_dataset=data)
    trainer.add_callback(Clock())
    trainer.train()
    return ends


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Median tokens/s and seconds of a step, their spread, and the allocator's peak (0 on a processor)."""
    import torch

    ends = (run_hand if case["name"] == "hand" else run_trainer)(case)
    gaps = [after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    seconds = statistics.median(gaps)
    first, _, third = statistics.quantiles(gaps, n=4, method="inclusive")
    return {
        "tokens_per_second": case["accumulation"] * case["micro_batch"] * case["seq_len"] / seconds,
        "step_seconds": seconds,
        "spread": (third - first) / seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


if __name__ == "__main__":
    print(json.dumps(measured(json.loads(sys.argv[1]))))
