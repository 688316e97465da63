"""Updates in one pass: AdamW with moments in 16 or 8 bits, and 16-bit weights that are rounded by chance.

The references are torch.optim.AdamW, bitsandbytes in 8 bits and, for what each rank of a layout makes, the
update of one rank.
"""

import hashlib
from typing import Any

import bitsandbytes
import pytest
import torch
from families import FAMILIES
from ranks import run_ranks
from torch import Tensor, nn

from meshtune.layout import Layout
from meshtune.model.pieces import Piece
from meshtune.optim import one_pass
from meshtune.optim.optimizer import Optimizer
from meshtune.optimizers import OPTIMIZERS
from meshtune.parallel.mesh import join
from meshtune.parallel.zero import local
from meshtune.train.model import ModelSpec, OptimizerSpec, rank_model

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def drawn(shape: tuple[int, ...], *seed: object) -> Tensor:
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=7).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))


def stepped(weight: Tensor, gradients: list[Tensor], rate: float, **options: Any) -> dict[str, Tensor]:
    """State of the optimizer after an update of a weight by each of the gradients."""
    parameter = nn.Parameter(weight.clone())
    optimizer = Optimizer([("weight", parameter)], **SETTINGS | options)
    for gradient in gradients:
        optimizer.sums[parameter] = gradient
        optimizer.clip(2.0, 1.0)
        optimizer.step(rate)
    return optimizer.state() | {"computed": parameter.detach()}


def torchs(weight: Tensor, gradients: list[Tensor], rate: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight, and the moments of torch.optim.AdamW, after the same updates."""
    parameter = nn.Parameter(weight.double())
    adamw = torch.optim.AdamW([parameter], lr=rate, **SETTINGS)
    for gradient in gradients:
        parameter.grad = gradient.double() / (2.0 + 1e-6)
        adamw.step()
    return parameter.detach(), adamw.state[parameter]


def test_an_update_is_torchs_but_for_the_rounding_of_moments() -> None:
    given = drawn((32, 24), "w"), [drawn((32, 24), step) for step in range(20)], 1e-2
    state, (theirs, moments) = stepped(*given, name="adamw-bf16"), torchs(*given)
    way = theirs - given[0]
    assert ((state["model.weight"] - theirs).norm() / way.norm()) < 0.005
    for name in ("exp_avg", "exp_avg_sq"):
        ours = state[f"optimizer.weight.{name}"]
        assert ours.dtype == torch.bfloat16
        assert ((ours - moments[name]).norm() / moments[name].norm()) < 0.01


@pytest.mark.parametrize(("decades", "most", "of_theirs"), [(0, 0.03, 1.3), (4, 0.1, 0.3)])
def test_moments_in_8_bits_are_as_good_as_bitsandbytes(decades: int, most: float, of_theirs: float) -> None:
    """decades: between the sizes of neighbours' gradients. bitsandbytes has blocks of 256 and its own map."""
    shape = (64, 256)
    sizes = 10 ** (-decades * torch.rand(shape, generator=torch.Generator().manual_seed(0)))
    weight, gradients = drawn(shape, "w"), [sizes * drawn(shape, step) for step in range(50)]
    state, (exact, _) = stepped(weight, gradients, 1e-2, name="adamw-8bit"), torchs(weight, gradients, 1e-2)
    other = nn.Parameter(weight.clone())
    theirs = bitsandbytes.optim.AdamW8bit([other], lr=1e-2, min_8bit_size=0, **SETTINGS)
    for gradient in gradients:
        other.grad = gradient / (2.0 + 1e-6)
        theirs.step()
    errors = [float((each.detach() - exact).norm()) for each in (state["computed"], other)]
    assert errors[0] < min(most * float((exact - weight).norm()), of_theirs * errors[1])
    held = {key.rpartition(".")[2]: tensor.nbytes / weight.numel() for key, tensor in state.items()}
    assert [held[f"exp_avg{part}"] for part in ("", "_sq", "_scale", "_sq_scale")] == [1, 1, 1 / 16, 1 / 16]


def test_a_second_moment_in_8_bits_follows_gradients_that_shrink() -> None:
    """A step of a code is 3 % of a value, and a step of the run a tenth of that."""
    given = drawn((64, 64), "w"), [drawn((64, 64), step) * 0.995**step for step in range(600)], 1e-4
    state, (_, moments) = stepped(*given, name="adamw-8bit"), torchs(*given)
    key = "optimizer.weight.exp_avg_sq"
    scales = state[f"{key}_scale"][..., None]
    ours = one_pass._values(state[key].unflatten(-1, (-1, 64)), scales, torch.float64)
    assert float((ours.flatten(-2) / moments["exp_avg_sq"]).mean()) == pytest.approx(1, abs=0.01)


def test_what_is_not_made_of_blocks_has_moments_in_32_bits() -> None:
    """Rows of 96 values would share a block; a vector of 128 has no rows, which ranks hold whole."""
    sizes = {"matrix": (3, 128), "odd": (4, 96), "norm": (128,)}
    named = [(name, nn.Parameter(drawn(shape, name))) for name, shape in sizes.items()]
    optimizer = Optimizer(named, **SETTINGS, name="adamw-8bit")
    assert {bucket.row: bucket.names for bucket in optimizer.buckets} == {
        "adamw-8bit": ["matrix"], "adamw": ["odd", "norm"],
    }  # fmt: skip


@pytest.mark.parametrize("by_chance", [True, False])
def test_the_second_moment_follows_gradients_that_shrink(
    by_chance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To nearest, a thousandth less is as much as before: the moment stays where it was."""
    if not by_chance:
        monkeypatch.setattr(one_pass, "_rounded", lambda values, bits: values.bfloat16())
    given = drawn((4096,), "w"), [drawn((4096,), step) * 0.995**step for step in range(600)], 1e-4
    state, (_, moments) = stepped(*given, name="adamw-bf16"), torchs(*given)
    ratio = (state["optimizer.weight.exp_avg_sq"].double() / moments["exp_avg_sq"]).mean().item()
    assert (abs(ratio - 1) < 0.01) == by_chance


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_16_bit_weights_move_as_far_as_exact_ones_on_average(name: str) -> None:
    """An update of 1e-5 is a hundredth of what the last bit of most of these weights is worth."""
    weight = (0.02 * drawn((2**16,), "w")).bfloat16()
    gradients = [torch.ones(2**16) + drawn((2**16,), step) for step in range(100)]
    ours = stepped(weight, gradients, 1e-5, name=name, weight_decay=0.0)["model.weight"]
    exact = stepped(weight.double(), gradients, 1e-5, name=name, weight_decay=0.0)["model.weight"]
    assert ours.dtype == torch.bfloat16
    way = exact - weight.double()
    share = ((ours.double() - weight.double()) * way).sum() / (way * way).sum()
    assert float(share.detach()) == pytest.approx(1, abs=0.03)


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [{"compute_dtype": torch.bfloat16, "name": "adamw-bf16"}, {"name": "lion"}, {"name": "adamw-8bit"}],
)
def test_a_compiled_update_is_the_plain_one(options: dict[str, Any]) -> None:
    """By inductor, for a processor. Several sizes: one graph serves all that are one row."""
    in_blocks = OPTIMIZERS[options["name"]].in_blocks
    for shape in ((40, 64), (3, 192), (9, 5, 128)) if in_blocks else ((40, 24), (3, 70), (9, 5, 33), (7,)):
        given = drawn(shape, "w"), [drawn(shape, step) for step in range(3)], 1e-2
        plain, compiled = (stepped(*given, compiled=each, **options) for each in (False, True))
        for key, tensor in plain.items():
            torch.testing.assert_close(compiled[key], tensor, rtol=1e-6, atol=1e-7)


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 3.4e38])
    values = torch.cat([values, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    low, high = (one_pass._rounded(values, torch.full((6,), bits)) for bits in (0, 2**16 - 1))
    for rounded in (low, high):
        assert rounded.isnan().tolist() == [False, False, True, False, False, True]
        assert rounded[:2].tolist() == [float("inf"), -float("inf")] and rounded[3] == 0
    assert low[4] < high[4] == float("inf")


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "rows"),
    [
        ((6, 10), (2, 0), (3, 10), ()),
        ((6, 10), (0, 5), (6, 5), ()),
        ((6, 10), (1, 0), (4, 10), (range(1, 3), range(4, 6))),
        ((6, 10), (1, 5), (4, 5), (range(1, 3), range(4, 6))),
        ((4, 6, 10), (1, 2, 0), (2, 3, 10), ()),
        ((4, 6, 10), (0, 0, 3), (4, 6, 4), ()),
        ((7,), (2,), (3,), ()),
        ((7,), (1,), (4,), (range(1, 3), range(5, 7))),
        ((), (), (), ()),
    ],
)
def test_a_piece_is_updated_as_in_the_whole(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], rows: tuple[range, ...]
) -> None:
    def cut(whole: Tensor) -> Tensor:
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            if dim == 0 and rows:
                whole = torch.cat([whole[run.start : run.stop] for run in rows])
            else:
                whole = whole.narrow(dim, start, size)
        return whole.clone()

    weight, gradients = drawn(shape, "w").bfloat16(), [drawn(shape, step) for step in range(3)]

    def piece(name: str, parameter: nn.Parameter, tensor: Tensor) -> tuple[str, Piece]:
        return name, Piece(shape, offsets, tensor, rows)

    part = stepped(
        cut(weight), [cut(gradient) for gradient in gradients], 1e-2, piece=piece, weight_decay=0.0
    )
    whole = stepped(weight, gradients, 1e-2, weight_decay=0.0)
    for key, tensor in part.items():
        assert torch.equal(tensor, whole[key] if "step" in key else cut(whole[key])), key
    other = stepped(weight, gradients, 1e-2, weight_decay=0.0, seed=1)
    assert shape == () or not torch.equal(other["model.weight"], whole["model.weight"])


def updated(text: str, precision: str, name: str = "adamw-bf16") -> dict[str, Piece | Tensor]:
    """This rank's pieces after two updates with gradients that are the same in every layout."""
    world = join(Layout.parse(text), torch.device("cpu"))
    # Columns that tp cuts into blocks of 64.
    source = FAMILIES["phi3"](num_hidden_layers=2, hidden_size=128, intermediate_size=256)
    spec = ModelSpec(source=source, init="random", precision=precision)
    model = rank_model(spec, world, optimizer=OptimizerSpec(name=name, weight_decay=0.1))
    for step in range(2):
        for name, parameter in model.optimizer.named_parameters():
            gradient = torch.empty_like(local(parameter), dtype=torch.float32)
            piece = model.parallel.piece(name, parameter, gradient)
            whole = drawn(piece.shape, name, step)
            for block in piece.blocks():
                block.tensor.copy_(block.of(whole))
            model.optimizer.replace_gradient(parameter, piece.tensor)
        model.optimizer.clip(2.0, 1.0)
        model.optimizer.step(1e-3)
    return model.pieces({key: tensor.detach() for key, tensor in model.optimizer.state().items()})


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bf16", "adamw-bf16"),
        ("bf16-pure", "adamw-bf16"),
        ("bf16", "adamw-8bit"),
        ("bf16-pure", "adamw-8bit"),
    ],
)
@pytest.mark.parametrize("text", ["zero3x2-mb1-ga1", "tp2-mb1-ga1", "pp2-1f1b-mb1-ga2"])
def test_the_same_gradients_give_the_same_bits_in_every_layout(
    text: str, precision: str, optimizer: str
) -> None:
    whole, seen = updated("mb1-ga1", precision, optimizer), set()
    for pieces in run_ranks(2, updated, text, precision, optimizer):
        for key, piece in pieces.items():
            seen.add(key)
            expected = whole[key]
            if not isinstance(piece, Piece):
                assert torch.equal(piece, expected)
                continue
            for block in piece.blocks():
                assert torch.equal(block.tensor, block.of(expected.tensor)), key
    assert seen == whole.keys()
