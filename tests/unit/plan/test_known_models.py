"""models.toml against what transformers builds of it; plans of models whose config.json is not at hand."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cases import cases
from golden import refuses, says
from huggingface_hub import constants
from known import known

from meshtune import config
from meshtune.api.model_file import model_file
from meshtune.api.plan import longest_sequences, workloads
from meshtune.commands.env import environment
from meshtune.commands.plan import largest as max_command
from meshtune.commands.plan import plan as command
from meshtune.errors import NothingFits, UserError
from meshtune.model import hub
from meshtune.model.census_cache import LoraShape, Variant, build_and_count, inputs_of, shipped
from meshtune.model.load import on_meta, read_config
from meshtune.plan import models as module
from meshtune.plan.cluster import cluster_for
from meshtune.plan.models import known_config, typical_config, typical_parameters
from meshtune.plan.search import search
from meshtune.plan.workload import Workload

ENTRIES = module.tables()
LLAMA = "meta-llama/Llama-3.1-8B"
WHOLE, ADAPTED = Variant(), Variant(lora=LoraShape())
# Whole config.json files of the hub, from memory: with all the fields that models.toml leaves out.
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "EleutherAI/pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8,
        "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "meta-llama/Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "google/gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
        "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
        "use_cache": True, "vocab_size": 256000,
    },
}  # fmt: skip


def written(fields: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return file


def parameters_of(fields: dict[str, Any], folder: Path) -> int:
    model = on_meta(read_config(written(fields, folder), "known", False), name="known")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", cases(ENTRIES, test=["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-270m", "pythia-70m"])
)
def test_a_known_shape_has_the_parameters_that_transformers_builds(name: str, tmp_path: Path) -> None:
    fields = known_config(name)
    assert fields is not None
    assert parameters_of(fields, tmp_path) == ENTRIES[name]["parameters"]


ONE_OF_EACH = {  # the smallest, by model type
    entry["config"]["model_type"]: name
    for name, entry in sorted(ENTRIES.items(), key=lambda item: -item[1]["parameters"])
}


@pytest.mark.parametrize("name", cases(ONE_OF_EACH.values(), ci=["gpt-2"]))
def test_a_model_of_each_family_is_planned_with_all_its_parameters(name: str, tmp_path: Path) -> None:
    fields = known_config(name)
    assert fields is not None
    file = written(fields, tmp_path)
    numbers, adapted = (build_and_count(name, file, variant) for variant in (WHOLE, ADAPTED))
    assert numbers.census.unsupported is None
    assert numbers.census.total == ENTRIES[name]["parameters"]
    # scripts/model_counts.py writes what is shipped.
    assert shipped(inputs_of(file, WHOLE)) == numbers and shipped(inputs_of(file, ADAPTED)) == adapted
    assert numbers.census.sparse == any(field.endswith("_experts") for field in fields)


# As their authors give them, in billions; DeepSeek's 37 are without embedding and head.
@pytest.mark.parametrize(
    ("name", "used"),
    cases([("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("olmoe-1b-7b", 1.3), ("deepseek-v3", 37.6)],
          ci=[("olmoe-1b-7b", 1.3)]),
)  # fmt: skip
def test_a_mixture_uses_as_many_parameters_as_published(name: str, used: float, tmp_path: Path) -> None:
    fields = known_config(name)
    assert fields is not None
    counted = build_and_count(name, written(fields, tmp_path), WHOLE).census
    assert (counted.total - counted.idle) / 1e9 == pytest.approx(used, abs=0.06)


def test_the_most_used_models_are_known_by_their_hub_names() -> None:
    assert len(ENTRIES) >= 60
    names = Counter(
        name.lower()
        for short, entry in ENTRIES.items()
        for name in (short, *entry["hub"], *entry.get("differing", ()))
    )
    assert names.most_common(1)[0][1] == 1
    for name in (LLAMA, "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.3", "google/gemma-3-27b-it", "gpt2"):
        assert known_config(name) and known_config(name.upper()) == known_config(name)
    assert known_config("Qwen/Qwen2.5-7B-Instruct")["max_position_embeddings"] == 32768  # type: ignore[index]
    assert known_config("someone/else") is None
    for entry in ENTRIES.values():
        assert re.match(r"litgpt \S|megatron-bridge \S|recalled$", entry["source"])


def test_the_docs_count_the_shapes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert f"`plan/models.toml` has {len(ENTRIES)} shapes under some 300\nnames" in page
    names = sum(len(entry["hub"]) + len(entry.get("differing", ())) for entry in ENTRIES.values())
    assert 280 <= names <= 320


@pytest.mark.parametrize("name", cases(HUB_CONFIGS, ci=["EleutherAI/pythia-70m"]))
def test_the_plan_of_a_known_shape_is_that_of_the_config_on_the_hub(name: str, tmp_path: Path) -> None:
    folder = written(HUB_CONFIGS[name], tmp_path / "model").parent

    def workload(model: Path | str) -> Workload:
        settings = config.load(None, [f"model.name={model}", f"data.cache={tmp_path}"])
        with workloads(settings) as (found, _):
            return found

    offline, online = workload(name), workload(folder)
    assert (offline.work, offline.traits) == (online.work, online.traits)
    assert "plan/models.toml" in offline.notes[0] and not online.notes


# the hub #


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A hub on this machine: `code` and `error` of its answer, `requests` for models that it has got."""
    state: dict[str, Any] = {"code": 503, "error": "", "requests": 0}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            state["requests"] += not self.path.startswith("/api/")  # the client asks for itself once a day
            self.send_response(state["code"])
            self.send_header("X-Error-Code", state["error"])
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield state
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        (503, "", "can't be reached"),
        (403, "GatedRepo", "the model is gated"),
        (401, "GatedRepo", "the model is gated"),
        (404, "RepoNotFound", "none of that name that you may read"),
    ],
)
def test_a_hub_that_gives_nothing_is_asked_once(
    code: int, error: str, reason: str, answers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    answers |= {"code": code, "error": error}
    with model_file(LLAMA) as (file, notes):
        assert json.loads(file.read_text())["hidden_size"] == 4096
    assert answers["requests"] == 1 and not caplog.records
    assert len(notes) == 1 and LLAMA in notes[0] and reason in notes[0] and "plan/models.toml" in notes[0]


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.PATIENCE < 3
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: time.sleep(600))
    with model_file(LLAMA) as (_, notes):
        says(notes[0])


def test_a_model_that_nobody_knows_is_answered_with_what_works(answers: dict[str, Any]) -> None:
    for name in ("someone/else", "someone/else-9-70b", "meta-lama/llama-3.1-8B", "meta-llama/Llama-3.3-70B"):
        with refuses(UserError), model_file(name):
            pass
    assert answers["requests"] == 4


@pytest.mark.ci
def test_each_model_is_listed_with_the_longest_sequence_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {
        name: ENTRIES[name] for name in ("qwen3-8b", "olmoe-1b-7b", "gpt-2", "pythia-70m", "llama-3.1-70b")
    }
    for place in ("api.plan", "plan.models", "report.plan.documents"):
        monkeypatch.setattr(f"meshtune.{place}.tables", lambda: few)
    words = ["cluster.gpu=rtx-4090", "train.global_batch_size=8", "method=lora", "lora.r=64"]
    max_command(words[0], words[1:])
    says(capsys.readouterr().out)
    max_command(None, words, as_json=True)
    shown = capsys.readouterr()
    first = json.loads(shown.out)["models"][1]
    assert (first["download"], first["full"], first["lora"]) == ("Qwen/Qwen3-8B", None, 8192)
    assert "lora.r=16" in shown.err
    cluster = cluster_for(config.load(None, ["model.name=any", *words]))
    for length, fits in ((8192, True), (16384, False)):
        planned = search(replace(known("qwen3-8b", *words), seq_len=length), cluster)
        assert bool(len(planned)) == fits
    with refuses(NothingFits):
        longest_sequences(config.load(None, ["model.name=any", "cluster.gpu=l4", "cluster.memory_gib=0.2"]))


def test_what_plan_knows_env_knows(answers: dict[str, Any]) -> None:
    assert environment("qwen3-8b")["type"] == "qwen3"


# models that do not exist #


@pytest.mark.parametrize(
    ("parameters", "hidden", "layers", "ffn"),
    [(8.03e9, 4096, 32, 14336), (13e9, 5120, 40, 14848), (70.55e9, 8192, 76, 30464)],
)
def test_a_typical_llama_has_the_proportions_of_published_ones(
    parameters: float, hidden: int, layers: int, ffn: int
) -> None:
    fields, sentence = typical_config(parameters)
    sizes = (fields["hidden_size"], fields["num_hidden_layers"], fields["intermediate_size"])
    assert sizes == (hidden, layers, ffn)
    assert f"{layers} layers, hidden size {hidden:,}, MLP {ffn:,}" in sentence


@pytest.mark.parametrize(
    "parameters", cases([1e8, 1.3e8, 5e8, 2e9, 3.9e9, 4e9, 2e10, 1e12, 1e13], test=[1.3e8, 5e8, 4e9])
)
def test_a_typical_llama_has_as_many_parameters_as_asked_for(parameters: float, tmp_path: Path) -> None:
    fields, _ = typical_config(parameters)
    assert parameters_of(fields, tmp_path) == pytest.approx(parameters, rel=0.012)
    heads = fields["num_attention_heads"]
    assert heads % fields["num_key_value_heads"] == 0
    assert fields["hidden_size"] < 4096 or heads % 8 == 0


@pytest.mark.parametrize(
    ("text", "number"), [("13e9", 13e9), ("13B", 13e9), ("1.5b", 1.5e9), ("350M", 350e6), ("1T", 1e12)]
)
def test_numbers_of_parameters_are_read(text: str, number: float) -> None:
    assert typical_parameters(f"typical-llama-{text}") == number
    assert typical_parameters("meta-llama/Llama-3.1-8B") is None


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["model.name=x"], {"params": "13B"}),
        ([], {"params": "many"}),
        ([], {"params": "13"}),
        (["cluster.gpu=h100-sxm"], {"params": "1e30"}),
    ],
)
def test_what_params_can_not_mean_is_refused(words: list[str], options: dict[str, Any]) -> None:
    with refuses(UserError):
        command([*words, "cluster.gpu=h100-sxm"], top=1, **options)


@pytest.mark.ci
def test_params_are_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command([f"data.cache={tmp_path}", "cluster.gpu=h100-sxm"], params="125M", top=1, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == "typical-llama-125M"
    assert found["model"]["parameters"] == pytest.approx(125e6, rel=0.012)
    says(found["notes"][0])
