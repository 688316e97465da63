"""Everything that waits for a GPU, in one command of under nine minutes: `make gpu-check`. No network,
nothing installed.

    environment   versions, the device, and which packages are missing (only what needs them is skipped)
    tests         tests/gpu: CUDA attention against the oracles, the front door against the CPU
    reserved      bytes that torch's allocator holds in a step, against the dry run's replay: within 5 %
    kernels       the fastest of three bf16 matmuls, and this engine's attention by length, alone, beside what
                  the planner takes for them
    throughput    `meshtune train` on a 1.2 B Llama with random weights, bf16, packed rows of 4096 tokens:
                  recomputation modes, compiled blocks, LoRA; beside a hand-written loop and
                  transformers.Trainer on ready batches
    memory        the peak of each of these runs, and the state alone (weights, gradients, optimizer)
    large         full fine-tuning of an 8 B Llama in bf16 with fp32 masters: does it fit, how fast

Results go to benchmarks/results/gpu-<date>.json and .md, and to $OUT where it is set. A part that fails is
recorded with its error and the next one runs; a part that would not end in time is skipped and recorded as
such.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUDGET_SECONDS = 520
NEEDED = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "yaml",
    "typer",
    "rich",
    "pydantic",
    "xxhash",
    "psutil",
)
OPTIONAL = (
    "datasets",
    "altair",
    "vl_convert",
    "pytest",
    "peft",
    "accelerate",
    "tensorboard",
    "trl",
    "liger_kernel",
)
DISTRIBUTIONS = {"yaml": "pyyaml", "liger_kernel": "liger-kernel", "vl_convert": "vl-convert-python"}
RESERVED = "tests/gpu/test_gpu_reserved.py"
SEQ_LEN, MICRO_BATCH, ACCUMULATION, STEPS, WARM_UP = 4096, 4, 2, 12, 4
ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32768}  # fmt: skip
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip


def environment() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in (*NEEDED, *OPTIONAL):
        try:
            found[name] = version(DISTRIBUTIONS.get(name, name))
        except PackageNotFoundError:
            found[name] = None
    found["missing"] = [name for name in (*NEEDED, *OPTIONAL) if importlib.util.find_spec(name) is None]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory}
    return found


def write_folder(folder: Path, shape: dict[str, Any]) -> Path:
    """Write config.json and a tokenizer of 20,000 words to `folder` and return it; no weights (init: random).

    shape: arguments of LlamaConfig.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 20000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    LlamaConfig(**shape, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False).save_pretrained(folder)
    return folder


def write_rows(file: Path, tokens: int) -> Path:
    """Write prompts and completions of unequal lengths (log-normal), `tokens` in all or a few more."""
    draw, total = random.Random(0), 0
    with file.open("w") as out:
        while total < tokens:
            asked, answered = (min(3000, int(draw.lognormvariate(5, 1)) + 1) for _ in range(2))
            prompt, completion = (
                " ".join(f"w{draw.randint(3, 19999)}" for _ in range(n)) for n in (asked, answered)
            )
            out.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
            total += asked + answered
    return file


def meshtune(work: Path, name: str, *settings: str, seconds: float) -> dict[str, Any]:
    """Run `meshtune train`; medians of its rows after the warm-up, and the planner's prediction.

    work: folder with rows.jsonl. name: of the run's folder, which is deleted afterwards. settings: key=value.
    Without rows {"error": the end of stderr}. Raises TimeoutExpired after `seconds`.
    """
    import yaml

    output = work / name
    command = [
        sys.executable, "-m", "meshtune", "train", "model.init=random", f"data.train={work / 'rows.jsonl'}",
        f"data.cache={work / 'cache'}", f"data.seq_len={SEQ_LEN}", "data.train_on=all",
        f"train.global_batch_size={MICRO_BATCH * ACCUMULATION}", f"train.max_steps={STEPS}",
        "train.precision=bf16", "log.to=[jsonl,console]", "checkpoint.every=0", "checkpoint.async_save=false",
        f"output={output}", *settings,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env())
    lines = [line for line in done.stderr.splitlines() if "memory:" in line]
    rows = (
        [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        if output.exists()
        else []
    )
    rows = [row for row in rows if row["kind"] == "train" and row["step"] > WARM_UP]
    predicted = yaml.safe_load((output / "plan.yaml").read_text())["predicted"] if rows else {}
    shutil.rmtree(output, ignore_errors=True)  # checkpoints and models of this size fill a disk
    if not rows:
        return {"error": done.stderr[-1500:]}
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second_per_gpu"] for row in rows),
        "step_seconds": statistics.median(row["step_seconds"] for row in rows),
        "mfu": statistics.median(row["mfu"] or 0 for row in rows),
        "mfu_6n": statistics.median(row["mfu_6n"] or 0 for row in rows),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "losses": [row["loss"] for row in rows],
        "layout": predicted["layout"],
        # the planner's, before the run; its overhead is outside what the allocator has given out
        "predicted_tokens_per_second": predicted["tokens_per_second_per_gpu"],
        "predicted_memory_bytes": predicted["memory"]["peak"] - predicted["memory"]["overhead"],
        "memory": lines,
        "exit_code": done.returncode,
    }


def env() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        "HF_HUB_OFFLINE": "1",
    }


def peer(name: str, folder: Path) -> dict[str, Any]:
    """Train by a hand-written loop or transformers.Trainer on ready batches: bf16 autocast, fp32 weights.

    Runs in a process of its own. name: "hand" or "trainer". folder: of the model. Returns median tokens per
    second, median seconds of a step and peak bytes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).cuda()
    rows = torch.randint(3, 20000, (STEPS * ACCUMULATION * MICRO_BATCH, SEQ_LEN))
    ends: list[float] = []
    if name == "hand":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                start = (step * ACCUMULATION + micro) * MICRO_BATCH
                ids = rows[start : start + MICRO_BATCH].cuda()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss / ACCUMULATION
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
    else:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Clock(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                torch.cuda.synchronize()
                ends.append(time.perf_counter())

        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"), per_device_train_batch_size=MICRO_BATCH, max_steps=STEPS,
            gradient_accumulation_steps=ACCUMULATION, learning_rate=1e-5, optim="adamw_torch_fused",
            bf16=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[Clock()]).train()  # type: ignore
    gaps = [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    seconds = statistics.median(gaps)
    return {
        "tokens_per_second": ACCUMULATION * MICRO_BATCH * SEQ_LEN / seconds,
        "step_seconds": seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }


def run_peer(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    return in_process("--peer", name, "--folder", str(folder), seconds=seconds)


def in_process(*options: str, seconds: float) -> dict[str, Any]:
    """Return what this script prints with these options, or {"error": the end of its stderr}.

    Raises TimeoutExpired after `seconds`.
    """
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env())
    return (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}
    )


def seconds_of(run: Any, repeats: int = 20) -> float:
    """Median seconds of a call on the GPU, after three that warm up."""
    import torch

    times = []
    for repeat in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def kernels() -> dict[str, Any]:
    """TFLOP/s of matmuls by size and of causal attention with 32 heads of 128 by length.

    "planned": the planner's rate of a kernel alone (hardware.toml, kernels.toml); None for a GPU that is not
    in the catalogue.
    """
    import torch

    from meshtune.attention.cuda import varlen
    from meshtune.plan.hardware import catalogue, named
    from meshtune.plan.kernels import kernel_on

    gpu = named(torch.cuda.get_device_name())
    planned = kernel_on("flash-2", gpu, catalogue()) if gpu else None
    make = {"device": "cuda", "dtype": torch.bfloat16}
    found: dict[str, Any] = {"matmul": {"planned": gpu and gpu.matmul_max / 1e12}, "attention": {}}
    for size in (4096, 8192, 16384):
        left, right = torch.randn(size, size, **make), torch.randn(size, size, **make)
        found["matmul"][size] = 2 * size**3 / seconds_of(lambda x=left, y=right: x @ y) / 1e12
    for length in (1024, 4096, 16384, 65536):
        queries, keys, values = (
            torch.randn(1, heads, length, 128, **make, requires_grad=True) for heads in (32, 8, 8)
        )
        forward = partial(varlen, queries, keys, values, ((length,),), 128**-0.5, None)

        def both(run: Any = forward) -> None:
            out = run()
            out.backward(out)

        flops, once = 2 * length**2 * 32 * 128, seconds_of(forward)
        found["attention"][length] = {
            "forward": flops / once / 1e12,
            "backward": 2.5 * flops / (seconds_of(both) - once) / 1e12,
            "planned": planned and planned.heads_128 / (1 + 2 * planned.keys / length) / 1e12,
        }
    return found


def run_kernels(seconds: float) -> dict[str, Any]:
    return in_process("--kernels", seconds=seconds)


def run_tests(seconds: float, *paths: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        *paths,
        "-m",
        "gpu",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
    ]
    if importlib.util.find_spec("pytest_timeout") is None:
        command += ["-o", "timeout=0", "-W", "ignore::pytest.PytestConfigWarning"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env(), cwd=ROOT)
    return {"exit_code": done.returncode, "tail": done.stdout[-4000:] + done.stderr[-500:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=("hand", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(peer(options.peer, options.folder)))
        return
    if options.kernels:
        print(json.dumps(kernels()))
        return
    began = time.monotonic()
    result: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "environment": environment(),
        "parts": {},
    }
    print(json.dumps(result["environment"], indent=1), flush=True)
    if "gpu" not in result["environment"]:
        sys.exit("gpu-check needs a CUDA device; torch sees none.")
    missing = [name for name in NEEDED if name in result["environment"]["missing"]]
    if missing:
        print(f"Missing, so the front door is skipped: {', '.join(missing)}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        one, eight = write_folder(work / "one", ONE_B), write_folder(work / "eight", EIGHT_B)
        write_rows(work / "rows.jsonl", STEPS * MICRO_BATCH * ACCUMULATION * SEQ_LEN)
        one_row = "train.global_batch_size=1"
        of_one = f"model.name={one}"

        def front(name: str, *settings: str) -> Any:
            return lambda left: meshtune(work, name, *settings, seconds=left)

        def other(name: str) -> Any:
            return lambda left: run_peer(name, one, left)

        parts: list[tuple[str, float, bool, Any]] = [  # name, seconds it may take, needs the front door, what
            ("tests", 170, False, lambda left: run_tests(left, "tests/gpu", f"--ignore={RESERVED}")),
            ("reserved", 90, True, lambda left: run_tests(left, RESERVED)),
            ("kernels", 40, False, run_kernels),
            ("meshtune", 90, True, front("none", of_one, f"layout=mb{MICRO_BATCH}")),
            ("hand", 60, False, other("hand")),
            ("trainer", 60, False, other("trainer")),
            ("selective", 60, True, front("selective", of_one, f"layout=mb{MICRO_BATCH}-selective")),
            ("full", 60, True, front("full", of_one, f"layout=mb{MICRO_BATCH}-full")),
            ("compile", 90, True, front("compile", of_one, f"layout=mb{MICRO_BATCH}", "train.compile=true")),
            ("lora", 60, True, front("lora", of_one, f"layout=mb{MICRO_BATCH}", "method=lora")),
            ("8b", 150, True, front("8b", f"model.name={eight}", "layout=mb1-full", one_row)),
        ]  # fmt: skip
        for name, seconds, needs_front, run in parts:
            left = BUDGET_SECONDS - (time.monotonic() - began)
            if needs_front and missing:
                result["parts"][name] = {"skipped": f"missing: {', '.join(missing)}"}
            elif left < 40:
                result["parts"][name] = {"skipped": f"{left:.0f} s left of {BUDGET_SECONDS}"}
            else:
                try:
                    result["parts"][name] = run(min(seconds, left))
                except Exception as error:  # the next part still runs, and this one's error is the record
                    result["parts"][name] = {"error": f"{type(error).__name__}: {str(error)[:1500]}"}
            print(name, json.dumps(result["parts"][name], indent=1), flush=True)
            save(result)
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


def save(result: dict[str, Any]) -> None:
    """Write the results so far as .json and .md, to benchmarks/results and to $OUT if it is set."""
    places = [ROOT / "benchmarks" / "results"] + ([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        name = f"gpu-{result['date']}"
        (place / f"{name}.json").write_text(json.dumps(result, indent=1))
        (place / f"{name}.md").write_text(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    env_ = result["environment"]
    lines = [
        f"# GPU check, {result['date']}", "",
        f"{env_.get('gpu')}, torch {env_['torch']}, transformers {env_['transformers']}, "
        f"CUDA {env_['cuda']}", "",
        "Llama 1.2 B, random weights, rows of 4096 tokens, micro-batch 4, two a step, AdamW; medians "
        "after the warm-up.", "",
        "| run | tokens/s | predicted | MFU | 6N MFU | peak memory GiB | predicted |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, part in result["parts"].items():
        if "tokens_per_second" in part:
            shares = [f"{part[key]:.1%}" if part.get(key) else "" for key in ("mfu", "mfu_6n")]
            peak = part["peak_memory_bytes"] / 2**30
            ours = "predicted_tokens_per_second" in part
            speed = f"{part['predicted_tokens_per_second']:,.0f}" if ours else ""
            held = f"{part['predicted_memory_bytes'] / 2**30:.1f}" if ours else ""
            lines.append(
                f"| {name} | {part['tokens_per_second']:,.0f} | {speed} | {shares[0]} | {shares[1]} | "
                f"{peak:.1f} | {held} |"
            )
        else:
            lines.append(f"| {name} | {json.dumps(part)[:200].replace('|', ' ')} | | | | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
