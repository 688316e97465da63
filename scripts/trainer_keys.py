"""Read the keys of other trainers' settings from their newest wheels: `make test-migrate`.

    python scripts/trainer_keys.py            compare the wheels with the tables: exit 1 names each new key
    python scripts/trainer_keys.py --write    write tests/data/trainer_keys.json, which the default tests read

The wheels are parsed, never imported or installed: no torch, no dependencies, none of their code runs.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from meshtune.tools.table import TOOLS, table

LIST = Path(__file__).parents[1] / "tests" / "data" / "trainer_keys.json"
# Tool -> its distribution, and the classes whose fields are its keys (module:Class). torchtune has none: its
# keys are those of its recipes' YAML files.
CLASSES = {
    "transformers": (
        "transformers",
        ["transformers.training_args:TrainingArguments",
         "transformers.training_args_seq2seq:Seq2SeqTrainingArguments"],
    ),
    "trl": (
        "trl",
        ["trl.trainer.sft_config:SFTConfig", "trl.trainer.dpo_config:DPOConfig",
         "trl.trainer.kto_config:KTOConfig", "trl.experimental.orpo.orpo_config:ORPOConfig",
         "trl.experimental.cpo.cpo_config:CPOConfig", "trl.trainer.reward_config:RewardConfig",
         "trl.trainer.model_config:ModelConfig",
         "trl.scripts.utils:ScriptArguments", "trl.scripts.utils:DatasetMixtureConfig"],
    ),
    "axolotl": ("axolotl", ["axolotl.utils.schemas.config:AxolotlInputConfig"]),
    "llama_factory": (
        "llamafactory",
        [f"llamafactory.hparams.{module}:{name}"
         for module, name in [
             ("model_args", "ModelArguments"), ("data_args", "DataArguments"),
             ("training_args", "TrainingArguments"), ("training_args", "RayArguments"),
             ("finetuning_args", "FinetuningArguments"), ("generating_args", "GeneratingArguments"),
             ("evaluation_args", "EvaluationArguments"),
         ]],
    ),
    "torchtune": ("torchtune", []),
}  # fmt: skip
GENERIC = {"Optional", "Union", "Annotated", "Literal", "ClassVar", "list", "dict", "tuple", "str", "None"}


class Folder:
    """The files of an unpacked distribution; Python files are parsed when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Parse a module by its dotted name; None if the distribution lacks it."""
        if name not in self.trees:
            path = name.replace(".", "/")
            files = (self.root / f"{path}.py", self.root / path / "__init__.py")
            file = next((file for file in files if file.is_file()), None)
            self.trees[name] = ast.parse(file.read_text(encoding="utf-8")) if file else None
        return self.trees[name]

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """(Module, definition) of class `name` as `module` knows it; None if it is not of this folder."""
        tree = self.module(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            names = node.names if isinstance(node, ast.ImportFrom) else []
            imported = {alias.asname or alias.name: alias.name for alias in names}
            if isinstance(node, ast.ImportFrom) and name in imported:
                package = module.split(".")[: -node.level] if node.level else []
                return self.find(".".join([*package, *filter(None, [node.module])]), imported[name])
        return None

    def keys(self, module: str, name: str, prefix: str = "", within: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the dotted keys of a class's fields, its bases' too, and of the classes that they name.

        prefix: of the keys, with a dot at the end. within: classes around it, which are not entered again.
        """
        if name in within or not (found := self.find(module, name)):
            return
        home, node = found
        for base in node.bases:
            yield from self.keys(home, ast.unparse(base), prefix, within)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                key, kinds = line.target.id, names_in(line.annotation)
                if key.startswith("_") or key == "model_config" or "ClassVar" in kinds:
                    continue
                for spelled in (key, *aliases(line.value)):
                    yield prefix + spelled
                for kind in sorted(kinds - GENERIC):
                    yield from self.keys(home, kind, f"{prefix}{key}.", (*within, name))


def names_in(annotation: ast.AST) -> set[str]:
    """Names in an annotation, also in those that are written as text."""
    found = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with suppress(SyntaxError):  # a choice of a Literal, not a type
                found |= names_in(ast.parse(node.value, mode="eval").body)
    return found


def aliases(default: ast.AST | None) -> Iterator[str]:
    """Yield the other names of a pydantic field: `alias` and `validation_alias`."""
    for keyword in default.keywords if isinstance(default, ast.Call) else ():
        if keyword.arg in ("alias", "validation_alias"):
            for node in ast.walk(keyword.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a YAML mapping, those of sections too."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")


def keys_of(tool: str, source: Folder) -> list[str]:
    found: set[str] = set()
    for place in CLASSES[tool][1]:
        module, _, name = place.partition(":")
        of_class = set(source.keys(module, name))
        if not of_class:
            sys.exit(f"{tool}: {place} has no fields; did its module move? Mend CLASSES in {__file__}.")
        found |= of_class
    if tool == "axolotl":
        for plugin in (source.root / "axolotl" / "integrations").iterdir():
            module = f"axolotl.integrations.{plugin.name}.args"
            tree = source.module(module)
            for node in tree.body if tree else ():
                if isinstance(node, ast.ClassDef):
                    found |= set(source.keys(module, node.name))
    if tool == "torchtune":
        for file in (source.root / "recipes" / "configs").rglob("*.yaml"):
            found |= set(flat(yaml.safe_load(file.read_text(encoding="utf-8"))))
    return sorted(found)


def download(distribution: str, folder: Path) -> Path | str:
    """Fetch the newest wheel into `folder`; return its path, or pip's last line if that failed."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
               "--dest", str(folder), distribution]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    wheels = [*folder.glob(f"{distribution}-*.whl")]
    if done.returncode or not wheels:
        return (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    return wheels[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {LIST.name}")
    write = parser.parse_args().write
    read, missing = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for tool in TOOLS:
            distribution = CLASSES[tool][0]
            path = download(distribution, Path(folder))
            if isinstance(path, str):
                sentence = f"test-migrate: {distribution}'s wheel can't be fetched: {path}"
                if os.environ.get("CI"):
                    sys.exit(sentence)
                print(f"{sentence}\nskipped; with CI=true this fails.")
                return
            with zipfile.ZipFile(path) as archive:
                archive.extractall(Path(folder) / tool)
            keys, version = keys_of(tool, Folder(Path(folder) / tool)), path.name.split("-")[1]
            read[tool] = {"distribution": distribution, "version": version, "keys": keys}
            absent = [key for key in keys if table(tool).entry(key) is None]
            print(f"{distribution} {version}: {len(keys)} keys, {len(absent)} of them not in the table")
            missing += [f"{tool}.toml lacks {key} of {distribution} {version}." for key in absent]
    if write:
        LIST.write_text(json.dumps(read, indent=1) + "\n")
    sys.exit("\n".join(missing) if missing else 0)


if __name__ == "__main__":
    main()
