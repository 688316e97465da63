"""Run the training step on fake tensors and a fake process group, for any number of ranks."""
