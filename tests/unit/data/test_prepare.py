"""The cache: whole or absent, made once, and what is cut, left out, held out and repeated."""

import gzip
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from data_rows import Bytes, numbered, prepare, texts, write_rows
from golden import refuses, says
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from meshtune.data.batch import evaluation_batches
from meshtune.data.cache import discard
from meshtune.data.encode import Encoder
from meshtune.data.example import BadRow, Example, Origin, Source
from meshtune.data.files import DataFile
from meshtune.data.pack import LABELLED
from meshtune.data.prepare import Progress, sentences
from meshtune.errors import UserError


def made(tmp_path: Path, sources, encoder=None, **settings):
    arguments = {"seq_len": 64, "seed": 0, "cache_dir": tmp_path / "cache"} | settings
    return prepare(sources, encoder or Bytes(), **arguments)


def rows_file(tmp_path: Path, count: int = 50, name: str = "rows.jsonl", start: int = 0) -> Source:
    return write_rows(tmp_path / name, numbered(count, start))


def folder_of(tmp_path: Path) -> Path:
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    return folder


def word_tokenizer(rows) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>"])
    backend.train_from_iterator((text for row in rows for text in row), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


# What is in it #


@pytest.mark.ci
@pytest.mark.parametrize("packing", [True, False])
def test_every_document_is_there_as_it_was_encoded(tmp_path, packing: bool) -> None:
    prepared = made(tmp_path, [rows_file(tmp_path, 2500)], packing=packing)

    dataset = prepared.train
    assert sorted(texts(dataset)) == sorted(p + c for p, c in numbered(2500))
    labelled = sum(int((d >> 31).sum()) for s in range(len(dataset)) for d in dataset.documents(s))
    assert labelled == dataset.label_tokens == sum(len(c) + 1 for _, c in numbered(2500))
    assert dataset.token_count == sum(len(p + c) + 1 for p, c in numbered(2500))
    assert (len(dataset) == 2500) is not packing


def test_documents_know_the_line_they_came_from(tmp_path) -> None:
    dataset = made(tmp_path, [rows_file(tmp_path, 20)], packing=False).train

    assert dataset.places(7) == [f"{tmp_path / 'rows.jsonl'}:8"]


def test_what_is_cut_is_counted_and_said(tmp_path) -> None:
    #  100 + 1 tokens: loses 91, of which the labelled ones are 91; the second loses its whole answer
    source = write_rows(tmp_path / "rows.jsonl", [("abc", "x" * 97), ("p" * 20, "yy"), ("a", "b")])

    prepared = made(tmp_path, [source], seq_len=10, overlong="cut")

    stats = prepared.stats
    assert stats["cut"] == {"documents": 2, "tokens": 91 + 13, "label_tokens": 91 + 3}
    assert stats["dropped"] == {
        "nothing labelled left by the cut": {"documents": 1, "tokens": 10, "label_tokens": 0}
    }
    assert (stats["rows"], stats["train"]["documents"], stats["train"]["tokens"]) == (3, 2, 13)
    assert texts(prepared.train) == ["abc" + "x" * 7, "ab"]
    said = "\n".join(sentences(stats))
    says(said)


def test_overlong_drop_leaves_out_and_counts(tmp_path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [("abc", "x" * 97), ("a", "b")])

    prepared = made(tmp_path, [source], seq_len=10, overlong="drop")

    assert texts(prepared.train) == ["ab"]
    assert prepared.stats["dropped"] == {
        "longer than 10 tokens": {"documents": 1, "tokens": 101, "label_tokens": 98}
    }


def test_overlong_error_names_the_first_ten_rows_and_their_lengths(tmp_path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [("abc", "x" * (i % 2 * 97)) for i in range(1, 40)])

    with refuses(UserError) as caught:
        made(tmp_path, [source], seq_len=10, overlong="error", on_bad_row="skip")

    assert len(caught.value.problems) == 11
    assert "data.overlong" in caught.value.problems[-1]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()], "nothing half made stays"


def test_bad_rows_are_counted_by_reason(tmp_path) -> None:
    source = rows_file(tmp_path, 5)
    with Path(source.path).open("a") as file:
        file.write('{"prompt": "a"}\nnot json\n')

    prepared = made(tmp_path, [source], on_bad_row="skip")

    assert sum(prepared.stats["bad_rows"].values()) == 2
    assert prepared.stats["rows"] == 7
    says(sentences(prepared.stats))


class Picky(Bytes):
    """Leaves out every third example, as template.Encoder does with rows that it can't label exactly."""

    on_bad_row = "skip"

    def encode_each(self, examples):
        found = super().encode(examples)
        return [BadRow("no exact labels") if i % 3 == 0 else document for i, document in enumerate(found)]


def test_rows_that_the_encoder_leaves_out_are_counted_and_the_others_keep_their_lines(tmp_path) -> None:
    prepared = made(tmp_path, [rows_file(tmp_path, 9)], Picky(), packing=False, on_bad_row="skip")

    assert prepared.stats["bad_rows"] == {"no exact labels": 3}
    assert prepared.stats["rows"] == 9
    assert [prepared.train.places(s)[0].rpartition(":")[2] for s in range(6)] == [
        "2",
        "3",
        "5",
        "6",
        "8",
        "9",
    ]


def test_no_document_left_is_an_error_that_says_where_they_went(tmp_path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [("p" * 20, "yy")] * 3)

    with refuses(UserError):
        made(tmp_path, [source], seq_len=10)


# Held out, weights #


@pytest.mark.parametrize(("split", "count"), [(0.1, 5), (7, 7), (0.001, 1)])
def test_eval_split_takes_documents_that_are_not_trained_on(tmp_path, split: float, count: int) -> None:
    prepared = made(tmp_path, [rows_file(tmp_path)], eval_split=split)

    held_out, trained = texts(prepared.eval), texts(prepared.train)
    assert len(held_out) == count
    assert sorted(held_out + trained) == sorted(p + c for p, c in numbered(50))


def test_eval_split_depends_on_the_seed(tmp_path) -> None:
    one, other = (made(tmp_path, [rows_file(tmp_path)], eval_split=10, seed=seed) for seed in (1, 2))

    assert sorted(texts(one.eval)) != sorted(texts(other.eval))


def test_eval_sources_are_held_out_whole(tmp_path) -> None:
    test = rows_file(tmp_path, 7, "test.jsonl", start=1000)

    prepared = made(tmp_path, [rows_file(tmp_path)], eval_sources=(test,))

    assert sorted(texts(prepared.eval)) == sorted(p + c for p, c in numbered(7, 1000))
    assert len(texts(prepared.train)) == 50


def test_an_eval_split_that_leaves_nothing_is_refused(tmp_path) -> None:
    with refuses(UserError):
        made(tmp_path, [rows_file(tmp_path)], eval_split=50)


def test_a_weight_is_passes_through_the_source(tmp_path) -> None:
    once, often = rows_file(tmp_path, 20), rows_file(tmp_path, 20, "often.jsonl", start=100)
    often = Source(often.path, weight=2.5)

    found = texts(made(tmp_path, [once, often]).train)

    times = [found.count(p + c) for p, c in numbered(20, 100)]
    assert sorted(times) == [2] * 10 + [3] * 10
    assert all(found.count(p + c) == 1 for p, c in numbered(20))


def test_a_document_and_its_copy_never_share_a_sequence(tmp_path) -> None:
    source = Source(rows_file(tmp_path, 30).path, weight=3)

    dataset = made(tmp_path, [source], seq_len=128).train

    for sequence in range(len(dataset)):
        places = dataset.places(sequence)
        assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_split": 1.5},
        {"seq_len": 1},
    ],
)
def test_bad_settings_are_refused(tmp_path, settings: dict) -> None:
    with refuses(UserError):
        made(tmp_path, [rows_file(tmp_path)], **settings)


# The cache #


def test_the_second_time_nothing_is_encoded(tmp_path) -> None:
    source, encoder = rows_file(tmp_path), Bytes()

    first, second = made(tmp_path, [source], encoder), made(tmp_path, [source], encoder)

    assert encoder.encoded == 50
    assert (first.stats["cache"], second.stats["cache"]) == ("made", "found")
    assert first.train.digest == second.train.digest
    assert texts(first.train) == texts(second.train)


def test_everything_that_decides_the_data_decides_the_folder(tmp_path) -> None:
    source = rows_file(tmp_path)
    other_encoder = Bytes()
    other_encoder.fingerprint = "other"
    made(tmp_path, [source])
    for settings in (
        {"seq_len": 65},
        {"packing": False},
        {"overlong": "drop"},
        {"seed": 1},
        {"eval_split": 0.5},
        {"on_bad_row": "skip"},
        {"encoder": other_encoder},
        {"sources": [Source(source.path, weight=2)]},
        {"sources": [Source(source.path, max_samples=20)]},
        {"sources": [Source(source.path, format="prompt_completion")]},
        {"eval_sources": [source]},
    ):
        assert made(tmp_path, **({"sources": [source]} | settings)).stats["cache"] == "made", settings
    with Path(source.path).open("a") as file:
        file.write('{"prompt": "new", "completion": "row"}\n')
    assert made(tmp_path, [source]).stats["cache"] == "made"


@pytest.mark.ci
@pytest.mark.parametrize("name", ["tokens.npy", "train_starts.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_a_damaged_cache_is_made_again(tmp_path, name: str, damage: str) -> None:
    source = rows_file(tmp_path)
    expected = texts(made(tmp_path, [source]).train)
    file = folder_of(tmp_path) / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"\xff" * len(content))

    again = made(tmp_path, [source])

    assert again.stats["cache"] == "made"
    assert texts(again.train) == expected
    assert made(tmp_path, [source]).stats["cache"] == "found"


def test_an_array_in_the_cache_that_holds_a_pickle_is_never_loaded(tmp_path) -> None:
    source = rows_file(tmp_path)
    made(tmp_path, [source])
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(canary),))

    file = folder_of(tmp_path) / "train_members.npy"
    np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)
    manifest = folder_of(tmp_path) / "manifest.json"
    values = json.loads(manifest.read_text())
    values["sizes"][file.name] = file.stat().st_size
    manifest.write_text(json.dumps(values))

    assert made(tmp_path, [source]).stats["cache"] == "made"
    assert not canary.exists()


def test_the_arrays_are_mapped_not_read(tmp_path) -> None:
    dataset = made(tmp_path, [rows_file(tmp_path)]).train

    assert isinstance(dataset.tokens.base, np.memmap)
    assert not dataset.tokens.flags.writeable


def _race(source: Source, cache: Path, start, results, locks: bool) -> None:
    if not locks:  # as on a network file system without locks: both make it, and one rename wins
        import fcntl

        def refuse(*_):
            raise OSError("no locks here")

        fcntl.flock = refuse
    encoder = Bytes()
    start.wait()
    prepared = prepare([source], encoder, seq_len=64, seed=0, cache_dir=cache)
    results.put((prepared.train.digest, sorted(texts(prepared.train)), encoder.encoded))


@pytest.mark.ci
@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_make_it_at_once_all_get_the_whole(tmp_path, locks: bool) -> None:
    source = rows_file(tmp_path, 3000)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [
        context.Process(target=_race, args=(source, tmp_path / "cache", start, results, locks))
        for _ in range(4)
    ]
    for process in processes:
        process.start()

    start.set()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()

    assert len({digest for digest, *_ in found}) == 1
    assert all(seen == sorted(p + c for p, c in numbered(3000)) for _, seen, _ in found)
    if locks:
        assert sorted(encoded for *_, encoded in found) == [0, 0, 0, 3000], "the others waited"
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


class Slow(Bytes):
    def encode(self, examples):
        time.sleep(0.2)
        return super().encode(examples)


def _make_slowly(source: Source, cache: Path) -> None:
    prepare([source], Slow(), seq_len=64, seed=0, cache_dir=cache)


@pytest.mark.ci
def test_a_process_killed_while_writing_leaves_nothing_that_looks_whole(tmp_path) -> None:
    source = rows_file(tmp_path, 8000)
    process = multiprocessing.get_context("fork").Process(
        target=_make_slowly, args=(source, tmp_path / "cache")
    )
    process.start()
    while not list(tmp_path.glob("cache/.*/tokens.npy")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(tmp_path.glob("cache/.*/tokens.npy")), "it was killed half way"

    prepared = made(tmp_path, [source])

    assert prepared.stats["cache"] == "made"
    assert len(texts(prepared.train)) == 8000


def test_the_cache_has_the_modes_that_the_umask_gives(tmp_path) -> None:
    old = os.umask(0o027)
    try:
        made(tmp_path, [rows_file(tmp_path)])
    finally:
        os.umask(old)
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_what_a_killed_process_left_long_ago_is_removed(tmp_path) -> None:
    source = rows_file(tmp_path)
    made(tmp_path, [source])
    folder = folder_of(tmp_path)
    left = folder.parent / f".{folder.name}.abc"
    left.mkdir()
    others = folder.parent / f".{'0' * 32}.abc", folder.parent / ".hashes.abc"
    kept = folder.parent / ".user.settings"
    for file in (*others, kept):
        file.touch()
    for path in (left, *others, kept):
        os.utime(path, (0, 0))
    (folder / "tokens.npy").unlink()

    made(tmp_path, [source])

    assert not any(path.exists() for path in (left, *others))
    assert kept.exists()


def test_a_cache_folder_that_cannot_be_written_says_what_to_do(tmp_path) -> None:
    (tmp_path / "cache").write_text("a file")

    with refuses(UserError):
        made(tmp_path, [rows_file(tmp_path)])


def test_a_stream_puts_only_its_eval_sources_on_the_disk(tmp_path) -> None:
    encoder, test = Bytes(), rows_file(tmp_path, 7, "test.jsonl")

    prepared = made(tmp_path, [rows_file(tmp_path)], encoder, streaming=True, eval_sources=(test,))

    assert encoder.encoded == 7
    assert len(texts(prepared.eval)) == 7
    assert prepared.stats["train"] is None


def test_the_real_encoder_reads_packs_and_shifts_to_the_answers_and_nothing_else(tmp_path) -> None:
    rows = [("Name a colour. " * (i % 3 + 1), f"Colour {i}!") for i in range(30)]
    encoder = Encoder(word_tokenizer(rows), train_on="completion", chat_template="none")

    dataset = prepare(
        [write_rows(tmp_path / "rows.jsonl", rows)], encoder, seq_len=32, seed=0, cache_dir=tmp_path / "cache"
    ).train

    found = []
    for made in evaluation_batches(dataset, micro_batch_size=4):
        assert made.input_ids.shape[1] <= 32
        kept = made.labels[made.labels != -100]
        found += encoder.tokenizer.decode(kept.tolist()).split("<eos>")
    assert sorted(text.strip() for text in found if text.strip()) == sorted(
        f"Colour {i} !" for i in range(30)
    )


def test_the_cache_survives_a_copy_and_a_touch(tmp_path) -> None:
    source = rows_file(tmp_path)
    first = made(tmp_path, [source])
    os.utime(source.path, (1, 1))
    assert made(tmp_path, [source]).stats["cache"] == "found"
    copy = tmp_path / "elsewhere" / "copy.jsonl"
    copy.parent.mkdir()
    shutil.copy(source.path, copy)
    again = made(tmp_path, [Source(str(copy))])
    assert again.stats["cache"] == "found"
    assert again.train.digest == first.train.digest
    assert again.train.places(0)[0].startswith(str(copy)), "rows are named where they are now"


def test_a_file_of_the_same_size_and_other_content_is_read_again(tmp_path) -> None:
    source = rows_file(tmp_path)
    made(tmp_path, [source])
    content = Path(source.path).read_text()
    Path(source.path).write_text(content.replace("0?", "X?"))
    assert made(tmp_path, [source]).stats["cache"] == "made"


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch) -> None:
    source = rows_file(tmp_path)
    made(tmp_path, [source])
    monkeypatch.setattr("meshtune.data.files.digest_of_stream", lambda *_: pytest.fail("it was hashed again"))
    assert made(tmp_path, [source]).stats["cache"] == "found"
    (tmp_path / "cache" / "hashes.json").write_text("no JSON")
    monkeypatch.undo()
    assert made(tmp_path, [source]).stats["cache"] == "found"


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path) -> None:
    source = rows_file(tmp_path)

    class Growing(Bytes):
        def encode(self, examples):
            with Path(source.path).open("a") as file:
                file.write('{"prompt": "late", "completion": "row"}\n')
            return super().encode(examples)

    with refuses(UserError):
        made(tmp_path, [source], Growing())
    assert made(tmp_path, [source]).stats["cache"] == "made"
    assert made(tmp_path, [source]).stats["rows"] == 51


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "json", "parquet"])
def test_progress_goes_from_nothing_to_everything(tmp_path, kind, monkeypatch, capsys) -> None:
    rows = [{"prompt": p, "completion": c} for p, c in numbered(5000)]
    file = tmp_path / f"rows.{kind}"
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, file)
    else:
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        file.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    monkeypatch.setattr("meshtune.data.prepare.SOON", 0)
    monkeypatch.setattr("meshtune.data.prepare.EVERY", 0)
    made(tmp_path, [Source(str(file))])
    hashed, *lines = capsys.readouterr().err.splitlines()
    assert hashed == "preparing data: 100% of the files hashed"
    found = [re.fullmatch(r"preparing data: (\d+)%, ([\d,]+) tokens/s, [\d:]+ left", line) for line in lines]
    shares = [int(match[1]) for match in found if match]
    assert len(shares) == len(lines) == 5
    assert shares == sorted(shares) and shares[0] < 50 and shares[-1] > 80
    made(tmp_path, [Source(str(file), max_samples=2000)])
    assert "preparing data: 100%, " in capsys.readouterr().err


def test_progress_tells_the_time_that_is_left() -> None:
    files = [DataFile("a", size=300, share=1.0), DataFile("b", size=700, share=0.0)]
    progress = Progress(files)
    assert progress.text(60_000, 30.0) == "30%, 2,000 tokens/s, 1:10 left"
    assert progress.text(60_000, 3000.0) == "30%, 20 tokens/s, 1:56:40 left"
    files[1].share = 1.0
    assert progress.text(60_000, 30.0).endswith("0:00 left")


def test_progress_tells_the_share_of_the_bytes_that_are_hashed(monkeypatch, capsys) -> None:
    monkeypatch.setattr("meshtune.data.prepare.SOON", 0)
    monkeypatch.setattr("meshtune.data.prepare.EVERY", 0)
    progress = Progress([DataFile("a", size=4)])
    progress.hashed(1)
    progress.hashed(2)
    assert re.findall(r"\d+%", capsys.readouterr().err) == ["25%", "75%"]


def test_a_stream_names_unused_columns_at_the_start_and_counts_bad_rows_of_its_evaluation(tmp_path) -> None:
    row = {"prompt": "1?", "completion": "1"}
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text(json.dumps(row | {"topic": "numbers"}) + "\n")
    held_out.write_text(json.dumps(row | {"level": 3}) + "\n{\n")
    prepared = made(
        tmp_path, [Source(str(train))], streaming=True, eval_sources=(Source(str(held_out)),),
        on_bad_row="skip",
    )  # fmt: skip
    lines = sentences(prepared.stats)
    says(lines)
    assert prepared.train.tally.examples == 0, "no row of the stream counts as read yet"


def test_the_turns_of_a_row_are_held_out_together(tmp_path) -> None:
    class Turns(Bytes):
        def split(self, example):
            return [replace(example, completion=f"{example.completion}{turn}") for turn in range(3)]

    prepared = made(tmp_path, [rows_file(tmp_path, 20)], Turns(), eval_split=0.3, packing=False)
    train, held_out = (
        {part.places(sequence)[0] for sequence in range(len(part))}
        for part in (prepared.train, prepared.eval)
    )
    assert not train & held_out
    assert (len(prepared.train), len(prepared.eval)) == (42, 18), "a fraction of the rows, three turns each"


def test_the_same_bytes_under_another_suffix_are_other_rows(tmp_path) -> None:
    content = '{"text": "a b"}\n'
    encoder = Encoder(word_tokenizer([("a", "b")]), train_on="completion", chat_template="none")
    for name, tokens in (("rows.jsonl", 3), ("rows.txt", 8)):
        (tmp_path / name).write_text(content)
        prepared = made(tmp_path, [Source(str(tmp_path / name))], encoder)
        assert prepared.stats["cache"] == "made"
        assert prepared.stats["train"]["tokens"] == tokens


def test_a_cache_in_a_folder_that_cannot_be_written_is_used(tmp_path, monkeypatch) -> None:
    source = rows_file(tmp_path)
    made(tmp_path, [source])
    copy = tmp_path / "copy.jsonl"
    shutil.copy(source.path, copy)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda *_, **__: Path("/proc/none").touch())
    assert made(tmp_path, [Source(str(copy))]).stats["cache"] == "found"


def test_a_folder_of_llama_factory_is_a_folder_of_files(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dataset_info.json").write_text('{"mine": {"file_name": "rows.json"}}')
    (folder / "rows.json").write_text('[{"prompt": "1?", "completion": "1"}]')
    assert made(tmp_path, [Source(str(folder))]).stats["rows"] == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_max_samples_are_the_first_rows_of_each_source(tmp_path, streaming: bool) -> None:
    one = replace(rows_file(tmp_path, 50, "one.jsonl"), max_samples=3)
    two = replace(rows_file(tmp_path, 2, "two.jsonl", start=100), max_samples=3)  # it has fewer
    prepared = made(tmp_path, [one, two], packing=False, streaming=streaming, eval_sources=(one,))
    train = next(prepared.train.windows(prepared.train.start()))[0] if streaming else prepared.train
    assert sorted({text.split("?")[0] for text in texts(train)}) == ["0", "1", "100", "101", "2"]
    assert len(prepared.eval) == 3


def test_a_stream_of_max_samples_goes_on_inside_them_and_begins_again(tmp_path) -> None:
    source = replace(rows_file(tmp_path), max_samples=5)
    stream = replace(made(tmp_path, [source], packing=False, streaming=True).train, window=2)
    place, read = stream.start(), []
    for _ in range(4):
        windows = stream.windows(place)  # opened anew, as by a run that goes on
        dataset, _, place = next(windows)
        windows.close()
        read.append(sorted(text.split("?")[0] for text in texts(dataset)))
    assert read == [["0", "1"], ["2", "3"], ["4"], ["0", "1"]] and place["passes"] == [1]
    assert stream.digest != replace(stream, sources=(replace(source, max_samples=6),)).digest


def test_a_bad_row_behind_max_samples_is_not_read(tmp_path) -> None:
    source = rows_file(tmp_path, 5)
    with Path(source.path).open("a") as file:
        file.write("broken\n")
    with refuses(UserError):
        made(tmp_path, [source])
    assert made(tmp_path, [replace(source, max_samples=5)]).stats["rows"] == 5


def test_a_damaged_folder_that_cannot_be_removed_is_out_of_the_way(tmp_path, monkeypatch) -> None:
    def refuse(*_, **__):
        raise PermissionError("the file is open elsewhere")

    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokens.npy").write_bytes(b"damaged")
    monkeypatch.setattr(os, "unlink", refuse)
    discard(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("overlong", "pieces"), [("auto", True), ("split", True), ("cut", False)])
def test_a_long_text_is_trained_on_whole_in_pieces(
    tmp_path, tokenizer_of, overlong: str, pieces: bool
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in (300, 2)))
    encoder = Encoder(tokenizer_of(), train_on="all", chat_template=None)
    made = prepare(
        [Source(str(file))], encoder, seq_len=64, packing=False, overlong=overlong, cache_dir=tmp_path
    )
    documents = [document for place in range(len(made.train)) for document in made.train.documents(place)]
    whole = encoder.encode([Example(Origin("rows.jsonl", n), text="word " * n) for n in (300, 2)])
    tokens = sum(len(document.ids) for document in whole)
    if not pieces:
        assert sorted(map(len, documents)) == sorted([64, len(whole[1].ids)])
        return
    assert sum(map(len, documents)) == tokens and max(map(len, documents)) == 64
    ids = np.concatenate(sorted((d & ~LABELLED for d in documents), key=len, reverse=True))
    assert sorted(ids.tolist()) == sorted(np.concatenate([d.ids for d in whole]).tolist())
    assert not any(document[0] & LABELLED for document in documents)
    assert made.stats["split"] == {"documents": 1, "pieces": len(documents) - 1}
    assert any("split into pieces of at most 64 tokens: 1 document" in line for line in sentences(made.stats))


def test_a_stream_is_known_by_what_its_files_hold(tmp_path, monkeypatch) -> None:
    source = rows_file(tmp_path)
    stream = made(tmp_path, [source], streaming=True).train

    def digest(path=source.path) -> str:
        return replace(stream, sources=(replace(source, path=str(path)),)).digest

    shutil.copy(source.path, tmp_path / "copy.jsonl")
    assert stream.digest == digest() == digest(tmp_path / "copy.jsonl")
    content = Path(source.path).read_bytes()
    monkeypatch.setattr("meshtune.data.files.OUTLINE", 16)
    monkeypatch.setattr("meshtune.data.recipe.BLOCKS", 4)  # the file is larger than that
    known = digest()
    for other in (content[:-1] + b" ", b" " + content[1:], content + b"\n", content[:-1]):
        Path(source.path).write_bytes(other)
        assert digest() != known
    Path(source.path).write_bytes(content)
    assert digest() == known
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(9):
        (shards / f"{number}.jsonl").write_text("x" * 99)
    blocks, outline = [], DataFile.outline
    monkeypatch.setattr(DataFile, "outline", lambda file, most: blocks.append(most) or outline(file, most))
    known = digest(shards)
    assert blocks == [1, 1, 1, 1]
    (shards / "8.jsonl").rename(shards / "9.jsonl")
    assert known != digest(shards)
