"""FlashAttention 4 as torch calls it (torch.nn.attention._fa4): before torch 2.15 it expects two results of
the forward, where newer versions of the package return five.
"""

from importlib import import_module
from typing import Any

_interface: Any = import_module("flash_attn.cute.interface")
_flash_attn_bwd = _interface._flash_attn_bwd


def _flash_attn_fwd(*arguments: Any, **options: Any) -> Any:
    """Return output and log-sum-exp."""
    return _interface._flash_attn_fwd(*arguments, **options)[:2]
