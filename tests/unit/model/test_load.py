import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from families import FAMILIES, FAMILY_CASES
from golden import refuses
from loading import load
from model_folders import plain
from tiny import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

import meshtune.model.files as module
import meshtune.model.load as load_module
from meshtune.data.tokens import id_bound
from meshtune.errors import UserError
from meshtune.model.files import generation_config, stop_tokens
from meshtune.model.load import freeze, grow_embeddings, load_config, load_tokenizer
from meshtune.train.model import ModelSpec, single_model


@pytest.mark.parametrize("family", FAMILY_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_equals_transformers_in_every_parameter_and_buffer(family, dtype, save):
    folder = save(family)
    ours, theirs = load(str(folder), dtype=dtype, attention="eager"), plain(folder, dtype)
    assert ours.training
    for mine, other in (
        (ours.named_parameters, theirs.named_parameters),
        (ours.named_buffers, theirs.named_buffers),
    ):
        mine, other = dict(mine(remove_duplicate=False)), dict(other(remove_duplicate=False))
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].dtype == other[name].dtype, name
            assert torch.equal(mine[name], other[name]), name
            if "inv_freq" in name:
                assert mine[name].dtype == torch.float32
    assert all(parameter.dtype == dtype for parameter in ours.parameters())
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == ours.config.tie_word_embeddings


def test_fp64_and_bf16_files_load_straight_to_the_wanted_dtype(save):
    folder = save("llama", dtype=torch.bfloat16)
    assert load(str(folder), dtype=torch.float64, attention="eager").dtype == torch.float64
    assert load_config(str(folder)).dtype == torch.bfloat16


def test_checkpoints_whose_tensor_names_have_changed_since_load_right(tmp_path, ids):
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), dtype=torch.float32, attention="eager").eval()
    model.set_attn_implementation("eager")
    assert torch.equal(loaded(ids).logits, model(ids).logits)


PRECISION = {"float32": "fp32", "bfloat16": "bf16-pure", "4 bits": "bf16-pure"}


@pytest.mark.all
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "4 bits"])
def test_loading_takes_little_more_anonymous_memory_than_the_model(stored, wanted, tmp_path):
    """In 4 bits, one matrix more in wider numbers; all that are not quantised yet would make it 1.7 times."""
    more, bound = (", lora=LoraSpec(r=4), quantise='bfloat16'", 1.35) if wanted == "4 bits" else ("", 1.1)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=1024, intermediate_size=2048, num_hidden_layers=5,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=stored).save_pretrained(tmp_path)  # 78 M parameters
    script = f"""
        import re, threading, time, torch
        from meshtune.train.model import LoraSpec, ModelSpec, single_model
        torch.set_num_threads(1)
        anonymous = lambda: 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
        before, samples, done = anonymous(), [], threading.Event()
        def watch():
            while not done.wait(0.001):
                samples.append(anonymous())
        thread = threading.Thread(target=watch)
        thread.start()
        spec = ModelSpec(source={str(tmp_path)!r}, precision={PRECISION[wanted]!r}, attention="eager"{more})
        model = single_model(spec, torch.device("cpu"))
        done.set(), thread.join()
        print((max(samples) - before) / sum(p.nbytes for p in model.parameters()), len(samples))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    ratio, samples = map(float, run.stdout.split())
    assert samples > 20
    assert 0.9 <= ratio <= bound  # a ratio near 0 would mean weights that are still a mapping of the file


def test_weights_do_not_change_when_their_file_is_rewritten(save):
    folder = save("llama")
    model = load(str(folder), dtype=torch.float32, attention="eager")
    before = model.model.norm.weight.clone()
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(b"\0" * file.stat().st_size)
    assert torch.equal(model.model.norm.weight, before)


def test_weights_for_another_device_are_not_copied_on_the_cpu_first(save, monkeypatch):
    folder = save("llama")
    clone = torch.Tensor.clone

    def cloned(tensor, **options):
        assert tensor.ndim < 2, "copied"
        return clone(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    assert load(str(folder), dtype=torch.float32, device="meta", attention="eager").device.type == "meta"


def test_random_weights_are_a_function_of_the_seed_and_need_only_a_configuration(tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    first, again, other = (
        load(str(tmp_path), init="random", dtype=torch.float32, attention="eager", seed=seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    with refuses(UserError):
        load(str(tmp_path), dtype=torch.float32, attention="eager")


class Canary:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the canary sang')",))


def test_a_pickle_is_refused_with_the_remedy_and_never_read(save):
    folder = save("llama")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Canary()}, folder / "pytorch_model.bin")
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


@pytest.mark.parametrize(
    "files",
    [
        ["config.json", "pytorch_model.bin"],
        ["config.json", "model.gguf"],
        ["config.json", "other/pytorch_model.bin"],
        OSError("no network"),
    ],
)
def test_a_hub_id_without_safetensors_is_told_what_it_has_instead(files, tmp_path, monkeypatch):
    FAMILIES["llama"]().save_pretrained(tmp_path)

    def list_repo_files(self, name, revision=None):
        if isinstance(files, Exception):
            raise files
        return files

    monkeypatch.setattr(module, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr(module.HfApi, "list_repo_files", list_repo_files)
    with refuses(UserError):
        load("some/old", dtype=torch.float32, attention="eager")
    assert load("some/old", init="random", dtype=torch.float32, attention="eager")


@pytest.mark.parametrize(
    "name", ["../away.safetensors", "/tmp/away.safetensors", "link.safetensors", "away.bin"]
)
def test_an_index_that_points_outside_its_folder_is_refused(name, save, tmp_path):
    folder = save("llama")
    (folder / "model.safetensors").rename(tmp_path / "away.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "away.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"x": name}})
    )
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


def test_sharded_folders_load_and_an_incomplete_one_is_named(save, tmp_path):
    plain(save("llama")).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    load(str(tmp_path / "sharded"), dtype=torch.float32, attention="eager")
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    with refuses(UserError):
        load(str(tmp_path / "sharded"), dtype=torch.float32, attention="eager")


def test_missing_and_misshapen_tensors_are_errors(save):
    from safetensors.torch import load_file, save_file

    folder = save("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(8, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value, save):
    from safetensors.torch import load_file, save_file

    folder = save("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


def test_weights_stored_as_integers_are_named(save):
    from safetensors.torch import load_file, save_file

    folder = save("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with refuses(UserError):
        load(str(folder), dtype=torch.float32, attention="eager")


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"eos_token_id": "end"}', '{"eos_token_id": [1, -2]}', '{"output_attentions": true}'],
)
def test_a_broken_generation_config_is_named(text, save):
    folder = save("llama")
    (folder / "generation_config.json").write_text(text)
    whole = lambda: load(str(folder), dtype=torch.float32, attention="eager")  # noqa: E731
    for read in (lambda: stop_tokens(str(folder)), whole):
        with refuses(UserError):
            read()


@pytest.mark.parametrize(
    "text",
    ['{"min_p": 0.05}', '{"typical_p": 0.9}', '{"epsilon_cutoff": 3e-4, "do_sample": false}', '{"top_k": 5}'],
)
def test_a_generation_config_that_is_read_can_be_written(text, save):
    """The settings that an export writes after the last step are checked before the first."""
    folder = save("llama")
    (folder / "generation_config.json").write_text(text)
    model = load(str(folder), dtype=torch.float32, attention="eager")
    generation_config(model, [5]).save_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is True


CONFIGS = {
    "no `model_type`": {"hidden_size": 64},
    "names no `model_type`": {"model_type": ["llama"]},
    "can't read": {"model_type": "zork"},
    "brings its own Python code": {"model_type": "zork", "auto_map": {"AutoConfig": "code.Config"}},
    "encoder-decoder": {"model_type": "t5"},
    "not a causal language model": {"model_type": "clip"},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_bad_configurations_are_explained(message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[message]))
    (tmp_path / "code.py").write_text("raise SystemExit('the canary sang')")
    with refuses(UserError):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", -1),
        ("vocab_size", -1),
        ("head_dim", 2**63),
        ("hidden_size", 10**9),
        ("num_hidden_layers", 10**9),
        ("attention_dropout", 1e9),
        ("dtype", True),
        ("_attn_implementation", []),
    ],
)
def test_absurd_values_of_a_configuration_are_named(name, value, tmp_path):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with refuses(UserError):
        load_config(str(tmp_path))


def test_a_tokenizer_whose_library_panics_is_explained(save, monkeypatch):
    class PanicException(BaseException):
        """Named as the exception with which a library in Rust fails."""

    def panics(*_, **__):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(load_module.AutoTokenizer, "from_pretrained", panics)
    with refuses(UserError):
        load_tokenizer(str(save("llama")))


@pytest.mark.ci
def test_a_large_vocabulary_that_is_a_list_has_no_far_ids(save):
    """Unigram's tokens have their places as ids, and special tokens the ids behind them."""
    folder = save("llama")
    vocabulary = [["<unk>", 0.0], *([f"t{number}", -float(number)] for number in range(120_000))]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    last = {"id": 120_001, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}  # fmt: skip
    plain = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    tree = {"version": "1.0", **plain, "added_tokens": [last], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert len(load_tokenizer(str(folder))) == 120_002


def test_an_id_far_beyond_the_vocabulary_is_named(save):
    folder = save("llama")
    make_tokenizer(["a"], 270).save_pretrained(folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"]["vocab"]["a"] = 2**31 - 1
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with refuses(UserError):
        load_tokenizer(str(folder))


def test_a_pipe_in_a_models_folder_is_named(save):
    folder = save("llama")
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with refuses(UserError):
        load_config(str(folder))


def test_a_folder_that_is_no_model_is_explained(tmp_path):
    with refuses(UserError):
        load_config(str(tmp_path))
    with refuses(UserError):
        load_config("./nothing")
    with refuses(UserError):
        load_config("nobody/nothing")
    with refuses(UserError):
        load_tokenizer(str(tmp_path))


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "cohere"])
def test_added_tokens_get_the_mean_of_the_rows_on_both_sides(family, save, tokenizer, ids):
    folder, needed = save(family), id_bound(tokenizer)
    short = plain(folder)
    before, rows = short(ids).logits, short.get_input_embeddings().weight
    head = short.get_output_embeddings().weight
    spec = ModelSpec(source=str(folder), precision="fp32", attention="eager", embeddings=needed)
    model = single_model(spec, torch.device("cpu")).eval()
    assert model.config.vocab_size == needed == 258
    torch.testing.assert_close(model(ids).logits[..., :256], before)
    for table, old in (
        (model.get_input_embeddings().weight, rows),
        (model.get_output_embeddings().weight, head),
    ):
        torch.testing.assert_close(table[256:], old.mean(dim=0).expand(2, -1))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert grow_embeddings(model, needed) == 0


def test_embeddings_never_shrink(save, tokenizer):
    model = load(str(save("llama", vocab_size=300)), dtype=torch.float32, attention="eager")
    assert grow_embeddings(model, id_bound(tokenizer)) == 0
    assert model.config.vocab_size == 300


def test_freezing_by_pattern_names_what_it_froze(save):
    model = load(str(save("llama")), dtype=torch.float32, attention="eager")
    frozen = freeze(model, ["model.layers.0.*", "*norm*"])
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters()} - set(frozen)
    assert not any("norm" in name or ".layers.0." in name for name in trainable)
    with refuses(UserError):
        freeze(model, ["model.layer.0.*"])
    with refuses(UserError):
        freeze(model, ["*"])
