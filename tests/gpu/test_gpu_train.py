"""The front door on a CUDA device: the numbers of the CPU, checkpoints, compiled blocks, memory that runs
out.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pydantic", reason="the settings tree needs pydantic")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Train = Callable[..., Any]


@pytest.fixture
def train(train: Train) -> Train:
    """The same without compiling each tiny model."""
    return partial(train, "train.compile=false")


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.folder.rows("train")]


@pytest.mark.parametrize("packing", ["true", "false"])
def test_fp32_losses_are_the_cpus(packing: str, train: Train, tmp_path: Path) -> None:
    kept = (f"data.packing={packing}", "train.max_steps=6")
    cpu = train(*kept, "train.device=cpu", f"output={tmp_path / 'cpu'}")
    cuda = train(*kept, "train.device=cuda", f"output={tmp_path / 'cuda'}")
    assert losses(cuda) == pytest.approx(losses(cpu), rel=1e-5)


@pytest.mark.parametrize(
    ("option", "bound"),
    [
        ("train.optimizer=adafactor", 1e-5),
        ("train.optimizer=lion", 1e-3),  # a sign that rounding turns moves a weight by twice the rate
        ("train.optimizer=muon", 1e-3),  # Newton-Schulz is in bf16
        ("train.optimizer=adamw-8bit", 1e-3),  # a code that rounding turns is 3 % of a moment
        ("method=qlora", 1e-3),  # sums of scales in another order turn a few codes
        ("train.neftune_alpha=5", 1e-5),
        ("train.label_smoothing=0.1", 1e-5),
        ("lora.use_dora=true", 1e-5),
    ],
)
def test_losses_of_an_option_are_the_cpus(option: str, bound: float, train: Train, tmp_path: Path) -> None:
    kept = (option, "train.max_steps=6", *(["method=lora"] if option.startswith("lora.") else []))
    cpu = train(*kept, "train.device=cpu", f"output={tmp_path / 'cpu'}")
    cuda = train(*kept, "train.device=cuda", f"output={tmp_path / 'cuda'}")
    assert losses(cuda) == pytest.approx(losses(cpu), rel=bound)


@pytest.mark.parametrize(
    "words",
    [
        ("dpo",),
        ("dpo", "data.shared_prompts=true"),
        ("kto", "method=qlora"),
        ("orpo",),
        ("reward", "method=lora"),
    ],
)
def test_preferences_are_the_cpus(words: tuple[str, ...], train: Train, tiny: Path, tmp_path: Path) -> None:
    """Packed pairs, the passes without gradients, a head of one output."""
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    file = tmp_path / "rows.jsonl"
    columns = ({"chosen": row["completion"], "rejected": "none", "label": len(row["prompt"]) % 3 > 0}
               for row in rows)  # fmt: skip
    file.write_text("".join(json.dumps(row | more) + "\n" for row, more in zip(rows, columns, strict=True)))
    kept = (
        f"objective={words[0]}",
        *words[1:],
        f"data.train={file}",
        f"data.eval={file}",
        "train.max_steps=6",
    )
    cpu = train(*kept, "train.device=cpu", f"output={tmp_path / 'cpu'}")
    cuda = train(*kept, "train.device=cuda", f"output={tmp_path / 'cuda'}")
    for name in ("loss", "rewards/margins"):
        expected = [row[name] for row in cpu.folder.rows("train")]
        assert [row[name] for row in cuda.folder.rows("train")] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_gradient_noise_is_the_cpus(train: Train, tmp_path: Path) -> None:
    """Norms of each micro-batch's gradients, which are summed on the device."""
    from meshtune.meter.noise_scale import ESTIMATES

    kept = ("log.gradient_noise_scale=1", "layout=mb1-ga4", "train.max_steps=4")
    cpu = train(*kept, "train.device=cpu", f"output={tmp_path / 'cpu'}")
    cuda = train(*kept, "train.device=cuda", f"output={tmp_path / 'cuda'}")
    for name in ESTIMATES:
        expected = [row[name] for row in cpu.folder.rows("train")]
        assert len(expected) == 4 and None not in expected
        assert [row[name] for row in cuda.folder.rows("train")] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "attention", "selective", "full", "offload"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_bf16_follows_fp32_in_every_recompute_mode(
    precision: str, recompute: str, train: Train, tmp_path: Path
) -> None:
    exact = train("train.max_steps=6", "train.device=cpu", f"output={tmp_path / 'cpu'}")
    rounded = train(
        "train.max_steps=6", f"train.precision={precision}", f"layout={{recompute: {recompute}}}",
        "train.device=cuda", f"output={tmp_path / 'cuda'}",
    )  # fmt: skip
    assert losses(rounded) == pytest.approx(losses(exact), rel=0.01)


@pytest.mark.parametrize("compile", ["false", "true"])
def test_offloaded_inputs_give_the_losses_of_full(compile: str, train: Train, tmp_path: Path) -> None:
    blocks = ("model.init=random", "model.overrides={num_hidden_layers: 8}", f"train.compile={compile}")
    offload, full = (
        train("train.device=cuda", f"layout=mb1-ga4-{mode}", f"output={tmp_path / mode}", *blocks)
        for mode in ("offload", "full")
    )
    assert losses(offload) == pytest.approx(losses(full), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "words",
    [("offload=optimizer",), ("step_in_backward=true",), ("offload=optimizer", "step_in_backward=true")],
)
def test_states_in_host_memory_and_updates_in_the_backward_give_the_same_losses(
    words: tuple[str, ...], precision: str, train: Train, tmp_path: Path
) -> None:
    kept = ("train.device=cuda", "layout=mb4-ga1", "train.max_grad_norm=0", f"train.precision={precision}")
    plain = train(*kept, f"output={tmp_path / 'plain'}")
    ours = train(*kept, *(f"train.{word}" for word in words), f"output={tmp_path / 'ours'}")
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_in_4_bits_are_the_cpus(dtype: Any) -> None:
    nf4 = pytest.importorskip("meshtune.quantised.nf4")
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = nf4.quantise(weight.cuda()), nf4.quantise(weight)
    assert torch.equal(ours.packed.cpu(), theirs.packed)
    place, like = (0, 1024 // nf4.BLOCK, 0, 512), torch.empty(0, dtype=dtype)
    values = nf4.dequantise_op(*(part.cuda() for part in theirs), place, like.cuda())
    bound = torch.finfo(dtype).eps
    torch.testing.assert_close(values.cpu(), nf4.dequantise_op(*theirs, place, like), rtol=bound, atol=bound)


def test_compiled_blocks_give_the_same_losses(train: Train, tmp_path: Path) -> None:
    plain = train("train.device=cuda", f"output={tmp_path / 'plain'}")
    compiled = train("train.device=cuda", "train.compile=auto", f"output={tmp_path / 'compiled'}")
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)


def test_resuming_goes_on_with_the_same_losses(train: Train, tmp_path: Path) -> None:
    lasting = ("train.lr_scheduler=constant", "train.device=cuda", "method=lora", "lora.dropout=0.1")
    whole = train("train.max_steps=8", f"output={tmp_path / 'whole'}", *lasting)
    train("train.max_steps=4", f"output={tmp_path / 'parts'}", *lasting)
    resumed = train("train.max_steps=8", f"output={tmp_path / 'parts'}", *lasting)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


def test_a_cpu_checkpoint_goes_on_on_the_gpu(train: Train, tmp_path: Path) -> None:
    lasting = ("train.lr_scheduler=constant", f"output={tmp_path / 'moved'}")
    train("train.max_steps=3", "train.device=cpu", *lasting)
    moved = train("train.max_steps=6", "train.device=cuda", *lasting)
    assert moved.folder.path == tmp_path / "moved"
    assert [row["step"] for row in moved.folder.rows("train")] == [1, 2, 3, 4, 5, 6]


def test_mfu_is_a_share_and_the_peaks_add_up(train: Train) -> None:
    run = train("train.device=cuda", "train.precision=bf16")
    for row in run.folder.rows("train"):
        assert row["mfu"] is None or 0 < row["mfu"] < 1
        assert 0 < row["peak_memory_bytes"] < torch.cuda.get_device_properties(0).total_memory


def test_running_out_of_memory_says_what_would_fit(settings: Callable[..., list[str]]) -> None:
    from meshtune import config
    from meshtune.api import build
    from meshtune.errors import NothingFits
    from meshtune.train import loop

    run = build.build(config.load(None, settings("train.device=cuda")))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**20) / total)
    try:
        with pytest.raises(NothingFits, match="Out of memory in"):
            loop.train(run)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_weights_are_drawn_on_the_gpu_with_the_deviations_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    from meshtune.model.load import drawn

    config = Qwen2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    found: dict[str, Any] = {}
    device, before = torch.device("cuda", 0), torch.cuda.get_rng_state()

    def receive(names: Any, whole: Any) -> None:
        found.update(dict.fromkeys(names, whole))

    drawn(config, receive, dtype=torch.bfloat16, device=device)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    model = AutoModelForCausalLM.from_config(config)
    named = model.named_parameters(remove_duplicate=False)
    expected = {name: parameter.detach() for name, parameter in named}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.device == device
        assert value.dtype == torch.bfloat16
        assert value.shape == expected[name].shape
        if expected[name].std() == 0:  # biases and norms
            assert torch.equal(value.cpu(), expected[name].to(torch.bfloat16))
        else:
            assert float(value.float().std()) == pytest.approx(float(expected[name].std()), rel=0.05)


def test_matmuls_in_8_bits_are_the_emulated_ones() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs units for 8-bit floats")
    fp8 = pytest.importorskip("meshtune.quantised.fp8")
    found = []
    for emulate in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1024, 2048, device="cuda", dtype=torch.bfloat16))
        fp8.convert(model, ["0"], emulate=emulate)
        x = torch.randn(1000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = (model if emulate else torch.compile(model))(x)
        out.square().mean().backward()
        found.append([out, x.grad, model[0].weight.grad])
    for ours, emulated in zip(*found, strict=True):
        assert (ours - emulated).norm() < 0.02 * emulated.norm()
