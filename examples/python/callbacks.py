"""Watch a run, and stop it: `python examples/python/callbacks.py`.

From the repository's root; 20 seconds on 2 CPU cores.
"""

# %%
from typing import Any

from meshtune import Callback, Training, train


# %% Four moments; each gets the row that metrics.jsonl gets. They run on the main rank.
class StopWhenGood(Callback):
    """Stops the run, on all ranks at the same step, once the training loss is low enough."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def on_start(self, training: Training, row: dict[str, Any]) -> None:
        print(f"{row['model']} for {training.steps} steps, as {row['layout']}")

    def on_step(self, training: Training, row: dict[str, Any]) -> None:
        if row["loss"] < self.loss:
            training.stop(f"the loss {row['loss']:.3f} is below {self.loss}")

    def on_eval(self, training: Training, row: dict[str, Any]) -> None:
        print(f"held-out loss {row['loss']:.3f} after step {row['step']}")

    def on_end(self, training: Training, row: dict[str, Any]) -> None:
        print(f"{row['status']} after step {row['step']}")


# %%
if __name__ == "__main__":
    short = ["train.max_steps=40", "eval.every=10", "eval.exact_match=0", "eval.samples=2"]
    folder = ["output=runs/python-callbacks", "output_exists=replace"]
    result = train("examples/quickstart.yaml", [*short, *folder], callbacks=[StopWhenGood(3.0)])
    print(f"the model after {result.summary.steps} steps is in {result.model}")
