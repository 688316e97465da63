"""Optimizers by the name in `train.optimizer`: the state that each keeps, for memory and checkpoints.

The planner counts these states, checkpoints name them; the updates are in optim/. Torch-free.
"""

from dataclasses import dataclass
from typing import Literal

from meshtune.errors import Table
from meshtune.precision import DTYPE_BYTES, PRECISIONS, SCALE_BLOCK

BUCKET_ELEMENTS = 64 * 2**20  # 256 MiB of fp32 gradients at a time
SLICES, SMALLEST_SLICE = 256, 2**16  # of a rank's elements, each updated at a time where nothing is compiled
Shape = tuple[int, ...]


@dataclass(frozen=True)
class State:
    """One tensor of optimizer state for each trained parameter tensor, or for those of some shapes."""

    name: str  # in checkpoints: optimizer.<parameter>.<name>
    # Torch's name; None: that of the trained weights, for a row, a column and a vector at least float32.
    dtype: str | None = None
    # Its shape, from the parameter's: element (the same), scalar, row (without the last dimension), column
    # (without the last but one), vector (the same; none for a matrix), block (the largest size among
    # SCALE_BLOCK neighbours of a row). A matrix has 2 or more dimensions.
    kind: Literal["element", "scalar", "row", "column", "vector", "block"] = "element"
    on_host: bool = False  # in host memory, so that reading it never waits for a device
    stochastic: bool = False  # in fewer bits than 32 it is rounded up or down by chance, which keeps its mean

    def shape_for(self, parameter: Shape) -> Shape | None:
        """Shape of the state of a parameter of this shape; None: it has none."""
        matrix = len(parameter) >= 2
        shapes: dict[str, Shape | None] = {
            "element": parameter,
            "scalar": (),
            "row": parameter[:-1] if matrix else None,
            "column": (*parameter[:-2], *parameter[-1:]) if matrix else None,
            "vector": None if matrix else parameter,
            "block": (*parameter[:-1], parameter[-1] // SCALE_BLOCK) if matrix else None,
        }
        return shapes[self.kind]


@dataclass(frozen=True)
class Optimizer:
    """State of an optimizer between steps, and its working memory during one."""

    states: tuple[State, ...]
    constants: tuple[str, ...]  # of betas and eps, that it takes (train.adam_betas, train.adam_eps)
    # Tensors as large as the parameter, of the trained weights' dtype, that the kernels of an update read and
    # write where nothing is compiled, as `meshtune dryrun` counts them.
    moved: int
    moved_in_16: int | None = None  # the same of weights trained in 16 bits; None: `moved`
    # Bytes that an update in one pass makes for each element of a slice where nothing is compiled.
    slice_bytes: int = 0
    slice_bytes_in_16: int | None = None  # the same of weights trained in 16 bits; None: `slice_bytes`
    bucket_elements: int = BUCKET_ELEMENTS  # whose gradients are cast to the trained weights' dtype at a time
    by_element: bool = True  # False: an update reads the whole tensor, so that no rank may have a part of it
    # Row for all but the blocks' matrices (census.is_matrix), or where SCALE_BLOCK neighbours share a scale
    # for all that is not made of such; None: this one
    rest: str | None = None
    newton_schulz_steps: int = 0  # iterations that make the update of a matrix orthogonal; 0: no such matmuls

    @property
    def one_pass(self) -> bool:
        """Whether its kernel reads gradients as they are and, compiled, all else once (optim/one_pass.py)."""
        return not self.bucket_elements

    @property
    def in_blocks(self) -> bool:
        """Whether SCALE_BLOCK neighbours of a row share a scale, so that no rank may have a part of them."""
        return any(state.kind == "block" for state in self.states)

    @property
    def but_matrices(self) -> str | None:
        """Row for all but the blocks' matrices; None: that does not decide. Small tensors are not counted."""
        return None if self.in_blocks else self.rest

    def takes(self, shape: Shape, *, in_blocks_of_model: bool) -> bool:
        """Whether it updates parameters of a shape itself, and not its `rest`.

        in_blocks_of_model: the parameter is a matrix (census.is_matrix) of one of the model's blocks.
        """
        if self.in_blocks:
            return len(shape) >= 2 and shape[-1] % SCALE_BLOCK == 0
        return self.rest is None or in_blocks_of_model

    def bytes_per_parameter(self, trained: str) -> float:
        """Bytes of state per trained parameter; less than a value for a row or a column is not counted.

        trained: dtype of the trained weights.
        """
        share = {"element": 1.0, "block": 1 / SCALE_BLOCK}
        return sum(DTYPE_BYTES[s.dtype or trained] * share.get(s.kind, 0.0) for s in self.states)


OPTIMIZERS = Table(
    "train.optimizer",
    {
        "adamw": Optimizer(
            (State("step", "float32", "scalar"), State("exp_avg"), State("exp_avg_sq")), ("betas", "eps"), 8
        ),
        "adamw-bf16": Optimizer(
            (
                State("step", "float32", "scalar", on_host=True),
                State("exp_avg", "bfloat16"),
                State("exp_avg_sq", "bfloat16", stochastic=True),
            ),
            ("betas", "eps"),
            131,
            moved_in_16=318,
            slice_bytes=57,
            bucket_elements=0,
        ),
        "adamw-8bit": Optimizer(
            (
                State("step", "float32", "scalar", on_host=True),
                State("exp_avg", "int8"),
                State("exp_avg_sq", "uint8", stochastic=True),
                State("exp_avg_scale", "float32", "block"),
                State("exp_avg_sq_scale", "float32", "block"),
            ),
            ("betas", "eps"),
            223,
            moved_in_16=502,
            slice_bytes=80,
            bucket_elements=0,
            rest="adamw",
        ),
        "lion": Optimizer(
            (State("step", "float32", "scalar", on_host=True), State("exp_avg")),
            ("betas",),
            28,
            moved_in_16=239,
            slice_bytes=24,
            slice_bytes_in_16=49,
            bucket_elements=0,
        ),
        "adafactor": Optimizer(
            (
                State("step", "float32", "scalar", on_host=True),
                State("exp_avg_sq_row", kind="row"),
                State("exp_avg_sq_col", kind="column"),
                State("exp_avg_sq", kind="vector"),
            ),
            (),
            23,
            by_element=False,
        ),
        "muon": Optimizer(
            (State("momentum_buffer"),), (), 29, by_element=False, rest="adamw", newton_schulz_steps=5
        ),
    },
)


# The row with the same rule and states in 16 bits.
IN_16_BITS = {"adamw": "adamw-bf16"}


def updated_by(optimizer: str, trained: str) -> str:
    """Row that updates parameters whose trained dtype is `trained`: where it is bf16, AdamW's states are too,
    and adamw-bf16 keeps what rounding to nearest would lose.
    """
    return IN_16_BITS.get(optimizer, optimizer) if trained == "bfloat16" else optimizer


def checkpoint_bytes(trained: float, precision: str, optimizer: str) -> float:
    """Bytes in a checkpoint of `trained` parameters and their optimizer state, without its files' headers."""
    dtype = PRECISIONS[precision].trained
    return trained * (DTYPE_BYTES[dtype] + OPTIMIZERS[optimizer].bytes_per_parameter(dtype))


def caution(precision: str, optimizer: str) -> str:
    """Sentence for who trains weights in 16 bits with an update that rounds them to nearest; "" for others.

    The arguments are the settings train.precision and train.optimizer.
    """
    row = OPTIMIZERS[updated_by(optimizer, PRECISIONS[precision].trained)]
    if row.one_pass or PRECISIONS[precision].trained != "bfloat16":
        return ""
    return (
        f"train.precision={precision} with train.optimizer={optimizer} rounds weights to the nearest 16-bit "
        "value after each update, and most updates of a fine-tuning are too small for it. adamw and lion "
        "round up or down by chance, so that small updates add up."
    )


def constants_of(optimizer: str) -> tuple[str, ...]:
    """Names of the constants, of betas and eps, that a row and its `rest` take."""
    row = OPTIMIZERS[optimizer]
    return tuple(dict.fromkeys((*row.constants, *(OPTIMIZERS[row.rest].constants if row.rest else ()))))


def that_may_fit(optimizer: str) -> list[str]:
    """Others that may fit where this one does not: those that keep less state per parameter, the same rule
    first and then the one that keeps most; then adamw, which every layout shards, where this one's updates
    need whole tensors.
    """
    kept = {name: row.bytes_per_parameter("float32") for name, row in OPTIMIZERS.items()}
    fewer = [name for name in kept if kept[name] < kept[optimizer] and name not in IN_16_BITS.values()]
    by_element = [] if OPTIMIZERS[optimizer].by_element else ["adamw"]
    alike = {name: OPTIMIZERS[name].constants == OPTIMIZERS[optimizer].constants for name in fewer}
    return [*sorted(fewer, key=lambda name: (not alike[name], -kept[name])), *by_element]
