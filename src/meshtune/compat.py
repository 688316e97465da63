"""All that depends on the versions of torch and transformers: which are tested (tested.toml), what of their
insides meshtune uses (INSIDES, which a test goes through), and newer calls with their fallbacks.
"""

import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.errors import UserError

TESTED = ("torch", "transformers")


@cache
def _tested() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "tested.toml").read_text())


def pairs() -> dict[str, dict[str, str]]:
    """Return the versions that the tests ran with, by name of the environment, the oldest pair first."""
    return _tested()["pairs"]


def tested_versions() -> str:
    """Return "torch 2.11 to 2.15 and transformers 5.17 to 5.24"."""
    ranges = [(name, *_range(name)) for name in TESTED]
    return " and ".join(f"{name} {_dotted(first)} to {_dotted(last)}" for name, first, last in ranges)


def installed_versions() -> str:
    """Return "torch 2.13.0+cpu and transformers 5.24.0"."""
    return " and ".join(f"{name} {version(name)}" for name in TESTED)


def untested(kind: type[nn.Module]) -> str:
    """Return why a model's code is untested, as "torch 2.16.0 is newer than …"; "" if it is tested.

    kind: the model's class.
    """
    found = [
        f"{name} {version(name)} is newer than those that were tested"
        for name in TESTED
        if _number(version(name)) > _range(name)[1]
    ]
    if not kind.__module__.startswith("transformers."):
        found.append("its code is not that of transformers")
    return " and ".join(found)


def families_tested() -> list[str]:
    """Return the versions of transformers whose families were trained next to the unmodified model."""
    return _tested()["families"]


def family_tested(model_type: str) -> bool:
    """True if this family of the installed transformers was trained next to the unmodified model."""
    return version("transformers") in families_tested() and model_type not in _tested()["without"]


def _range(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    versions = [_number(pair[name]) for pair in pairs().values()]
    return min(versions), max(versions)


def _number(version: str) -> tuple[int, ...]:
    """Return (2, 15) of "2.15.0+cu132": patch releases are not distinguished."""
    return tuple(int(part) for part in version.split(".")[:2])


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


def fsdp_parameters(module: Any) -> list[Any]:
    """FSDP2's records of the parameters that it gathers with `module`."""
    return [parameter for group in _fsdp_groups(module) for parameter in group.fsdp_params]


def _fsdp_groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters of `module`; torch 2.13 has a list of them."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def sharding_integers() -> Iterator[None]:
    """Let FSDP2 shard parameters that are whole numbers: that of torch 2.11 asks for their gradient first."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param as module

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    if _number(version("torch")) >= (2, 12):
        yield
        return
    module.__dict__["nn"] = SimpleNamespace(**vars(nn) | {"Parameter": parameter})
    try:
        yield
    finally:
        module.__dict__["nn"] = nn


def keep_integers(module: Any) -> None:
    """Let FSDP2 gather parameters of `module` that are whole numbers as they are; torch 2.11 casts them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for parameter in fsdp_parameters(module):
        if not parameter.sharded_param.is_floating_point():
            of_none = partial(parameter.init_dtype_attrs, MixedPrecisionPolicy())
            parameter.init_dtype_attrs = lambda policy, of_none=of_none: of_none()


def gather_otherwise(
    module: Any,
    fits: Callable[[nn.Module], bool],
    send: Callable[[list[Tensor]], list[list[Tensor]]],
    receive: Callable[[nn.Module, list[Tensor]], None],
) -> None:
    """Let FSDP2 gather other tensors than the weights of the layers of `module` that fit.

    send: these weights' flat shards, padded to equal lengths -> the tensors to gather of each. receive:
    called with a layer and the tensors of all ranks, each rank's behind the one before, whose memory is freed
    with the other weights. The gathered weight is a parameter without memory, which is for its gradient.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    parameters = [
        parameter for parameter in fsdp_parameters(module)
        if parameter._module_info.param_name == "weight" and not parameter._module_info.shared_modules
        and fits(parameter._module_info.module)
    ]  # fmt: skip
    unsent: list[list[Tensor]] = []  # of the gather at hand

    class Otherwise(FSDPParam):
        def init_dtype_attrs(self, mp_policy: Any) -> None:
            super().init_dtype_attrs(mp_policy)
            self.gradient_dtype, self.param_dtype = self.param_dtype or self.orig_dtype, None  # no cast

        @property
        def all_gather_inputs(self) -> list[Tensor]:
            if not unsent:
                unsent.extend(send([parameter._sharded_param_data for parameter in parameters]))
            return unsent.pop(0)

        def init_unsharded_param(self) -> None:
            if not hasattr(self, "_unsharded_param"):
                empty = self.all_gather_outputs[0].new_empty((), dtype=self.gradient_dtype)
                trained = self.sharded_param.requires_grad
                self._unsharded_param = nn.Parameter(empty.expand(self._orig_size), requires_grad=trained)
            receive(self._module_info.module, self.all_gather_outputs)

    for parameter in parameters:
        parameter.__class__ = Otherwise


def partial_sums(module: Any) -> list[Tensor]:
    """Gradients of `module` that FSDP2 has reduce-scattered, and not all-reduced over replicas yet."""
    sums = (group._partial_reduce_output for group in _fsdp_groups(module))
    return [partial for partial in sums if partial is not None]


def accumulate_gradients(module: Any) -> None:
    """Add new unsharded gradients of `module` to their sums in the reduce dtype, as FSDP2 does after a
    backward. Since torch 2.15 autograd adds them, and FSDP2 casts the first.
    """
    for group in _fsdp_groups(module):
        if hasattr(group, "_set_unsharded_grad_dtypes"):
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            continue
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def keep_gradient_dtype(module: Any) -> None:
    """Leave gradients of the parameters that FSDP2 gathers with `module` in the dtype in which they come, if
    they are reduced after this backward. Since torch 2.15 autograd casts those that come before FSDP2's hook:
    the head's, which are made in the forward.
    """
    for group in _fsdp_groups(module):
        if hasattr(group, "_set_unsharded_grad_dtypes"):
            group._set_unsharded_grad_dtypes(defer_upcast=True)


def reduce_gradients(module: Any) -> None:
    """Do what FSDP2 does after the backward of the parameters that it gathers with `module`: reduce-scatter
    their gradients, or add them up, and free the gathered weights. It then does not do so once more.
    """
    for group in _fsdp_groups(module):
        group.post_backward()


def finish_each_backward(module: Any) -> None:
    """Let FSDP2 reduce all gradients of `module` in each backward: a stage of torch 2.15 leaves those of a
    group whose inputs need no gradient to the end of the step.
    """
    if hasattr(module, "set_manual_backward_finalization") or _number(version("torch")) >= (2, 15):
        module.set_manual_backward_finalization(False)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked for a module of `model`, by its method compile()."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def all_gather_single(output: Tensor, piece: Tensor, group: dist.ProcessGroup | None) -> None:
    """Concatenate the ranks' `piece`s [n, …], in rank order, into `output` [ranks · n, …].

    group: None for all ranks. Until torch 2.13 it was called all_gather_into_tensor.
    """
    _first_of("all_gather_single", "all_gather_into_tensor")(output, piece, group=group)


def reduce_scatter_single(output: Tensor, pieces: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum the ranks' `pieces` [ranks · n, …] and write this rank's n rows of the sum to `output` [n, …].

    group: None for all ranks. Until torch 2.13 it was called reduce_scatter_tensor.
    """
    _first_of("reduce_scatter_single", "reduce_scatter_tensor")(output, pieces, group=group)


def of_any_length(tensor: Tensor) -> Tensor:
    """Let graphs that read the tensor be for any size of its first dimension; returns it."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def compiled_graphs() -> int:
    """Graphs that torch.compile has compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def interruptions() -> Counter[str]:
    """Count what torch.compile has left uncompiled in this process so far, by reason."""
    every = torch._dynamo.utils.counters["graph_break"].items()
    first = {text: (text.partition("Explanation: ")[2] or text).partition("\n")[0] for text, _ in every}
    return Counter({re.sub(r" at 0x\w+| \(reason: None\)", "", first[text]): n for text, n in every})


LARGE = 2**30  # bytes that only a parameter has: a layer's experts may be more than a machine's memory


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made meanwhile keep only the shapes of their parameters; a buffer is made as ever."""
    register, empty = nn.Module.register_parameter, torch.empty

    def without_memory(*sizes: Any, **options: Any) -> Tensor:
        shape = empty(*sizes, **options | {"device": "meta"})
        return shape if shape.nbytes > LARGE else empty(*sizes, **options)

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    torch.empty = without_memory  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter, torch.empty = register, empty  # type: ignore[method-assign]


# Methods of ProcessGroup that start a collective and return its Work; torch 2.13 renamed some.
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "broadcast",
    "reduce", "gather", "scatter", "send", "recv", "recv_anysource", "barrier", "_end_coalescing",
)  # fmt: skip


def in_backward() -> bool:
    """Whether a backward pass calls, as it does where a checkpoint runs a part of the forward again."""
    return torch._C._current_graph_task_id() >= 0


class _TemplateClock(datetime):
    """The clock of chat templates: the day of `template_day`, or now."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return _day.get() or datetime.now(tz)


_day: ContextVar[datetime | None] = ContextVar("day of chat templates", default=None)


@contextmanager
def template_day(day: str | None) -> Iterator[None]:
    """Let chat templates that are rendered in the block write midnight of a day, as 2026-01-31; None: now."""
    from transformers.utils import chat_template_utils

    utils: Any = chat_template_utils
    utils.datetime = _TemplateClock
    token = _day.set(None if day is None else datetime.fromisoformat(day))
    try:
        yield
    finally:
        _day.reset(token)


class Inside(NamedTuple):
    """A name of torch or transformers that is not promised to stay, or whose arguments are not."""

    path: str  # "package.module:name.attribute"
    takes: str = ""  # parameters that are used
    changed: str = ""  # versions in which it changed, and how


_PIPELINING = "torch.distributed.pipelining"
_LISTS = "arg_mbs kwarg_mbs target_mbs losses return_outputs"
_FSDP = "torch.distributed.fsdp._fully_shard"
INSIDES = (
    Inside("torch.utils._pytree:tree_map_only"),
    Inside(f"{_PIPELINING}.schedules:PipelineScheduleSingle._step_microbatches", _LISTS),
    Inside(f"{_PIPELINING}.schedules:PipelineScheduleMulti._step_microbatches", _LISTS),
    Inside(f"{_PIPELINING}.stage:PipelineStage.backward_weight_one_chunk"),
    Inside(
        f"{_PIPELINING}.stage:PipelineStage.backward_maybe_with_nosync",
        "backward_type bwd_kwargs last_backward",
    ),
    Inside(
        f"{_PIPELINING}.stage:PipelineStage.perform_reduce_grad",
        "grad_scale_factor",
        "torch 2.15: also start_gradient_reduction and wait_for_gradient_reduction",
    ),
    Inside(f"{_PIPELINING}.stage:PipelineStage.clear_runtime_states"),
    Inside(f"{_PIPELINING}._backward:stage_backward", "stage_output output_grads input_values"),
    Inside("torch.distributed.fsdp:FSDPModule._get_fsdp_state"),
    Inside(f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward", changed="torch 2.13: a list of groups"),
    Inside(f"{_FSDP}:_fsdp_param"),
    Inside(f"{_FSDP}._fsdp_param:FSDPParam"),
    Inside(f"{_FSDP}._fsdp_param:FSDPParam.init_dtype_attrs", "mp_policy"),
    Inside(f"{_FSDP}._fsdp_param:FSDPParam.init_unsharded_param"),
    Inside(f"{_FSDP}._fsdp_param:FSDPParam.all_gather_inputs"),
    Inside("torch.distributed:all_gather_into_tensor", changed="torch 2.13: all_gather_single"),
    Inside("torch.distributed:reduce_scatter_tensor", changed="torch 2.13: reduce_scatter_single"),
    Inside("torch._dynamo:config"),
    Inside("torch.utils._python_dispatch:TorchDispatchMode"),
    Inside("torch.utils._python_dispatch:_disable_current_modes"),
    Inside("torch.utils._pytree:tree_leaves"),
    Inside("torch.utils._pytree:tree_flatten"),
    Inside("torch.utils._pytree:tree_unflatten"),
    Inside("torch:_meta_registrations"),
    Inside("transformers.utils.chat_template_utils:datetime"),
    Inside("torch.distributed.checkpoint.filesystem:_StorageInfo"),
    Inside("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING"),
    Inside("torch.utils.flop_counter:flop_registry"),
    Inside("torch._subclasses.fake_tensor:FakeTensor"),
    Inside("torch._subclasses.fake_tensor:FakeTensorMode"),
    Inside("torch.testing._internal.distributed.fake_pg:FakeStore"),
    Inside("torch._inductor.async_compile:AsyncCompile"),
    Inside("torch._inductor.async_compile:AsyncCompile.cpp_pybinding", "argtypes source_code"),
    Inside("torch._inductor.async_compile:AsyncCompile.wait", "scope"),
    Inside("torch._inductor.codegen.cpp:CppScheduling"),
    Inside("torch._inductor.codegen.cpp:CppScheduling.codegen_node", "node"),
    Inside("torch._inductor.codegen.cpp:CppScheduling.flush"),
    Inside("torch._inductor.fx_passes.post_grad:is_gpu", "device"),
    Inside("torch._C._distributed_c10d:_resolve_process_group"),
    Inside("torch._ops:HigherOrderOperator"),
    Inside("torch._C:_current_graph_task_id"),
    Inside("torch._C:_current_autograd_node"),
    Inside("torch.nn:Module.register_parameter", "name param"),
    Inside("torch.nn.attention._fa4:register_flash_attention_fa4", "module_path"),
    Inside("torch.nn.attention:register_flash_attention_impl", "impl register_fn"),
    Inside("torch._dynamo:mark_static_address", "guard"),
    Inside("torchao.float8.float8_linear:matmul_with_hp_or_float8_args"),
    Inside("torchao.float8.float8_training_tensor:Float8TrainingTensor"),
    Inside("torchao.float8.float8_utils:amax_to_scale", "float8_dtype"),
    Inside("transformers:AttentionInterface.register", "key value"),
    Inside("transformers.masking_utils:AttentionMaskInterface.register", "key value"),
    Inside("transformers.masking_utils:find_packed_sequence_indices", "position_ids"),
    Inside("transformers.masking_utils:eager_mask"),
    Inside("transformers.initialization:no_init_weights"),
    Inside("transformers.conversion_mapping:get_model_conversion_mapping", "model"),
    Inside("transformers.conversion_mapping:get_checkpoint_conversion_mapping"),
    Inside("transformers.core_model_loading:rename_source_key"),
    Inside("transformers.conversion_mapping:_MODEL_TO_CONVERSION_PATTERN"),
    Inside("transformers.models.auto.configuration_auto:CONFIG_MAPPING"),
    Inside("transformers.models.auto.modeling_auto:MODEL_FOR_MULTIMODAL_LM_MAPPING"),
    Inside("transformers.modeling_outputs:BaseModelOutputWithPast", "last_hidden_state", "5.24: cache"),
    Inside("transformers:PreTrainedModel._from_config"),
    Inside("transformers:PreTrainedModel._initialize_weights", "module"),
    Inside("transformers:PreTrainedModel._is_stateful"),
    Inside("transformers:PretrainedConfig.get_text_config", "decoder"),
    Inside("transformers:PretrainedConfig.base_model_tp_plan"),
    Inside("transformers.utils.import_utils:is_fake_tensor"),
)


# Keyword arguments of transformers to its attention functions, besides those that meshtune's knows.
HARMLESS = {
    "position_ids",  # already in the rotary embedding; the documents say where positions restart
    "position_embeddings",
    "cache_position",
    "num_items_in_batch",
    "output_router_logits",
}
# Those that change nothing only if they are False; the cache's name is that of transformers 5.24, and before.
MUST_BE_OFF = {
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "head_mask",
    "cache",
    "past_key_values",
    "return_dict",
}


def missing(inside: Inside) -> str:
    """Return what the installed version lacks of an inside; "" for nothing."""
    module, _, path = inside.path.partition(":")
    try:
        owner: Any = import_module(module)
        for part in path.split("."):
            owner = getattr(owner, part)
    except (ImportError, AttributeError) as error:
        return str(error)
    lacking = set(inside.takes.split()) - signature(owner).parameters.keys() if inside.takes else set()
    return f"{inside.path} takes no {', '.join(sorted(lacking))}" if lacking else ""


SPLIT_BACKWARD = (2, 13)  # torch from which zero-bubble schedules run; 2.11 was tried and can't


def splits_backward() -> bool:
    """True if torch can run the two parts of a backward apart where functions of meshtune are in it."""
    return _number(version("torch")) >= SPLIT_BACKWARD


# torch from which compiled blocks have the right gradients under tp; with 2.11 losses were 0.4 % off.
COMPILED_TENSOR = (2, 13)


def compiled_tensor_problem() -> str:
    """Why this torch can't compile blocks that are cut by tp, in a clause; "": it can."""
    if _number(version("torch")) >= COMPILED_TENSOR:
        return ""
    return f"torch {version('torch')} gives wrong gradients of compiled blocks under tp"


def compiler_problem() -> str:
    """Why torch can't compile for a GPU on this machine, in a clause; "": it can, as far as is seen."""
    if find_spec("triton") is None:
        return "torch.compile needs triton, which is not installed"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "triton needs a C compiler, and none of cc, gcc and clang is installed"
    return ""


def check_compiled_tensor() -> None:
    """Raise UserError if this torch can't compile blocks that are cut by tp."""
    if problem := compiled_tensor_problem():
        newer = f"install torch {_dotted(COMPILED_TENSOR)} or newer"
        raise UserError(f"{problem}: {newer}, or set train.compile=false.")


def check_pipelining(schedule: str, *, split: bool) -> None:
    """Raise UserError if this torch lacks a private name that pipelines use, or a parameter of one, or can't
    run `schedule`. split: True if that splits the backward pass.
    """
    if split and not splits_backward():
        raise UserError(
            f"torch {version('torch')} can't run schedule {schedule}, which splits the backward pass in two: "
            f"install torch {_dotted(SPLIT_BACKWARD)} or newer, or use another schedule, such as 1f1b."
        )
    used = [inside for inside in INSIDES if inside.path.startswith(_PIPELINING)]
    if changed := [inside.path.partition(":")[2] for inside in used if missing(inside)]:
        raise UserError(
            f"Pipelines use names of torch that are not public, and torch {torch.__version__} has others for "
            f"{', '.join(changed)}. meshtune is tested with {tested_versions()}: install one of these, or "
            "use a layout without pp."
        )


def _first_of(*names: str) -> Any:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
