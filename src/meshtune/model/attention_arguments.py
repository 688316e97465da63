"""Decide whether meshtune's attention can take what a family gives to its attention function.

    attention_problem(small, language, layers)   asked of a forward of a small copy, whose attention reports

transformers' flag `_supports_attention_backend` alone is not enough: some families that have it drop keyword
arguments on the way, pass a mask of their own, or add arguments that change the result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from meshtune.compat import HARMLESS, MUST_BE_OFF

PROBE = "meshtune_probe"

# Arguments of meshtune's attention itself.
KNOWN = {"documents", "scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"}


def unsupported(attention_mask: Any, is_causal: bool | None, others: Mapping[str, Any]) -> list[str]:
    """Return the arguments that would change the result and that meshtune's attention does not know.

    others: keyword arguments beside those in KNOWN; None and the HARMLESS ones pass, and those in MUST_BE_OFF
    if they are False.
    """
    found = [
        f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
        for name, value in others.items()
        if name not in HARMLESS and value is not None and not (name in MUST_BE_OFF and value is False)
    ]
    if attention_mask is not None:
        found.append("attention_mask (describe padding by `documents`)")
    if is_causal is False:
        found.append("is_causal=False")
    return found


def no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any) -> None:
    """Build no mask: `documents`, the window and causality are all that the attention needs.

    Raises NotImplementedError for what these can't express: a padding mask, or a model's own pattern laid
    over the causal one (Hugging Face sets `use_vmap` exactly then).
    """
    if attention_mask is not None or use_vmap:
        what = "an attention_mask" if attention_mask is not None else "a pattern over the causal one"
        raise NotImplementedError(
            f"meshtune's attention was given {what}: describe padding by `documents`, "
            "or use model.attention=sdpa."
        )


# The attention in layers of other kinds (`layer_types`); None: there is none.
ATTENTION_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
ATTENTION_OF |= dict.fromkeys(("linear_attention", "conv", "mamba", "recurrent", "mlp", "moe"))


INSIDE = "it computes its attention inside the model"


class _Given:
    """The arguments of each layer's attention in one forward."""

    def __init__(self) -> None:
        self.documents = object()  # the sentinel that must reach every layer
        self.windows: list[int | None] = []
        self.dropped = False
        self.problems: dict[str, None] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """Record one call, and return an output of the right shape."""
        others = {name: argument for name, argument in given.items() if name not in KNOWN}
        self.problems |= dict.fromkeys(unsupported(attention_mask, given.get("is_causal"), others))
        self.dropped |= given.get("documents") is not self.documents
        self.windows.append(given.get("sliding_window"))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@torch.no_grad()
def attention_problem(language: Any, ids: Tensor, layers: int) -> str | None:
    """Return why meshtune's attention can't be that of a model, as "it …"; None if it can, also where the
    model has no attention.

    language: body of a small copy that ran with another attention function and a mask; it uses PROBE
    afterwards. ids: [1, tokens]. layers: number of its modules of attention.
    """
    given = _Given()
    AttentionInterface.register(PROBE, given.attend)
    AttentionMaskInterface.register(PROBE, no_mask)
    set_attention(language, PROBE)
    try:
        language(input_ids=ids, use_cache=False, documents=given.documents)
    except Exception as error:  # each family fails in its own way without a mask
        if given.problems:
            return f"it gives its attention function {', '.join(given.problems)}"
        if not language._supports_attention_backend:
            return INSIDE
        reason = " ".join(str(error).split())[:120]
        if isinstance(error, NotImplementedError) or "documents" in reason:  # no_mask's, or no such argument
            return f"it can't run with another attention function ({type(error).__name__}: {reason})"
        return "it reads its attention mask, such as to select tokens, and meshtune's attention has none"
    if not given.windows and layers:
        return INSIDE
    if len(given.windows) != layers:
        return "its layers do not call the registered attention function once each"
    if given.problems:
        return f"it gives its attention function {', '.join(given.problems)}"
    if given.dropped:
        return "its blocks do not pass keyword arguments on to their attention"
    hidden = mask_only_pattern(language.config, given.windows)
    return f"it has {hidden}, which it does not pass to its attention function" if hidden else None


def set_attention(model: nn.Module, name: str) -> None:
    """Make all parts of a model use the attention function of this name, unchecked."""
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def mask_only_pattern(config: PretrainedConfig, windows: Sequence[int | None]) -> str | None:
    """Return the attention pattern that a model applies only through its mask; None if there is none.

    Such a pattern is named in the configuration but does not show in `windows`, the sliding_window argument
    (tokens, or None) that the attention function gets in each layer. An attention implementation that builds
    no mask would ignore it, and the model would be silently wrong.
    """
    text = config.get_text_config(decoder=True)
    if kinds := attention_kinds(text):
        passed = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return None if passed == kinds else f"layers of {', '.join(sorted(set(kinds)))}"
    window = text.sliding_window if hasattr(text, "sliding_window") else None
    return f"a sliding window of {window}" if window and not any(windows) else None


def attention_kinds(text: PretrainedConfig) -> list[str]:
    """Kind of each layer's attention, of those that have one; empty if the configuration names none."""
    kinds = text.layer_types if hasattr(text, "layer_types") else None
    found = (ATTENTION_OF.get(kind, kind) for kind in kinds or ())
    return [kind for kind in found if kind is not None]
