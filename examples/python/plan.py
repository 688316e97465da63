"""Ask the planner from Python: `python examples/python/plan.py`. Needs no GPU and no data.

From the repository's root; a few seconds.
"""

# %%
from meshtune import plan

# %% A shape of the catalogue, a hub id or a local folder; any setting that `meshtune plan` takes.
settings = {
    "model": {"name": "quickstart/base"},
    "cluster": {"gpu": "h100-sxm"},
    "data": {"seq_len": 256},
    "train": {"global_batch_size": 64},
}
answer = plan(settings, gpus=8)

# %% Values with types: bytes and seconds.
for choice in answer.best(3):
    print(
        f"{choice.layout}: {choice.seconds.total * 1e3:.2f} ms a step, {choice.memory.peak / 2**30:.2f} GiB"
    )

# %% How many GPUs pay off?
for gpus, sized in plan(settings, gpus=[1, 2, 4, 8]).by_size.items():
    best = sized.choice(0)
    print(f"{gpus} GPUs: {best.layout}, {best.seconds.total * gpus * 1e3:.2f} GPU-milliseconds a step")
