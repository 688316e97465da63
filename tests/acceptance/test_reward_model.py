"""A reward model that was trained and exported scores in transformers and peft as in its evaluation."""

from itertools import product
from pathlib import Path

import pytest
import torch
from cases import cases
from test_preferences_trl import rows_of
from tiny import make_llama, make_rows, make_tokenizer, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.api.answer import open_answerer
from meshtune.api.evaluate import evaluated
from meshtune.api.export import exported
from meshtune.errors import UserError
from meshtune.train import loop


@pytest.mark.parametrize("method", cases(["full", "lora", "qlora"], test=["lora"]))
def test_an_export_scores_as_the_run_did(method: str, tmp_path: Path) -> None:
    from peft import PeftModel

    folder = tmp_path / "base"
    texts = [f"{row['prompt']} {row['completion']}" for row in make_rows(120)]
    make_tokenizer(texts, 300).save_pretrained(folder)
    make_llama().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = rows_of("reward", tokenizer)
    run = build.build(config.load(None, [
        f"model.name={folder}", f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}",
        f"data.eval={tmp_path / 'rows.jsonl'}", f"data.cache={tmp_path / 'cache'}", "data.separator=''",
        "data.seq_len=512", "objective=reward", f"method={method}", "train.max_steps=3",
        "train.global_batch_size=2", "layout=mb1-ga2", "train.precision=fp32", "train.learning_rate=1e-2",
        "log.to=[jsonl]", "checkpoint.every=0", f"output={tmp_path / 'run'}",
        *([] if method == "full" else ["lora.modules_to_save=[score]"]),
    ]))  # fmt: skip
    loop.train(run)
    (evaluation,) = run.folder.rows("eval")
    merged = exported(run.folder.path, tmp_path / "exported", merge=method != "full", step=None, push_to=None)
    models = [AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)]
    if method == "lora":
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        base.config.pad_token_id = tokenizer.pad_token_id
        models.append(PeftModel.from_pretrained(base, str(run.folder.model)))
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    for model, side in product(models, ("chosen", "rejected")):
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for row in rows]
        with torch.no_grad():
            scores = model.eval()(**tokenizer(texts, return_tensors="pt", padding=True)).logits
        assert evaluation[f"rewards/{side}"] == pytest.approx(float(scores.mean()), rel=1e-4, abs=1e-5)
    again = evaluated(str(run.folder.path), [], lambda _: None)
    assert again["pairs"] == len(rows) and "label_tokens" not in again
    assert again["rewards/chosen"] == pytest.approx(evaluation["rewards/chosen"], rel=1e-4)
    with pytest.raises(UserError, match="reward model: it scores answers and writes none"):
        open_answerer(str(run.folder.path))
