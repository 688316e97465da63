"""Plans in other tools' configurations: each file is read by that tool's own parser, and the degrees and the
batch that it understands are the layout's. Cases for a tool are collected only where it is installed; the
text is checked without it as well.
"""

import ast
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from golden import refuses, says

from meshtune.config import Config, load
from meshtune.data import rows
from meshtune.errors import UserError
from meshtune.launch.allocator import SETTING
from meshtune.layout import Layout
from meshtune.plan.hardware import attention_kernels
from meshtune.plan.programs import TOOLS
from meshtune.tools import planned as shared
from meshtune.tools import rules as layout_rules
from meshtune.tools.export import EXPORTERS, Exported, export
from meshtune.tools.planned import stage_layers

COLUMNS = "data.columns={prompt: question, completion: answer}"
PARALLEL = {  # what each tool runs; gpus_per_node is 8
    "accelerate": """
        mb1-ga1 mb4-ga2-full dp2-mb2-ga4 dp8-mb1-ga2 zero2x4-mb2-ga2 zero2x8-mb1-ga4
        zero3x8-mb2-ga4-full dp2-zero3x4-mb1-ga2 dp4-zero2x8-mb1-ga1 tp2-mb2-ga2 tp4-mb1-ga2
        zero3x4-tp2-mb1-ga2 dp2-zero3x2-tp2-mb1-ga1 cp2-mb1-ga4 zero3x4-cp2-mb1-ga2
        zero3x2-cp2-tp2-mb1-ga2 zero3x64-mb1-ga1
    """,
    "deepspeed": """
        mb1-ga1 mb4-ga2-full dp2-mb2-ga4 dp8-mb1-ga2 zero1x4-mb2-ga2 zero2x8-mb1-ga4
        zero3x8-mb2-ga4-full zero3x16-mb1-ga2 tp2-mb2-ga2 dp2-tp4-mb1-ga2 zero1x4-tp2-mb1-ga2
        zero2x4-tp2-mb1-ga2 ulysses2-mb1-ga4 zero3x4-ulysses2-mb1-ga2 dp2-ulysses4-mb1-ga2
    """,
    "torchtitan": """
        mb1-ga1 mb4-ga2-full dp2-mb2-ga4 zero2x4-mb2-ga2-selective zero2x8-mb1-ga4
        zero3x8-mb2-ga4-full dp2-zero3x4-mb1-ga2 tp4-sp-mb1-ga2 zero3x4-tp2-sp-mb1-ga2
        cp2-mb1-ga4 zero3x2-cp2-tp2-sp-mb1-ga2 pp2-gpipe-mb2-ga4 pp4-1f1b-mb1-ga8
        pp2-interleaved1f1b-v2-mb1-ga4 pp2-loopedbfs-v2-mb1-ga4 pp2-zb-v2-mb2-ga4 pp2-zbv-mb1-ga4
        pp2-dualpipev-mb1-ga8 dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full
        pp4-interleaved1f1b-v4-mb1-ga8 pp8-interleaved1f1b-v8-mb1-ga8 pp16-1f1b-mb1-ga16
    """,
    "megatron": """
        mb1-ga1 mb1-ga8-full dp2-mb1-ga4 zero1x4-mb1-ga2 dp2-zero1x4-mb1-ga2-attention
        zero2x8-mb1-ga4 zero3x8-mb1-ga4 dp2-zero3x4-mb1-ga2 tp4-sp-mb1-ga2
        zero1x2-tp2-sp-pp2-1f1b-mb1-ga8-full cp2-mb1-ga4 ulysses2-tp2-mb1-ga4
        pp4-interleaved1f1b-v2-mb1-ga8 pp4-1f1b-mb1-ga4 pp8-1f1b-mb1-ga8
        zero3x2-cp2-tp2-mb1-ga2 zero1x16-mb1-ga2 tp4-sp-pp4-interleaved1f1b-v5-mb1-ga8
        zero1x4-cp2-tp4-sp-pp16-interleaved1f1b-v2-mb1-ga16-full pp16-1f1b-mb1-ga16
    """,
    "axolotl": """
        mb1-ga1 mb4-ga2-full dp2-mb2-ga4 dp16-mb1-ga2-selective zero2x4-mb2-ga2 zero2x8-mb1-ga4
        zero3x8-mb2-ga4-full dp2-zero3x4-mb1-ga2 tp2-mb2-ga2 zero3x4-tp2-mb1-ga2
        dp2-zero3x2-tp2-mb1-ga1 cp2-mb1-ga4 zero3x4-cp2-mb1-ga2 zero3x2-cp2-tp2-mb1-ga2
    """,
    "llamafactory": """
        mb1-ga1 mb4-ga2-full dp2-mb2-ga4 dp8-mb1-ga2 zero1x4-mb2-ga2 zero2x8-mb1-ga4
        zero3x8-mb2-ga4-full zero3x16-mb1-ga2 tp2-mb2-ga2 dp2-tp4-mb1-ga2
        zero1x4-tp2-mb1-ga2 zero2x4-tp2-mb1-ga2
    """,
}
BLOCKS = 61  # layers of the model, but for the layouts whose stages these can't fill
OTHER_BLOCKS = {
    "pp4-interleaved1f1b-v2-mb1-ga8": 126,
    "tp4-sp-pp4-interleaved1f1b-v5-mb1-ga8": 80,
    "zero1x4-cp2-tp4-sp-pp16-interleaved1f1b-v2-mb1-ga16-full": 126,
    "pp8-interleaved1f1b-v8-mb1-ga8": 126,
    "pp2-interleaved1f1b-v2-mb1-ga8-full3": 80,
}
CASES = [(tool, layout) for tool, layouts in PARALLEL.items() for layout in layouts.split()]


def config(layout: Layout, *settings: str) -> Config:
    columns = [] if any(setting.startswith("data.columns=") for setting in settings) else [COLUMNS]
    return load(
        overrides=[
            "model.name=Qwen/Qwen3-0.6B", "data.train=train.jsonl", *columns, "train.max_steps=100",
            f"train.global_batch_size={layout.global_batch_size}", *settings,
        ]
    )  # fmt: skip


def exported(tool: str, text: str, *settings: str, blocks: int | None = None) -> Exported:
    layout, blocks = Layout.parse(text), blocks or OTHER_BLOCKS.get(text, BLOCKS)
    return export(tool, config(layout, *settings), layout, blocks=blocks, gpus_per_node=8)


def written(tool: str, text: str, *settings: str) -> dict[str, Any]:
    """The tool's own file; accelerate's is the one of the script's arguments."""
    files = exported(tool, text, *settings).files
    if tool == "deepspeed":
        return json.loads(files["deepspeed.json"])
    return yaml.safe_load(files["training_arguments.yaml" if tool == "accelerate" else f"{tool}.yaml"])


class Understood(NamedTuple):
    """Read a tool's files by its own parser."""

    sizes: dict[str, int]  # dp_replicate, dp_shard, cp, tp, pp
    micro_batch_size: int
    accumulation: int  # of micro-batches, in a pipeline or one after another
    data_ranks: int
    bf16: bool
    more: Any = None  # the tool's own object
    stages: int | None = None  # of the whole pipeline; None: the tool does not count them


def sizes(mesh: Any) -> dict[str, int]:
    """Size of each axis of a layout or of a mesh."""
    return {name: getattr(mesh, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}


def accelerates(mesh: Any) -> dict[str, int]:
    """Size of each axis of accelerate's ParallelismConfig."""
    return {name: getattr(mesh, f"{name}_size") for name in ("dp_replicate", "dp_shard", "cp", "tp")} | {
        "pp": 1
    }


def gpus(command: str) -> int:
    """The world that a command starts."""
    per_node = re.search(r"(?:--nproc[-_]per[-_]node |--num_gpus |NPROC_PER_NODE=)(\d+)", command)
    count = re.search(r"(?:--nnodes |--num_nodes |NNODES=)(\d+)", command)
    assert per_node
    return int(per_node[1]) * (int(count[1]) if count else 1)


def saved(result: Exported, folder: Path) -> Path:
    for name, text in result.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


# Reading back, one function per tool -------------------------------------------------------------------


def read_accelerate(result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    from accelerate.commands import launch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments = training_arguments(yaml.safe_load(result.files["training_arguments.yaml"]), folder)
    command = launch.launch_command_parser().parse_args(
        ["--config_file", str(folder / "accelerate.yaml"), "x.py"]
    )
    command, _, _ = launch._validate_launch_command(command)
    world = command.num_processes
    one = world == 1
    environment = prepare_simple_launcher_cmd_env(command)[1] if one else prepare_multi_gpu_env(command)
    for name, value in environment.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
            monkeypatch.setenv(name, value)
    mesh = ParallelismConfig()
    if "ACCELERATE_USE_PARALLELISM_CONFIG" not in environment:
        mesh = ParallelismConfig(dp_replicate_size=world)
    plugin = FullyShardedDataParallelPlugin() if "ACCELERATE_USE_FSDP" in environment else None
    assert mesh.total_size == world
    return Understood(
        sizes=accelerates(mesh),
        micro_batch_size=arguments.per_device_train_batch_size,
        accumulation=arguments.gradient_accumulation_steps,
        data_ranks=mesh.data_parallel_size,
        bf16=environment["ACCELERATE_MIXED_PRECISION"] == "bf16",
        more=(plugin, arguments),
    )


def training_arguments(values: dict[str, Any], folder: Path) -> Any:
    import transformers

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (arguments,) = parser.parse_dict({**values, "use_cpu": True, "output_dir": str(folder)})
    return arguments


@pytest.mark.parametrize(
    ("evaluated", "saved", "best"),
    [("5", "10", True), ("5", "7", False), ("1 epoch", "1 epoch", True), ("1 epoch", "10", False)],
)
def test_a_trainer_accepts_the_intervals_of_keep_best(
    evaluated: str, saved: str, best: bool, tmp_path: Path
) -> None:
    every = (f"eval.every={evaluated}", f"checkpoint.every={saved}")
    values = written("accelerate", "mb1-ga1", "data.eval=held.jsonl", "eval.keep_best=true", *every)
    assert training_arguments(values, tmp_path).load_best_model_at_end is best


def read_deepspeed(result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    return deepspeed_engine(json.loads(result.files["deepspeed.json"]), gpus(result.command), monkeypatch)


def deepspeed_engine(values: dict[str, Any], world: int, monkeypatch: pytest.MonkeyPatch) -> Understood:
    from deepspeed.runtime import config as module

    tp = values.get("tensor_parallel", {}).get("autotp_size", 1)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        module.dist, "get_world_size", lambda: world // tp
    )  # as its engine counts under AutoTP
    engine = module.DeepSpeedConfig(values)
    assert max(1, engine.tensor_parallel_config.autotp_size) == tp
    data_ranks, cp = int(engine.world_size), values.get("sequence_parallel_size", 1)
    stage = int(engine.zero_config.stage)
    micro, accumulation = engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps
    assert engine.train_batch_size == micro * accumulation * data_ranks
    replicas, shards = (1, data_ranks) if stage else (data_ranks, 1)
    return Understood(
        sizes={"dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp, "pp": 1},
        micro_batch_size=micro,
        accumulation=accumulation,
        data_ranks=data_ranks,
        bf16=engine.bfloat16_config.enabled,
        more=stage,
    )


def read_torchtitan(result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "meshtune_torchtitan", raising=False)
    command = shlex.split(result.command)
    settings = ConfigManager().parse_args(command[command.index("--module") :])
    mesh = ParallelDims.from_config(settings.parallelism, gpus(result.command))
    data_ranks, local = mesh.dp_replicate * mesh.dp_shard, settings.training.local_batch_size
    micro = settings.parallelism.pipeline_parallel_microbatch_size if mesh.pp > 1 else local
    schedule = get_schedule_class(settings.parallelism.pipeline_parallel_schedule)
    per_stage = settings.parallelism.pipeline_parallel_layers_per_stage
    stages = mesh.pp * (1 if issubclass(schedule, PipelineScheduleSingle) else 2)
    if per_stage:  # as its pipeline_hf_transformers counts them
        (named,) = re.findall(r'^"""(\S+), written by', result.files["meshtune_torchtitan.py"], re.MULTILINE)
        stages = math.ceil((OTHER_BLOCKS.get(named, BLOCKS) + 2) / per_stage)
    return Understood(
        sizes=sizes(mesh),
        micro_batch_size=micro,
        accumulation=settings.training.global_batch_size // (local * data_ranks) * (local // micro),
        data_ranks=data_ranks,
        bf16=settings.training.mixed_precision_param == "bfloat16",
        more=settings,
        stages=stages if mesh.pp > 1 else 1,
    )


def megatron_flags(result: Exported, folder: Path) -> dict[str, str]:
    """The flags that bash hands on, read from a torchrun that prints them."""
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (folder / "torchrun").chmod(0o755)
    names = dict.fromkeys(re.findall(r"(\w+)=…", result.command), "7")  # what the command asks for, no more
    environment = {**os.environ, **names, "PATH": f"{folder}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "megatron.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    words = run.stdout.split("\0")[:-1]
    words = words[words.index("pretrain_gpt.py") + 1 :]
    flags = [word for word in words if word.startswith("--")]
    values = dict(zip(words, [*words[1:], ""], strict=True))
    return {flag[2:]: "" if values[flag].startswith("--") else values[flag] for flag in flags}


@pytest.fixture
def megatron(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Function(layout, settings, blocks=…) -> Megatron's flags."""

    def flags(text: str, *settings: str, blocks: int | None = None) -> dict[str, str]:
        result = exported("megatron", text, *settings, blocks=blocks)
        return megatron_flags(result, saved(result, tmp_path))

    return flags


def read_megatron(result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    flags = megatron_flags(result, folder)
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {name.replace("-", "_"): value for name, value in flags.items()}
    world = gpus(result.files["megatron.sh"])
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
    }
    degrees = {ours: int(fields[theirs]) for ours, theirs in names.items()}
    data_ranks = world // math.prod(degrees.values())
    order = RankGenerator(**degrees, ep=1, dp=data_ranks, order="tp-cp-ep-dp-pp")
    assert order.world_size == world and len(order.get_ranks("dp")[0]) == data_ranks
    (named,) = re.findall(r"^# (\S+);", result.files["megatron.sh"], re.MULTILINE)
    blocks = OTHER_BLOCKS.get(named, BLOCKS)
    model = TransformerConfig(  # checks degrees, stages and recomputation against each other
        num_layers=blocks,
        num_layers_in_first_pipeline_stage=int(fields.get("decoder_first_pipeline_num_layers", 0)) or None,
        num_layers_in_last_pipeline_stage=int(fields.get("decoder_last_pipeline_num_layers", 0)) or None,
        attention_backend=AttnBackend[fields.get("attention_backend", "auto")],
        cross_entropy_loss_fusion="cross_entropy_loss_fusion" in fields,
        cross_entropy_fusion_impl=fields["cross_entropy_fusion_impl"],
        tp_comm_overlap="tp_comm_overlap" in fields,
        bf16="bf16" in fields,
        hidden_size=64,
        num_attention_heads=8,
        **{theirs: degrees[ours] for ours, theirs in names.items()},
        sequence_parallel="sequence_parallel" in fields,
        virtual_pipeline_model_parallel_size=int(fields.get("num_virtual_stages_per_pipeline_rank", 0))
        or None,
        pipeline_dtype="bf16",
        cp_comm_type=fields.get("cp_comm_type"),
        recompute_granularity=fields.get("recompute_granularity"),
        recompute_method=fields.get("recompute_method"),
        recompute_num_layers=int(fields.get("recompute_num_layers", 0)) or None,
        recompute_modules=[fields["recompute_modules"]] if "recompute_modules" in fields else None,
    )
    stages = range(model.virtual_pipeline_model_parallel_size or 1)
    cut = [
        get_num_layers_to_build(model, vp_stage=stage, pp_rank=rank)
        for rank in range(degrees["pp"])
        for stage in stages
    ]
    assert sum(cut) == blocks and min(cut) > 0
    assert max(cut) == -(-blocks // len(cut))
    sharding = DistributedDataParallelConfig(
        grad_reduce_in_fp32="accumulate_allreduce_grads_in_fp32" in fields,
        overlap_grad_reduce="overlap_grad_reduce" in fields,
        overlap_param_gather="overlap_param_gather" in fields,
        use_distributed_optimizer="use_distributed_optimizer" in fields,
        num_distributed_optimizer_instances=int(fields.get("num_distributed_optimizer_instances", 1)),
        use_megatron_fsdp="use_megatron_fsdp" in fields,
        data_parallel_sharding_strategy=fields.get("data_parallel_sharding_strategy", "no_shard"),
    )
    replicas = (
        sharding.num_distributed_optimizer_instances if sharding.use_distributed_optimizer else data_ranks
    )
    micro = int(fields["micro_batch_size"])
    batches = ConstantNumMicroBatchesCalculator(
        global_batch_size=int(fields["global_batch_size"]),
        micro_batch_size=micro,
        data_parallel_size=data_ranks,
        decrease_batch_size_if_needed=False,
        rank=0,
    )
    return Understood(
        sizes={"dp_replicate": replicas, "dp_shard": data_ranks // replicas, **degrees},
        micro_batch_size=micro,
        accumulation=batches.get(),
        data_ranks=data_ranks,
        bf16="bf16" in fields,
        more=(model, sharding),
        stages=degrees["pp"] * len(stages),
    )


def read_axolotl(result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    from axolotl.utils import distributed
    from axolotl.utils.schemas import config as schema

    monkeypatch.setitem(sys.modules, "ring_flash_attn", ModuleType("ring_flash_attn"))  # asked for, not used
    values = yaml.safe_load(result.files["axolotl.yaml"])
    assert values.keys() <= schema.AxolotlInputConfig.model_fields.keys()
    settings = schema.AxolotlInputConfig(**values)
    world = gpus(result.command)
    mesh = SimpleNamespace(dp_replicate_size=world, dp_shard_size=1, tp_size=1, cp_size=1)
    if settings.dp_replicate_size:
        kwargs = distributed._get_parallel_config_kwargs(
            world, settings.tensor_parallel_size, settings.context_parallel_size, settings.dp_shard_size,
            settings.dp_replicate_size, bool(settings.fsdp_config),
        )  # fmt: skip
        from accelerate.parallelism_config import ParallelismConfig

        mesh = ParallelismConfig(**kwargs)
        assert mesh.total_size == world
    return Understood(
        sizes=accelerates(mesh),
        micro_batch_size=settings.micro_batch_size,
        accumulation=settings.gradient_accumulation_steps,
        data_ranks=mesh.dp_replicate_size * mesh.dp_shard_size,
        bf16=bool(settings.bf16),
        more=settings,
    )


def read_llamafactory(result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it pins transformers more tightly than we do
    monkeypatch.chdir(folder)
    from llamafactory.hparams import parser

    values = yaml.safe_load(result.files["llamafactory.yaml"])
    engine = values.pop("deepspeed", None)  # its JSON is read by DeepSpeed itself, below
    model, data, training, tuning, _ = parser._parse_train_args({**values, "use_cpu": True})
    rows = dataset_attributes(parser, data)
    assert len(rows) == 1
    world = gpus(result.command)
    read = Understood(
        sizes={"dp_replicate": world, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1},
        micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        data_ranks=world,
        bf16=training.bf16,
    )
    if engine:
        from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

        together = HfTrainerDeepSpeedConfig(json.loads(result.files[engine]))
        together.trainer_config_process(training)
        assert not together.mismatches
        under = deepspeed_engine(json.loads(result.files[engine]), world, monkeypatch)
        assert (under.micro_batch_size, under.accumulation) == (read.micro_batch_size, read.accumulation)
        assert under.bf16 == read.bf16
        read = under
    return read._replace(more=(model, data, tuning, rows))


def dataset_attributes(parser: ModuleType, data: Any) -> list[Any]:
    """The sources that dataset_info.json names, by a file of LLaMA-Factory whose package wants torchaudio."""
    file = Path(str(parser.__file__)).parents[1] / "data" / "parser.py"
    spec = importlib.util.spec_from_file_location("llamafactory.data.parser", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_dataset_list(data.dataset, data.dataset_dir)


READERS: dict[str, Callable[[Exported, Path, pytest.MonkeyPatch], Understood]] = {
    "accelerate": read_accelerate, "deepspeed": read_deepspeed, "torchtitan": read_torchtitan,
    "megatron": read_megatron, "axolotl": read_axolotl, "llamafactory": read_llamafactory,
}  # fmt: skip


def installed(tool: str) -> bool:
    return importlib.util.find_spec(tool) is not None


def needs(tool: str) -> Any:
    """Don't collect the test where the tool isn't installed: see tests/conftest.py."""
    return pytest.mark.needs(tool)


def read(tool: str, result: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Understood:
    return READERS[tool](result, saved(result, folder), monkeypatch)


# What is written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tool", "text"), [pytest.param(*case, marks=needs(case[0])) for case in CASES])
def test_the_tool_reads_back_the_layout(
    tool: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.parse(text)
    found = read(tool, exported(tool, text), tmp_path, monkeypatch)
    assert found.sizes == sizes(layout)
    assert (found.micro_batch_size, found.accumulation, found.data_ranks) == (
        layout.micro_batch_size,
        layout.gradient_accumulation_steps,
        layout.data_ranks,
    )
    assert found.micro_batch_size * found.accumulation * found.data_ranks == layout.global_batch_size
    assert found.bf16 and found.stages in (None, layout.stages)


@pytest.mark.parametrize("tool", [pytest.param(tool, marks=needs(tool)) for tool in EXPORTERS])
def test_the_tool_reads_back_fp32(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read(tool, exported(tool, "mb1-ga2", "train.precision=fp32"), tmp_path, monkeypatch).bf16


@pytest.mark.parametrize(("tool", "text"), CASES)
def test_every_file_is_well_formed_and_every_rank_is_started(tool: str, text: str, tmp_path: Path) -> None:
    result = exported(tool, text)
    for name, content in result.files.items():
        match Path(name).suffix:
            case ".yaml":
                assert isinstance(yaml.safe_load(content), dict)
            case ".json":
                assert isinstance(json.loads(content), dict)
            case ".py":
                ast.parse(content)
            case ".sh":
                subprocess.run(["bash", "-n"], input=content, text=True, check=True)
                assert megatron_flags(result, saved(result, tmp_path))
    start = result.files.get("megatron.sh", result.command)
    started = (
        yaml.safe_load(result.files["accelerate.yaml"])["num_processes"]
        if tool == "accelerate"
        else gpus(start)
    )
    assert started == Layout.parse(text).world
    assert all(sentence.endswith(".") for sentence in result.missing)


def test_accelerate_wraps_by_zero_stage_and_recomputes_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, arguments = read(
        "accelerate", exported("accelerate", "zero3x8-mb1-ga1-full"), tmp_path, monkeypatch
    ).more
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.activation_checkpointing and not arguments.gradient_checkpointing
    plugin, _ = read("accelerate", exported("accelerate", "zero2x8-mb1-ga1"), tmp_path, monkeypatch).more
    assert plugin.reshard_after_forward is False and not plugin.activation_checkpointing
    values = written("accelerate", "dp2-mb1-ga1-full", "train.num_epochs=2", "train.max_steps=null")
    assert values["gradient_checkpointing"] and values["num_train_epochs"] == 2
    assert written("llamafactory", "mb1-ga1", "train.max_steps=null")["num_train_epochs"] == 1  # its own: 3


@needs("deepspeed")
@pytest.mark.parametrize(
    ("text", "stage"), [("dp4-mb1-ga1", 0), ("zero1x4-mb1-ga1", 1), ("zero2x4-mb1-ga1", 2)]
)
def test_deepspeed_reads_back_the_stage(text: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deepspeed_engine(written("deepspeed", text), 4, monkeypatch).more == stage


@pytest.mark.parametrize(
    ("name", "schedule", "needed"),
    [
        ("cosine", "WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 3}),
        ("linear", "WarmupDecayLR", {"total_num_steps": 100, "warmup_max_lr": 1e-5}),
        ("constant", "WarmupLR", {"warmup_max_lr": 1e-5, "warmup_num_steps": 1}),
        ("constant_with_warmup", "WarmupLR", {"warmup_max_lr": 1e-5, "warmup_num_steps": 3}),
    ],
)
def test_deepspeed_takes_the_learning_rate_schedule(name: str, schedule: str, needed: dict) -> None:
    found = written("deepspeed", "zero2x8-mb1-ga1", f"train.lr_scheduler={name}")["scheduler"]
    assert found["type"] == schedule and needed.items() <= found["params"].items()
    if not installed("deepspeed"):
        return
    import torch
    from deepspeed.runtime import lr_schedules

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    getattr(lr_schedules, schedule)(adam, **found["params"])


def test_deepspeed_takes_pure_bf16_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    values = written("deepspeed", "zero3x8-mb1-ga1", "train.precision=bf16-pure")
    assert values["bf16"]["bf16_optimizer_states"] and "data_types" not in values
    assert not installed("deepspeed") or deepspeed_engine(values, 8, monkeypatch).bf16


def test_torchtitan_keeps_the_schedule() -> None:
    for text, schedule in {
        "gpipe": "GPipe", "interleaved1f1b-v2": "Interleaved1F1B", "zb-v2": "InterleavedZeroBubble",
        "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
    }.items():  # fmt: skip
        file = exported("torchtitan", f"pp2-{text}-mb1-ga4").files["meshtune_torchtitan.py"]
        assert f"pipeline_parallel_schedule='{schedule}'" in file


@needs("torchtitan")
def test_torchtitan_keeps_workload_and_recomputation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.learning_rate=3e-4", "checkpoint.keep=1", "data.seq_len=512", "train.warmup_steps=9"]
    result = exported("torchtitan", "zero3x2-mb1-ga1-full", *words)
    settings = read("torchtitan", result, tmp_path, monkeypatch).more
    assert type(settings.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert settings.optimizer.param_groups[0].optimizer_kwargs["lr"] == 3e-4
    assert settings.training.seq_len == 512 and settings.training.steps == 100
    assert settings.checkpoint.keep_latest_k == 2 and settings.lr_scheduler.warmup_steps == 9
    assert settings.dataloader.sample_processor({"question": "1 + 1?", "answer": "2"}) == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
    ]


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        (["data.format=alpaca", "data.columns={}"], {"instruction": "a", "input": None, "output": "b"}),
        (
            ["data.format=messages", "data.columns={messages: 'it''s'}"],
            {"it's": [{"content": "a"}, {"content": "b"}]},
        ),
        (["data.format=sharegpt", "data.columns={}"], {"conversations": [{"value": "a"}, {"value": "b"}]}),
    ],
)
def test_torchtitan_reads_rows_of_every_format(settings: list[str], row: dict) -> None:
    tree = ast.parse(exported("torchtitan", "mb1-ga1", *settings).files["meshtune_torchtitan.py"])
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "messages"
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "rows", "exec"), names)
    user, assistant = names["messages"](row)
    assert user["content"].strip() == "a" and assistant["content"] == "b"


@needs("torchtitan")
@pytest.mark.parametrize("path", ["train.jsonl", "org/name"])
def test_torchtitan_reads_text(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = exported(
        "torchtitan", "mb1-ga1", "data.format=text", "data.columns={text: body}", f"data.train={path}"
    )
    settings = read("torchtitan", result, tmp_path, monkeypatch).more
    assert settings.dataloader.dataset == "train"


def test_steps_that_are_not_known_are_asked_for(tmp_path: Path) -> None:
    for tool in ("torchtitan", "megatron"):
        result = exported(tool, "mb1-ga1", "train.max_steps=null", "train.num_epochs=1")
        says(result.missing)
        assert "TRAIN_STEPS=…" in result.command
    assert megatron_flags(result, saved(result, tmp_path))["train-iters"] == "7"


def test_rows_that_are_here_have_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    rows = written("axolotl", "mb1-ga1", "data.train=rows.jsonl", "data.format=messages")["datasets"]
    assert [source["path"] for source in rows] == [str(tmp_path / "rows.jsonl")]


def test_tokens_of_the_run_are_written_as_the_steps_that_they_give(megatron: Any) -> None:
    words = ("mb1-ga1", "train.max_steps=null", "train.total_tokens=1e9")
    assert megatron(*words)["train-iters"] == "488282"
    assert not any("TRAIN_STEPS" in sentence for sentence in exported("megatron", *words).missing)
    both = ("train.num_epochs=3", "eval.every=0.25 epoch", "data.eval_split=0.1")
    for given in (words, ("mb1-ga1", "train.max_steps=5")):
        with refuses(UserError):
            exported("axolotl", *given, *both)


def test_megatron_quotes_what_the_shell_would_read(megatron: Any, tmp_path: Path) -> None:
    flags = megatron("mb1-ga1", "output=runs; touch oops", "model.name=it's")
    assert flags["save"] == "runs; touch oops" and flags["tokenizer-model"] == "it's"
    assert not (tmp_path / "oops").exists()


@pytest.mark.parametrize(
    ("text", "queues"),
    [
        ("tp2-mb1-ga1", "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("zero3x4-tp2-mb1-ga1", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        ("dp2-mb1-ga1", None),
    ],
)
def test_megatron_sets_the_queues_that_its_flags_need(text: str, queues: str | None) -> None:
    script = exported("megatron", text).files["megatron.sh"].splitlines()
    assert [line for line in script if "CUDA_DEVICE_MAX_CONNECTIONS" in line] == ([queues] if queues else [])


@pytest.mark.parametrize(
    ("blocks", "pp", "stages", "cut"),
    [
        (126, 16, 1, (7, 8, 7)), (126, 16, 2, (8, 8, 6)), (61, 16, 1, (3, 4, 2)), (61, 4, 1, (15, 16, 14)),
        (61, 2, 1, (31, 30, 30)), (80, 4, 5, (20, 20, 20)), (10, 8, 1, (2, 1, 2)),
    ],
)  # fmt: skip
def test_megatron_cuts_layers_that_do_not_divide(
    blocks: int, pp: int, stages: int, cut: tuple[int, int, int]
) -> None:
    first, middle, last = found = stage_layers(blocks, pp, stages)
    assert first + last + (pp - 2) * middle == blocks
    assert (first, last) == (cut[0], cut[2]) and (pp == 2 or found == cut)
    assert not any(size % stages for size in (first, last, middle if pp > 2 else first))


@pytest.mark.parametrize(
    ("text", "settings", "on", "off"),
    [
        ("cp2-mb1-ga1", ["data.format=text"], "cp-comm-type=all_gather", ""),
        ("ulysses2-mb1-ga1", [], "cp-comm-type=a2a", ""),
        ("tp4-sp-pp4-interleaved1f1b-v5-mb1-ga8", [], "num-virtual-stages-per-pipeline-rank=5",
         "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers"),
        ("pp16-1f1b-mb1-ga16", [],
         "decoder-first-pipeline-num-layers=7 decoder-last-pipeline-num-layers=7", ""),
        ("mb1-ga1", [], "attention-backend accumulate-allreduce-grads-in-fp32 cross-entropy-loss-fusion",
         "overlap-grad-reduce overlap-param-gather tp-comm-overlap"),
        ("zero1x4-tp2-sp-mb1-ga1", [], "overlap-grad-reduce overlap-param-gather tp-comm-overlap",
         "no-gradient-accumulation-fusion"),
        ("dp2-tp2-mb1-ga1", [], "overlap-grad-reduce", "overlap-param-gather tp-comm-overlap"),
        ("tp16-sp-mb1-ga1", [], "sequence-parallel", "tp-comm-overlap"),
        ("cp2-mb1-ga1", [], "overlap-grad-reduce cp-comm-type=p2p", "overlap-param-gather"),
        ("zero3x4-mb1-ga1", [], "no-gradient-accumulation-fusion overlap-param-gather", "tp-comm-overlap"),
        ("mb1-ga1", ["train.precision=fp32"], "cross-entropy-loss-fusion",
         "attention-backend accumulate-allreduce-grads-in-fp32"),
        ("dp2-mb1-ga1", ["train.reduce_dtype=bf16"], "grad-reduce-in-bf16",
         "accumulate-allreduce-grads-in-fp32"),
    ],
)  # fmt: skip
def test_megatron_is_told_what_the_plan_counts_on(
    text: str, settings: list[str], on: str, off: str, megatron: Any
) -> None:
    flags = megatron(text, *settings, blocks=126 if text.startswith("pp16") else None)
    assert flags.keys().isdisjoint(off.split())
    for name, equals, value in (word.partition("=") for word in on.split()):
        assert flags[name] == value or not equals, name
    assert flags["cross-entropy-fusion-impl"] == "te"  # 2 bytes a logit, as its memory is counted
    assert flags.get("attention-backend", "fused") == "fused"  # cuDNN's, in Megatron's words
    assert attention_kernels(TOOLS["megatron"].stack) == ["cudnn"]


@pytest.mark.parametrize("tool", ["accelerate", "axolotl"])
def test_sums_of_gradients_stay_sharded_under_fsdp(tool: str) -> None:
    kept = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert written(tool, "zero3x8-mb1-ga4")["accelerator_config"] == kept
    for text in ("zero3x8-mb1-ga1", "dp8-mb1-ga4"):
        assert "accelerator_config" not in written(tool, text)


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed", "torchtitan", "llamafactory"])
def test_commands_ask_for_the_allocator_that_the_plan_counts_on(tool: str) -> None:
    """axolotl sets it itself; Megatron's stack does not count on it."""
    command = exported(tool, "zero3x8-mb1-ga1").command
    assert command.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True ")


def test_deepspeed_overlaps_what_zero_sends() -> None:
    for text, overlaps in (("zero3x8-mb1-ga1", True), ("zero1x8-mb1-ga1", True), ("dp8-mb1-ga1", False)):
        assert written("deepspeed", text)["zero_optimization"]["overlap_comm"] is overlaps


def test_torchtitan_counts_layers_for_other_numbers_of_stages() -> None:
    two, eight = (
        exported("torchtitan", f"pp8-interleaved1f1b-v{n}-mb1-ga8", blocks=126).files[
            "meshtune_torchtitan.py"
        ]
        for n in (2, 8)
    )
    assert "pipeline_parallel_layers_per_stage=2" in eight  # 128 with the ends, over 64 stages
    assert "layers_per_stage" not in two


def test_megatron_keeps_zero_stage_schedule_and_recomputation(
    megatron: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = megatron("zero2x8-mb1-ga4-full", "train.warmup_steps=7", "data.format=text")
    assert flags["data-parallel-sharding-strategy"] == "optim_grads" and flags["lr-warmup-iters"] == "7"
    assert flags["recompute-granularity"] == "full" and flags["tokenizer-type"] == "HuggingFaceTokenizer"
    if not installed("megatron"):
        return
    interleaved = exported("megatron", "pp4-interleaved1f1b-v2-mb1-ga8", "log.to=[console]")
    model, sharding = read("megatron", interleaved, tmp_path, monkeypatch).more
    assert model.virtual_pipeline_model_parallel_size == 2 and not sharding.use_megatron_fsdp
    assert model.cross_entropy_loss_fusion and model.attention_backend.name == "fused"
    assert sharding.grad_reduce_in_fp32


def test_megatron_recomputes_the_first_blocks_of_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = exported("megatron", "pp2-interleaved1f1b-v2-mb1-ga8-full3", blocks=80)
    flags = megatron_flags(result, saved(result, tmp_path))
    assert flags["recompute-method"] == "block" and flags["recompute-num-layers"] == "3"
    assert not any("full3" in sentence for sentence in result.missing)
    if installed("megatron"):
        model, _ = read("megatron", result, tmp_path, monkeypatch).more
        assert model.recompute_method == "block" and model.recompute_num_layers == 3


ASKED = {"format": "{instruction}\n", "no_input_format": "{instruction}\n"}
ROWS = {
    "text": (["data.format=text", "data.columns={text: body}"], {"type": "completion", "field": "body"}),
    "prompt-completion": ([], {"type": {"field_instruction": "question", "field_output": "answer", **ASKED}}),
    "alpaca": (
        ["data.format=alpaca", "data.columns={}"],
        {"type": {f"field_{name}": name for name in ("instruction", "input", "output")} | ASKED
         | {"format": "{instruction}\n{input}\n"}},
    ),
    "messages": (
        ["data.format=messages", "data.columns={messages: chat}"],
        {"type": "chat_template", "field_messages": "chat"},
    ),
    "sharegpt": (
        ["data.format=sharegpt", "data.columns={}"],
        {"type": "chat_template", "field_messages": "conversations",
         "message_property_mappings": {"role": "from", "content": "value"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_axolotl_reads_rows_of_every_format(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, wanted = ROWS[kind]
    result = exported("axolotl", "mb1-ga1", *settings)
    (rows,) = yaml.safe_load(result.files["axolotl.yaml"])["datasets"]
    assert rows == {"path": "train.jsonl", "ds_type": "json", "split": "train", **wanted}
    if installed("axolotl"):
        read("axolotl", result, tmp_path, monkeypatch)


@needs("axolotl")
def test_axolotl_keeps_lora_evaluation_and_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = exported(
        "axolotl", "zero3x2-mb1-ga1-selective", "method=lora", "lora.target_modules=[q_proj, v_proj]",
        "model.revision=main", "data.eval=org/held-out", "checkpoint.every=0", "train.warmup_steps=5",
        "eval.every=10", "data.streaming=true", "hub.push_to=org/tuned",
    )  # fmt: skip
    settings = read("axolotl", result, tmp_path, monkeypatch).more
    assert (settings.adapter, settings.lora_r, settings.lora_alpha) == ("lora", 16, 32)
    assert settings.lora_target_modules == ["q_proj", "v_proj"] and settings.revision_of_model == "main"
    assert (
        settings.selective_checkpointing.save == ["attention"] and settings.fsdp_config.reshard_after_forward
    )
    assert len(settings.test_datasets) == 1 and settings.warmup_steps == 5 and settings.eval_steps == 10
    assert settings.streaming and settings.hub_model_id == "org/tuned" and settings.use_tensorboard
    everywhere = written("axolotl", "mb1-ga1", "method=lora", "data.eval_split=0.1", "data.train=a.csv")
    assert everywhere["lora_target_linear"] and everywhere["val_set_size"] == 0.1
    assert everywhere["datasets"][0]["ds_type"] == "csv" and everywhere["datasets"][0]["split"] == "train"


LLAMAFACTORY_ROWS = {
    "text": ("alpaca", {"prompt": "body"}),
    "prompt-completion": ("alpaca", {"prompt": "question", "response": "answer"}),
    "alpaca": ("alpaca", {"prompt": "instruction", "query": "input", "response": "output"}),
    "messages": ("sharegpt", {"messages": "chat", "role_tag": "role", "assistant_tag": "assistant"}),
    "sharegpt": ("sharegpt", {"messages": "conversations", "role_tag": "from", "assistant_tag": "gpt"}),
}


@needs("llamafactory")
@pytest.mark.parametrize("kind", LLAMAFACTORY_ROWS)
def test_llamafactory_reads_rows_of_every_format(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = exported("llamafactory", "mb1-ga1", *ROWS[kind][0])
    _, _, tuning, (rows,) = read("llamafactory", result, tmp_path, monkeypatch).more
    formatting, columns = LLAMAFACTORY_ROWS[kind]
    assert rows.formatting == formatting and {name: getattr(rows, name) for name in columns} == columns
    assert tuning.stage == ("pt" if kind == "text" else "sft")


@needs("llamafactory")
def test_llamafactory_keeps_lora_evaluation_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = exported(
        "llamafactory", "dp2-mb1-ga1-full", "method=lora", "lora.target_modules=[q_proj, v_proj]",
        "model.revision=v1", "data.eval={path: org/held-out, split: test}", "data.packing=false",
        "hub.push_to=org/tuned",
    )  # fmt: skip
    model, data, tuning, _ = read("llamafactory", result, tmp_path, monkeypatch).more
    assert tuning.finetuning_type == "lora" and (tuning.lora_rank, tuning.lora_alpha) == (16, 32)
    assert tuning.lora_target == ["q_proj", "v_proj"] and model.model_revision == "v1"
    assert not model.disable_gradient_checkpointing and not data.neat_packing and data.mask_history
    assert json.loads(result.files["dataset_info.json"])["eval_0"] == {
        "hf_hub_url": "org/held-out",
        "split": "test",
        "columns": {"prompt": "question", "response": "answer"},
    }
    values = written("llamafactory", "mb1-ga1", "method=lora", "data.eval_split=0.1", "data.train_on=all")
    assert values["val_size"] == 0.1 and values["lora_target"] == "all" and values["train_on_prompt"]


@pytest.mark.parametrize("tool", EXPORTERS)
def test_several_nodes_are_started_from_each(tool: str) -> None:
    result = exported(tool, "zero3x16-mb1-ga1")
    text = result.files.get("megatron.sh", result.command)
    if tool == "deepspeed":
        assert "hostfile" in text and "=" not in text and "HOST slots=8" in result.missing[0]
        assert result.files[".deepspeed_env"] == f"{SETTING}\n"
    else:
        assert "$NODE_RANK" in text and "$MASTER_ADDR" in text


# What is refused, and what is said --------------------------------------------------------------------


def exports(table: str) -> list[tuple[str, str, list[str]]]:
    """(Tool, layout, settings) of each line `tools: layout settings`."""
    cases = []
    for line in table.strip().splitlines():
        tools, _, words = line.partition(": ")
        text, *settings = re.split(r" (?=[a-z]+\.[a-z_.]+=|method=)", words)
        cases += [(tool, text, settings) for tool in (EXPORTERS if tools == "all" else tools.split())]
    return cases


REFUSED = """
accelerate megatron: zero3x2-pp2-1f1b-mb1-ga2
accelerate: ulysses4-mb1-ga1
accelerate: dp2-tp2-mb1-ga1
deepspeed: zero1x2-pp2-1f1b-mb1-ga2
deepspeed llamafactory: cp2-mb1-ga1
deepspeed: ulysses2-tp2-mb1-ga1
deepspeed: dp2-zero3x4-mb1-ga1
torchtitan megatron: mb1-ga1 method=lora
torchtitan: ulysses2-mb1-ga1
torchtitan: pp16-interleaved1f1b-v3-mb1-ga16
torchtitan: cp2-tp2-mb1-ga1 data.seq_len=100
megatron: cp2-mb1-ga1 data.seq_len=102
megatron: mb2-ga3
megatron: pp4-interleaved1f1b-v2-mb1-ga6
megatron: pp2-interleaved1f1b-v2-mb1-ga4
megatron: pp64-1f1b-mb1-ga64
megatron: pp2-zb-mb1-ga4
megatron: pp2-zbv-mb1-ga4
megatron: pp2-gpipe-mb1-ga4
megatron accelerate deepspeed llamafactory: mb1-ga1-selective
megatron: mb1-ga1 train.precision=bf16-pure
torchtitan: tp2-mb1-ga1
torchtitan accelerate: tp2-sp-regather-mb1-ga1
accelerate torchtitan axolotl llamafactory deepspeed: zero3x4-mb1-ga1-full8
megatron: mb1-ga1-selective8
accelerate deepspeed torchtitan axolotl llamafactory: mb1-ga1-attention
accelerate axolotl torchtitan: zero1x4-mb1-ga1
accelerate axolotl deepspeed llamafactory: tp2-sp-mb1-ga1
axolotl llamafactory: pp2-1f1b-mb1-ga2
axolotl: cp2-mb2-ga1
axolotl: zero3x2-cp2-mb1-ga1 train.precision=fp32
axolotl llamafactory: mb1-ga1 method=lora lora.alpha=8.5
llamafactory: mb1-ga1 data.train=[{path: a.jsonl, format: text}, b.jsonl]
llamafactory: zero2x2-mb1-ga1 train.precision=bf16-pure
all: mb1-ga1 train.precision=fp64
all: dp12-mb1-ga1
all: mb1-ga3 train.global_batch_size=4
"""


@pytest.mark.parametrize("tool", EXPORTERS)
def test_an_axis_or_an_optimizer_that_no_export_writes_is_refused(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"zero3x2-tp2{'-sp' * (tool == 'torchtitan')}-mb1-ga1"
    exported(tool, text)
    monkeypatch.setattr(shared, "EXPORTED_OPTIMIZERS", ("sgd",))
    monkeypatch.setattr(layout_rules, "EXPORTED_AXES", ("dp_replicate", "dp_shard"))
    with pytest.raises(UserError) as error:
        exported(tool, text)
    optimizer, axis = error.value.problems
    says(optimizer)
    says(axis)


SAID = """
torchtitan megatron axolotl llamafactory: mb1-ga1 model.freeze=[model.embed_tokens.*]
torchtitan megatron: mb1-ga1 data.chat_template=chatml
accelerate torchtitan axolotl: mb1-ga1 eval.samples=2 eval.keep_best=true eval.every=5 data.eval=held.jsonl
torchtitan llamafactory: mb1-ga1 data.overlong=drop
axolotl: mb1-ga1 data.overlong=split
axolotl: mb1-ga1 data.overlong=drop data.format=text data.columns={}
torchtitan megatron axolotl llamafactory: mb1-ga1 data.train=[{path: a.jsonl, weight: 2}]
torchtitan megatron llamafactory: mb1-ga1 model.overrides.use_cache=false
megatron: mb1-ga1 model.init=random
accelerate axolotl megatron: mb1-ga1 log.to=[console,jsonl,wandb,prometheus] log.project=p
torchtitan megatron axolotl llamafactory: mb1-ga1 data.columns={}
accelerate axolotl torchtitan megatron: cp2-mb1-ga1
accelerate axolotl: zero3x2-mb1-ga1
all: mb1-ga1
accelerate: mb1-ga1 train.precision=bf16-pure
accelerate: tp2-mb1-ga1
accelerate axolotl: zero3x2-cp2-mb1-ga1
deepspeed: mb1-ga1-full
deepspeed torchtitan megatron: mb1-ga1 train.max_steps=null train.num_epochs=1
deepspeed megatron: ulysses2-mb1-ga1
deepspeed axolotl: dp2-mb1-ga1
deepspeed: dp2-mb1-ga1 train.precision=bf16-pure
deepspeed: dp2-mb1-ga1 train.compile=true
megatron: tp2-sp-mb1-ga1
torchtitan: mb1-ga1-selective
torchtitan: pp2-1f1b-mb1-ga2
torchtitan: mb1-ga1 train.reduce_dtype=bf16
torchtitan: mb1-ga1 data.packing=false
torchtitan: mb1-ga1 data.train_on=all
torchtitan axolotl: mb1-ga1 data.format=messages data.columns={}
torchtitan: mb1-ga1 data.train=[a.jsonl, b.jsonl]
megatron: mb1-ga1-attention
megatron: pp4-1f1b-mb1-ga4
megatron: pp2-1f1b-mb1-ga4
megatron: mb1-ga1 train.compile=true
megatron llamafactory: mb1-ga1 data.format=text data.columns={}
axolotl: mb1-ga1-selective method=lora
accelerate axolotl llamafactory: mb1-ga1 data.eval=test.jsonl
llamafactory: mb1-ga1 method=lora train.precision=fp32
llamafactory axolotl: mb1-ga1 data.train=[]
llamafactory: mb1-ga1 data.columns={prompt: extra.question, completion: answer}
"""


@pytest.mark.ci
@pytest.mark.parametrize(("tool", "text", "settings"), exports(REFUSED))
def test_what_the_tool_cannot_run_is_refused(tool: str, text: str, settings: list[str]) -> None:
    with refuses(UserError):
        exported(tool, text, *settings)


@pytest.mark.ci
@pytest.mark.parametrize(("tool", "text", "settings"), exports(SAID))
def test_what_the_tool_expresses_otherwise_is_said(tool: str, text: str, settings: list[str]) -> None:
    usual = exported(tool, "mb1-ga1").missing if settings or text != "mb1-ga1" else ()
    says(said for said in exported(tool, text, *settings).missing if said not in usual)


def test_every_reason_is_given_at_once() -> None:
    layout = Layout.parse("ulysses2-pp2-1f1b-mb1-ga2")
    strange = config(layout, "train.precision=fp64", "train.global_batch_size=9")
    with pytest.raises(UserError) as error:
        export("llamafactory", strange, layout, blocks=61, gpus_per_node=3)
    assert len(error.value.problems) == 5


@pytest.mark.parametrize("tool", ["deep-speed", "LLaMA-Factory", "x"])
def test_an_unknown_tool_names_the_nearest(tool: str) -> None:
    with refuses(UserError):
        export(tool, config(Layout()), Layout(), blocks=61, gpus_per_node=8)


def test_formats_are_those_that_are_read() -> None:
    assert shared.FORMATS is rows.FORMATS


@pytest.mark.ci
@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("accelerate", "zero3x4-tp2-mb1-ga2"),
        ("deepspeed", "zero3x4-ulysses2-mb1-ga2"),
        ("torchtitan", "dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full"),
        ("megatron", "zero1x2-tp2-sp-pp2-1f1b-mb1-ga8-full"),
        ("axolotl", "zero3x4-tp2-mb1-ga2"),
        ("llamafactory", "zero3x8-mb2-ga4-full"),
    ],
)
def test_the_files_are_those_that_were_reviewed(tool: str, text: str) -> None:
    result = exported(tool, text)
    for name in sorted(result.files):
        says(f"{name}\n{result.files[name]}")
    says("\n".join([result.command, *result.missing]))


def test_exporting_needs_no_torch() -> None:
    code = (
        "import sys, meshtune.tools.export; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tool", ["llamafactory", "axolotl"])
def test_tools_of_transformers_get_its_schedule_and_the_methods_learning_rate(tool: str) -> None:
    floor = ("train.lr_scheduler=linear", "train.min_lr_ratio=0.1", "method=lora")
    values = written(tool, "zero3x8-mb1-ga1", *floor)
    name = values["lr_scheduler_type" if tool == "llamafactory" else "lr_scheduler"]
    assert name == "polynomial" and values["learning_rate"] == 2e-4
    assert values["lr_scheduler_kwargs"] == {"lr_end": pytest.approx(2e-5)}


@pytest.mark.parametrize("tool", ["deepspeed", "megatron", "torchtitan"])
def test_a_schedule_that_a_tool_lacks_is_refused(tool: str) -> None:
    with refuses(UserError):
        exported(tool, "zero2x8-mb1-ga1", "train.lr_scheduler=inverse_sqrt")
    text = "".join(exported(tool, "zero2x8-mb1-ga1", "train.min_lr_ratio=0.1").files.values())
    assert any(part in text for part in ('"cos_min_ratio": 0.1', "--min-lr 1e-06", "min_lr_factor=0.1"))
    if tool == "deepspeed":
        with refuses(UserError):
            exported(tool, "zero2x8-mb1-ga1", "train.lr_scheduler=linear", "train.min_lr_ratio=0.1")


@pytest.mark.parametrize(
    ("tool", "setting"),
    [("axolotl", "eval.every=0.5 epoch"), ("torchtitan", "checkpoint.every=1 epoch")],
)
def test_intervals_that_are_no_share_of_the_run_are_refused(tool: str, setting: str) -> None:
    with refuses(UserError):
        exported(tool, "zero2x8-mb1-ga1", setting, "data.eval=held.jsonl")


def test_an_interval_in_epochs_is_written_as_the_tool_counts() -> None:
    words = ("mb1-ga1", "train.max_steps=null", "train.num_epochs=2", "data.eval=held.jsonl")
    quarter = written("axolotl", *words, "eval.every=0.25 epoch", "checkpoint.every=0.3 epoch")
    assert quarter["evals_per_epoch"] == 4 and "eval_steps" not in quarter and quarter["save_steps"] == 0.15
    for tool in ("axolotl", "llamafactory", "accelerate"):
        each = written(tool, *words, "eval.every=1 epoch")
        assert each["eval_strategy"] == "epoch" and "eval_steps" not in each
    assert written("llamafactory", *words, "eval.every=0.25 epoch")["eval_steps"] == 0.125


def test_lora_options_are_exported_or_refused() -> None:
    options = ["method=lora", "lora.use_rslora=true", "lora.use_dora=true",
               "lora.modules_to_save=[embed_tokens]"]  # fmt: skip
    axolotl = written("axolotl", "zero3x8-mb1-ga1", *options, "lora.layers_to_transform=[1]")
    assert axolotl["peft_use_rslora"] and axolotl["peft_use_dora"]
    assert axolotl["lora_modules_to_save"] == ["embed_tokens"]
    assert axolotl["peft_layers_to_transform"] == [1]
    factory = written("llamafactory", "zero3x8-mb1-ga1", *options)
    assert (factory["additional_target"], factory["use_dora"]) == ("embed_tokens", True)
    with refuses(UserError):
        exported("llamafactory", "zero3x8-mb1-ga1", *options, "lora.layers_to_transform=[1]")
    with refuses(UserError):
        written("axolotl", "zero3x8-mb1-ga1", *options, "lora.target_modules=[all-linear,experts]")
    layout = Layout.parse("zero3x8-mb1-ga1")
    named = config(layout, "method=lora", "lora.target_modules=[gate_up_proj]")
    with refuses(UserError):
        export("axolotl", named, layout, blocks=2, gpus_per_node=8, adapts_experts=True)


@pytest.mark.parametrize("tool", EXPORTERS)
def test_regularisation_is_exported_or_refused(tool: str) -> None:
    for setting, key in (
        ("label_smoothing", "label_smoothing_factor"),
        ("neftune_alpha", "neftune_noise_alpha"),
    ):
        words = ("zero2x8-mb1-ga1", f"train.{setting}=0.25")
        if tool in ("accelerate", "llamafactory") or (tool, setting) == ("axolotl", "neftune_alpha"):
            assert f"{key}: 0.25" in "".join(exported(tool, *words).files.values())
        else:
            with refuses(UserError):
                exported(tool, *words)
