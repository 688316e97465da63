"""Secrets of addresses stay in a run's config.yaml, which only its owner may read."""

import errno
import json
from pathlib import Path

import pytest

from meshtune import config
from meshtune.addresses import has_secret, is_secret, public, written_out
from meshtune.api.resolve import recipe
from meshtune.errors import UserError
from meshtune.report.compare import compare
from meshtune.report.experiments.database import read_sweep_rows
from meshtune.report.run.report import run_page
from meshtune.rundir import RunDir, write_settings
from meshtune.study.store import Store
from meshtune.study.sweep_file import Experiment
from meshtune.train.folder import Claim

SECRET = "https://alice:PASSWORD@host/a/rows.jsonl?X-Amz-Signature=PASSWORD&part=1"
SHOWN = "https://host/a/rows.jsonl?…"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (SECRET, SHOWN),
        (f"{SECRET}: there is none.", f"{SHOWN}: there is none."),
        ("https://TOKEN@host/x and s3://KEY:SECRET@bucket/x", "https://host/x and s3://bucket/x"),
        ("hf://datasets/org/name@main/x.jsonl?token=hf_X", "hf://datasets/org/name@main/x.jsonl?…"),
        ("zip://x.jsonl::https://a:b@host/x.zip?s=1#t", "zip://x.jsonl::https://host/x.zip?…"),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            "abfs://container@account.dfs.core.windows.net/x",
        ),
        ("https://host/x?", "https://host/x?"),
        ("runs/a?b@c, gs://bucket/x*.jsonl", "runs/a?b@c, gs://bucket/x*.jsonl"),
    ],
)
def test_user_parts_and_queries_are_cut(address: str, shown: str) -> None:
    assert public(address) == shown and public(shown) == shown
    assert public({"data": [{"path": address}, ("x", 3, None)]}) == {
        "data": [{"path": shown}, ("x", 3, None)]
    }
    assert UserError([address]).problems == (shown,) and str(UserError(address)) == shown
    assert has_secret({"a": [address]}) == (address != shown)


def test_what_leaves_the_settings_of_a_run_has_no_secret(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / name).create() for name in ("one", "two")]
    settings = config.load(
        overrides=["model.name=tiny", f"data.train={SECRET}", f"data.eval=[{{path: '{SECRET}'}}]"]
    )
    for run, seed in zip(runs, (1, 2), strict=True):
        write_settings(run.config_file, settings.to_yaml().replace("seed: 42", f"seed: {seed}"))
        run.append({"kind": "run", "model": "tiny", "data": [SECRET]})  # of an earlier version
        assert run.config_file.stat().st_mode & 0o777 == 0o600
        assert config.load(run.config_file).data.train[0].path == SECRET  # needed to go on
    comparison = compare([run.path for run in runs])
    page = run_page(runs[0])
    shown = (page.before, page.after, page.footer, json.dumps(comparison.as_dict()), str(recipe(settings)))
    assert all("PASSWORD" not in text for text in shown) and SHOWN in page.after and SHOWN in shown[-1]


def test_a_sweep_keeps_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "sweep.db"
    with Store(file) as store:
        store.add([Experiment({"data.train": SECRET}, {"data": {"train": SECRET}}, "key")], ("data.train",))
        store.describe({"file": {"base": {"data.train": SECRET}}})
    assert b"PASSWORD" not in file.read_bytes()
    assert read_sweep_rows(file).rows[0]["settings"] == {"data.train": SHOWN}


def test_settings_without_a_secret_have_the_usual_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path / "usual", "data: {train: rows.jsonl}")
    (tmp_path / "other").touch()
    assert (tmp_path / "usual").stat().st_mode == (tmp_path / "other").stat().st_mode

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "a file system without modes")

    monkeypatch.setattr("os.chmod", refused)
    write_settings(tmp_path / "config.yaml", SECRET)
    assert (tmp_path / "config.yaml").read_text() == SECRET


def test_a_claimed_folder_has_its_settings_for_its_owner_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    claim = Claim(run)
    claim.write({run.config_file: SECRET, run.plan_file: "layout: mb1-ga1"})
    assert (run.config_file.stat().st_mode & 0o777, run.plan_file.stat().st_mode & 0o077 != 0) == (
        0o600,
        True,
    )


SECRETS = """hf auth login --token hf_abc
export TOKEN=hf_abc1, and export hf_token='x12'
#SBATCH --export=ALL,TOKEN=hf_abc
env: {API_KEY: a1b2c3}
{\\"HF_TOKEN\\": \\"hf_1\\"}
MLFLOW_TRACKING_URI: postgresql://u:pw@h/db
pip install git+https://ghp_0123456789abcdefghij@github.com/x"""
HARMLESS = """export HF_TOKEN=${HF_TOKEN:-} WANDB_API_KEY=$KEY1 HF_TOKEN=$(cat /run/secret1)
: ${HF_TOKEN:?set it1} && [[ $HF_TOKEN == "" ]] && BYPASS=1 pip install git+https://me@host/x.git
SORT_KEY: rack  # HF_TOKEN: from the machines; MAX_TOKEN: 512
GOOGLE_APPLICATION_CREDENTIALS=/path/key1.json, https://h:8080/a@b, https://h:8080?u=a@b
tokenizer: {pad_token: <|pad_0|>, key: question_1}
valueFrom: {secretKeyRef: {name: hf, key: token}}; HF_TOKEN: null; HF_TOKEN: ${{ secrets.HF_TOKEN }}"""


def test_secrets_in_a_text_that_is_to_be_written_are_named_and_other_words_pass() -> None:
    for line in [*SECRETS.splitlines(), "- name: HF_TOKEN\n  value: hf_a"]:
        assert [*written_out(line, "job.yaml")], line
    for line in HARMLESS.splitlines():
        assert [*written_out(line, "job.yaml")] == []
    assert is_secret("HF_TOKEN", "x") and not is_secret("PAD_TOKEN", 0) and not is_secret("BYPASS", "yes")
    assert not is_secret("GOOGLE_APPLICATION_CREDENTIALS", "/a/key.json")
