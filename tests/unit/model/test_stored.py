"""Folders whose weights are not there, or not as they should be: what is there is named."""

import json
import shutil

import pytest
import torch
from golden import refuses
from loading import load
from model_folders import plain
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer

from meshtune.data.example import Source
from meshtune.data.files import files
from meshtune.errors import UserError
from meshtune.model.files import weight_files
from meshtune.model.load import load_config, load_tokenizer
from meshtune.model.stored import scales

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n"


def read(folder):
    return load(str(folder), dtype=torch.float32, attention="eager")


def rewrite(folder, change):
    """Store `change(tensors)` instead of a model's tensors."""
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file, {"format": "pt"})


def in_type(dtype):
    def change(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        return tensors | {name: tensors[name].to(torch.uint8).view(getattr(torch, dtype))}

    return change


def with_more(*endings, of="model.layers.0.mlp.up_proj."):
    return lambda tensors: tensors | {of + ending: torch.ones(2) for ending in endings}


QUANTISED = {
    "F8_E4M3": in_type("float8_e4m3fn"),
    "F8_E5M2": in_type("float8_e5m2"),
    "F8_E8M0": in_type("float8_e8m0fnu"),
    "I8": in_type("int8"),
    "scales": with_more("weight_scale_inv"),
    "block scales": with_more("weight_scale", "weight_scale_2", "input_scale"),
    "MLX": with_more("scales", "biases"),
    "GPTQ": with_more("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": with_more("weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "zero points": with_more("weight_zero_point"),
    "ModelOpt": with_more("weight_quantizer._amax"),
}


@pytest.mark.parametrize("change", QUANTISED.values(), ids=QUANTISED)
def test_quantised_tensors_are_refused(change, save):
    rewrite(folder := save("llama"), change)
    with refuses(UserError):
        read(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}),
        ("config.json", {"compression_config": {"format": "nvfp4-pack-quantized"}}),
        ("config.json", {"quantization_config": {"quant_method": "hqq"}}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
        ("quantize_config.json", {"bits": 4}),
    ],
)
def test_a_file_that_names_a_quantisation_is_refused(file, content, save):
    path = save("llama") / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | content))
    with refuses(UserError):
        read(path.parent)


def test_positions_masks_and_scales_of_other_things_are_no_quantisation(save):
    folder = save("llama")
    own = "model.layers.0.self_attn."
    more = {
        "model.position_ids": torch.arange(4),
        "logit_scale": torch.ones(1),
        f"{own}k_scale": torch.ones(1),
        f"{own}k_proj.output_scale": torch.ones(1),
        "model.embed_tokens.embed_scale": torch.ones(1),
        "model.norm.scale": torch.ones(1),
        "model.norm.scale_shift_table": torch.ones(2),
    }
    rewrite(folder, lambda tensors: tensors | more | {f"{own}masked_bias": torch.ones(2, dtype=torch.bool)})
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    read(folder)
    assert not scales(["layers.0.layer_scale", "norm.scale"], {"F32": {"layers.0.attn.weight"}})
    assert scales(["mlp.up_proj._scale"], {"I8": {"mlp.up_proj._data"}})


def shards(folder, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(names):
        save_file({key: tensors[key] for key in [*tensors][number :: len(names)]}, folder / name)


def test_shards_without_an_index_are_read_together(save, ids):
    folder = save("llama")
    expected = plain(folder)(ids).logits
    shards(folder)
    shutil.copy(folder / weight_files(folder)[0].name, folder / "consolidated.safetensors")
    assert torch.equal(read(folder).eval()(ids).logits, expected)
    assert not (folder / "model.safetensors.index.json").exists()


INSTEAD = {
    "a shard is missing": ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"],
    "shards of two models": ["model-00001-of-00001.safetensors", "other-00001-of-00001.safetensors"],
    "another name": ["weights.safetensors"],
    "an adapter alone": ["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"],
    "an adapter and a pickle": ["adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin"],
    "several": ["a.safetensors", "b.safetensors"],
    "the makers' format": ["consolidated.safetensors", "params.json"],
    "its pickle": ["consolidated.00.pth", "params.json"],
    "its shards": ["consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"],
    "a pickle and states": ["pytorch_model.bin", "optimizer.pt", "training_args.bin"],
    "tensorflow": ["tf_model.h5"],
    "a folder inside": ["checkpoint-5/model.safetensors", "checkpoint-5/config.json"],
    "weights without their configuration": ["original/consolidated.00.pth", "checkpoint-5/optimizer.pt"],
    "DeepSpeed": ["zero_to_fp32.py", "latest", "global_step5/mp_rank_00_model_states.pt"],
    "FSDP": ["pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"],
    "a download that did not end": ["model.safetensors.incomplete"],
    "states alone": ["optimizer.pt", "rng_state.pth"],
}


@pytest.mark.parametrize("names", INSTEAD.values(), ids=INSTEAD)
def test_weights_that_are_not_read_are_named(names, save):
    (folder := save("llama")).joinpath("model.safetensors").unlink()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"base_model_name_or_path": "base"}')
    with refuses(UserError) as caught:
        read(folder)
    assert ("model.init=random" in str(caught.value)) == (names == INSTEAD["states alone"])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "policy."])
def test_a_prefix_of_all_names_is_named(prefix, save):
    rewrite(folder := save("llama"), lambda tensors: {prefix + name: t for name, t in tensors.items()})
    with refuses(UserError):
        read(folder)


def test_the_prefix_that_transformers_strips_is_no_matter(save, ids):
    folder = save("llama")
    expected = plain(folder)(ids).logits
    rewrite(folder, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()})
    assert torch.equal(read(folder).eval()(ids).logits, expected)


def test_a_wrapper_inside_of_names_is_named(save):
    def change(tensors):
        return {name.replace(".0.mlp", ".0._orig_mod.mlp"): tensor for name, tensor in tensors.items()}

    rewrite(folder := save("llama"), change)
    with refuses(UserError):
        read(folder)


def test_tensors_that_zero3_left_empty_are_named(save):
    rewrite(folder := save("llama"), lambda tensors: tensors | {"model.norm.weight": torch.empty(0)})
    with refuses(UserError):
        read(folder)


READERS = {
    "config.json": lambda folder: load_config(str(folder)),
    "tokenizer.json": lambda folder: load_tokenizer(str(folder)),
    "model.safetensors": read,
    "rows.jsonl": lambda folder: files(Source(str(folder / "rows.jsonl"))),
    "part.parquet": lambda folder: files(Source(str(folder / "data"))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named(name, save):
    folder = save("llama")
    make_tokenizer(["a"], 270).save_pretrained(folder)
    (folder / "data").mkdir()
    at = folder / "data" if name == "part.parquet" else folder
    (at / name).write_text(POINTER)
    with refuses(UserError):
        READERS[name](folder)


def link_to_nothing(file):
    file.symlink_to("../../blobs/1234")


IN_ITS_PLACE = {
    "a link to nothing": ("model.safetensors", link_to_nothing),
    "an error of a server": ("model.safetensors", b"Entry not found"),
    "a web page": ("config.json", b"<!DOCTYPE html><html>Log in</html>"),
    "torch.save": ("model.safetensors", b"PK\3\4\0\0\10\10" + bytes(20)),
    "gzip": ("rows.jsonl", b"\x1f\x8b\x08\0\0\0"),
    "UTF-16": ("rows.jsonl", "{}".encode("utf-16")),
    "parquet": ("rows.jsonl", b"PAR1\x15\0"),
    "git-annex": ("rows.jsonl", b"/annex/objects/MD5E-s5--0123.jsonl\n"),
    "a link in a folder": ("part.parquet", link_to_nothing),
}


@pytest.mark.parametrize(("name", "content"), IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
def test_a_file_of_another_kind_is_named(name, content, save):
    folder = save("llama")
    (folder / "data").mkdir()
    file = (folder / "data" if name == "part.parquet" else folder) / name
    file.unlink(missing_ok=True)
    content(file) if callable(content) else file.write_bytes(content)
    with refuses(UserError):
        READERS[name](folder)


def test_a_header_that_begins_as_another_kind_of_file_does_is_read(save, ids):
    folder = save("llama")
    content = (folder / "model.safetensors").read_bytes()
    old, length = int.from_bytes(content[:8], "little"), 0x088B1F  # as gzip begins
    header = content[8 : 8 + old].ljust(length)
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + content[8 + old :])
    read(folder)


def test_weights_that_are_pointers_do_not_matter_where_they_are_not_read(save):
    folder = save("llama")
    (folder / "model.safetensors").write_text(POINTER)
    load_config(str(folder))
    load(str(folder), init="random", dtype=torch.float32, attention="eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_unlike_tensors_that_the_configuration_ties_are_named(family, save, ids):
    """transformers leaves them apart; so does the override that the sentence names."""
    folder = save(family)
    head = next(name for name, _ in plain(folder).named_parameters() if "embed" in name or "wte" in name)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors[head].clone()})
    model = read(folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight  # two equal ones are one
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors[head] + 0.1 * tensors[head].flip(0)})
    with refuses(UserError):
        read(folder)
    untied = {"tie_word_embeddings": False}
    model = load(str(folder), dtype=torch.float32, attention="eager", overrides=untied).eval()
    assert torch.equal(model(ids).logits, plain(folder)(ids).logits)
    assert not model.config.tie_word_embeddings
