"""Options for attention, from the arguments that a Hugging Face model passes to its attention function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays import Array, describe, flag_reasons, int_reasons
from ..errors import UnsupportedProblem, refuse
from ..layouts import is_tensor
from ..masks import Sequences

# Options that models pass to an attention function although they do not affect its weights if there is a mask. They
# take effect before or after the call.
_WITHOUT_EFFECT = frozenset(
    "cache_position encoder_hidden_states logits_to_keep max_length_k max_length_q num_items_in_batch "
    "output_hidden_states output_router_logits past_key_values position_embeddings position_ids return_dict seq_idx "
    "use_cache".split()
)


def model_options(
    module: Any,
    query: Array,
    key: Array,
    attention_mask: Array,
    *,
    is_causal: bool | None,
    position_bias: Array,
    sliding_window: int | None,
    cu_seq_lens_q: Array | None,
    cu_seq_lens_k: Array | None,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the mask, causal, window and bias of a call.

    Causal attention of several queries without a mask is aligned to the first key, as in transformers' own function for
    scaled_dot_product_attention: keys after the last query are positions of a static cache that are not written yet.

    Raises
    ------
    UnsupportedProblem
        An option is unknown or not supported. The message lists all reasons.
    """
    reasons = _unknown_reasons(others)
    num_queries, num_keys = int(query.shape[-2]), int(key.shape[-2])
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    wrong = flag_reasons("is_causal", is_causal)
    wrong += [] if sliding_window is None else int_reasons(1, sliding_window=sliding_window)
    if wrong:
        raise UnsupportedProblem(reasons + wrong)
    mask, bias, window = attention_mask, position_bias, None
    causal: str | bool = "top_left" if is_causal and mask is None and num_queries > 1 else False
    if sliding_window is not None and mask is None and num_keys > sliding_window:  # otherwise the mask includes it
        left = sliding_window - 1
        if is_causal:
            causal, window = causal or "bottom_right", (left, 0)
        elif num_queries == num_keys:
            window = (left, left)
        else:
            fix = "register a mask function with AttentionMaskInterface, such as sdpa_mask"
            reasons.append(f"attention_mask must hold the window of {num_queries} queries of {num_keys} keys: {fix}")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None or query.shape[0] != 1:
            came = f"got {describe(cu_seq_lens_q)} and {describe(cu_seq_lens_k)} with batch {int(query.shape[0])}"
            fix = "pack all sequences into one"
            reasons.append(f"cu_seq_lens_q and cu_seq_lens_k must be passed together, for a batch of 1; {came}: {fix}")
            raise UnsupportedProblem(reasons)
        packed = Sequences(cu_seq_lens_q, cu_seq_lens_k, causal=causal and "bottom_right", window=window)
        mask, causal, window = packed if mask is None else packed & mask, False, None
    elif is_tensor(mask) and mask.is_floating_point():
        mask, bias = None, mask if bias is None else bias + mask
    refuse(reasons)
    if is_tensor(bias):  # a value of another type is refused by the call
        bias = bias.to(query.dtype)
    return {"mask": mask, "causal": causal, "window": window, "bias": bias}


def _unknown_reasons(others: Mapping[str, Any]) -> list[str]:
    """Return why options without a parameter are refused; those that are None or False are not in use."""
    reasons = []
    for name, value in others.items():
        if value is None or value is False or name in _WITHOUT_EFFECT:
            continue
        if name == "output_attentions":
            rule = "must be False, since no weights are stored"
            reasons.append(f"{name} {rule}; got {describe(value)}: use attn_implementation='eager'")
        else:
            rule, fix = "must be None, since this attention has no such option", "leave it out, or use "
            reasons.append(f"{name} {rule}; got {describe(value)}: {fix}attn_implementation='eager'")
    return reasons
