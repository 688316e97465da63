"""Requests that the server answers, and those that it refuses."""

import asyncio
import re
from contextlib import contextmanager
from os import uname

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_runs import end_row, locked, start_row, step_row, write_run
from page_data import charts_of
from starlette.testclient import TestClient
from sweeps import bench_row, bench_rows, write_sweep

from meshtune.rundir import RunDir
from meshtune.web import app as web
from meshtune.web import pages as made
from meshtune.web.app import Guard, Pages
from meshtune.web.folders import Folders

NASTY = '<img src=x onerror=alert(1)> & "quoted"'
TOKEN = "0123456789abcdef"


@pytest.fixture
def runs(tmp_path):
    """Three runs, a sweep, and beside them a file that nobody may see."""
    folder = tmp_path / "runs"
    write_run(folder / "one", 20, end_row(20, "finished"))
    write_run(folder / "two", 20, end_row(20, "stopped: loss or gradients were not finite"))
    write_run(folder / "<b>three", 5, model=NASTY)
    (folder / "study").mkdir()
    write_sweep(folder / "study", bench_rows())
    (tmp_path / "secret.txt").write_text("SECRET-OF-THE-MACHINE")
    return folder


@contextmanager
def client_of(folder, host="127.0.0.1", token=None, **options):
    pages = Pages(Folders([folder]))
    app = Guard(pages.app(), host=host, token=token)
    with TestClient(app, base_url="http://127.0.0.1:8421", **options) as client:
        client.pages = pages
        yield client


@pytest.fixture
def client(runs):
    with client_of(runs) as client:
        yield client


def ids(client) -> dict[str, str]:
    """Path of each run and sweep in the list, by name."""
    found = re.findall(r"<a href='(/(?:runs|sweeps)/\w+)'>(.*?)</a>", client.get("/").text)
    return {name: path for path, name in found}


def test_the_list_has_states_reasons_figures_and_the_plan(client):
    answer = client.get("/")
    assert answer.status_code == 200
    for shown in (
        "<b>finished</b>",
        "<b>failed</b>",
        "loss or gradients were not finite",
        "3.00 GiB",
        "16,000",
    ):
        assert shown in answer.text  # fmt: skip
    assert "8,000" in answer.text  # measured; planned: 8 x 1,000 tokens / 0.25 s / 2 devices
    assert {"one", "two", "study", "&lt;b&gt;three"} == {*ids(client)}
    assert "<b>three" not in answer.text


def test_a_runs_page_is_its_report_without_code_in_it(client):
    answer = client.get(ids(client)["&lt;b&gt;three"])
    assert "<img" not in answer.text and "&lt;img" in answer.text
    assert {"loss", "speed", "mfu"} <= {*charts_of(answer.text)}
    scripts = re.findall(r"<script([^>]*)>", answer.text)
    assert all("src='/scripts/" in one or "application/json" in one for one in scripts)
    for name in re.findall(r"src='(.*?)'", answer.text):
        script = client.get(name)
        assert script.headers["content-type"].startswith("text/javascript")
        assert "immutable" in script.headers["cache-control"]


def test_another_version_of_the_scripts_has_another_address(client, monkeypatch):
    """A browser keeps them for a year."""
    (before,) = re.findall(r"src='(.*?follow.js)'", client.get("/").text)
    monkeypatch.setitem(web.SCRIPTS, "follow.js", lambda: "// of another version")
    for cached in (web.digest, web._code):
        cached.cache_clear()
    client.pages._kept.clear()
    try:
        (after,) = re.findall(r"src='(.*?follow.js)'", client.get("/").text)
        assert client.get(after).text == "// of another version"
        assert after != before and client.get(before).status_code == 404
    finally:
        for cached in (web.digest, web._code):
            cached.cache_clear()


def test_a_run_that_was_made_after_the_last_look_is_found_by_its_address(client, runs, monkeypatch):
    write_run(runs / "new", 3)
    with client_of(runs) as other:
        path = ids(other)["new"]
    assert client.get(path).status_code == 200
    looks = []
    monkeypatch.setattr(client.pages.folders, "find", lambda: looks.append(1))
    monkeypatch.setattr(client.pages, "_looked", -web.LIST_POLL)
    assert {client.get(f"/runs/{n:012}").status_code for n in range(20)} == {404}
    assert len(looks) == 1, "unknown ids don't make the server read the disk again and again"


def test_a_simulated_sweep_is_marked_in_the_list(client, runs):
    (runs / "large").mkdir()
    write_sweep(runs / "large", bench_rows(), simulated="planner")
    with client_of(runs) as other:
        items = dict(re.findall(r"<li><a [^>]*>(\w+)</a> <small>(.*?)</small>", other.get("/").text))
    assert items == {"large": f"simulated (planner) · {items['study']}", "study": items["study"]}
    assert "18 done" in items["study"]


@pytest.mark.parametrize(
    ("holder", "command"), [(4711, "kill -USR1 4711"), (None, "scancel --signal=USR1 JOB")]
)
@pytest.mark.parametrize("host", ["node1", uname().nodename])
def test_a_run_that_trains_has_the_command_that_stops_it(client, runs, monkeypatch, holder, command, host):
    monkeypatch.setattr(made, "holder_of", lambda lock: holder)
    path = ids(client)["one"]
    assert "Stop it" not in client.get(path).text
    run = RunDir(runs / "one")
    run.append(start_row(host=host))
    with client_of(runs) as other, locked(run):
        text = other.get(path).text
        assert "Stop it" in text and re.findall("<pre class='command'>(.*?)</pre>", text) == [command]
        assert ("without Slurm press Ctrl-C" in text) == (holder is None)
        assert (f"This command on {host} lets it" in text) == (host == "node1")
        assert "<form" not in text and "<button" not in text


@pytest.mark.ci
def test_sweeps_and_comparisons_are_reports_own_pages(client):
    paths = ids(client)
    sweep = client.get(paths["study"]).text
    assert "data-of-experiments" in sweep and "/table.js'" in sweep and "best_layouts" in charts_of(sweep)
    chosen = [paths[name].rpartition("/")[2] for name in ("one", "two")]
    compared = client.get("/compare", params=[("run", one) for one in chosen])
    assert compared.status_code == 200 and "one · two" in compared.text
    assert client.get(f"/compare?run={chosen[0]}").status_code == 400
    assert client.get(f"/compare?run={chosen[0]}&run={chosen[0]}").status_code == 400
    assert client.get(f"/compare?run={chosen[0]}&run={'0' * 12}").status_code == 404


@pytest.mark.ci
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "MAKE"])
@pytest.mark.parametrize("path", ["/", "/events", "/nothing"])
def test_only_reading_is_answered(client, method, path):
    answer = client.request(method, path)
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


def test_head_answers_without_a_body_and_without_a_stream(client):
    assert client.head("/").status_code == 200
    assert client.head("/events").headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", ["/", "/nothing", "/runs/0", "/scripts/draw.js", "/compare"])
def test_every_answer_has_its_headers(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store" or path.startswith("/scripts")


@pytest.mark.parametrize(
    ("listens", "host", "status"),
    [
        ("127.0.0.1", "localhost:8421", 200), ("127.0.0.1", "[::1]:8421", 200), ("127.0.0.1", "LOCALHOST",
        200), ("127.0.0.1", "evil.example:8421", 400), ("127.0.0.1", "127.0.0.1.evil.example", 400),
        ("127.0.0.1", "192.168.0.7", 400), ("127.0.0.1", "", 400), ("localhost", "127.0.0.1", 200),
        ("0.0.0.0", "192.168.0.7:8421", 401), ("0.0.0.0", "evil.example", 400), ("gpu7", "gpu7:8421", 401),
        ("gpu7", "gpu8:8421", 400),
    ],
)  # fmt: skip
def test_only_names_of_this_server_are_answered(runs, listens, host, status):
    with client_of(runs, listens, None if listens in ("127.0.0.1", "localhost") else TOKEN) as client:
        assert client.get("/", headers={"host": host}).status_code == status


def test_the_token_is_needed_once_and_leaves_the_address(runs):
    with client_of(runs, "0.0.0.0", TOKEN, follow_redirects=False) as client:
        refused = client.get("/")
        assert refused.status_code == 401 and TOKEN not in refused.text
        assert client.get("/scripts/draw.js").status_code == 401
        assert client.get("/", params={"token": TOKEN[:-1]}).status_code == 401
        assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/", headers={"authorization": f"Basic {TOKEN}"}).status_code == 401
        given = client.get("/compare", params={"run": "a", "token": TOKEN})
        assert given.status_code == 303 and given.headers["location"] == "/compare?run=a"
        cookie = given.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert client.get("/").status_code == 200
        away = client.get("//evil.example/", params={"token": TOKEN})
        assert not away.headers.get("location", "/").startswith("//")


def test_a_damaged_line_is_counted_on_the_page_and_in_the_list(client, runs):
    with open(runs / "two" / "metrics.jsonl", "a") as file:
        file.write("no JSON\n")
    for page in (client.get("/"), client.get(ids(client)["two"])):
        assert page.status_code == 200
        assert "Left out, since no run writes them: 1 line of metrics" in page.text


def test_a_damaged_run_says_so_and_the_others_are_listed(client, runs):
    path = ids(client)["two"]
    (runs / "two" / "metrics.jsonl").unlink()
    (runs / "two" / "metrics.jsonl").mkdir()
    answer = client.get(path)
    assert answer.status_code in (404, 500) and str(runs.parent) not in answer.text
    assert "one" in ids(client)


def test_a_run_that_leads_outside_is_gone(client, runs, tmp_path):
    path = ids(client)["one"]
    (runs / "one" / "config.yaml").unlink()
    (runs / "one" / "config.yaml").symlink_to(tmp_path / "secret.txt")
    answer = client.get(path)
    assert answer.status_code == 404 and str(tmp_path) not in answer.text and "SECRET" not in answer.text


@pytest.mark.ci
def test_runs_of_a_sweep_that_lead_outside_are_not_on_its_page(tmp_path):
    """The sweep's own runs are, whether its folder is given or its database."""
    study, outside, rows = tmp_path / "runs" / "study", tmp_path / "outside", []
    for number, batch in ((1, 4), (2, 8)):
        run = RunDir((study if number == 1 else outside) / "runs" / str(number)).create()
        for step in (1, 2):
            run.append(step_row(step))
            run.append({"kind": "eval", "step": step, "loss": 2.0 + step / batch})
        settings = {"train.global_batch_size": batch}
        rows.append(bench_row("small", 1, 1, global_batch_size=batch, settings=settings))
    database = write_sweep(study, rows, run="train")
    link = study / "runs" / "2"
    link.symlink_to(outside / "runs" / "2")
    for folder in (study, database):
        with client_of(folder) as client:
            assert "batch_loss_steps" not in charts_of(client.get(ids(client)["study"]).text)
    link.unlink()
    (outside / "runs" / "2").rename(link)
    for folder in (study, database):
        with client_of(folder) as client:
            assert "batch_loss_steps" in charts_of(client.get(ids(client)["study"]).text)


SEGMENTS = st.sampled_from(
    [
        "..", ".", "", "runs", "sweeps", "compare", "events", "scripts", "one", "study", "etc", "passwd",
        "secret.txt", "%2e%2e", "%2f", "..%2f..", "%00", "%ff", "draw.js", "..\\..", "metrics.jsonl", "~",
        "0" * 12, "ID",
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    ["host", "cookie", "last-event-id", "range", "authorization", "accept", "x-forwarded-host"]
)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)


@pytest.mark.ci
@settings(max_examples=150)
@given(
    st.lists(SEGMENTS | VALUES, max_size=6),
    st.lists(st.tuples(st.sampled_from(["run", "token", "from", "x"]), SEGMENTS | VALUES), max_size=4),
    st.dictionaries(NAMES, VALUES | SEGMENTS, max_size=3),
    st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "DELETE"]),
)
def test_no_request_leaves_the_folders(fuzzed, segments, query, headers, method):
    """Raw requests, as a socket may bring them: no client tidies their paths."""
    app, known, secrets = fuzzed
    segments = [known if one == "ID" else one for one in segments]
    if segments[-1:] == ["events"]:  # their streams have no end
        method = "HEAD" if method == "GET" else method
    status, body = asyncio.run(asked(app, method, "/" + "/".join(segments), query, headers))
    assert status in (200, 303, 400, 401, 404, 405, 503)
    assert not any(secret in body for secret in secrets)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """(Application, id of a run, texts that no answer may have)."""
    folder = tmp_path_factory.mktemp("machine")
    write_run(folder / "runs" / "one", 20, end_row(20, "finished"))
    write_run(folder / "outside", 20)
    (folder / "secret.txt").write_text("SECRET-OF-THE-MACHINE")
    (folder / "runs" / "link").symlink_to(folder)
    pages = Pages(Folders([folder / "runs"]))
    (entry,) = pages.folders.entries.values()
    secrets = [text.encode() for text in ("SECRET-OF-THE-MACHINE", "root:", str(folder), "Traceback")]
    return Guard(pages.app(), host="127.0.0.1"), entry.id, secrets


async def asked(app, method, path, query=(), headers=None) -> tuple[int, bytes]:
    """Status and body of the answer to a raw request."""
    from urllib.parse import unquote_to_bytes, urlencode

    raw = path.encode()
    scope = {
        "type": "http", "method": method, "path": unquote_to_bytes(raw).decode("utf-8", "replace"),
        "raw_path": raw, "query_string": urlencode(query).encode(), "http_version": "1.1", "scheme": "http",
        "root_path": "", "server": ("127.0.0.1", 8421), "client": ("127.0.0.1", 5),
        "headers": [(k.encode(), v.encode()) for k, v in ({"host": "127.0.0.1"} | (headers or {})).items()],
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


@pytest.mark.ci
def test_64_streams_are_open_at_most(runs):
    pages = Pages(Folders([runs]))
    app = Guard(pages.app(), host="127.0.0.1")

    async def check() -> None:
        kinds = {one.kind: one.id for one in pages.folders.entries.values()}
        paths = ["/events", f"/runs/{kinds['run']}/events"]
        streams = [asyncio.create_task(asked(app, "GET", paths[n % 2])) for n in range(web.MOST_STREAMS)]
        await until(lambda: pages.streams == 64)
        status, body = await asked(app, "GET", "/events")
        assert status == 503 and b"64" in body
        assert (await asked(app, "GET", "/"))[0] == 200, "pages are answered all the same"
        streams.pop().cancel()
        await until(lambda: pages.streams == 63)
        pages.closing = True
        answers = await asyncio.wait_for(asyncio.gather(*streams), 20)
        assert {status for status, _ in answers} == {200} and pages.streams == 0

    asyncio.run(check())


@pytest.mark.ci
def test_pages_that_nobody_looks_at_are_dropped(tmp_path):
    for number in range(30):
        write_run(tmp_path / str(number), 1)
    with client_of(tmp_path) as client:
        paths = ids(client)
        assert len(paths) == 30
        for path in paths.values():
            assert client.get(path).status_code == 200
        assert len(client.pages._kept) == web.MOST_PAGES


def test_rows_that_come_later_are_on_the_page(runs):
    run = write_run(runs / "later", 3)
    with client_of(runs) as client:
        path = ids(client)["later"]
        assert len(charts_of(client.get(path).text)["loss"]["data"]["values"].splitlines()) == 4
        run.append(step_row(4))
        run.append(start_row(start=2))
        kept = client.get(path).text  # for a while, since drawing costs; the page's stream has the new row
        assert len(charts_of(kept)["loss"]["data"]["values"].splitlines()) == 4
