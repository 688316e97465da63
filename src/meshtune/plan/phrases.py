"""Phrases that several sentences and tables of the planner share, on memory and on the time of a step."""

from __future__ import annotations

from meshtune.layout import RECOMPUTATIONS, Layout
from meshtune.plan.cluster import Cluster
from meshtune.plan.memory.timeline import CATEGORIES, CATEGORY_NAMES, Memory
from meshtune.plan.seconds.step import TIE
from meshtune.plan.workload import Workload
from meshtune.units import counted, human

# each part of Seconds but `data`, as what a step's time goes to
SPENT = {
    "compute": "matmuls, attention and elementwise operations",
    "tensor": "exposed tensor-parallel collectives",
    "context": "exposed context-parallel collectives",
    "experts": "exchanges of tokens between ranks with experts",
    "pipeline": "sends between pipeline stages",
    "optimizer": "the optimizer's update",
    "bubble": "the pipeline bubble",
    "imbalance": "waiting for the slowest pipeline stage",
    "host": "kernel launches and other work of the host",
}
# collectives of `Seconds.data`, by ZeRO stage; {}: " and", or "," where replicas add an all-reduce
DATA_COLLECTIVES = {
    0: "gradient all-reduce",
    1: "ZeRO-1 reduce-scatter{} all-gather",
    2: "ZeRO-2 reduce-scatter{} all-gather",
    3: "ZeRO-3 all-gather{} reduce-scatter",
}


def documents(workload: Workload) -> str:
    """A sentence on the documents of packed sequences; "" where each fills a sequence."""
    given = workload.mean_document_tokens
    if given and given > workload.seq_len:
        return (
            f"data.mean_document_tokens = {given:.0f} is longer than a sequence; {workload.seq_len} is used."
        )
    if workload.document_tokens:
        return f"Attention is within documents of {workload.document_tokens:.0f} tokens (mean over tokens)."
    return ""


def of_objective(objective: str) -> str:
    """A clause on what is learned, for headings; "" for sft."""
    return "" if objective == "sft" else f", objective={objective}"


def predicted_with(label_share: float | None) -> str:
    """A clause on the tokens with labels, which are all that have logits.

    label_share: of the positions that are planned; of all data, of a dry run with packing its batch's.
    """
    if label_share is None:
        return "Predicted with labels on all tokens (fewer need less memory)"
    return f"Predicted with labels on {label_share:.0%} of the positions in sequences"


def sequences(number: int) -> str:
    """A number of sequences as settings write it, without grouped digits: "1024 sequences"."""
    return f"{number} sequence{'s' * (number > 1)}"


def indivisible(size: int, data_ranks: int) -> str:
    """A sentence for a global batch that `data_ranks` does not divide, with the nearest ones that it does."""
    below = size // data_ranks * data_ranks
    near = [other for other in (below, below + data_ranks) if other]
    return (
        f"{sequences(size)} can't be divided by {data_ranks} data ranks; {' or '.join(map(str, near))} can."
    )


def largest_category(memory: Memory) -> str:
    """The category, one of CATEGORIES, with most bytes."""
    return max(CATEGORIES, key=lambda category: getattr(memory, category))


def memory_need(memory: Memory, cluster: Cluster) -> str:
    """The peak of a layout and its largest category: "140.97 GiB, 89.75 GiB of it optimizer state". Where the
    peak reads as what a plan may use, by how much it is larger.
    """
    largest, limit = largest_category(memory), cluster.usable_memory
    close = human(memory.peak) == human(limit)
    over = f" ({human(memory.peak - limit)} too much)" * close
    return f"{human(memory.peak)}{over}, {human(getattr(memory, largest))} of it {CATEGORY_NAMES[largest]}"


def device(cluster: Cluster) -> str:
    """The owner of `cluster.memory`: a GPU, or a rank where processors share one memory."""
    return "rank" if cluster.gpu.processor else "GPU"


def memory_limit(cluster: Cluster) -> str:
    """A clause that says how much of each GPU's memory a plan may use."""
    usable, memory = human(cluster.usable_memory), human(cluster.memory)
    return f"the planner fills at most {usable} of a {device(cluster)}'s {memory}"


def memory_margin(cluster: Cluster) -> str:
    """A clause on the memory that a plan fills or leaves free, with the setting and why it is that much."""
    budget = cluster.memory_budget
    if budget is not None and budget <= cluster.usable_memory:
        return f"a plan fills {human(budget)} of it at most (cluster.memory_budget_gib)"
    clause = f"a plan leaves {cluster.margin:.0%} of it free (cluster.memory_margin"
    if cluster.memory_margin is None:
        clause += f", the default with{'' if cluster.gpu.measured else 'out'} a measured matmul rate"
    if budget is not None:
        clause += f"; the budget of {human(budget)} is more than that"
    return f"{clause})"


def unmeasured(cluster: Cluster) -> str:
    """Sentences if the predicted time uses efficiencies measured on another kind of GPU, or with other
    numbers of ranks at work than the cluster's machines have; else "".
    """
    gpu, ranks, sentences = cluster.gpu, cluster.ranks_in_node, []
    if not cluster.timed:
        sentences.append(
            f"Times are not those of this machine: no measured efficiencies for {gpu.name}; using those of "
            f"{gpu.as_of}. `meshtune probe` measures it."
        )
    elif gpu.as_of and gpu.as_of != gpu.name:
        others = "efficiencies other than that of matmuls" if gpu.measured else "efficiencies"
        others = ", ".join(gpu.borrowed) if gpu.shared else others
        sentences.append(f"No measured {others} for {gpu.name}; using those of {gpu.as_of}.")
    if lacking := gpu.lacking_among(ranks):
        sentences.append(
            f"No measured {', '.join(lacking)} with {counted(ranks, 'rank')} at work on {gpu.name}; what is "
            "used follows from other numbers of ranks."
        )
    return " ".join(sentences)


def longer(ratio: float) -> str:
    """A step's time against another one's, as a share of it: "takes 4% longer" for a ratio of 1.04."""
    if abs(ratio - 1) < TIE:
        return "takes as long"
    share = abs(ratio - 1)
    return f"takes {share:.{int(share < 0.02)}%} {'longer' if ratio > 1 else 'less time'}"


def spent(part: str, layout: Layout) -> str:
    """Name what a layout's step spends a part of `Seconds` on. part: one of PARTS."""
    if part != "data":
        copies = part == "host" and RECOMPUTATIONS[layout.recompute].host
        return "copies to host memory and back, and " * copies + SPENT[part]
    replicated = layout.zero > 0 and layout.dp_replicate > 1
    collectives = DATA_COLLECTIVES[layout.zero].format("," if replicated else " and")
    return f"exposed {collectives}{' and all-reduce between replicas' * replicated}"
