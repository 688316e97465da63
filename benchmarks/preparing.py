"""How fast conversations become packed sequences: this checkout, another one, TRL; short and long chats.

    python benchmarks/preparing.py --data train.jsonl --against ../meshtune-before --rounds 5

Chats of 1 and of --turns turns are made of GSM8K's questions and answers and written under ChatML, with a
byte-level BPE of 8,192 tokens trained on them. Each contender runs in a process of its own with one thread,
in turn, and reports tokens per second of processor time, from rows on disk to packed sequences in which
every answer is labelled.

    python benchmarks/preparing.py --data train.jsonl --rows 1000000

instead prints the memory that preparing so many short rows takes beyond the start, in bytes a row.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SEQ_LEN = 4096
CHATML = (  # TRL needs the marks of generation to label answers
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prepare_meshtune(work: Path, rows: Path) -> tuple[int, float]:
    """(Tokens, seconds of processor time) of meshtune, with nothing cached."""
    from transformers import AutoTokenizer

    from meshtune.data.encode import Encoder
    from meshtune.data.example import Source
    from meshtune.data.prepare import prepare

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    encoder = Encoder(tokenizer, train_on="assistant", chat_template=None)
    cache = Path(tempfile.mkdtemp(dir=work))
    started = time.process_time()
    try:
        from meshtune.data.recipe import Recipe

        prepared = prepare(Recipe((Source(str(rows)),), encoder, seq_len=SEQ_LEN), cache)
    except ImportError:  # of a checkout before Recipe
        prepared: Any = prepare([Source(str(rows))], encoder, seq_len=SEQ_LEN, cache_dir=cache)  # pyright: ignore
    return prepared.stats["train"]["tokens"], time.process_time() - started


def prepare_trl(work: Path, rows: Path) -> tuple[int, float]:
    """(Tokens, seconds of processor time) of TRL's SFTTrainer with best-fit packing."""
    from datasets import disable_caching, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    disable_caching()
    seconds = []

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            found = super()._prepare_dataset(*args, **kwargs)
            seconds.append(time.process_time() - started)
            return found

    started = time.process_time()
    cache = tempfile.mkdtemp(dir=work)
    data = load_dataset("json", data_files=str(rows), split="train", cache_dir=cache)
    seconds.append(time.process_time() - started)
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(work / "model"),
        args=SFTConfig(
            output_dir=cache, max_length=SEQ_LEN, packing=True, use_cpu=True, report_to="none",
            disable_tqdm=True, bf16=False, assistant_only_loss=True,
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(work / "model"),
    )  # fmt: skip
    assert trainer.train_dataset is not None
    return sum(len(row) for row in trainer.train_dataset["input_ids"]), sum(seconds)


def set_up(work: Path, data: Path, turns: list[int]) -> dict[int, Path]:
    """Write a tiny model, its tokenizer, and a file of chats for each number of turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([row["question"] + row["answer"] for row in rows], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHATML,
    )  # fmt: skip
    tokenizer.save_pretrained(work / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(work / "model")
    chats = {}
    for number in turns:
        chats[number] = work / f"chats-{number}.jsonl"
        with chats[number].open("w") as file:
            for first in range(0, len(rows) - number + 1, number):
                turn = [
                    {"role": role, "content": row[column]}
                    for row in rows[first : first + number]
                    for role, column in (("user", "question"), ("assistant", "answer"))
                ]
                file.write(json.dumps({"messages": turn}) + "\n")
    return chats


def memory(rows: int) -> float:
    """Bytes a row that this process holds at most beyond its start, while preparing `rows` short rows.

    Counted is anonymous memory, looked at every 10 ms; a stand-in encodes each byte as a token.
    """
    import threading

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "unit" / "data"))
    from data_rows import Bytes, prepare  # pyright: ignore[reportMissingImports]

    from meshtune.data.example import Source

    def held() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w") as out:
            for row in range(rows):
                out.write(json.dumps({"prompt": f"{row}?", "completion": "x" * (row * 7 % 40 + 1)}) + "\n")
        done, most, start = threading.Event(), [0], held()

        def watch() -> None:
            while not done.wait(0.01):
                most[0] = max(most[0], held())

        watcher = threading.Thread(target=watch)
        watcher.start()
        prepare([Source(str(file))], Bytes(), seq_len=2048, cache_dir=folder)
        done.set()
        watcher.join()
    return (most[0] - start) / rows


def rate(who: str, work: Path, rows: Path, source: Path) -> float:
    """Tokens per second of one contender in a process of its own. source: the folder that has meshtune."""
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(
        [sys.executable, __file__, "--worker", who, "--work", str(work), "--data", str(rows)],
        env=os.environ | threads | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    tokens, seconds = json.loads(found.stdout.splitlines()[-1])
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="jsonl with question and answer")
    parser.add_argument("--against", type=Path, help="root of another checkout")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, help="measure memory with so many rows instead")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        prepare = prepare_trl if options.worker == "trl" else prepare_meshtune
        print(json.dumps(prepare(options.work, options.data)))
        return
    if options.rows:
        print(f"{options.rows:,} rows: {memory(options.rows):.0f} bytes a row beyond the start")
        return
    here = Path(__file__).resolve().parent.parent / "src"
    contenders = {"meshtune": here, "trl": here}
    if options.against:
        contenders["other"] = options.against.resolve() / "src"
    print(f"# {datetime.now(UTC):%Y-%m-%d}, tokens per second of processor time, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        for turns, rows in set_up(Path(folder), options.data, options.turns).items():
            rates: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(options.rounds):
                for name, source in contenders.items():
                    rates[name].append(rate(name, Path(folder), rows, source))
            for name, each in rates.items():
                ratios = [ours / theirs for ours, theirs in zip(rates["meshtune"], each, strict=True)]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                print(
                    f"{turns} turns, {name}: {statistics.median(each):,.0f}; meshtune is "
                    f"{statistics.median(ratios):.2f} x as fast ({spread})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
