"""Precisions by the name in `train.precision`: the dtype of each tensor, and the peak rate of matmuls.

    precision   compute    trained    gradients, and their sum
    fp32, fp64  float32…   float32…   as they are
    bf16        bfloat16   float32    bfloat16, summed in train.reduce_dtype
    bf16-pure   bfloat16   bfloat16   bfloat16, summed in train.reduce_dtype
    fp8         as bf16, with matmuls of the blocks' linear layers in 8-bit floats (`takes_fp8`)
    fp8-rowwise as fp8, with a scale for each row of an operand instead of one for all of it

Dtypes have torch's names, and torch is not imported: who has it writes `getattr(torch, name)`.
"""

from dataclasses import dataclass

from meshtune.errors import Table

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}
SCALE_BLOCK = 64  # neighbours of a row with one scale, in 4 bits and of moments in 8
NF4_SCALES = 256  # scales with one constant
NF4_BYTES = 0.5 + 1 / SCALE_BLOCK + 4 / SCALE_BLOCK / NF4_SCALES  # of a weight in 4 bits (quantised/nf4.py)
NF4_ERROR = 0.092  # norm of what its rounding changes, over that of normally distributed weights
FP8_ERROR = 0.026  # the same of e4m3
FP8_MULTIPLE = 16  # of both dimensions of a matrix: what matmuls in 8-bit floats take
FP8_LEAST = 1024  # below, casting its operands takes longer than multiplying in 8 bits saves
REDUCE_DTYPES = Table("train.reduce_dtype", {"fp32": "float32", "bf16": "bfloat16"})


@dataclass(frozen=True)
class Precision:
    """Dtypes of one precision, by torch's names."""

    compute: str  # of weights and activations in forward and backward
    trained: str  # of the weights that the optimizer updates: masters, where it differs from `compute`
    gradient: str  # that a backward writes
    rate: str  # the field of plan.hardware.Gpu that has the peak FLOP/s of its matmuls
    rate_share: float = 1.0  # of that rate, assumed, where data sheets have none for this precision
    fp8: str = ""  # torchao's recipe of scales, where the blocks' linear layers multiply in 8-bit floats
    offered: bool = True  # the planner offers it instead of one that is above it in PRECISIONS

    def summed(self, reduce_dtype: str) -> str:
        """Dtype in which gradients of micro-batches and ranks add up: never narrower than a gradient.

        reduce_dtype: the setting of that name.
        """
        return max(self.gradient, REDUCE_DTYPES[reduce_dtype], key=DTYPE_BYTES.__getitem__)


# From wide to narrow, each with less memory than the one before; then those that are never offered.
PRECISIONS = Table(
    "train.precision",
    {
        "fp32": Precision("float32", "float32", "float32", rate="fp32"),
        "bf16": Precision("bfloat16", "float32", "bfloat16", rate="bf16"),
        "bf16-pure": Precision(
            "bfloat16",
            "bfloat16",
            "bfloat16",
            rate="bf16",
        ),
        "fp8": Precision("bfloat16", "float32", "bfloat16", rate="fp8", fp8="tensorwise", offered=False),
        "fp8-rowwise": Precision("bfloat16", "float32", "bfloat16", rate="fp8", fp8="rowwise", offered=False),
        "fp64": Precision("float64", "float64", "float64", rate="fp32", rate_share=0.5, offered=False),
    },
)
# The precision that holds weights in the dtype it computes in, by that dtype.
UNMIXED = {row.compute: name for name, row in PRECISIONS.items() if row.compute == row.trained}


def takes_fp8(rows: int, columns: int) -> bool:
    """True if a linear layer with a weight of this shape multiplies in 8-bit floats under fp8."""
    return min(rows, columns) >= FP8_LEAST and rows % FP8_MULTIPLE == columns % FP8_MULTIPLE == 0


def narrower(name: str) -> list[str]:
    """Precisions to offer instead of `name` for less memory, the widest first."""
    names = list(PRECISIONS)
    return [other for other in names[names.index(name) + 1 :] if PRECISIONS[other].offered]
