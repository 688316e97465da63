"""A script that calls `train` under torchrun: each rank calls it, and all have the result."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import cases

from meshtune import config

SCRIPT = """
import json, os, sys
from meshtune import train

tree = json.loads(open(sys.argv[1]).read())
rank = int(os.environ["RANK"])
rows = [{"text": f"red stone {number} {rank * int(sys.argv[2])}"} for number in range(40)]
result = train(tree, train_data=rows, layout="dp2-mb2")
print(f"rank {rank}: {result.summary.status} after {result.summary.steps}", file=open(f"rank-{rank}", "w"))
"""


@pytest.mark.parametrize("differ", cases([0, 1]))
def test_under_torchrun_every_rank_gets_the_result_and_all_have_the_same_rows(
    differ: int, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = settings("data.train=null", "data.eval=null", "train.max_steps=2")
    tree = config.load(None, words).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "script.py", "tree.json", str(differ)], cwd=tmp_path, capture_output=True, text=True
    )
    if differ:
        assert ended.returncode != 0
        assert "Rank 1 was started with other settings than rank 0" in ended.stderr
        assert "train_data has other rows here" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
        for rank in (0, 1):
            assert (tmp_path / f"rank-{rank}").read_text() == f"rank {rank}: finished after 2\n"
