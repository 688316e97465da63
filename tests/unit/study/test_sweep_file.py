"""The file of a sweep: axes, ranges, conditions, the experiments and their keys; every mistake at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from golden import refuses, says

from meshtune.errors import UserError
from meshtune.study.sweep_file import Experiment, Tree, read_sweep

BASE = {"model": {"name": "models/5M"}, "data": {"seq_len": 256}}


def none_best(_: Tree, number: int) -> Sequence[str]:
    raise AssertionError(f"nobody asked for the {number} best")


def experiments(document: Mapping[str, Any]) -> list[Experiment]:
    return read_sweep({"base": BASE, **document}).experiments(none_best)


def changes(document: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(one.settings.values()) for one in experiments(document)]


def problems(document: Mapping[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        read_sweep(document).experiments(none_best)
    return "\n".join(error.value.problems)


def test_the_grid_is_the_product_of_the_axes_and_the_first_changes_slowest() -> None:
    axes = {"model.name": ["a", "b"], "data.seq_len": [256, 512]}
    assert changes({"axes": axes}) == [("a", 256), ("a", 512), ("b", 256), ("b", 512)]


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ({"from": 1, "to": 3}, [1, 2, 3]),
        ({"from": 8, "to": 100, "times": 2}, [8, 16, 32, 64]),
        ({"from": 256, "to": 1024, "step": 256}, [256, 512, 768, 1024]),
    ],
)
def test_ranges_go_to_their_end_if_a_step_ends_on_it(spec: dict[str, int], values: list[int]) -> None:
    assert changes({"axes": {"data.seq_len": spec}}) == [(value,) for value in values]


def test_rates_may_be_a_range_or_written_as_yaml_reads_them_as_text() -> None:
    found = changes({"axes": {"train.learning_rate": {"from": "1e-5", "to": 1e-3, "times": 10}}})
    assert found == [(1e-5,), (1e-4,), (1e-3,)]
    assert changes({"axes": {"train.learning_rate": ["1e-4", 0.5]}}) == [(1e-4,), (0.5,)]


def test_settings_that_change_together_are_one_factor_and_explicit_ones_are_added() -> None:
    found = experiments({
        "axes": {"train.seed": [1, 2]},
        "together": [{"model.name": "a", "train.learning_rate": 1e-4}, {"model.name": "b"}],
        "experiments": [{"layout": "tp2-mb1-ga1", "data.seq_len": 1024}],
    })  # fmt: skip
    assert [one.settings for one in found] == [
        {"train.seed": 1, "model.name": "a", "train.learning_rate": 1e-4},
        {"train.seed": 1, "model.name": "b"},
        {"train.seed": 2, "model.name": "a", "train.learning_rate": 1e-4},
        {"train.seed": 2, "model.name": "b"},
        {"layout": "tp2-mb1-ga1", "data.seq_len": 1024},
    ]
    assert found[0].tree["data"] == {"seq_len": 256} and found[-1].tree["model"] == {"name": "models/5M"}


def test_equal_experiments_are_one_and_the_key_is_of_all_that_decides_the_result() -> None:
    both = {"axes": {"train.seed": [1]}, "experiments": [{"train.seed": 1}]}
    (one,) = experiments(both)
    assert experiments({**both, "limit": 5})[0].key == one.key  # of no influence on a result
    assert experiments({**both, "steps": 5})[0].key != one.key
    assert experiments({**both, "run": "train"})[0].key != one.key
    assert experiments({**both, "base": {**BASE, "method": "lora"}})[0].key != one.key
    assert experiments({**both, "base": {**BASE, "output": "runs/x"}})[0].key == one.key


def test_fields_of_the_layout_are_laid_over_the_base_s_layout() -> None:
    base = {**BASE, "layout": "zero3x2-mb4-ga2"}
    layouts = [one.tree["layout"] for one in experiments({"base": base, "axes": {"layout.tp": [1, 2]}})]
    assert layouts[1] == {
        "zero": 3, "dp_shard": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "tp": 2
    }  # fmt: skip
    (auto,) = experiments({"axes": {"layout.tp": [2]}})
    assert auto.tree["layout"]["tp"] == 2 and auto.tree["layout"]["pp"] == "auto"
    (full,) = experiments({"axes": {"layout.recompute": ["full"]}})
    assert "recompute_blocks" not in full.tree["layout"], "full is all blocks, not the fewest that fit"


def test_conditions_see_settings_defaults_and_the_layout() -> None:
    axes = {"layout": ["tp2-mb1-ga1", "mb1-ga4", "zero3x4-mb2-ga1"], "train.seed": [1, 2]}
    where = [
        "layout.world <= 2 or train.seed == 2",
        "layout.tp == 1 or train.precision == 'bf16' and train.seed == 1",
        "model.overrides == null or data.packing",
    ]
    assert changes({"axes": axes, "where": where}) == [
        ("tp2-mb1-ga1", 1), ("mb1-ga4", 1), ("mb1-ga4", 2), ("zero3x4-mb2-ga1", 2)
    ]  # fmt: skip


def test_a_condition_on_what_the_planner_chooses_is_refused() -> None:
    document = {"base": BASE, "axes": {"train.seed": [1]}, "where": "layout.tp < 2"}
    says(problems(document))
    fixed = {**document, "axes": {"layout": ["tp2"]}, "where": "layout.micro_batch_size > 1"}
    says(problems(fixed))


def test_no_experiment_that_holds_the_conditions_is_an_error() -> None:
    says(problems({"base": BASE, "axes": {"train.seed": [1, 2]}, "where": "train.seed > 5"}))


def test_the_planner_s_best_layouts_are_asked_for_each_combination_that_may_hold() -> None:
    asked = []

    def best_of(tree: Tree, number: int) -> list[str]:
        asked.append((tree["data"]["seq_len"], tree["layout"], number))
        return ["tp2-mb1-ga1", "mb1-ga2", "mb2-ga1"][:number]

    axes = {"layout": {"best": 2}, "data.seq_len": [256, 512, 1024]}
    plan = read_sweep({"base": BASE, "axes": axes, "where": ["data.seq_len < 1000", "layout.tp < 2"]})
    assert [one.settings for one in plan.experiments(best_of)] == [
        {"layout": "mb1-ga2", "data.seq_len": 256}, {"layout": "mb1-ga2", "data.seq_len": 512}
    ]  # fmt: skip
    assert asked == [(256, "auto", 2), (512, "auto", 2)]


def test_every_mistake_is_named_at_once_with_the_nearest() -> None:
    said = problems({
        "axis": {}, "train": {}, "run": "trian", "steps": 0, "limit": "1h",
        "base": {"model": {"name": "a"}, "train": {"learning_rat": 1, "seed": "x"}},
        "axes": {
            "train.lr": [1], "tp": [2], "train.seed": [1, 1], "train.precision": ["fp7"], "data.seq_len": 4,
            "layout": ["zero9x2"], "layout.schedule": ["1fb1"], "output": ["a"], "cluster.slurm.qos": ["a"],
            "train.max_steps": {"from": 1},
        },
        "where": ["layout.tpp < 2", "open('x')"],
    })  # fmt: skip
    says(said)


@pytest.mark.ci
@pytest.mark.parametrize(
    "document",
    [
        {},
        {"run": "train", "steps": 5, "axes": {"train.seed": [1]}},
        {"axes": [1]},
        {"axes": {"train.seed": [1]}, "together": [{"train.seed": 2}]},
        {"together": [3]},
        {"experiments": {"train.seed": 1}},
        {"axes": {"train.seed": {"from": 1, "to": 10**7}}},
        {"axes": {"train.seed": {"from": 3, "to": 1}}},
        {"axes": {"train.seed": {"from": 1, "to": 3000}, "data.seq_len": {"from": 2, "to": 2000}}},
        {"axes": {"layout": {"best": "two"}}},
        {"base": 3, "axes": {"train.seed": [1]}},
        {"slurm": ["gpu"], "axes": {"train.seed": [1]}},
        {"base": {"cluster": {"slurm": {"extra": [3]}}}, "axes": {"train.seed": [1]}},
        {"axes": {"cluster": [{"slurm": {"qos": "a"}}]}, "experiments": [{"cluster": {"storage": "a"}}]},
        {"axes": {"cluster.rays": [{}]}},
    ],
)  # fmt: skip
def test_a_mistake_is_named(document: dict[str, Any]) -> None:
    says(problems(document))


def test_a_file_names_its_base_beside_it_and_key_value_changes_that(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("without runs"))  # whose names are near
    (tmp_path / "config.yaml").write_text("model: {name: a}\ntrain.seed: 7\noutput: runs/x\n")
    file = tmp_path / "study.yaml"
    file.write_text("base: config.yaml\naxes: {data.seq_len: [64]}\n")
    plan = read_sweep(file, ["train.seed=8"])
    assert plan.name == "study" and plan.axes == ("data.seq_len",)
    assert plan.base == {"model": {"name": "a"}, "train": {"seed": 8}}
    assert read_sweep(plan.document).experiments(none_best) == plan.experiments(none_best)
    file.write_text("base: confg.yaml\naxes: {data.seq_len: [64]}\n")
    with refuses(UserError):
        read_sweep(file)


def test_where_a_sweep_is_submitted_changes_no_experiment() -> None:
    def keys(**cluster: Any) -> list[str]:
        base = {"cluster": cluster} if cluster else {}
        return [one.key for one in experiments({"base": base, "axes": {"train.seed": [1, 2]}})]

    assert keys() == keys(slurm={"partition": "gpu"}, ray={"address": "http://head:8265"}, storage="/shared")
    assert keys(gpu="h100-sxm") == keys(gpu="h100-sxm", slurm={"partition": "gpu"}) != keys()
