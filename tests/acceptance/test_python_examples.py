"""The scripts of examples/python run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "plan.py": r"GPU-milliseconds a step",
    "rows.py": r"finished after 20 steps",
    "loss.py": r"focal loss",
    "callbacks.py": r"is below 3.0",
}  # name -> what it prints, among other things


def test_every_script_is_tested() -> None:
    assert {file.name for file in (ROOT / "examples/python").glob("*.py")} == SCRIPTS.keys()


@pytest.mark.parametrize("script", cases(SCRIPTS))
def test_an_example_in_python_runs(script: str, tmp_path: Path) -> None:
    for name in ("quickstart", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [sys.executable, f"examples/python/{script}"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert SCRIPTS[script] in ended.stdout + ended.stderr


RUN_CELLS = """
import ast, json, sys
names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    assert not cell.get("outputs"), "stored outputs"
    if cell["cell_type"] == "code":
        *first, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(first, []), sys.argv[1], "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), sys.argv[1], "exec"), names)
            continue
        value = eval(compile(ast.Expression(last.value), sys.argv[1], "eval"), names)
        shows = getattr(value, "_repr_html_", None) or value._repr_svg_
        print(type(value).__name__, len(shows()))
"""  # as Jupyter does: a cell's last expression shows itself


@pytest.mark.all
def test_the_cells_of_the_notebook_run_in_order(tmp_path: Path) -> None:
    for name in ("quickstart", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [sys.executable, "-c", RUN_CELLS, "examples/notebook.ipynb"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shown = [line.split()[0] for line in ended.stdout.splitlines() if line.split()[-1].isdecimal()]
    for kind in ("Answer", "Choice", "Simulation", "Picture", "Result", "DataFrame"):
        assert kind in shown, ended.stdout
