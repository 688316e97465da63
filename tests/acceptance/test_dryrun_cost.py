"""Cost of a dry run of large models: CPU seconds and memory of the whole command, its ranks included."""

import os
from pathlib import Path

import pytest
from command import start

KIB, GIB = 2**10, 2**30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "batch", "layout", "seconds", "ranks"),
    [
        ("Llama-3.1-8B", 512, "zero3x512-mb1", 25, 1),
        ("Llama-3.1-70B", 512, "zero3x32-tp8-sp-mb16-full", 90, 1),
        ("Llama-3.1-405B", 64, "zero3x8-tp8-sp-pp8-1f1b-mb1-ga8", 240, 3),  # 126 blocks: 16 or 15 a rank
    ],
)
def test_a_dry_run_takes_few_cpu_seconds_and_little_memory(
    model: str, batch: int, layout: str, seconds: float, ranks: int, tmp_path: Path
) -> None:
    words = [f"model.name=meta-llama/{model}", f"data.cache={tmp_path}", "data.seq_len=8192"]
    words += [f"train.global_batch_size={batch}", "--gpu", "h100-sxm", "--layout", layout, "--json"]
    process = start("dryrun", *words)
    assert process.stdout and process.stderr
    document = process.stdout.read()  # an error is short: it does not fill the other pipe
    _, status, used = os.wait4(process.pid, 0)  # with its ranks, which it has waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 3), process.stderr.read()
    assert document.count('"stands_for"') == ranks
    assert used.ru_utime + used.ru_stime <= seconds
    if ranks == 1:
        assert 2 * used.ru_maxrss * KIB <= 1.5 * GIB  # the larger of the command and its rank
