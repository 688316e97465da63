"""Run the body of a Hugging Face model, embeddings, blocks and last norm, on a packed micro-batch, or its
head on hidden states: no cache.

The lengths of the documents go down to meshtune's attention as the keyword argument `documents`. With any
other attention Hugging Face itself keeps documents apart, by the positions that restart (only without a
cache and a mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from meshtune.model.anatomy import Anatomy, anatomy, aside_of, head_runner, is_scored
from meshtune.model.documents import documents_of

if TYPE_CHECKING:
    from meshtune.data.batch import MicroBatch


# Names of meshtune's attention in a model's config: as it is, and recomputed in the backward.
ATTENTION_NAMES = ("meshtune", "meshtune_recompute")


def body_forward(
    model: nn.Module, anatomy: Anatomy, micro_batch: MicroBatch, hidden: Tensor | None = None
) -> Tensor:
    """Hidden states [batch, seq, hidden] after the last norm.

    hidden: input [batch, seq, hidden] of the body's first block; None: the embeddings of the micro-batch's
    ids. Documents are kept apart: by `documents`, their lengths, or with other attention by their positions.
    """
    body: Any = model.get_submodule(anatomy.body)
    ours = body.config._attn_implementation in ATTENTION_NAMES
    packed = {"documents": micro_batch.boundaries} if ours else {}
    begin = {"input_ids": micro_batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    with documents_of(micro_batch):
        positions = micro_batch.position_ids + anatomy.first_position
        return body(**begin, position_ids=positions, use_cache=False, **packed).last_hidden_state


def text_forward(model: PreTrainedModel, **inputs: Tensor) -> None:
    """Run one forward only on text, without a cache: the whole model's, or, where parts of it were set
    aside, and of a reward model, that of its body and then of its head.
    """
    if not aside_of(model) and not is_scored(model.config):
        model(**inputs, use_cache=False)
        return
    parts = anatomy(model)
    hidden = model.get_submodule(parts.body)(**inputs, use_cache=False).last_hidden_state
    with head_only(model, parts) as logits_of:
        logits_of(hidden.flatten(0, 1))


class _BodyOutput(BaseModelOutputWithPast):
    """Hidden states and nothing else: what some bodies return besides (cross attentions, ...) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands for the body while the model's forward runs only its head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        vars(self)["body"] = body  # not a part of this module

    def __getattr__(self, name: str) -> Any:
        """Some heads call a part of the body (OPT its decoder), which is the stub too; some read a factor of
        the logits there (Falcon-H1).
        """
        found = getattr(vars(self)["body"], name)
        return self if isinstance(found, nn.Module) else found

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=self.hidden)  # type: ignore[arg-type]


@contextmanager
def head_only(model: nn.Module, anatomy: Anatomy) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function: hidden [tokens, hidden] -> logits [tokens, vocabulary], by the model's own forward,
    or -> scores [tokens, 1] of a reward model, whose forward scores only the last token.

    A head split by tp gives only the logits of its vocabulary entries. While the context is open, the body
    of `model` is replaced by a stub, in a model that also sees or hears with all that lies around it.

    `forward` and not a call: hooks on the model, such as those of a sharded root, have run or will run around
    all of this.
    """
    if is_scored(model.config):  # pyright: ignore[reportArgumentType]
        yield model.get_submodule(anatomy.head)
        return
    runner_path, body_path = head_runner(anatomy)
    runner: Any = model.get_submodule(runner_path)
    name = body_path.rpartition(".")[2]
    body = runner.get_submodule(name)
    stub = _Stub(body)

    def logits_of(hidden: Tensor) -> Tensor:
        stub.hidden = hidden[None]
        # Some families read the shape of their inputs before they call the body (Gemma 4).
        logits = runner.forward(inputs_embeds=stub.hidden, use_cache=False, return_dict=True).logits
        return logits.squeeze(0)  # not logits[0], whose backward copies the gradient

    runner._modules[name] = stub
    try:
        yield logits_of
    finally:
        runner._modules[name] = body


# Tables of positions #


def cast_position_tables(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the tables of positions that are added to embeddings (XGLM's) to the passes' dtype, in place.

    transformers computes them in the dtype that a model is built in. In fp32 they would make all hidden
    states fp32, which matrices in bf16 can't be multiplied with.
    """
    columns = model.get_input_embeddings().get_parameter("weight").shape[-1]
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point() and buffer.shape[1:] == (columns,):
                module._buffers[name] = buffer.to(dtype)


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what training casts: the parameters, and of the buffers tables of positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    cast_position_tables(model, dtype)
