"""Speed and memory on one device: meshtune, a hand-written loop, transformers.Trainer, TRL's trainers.

    python benchmarks/single_device.py                    # everything: about an hour on 2 cores
    python benchmarks/single_device.py --quick            # does it run? (its figures mean nothing)
    python benchmarks/single_device.py --against PATH     # this checkout against another one, in pairs

Same machine, model, tokens, dtype and threads; each contender in a process of its own, contenders
interleaved, medians over the rounds. Real tokens count, padding does not; peak memory is the process's
maximum resident size.

    meshtune     `python -m meshtune train`, figures from the rows that it writes
    hand         the floor: forward, backward, clip, fused AdamW on ready batches; full logits, no isolation
    trainer      transformers.Trainer on the same ready batches
    trl          SFTTrainer, packing=True (best-fit, documents isolated), no recomputation, fused AdamW
    trl-wrapped  the same with its other packing, which cuts documents and lets them attend to each other
    meshtune-shared  meshtune with data.shared_prompts: what it computes counts as the tokens of both sides
    trl-dpo      DPOTrainer, whose reference is computed before the first step too; it pads pairs

In the variant fp32-dpo rejected answers are those of GSM8K with another last number, and tokens those of both
sides; a sequence of 1,024 holds three or four pairs, and TRL's micro-batch six.

The model is a Llama of 28 M parameters with random weights; the data GSM8K, prompts not labelled, in rows of
512 tokens, micro-batches of 4, two of them a step. bf16 is autocast over fp32 weights; in meshtune bf16
weights to compute with, and fp32 masters.
"""

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from against import paired, sentence

SEQ_LEN, MICRO_BATCH, ACCUMULATION = 512, 4, 2
ROWS_PER_STEP = MICRO_BATCH * ACCUMULATION
LEARNING_RATE = 1e-4
SFT = ("meshtune", "hand", "trainer", "trl", "trl-wrapped")
CONTENDERS = (*SFT, "meshtune-shared", "trl-dpo")
DPO = "fp32-dpo"
VARIANTS = {
    "fp32": SFT,
    "bf16": SFT,
    "fp32-all-labelled": ("meshtune", "hand"),
    DPO: CONTENDERS[:1] + CONTENDERS[-2:],
}
PAIRS = 6  # of a micro-batch in TRL: about the tokens of meshtune's
RESULTS = Path(__file__).parent / "results"

# What each contender does in its own process; imports are its own #


def train_hand(work: Path, steps: int, dtype: str, labelled: str) -> dict[str, Any]:
    """Run the loop that one would write by hand, on ready batches; seconds and tokens of each step.

    work: folder that `set_up` filled. dtype: "fp32", or "bf16" for autocast. labelled: "all" or "completion".
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        work / "model", attn_implementation="sdpa", dtype=torch.float32
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    rows = np.load(work / "rows.npz")
    ids = torch.from_numpy(rows["ids"])
    labels = ids if labelled == "all" else torch.from_numpy(rows["labels"])
    ends = [time.perf_counter()]
    for step in range(steps):
        at = slice(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)
        count = (labels[at, 1:] != -100).sum()
        for x, y in zip(ids[at].split(MICRO_BATCH), labels[at].split(MICRO_BATCH), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(input_ids=x, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten(), reduction="sum"
            )
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return timed(ends, [ROWS_PER_STEP * SEQ_LEN] * steps)


def timed(ends: list[float], tokens: list[int]) -> dict[str, Any]:
    """{"seconds", "tokens"} of each step.

    ends: times at which the first step began and each step ended. tokens: of each step, without padding.
    """
    return {"seconds": [b - a for a, b in itertools.pairwise(ends)], "tokens": tokens}


def arguments(work: Path, steps: int, dtype: str) -> dict[str, Any]:
    """Training arguments that transformers.Trainer and SFTTrainer have in common."""
    return {
        "output_dir": str(work / "trainer"),
        "max_steps": steps,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "bf16": dtype == "bf16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def counting(trainer_class: Any) -> Any:
    """Subclass of a trainer that adds up the real tokens of its micro-batches in `found`."""

    class Counting(trainer_class):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            self.found = getattr(self, "found", 0) + int(
                inputs["input_ids"].numel() if mask is None else mask.sum()
            )
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting


def follow(trainer: Any) -> dict[str, Any]:
    """Train, and return each step's seconds and tokens."""
    from transformers import TrainerCallback

    ends: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())
            tokens.append(trainer.found)
            trainer.found = 0

    trainer.add_callback(Clock())
    trainer.train()
    return timed(ends, tokens)


def train_trainer(work: Path, steps: int, dtype: str, labelled: str) -> dict[str, Any]:
    """Run transformers.Trainer on ready batches; arguments and result as those of `train_hand`."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    rows = np.load(work / "rows.npz")
    ids, labels = rows["ids"], rows["ids" if labelled == "all" else "labels"]
    dataset: Any = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    trainer = counting(Trainer)(
        model=AutoModelForCausalLM.from_pretrained(
            work / "model", attn_implementation="sdpa", dtype=torch.float32
        ),
        args=TrainingArguments(**arguments(work, steps, dtype)),
        train_dataset=dataset,
        data_collator=default_data_collator,
    )
    return follow(trainer)


def sft_trainer(work: Path, steps: int, dtype: str, packing: str, processes: int | None = None) -> Any:
    """TRL's SFTTrainer with its data prepared; `prepare_seconds` is the time of reading and packing.

    packing: TRL's packing_strategy. processes: that tokenise; None: this one.
    """
    import torch
    from datasets import disable_caching, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    disable_caching()
    started = time.perf_counter()
    data = load_dataset(
        "json", data_files=str(work / "rows.jsonl"), split="train", cache_dir=tempfile.mkdtemp(dir=work)
    )
    load_seconds = time.perf_counter() - started

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = super()._prepare_dataset(*args, **kwargs)
            self.prepare_seconds = time.perf_counter() - started + load_seconds
            return found

    return counting(Timed)(
        model=AutoModelForCausalLM.from_pretrained(
            work / "model", attn_implementation="sdpa", dtype=torch.float32
        ),
        args=SFTConfig(
            **arguments(work, steps, dtype), max_length=SEQ_LEN, packing=True, packing_strategy=packing,
            dataset_num_proc=processes,
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(work / "model"),
    )  # fmt: skip


def train_trl(work: Path, steps: int, dtype: str, labelled: str) -> dict[str, Any]:
    """Run SFTTrainer with best-fit packing; as `train_hand`, but `labelled` is ignored."""
    return follow(sft_trainer(work, steps, dtype, "bfd"))


def train_trl_wrapped(work: Path, steps: int, dtype: str, labelled: str) -> dict[str, Any]:
    """Run SFTTrainer with its other packing; as `train_hand`, but `labelled` is ignored."""
    return follow(sft_trainer(work, steps, dtype, "wrapped"))


def train_trl_dpo(work: Path, steps: int, dtype: str, labelled: str) -> dict[str, Any]:
    """Run DPOTrainer on pairs; as `train_hand`, but `labelled` is ignored."""
    import torch
    from datasets import disable_caching, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

    disable_caching()
    file, cache = str(work / "pairs.jsonl"), tempfile.mkdtemp(dir=work)
    rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
    chosen = {"per_device_train_batch_size": PAIRS, "precompute_ref_log_probs": True, "max_length": SEQ_LEN}
    trainer = counting(DPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(
            work / "model", attn_implementation="sdpa", dtype=torch.float32
        ),
        args=DPOConfig(**(arguments(work, steps, dtype) | chosen)),
        train_dataset=rows.select(range(PAIRS * ACCUMULATION * steps)),
        processing_class=AutoTokenizer.from_pretrained(work / "model"),
    )
    return follow(trainer)


def prepare_trl(work: Path, processes: int | None) -> dict[str, Any]:
    """Measure TRL from rows on disk to packed sequences: {"seconds": [s], "tokens": [n]}."""
    trainer = sft_trainer(work, 1, "fp32", "bfd", processes)
    tokens = sum(len(row) for row in trainer.train_dataset["input_ids"])
    return {"seconds": [trainer.prepare_seconds], "tokens": [tokens]}


def prepare_meshtune(work: Path) -> dict[str, Any]:
    """Measure meshtune from rows on disk to packed sequences, with nothing cached; as `prepare_trl`."""
    from meshtune.data.encode import Encoder
    from meshtune.data.example import Source
    from meshtune.data.prepare import prepare
    from meshtune.data.recipe import Recipe
    from meshtune.model.load import load_tokenizer

    encoder = Encoder(load_tokenizer(str(work / "model")), train_on="completion", chat_template=None)
    source = Source(str(work / "train.jsonl"), columns=(("prompt", "question"), ("completion", "answer")))
    started = time.perf_counter()
    recipe = Recipe((source,), encoder, seq_len=SEQ_LEN, overlong="cut")
    prepared = prepare(recipe, tempfile.mkdtemp(dir=work))
    seconds = time.perf_counter() - started
    return {"seconds": [seconds], "tokens": [prepared.stats["train"]["tokens"]]}


WORKERS = {
    "hand": train_hand,
    "trainer": train_trainer,
    "trl": train_trl,
    "trl-wrapped": train_trl_wrapped,
    "trl-dpo": train_trl_dpo,
    "prepare-trl": prepare_trl,
    "prepare-meshtune": prepare_meshtune,
}

# What they work on #


def set_up(work: Path, data: Path, needed: int) -> None:
    """Write to `work` the model folder, the rows for each contender, and ready rows of SEQ_LEN tokens.

    data: GSM8K's train.jsonl. needed: number of ready rows.
    """
    import numpy as np
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    (work / "train.jsonl").write_text(data.read_text("utf-8"), "utf-8")
    with (work / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps({"prompt": row["question"] + "\n", "completion": row["answer"]}), file=file)

    with (work / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            wrong = re.sub(r"\d+(?=\D*$)", lambda last: str(int(last[0]) + 1), row["answer"])
            sides = {"chosen": row["answer"], "rejected": wrong}
            print(json.dumps({"prompt": row["question"] + "\n", **sides}), file=file)

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<|endoftext|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((text for row in rows for text in (row["question"], row["answer"])), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[1])
    tokenizer.save_pretrained(work / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=1408, max_position_embeddings=SEQ_LEN, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(work / "model")

    prompts = [encoding.ids for encoding in bpe.encode_batch([row["question"] + "\n" for row in rows])]
    answers = [encoding.ids for encoding in bpe.encode_batch([row["answer"] for row in rows])]
    pairs = [(len(prompt), 2 * len(answer) + 2) for prompt, answer in zip(prompts, answers, strict=True)]
    both, once = (sum(times * one + two for one, two in pairs) for times in (2, 1))
    (work / "both_sides").write_text(
        str(both / (once + len(pairs)))
    )  # a pair repeats its prompt's last token
    ids, labels = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids += [*prompt, *answer, 0]
        labels += [-100] * len(prompt) + [*answer, 0]
    repeated = -(-needed * SEQ_LEN // len(ids))
    shape = (needed, SEQ_LEN)
    np.savez(
        work / "rows.npz",
        ids=np.array(ids * repeated, np.int64)[: needed * SEQ_LEN].reshape(shape),
        labels=np.array(labels * repeated, np.int64)[: needed * SEQ_LEN].reshape(shape),
    )


def meshtune_config(work: Path, run: Path, steps: int, dtype: str, labelled: str) -> str:
    """Text of a config file. run: the run folder. dtype: train.precision. labelled: data.train_on."""
    settings = {
        "model": {"name": str(work / "model")},
        "data": {
            "train": str(work / "train.jsonl"), "columns": {"prompt": "question", "completion": "answer"},
            "seq_len": SEQ_LEN, "packing": True, "train_on": labelled, "cache": str(work / "cache"),
        },
        "train": {
            "global_batch_size": ROWS_PER_STEP, "max_steps": steps, "learning_rate": LEARNING_RATE,
            "lr_scheduler": "constant", "warmup_ratio": 0.0, "precision": dtype,
        },
        "layout": f"mb{MICRO_BATCH}-ga{ACCUMULATION}",
        "checkpoint": {"every": 0},
        "log": {"to": ["jsonl"]},
        "output": str(run),
    }  # fmt: skip
    if labelled == "dpo":
        pairs = {"train": str(work / "pairs.jsonl"), "seq_len": 2 * SEQ_LEN, "cache": str(work / "cache")}
        settings |= {"objective": "dpo", "data": {**pairs, "packing": True}}
        settings["train"]["global_batch_size"] = ROWS_PER_STEP // 2
        settings["layout"] = f"mb{MICRO_BATCH // 2}-ga{ACCUMULATION}"
    return json.dumps(settings, indent=2)  # JSON is YAML


# Running them #


def start(command: list[str], threads: int) -> tuple[float, int]:
    """Run a process to its end; (wall seconds, its maximum resident size in bytes).

    Raises SystemExit, with the output, if it fails.
    """
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output.read()[-4000:]}")
    return time.perf_counter() - started, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def worker(name: str, work: Path, threads: int, **settings: Any) -> dict[str, Any]:
    """Run WORKERS[name](work, **settings) in a process of its own.

    Returns its result with "peak_bytes" and "wall_seconds" of the process.
    """
    result = work / "result.json"
    command = [
        sys.executable,
        __file__,
        "--worker",
        name,
        "--work",
        str(work),
        "--settings",
        json.dumps(settings),
    ]
    wall, resident = start(command, threads)
    return {**json.loads(result.read_text()), "peak_bytes": resident, "wall_seconds": wall}


def meshtune(
    work: Path, threads: int, steps: int, dtype: str, labelled: str, *, shared: bool = False
) -> dict[str, Any]:
    """Run `meshtune train`; as `worker`, from the rows that it writes. shared: with data.shared_prompts."""
    run = Path(tempfile.mkdtemp(dir=work)) / "run"
    config = run.parent / "config.yaml"
    config.write_text(meshtune_config(work, run, steps, dtype, labelled))
    more = ["data.shared_prompts=true"] if shared else []
    wall, resident = start([sys.executable, "-m", "meshtune", "train", str(config), *more], threads)
    both_sides = float((work / "both_sides").read_text()) if shared else 1.0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    return {
        "seconds": [row["step_seconds"] for row in rows],
        "tokens": [round(row["tokens"] * both_sides) for row in rows],
        "peak_bytes": resident,
        "peak_bytes_in_steps": rows[-1]["peak_memory_bytes"],
        "wall_seconds": wall,
    }


def tokens_per_second(found: dict[str, Any], warm_up: int) -> float:
    """Real tokens per second over all steps but the first `warm_up`."""
    return sum(found["tokens"][warm_up:]) / sum(found["seconds"][warm_up:])


def labels_of(variant: str) -> str:
    """Labels of a variant: "completion", "all" tokens, or "dpo" for pairs."""
    return "dpo" if variant == DPO else "all" if "all-labelled" in variant else "completion"


def train_rounds(work: Path, options: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """Variant -> contender -> medians and the single runs.

    Every round runs all variants and contenders, so that a slow minute of the machine hits all of them.
    """
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for turn in range(options.rounds):
        for variant in options.variants:
            dtype, labelled = variant.split("-")[0], labels_of(variant)
            contenders = [name for name in VARIANTS[variant] if name in options.contenders]
            shift = turn % len(contenders)  # nobody is always first
            for name in [*contenders[shift:], *contenders[:shift]]:
                settings = {"steps": options.steps + options.warm_up, "dtype": dtype, "labelled": labelled}
                if name.startswith("meshtune"):
                    found = meshtune(work, options.threads, **settings, shared=name != "meshtune")
                else:
                    found = worker(name, work, options.threads, **settings)
                found["tokens_per_second"] = tokens_per_second(found, options.warm_up)
                runs.setdefault(variant, {}).setdefault(name, []).append(found)
                say(f"{variant} {name} round {turn + 1}: {found['tokens_per_second']:.0f} tokens/s, "
                    f"{found['peak_bytes'] / 2**20:.0f} MiB, {found['wall_seconds']:.0f} s")  # fmt: skip
    keys = ("tokens_per_second", "peak_bytes", "wall_seconds")
    return {
        variant: {
            name: {**{key: statistics.median(run[key] for run in each) for key in keys}, "runs": each}
            for name, each in by_name.items()
        }
        for variant, by_name in runs.items()
    }


def preparation(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Contender -> median tokens/s of tokenising and packing the whole file.

    TRL with one process and with one per thread.
    """
    tried = {
        "meshtune": ("prepare-meshtune", {}),
        "trl": ("prepare-trl", {"processes": None}),
        f"trl, {options.threads} processes": ("prepare-trl", {"processes": options.threads}),
    }
    rates: dict[str, list[float]] = {name: [] for name in tried}
    for _ in range(min(options.rounds, 3)):  # the files are the same each time
        for name, (who, settings) in tried.items():
            rates[name].append(tokens_per_second(worker(who, work, options.threads, **settings), 0))
            say(f"preparing, {name}: {rates[name][-1]:,.0f} tokens/s")
    return {name: statistics.median(each) for name, each in rates.items()}


def help_seconds(rounds: int) -> float:
    command = [sys.executable, "-m", "meshtune", "--help"]
    return statistics.median(start(command, 1)[0] for _ in range(rounds))


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


# What came out #


def ratios(result: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(what, measured, target) of the targets whose contenders were run.

    Speeds are compared round by round, and the median of those ratios counts: a machine whose own speed
    drifts changes both sides of a round.
    """
    found = []

    def add(what: str, top: float | None, bottom: float | None, target: str) -> None:
        """Add top / bottom; nothing if one of them is missing."""
        if top and bottom:
            found.append((what, top / bottom, target))

    def add_speeds(what: str, ours: list[float] | None, theirs: list[float] | None, target: str) -> None:
        """Add the median of ours / theirs, round by round; nothing if one of them is missing."""
        if ours and theirs:
            pairs = zip(ours, theirs, strict=True)
            found.append((what, statistics.median(top / bottom for top, bottom in pairs), target))

    for variant, contenders in result["training"].items():
        speed = {
            name: [run["tokens_per_second"] for run in each["runs"]] for name, each in contenders.items()
        }
        peak = {name: each["peak_bytes"] for name, each in contenders.items()}
        floor = "≥ 0.97" if "all-labelled" in variant else "≥ 1.04"
        add_speeds(
            f"{variant}: meshtune / hand-written loop, tokens/s",
            speed.get("meshtune"),
            speed.get("hand"),
            floor,
        )
        rivals = (("trl", "≥ 2.15" if variant == "fp32" else "≥ 2"), ("trl-wrapped", "—"), ("trl-dpo", "≥ 2"))
        for name, target in rivals:
            what = f"{variant}: meshtune / {name}, tokens/s"
            add_speeds(what, speed.get("meshtune"), speed.get(name), target)
        shared = speed.get("meshtune-shared")
        add_speeds(f"{variant}: meshtune-shared / trl-dpo, tokens/s", shared, speed.get("trl-dpo"), "≥ 2")
        add(f"{variant}: meshtune / trl, peak memory", peak.get("meshtune"), peak.get("trl"), "≤ 0.72")
        add(f"{variant}: meshtune / trl-dpo, peak memory", peak.get("meshtune"), peak.get("trl-dpo"), "≤ 0.7")
    rates = result["preparation"]
    best = max((rate for name, rate in rates.items() if name.startswith("trl")), default=None)
    add("preparing GSM8K: meshtune / TRL's better, tokens/s", rates.get("meshtune"), best, "≥ 1.5")
    add("meshtune --help, seconds", result["help_seconds"], 1.0, "< 0.5")
    return found


def markdown(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# One device",
        "",
        f"{result['date']} · {result['machine']} · {result['threads']} threads · {versions}",
        "",
        f"Llama, {result['parameters'] / 1e6:.1f} M parameters · GSM8K · {SEQ_LEN} tokens a row, "
        f"micro-batch {MICRO_BATCH}, {ACCUMULATION} micro-batches a step · {result['steps']} steps after "
        f"{result['warm_up']} of warm-up, medians of {result['rounds']} interleaved runs.",
        "The targets' speeds are medians of the ratios inside a round.",
        "",
    ]
    for variant, contenders in result["training"].items():
        lines += [
            f"## {variant}",
            "",
            "| | tokens/s | lowest – highest | peak memory, MiB |",
            "|---|---:|---:|---:|",
        ]
        for name, each in contenders.items():
            speeds = [run["tokens_per_second"] for run in each["runs"]]
            spread = f"{min(speeds):.0f} – {max(speeds):.0f}"
            peak = each["peak_bytes"] / 2**20
            lines.append(f"| {name} | {each['tokens_per_second']:.0f} | {spread} | {peak:.0f} |")
        lines.append("")
    lines += ["## Preparing GSM8K", "", "| | tokens/s |", "|---|---:|"]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in result["preparation"].items()]
    lines += ["", "## Against the targets", "", "| | measured | target |", "|---|---:|---:|"]
    lines += [f"| {what} | {value:.2f} | {target} |" for what, value, target in ratios(result)]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """The CPU's name and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl (question, answer)", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="steps before; meshtune watches its memory in two of them"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--against", type=Path, help="another checkout's root: only the two are compared")
    parser.add_argument("--pairs", type=int, default=20, help="steps of each that are compared")
    parser.add_argument("--quick", action="store_true", help="one short round, written to a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.worker:
        found = WORKERS[options.worker](options.work, **json.loads(options.settings))
        (options.work / "result.json").write_text(json.dumps(found))
        return
    if options.quick:
        options.rounds, options.steps, options.warm_up = 1, 1, 1
        options.out = Path(tempfile.mkdtemp())
    data = options.data or Path(__file__).resolve().parents[2] / "shared/data/gsm8k/train.jsonl"
    if not data.exists():
        raise SystemExit(f"There is no {data}; name GSM8K's train.jsonl with --data.")
    if options.against:
        return compare(options, data)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        set_up(work, data, needed=(options.steps + options.warm_up) * ROWS_PER_STEP)
        parameters = sum_parameters(work / "model")
        result = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "machine": processor(),
            "threads": options.threads,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("meshtune", "torch", "transformers", "trl")},
            "parameters": parameters,
            "steps": options.steps,
            "warm_up": options.warm_up,
            "rounds": options.rounds,
            "help_seconds": help_seconds(max(3, options.rounds)),
            "preparation": preparation(work, options),
            "training": train_rounds(work, options),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"single_device-{datetime.now(UTC):%Y-%m-%d}"
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    (options.out / f"{name}.md").write_text(markdown(result))
    print(markdown(result))
    say(f"written: {options.out / name}.json and .md")


def compare(options: argparse.Namespace, data: Path) -> None:
    """Print how fast this checkout trains beside options.against, for each of options.variants.

    data: GSM8K's train.jsonl.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        set_up(work, data, needed=0)
        for variant in options.variants:
            dtype, labelled = variant.split("-")[0], labels_of(variant)
            config = work / f"{variant}.yaml"
            config.write_text(meshtune_config(work, work / "run", 1, dtype, labelled))
            figures = paired(
                [str(config)], other=options.against, threads=options.threads, pairs=options.pairs, say=say
            )
            print(f"{variant}, {options.threads} threads: {sentence(figures)}", flush=True)


def sum_parameters(model: Path) -> int:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a mapping


if __name__ == "__main__":
    main()
