"""The work of plain decoders from shape numbers, as published tables give them, and with adapters."""

from dataclasses import replace

from meshtune.plan.work import Core, Gemm, Weight, Work
from meshtune.units import Number


def of_shape(
    *, layers: Number, hidden: Number, ffn: Number, heads: Number, kv_heads: Number,
    vocabulary: Number, gated: Number = 1.0, tied: Number = 0.0, head_dim: Number | None = None,
) -> Work:  # fmt: skip
    """The work of a plain decoder from shape numbers, as published tables give them; all is trained.

    ffn: features inside the MLP. gated: 1 for SwiGLU (three matrices), 0 for two. tied: 1 or 0. head_dim:
    features of a head; None: hidden / heads. Norms and biases are counted as 4·hidden a block.
    """
    head_dim = hidden / heads if head_dim is None else head_dim
    wide = (1 + gated) * ffn
    matrices = (
        Gemm((heads + 2 * kv_heads) * head_dim, hidden, 1.0, "rows"),
        Gemm(hidden, heads * head_dim, 1.0, "cols"),
        Gemm(ffn, hidden, 1 + gated, "rows"),
        Gemm(hidden, ffn, 1.0, "cols"),
    )
    weights = tuple(Weight(m.rows, m.cols, m.count, m.cut, matrix=True) for m in matrices)
    return Work(
        blocks=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        wide=wide,
        matrices=matrices,
        cores=(Core(heads, kv_heads, head_dim, head_dim),),
        block_weights=(*weights, Weight(hidden, 1, 4.0)),
        first_weights=(Weight(vocabulary, hidden, 1.0, "rows"),),
        last_weights=(Weight(vocabulary, hidden, 1.0 - tied, "rows"),),
        tied=tied,
    )


def adapted(work: Work, lora_rank: int, adapters: Number = 1.0) -> Work:
    """The same frozen, with LoRA adapters of rank `lora_rank` on every matrix of the blocks.

    adapters: 0 where the model stays as it is. `traced` is empty: what adapters save was not traced.
    """
    whole = 1.0 - adapters
    pairs = tuple(
        replace(each, count=each.count * adapters) for m in work.matrices for each in _adapters(m, lora_rank)
    )
    added = tuple(Weight(a.rows, a.cols, a.count, a.cut, matrix=True) for a in pairs)
    in_blocks, first, last = (
        tuple(replace(w, trainable=w.trainable * whole) for w in weights)
        for weights in (work.block_weights, work.first_weights, work.last_weights)
    )
    found = replace(
        work,
        matrices=(*(replace(m, trainable=m.trainable * whole) for m in work.matrices), *pairs),
        block_weights=(*in_blocks, *added), first_weights=first, last_weights=last,
        head_trainable=work.head_trainable * whole, traced={},
    )  # fmt: skip
    return replace(found, trainable=found.trained_parameters / found.parameters)


def _adapters(matrix: Gemm, lora_rank: int) -> tuple[Gemm, Gemm]:
    """LoRA's A [rank, inputs of the matrix] and B [outputs, rank], both trained.

    tp cuts the columns of A, or the rows of B, if it cuts those of the matrix; the other is whole.
    """
    a = Gemm(lora_rank, matrix.cols, matrix.count, "cols" if matrix.cut == "cols" else "", adapter="A")
    b_cut = "rows" if matrix.cut == "rows" else ""
    return a, Gemm(matrix.rows, lora_rank, matrix.count, b_cut, adapter="B")
