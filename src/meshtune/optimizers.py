"""Optimizers by the name in `train.optimizer`: the state that each keeps, for memory and checkpoints.

The planner counts these states, checkpoints name them; the updates are in optim/. Torch-free.
"""

from dataclasses import dataclass
from typing import Literal

from meshtune.errors import Table
from meshtune.precision import DTYPE_BYTES, PRECISIONS

BUCKET_ELEMENTS = 64 * 2**20  # 256 MiB of fp32 gradients at a time
Shape = tuple[int, ...]


@dataclass(frozen=True)
class State:
    """One tensor of optimizer state for each trained parameter tensor, or for those of some shapes."""

    name: str  # in checkpoints: optimizer.<parameter>.<name>
    # Torch's name; None: that of the trained weights, for a row, a column and a vector at least float32.
    dtype: str | None = None
    # Its shape, from the parameter's: element (the same), scalar, row (without the last dimension), column
    # (without the last but one), vector (the same; none for a matrix). A matrix has 2 or more dimensions.
    kind: Literal["element", "scalar", "row", "column", "vector"] = "element"
    on_host: bool = False  # in host memory, so that reading it never waits for a device
    stochastic: bool = False  # in bf16 it is rounded up or down by chance, which keeps its mean

    def shape_for(self, parameter: Shape) -> Shape | None:
        """Shape of the state of a parameter of this shape; None: it has none."""
        matrix = len(parameter) >= 2
        shapes: dict[str, Shape | None] = {
            "element": parameter,
            "scalar": (),
            "row": parameter[:-1] if matrix else None,
            "column": (*parameter[:-2], *parameter[-1:]) if matrix else None,
            "vector": None if matrix else parameter,
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
    bucket_elements: int = BUCKET_ELEMENTS  # whose gradients are cast to the trained weights' dtype at a time
    by_element: bool = True  # False: an update reads the whole tensor, so that no rank may have a part of it
    rest: str | None = None  # row for all but the blocks' matrices (census.is_matrix); None: this one
    newton_schulz_steps: int = 0  # iterations that make the update of a matrix orthogonal; 0: no such matmuls

    @property
    def one_pass(self) -> bool:
        """Whether its kernel reads gradients as they are and, compiled, all else once (optim/one_pass.py)."""
        return not self.bucket_elements

    def bytes_per_parameter(self, trained: str) -> int:
        """Bytes of state per trained parameter; less than a value for a row or a column is not counted.

        trained: dtype of the trained weights.
        """
        return sum(DTYPE_BYTES[state.dtype or trained] for state in self.states if state.kind == "element")


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
            bucket_elements=0,
        ),
        "lion": Optimizer(
            (State("step", "float32", "scalar", on_host=True), State("exp_avg")),
            ("betas",),
            28,
            moved_in_16=239,
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
    return (*row.constants, *(OPTIMIZERS[row.rest].constants if row.rest else ()))


def that_may_fit(optimizer: str) -> list[str]:
    """Other rules that may fit where this one does not: those that keep less state per parameter, the one
    that keeps most first; then adamw, which every layout shards, where this one's updates need whole tensors.
    """
    kept = {name: row.bytes_per_parameter("float32") for name, row in OPTIMIZERS.items()}
    fewer = [name for name in kept if kept[name] < kept[optimizer] and name not in IN_16_BITS.values()]
    by_element = [] if OPTIMIZERS[optimizer].by_element else ["adamw"]
    return [*sorted(fewer, key=lambda name: -kept[name]), *by_element]
