"""Tables of positions that are added to the embeddings, as buffers."""

import torch
from transformers import PreTrainedModel


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
