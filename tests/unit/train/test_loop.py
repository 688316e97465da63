"""A run from settings to its folder: exact accumulation, exact resumption, and everything that can stop
it.
"""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cases import cases
from golden import refuses
from tiny import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.data.loader import ahead
from meshtune.errors import Interrupted, NonFinite, NothingFits, RankFailed, UserError
from meshtune.launch.signals import STOPPING, StopRequest, interrupted_by_signals
from meshtune.parallel import apply
from meshtune.parallel.mesh import Axis
from meshtune.report.compare import compare
from meshtune.report.run.summary import summarise
from meshtune.report.run.tables import headline
from meshtune.rundir import EXPECTED, RunDir
from meshtune.train import evaluate, generate, loop, trackers
from meshtune.train.checkpoint_files import size_and_hash
from meshtune.units import duration

Train = Callable[..., loop.Run]


def losses(run: loop.Run) -> list[float]:
    return [row["loss"] for row in run.folder.rows("train")]


def weights(run: loop.Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.optimizer.state().items()}


@pytest.mark.parametrize("packing", cases(["true", "false"], test=1, ci=1))
def test_loss_and_gradients_do_not_depend_on_how_the_global_batch_is_cut(
    packing: str, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    rows = [{"prompt": "red " * (41 - n), "completion": "stone " * n} for n in (40, 1, 30, 2) * 2]
    write_rows(tmp_path / "unequal.jsonl", rows)
    found = []
    for micro in (8, 4, 2, 1):
        run = build.build(
            config.load(
                None,
                settings(f"layout=mb{micro}", "train.global_batch_size=8", f"data.packing={packing}",
                         f"data.train={tmp_path / 'unequal.jsonl'}", f"output={tmp_path / f'mb{micro}'}"),
            )
        )  # fmt: skip
        batch, _ = next(iter(run.loader))
        counts = [micro_batch.label_tokens for micro_batch in batch.micro_batches]
        assert micro > 1 or max(counts) > 9 * min(counts), "the label counts must be unequal"
        passes, phase = run.passes, run.meter.phase
        loss = passes.forward_backward(passes.localise(batch), batch.label_tokens, phase)
        found.append((float(loss), {b.names[i]: p.grad.clone() for b in run.optimizer.buckets
                                    for i, p in enumerate(b.parameters)}))  # fmt: skip
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        for name, gradient in gradients.items():
            error = (gradient - found[0][1][name]).norm() / found[0][1][name].norm()
            assert error < 1e-6, name


def test_a_run_leaves_a_folder_that_transformers_loads_with_the_trained_logits(train: Train) -> None:
    run = train("train.max_steps=3")
    files = {path.name for path in run.folder.path.iterdir()}
    assert {"config.yaml", "plan.yaml", "metrics.jsonl", "checkpoints", "model"} <= files
    loaded = AutoModelForCausalLM.from_pretrained(run.folder.model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(run.folder.model)("Say red 7", return_tensors="pt").input_ids
    run.passes.parallel.stages[0].model.set_attn_implementation("sdpa")
    torch.testing.assert_close(
        loaded(ids).logits, run.passes.parallel.stages[0].model.eval()(ids).logits, rtol=1e-6, atol=1e-6
    )


def test_every_row_has_the_documented_fields(train: Train) -> None:
    run = train("eval.exact_match=3", "eval.samples=2", "eval.max_new_tokens=4")
    row = run.folder.rows("train")[-1]
    assert {
        "kind", "step", "loss", "grad_norm", "learning_rate", "tokens", "label_tokens", "step_seconds",
        "data_seconds",         "tokens_per_second_per_gpu", "mfu", "mfu_6n", "peak_memory_bytes",
    } <= row.keys()  # fmt: skip
    assert row["mfu"] is None and row["tflops_per_second"] > 0, "the peak of a CPU is unknown"
    held_out = run.folder.rows("eval")[-1]
    assert held_out["step"] == 4 and held_out["perplexity"] == pytest.approx(math.exp(held_out["loss"]))
    assert held_out["prompts"] == held_out["answers_cut"] == 3 and len(run.folder.samples()) == 2


@pytest.mark.ci
def test_the_first_samples_are_those_of_the_untouched_model(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(config.load(None, settings("eval.at_start=true", "eval.samples=2", "eval.every=2")))
    loaded = {name: tensor.clone() for name, tensor in run.optimizer.state().items() if "model." in name}
    untouched = []
    evaluates = type(run.evaluation).run

    def watched(self: Any, step: int, metrics: Any) -> Any:
        now = run.optimizer.state()
        untouched.append((step, all(torch.equal(now[name], tensor) for name, tensor in loaded.items())))
        return evaluates(self, step, metrics)

    monkeypatch.setattr(type(run.evaluation), "run", watched)
    loop.train(run)
    assert untouched == [(0, True), (2, False), (4, False)] and loaded
    assert [row["step"] for row in run.folder.samples()] == [0, 0, 2, 2, 4, 4]


@pytest.mark.ci
def test_a_step_lasts_until_the_devices_have_done_it(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices sleep for 100 s, by a clock of the test's own, in the exchange that ends a step; evaluating and
    saving, 1,000 s each, are no part of it.
    """
    passed = [0.0]

    def slowed(owner: type, name: str, seconds: float) -> None:
        was = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            passed[0] += seconds
            return was(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr(loop.time, "perf_counter", lambda: passed[0])  # of all modules
    run = build.build(config.load(None, settings("eval.every=1", "checkpoint.every=1")))
    slowed(type(run.world), "gather_numbers", 100.0)
    slowed(type(run.evaluation), "run", 1000.0)
    slowed(type(run.checkpoints), "save", 1000.0)
    loop.train(run)
    assert [row["step_seconds"] for row in run.folder.rows("train")] == [100.0] * run.steps


def test_batches_that_a_thread_makes_train_alike(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, prepared = train(f"output={tmp_path / 'plain'}"), loop.prepared
    monkeypatch.setattr(loop, "prepared", lambda run: ahead(prepared(run)))
    threaded = train(f"output={tmp_path / 'threaded'}")
    assert losses(plain) == losses(threaded) and plain.progress.data == threaded.progress.data


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_that_are_rounded_to_nearest_are_warned_about(
    precision: str, optimizer: str, settings: Callable[..., list[str]], capsys: pytest.CaptureFixture
) -> None:
    given = settings("log.to=[console]", f"train.precision={precision}", f"train.optimizer={optimizer}")
    build.build(config.load(None, given))
    warned = "rounds weights to the nearest 16-bit value" in capsys.readouterr().err
    assert warned == (precision == "bf16-pure" and optimizer == "muon")


STATES = [("adamw", "fp32"), ("adamw", "bf16-pure"), ("adamw-bf16", "fp32"), ("adamw-8bit", "fp32")]


@pytest.mark.parametrize(("optimizer", "precision"), cases(STATES, test=2, ci=2))
def test_resuming_equals_never_stopping_bit_for_bit(
    train: Train, tmp_path: Path, optimizer: str, precision: str
) -> None:
    lasting = (
        "train.lr_scheduler=constant", "model.attention=meshtune", f"train.optimizer={optimizer}",
        f"train.precision={precision}",
    )  # fmt: skip
    whole = train("train.max_steps=8", f"output={tmp_path / 'whole'}", *lasting)
    train("train.max_steps=5", f"output={tmp_path / 'parts'}", *lasting)
    resumed = train("train.max_steps=8", f"output={tmp_path / 'parts'}", *lasting)
    assert resumed.folder.path == tmp_path / "parts"
    assert losses(whole) == losses(resumed)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.ci
def test_a_run_that_logs_to_the_console_alone_has_its_result(train: Train) -> None:
    run = train("log.to=[console]")
    assert len(losses(run)) == 4 and summarise(run.folder).status == "finished"


@pytest.mark.ci
def test_a_finished_run_is_not_overwritten_and_its_config_repeats_it(train: Train, tmp_path: Path) -> None:
    first = train()
    with refuses(UserError):
        build.build(config.load(first.folder.config_file))
    again = build.build(config.load(first.folder.config_file, [f"output={tmp_path / 'again'}"]))
    loop.train(again)
    assert again.folder.path == tmp_path / "again"
    assert losses(first) == losses(again)


@pytest.mark.ci
def test_a_replaced_run_is_gone_after_the_first_step_of_the_new_one(
    train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train()
    before = losses(first)
    anew = build.build(config.load(None, settings("train.learning_rate=2e-3", "output_exists=replace")))
    assert anew.folder == first.folder and (anew.folder.replaced / "model").exists()
    there, update = [], anew.optimizer.step

    def watched(rate: float) -> None:
        there.append(anew.folder.replaced.exists())
        update(rate)

    monkeypatch.setattr(anew.optimizer, "step", watched)
    loop.train(anew)
    assert there == [True, False, False, False]
    assert losses(anew) != before


@pytest.mark.ci
def test_an_unfinished_run_with_other_settings_is_refused_naming_them(
    train: Train, settings: Callable[..., list[str]]
) -> None:
    run = train("train.max_steps=3")
    rows = [row for row in run.folder.rows() if row["kind"] != "end"]
    run.folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refuses(UserError):
        build.build(config.load(None, settings("train.max_steps=6", "train.learning_rate=0.5")))


@pytest.mark.ci
def test_two_processes_do_not_train_in_one_folder(settings: Callable[..., list[str]]) -> None:
    first = build.build(config.load(None, settings()))
    with refuses(UserError):
        build.build(config.load(None, settings()))
    loop.train(first)  # undisturbed


@pytest.mark.parametrize("number", cases(STOPPING, test=1, ci=3))
def test_a_signal_finishes_the_step_and_saves(
    number: int,
    settings: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = build.build(config.load(None, settings("train.max_steps=50")))
    step, name = run.optimizer.step, signal.Signals(number).name

    def interrupting(rate: float) -> None:
        step(rate)
        if run.progress.step == 3:
            os.kill(os.getpid(), number)
            assert f"{name}: the run stops after this step" in capsys.readouterr().err  # at once

    monkeypatch.setattr(run.optimizer, "step", interrupting)
    with pytest.raises(Interrupted, match=f"{name} after step 3 of 50"):
        loop.train(run)
    assert run.checkpoints.steps() == [3]
    assert [row["step"] for row in run.folder.rows("train")] == [1, 2, 3]
    assert Interrupted.exit_code == 75


@pytest.mark.parametrize("place", cases(["loss", "answers"], ci=2))
def test_a_signal_ends_an_evaluation_which_resuming_makes_up(
    place: str, train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(config.load(None, settings("layout=mb1", "eval.every=2", "eval.samples=2")))
    module, name = {"loss": (evaluate, "head_loss"), "answers": (generate, "generating")}[place]
    begin = getattr(module, name)

    def interrupting(*args: Any, **named: Any) -> Any:
        if run.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(*args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupting)
        patched.setattr(apply, "GROUPED", 1)
        with pytest.raises(Interrupted, match=r"after step 2 of 4\. The checkpoint is saved"):
            loop.train(run)
    assert not run.folder.rows("eval") and not run.folder.samples()
    assert [
        row["step"] for row in train("layout=mb1", "eval.every=2", "eval.samples=2").folder.rows("eval")
    ] == [2, 4]


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
            os.kill(os.getpid(), signal.SIGXCPU)
            assert stop.requested == "SIGXCPU"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_is_hidden_before_the_first_step_stops_the_run_after_it() -> None:
    with interrupted_by_signals():
        with suppress(BaseException):  # as in a destructor
            os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequest() as stop:
            assert stop.requested == "SIGUSR1"

    def importing() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:  # as in C code that imports
            raise ImportError from error

    with pytest.raises(Interrupted, match="Stopped by SIGTERM outside"), interrupted_by_signals():
        importing()

    def failing() -> None:
        with suppress(ImportError):
            importing()
        raise RankFailed

    with pytest.raises(RankFailed), interrupted_by_signals():
        failing()


@pytest.mark.ci
def test_a_non_finite_step_is_not_applied_and_several_in_a_row_stop_the_run(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(
        config.load(None, settings("train.max_steps=9", "checkpoint.every=2", "train.max_nonfinite_steps=3"))
    )
    honest = run.passes.forward_backward

    def poisoned(*args: Any) -> torch.Tensor:
        loss = honest(*args)
        return loss * float("nan") if run.progress.step in (3, 5, 6, 7) else loss

    monkeypatch.setattr(type(run.passes), "forward_backward", lambda _, *args: poisoned(*args))
    before: dict[int, dict[str, torch.Tensor]] = {}
    train_row = run.metrics.train

    def noted(**numbers: Any) -> None:
        before[numbers["step"]] = weights(run)
        train_row(**numbers)

    monkeypatch.setattr(run.metrics, "train", noted)
    with refuses(NonFinite):
        loop.train(run)
    assert all(torch.equal(before[2][name], before[3][name]) for name in before[2])
    assert not torch.equal(before[3]["model.lm_head.weight"], before[4]["model.lm_head.weight"])
    assert [row["step"] for row in run.folder.rows("train") if row.get("skipped")] == [3, 5, 6, 7]
    assert NonFinite.exit_code == 4


def test_updates_inside_the_backward_end_the_run_where_a_gradient_is_not_finite(
    settings: Callable[..., list[str]],
) -> None:
    words = (
        "train.step_in_backward=true",
        "train.max_grad_norm=0",
        "layout=mb4",
        "train.global_batch_size=4",
    )
    run = build.build(config.load(None, settings(*words, "checkpoint.every=2", "train.max_steps=9")))
    stage, nan, held = run.passes.parallel.stages[0], float("nan"), dict[int, Any]()
    stage.register_forward_hook(lambda *args: args[-1] * (nan if run.progress.step == 3 else 1))
    last = stage.model.get_submodule("model.norm").weight
    last.register_hook(lambda gradient: gradient * (nan if run.progress.step == 5 else 1))
    train_row = run.metrics.train

    def noted(**numbers: Any) -> None:
        held[numbers["step"]] = weights(run)
        train_row(**numbers)

    run.metrics.train = noted
    with refuses(NonFinite):
        loop.train(run)
    assert all(torch.equal(held[2][name], held[3][name]) for name in held[2]), "a loss that is not finite"
    assert [row["step"] for row in run.folder.rows("train") if row.get("skipped")] == [3, 5]
    assert run.checkpoints.steps() == [2, 4] and not run.checkpoints.problems(4)


@pytest.mark.ci
def test_the_best_evaluation_is_kept_and_patience_ends_the_run(
    settings: Callable[..., list[str]], tiny: Path
) -> None:
    run = build.build(
        config.load(None, settings("train.max_steps=40", "eval.every=2", "eval.keep_best=true",
                                   "eval.early_stopping=2",
                                   "train.learning_rate=0.3", "checkpoint.keep=1"))
    )  # fmt: skip
    loop.train(run)
    rows = {row["step"]: row["loss"] for row in run.folder.rows("eval")}
    best = min(rows, key=lambda step: rows[step])
    assert run.progress.best_step == best
    assert max(rows) == best + 4 < 40, "two evaluations without a better loss end it"
    loaded = AutoModelForCausalLM.from_pretrained(run.folder.model, dtype=torch.float32)
    trained = dict(run.passes.parallel.stages[0].model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())
    assert run.evaluation.dataset is not None
    loss, *_ = run.evaluation.held_out_loss()
    assert loss == pytest.approx(rows[best], rel=1e-6)


def test_a_pipeline_evaluates_several_micro_batches_at_once(settings: Callable[..., list[str]]) -> None:
    """At least as many as it has stages, so that every rank works; the last group may be smaller."""
    run = build.build(config.load(None, settings()))
    evaluation, parallel, pp, groups = run.evaluation, run.evaluation.parallel, 3, []
    world = replace(parallel.world, axes=(Axis("pp", pp), *parallel.world.axes[1:]))

    def forward(group: list[Any], finish: Any) -> list[torch.Tensor]:
        groups.append(len(group))
        return [torch.tensor(float(micro_batch.label_tokens)) for micro_batch in group]

    several = SimpleNamespace(
        world=world, forward=forward, modules=parallel.modules, width_multiple=parallel.width_multiple
    )
    several.forward_each = partial(type(parallel).forward_each, several)
    assert evaluation.dataset is not None
    sequences = [evaluation.dataset.members[:1]] * 40
    many = replace(evaluation.dataset, members=np.concatenate(sequences), starts=np.arange(41))
    loss, *_ = replace(evaluation, parallel=several, dataset=many, micro_batch_size=1).held_out_loss()  # pyright: ignore[reportArgumentType]
    assert sum(groups) == 40 and min(groups[:-1]) >= pp and loss == 1


@pytest.mark.ci
def test_lora_checkpoints_and_optimizer_hold_only_what_is_trained(train: Train) -> None:
    run = train("method=lora", "lora.r=4", "lora.dropout=0.1", "checkpoint.every=2")
    names = run.optimizer.state()
    assert names and all("lora_" in name for name in names)
    size = sum(file.stat().st_size for file in (run.folder.checkpoints / "step-4").iterdir())
    assert size < 3 * sum(t.nbytes for t in names.values()) + 100_000
    assert (run.folder.model / "adapter_config.json").exists()


@pytest.mark.ci
def test_lora_with_dropout_resumes_bit_for_bit(train: Train, tmp_path: Path) -> None:
    lasting = ("train.lr_scheduler=constant", "method=lora", "lora.dropout=0.2", "lora.r=4")
    whole = train("train.max_steps=6", f"output={tmp_path / 'whole'}", *lasting)
    train("train.max_steps=3", f"output={tmp_path / 'parts'}", *lasting)
    resumed = train("train.max_steps=6", f"output={tmp_path / 'parts'}", *lasting)
    assert losses(whole) == losses(resumed)


@pytest.mark.parametrize("recompute", cases(["attention", "selective", "full"], ci=["selective"]))
def test_recomputation_trains_the_same(recompute: str, train: Train, tmp_path: Path) -> None:
    plain = train(f"output={tmp_path / 'plain'}")
    again = train(f"layout={{recompute: {recompute}}}", f"output={tmp_path / 'again'}")
    assert losses(again) == pytest.approx(losses(plain), rel=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_bf16_follows_fp32(precision: str, train: Train, tmp_path: Path) -> None:
    exact = train("train.max_steps=6", f"output={tmp_path / 'fp32'}")
    rounded = train("train.max_steps=6", f"train.precision={precision}", f"output={tmp_path / precision}")
    assert losses(rounded) == pytest.approx(losses(exact), rel=0.01)
    assert {p.dtype for p in rounded.passes.parallel.stages[0].model.parameters()} == {torch.bfloat16}
    state = {tensor.dtype for name, tensor in rounded.optimizer.state().items() if not name.endswith(".step")}
    assert state == {torch.float32 if precision == "bf16" else torch.bfloat16}


@pytest.mark.ci
@pytest.mark.parametrize("asked", ["false", "true"])
def test_memory_of_the_first_three_steps_is_in_the_rows_and_printed_once_where_asked(
    asked: str, settings: Callable[..., list[str]], capsys: pytest.CaptureFixture
) -> None:
    run = build.build(config.load(None, settings("log.to=[console,jsonl]", f"log.memory={asked}")))
    loop.train(run)
    rows = run.folder.rows("memory")
    assert [(row["step"], [*row["phases"]]) for row in rows] == [
        (step, ["forward", "backward", "optimizer"]) for step in (1, 2, 3)
    ]
    said = capsys.readouterr().err
    assert said.count("Peak memory of each phase") == said.count("activations") == (asked == "true")


@pytest.mark.ci
def test_a_row_counts_epochs_and_each_save_has_one(train: Train) -> None:
    run = train("checkpoint.every=2")
    epochs = [row["epoch"] for row in run.folder.rows("train")]
    assert epochs == pytest.approx([epochs[0] * step for step in range(1, 5)]) and epochs[0] > 0
    assert [row["step"] for row in run.folder.rows("save")] == [2, 4]
    assert all(row["seconds"] > 0 for row in run.folder.rows("save"))


def test_out_of_memory_names_the_largest_part_and_what_would_fit(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(config.load(None, settings()))

    def exhausted(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(type(run.passes), "forward_backward", lambda _, *args: exhausted(*args))
    with pytest.raises(NothingFits) as refused:
        loop.train(run)
    said = "\n".join(refused.value.problems)
    assert "Tried to allocate 20.00 GiB" in said and "largest" in said


def test_a_layout_for_several_devices_is_refused_before_anything_is_written(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    with refuses(UserError):
        build.build(config.load(None, settings("layout=zero3x2-tp2-mb1")))
    assert not (tmp_path / "run").exists()


def test_packing_is_refused_for_an_attention_that_cannot_keep_documents_apart(
    settings: Callable[..., list[str]],
) -> None:
    with refuses(UserError):
        build.build(config.load(None, settings("model.attention=eager")))


def test_a_folder_with_something_else_in_it_is_not_taken(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("all of it")
    with refuses(UserError):
        build.build(config.load(None, settings()))
    assert (tmp_path / "run" / "thesis.txt").read_text() == "all of it"


@pytest.mark.ci
def test_rows_after_the_restored_checkpoint_are_removed(train: Train, tmp_path: Path) -> None:
    run = train("train.max_steps=4", "train.lr_scheduler=constant")
    extra = {"kind": "train", "step": 5, "loss": 1.0}
    RunDir(run.folder.path).append(extra)
    more = train("train.max_steps=6", "train.lr_scheduler=constant")
    assert [row["step"] for row in more.folder.rows("train")] == [1, 2, 3, 4, 5, 6]
    assert more.folder.rows("train")[4]["loss"] != 1.0


@pytest.mark.ci
def test_checkpoints_that_a_kill_kept_from_being_removed_go_on_resuming(train: Train) -> None:
    words = ("checkpoint.every=4", "checkpoint.keep=1")
    run = train(*words)
    run.folder.drop_after(3)  # as if killed in the save of the last step: neither finished nor pruned
    RunDir(run.folder.path).append({"kind": "train", "step": 4, "loss": 1.0})
    folder = run.checkpoints.folder
    shutil.copytree(folder / "step-4", folder / "step-2")
    (folder / ".tmp-gone-step-1").mkdir()
    again = train(*words)
    assert again.folder == run.folder
    assert [path.name for path in folder.iterdir()] == ["step-4"]


@pytest.mark.parametrize("cut", ["in the evaluation", "after it"])
def test_a_checkpoint_comes_before_an_evaluation_which_resuming_counts_once(
    cut: str, train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval.every=2", "checkpoint.every=2", "checkpoint.async_save=false", "eval.early_stopping=9")
    whole = train(*words, "output_exists=new")
    run = build.build(config.load(None, settings(*words, "output_exists=new")))
    evaluation_run = type(run.evaluation).run

    def cutting(evaluation: Any, step: int, metrics: Any) -> None:
        if cut == "after it":
            evaluation_run(evaluation, step, metrics)
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(type(run.evaluation), "run", cutting)
        with pytest.raises(SystemExit):
            loop.train(run)
    resumed = train(*words, "output_exists=new")
    assert resumed.folder.path == run.folder.path and resumed.folder.rows("run")[-1]["resumed_from"] == 2
    evaluations = [
        [(row["step"], row["loss"]) for row in each.folder.rows("eval")] for each in (whole, resumed)
    ]
    assert evaluations[0] == evaluations[1] and [step for step, _ in evaluations[0]] == [2, 4]
    assert vars(resumed.progress) | {"seconds": 0} == vars(whole.progress) | {"seconds": 0}


def interrupt_after(run: loop.Run, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `run` get a SIGTERM while it does `step`, and run it."""
    update = run.optimizer.step

    def interrupting(rate: float) -> None:
        update(rate)
        if run.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run.optimizer, "step", interrupting)
    with pytest.raises(Interrupted):
        loop.train(run)


@pytest.mark.ci
def test_a_second_run_that_was_interrupted_goes_on_too(
    train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train()
    second = build.build(config.load(None, settings("output_exists=new")))
    assert second.folder.path == tmp_path / "run-2"
    interrupt_after(second, 2, monkeypatch)
    again = train("output_exists=new")
    assert again.folder.path == tmp_path / "run-2"
    assert again.folder.rows("run")[-1]["resumed_from"] == 2
    assert train("output_exists=new").folder.path == tmp_path / "run-3"


@pytest.mark.ci
def test_sums_are_those_of_all_steps_where_few_have_rows(
    train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = train(f"output={tmp_path / 'every'}", "train.max_steps=5")
    words = ("train.max_steps=5", "log.every=10", "checkpoint.every=2")
    first = build.build(config.load(None, settings(*words)))
    interrupt_after(first, 3, monkeypatch)
    stopped = summarise(first.folder)
    first.folder.drop_after(2)  # as if killed in step 3
    shutil.rmtree(first.checkpoints.folder / "step-3")
    run = train(*words)
    rows, summary = run.folder.rows("train"), summarise(run.folder)
    assert [row["step"] for row in rows] == [1, 5]
    assert run.folder.rows("run")[-1]["resumed_from"] == 2
    assert summary.tokens == summarise(every.folder).tokens
    assert stopped.tokens == sum(row["tokens"] for row in every.folder.rows("train")[:3])
    assert stopped.seconds and summary.seconds and summary.seconds > sum(row["step_seconds"] for row in rows)
    shown = dict(headline(summary))["time of steps"]
    assert shown == f"{duration(summary.seconds)} · {summary.tokens:,} tokens"
    figures = {line.name: line.cells for line in compare([run.folder.path, every.folder.path]).figures}
    assert figures["tokens"] == (f"{summary.tokens:,}",) * 2
    assert figures["time of training steps"][0] == duration(summary.seconds)


@pytest.mark.ci
def test_a_best_checkpoint_that_could_not_be_saved_costs_the_best_not_the_model(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(
        config.load(None, settings("eval.every=1", "eval.keep_best=true", "checkpoint.async_save=false"))
    )
    evaluations = iter([3.0, 1.0, 2.0, 2.5])
    monkeypatch.setattr(type(run.evaluation), "run", lambda *_: next(evaluations))
    write = run.checkpoints._write

    def failing(step: int, *rest: Any) -> str | None:
        return "no room" if step == 2 else write(step, *rest)

    monkeypatch.setattr(run.checkpoints, "_write", failing)
    loop.train(run)
    assert run.progress.best_step == 2
    assert run.folder.rows("end")[-1]["model_step"] == 4
    assert (run.folder.model / "model.safetensors").exists()


@pytest.mark.ci
def test_a_stop_whose_checkpoint_failed_says_so(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(config.load(None, settings("checkpoint.async_save=false")))
    monkeypatch.setattr(run.checkpoints, "_write", lambda *_: "no room")
    run.stop.requested = "SIGTERM"
    with pytest.raises(Interrupted, match=r"could not be saved. No checkpoint was saved yet"):
        loop.train(run)


def test_the_third_stop_without_a_new_checkpoint_ends_with_a_code_that_no_queue_repeats(
    train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(number: int, *, saves: bool) -> int:
        run = build.build(config.load(None, settings("checkpoint.async_save=false", "data.eval=[]")))
        if not saves:
            monkeypatch.setattr(run.checkpoints, "_write", lambda *_: "no room")
        run.stop.requested = "SIGUSR1"
        with refuses(Interrupted) if number == 3 else pytest.raises(Interrupted) as info:
            loop.train(run)
        return info.value.exit_code

    assert [stopped(number, saves=False) for number in (1, 2, 3)] == [75, 75, 5]
    assert stopped(0, saves=True) == 75
    assert [stopped(number, saves=False) for number in (1, 2, 3)] == [75, 75, 5]
    assert train("checkpoint.async_save=false", "data.eval=[]").folder.rows("run")[-1]["resumed_from"] == 1


def test_a_submitted_run_is_compared_with_what_its_job_was_expected_to_take(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPECTED, '{"seconds":3600,"most":7200,"gpus":8,"price":2.5,"currency":"USD"}')
    run = train()
    (first,), (last,) = run.folder.rows("run"), run.folder.rows("end")
    begun, ended = map(datetime.fromisoformat, (first["begun"], last["ended"]))
    assert begun.timestamp() == int(psutil.Process().create_time()), "start-up is in the expected time too"
    job = summarise(run.folder).job or {}
    assert job["seconds"] == (ended - begun).total_seconds() and job["expected_cost"] == 8 * 2.5
    assert job["cost"] == pytest.approx(8 * 2.5 * job["seconds"] / 3600)
    took = "of 1 h 0 min expected (at most 2 h 0 min)"
    assert took in dict(headline(summarise(run.folder)))["submitted job"]


@pytest.mark.ci
def test_a_stop_after_a_first_step_that_was_not_applied_can_be_resumed(
    train: Train, settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(config.load(None, settings()))
    honest = run.passes.forward_backward
    with monkeypatch.context() as patched:
        poisoned = lambda _, *args: honest(*args) * float("nan")  # noqa: E731
        patched.setattr(type(run.passes), "forward_backward", poisoned)
        run.stop.requested = "SIGTERM"
        with pytest.raises(Interrupted):
            loop.train(run)
    assert [row["step"] for row in train().folder.rows("train")] == [1, 2, 3, 4]


@pytest.mark.ci
def test_the_model_is_saved_with_the_end_marker_that_it_was_taught(train: Train) -> None:
    run = train("data.chat_template=chatml", "train.max_steps=2")
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    loaded = AutoModelForCausalLM.from_pretrained(run.folder.model)
    ends = loaded.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])


@pytest.mark.ci
def test_a_template_that_was_switched_off_is_not_saved(train: Train) -> None:
    run = train("data.chat_template=none", "train.max_steps=1")
    assert AutoTokenizer.from_pretrained(run.folder.model).chat_template is None


def test_attention_recompute_needs_our_attention(settings: Callable[..., list[str]]) -> None:
    words = settings("model.attention=sdpa", "data.packing=false", "layout={recompute: attention}")
    with refuses(UserError):
        build.build(config.load(None, words))


def test_a_tracker_that_is_not_installed_is_refused_before_the_folder_is_touched(
    settings: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "installed", lambda module: module != "wandb")
    with refuses(UserError):
        build.build(config.load(None, settings("log.to=[wandb]")))
    assert not (tmp_path / "run").exists()


def test_max_grad_norm_zero_clips_nothing(train: Train, tmp_path: Path) -> None:
    free = train("train.max_grad_norm=0", f"output={tmp_path / 'free'}")
    loose = train("train.max_grad_norm=1e9", f"output={tmp_path / 'loose'}")
    assert losses(free) == losses(loose)


@pytest.mark.ci
@pytest.mark.parametrize("moved", [True, False])
def test_a_run_folder_that_is_gone_is_noticed_and_made_anew(
    moved: bool,
    settings: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run = build.build(config.load(None, settings("checkpoint.every=2", "log.to=[console, jsonl]")))
    update, path = run.optimizer.step, run.folder.path

    def losing(rate: float) -> None:
        update(rate)
        if run.progress.step == 3:
            run.checkpoints.wait()
            path.rename(tmp_path / "elsewhere") if moved else shutil.rmtree(path)

    monkeypatch.setattr(run.optimizer, "step", losing)
    loop.train(run)
    assert "was deleted or moved while this run was training" in " ".join(capsys.readouterr().err.split())
    names = {file.name for file in path.iterdir()}
    assert names >= {".lock", "config.yaml", "plan.yaml", "metrics.jsonl", "checkpoints", "model"}
    assert [row["step"] for row in run.folder.rows("train")] == [3, 4]
    assert run.checkpoints.newest_good() == 4


@pytest.mark.ci
def test_a_run_none_of_whose_steps_was_applied_writes_no_model(
    settings: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.build(config.load(None, settings("train.max_steps=1")))
    honest = run.passes.forward_backward
    poisoned = lambda _, *args: honest(*args) * float("nan")  # noqa: E731
    monkeypatch.setattr(type(run.passes), "forward_backward", poisoned)
    with refuses(NonFinite):
        loop.train(run)
    assert not run.folder.model.exists()
    assert "stopped" in run.folder.rows("end")[-1]["status"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "change", [{"data": None}, {"data": {}}, {"data": {"epoch": "x"}}, {"generators": None}, {"axes": ...}]
)
def test_values_that_no_run_wrote_are_refused_with_a_sentence(change: dict[str, Any], train: Train) -> None:
    run = train("train.max_steps=2")
    folder = run.folder.checkpoints / "step-2"
    values = json.loads((folder / "values.json").read_text()) | change
    (folder / "values.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["values.json"] = size_and_hash(folder / "values.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError):
        train("train.max_steps=3")


@pytest.mark.ci
def test_label_smoothing_is_of_the_training_loss_and_not_of_the_evaluations(
    train: Train, tmp_path: Path
) -> None:
    found = []
    for number, smoothing in enumerate(("0", "0.3")):
        still = ("train.learning_rate=1e-30", "train.max_steps=1", f"output={tmp_path / str(number)}")
        run = train(*still, f"train.label_smoothing={smoothing}")
        found.append((losses(run)[0], run.folder.rows("eval")[-1]["loss"]))
    (plain, held_out), (smoothed, held_out_too) = found
    assert held_out_too == held_out and abs(smoothed - plain) > 1e-3
