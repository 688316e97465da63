"""meshtune: plan, train and measure the fine-tuning of Hugging Face language models."""

__version__ = "0.1.0"
