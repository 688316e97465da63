"""Updates inside the backward, and states in host memory: to the bit the numbers of the run without them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cases import cases
from layouts import Trained, trained
from test_methods import focal

from meshtune.optim import optimizer

IN_BACKWARD = "train.step_in_backward=true"
OFFLOAD = "train.offload=optimizer"
UNCLIPPED = ("train.max_grad_norm=0", "checkpoint.every=2")
OTHER = {name: (f"train.optimizer={name}", "train.adam_eps=1e-8") for name in ("lion", "adafactor")}
LORA = ("method=lora", "lora.r=4", "lora.modules_to_save=[embed_tokens, lm_head]")


def assert_equal(ours: Trained, plain: Trained) -> None:
    """Assert that two runs have the same rows and weights, to the bit."""
    assert (ours.losses, ours.norms, ours.evaluated[-1]) == (plain.losses, plain.norms, plain.evaluated[-1])
    assert ours.tensors.keys() == plain.tensors.keys()
    assert all(tensor.equal(plain.tensors[name]) for name, tensor in ours.tensors.items())


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Function(layout, precision, *settings) -> the run without the features, made once."""

    def run(layout: str, precision: str, *words: str) -> Trained:
        return trained(folder, tmp_path_factory.mktemp("plain") / "run", layout, precision, *words)

    return cache(run)


@pytest.mark.parametrize(
    ("layout", "precision", "words"),
    cases(
        [
            ("mb16-ga1", "bf16", ()),
            ("mb16-ga1", "fp32", OTHER["adafactor"]),
            ("mb16-ga1", "bf16", ("train.optimizer=muon",)),
            ("mb16-ga1-full", "bf16-pure", ()),
            ("dp2-mb8-ga1", "bf16", ()),
            ("dp2-tp2-sp-mb8-ga1-selective", "bf16", OTHER["lion"]),
            ("zero1x2-cp2-mb8-ga1", "fp32", ()),
            ("zero2x2-mb8-ga1", "bf16-pure", OTHER["lion"]),
            ("zero3x2-mb8-ga1", "bf16", ()),
            ("zero3x2-tp2-sp-mb8-ga1", "bf16", LORA),
            ("dp2-mb8-ga1", "fp32", ("log.gradient_noise_scale=2",)),
        ],
    ),
)  # fmt: skip
def test_updates_inside_the_backward_are_those_behind_it(
    layout: str, precision: str, words: tuple[str, ...], folder: Path,
    plain: Callable[..., Trained], tmp_path: Path,
) -> None:  # fmt: skip
    ours = trained(folder, tmp_path / "run", layout, precision, *UNCLIPPED, *words, IN_BACKWARD)
    assert_equal(ours, plain(layout, precision, *UNCLIPPED, *words))


@pytest.mark.parametrize(
    ("layout", "precision", "words"),
    cases(
        [
            ("mb4-ga4", "bf16", ()),
            ("mb16-ga1", "bf16", (IN_BACKWARD, *UNCLIPPED)),
            ("mb4-ga4", "bf16", ("train.optimizer=muon",)),
            ("dp2-mb4-ga2", "bf16-pure", OTHER["adafactor"]),
            ("zero1x2-mb4-ga2", "fp32", ()),
            ("zero3x2-mb8-ga1", "bf16", (IN_BACKWARD, *UNCLIPPED)),
            ("zero3x2-mb4-ga2", "bf16-pure", LORA),
            ("tp2-sp-mb4-ga4", "bf16", ("train.optimizer=adamw-bf16",)),
            ("pp2-zbv-mb4-ga4", "bf16", OTHER["lion"]),
            ("cp2-mb4-ga4", "bf16", LORA),
        ],
    ),
)  # fmt: skip
def test_states_in_host_memory_are_those_of_the_device(
    layout: str, precision: str, words: tuple[str, ...], folder: Path,
    plain: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(optimizer, "BUCKET_ELEMENTS", 9000)  # else one bucket has all
    ours = trained(folder, tmp_path / "run", layout, precision, *words, OFFLOAD, forked=True)
    assert_equal(ours, plain(layout, precision, *(word for word in words if word != IN_BACKWARD)))


@pytest.mark.all
def test_a_count_of_the_loss_is_known_before_the_update(folder: Path, tmp_path: Path) -> None:
    runs = [
        trained(folder, tmp_path / str(len(words)), "dp2-mb8-ga1", "fp32", *UNCLIPPED, *words, loss=focal)
        for words in ((), (IN_BACKWARD,))
    ]
    assert_equal(*runs)


@pytest.mark.all
def test_a_run_continues_with_and_without(
    folder: Path, plain: Callable[..., Trained], tmp_path: Path
) -> None:
    words = IN_BACKWARD, OFFLOAD
    layout, precision = "zero3x2-mb8-ga1", "bf16"
    for first, then in (words, ()), ((), words):
        run = tmp_path / f"{len(first)}"
        trained(folder, run, layout, precision, *UNCLIPPED, *first, "train.max_steps=2")
        assert_equal(
            trained(folder, run, layout, precision, *UNCLIPPED, *then), plain(layout, precision, *UNCLIPPED)
        )
