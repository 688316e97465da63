"""Train with a loss function of your own: `python examples/python/loss.py`.

From the repository's root; 20 seconds on 2 CPU cores. The function is right in every layout (docs/python.md).
"""

# %%
import torch

from meshtune import train


# %% The focal loss (Lin et al. 2017): tokens that the model is sure of count less.
def focal(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum of the token losses, and their count. logits [tokens, vocabulary], labels [tokens]."""
    log_likelihood = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    losses = -((1 - log_likelihood.exp()) ** 2) * log_likelihood
    return losses.sum(), len(labels)


# %%
if __name__ == "__main__":
    short = ["train.max_steps=20", "eval.every=10", "eval.exact_match=0", "eval.samples=2"]
    folder = ["output=runs/python-loss", "output_exists=replace"]
    result = train("examples/quickstart.yaml", [*short, *folder], loss=focal)
    print(f"focal loss {result.summary.first_loss:.3f} → {result.summary.last_loss:.3f}")
