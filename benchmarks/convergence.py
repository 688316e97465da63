"""Held-out loss on GSM8K of what needs less memory against what it stands for, three seeds.

    python benchmarks/convergence.py ../shared/data/gsm8k [--recipes bf16,fp8] [--steps 100] [--seeds 3]
        [--learning-rate 1e-5] [--from-scratch] [--width 256] [--held-out 400]

A Llama of 3 M parameters learns two thirds of GSM8K's training rows from scratch, unless the recipes start
there; then each recipe tunes it on the rest with answers labelled, and is evaluated on rows of the test set.
A recipe is compared with the one that it stands for, seed by seed.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from meshtune import precision, train

LORA = ("method=lora", "lora.r=16", "lora.alpha=32", "train.learning_rate=1e-3")
FULL = ("method=full", "train.learning_rate=3e-4")
RECIPES = {  # name -> (that it stands for, its settings)
    "lora": ("lora", LORA),
    "qlora": ("lora", ("method=qlora", *LORA[1:])),
    "adamw": ("adamw", FULL),
    "adamw-8bit": ("adamw", (*FULL, "train.optimizer=adamw-8bit")),
    "bf16": ("bf16", (*FULL, "train.precision=bf16")),
    "fp8": ("bf16", (*FULL, "train.precision=fp8")),
    "fp8-rowwise": ("bf16", (*FULL, "train.precision=fp8-rowwise")),
}
VOCABULARY, WIDTH, HELD_OUT = 2048, 256, 400  # width: 3 M parameters
COMMON = (
    "data.seq_len=256", "train.global_batch_size=8", "layout=mb8-ga1", "train.precision=fp32",
    "log.to=[jsonl]", "checkpoint.every=0", "output_exists=replace", "eval.at_start=true",
)  # fmt: skip


def make_base(folder: Path, rows: list[dict[str, str]], width: int = WIDTH) -> None:
    """Write a folder with a model that was not trained, and a tokenizer of the rows' words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((text for row in rows for text in row.values()), words)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0,
        bos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def held_out_losses(folder: Path, *settings: str) -> tuple[float, float]:
    """Train a model into a folder, and return its loss on the held-out rows before and after."""
    result = train({}, [*COMMON, f"output={folder}", *settings], nproc=1)
    losses = [row["loss"] for row in result.rows if row["kind"] == "eval"]
    return losses[0], losses[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of these, comma-separated")
    parser.add_argument("--learning-rate", help="of all recipes, instead of their own")
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--width", type=int, default=WIDTH, help="of hidden states; 128: 1.2 M parameters")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="rows of the evaluation")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    precision.FP8_LEAST = 16  # else matrices of this model keep 16 bits
    found: dict[str, list[float]] = {name: [] for name in options.recipes.split(",")}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = (options.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
        first = len(lines) * 2 // 3
        tested = (options.data / "test.jsonl").read_text(encoding="utf-8").splitlines()[: options.held_out]
        parts = {"first": lines[:first], "rest": lines[first:], "test": tested}
        for name, part in parts.items():
            (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
        make_base(folder / "untrained", [json.loads(line) for line in parts["first"]], options.width)
        rows = "data.columns={prompt: question, completion: answer}", f"data.eval={folder / 'test.jsonl'}"
        base = folder / "untrained"
        if not options.from_scratch:
            _, begun = held_out_losses(
                folder / "base", f"model.name={base}", f"data.train={folder / 'first.jsonl'}", *rows,
                "data.train_on=all", f"train.max_steps={4 * options.steps}", "train.learning_rate=1e-3",
            )  # fmt: skip
            base = folder / "base" / "model"
            print(f"from scratch, all tokens: {begun:.4f}", flush=True)
        rate = [f"train.learning_rate={options.learning_rate}"] * bool(options.learning_rate)
        for seed, name in product(range(options.seeds), found):
            before, loss = held_out_losses(
                folder / "tuned", f"model.name={base}",
                f"data.train={folder / 'rest.jsonl'}", *rows, f"train.max_steps={options.steps}",
                f"train.seed={seed}", *RECIPES[name][1], *rate,
            )  # fmt: skip
            found[name].append(loss)
            print(f"{name}, seed {seed}: {before:.4f} to {loss:.4f}", flush=True)
    print("| recipe | held-out losses | from |\n| --- | --- | ---: |")
    for name, losses in found.items():
        other = RECIPES[name][0]
        more = statistics.mean(one / two - 1 for one, two in zip(losses, found[other], strict=True))
        print(f"| {name} | {', '.join(f'{loss:.4f}' for loss in losses)} | {more:+.2%} of {other}'s |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
