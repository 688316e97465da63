"""How long the planner takes to search a cluster: `python benchmarks/plan_search.py [GPUS]`, medians of five.

The model's numbers are those of plan/models.toml, so that nothing is read or built first.
"""

import statistics
import sys
import time

from meshtune import config
from meshtune.api.plan import known_workload
from meshtune.plan.cluster import cluster_of
from meshtune.plan.search import search
from meshtune.sections import ClusterConfig

ROUNDS = 5


def main() -> None:
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=int((sys.argv[1:] or ["512"])[0])))
    for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"):
        settings = ["model.name=x", "data.seq_len=8192", f"train.global_batch_size={cluster.gpus}"]
        workload = known_workload(config.load(None, settings), name)
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            plan = search(workload, cluster)
            seconds.append(time.perf_counter() - start)
        print(f"{name}: {plan.considered:,} layouts, {len(plan):,} fit, {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
