"""Updates in one pass: AdamW with 16-bit moments and 16-bit weights that are rounded up or down by chance.

The references are torch.optim.AdamW and, for what each rank of a layout makes, the update of one rank.
"""

import hashlib
from typing import Any

import pytest
import torch
from families import FAMILIES
from ranks import run_ranks
from torch import Tensor, nn

from meshtune.layout import Layout
from meshtune.model.pieces import Piece
from meshtune.optim import one_pass
from meshtune.optim.optimizer import Optimizer
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
    "options", [{"compute_dtype": torch.bfloat16, "name": "adamw-bf16"}, {"name": "lion"}]
)
def test_a_compiled_update_is_the_plain_one(options: dict[str, Any]) -> None:
    """By inductor, for a processor. Several sizes: one graph serves all that are one row."""
    for shape in ((40, 24), (3, 70), (9, 5, 33), (7,)):
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


def updated(text: str, precision: str) -> dict[str, Piece | Tensor]:
    """This rank's pieces after two updates with gradients that are the same in every layout."""
    world = join(Layout.parse(text), torch.device("cpu"))
    spec = ModelSpec(source=FAMILIES["phi3"](num_hidden_layers=2), init="random", precision=precision)
    model = rank_model(spec, world, optimizer=OptimizerSpec(name="adamw-bf16", weight_decay=0.1))
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


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("text", ["zero3x2-mb1-ga1", "tp2-mb1-ga1", "pp2-1f1b-mb1-ga2"])
def test_the_same_gradients_give_the_same_bits_in_every_layout(text: str, precision: str) -> None:
    whole, seen = updated("mb1-ga1", precision), set()
    for pieces in run_ranks(2, updated, text, precision):
        for key, piece in pieces.items():
            seen.add(key)
            expected = whole[key]
            if not isinstance(piece, Piece):
                assert torch.equal(piece, expected)
                continue
            for block in piece.blocks():
                assert torch.equal(block.tensor, block.of(expected.tensor)), key
    assert seen == whole.keys()
