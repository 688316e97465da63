"""Every command that an example's header names runs as written, on small stand-ins for model, data and batch.

Commands for many GPUs are checked up to the choice of layout and attention.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from cases import cases
from command import Command
from families import SPARSE
from tiny import make_rows, write_rows
from transformers import AutoModelForCausalLM

from meshtune import config
from meshtune.api import choose
from meshtune.rundir import RunDir

EXAMPLES = sorted(Path("examples").glob("*.yaml"))
COMMAND = re.compile(
    r"(?:(?P<launcher>torchrun|srun)\b[^#]*?)?\bmeshtune (?P<words>(?:train|plan|data) examples/\S+(?: \S+)*)"
)
HUB_ID = re.compile(r"(?<=name: )[A-Za-z][\w-]*/[\w.-]+")
MIXTURE = re.compile(HUB_ID.pattern + "A3B")
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MANY = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 256}


def header(file: Path) -> str:
    """The comment at the top of an example, as one line of text for each command."""
    lines = file.read_text().split("\n")
    comment = [line[1:].strip() for line in lines if line.startswith("#")]
    return "\n".join(comment).replace("\\\n", " ")


def commands() -> list[tuple[str, str]]:
    """(Example, words after `meshtune`) of every command in a header, and the training of every example."""
    found = []
    for file in EXAMPLES:
        named = [
            (match["words"].split("  ")[0], match["launcher"]) for match in COMMAND.finditer(header(file))
        ]
        local = [words for words, launcher in named if not launcher]
        if not any(words.startswith("train") for words in local) and file.stem not in MANY_RANKS:
            local.append(f"train {file} train.max_steps=2")
        found += [(file.name, words) for words in local]
    return found


MANY_RANKS = {file.stem for file in EXAMPLES if "parallel" in file.stem or "srun" in file.read_text()}
QUICK = [("full.yaml", "train examples/full.yaml train.max_steps=5")]


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: examples/ with names of local models, and the data files that they name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    shutil.copy(Path(__file__).parents[2] / "examples" / "prices.toml", tmp_path / "examples")
    for name in ("base", "my-config"):
        shutil.copytree(tiny / "model", tmp_path / name)
    shutil.copytree(tiny / "model", tmp_path / "chat")
    settings = json.loads((tmp_path / "chat" / "tokenizer_config.json").read_text())
    (tmp_path / "chat" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}))
    shutil.copytree(Path(__file__).parents[2] / "quickstart", tmp_path / "quickstart")
    rows = make_rows(120)
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in rows
    ]
    write_rows(tmp_path / "conversations.jsonl", chats)
    (tmp_path / "conversations").mkdir()
    write_rows(tmp_path / "conversations" / "one.jsonl", chats)
    alpaca = [{"instruction": row["prompt"], "output": row["completion"]} for row in rows]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))
    write_rows(tmp_path / "text.jsonl", [{"text": row["completion"]} for row in rows])
    write_rows(tmp_path / "questions.jsonl", [asked(row) for row in rows])
    others = [row["completion"] for row in rows[1:] + rows[:1]]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other}
        for row, other in zip(rows, others, strict=True)
        if row["completion"] != other
    ]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    return tmp_path


def asked(row: dict[str, str]) -> dict[str, str]:
    return {"question": row["prompt"], "answer": row["completion"]}


def stand_in(example: str, place: Path) -> Path:
    """Copy an example to `place`, with a local folder for its hub id, and write its data files."""
    text = (Path(__file__).parents[2] / "examples" / example).read_text()
    text = text.replace("runs/quickstart/model", "./quickstart/base")
    if MIXTURE.search(text):
        shutil.copytree(place / "chat", place / "mixture")
        mixture = AutoModelForCausalLM.from_config(
            SPARSE["qwen3_moe"](vocab_size=300, num_experts=8, num_local_experts=8)
        )
        mixture.save_pretrained(place / "mixture")
        text = MIXTURE.sub("mixture", text)
    text = HUB_ID.sub(lambda name: "base" if re.search("Base|bloom", name[0]) else "chat", text)
    text = text.replace("openai/gsm8k:main", "questions.jsonl").replace(
        "HuggingFaceFW/fineweb-edu:sample-10BT", "text.jsonl"
    )
    text = text.replace("eval_split: 500", "eval_split: 50")
    if Path(example).stem not in MANY_RANKS:
        text = re.sub(r"global_batch_size: \d+", "global_batch_size: 4", text).replace("262144", "16384")
    rows = (make_rows(120), make_rows(20, seed=1))
    for name, some in zip(("train", "test"), rows, strict=True):
        write_rows(place / f"{name}.jsonl", [asked(row) for row in some] if "question" in text else some)
    file = place / "examples" / example
    file.write_text(text)
    return file


@pytest.mark.parametrize(("example", "words"), cases(commands(), ci=QUICK))
def test_a_command_of_an_examples_header_runs(
    example: str, words: str, meshtune: Command, place: Path
) -> None:
    file = stand_in(example, place)
    meshtune(*words.split(), *([f"data.cache={place / 'cache'}"] if not words.startswith("plan") else []))
    if words.startswith("train"):
        run = RunDir(config.load(file).output)
        assert run.rows("end")[-1]["status"] == "finished"
        assert (run.model / "README.md").exists()
        pairs = config.load(file).objective not in ("sft", "kto")
        assert all(("rewards/accuracies" in row) == pairs for row in run.rows("eval"))
    if "--plot" in words:
        assert (place / "plan.html").exists()


@pytest.mark.ci
def test_the_adapter_of_lora_yaml_is_merged_by_the_command_in_its_header(
    meshtune: Command, place: Path
) -> None:
    assert "`meshtune export runs/lora merged --merge`" in header(stand_in("lora.yaml", place))
    meshtune("train", "examples/lora.yaml", "data.cache=cache", "train.max_steps=2")
    meshtune("export", "runs/lora", "merged", "--merge")
    assert (place / "merged" / "model.safetensors").exists()


@pytest.mark.ci
def test_the_same_command_resumes_long_run_yaml(meshtune: Command, place: Path) -> None:
    stand_in("long-run.yaml", place)
    words = ("train", "examples/long-run.yaml", "data.cache=cache")
    meshtune(*words, "train.max_steps=1")
    meshtune(*words, "train.max_steps=2")
    assert RunDir("runs/long-run").rows("run")[-1]["resumed_from"] == 1


@pytest.mark.parametrize(
    "example", cases([file.name for file in EXAMPLES if file.stem in MANY_RANKS], test=["parallel-3d.yaml"])
)
def test_an_example_for_many_gpus_is_taken_by_a_deep_model(example: str, place: Path) -> None:
    file = stand_in(example, place)
    for name, blocks in (("chat", 32), ("mixture", 48)):
        if (shape := place / name / "config.json").exists():
            large = MANY | {"head_dim": 8, "num_hidden_layers": blocks}
            shape.write_text(json.dumps(json.loads(shape.read_text()) | large))
    read = config.load(file, ["train.device=cpu"])
    named = re.search(r"--(?:nnodes|nodes) (\d+) --\S*per-node (\d+)", header(file))
    ranks = int(named[1]) * int(named[2]) if named else read.partial_layout.world
    assert ranks is not None and choose.choose(read, ranks).layout.world == ranks
