"""The planner against published measurements, by the command that does it."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "validation"))
from peaks import recomputation_that_fits  # noqa: E402

pytestmark = pytest.mark.ci  # each test starts the command, which plans all rows
SMALL = ROOT / "validation" / "data" / "throughput_single_node_small.csv"
ROW = {
    "id": "foundry-900", "source": "a row made up for this test", "model": "mpt-1b", "layers": 24,
    "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 16, "vocab": 50368, "gated_mlp": 0,
    "tied_embeddings": 1, "gpu": "a100-80", "gpus": 8, "gpus_per_node": 8, "precision": "bf16",
    "seq_len": 2048, "micro_batch": 14, "global_batch": 448, "dp": 8, "zero_stage": 3, "tp": 1, "sp": 0,
    "pp": 1, "vpp": 1, "cp": 1, "recompute": "none", "compile": 0, "attention": "flash",
    "tokens_per_s_per_gpu": 20000, "tflops_per_gpu": "", "mfu_pct": "", "peak_mem_gib": "", "notes": "",
}  # fmt: skip


def validated(*arguments: Path | str) -> Any:
    """Return what published.py prints as JSON; without a file, of the tables in the repository."""
    command = [sys.executable, "validation/published.py", *map(str, arguments), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def written(file: Path, *rows: dict[str, Any]) -> Path:
    with file.open("w", newline="") as out:
        table = csv.DictWriter(out, list(ROW))
        table.writeheader()
        table.writerows(ROW | row for row in rows)
    return file


def test_rows_are_predicted_or_skipped_with_a_reason(tmp_path: Path) -> None:
    file = written(
        tmp_path / "rows.csv",
        {},
        {
            "id": "foundry-901", "gpus": 16, "dp": 16, "global_batch": 896, "tokens_per_s_per_gpu": "",
            "mfu_pct": 60,
        },
        {"id": "foundry-902", "tokens_per_s_per_gpu": ""},  # predicted, nothing to compare with
        {"id": "foundry-903", "recompute": ""},
        {"id": "foundry-904", "notes": "WARNING: swapped"},
        {"id": "foundry-905", "gpu": "abacus"},
        {"id": "nobodys-1"},
    )  # fmt: skip
    out, picture = tmp_path / "out.csv", tmp_path / "out.svg"
    found = validated(file, "--predictions", str(out), "--picture", str(picture))
    assert "Predicted against measured" in picture.read_text()
    assert (found["rows"], found["predicted"]) == (7, 3)
    assert found["skipped"] == {
        "it lacks recompute": 1, "its source warns of it": 1, "unknown GPU abacus": 1, "unknown source": 1,
    }  # fmt: skip
    assert found["throughput"]["all"]["n"] == 2
    assert found["throughput"]["by_gpu"]["a100-80"]["mape"] < 25
    with out.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["id"] for row in rows] == ["foundry-900", "foundry-901", "foundry-902"]
    assert rows[0]["tokens_per_s_per_gpu"] == rows[2]["tokens_per_s_per_gpu"]


BLOOM = {
    "id": "bloom-900", "layers": 72, "hidden": 14336, "ffn": 57344, "heads": 64, "kv_heads": 64,
    "vocab": 250880, "gpus": 384, "precision": "fp16", "micro_batch": 1, "global_batch": 2048, "dp": 32,
    "tp": 2, "pp": 6, "zero_stage": 1, "recompute": "full", "attention": "naive", "tokens_per_s_per_gpu": "",
}  # fmt: skip


def test_memory_is_predicted_and_what_did_not_fit_is_refused(tmp_path: Path) -> None:
    file = written(
        tmp_path / "rows.csv",
        BLOOM | {"notes": "OOM; of BLOOM"},
        BLOOM | {"id": "bloom-901", "dp": 4, "tp": 8, "pp": 12, "peak_mem_gib": 29},
        BLOOM | {"id": "bloom-902", "dp": 4, "tp": 8, "pp": 12, "layers": "", "peak_mem_gib": 29},
        {"id": "torchtune-900", "gpus": 1, "dp": 1, "zero_stage": 0, "global_batch": 14, "peak_mem_gib": 20},
    )
    out = tmp_path / "out.csv"
    found = validated(file, "--predictions", str(out))["memory"]
    assert (found["all"]["n"], found["apart"]["optimizer not stated"]["n"]) == (1, 1)
    assert found["all"]["mape"] < 8 and found["by_source"]["bloom"]["n"] == 1
    assert found["out_of_memory"] == {"n": 1, "predicted": 1}
    assert found["skipped"] == {"it lacks layers": 1}
    assert found["constants"]["fitted"] == len(found["constants"]["values"])
    with out.open(newline="") as lines:
        assert all(float(row["peak_mem_gib"]) > 10 for row in csv.DictReader(lines))


@pytest.mark.parametrize(("tp", "recompute"), [(8, "none"), (4, "selective"), (1, "selective")])
def test_recomputation_that_fits_is_the_least(tp: int, recompute: str) -> None:
    """A GPT of 22B parameters in 2021's Megatron-LM, which keeps scores: 35 GiB of activations on 8 GPUs."""
    row = ROW | {
        "id": "megatron-sc21-900", "layers": 48, "hidden": 6144, "ffn": 24576, "heads": 64, "kv_heads": 64,
        "precision": "fp16", "micro_batch": 2, "global_batch": 64, "dp": 32 // tp, "tp": tp, "sp": 1,
        "zero_stage": 1, "gpus": 32, "recompute": "", "attention": "naive",
    }  # fmt: skip
    assert recomputation_that_fits({name: str(value) for name, value in row.items()}) == recompute


def test_a_measurement_never_moves_its_prediction(tmp_path: Path) -> None:
    values = []
    for measured in (20000, 1):
        out = tmp_path / f"{measured}.csv"
        row = {"tokens_per_s_per_gpu": measured, "peak_mem_gib": measured / 1000}
        validated(written(tmp_path / "rows.csv", row), "--predictions", str(out))
        values.append(out.read_text())
    assert values[0] == values[1]


def test_the_choice_among_layouts_is_judged_by_what_was_measured(tmp_path: Path) -> None:
    """The planner takes the largest micro-batch; measured, it was 10 % slower than the best."""
    file = written(
        tmp_path / "rows.csv",
        *(
            {"id": f"foundry-91{number}", "micro_batch": size, "tokens_per_s_per_gpu": speed}
            for number, (size, speed) in enumerate([(1, 10000), (4, 20000), (14, 18000)])
        ),
    )
    regret = validated(file)["regret"]
    assert (regret["groups"], regret["mean"], regret["worst"]) == (1, pytest.approx(10), pytest.approx(10))
    assert regret["spearman"] == pytest.approx(0.5)


def test_errors_stay_as_small_as_they_are() -> None:
    """The targets of the milestone; what is not met yet is in TODO.md."""
    answer = validated()
    assert answer["rows"] == 572 and answer["throughput"]["by_file"]["throughput, 16 bits"]["n"] == 390
    found, memory = answer["throughput"], answer["memory"]
    assert memory["all"]["n"] == 118 and memory["all"]["median"] < 3 and memory["all"]["under_8"] <= 2
    assert memory["apart"]["layout partly assumed"]["n"] == 6
    core = memory["by_source"]["simumax"]
    assert core["n"] == 20 and core["median"] < 4 and abs(core["worst"]) < 10
    assert memory["out_of_memory"]["predicted"] >= memory["out_of_memory"]["n"] - 1
    stated = found["by_file"]["throughput, 16 bits"]
    assert stated["mape"] < 5.5 and stated["median"] < 2.9
    assert found["by_source"]["simumax"]["mape"] < 4.1
    for kind, slope in (("h100-sxm", 3), ("b200", 3.1)):
        assert found["long"][kind]["mape"] < 6.7 and abs(found["long"][kind]["slope"]) < slope
    assert found["by_file"]["throughput, 8 bits, assumed"]["mape"] < 9
    assert found["by_source"]["automodel"]["mape"] < 7 and len(found["lora"]) == 17
    assert found["by_source"]["foundry"]["mape"] < 8
    assert found["by_source"]["selrecomp"]["mape"] < 5
    assert found["by_source"]["vtrain"]["mape"] < 12
    assert found["by_source"]["titan"]["mape"] < 8
    assert answer["regret"]["mean"] < 3
    small = validated(SMALL)["throughput"]
    assert small["all"]["mape"] < 8.4


def test_what_a_row_leaves_out_is_assumed_and_said(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    validated("--predictions", str(out))
    with out.open(newline="") as lines:
        rows = {row["id"]: row for row in csv.DictReader(lines)}
    assert rows["nemo-long-h100-1024k"]["assumed"] == "micro_batch 1; recompute none"
    assert rows["llama3paper-3"]["assumed"] == "micro_batch 1; zero_stage 1; vpp 7; recompute selective"
    assert rows["automodel-4"]["assumed"] == "LoRA of rank 16 in every linear layer; recompute selective"
    assert rows["titan-14"]["assumed"] == "micro_batch 4; vpp 2"
    assert rows["mbridge-003"]["assumed"] == "gpus_per_node 72; recompute selective", (
        "NVLink of a GB200's rack"
    )
    assert rows["foundry-001"]["assumed"] == rows["titan-09"]["assumed"] == ""
    measured = {"titan-09": 1071, "titan-10": 548}
    for name, speed in measured.items():
        assert float(rows[name]["tokens_per_s_per_gpu"]) == pytest.approx(speed, rel=0.08)


def graded(code: str) -> Any:
    """Return what an expression on validation/playbook.py, as `playbook`, is as JSON."""
    return _printed(f"import playbook; print(json.dumps({code}))")


def test_the_playbooks_runs_are_refused_where_they_are_too_large_and_otherwise_fit() -> None:
    found = graded("playbook.fits(playbook.ran())")
    assert (found["ran"], found["failed"]) == (866, 714)
    assert len(found["refused"]) <= 0.01 * found["ran"]
    assert found["sets"]["obviously too large"] == {"n": 438, "said to fit": 0}


def test_memory_of_the_playbooks_runs_is_as_measured() -> None:
    code = "playbook.errors(*(part[np.array([not row['state'] for row in rows])] for part in both))"
    found = _printed(
        "import numpy as np, playbook, peaks; rows = playbook.ran(); "
        f"both = peaks.peaks(rows), peaks.published(rows); print(json.dumps({code}))"
    )
    assert found["n"] == 626 and found["mape"] < 8.5 and found["median"] < 6.3


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_the_playbooks_groups_are_predicted_by_constants_fitted_without_them() -> None:
    """A fit for each of 13 groups. Targets: 9 and 6 % at 10 % MFU and more, 12 and 8 % of all; choice 4 %."""
    found = graded("playbook.answer(playbook.graded(13))")
    high, usual = (found["speed, groups left out"][name] for name in ("at 10 % MFU and more", "all"))
    assert high["n"] == 380 and high["mape"] < 8.1 and high["median"] < 6
    assert usual["n"] == 626 and usual["mape"] < 10.1 and usual["median"] < 7
    assert found["choice"]["mean"] < 4 and found["choice"]["worst of close"] < 15


def _printed(code: str) -> Any:
    """Return what Python prints as JSON, with the modules of validation/ at hand."""
    code = f"import json, sys; sys.path.insert(0, 'validation'); {code}"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def error_bars(call: str) -> dict[str, list[float]]:
    """Return the error bars of a call in validation/accuracy.py by "stack.kind.band", as [percent, rows]."""
    return _printed(
        f"import accuracy; errors = accuracy.{call}; "
        "print(json.dumps({'.'.join(filter(None, key)): each for key, each in errors.items()}))"
    )


def test_error_bars_of_memory_are_those_of_the_rows() -> None:
    computed, stored = error_bars("memory_errors()"), error_bars("stored('memory')")
    assert {name: [round(error, 1), rows] for name, (error, rows) in computed.items()} == stored


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_error_bars_of_time_are_those_of_constants_fitted_without_the_rows() -> None:
    """Those of measured stacks. That of all others takes a fit for each of 14 clusters: `make validation`."""
    computed = error_bars("quarter_errors(accuracy.fitted_on(accuracy.FITTED_ON))")
    stored = error_bars("stored('time')")
    assert computed.keys() | {name for name in stored if name.startswith("unmeasured.")} == stored.keys()
    for name, (error, rows) in computed.items():
        assert rows == stored[name][1]
        assert error == pytest.approx(stored[name][0], abs=0.3)
