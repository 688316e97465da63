"""The cases, by kind: `case = KINDS[kind](draw, folder)` damages the materials in `folder` for a command."""

import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from materials import SHORT, turns
from mutations import (
    DAMAGES,
    NUMBERS,
    PATHS,
    TEXTS,
    damaged_file,
    mutated_bytes,
    mutated_tree,
    nasty,
    written,
)


class Case(NamedTuple):
    """A command line, and what was damaged for it."""

    words: list[str]
    mutation: str
    stdin: bytes = b""


Kind = Callable[[Random, Path], Case]
LLAMA = "model.name=models/llama"
GPUS = ["cluster.gpu=h100-sxm", "cluster.gpus=8"]
# A longer run is what such a setting asks for, not a hang.
SHORTENED = [
    "train.max_steps=1", "train.global_batch_size=2", "data.eval=rows.jsonl", "eval.samples=1",
    "eval.max_new_tokens=2",
]  # fmt: skip


def changes(draw: Random) -> int:
    return draw.choice([1, 1, 1, 2, 3])


def encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def mutated_json(file: Path, draw: Random) -> str:
    """Change one to three values of a JSON file; returns how."""
    tree, how = json.loads(file.read_text()), []
    for _ in range(changes(draw)):
        if not isinstance(tree, list | dict) or not tree:
            break
        tree, change = mutated_tree(tree, draw)
        how.append(change)
    file.write_bytes(encoded(written(json.dumps(tree))))
    return f"{file.name}: {'; '.join(how)}"


# Configs and command lines #

SNIPPETS = [
    "!!python/object/apply:os.system [touch x]", "!!int abc", "!!float x", "&a [*a]", "*nothing",
    "? [a, b]\n: c", "\tx: 1", "%YAML 9.9", "---\na: 1\n---\nb: 2", "2026-13-45", "2026-01-01", "0x_", "0b",
    "1_000", "!!binary '@@'", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "<<: 1", "<<: *a", "'open",
    '"\\ud800"', '"\\x"', "{a: [b", "[" * 2000, "- " * 2000, "a: " * 100, "!<tag> x", "!", "| x", ">9\n x",
    "@x", "`x", "1:2:3", ".inf", ".nan", "=", "~", "null", "&a {b: *a}", "12e99999", "9" * 5000,
    "!!timestamp x", "!!str 3", "!!null x", "yes", "y: n",
]  # fmt: skip
BOMB = "\n".join(
    [
        "a0: &a0 [x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)),
        "model: *a9",
    ]
)
LAYOUTS = [
    "auto", "dp2", "zero1x2", "zero3x2-mb1-ga1", "tp2-sp", "pp2-1f1b", "cp2", "ulysses2", "mb1-ga2",
    "zero2x2-full", "dp99999999999999999999", "tp0", "dp2-dp2", "pp2-zbv", "dp-1", "zero4x2", "tp2tp2", "-",
    "mb0",
]  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "{}"],
    "plan": ["plan", "{}"],
    "data": ["data", "{}"],
    "eval": ["eval", "{}", "data.eval=rows.jsonl"],
    "generate": ["generate", "{}", "-p", "Hi", "--max-new-tokens", "2"],
}


def configs(draw: Random, folder: Path) -> Case:
    """A configuration with all settings, damaged; or arguments of any command."""
    if draw.random() < 0.3:
        return arguments(draw, folder)
    tree, text, how = _whole_config(draw), "", []
    form = draw.choice(
        ["typed"] * 8 + ["tree"] * 4 + ["snippet", "snippet", "bytes", "override", "override", "file"]
    )
    words: list[str] = []
    if form == "tree":
        for _ in range(changes(draw)):
            tree, change = mutated_tree(tree, draw)
            how.append(change)
    if form == "typed":
        how = [_typed(tree, draw) for _ in range(changes(draw) + 1)]
    if form == "override":
        for _ in range(changes(draw)):
            key, value = draw.choice(_keys()), nasty(draw)
            word = f"{key}={written(draw.choice([*SNIPPETS, json.dumps(value)]))}"
            words.append(draw.choice([word] * 5 + [key, "=" + key, key + "=", word.upper(), f"{key}.x.y=1"]))
            how.append(f"{words[-1]!r:.80}")
    text = written(yaml.safe_dump(tree, sort_keys=False))
    if form == "snippet":
        lines, snippet = text.split("\n"), draw.choice([*SNIPPETS, BOMB])
        at = draw.randrange(len(lines))
        lines[at] = draw.choice(
            [snippet, f"{lines[at].partition(':')[0]}: {snippet}", lines[at] + "\n" + snippet]
        )
        text, how = "\n".join(lines), [f"line {at} has {snippet!r:.60}"]
    content = encoded(text)
    if form == "bytes":
        content, change = mutated_bytes(content, draw)
        how.append(change)
    (folder / "config.yaml").write_bytes(content)
    if form == "file":
        change = draw.choice(list(DAMAGES))
        DAMAGES[change](folder / "config.yaml")
        how.append(change)
    command = draw.choice(list(COMMANDS))
    shortened = SHORTENED if command in ("train", "eval") else []
    line = [word.format("config.yaml") for word in COMMANDS[command]]
    return Case([*line, *shortened, *map(argument, words)], f"{form}: {'; '.join(how)}")


def _whole_config(draw: Random) -> dict[str, Any]:
    """Every setting of a small run, as plain values."""
    from meshtune import config

    tree = config.load(None, [LLAMA, *SHORT, *SHORTENED, "output=new"]).model_dump(mode="json")
    tree["layout"] = draw.choice(LAYOUTS) if draw.random() < 0.3 else "auto"
    tree["cluster"] = {"gpu": "h100-sxm", "gpus": 8, "gpus_per_node": 8} if draw.random() < 0.5 else "auto"
    tree["method"] = draw.choice(["full", "lora"])
    return tree


def _typed(tree: dict[str, Any], draw: Random) -> str:
    """Give one setting another value of the type it has; returns how."""
    from meshtune import config

    section = draw.choice([part for part in tree.values() if isinstance(part, dict)])
    key = draw.choice(list(section))
    words = [*LAYOUTS, *PATHS, *TEXTS, "rows.jsonl", "models/qwen3", "models/gpt2", "runs/done", "chatml"]
    annotations = [part.annotation for part in config.Config.model_fields.values()]
    literals = [literal for part in annotations if hasattr(part, "model_fields") and key in part.model_fields  # pyright: ignore
                for literal in _literals(part.model_fields[key].annotation)]  # fmt: skip
    old = section[key]
    if isinstance(old, bool):
        section[key] = not old
    elif literals and draw.random() < 0.9:
        section[key] = draw.choice(literals)
    elif isinstance(old, int | float) or (old is None and draw.random() < 0.5):
        section[key] = draw.choice([*NUMBERS, 3, 4, 16, 100, 0.1, 0.01, 0.9])
    elif isinstance(old, str | None):
        section[key] = draw.choice(words)
    elif isinstance(old, list):
        section[key] = draw.choice(
            [
                old[:0],
                old * 2,
                [draw.choice(words)],
                [{"path": draw.choice(words), "weight": draw.choice(NUMBERS)}],
            ]
        )
    else:
        section[key] = {draw.choice(words): draw.choice([*words, *NUMBERS])}
    return f"{key} = {section[key]!r:.60}"


def _literals(annotation: Any) -> list[Any]:
    """The values of every Literal in a type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _literals(part)]


def _keys() -> list[str]:
    from meshtune import config

    return list(config.SETTINGS)


def argument(text: Any) -> str:
    """Text as a process can get it: without NUL, surrogates as bytes that are not UTF-8."""
    return os.fsdecode(encoded(str(text)).replace(b"\0", b""))


# Words of each command that work, before one of them is damaged.
WORDS: dict[str, list[str]] = {
    "train": [LLAMA, *SHORT, "train.max_steps=1", "output=new"],
    "plan": [LLAMA, *GPUS],
    "data": [LLAMA, *SHORT],
    "eval": ["runs/done", "data.eval=rows.jsonl"],
    "generate": ["models/llama", "-p", "Hi", "--max-new-tokens", "2"],
    "export": ["runs/done", "exported"],
    "chat": ["models/qwen3", "--max-new-tokens", "2"],
    "report": ["runs/done", "runs/lora"],
    "env": ["--model", "models/llama"],
}


def arguments(draw: Random, folder: Path) -> Case:
    """A command with options and arguments that no one would give it."""
    import typer

    from meshtune.cli import app

    group: Any = typer.main.get_command(app)
    name = draw.choice(list(WORDS))
    words, before = list(WORDS[name]), list(WORDS[name])
    flags = [
        option
        for parameter in group.commands[name].params
        for option in parameter.opts
        if option.startswith("-")
    ]
    for _ in range(changes(draw)):
        value = argument(
            draw.choice(
                [
                    nasty(draw), draw.choice(PATHS), draw.choice(TEXTS), draw.choice(LAYOUTS), "1,x",
                    "x.png", "seq_len", "model", "batch", "cost", "megatron", "deepspeed", "runs/lora",
                    "rows.jsonl",
                ]
            )
        )[:5000]  # fmt: skip
        at = draw.randrange(len(words) + 1)
        change = draw.choice(["option"] * 4 + ["word", "replace", "drop", "double"])
        if change == "option" and flags:
            words += [draw.choice(flags), value] if draw.random() < 0.8 else [draw.choice(flags)]
        elif change == "replace" and words:
            words[at - 1] = value
        elif change == "drop":
            words[at : at + 1] = []
        elif change == "double":
            words[at:at] = words[at : at + 1]
        else:
            words.insert(at, value)
    stdin = draw.choice([b"", b"Hi\n", b"\xff\xfe\n", b"\n\n", b"\0"])
    return Case([name, *words], f"arguments: {[word for word in words if word not in before]!r:.150}", stdin)


# Model folders #

TEMPLATES = [
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages.__class__.__mro__ }}",
    "{% include 'x' %}", "{% if %}", "{{ 1/0 }}", "{{ raise_exception('no') }}", "", " ", "x",
    "{{ messages }}", "{{ messages[99].content }}", "{{ '\\ud800' }}", "{{ undefined.x }}",
    "{{ messages|tojson }}" * 50, "{% set x = 'a' * 99999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "{{ '%999999999d' % 1 }}", "{{ '{:999999999}'.format(1) }}", "{{ 9 ** 999999999 }}",
    "{{ lipsum(n=10**6) }}", "{{ [1] * 10**9 }}", "{{ 'x'.center(10**9) }}",
    "{{ ('x' * 10**4).replace('x', 'x' * 10**5) }}", "{% filter indent(10**9) %}x{% endfilter %}",
]  # fmt: skip
NORMALIZERS = [
    {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 100_000},
    {"type": "Prepend", "prepend": "x" * 10**6}, {"type": "Nothing"},
    {"type": "Sequence", "normalizers": []},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "ab"},
    {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "eeee"}] * 12,
    },
]  # fmt: skip
ON_A_MODEL: list[list[str]] = [
    *([["train", "model.name={}", *SHORT, "train.max_steps=1", "output=new"]] * 3),
    ["train", "model.name={}", *SHORT, "train.max_steps=1", "output=new", "method=lora", "layout=zero3x2"],
    ["data", "model.name={}", *SHORT, "data.train=chats.jsonl"],
    ["data", "model.name={}", *SHORT],
    ["plan", "model.name={}", *GPUS],
    ["env", "--model", "{}"],
    ["generate", "{}", "-p", "Hi", "--max-new-tokens", "2"],
    ["chat", "{}", "--system", "Be brief", "--max-new-tokens", "2"],
    ["eval", "{}", "data.eval=rows.jsonl", "data.cache=cache", "data.seq_len=64"],
]


def models(draw: Random, folder: Path) -> Case:
    """A model folder with damage in its configuration, tokenizer, template or weights."""
    name = draw.choice(["llama", "llama", "gpt2", "qwen3", "qwen3", "shards"])
    path = folder / "models" / name
    form = draw.choice(["config.json"] * 4 + ["tokenizer.json"] * 2 + [
        "tokenizer_config.json", "generation_config.json", "template", "template", "normalizer", "weights",
        "weights", "weights", "index", "file", "file",
    ])  # fmt: skip
    if form.endswith(".json"):
        how = mutated_json(path / form, draw)
    elif form == "template":
        text = draw.choice([*TEMPLATES, written(str(nasty(draw)))])
        (path / "chat_template.jinja").write_bytes(encoded(text))
        how = f"template {text!r:.80}"
    elif form == "normalizer":
        tree = json.loads((path / "tokenizer.json").read_text())
        tree["normalizer"] = draw.choice(NORMALIZERS)
        (path / "tokenizer.json").write_text(json.dumps(tree))
        how = f"normalizer {tree['normalizer']!r:.100}"
    elif form == "weights":
        how = damaged_weights(draw.choice(sorted(path.glob("*.safetensors"))), draw)
    elif form == "index" and name == "shards":
        how = mutated_json(path / "model.safetensors.index.json", draw)
    else:
        how = damaged_file(draw.choice(sorted(path.iterdir())), draw)
    words = [word.format(f"models/{name}") for word in draw.choice(ON_A_MODEL)]
    return Case(words, f"{name}: {how}", b"Hi\nagain\n")


def damaged_weights(file: Path, draw: Random) -> str:
    """Change the header's JSON, its length, or the bytes of a safetensors file; returns how."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    form = draw.choice(["header", "header", "length", "values", "bytes"])
    how = form
    if form == "header":
        header, how = mutated_tree(header, draw)
        text = encoded(written(json.dumps(header)))
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    elif form == "length":
        length = draw.choice([0, 1, length - 1, length + 1, len(content), 2**31, 2**63, 2**64 - 1])
        file.write_bytes(length.to_bytes(8, "little") + content[8:])
    elif form == "values":
        file.write_bytes(
            content[: 8 + length] + draw.choice([b"\0", b"\xff", b"\x7f\x80"]) * (len(data) // 2)
        )
    else:
        content, how = mutated_bytes(content, draw)
        file.write_bytes(content)
    return f"{file.name}: {how}"


# Data #

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SHAREGPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}
ROWS: list[Callable[[dict[str, str]], dict[str, Any]]] = [
    lambda row: row,
    lambda row: {"messages": [{"role": "system", "content": "Be brief."}, *turns(row), *turns(row)]},
    lambda row: {"conversations": list(SHAREGPT)},
    lambda row: {"instruction": row["prompt"], "input": "", "output": "Yes", "history": [["a", "b"]]},
    lambda row: {"text": row["prompt"]},
    lambda row: {"input_ids": [3, 4, 5, 6], "labels": [-100, 4, 5, 6]},
    lambda row: {"messages": turns(row), "tools": [FUNCTION]},
    lambda row: {"messages": [CALL, *turns(row)]},
]
OPTIONS = [
    "data.on_bad_row=skip", "data.train_on=all", "data.train_on=assistant", "data.packing=false",
    "data.split_turns=true", "data.chat_template=chatml", "data.chat_template=none", "data.overlong=drop",
    "data.overlong=error", "data.eval_split=0.5", "data.streaming=true", "data.format=messages",
    "data.format=text", "data.columns={prompt: text}", "data.where={label: 1}", "model.name=models/qwen3",
    "model.name=models/qwen3", "data.roles={bot: assistant}", "data.seq_len=2",
]  # fmt: skip


def data(draw: Random, folder: Path) -> Case:
    """A data file of any format with damage in its rows or bytes."""
    file, how = damaged_rows(draw, folder)
    options = draw.sample(OPTIONS, draw.choice([0, 1, 1, 2]))
    command = draw.choice(
        [["data"], ["data"], ["data", "--json"], ["train", "train.max_steps=1", "output=new"]]
    )
    return Case([*command, LLAMA, *SHORT, f"data.train={file.name}", *options], how)


def damaged_rows(draw: Random, folder: Path) -> tuple[Path, str]:
    """(A file of rows of any shape and format, with damage; what was damaged)."""
    shape, base = draw.choice(ROWS), (folder / "rows.jsonl").read_text().splitlines()
    rows: Any = [shape(json.loads(line)) for line in base[:8]]
    suffix = draw.choice(
        [".jsonl"] * 3
        + [".json", ".json", ".csv", ".tsv", ".parquet", ".txt", ".ndjson", ".jsonl.gz", ".csv.gz"]
    )
    form, how = draw.choice(["rows"] * 5 + ["bytes"] * 3 + ["long", "file"]), []
    if form == "rows":
        for _ in range(changes(draw)):
            if isinstance(rows, list) and rows:
                rows, change = mutated_tree(rows, draw)
                how.append(change)
    elif form == "long":
        letter = draw.choice(["x", "word ", "\n", "é", "<|im_end|>", "\0", " "])
        rows = [
            {
                key: letter * (20_000_000 // len(letter)) if isinstance(text, str) else text
                for key, text in rows[0].items()
            }
        ]
        how = [f"20 MB of {letter!r}"]
    content = _file(rows, suffix)
    if form == "bytes":
        content, change = mutated_bytes(content, draw)
        how.append(change)
    file = folder / f"damaged{suffix}"
    file.write_bytes(content)
    if form == "file":
        how.append(damaged_file(file, draw))
    columns = sorted(rows[0]) if isinstance(rows, list) and rows and isinstance(rows[0], dict) else []
    return file, f"{suffix} {columns!r:.60}: {'; '.join(how)}"


def _file(rows: Any, suffix: str) -> bytes:
    """Rows as the content of a file; what the format can't hold is written as text."""
    kind = suffix.removesuffix(".gz")
    several = rows if isinstance(rows, list) else [rows]
    if kind == ".json":
        content = encoded(written(json.dumps(rows)))
    elif kind in (".csv", ".tsv"):
        text = io.StringIO(newline="")
        columns = list(several[0]) if several and isinstance(several[0], dict) else ["prompt", "completion"]
        writer = csv.writer(text, delimiter="," if kind == ".csv" else "\t")
        writer.writerow(columns)
        writer.writerows(
            [row.get(column) for column in columns] if isinstance(row, dict) else [row] for row in several
        )
        content = encoded(written(text.getvalue()))
    elif kind == ".parquet":
        content = _parquet(several)
    elif kind == ".txt":
        content = encoded(written("\n".join(map(str, several))))
    else:
        content = encoded(written("".join(json.dumps(row) + "\n" for row in several)))
    return gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def _parquet(rows: list[Any]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    def content(rows: list[Any]) -> bytes:
        target = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
        return target.getvalue().to_pybytes()

    try:
        return content(rows)
    except Exception:  # a column of several types, or of one that parquet lacks
        rows = [row for row in rows if isinstance(row, dict)]
        return content([{ascii(key): ascii(value) for key, value in row.items()} for row in rows])


# Prompts #

ASKED = [
    {"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say red"},
    {"role": "assistant", "content": "red"}, {"role": "user", "content": "Say blue"},
]  # fmt: skip
LINES = [
    "Say red", "", " ", "/reset", "/exit now", "/quit", "/", "please " * 300, "x" * 10**6, "<|im_end|>", "\0",
    "\u202e", "\r", "é" * 99,
]  # fmt: skip
ANSWER = [
    "--temperature=1", "--top-p=0.5", "--seed=3", "--temperature=1e-9", "--top-p=0", "--seed=-1", "--json",
    "--max-new-tokens=999", "data.chat_template=chatml", "data.train_on=all", "data.columns={prompt: text}",
]  # fmt: skip


def prompts(draw: Random, folder: Path) -> Case:
    """A file of prompts, a conversation or the lines of a chat, damaged; and options that hardly fit."""
    form = draw.choice(["file"] * 3 + ["messages"] * 2 + ["chat"] * 3)
    model = draw.choice(["models/llama", "models/gpt2", "models/qwen3", "models/qwen3", "runs/lora"])
    words, stdin = ["chat" if form == "chat" else "generate", model, "--max-new-tokens=2"], b""
    if form == "file":
        file, how = damaged_rows(draw, folder)
        words += ["--prompts", file.name]
        words += draw.choice([[], ["--out", "answers.jsonl"], ["--out", "rows.jsonl"], ["--out", "runs"]])
    elif form == "messages":
        tree, changed = ASKED, []
        for _ in range(changes(draw)):
            if isinstance(tree, list | dict) and tree:
                tree, change = mutated_tree(tree, draw)
                changed.append(change)
        text, how = written(json.dumps(tree)), "; ".join(changed)
        if draw.random() < 0.3:
            content, change = mutated_bytes(encoded(text), draw)
            text, how = content.decode(errors="surrogateescape"), f"{how}; {change}"
        words += ["--messages", argument(text)[:100_000]]
    else:
        lines = [draw.choice(LINES) for _ in range(draw.choice([1, 3, 9]))]
        stdin, how = encoded("\n".join(lines)), f"lines {lines!r:.100}"
        if draw.random() < 0.4:
            stdin, change = mutated_bytes(stdin, draw)
            how = f"{how}; {change}"
        if draw.random() < 0.3:
            words += ["--system", argument(nasty(draw))[:5000]]
    return Case([*words, *draw.sample(ANSWER, draw.choice([0, 0, 1, 2]))], f"{form}: {how}", stdin)


# Checkpoints and run folders #

ON_A_RUN: dict[str, list[list[str]]] = {
    "stopped": [
        *([["train", "runs/stopped/config.yaml", "train.max_steps=4"]] * 6),
        ["report", "runs/stopped"],
        ["report", "runs/stopped", "runs/done"],
        ["export", "runs/stopped", "exported"],
        ["export", "runs/stopped", "exported", "--step", "2"],
        ["generate", "runs/stopped", "-p", "Hi", "--max-new-tokens", "2"],
    ],
    "done": [
        ["train", "runs/done/config.yaml", "train.max_steps=2"],
        ["train", "runs/done/config.yaml"],
        ["report", "runs/done"],
        ["export", "runs/done", "exported"],
        ["eval", "runs/done", "data.eval=rows.jsonl"],
        ["generate", "runs/done", "-p", "Hi", "--max-new-tokens", "2"],
    ],
    "lora": [
        ["train", "runs/lora/config.yaml", "train.max_steps=2"],
        ["export", "runs/lora", "exported", "--merge"],
        ["generate", "runs/lora", "-p", "Hi", "--max-new-tokens", "2"],
        ["generate", "runs/lora/model", "-p", "Hi", "--max-new-tokens", "2"],
        ["eval", "runs/lora", "data.eval=rows.jsonl"],
    ],
}


def runs(draw: Random, folder: Path) -> Case:
    """A run folder with damage in its files or checkpoints."""
    name = draw.choice(["stopped", "stopped", "stopped", "done", "lora"])
    run = folder / "runs" / name
    how = [_damaged_run(run, draw) for _ in range(draw.choice([1, 1, 2]))]
    words = draw.choice(ON_A_RUN[name])
    return Case(words, f"{name}: {'; '.join(how)}")


def _damaged_run(run: Path, draw: Random) -> str:
    steps = sorted(
        path for path in (run / "checkpoints").iterdir() if path.is_dir() and path.name.startswith("step-")
    )
    step = draw.choice(steps)
    form = draw.choice(["values"] * 3 + ["manifest"] * 2 + ["step file"] * 3 + ["metrics"] * 2 + [
        "config", "run file", "run file", "model", "rename", "lock",
    ])  # fmt: skip
    files = sorted(path for path in step.iterdir() if path.is_file() and not path.is_symlink())
    read = {"values": step / "values.json", "manifest": step / "manifest.json", "config": run / "config.yaml",
            "metrics": run / "metrics.jsonl"}.get(form, run)  # fmt: skip
    if read.exists() and not (read.is_file() or read.is_dir()):  # a pipe or a device since the first damage
        return f"{form} is already damaged"
    try:
        if form in ("values", "manifest"):
            how = mutated_json(step / f"{form}.json", draw)
            if form == "values" and draw.random() < 0.8:
                _sign(step)
                how += ", signed"
        elif form == "metrics":
            lines = (run / "metrics.jsonl").read_text().splitlines()
            tree, how = mutated_tree([json.loads(line) for line in lines], draw)
            (run / "metrics.jsonl").write_bytes(
                encoded(written("".join(json.dumps(row) + "\n" for row in tree or [])))
            )
        elif form == "config":
            tree, how = mutated_tree(yaml.safe_load((run / "config.yaml").read_text()), draw)
            (run / "config.yaml").write_bytes(encoded(written(yaml.safe_dump(tree))))
        elif form == "rename":
            target = step.with_name(
                draw.choice(["step-9", "step-0", "step--1", "step-x", "step-03", f"step-{10**30}"])
            )
            step.rename(target)
            how = f"to {target.name}"
        elif form == "lock":
            (run / ".lock").unlink(missing_ok=True)
            (run / ".lock").touch()
            DAMAGES[how := draw.choice(list(DAMAGES))](run / ".lock")
        elif form == "model" and (run / "model").is_dir():
            how = damaged_file(
                draw.choice(sorted(path for path in (run / "model").iterdir() if path.is_file())), draw
            )
        elif form == "step file" and files:
            how = damaged_file(draw.choice(files), draw)
            if draw.random() < 0.4:
                _sign(step)
                how += ", signed"
        else:
            how = damaged_file(draw.choice(sorted(path for path in run.iterdir() if path.is_file())), draw)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        yaml.YAMLError,
    ) as error:  # the second damage to one file
        return f"{form} already damaged ({type(error).__name__})"  # fmt: skip
    return (
        f"{step.name} {form}: {how}"
        if form in ("values", "manifest", "step file", "rename")
        else f"{form}: {how}"
    )


def _sign(step: Path) -> None:
    """Give the manifest the sizes and hashes of what is there now, as whoever plants a damage would."""
    import xxhash

    if not (step / "manifest.json").is_file():  # damaged before
        return
    manifest = json.loads((step / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        if (step / name).is_file() and not (step / name).is_symlink():
            content = (step / name).read_bytes()
            digest = {"size": len(content), "hash": xxhash.xxh3_128_hexdigest(content)}
            manifest["files"][name] = facts | digest
    (step / "manifest.json").write_text(json.dumps(manifest))


KINDS: dict[str, Kind] = {
    "configs": configs, "models": models, "data": data, "prompts": prompts, "runs": runs,
}  # fmt: skip
