"""Secrets of addresses stay in a run's config.yaml, which only its owner may read."""

import errno
import json
from pathlib import Path

import pytest

from meshtune import config
from meshtune.addresses import has_secret, public
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
