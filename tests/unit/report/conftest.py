import pytest

from meshtune.rundir import RunDir


def train_row(step: int, **other) -> dict:
    """A train row as the trainer writes it."""
    row = {"kind": "train", "step": step, "loss": 4.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3}
    row |= {"tokens": 100, "label_tokens": 40, "step_seconds": 0.5, "data_seconds": 0.01}
    row |= {"tokens_per_second_per_gpu": 200.0, "tflops_per_second": 0.01, "mfu": None, "mfu_6n": None}
    return row | {"peak_memory_bytes": 2**20 * step} | other


def eval_row(step: int, loss: float, **other) -> dict:
    """An eval row as the trainer writes it."""
    return {"kind": "eval", "step": step, "loss": loss, "perplexity": 2.0, "label_tokens": 10} | other


@pytest.fixture(name="train")
def _train():
    return train_row


@pytest.fixture(name="evaluation")
def _evaluation():
    return eval_row


@pytest.fixture
def empty(tmp_path) -> RunDir:
    return RunDir(tmp_path / "run").create()


@pytest.fixture
def run(empty) -> RunDir:
    """A finished run of four steps with three evaluations and two samples, asked before and after."""
    empty.append({"kind": "run", "model": "tiny", "method": "lora", "world": 1, "versions": {"torch": "9.9"}})
    for row in (
        eval_row(0, 5.0, exact_match=0.0, prompts=8),
        train_row(1, tokens_per_second_per_gpu=1.0),  # the slow first step
        train_row(2),
        eval_row(2, 1.5, exact_match=0.5, prompts=8),
        train_row(3),
        train_row(4),
        eval_row(4, 2.0, exact_match=0.75, prompts=8),
        {"kind": "end", "step": 4, "status": "finished", "seconds": 12.0, "tokens": 400},
    ):
        empty.append(row)
    for step, answers in ((0, ("?", "!")), (4, ("4", "7"))):
        for prompt, expected, answer in zip(("2+2=", "3+3="), ("4", "6"), answers, strict=True):
            empty.append_sample({"step": step, "prompt": prompt, "expected": expected, "answer": answer})
    empty.config_file.write_text("model: {name: tiny}\n")
    empty.model.mkdir()
    return empty
