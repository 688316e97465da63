import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from golden import says
from loading import load, resize_embeddings
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import meshtune.model.pieces as module
from meshtune.errors import UserError
from meshtune.model.files import INDEX
from meshtune.model.load import mapped, skeleton
from meshtune.model.lora import add_lora, initial_adapters
from meshtune.model.pieces import Piece, StoredTensors, fill
from meshtune.model.save import save_model, save_pieces
from meshtune.placement.split import piece

FP32 = torch.float32


def on_meta(folder: Path, dtype: torch.dtype = FP32) -> PreTrainedModel:
    return skeleton(str(folder), dtype=dtype, attention="eager")


def one_device(folder: Path, dtype: torch.dtype = FP32) -> PreTrainedModel:
    """The model as transformers itself loads and casts it, in training mode."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.config.name_or_path = str(folder)
    return model.train()


def cut(whole: Tensor, grid: dict[int, tuple[int, int]]) -> Piece:
    """Memory for a part of a tensor (meta is enough): dimension -> (number of parts, which)."""
    offsets, sizes = [0] * whole.ndim, list(whole.shape)
    for dim, (parts, index) in grid.items():
        if dim < whole.ndim:
            start, stop = piece(whole.shape[dim], parts, index)
            offsets[dim], sizes[dim] = start, stop - start
    return Piece(tuple(whole.shape), tuple(offsets), torch.full(sizes, torch.nan, dtype=whole.dtype))


def filled(
    model: PreTrainedModel, weights: StoredTensors, grid: dict[int, tuple[int, int]]
) -> dict[str, Piece]:
    """A part of every parameter of a skeleton, with its values."""
    pieces = {name: cut(parameter, grid) for name, parameter in model.named_parameters()}
    fill(pieces.items(), weights)
    return pieces


def differing(pieces: dict[str, Piece], model: PreTrainedModel) -> list[str]:
    """Parameters of which a piece is not exactly the model's own."""
    parameters = dict(model.named_parameters())
    assert pieces.keys() == parameters.keys()
    return [name for name, part in pieces.items() if not torch.equal(part.tensor, part.of(parameters[name]))]


# A model without its parameters #


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_is_the_loaded_model_without_its_parameters(family, save):
    folder = save(family, torch.bfloat16)
    generation = json.loads((folder / "generation_config.json").read_text())
    generation |= {"temperature": 0.6, "do_sample": True, "eos_token_id": [2, 3]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    one = one_device(folder)
    before = torch.get_rng_state()
    model = on_meta(folder)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn

    assert all(parameter.is_meta and parameter.dtype == FP32 for parameter in model.parameters())
    for duplicates in (True, False):  # the same names, and the same of them tied
        ours, theirs = (m.named_parameters(remove_duplicate=not duplicates) for m in (model, one))
        for (name, mine), (other_name, other) in zip(ours, theirs, strict=True):
            assert (name, mine.shape, mine.requires_grad) == (other_name, other.shape, other.requires_grad)
    ours, theirs = dict(model.named_buffers()), dict(one.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype and torch.equal(ours[name], buffer), name
    assert model.generation_config.to_dict() == one.generation_config.to_dict()
    assert model.config.to_dict() == one.config.to_dict()
    assert model.training


def test_modules_made_after_a_skeleton_have_their_values(save):
    on_meta(save("llama"))
    assert not torch.nn.Linear(2, 2).weight.is_meta


# Values from files #


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_filled_with_what_loading_gives(family, save):
    folder = save(family, torch.bfloat16)
    weights = StoredTensors(mapped(str(folder), dtype=FP32))
    assert differing(filled(on_meta(folder), weights, {}), one_device(folder)) == []


@pytest.mark.ci
@pytest.mark.parametrize("stored", [torch.float64, FP32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float64, FP32, torch.bfloat16])
def test_files_of_one_type_fill_parameters_of_another(stored, wanted, save):
    folder = save("llama", stored)
    weights = StoredTensors(mapped(str(folder), dtype=wanted))
    assert differing(filled(on_meta(folder, wanted), weights, {}), one_device(folder, wanted)) == []


def test_files_that_mix_types_lose_nothing(save):
    folder = save("llama")
    tensors = load_file(folder / "model.safetensors")
    some = {name: t.bfloat16() if "mlp" in name else t.half() if "norm" in name else t
            for name, t in tensors.items()}  # fmt: skip
    save_file(some, folder / "model.safetensors", metadata={"format": "pt"})
    weights = StoredTensors(mapped(str(folder), dtype=FP32))
    assert differing(filled(on_meta(folder), weights, {}), one_device(folder)) == []


def test_fp16_and_bf16_together_are_read_as_what_holds_both(save):
    folder = save("llama", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    some = {name: t.half() if "norm" in name else t for name, t in tensors.items()}
    some["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], 1e30)  # fp16 ends at 65504
    save_file(some, folder / "model.safetensors", metadata={"format": "pt"})
    pieces = filled(on_meta(folder), StoredTensors(mapped(str(folder), dtype=FP32)), {})
    assert differing(pieces, one_device(folder)) == []
    assert pieces["lm_head.weight"].tensor.isfinite().all()


GRIDS = {
    "3 parts by rows, uneven": [{0: (3, i)} for i in range(3)],
    "200 parts by rows, most of them empty": [{0: (200, i)} for i in (0, 63, 95, 96, 127, 128, 199)],
    "3 parts by columns, uneven": [{1: (3, i)} for i in range(3)],
    "2 x 3 parts": [{0: (2, i), 1: (3, j)} for i in range(2) for j in range(3)],
}


@pytest.mark.parametrize("grid", GRIDS)
def test_a_piece_is_that_part_of_what_loading_gives(grid, save):
    folder = save("qwen2", torch.bfloat16)  # tied, with biases
    one, model, weights = one_device(folder), on_meta(folder), StoredTensors(mapped(str(folder), dtype=FP32))
    for parts in GRIDS[grid]:
        assert differing(filled(model, weights, parts), one) == [], parts


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("grid", [None, *GRIDS])
def test_rows_of_added_tokens_are_the_mean_of_the_old_ones_in_every_piece(
    family, grid, save, tokenizer, monkeypatch
):
    monkeypatch.setattr(module, "MEAN_CHUNK_ROWS", 100)  # 256 rows: 100, 100, 56
    folder = save(family, torch.bfloat16)
    one, model = one_device(folder), on_meta(folder)
    assert resize_embeddings(one, tokenizer) == resize_embeddings(model, tokenizer) == 2
    assert model.config.vocab_size == one.config.vocab_size == 258
    weights = StoredTensors(mapped(str(folder), dtype=FP32))
    for parts in GRIDS[grid] if grid else [{}, {0: (129, 128)}, {0: (258, 257)}]:  # new rows alone, too
        assert differing(filled(model, weights, parts), one) == [], parts


def test_resizing_leaves_the_generator_and_the_flags_as_they_were(save, tokenizer):
    folder = save("qwen2")
    for model in (one_device(folder), on_meta(folder)):
        model.get_input_embeddings().weight.requires_grad_(False)
        before = torch.get_rng_state()
        resize_embeddings(model, tokenizer)
        assert torch.equal(torch.get_rng_state(), before)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert not model.get_input_embeddings().weight.requires_grad


def test_buffers_that_files_hold_are_filled_too():
    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("made", torch.ones(2), persistent=False)

    model = Counted()
    StoredTensors({"seen": torch.tensor([1.0, 2.0, 3.0])}).copy_buffers(model)
    assert model.seen.tolist() == [1, 2, 3]
    assert model.made.tolist() == [1, 1]


# Values that are drawn #


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float64, FP32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_random_pieces_are_those_of_one_device(family, dtype, save):
    folder = save(family)
    (folder / "model.safetensors").unlink()
    one = load(str(folder), init="random", dtype=dtype, attention="eager", seed=3)
    model = on_meta(folder, dtype)
    before = torch.get_rng_state()
    weights = StoredTensors(mapped(str(folder), init="random", dtype=dtype, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    for parts in ({}, {0: (3, 1)}, {1: (2, 1)}):
        assert differing(filled(model, weights, parts), one) == []


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: Conv1D
@pytest.mark.parametrize("added", [False, True])
def test_adapters_are_those_of_one_device(family, added, save, tokenizer):
    folder = save(family, torch.bfloat16)

    def adapted(model: PreTrainedModel) -> PreTrainedModel:
        torch.manual_seed(5)
        if added:
            resize_embeddings(model, tokenizer)
        add_lora(model, lora_rank=4, alpha=8)
        return model

    one, model = adapted(one_device(folder)), adapted(on_meta(folder))
    weights = StoredTensors(mapped(str(folder), dtype=FP32) | initial_adapters(model))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    add_lora(one_device(folder), lora_rank=4, alpha=8)
    assert torch.equal(torch.get_rng_state(), after)  # whatever is drawn next is the same as well
    for parts in ({}, {0: (3, 2)}, {1: (3, 0)}):
        assert differing(filled(model, weights, parts), one) == []


# One folder, written by several ranks #


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def write(folder: Path, out: Path, how: str, dtype: torch.dtype, tokenizer: Any, most: int) -> None:
    """This rank's pieces of the model in `folder`, cut as `how` says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grid = {"rows": {0: (ranks, rank)}, "columns": {1: (ranks, rank)}, "alone": {}}[how]
    model = on_meta(folder)
    resize_embeddings(model, tokenizer)
    pieces = filled(model, StoredTensors(mapped(str(folder), dtype=FP32)), grid)
    if how == "alone":  # every rank has some whole ones
        pieces = {name: pieces[name] for name in list(pieces)[rank::ranks]}
    elif how == "columns":  # nobody cuts what has no columns: the first writes it
        pieces = {name: part for name, part in pieces.items() if rank == 0 or len(part.shape) > 1}
    save_pieces(
        out, model, pieces, tokenizer, dtype=dtype, gather=gather, main=rank == 0, card="# A card",
        stop_ids=(7, 2), max_shard_bytes=most,
    )  # fmt: skip
    assert (out / "config.json").is_file()  # on no rank does it end before the folder is there


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    """Bit by bit, wherever they lie in the files."""
    mine, other = tensors_in(ours), tensors_in(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


def assert_same_beside(ours: Path, theirs: Path, but: str = "") -> None:
    """All that is no tensor: JSON with the same values, the rest byte by byte."""
    for path in theirs.iterdir():
        if path.name == but:
            continue
        if path.suffix == ".json":
            assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text()), path.name
        elif path.suffix != ".safetensors":
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name


def written(
    tmp_path: Path, folder: Path, tokenizer: Any, ranks: int, how: str, dtype: torch.dtype, most: int
) -> tuple[Path, Path]:
    """(the folder that several ranks wrote, the one that one device wrote)"""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_ranks(ranks, write, folder, ours, how, dtype, tokenizer, most)
    one = one_device(folder)
    resize_embeddings(one, tokenizer)
    size = f"{most // 1000}KB"
    save_model(theirs, one.to(dtype), tokenizer, card="# A card", stop_ids=(7, 2), max_shard_size=size)
    return ours, theirs


@pytest.mark.parametrize(
    ("family", "ranks", "how", "dtype"),
    [
        ("llama", 2, "rows", FP32),
        ("llama", 3, "rows", torch.bfloat16),
        ("llama", 3, "columns", FP32),
        ("qwen2", 3, "alone", FP32),  # tied
        ("gpt2", 2, "columns", torch.bfloat16),
        ("qwen3_moe", 3, "rows", FP32),  # a tensor for each matrix of an expert
        ("mixtral", 2, "columns", torch.bfloat16),
    ],
)
def test_ranks_write_the_folder_that_one_device_writes(family, ranks, how, dtype, save, tokenizer, tmp_path):
    folder = save(family, torch.bfloat16)
    ours, theirs = written(tmp_path, folder, tokenizer, ranks, how, dtype, 10**9)
    assert names(ours) == names(theirs)
    assert_same_tensors(ours, theirs)
    assert_same_beside(ours, theirs)


@pytest.mark.parametrize(
    ("family", "ranks", "how", "dtype", "most"),
    [("llama", 3, "rows", FP32, 100_000), ("gemma2", 2, "columns", torch.bfloat16, 60_000)],
)
def test_ranks_write_several_files_none_too_large_with_an_index(
    family, ranks, how, dtype, most, save, tokenizer, tmp_path
):
    folder = save(family, torch.bfloat16)
    ours, theirs = written(tmp_path, folder, tokenizer, ranks, how, dtype, most)
    assert_same_tensors(ours, theirs)
    assert_same_beside(ours, theirs, but=INDEX)
    index, other = (json.loads((each / INDEX).read_text()) for each in (ours, theirs))
    assert index["metadata"] == other["metadata"]
    files = {path.name: load_file(path) for path in ours.glob("*.safetensors")}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert all(sum(t.nbytes for t in tensors.values()) <= most for tensors in files.values())
    read, one = (AutoModelForCausalLM.from_pretrained(each, dtype=dtype) for each in (ours, theirs))
    assert all(torch.equal(p, q) for p, q in zip(read.parameters(), one.parameters(), strict=True))


def try_to_write(folder: Path, out: Path, limited: int | None, broken: str | None) -> tuple[str, str]:
    """(type of the error, its sentence) on this rank."""
    rank, limits = dist.get_rank(), resource.getrlimit(resource.RLIMIT_FSIZE)
    model = on_meta(folder)
    pieces = filled(model, StoredTensors(mapped(str(folder), dtype=FP32)), {0: (dist.get_world_size(), rank)})
    if broken and rank == 0:
        setattr(model.config, broken, None)  # what the main rank writes last can't be written
    dist.barrier()
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        save_pieces(out, model, pieces, None, dtype=FP32, gather=gather, main=rank == 0)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()  # who ends before the others have failed too would end them
    return "nothing", ""


@pytest.mark.ci
@pytest.mark.parametrize("limited", [0, 1, 2])
@pytest.mark.parametrize("exists", [False, True])
def test_when_one_rank_cannot_write_all_raise_and_nothing_is_left(limited, exists, save, tmp_path):
    folder, out = save("llama"), tmp_path / "place" / "out"
    out.parent.mkdir()
    if exists:
        save_model(out, one_device(folder), None)
    before = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    for kind, sentence in run_ranks(3, try_to_write, folder, out, limited, None):
        assert kind == "UserError"
        says(sentence)
    assert {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()} == before
    assert {path.name for path in out.parent.iterdir()} == ({"out"} if exists else set())


def test_when_the_main_rank_refuses_all_raise(save, tmp_path):
    folder, out = save("llama"), tmp_path / "place"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for kind, sentence in run_ranks(2, try_to_write, folder, out, None, None):
        assert kind == UserError.__name__
        says(sentence)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    assert {path.name for path in tmp_path.iterdir()} == {"place", "base-llama"}


def test_when_the_main_rank_fails_at_last_all_raise_and_nothing_is_left(save, tmp_path):
    folder, out = save("llama"), tmp_path / "place" / "out"
    for kind, _ in run_ranks(2, try_to_write, folder, out, None, "save_pretrained"):
        assert kind == "TypeError"
    assert list(out.parent.iterdir()) == []
