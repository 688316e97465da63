"""Train on rows that a program holds, on two ranks, then ask the model: `python examples/python/rows.py`.

From the repository's root, with the included base model; half a minute on 2 CPU cores. The cells (# %%) run
in Jupyter and VS Code too.
"""

# %%
from meshtune import Layout, generate, train

# %% Rows in any form of docs/data.md: a list of dicts, or a datasets.Dataset.
words = ["river", "winter", "basket", "lantern", "meadow", "copper", "garden", "thunder"]
rows = [{"prompt": f"How many letters has {word}?", "completion": str(len(word))} for word in words]

# %% Settings as in a config file: a mapping, a meshtune.Config, or the file's name.
settings = {
    "model": {"name": "quickstart/base"},
    "data": {"seq_len": 64},
    "train": {"global_batch_size": 4, "max_steps": 20, "learning_rate": 3e-4, "precision": "fp32"},
    "output": "runs/python-rows",
    "output_exists": "replace",
}

# %% Two ranks are started, train and end. A script needs the guard where ranks are spawned: on CUDA.
if __name__ == "__main__":
    layout = Layout(dp_shard=2, zero=3, micro_batch_size=2)
    result = train(settings, train_data=rows, eval_data=rows[:2], layout=layout)
    print(f"{result.summary.status} after {result.summary.steps} steps: loss {result.summary.last_loss:.3f}")
    print(f"the model is in {result.model}, every row in {result.folder / 'metrics.jsonl'}")

    # %%
    for answer in generate(result.model, ["How many letters has river?", "How many letters has island?"]):
        print(answer)
