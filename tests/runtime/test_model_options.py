"""The attention function for transformers models, compared with PyTorch's attention under an explicit mask."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cuflash.torch  # noqa: E402
from cuflash import masks  # noqa: E402
from refusals import reasons_of  # noqa: E402

attention = cuflash.torch.transformers_attention
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def layer(is_causal=None):
    module = torch.nn.Module()
    if is_causal is not None:
        module.is_causal = is_causal
    return module


def drawn_inputs(num_queries=6, num_keys=6, batch=2):
    return drawn(batch, 4, num_queries, 8), drawn(batch, 2, num_keys, 8), drawn(batch, 2, num_keys, 5)


def require(options, allowed, num_queries=6, num_keys=6, bias=None, is_causal=None, **others):
    """Require PyTorch's result and gradients for a boolean mask and a bias."""
    tensors = [tensor.requires_grad_() for tensor in drawn_inputs(num_queries, num_keys, others.pop("batch", 2))]
    output, weights = attention(layer(is_causal), *tensors, **options)
    assert weights is None and output.is_contiguous()
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.float64)
    if allowed is not None:
        hidden = hidden.masked_fill(~torch.as_tensor(np.array(allowed)), -torch.inf)
    hidden = hidden if bias is None else hidden + bias
    expected = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=hidden.expand(tensors[0].shape[0], 4, -1, -1), enable_gqa=True, **others
    ).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    leaves = [*tensors, *([bias] if bias is not None and bias.requires_grad else [])]
    for ours, theirs in zip(*(torch.autograd.grad(o.square().sum(), leaves) for o in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("of_module", [None, False, True])
@pytest.mark.parametrize("of_call", [None, False, True])
def test_the_call_says_whether_it_is_causal_before_the_module(of_module, of_call):
    """If neither says so, the call is causal, as in transformers' function for PyTorch."""
    is_causal = of_call if of_call is not None else of_module is not False
    require({"is_causal": of_call}, np.tri(6, dtype=bool) if is_causal else None, is_causal=of_module)


def test_a_single_query_without_a_mask_meets_all_keys():
    require({"is_causal": True}, None, num_queries=1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_alone_says_what_is_hidden(is_causal):
    allowed = np.tri(6, 9, 2, dtype=bool)
    mask = torch.as_tensor(allowed)[None, None]
    require({"attention_mask": mask, "is_causal": is_causal, "sliding_window": 2}, allowed, num_keys=9)
    floats = torch.zeros(1, 1, 6, 9, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    require({"attention_mask": floats, "is_causal": is_causal}, allowed, num_keys=9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_a_position_bias_is_added_and_learnt(mask, is_causal):
    bias, is_allowed = drawn(1, 4, 6, 6).requires_grad_(), np.tri(6, k=1, dtype=bool)
    allowed = is_allowed if mask else np.tri(6, dtype=bool) if is_causal else None
    options = {"position_bias": bias, "is_causal": is_causal}
    if mask == "bool":
        options["attention_mask"] = torch.as_tensor(is_allowed)[None, None]
    if mask == "float":
        hidden = ~torch.as_tensor(is_allowed)
        options["attention_mask"] = torch.zeros(6, 6, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    require(options, allowed, bias=bias)


@pytest.mark.parametrize(("num_queries", "num_keys", "is_causal", "mask"), [
    (6, 6, True, masks.Band(-2, 0)), (6, 6, False, masks.Band(-2, 2)), (1, 6, True, masks.Band(3, 5)),
    (6, 3, True, masks.Band(-5, 0)), (6, 8, True, masks.Band(-2, 0)), (3, 3, False, masks.Band(-2, 2)),
])  # fmt: skip
def test_a_window_without_a_mask_is_a_window(num_queries, num_keys, is_causal, mask):
    """It counts the query's own key: three keys with the previous ones, five with those on both sides."""
    allowed = mask.toarray(num_queries, num_keys)
    require({"sliding_window": 3, "is_causal": is_causal}, allowed, num_queries, num_keys)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("has_mask", [False, True])
def test_packed_sequences_attend_themselves(is_causal, window, has_mask):
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    reach = (None, None) if window is None or has_mask else (window - 1, 0 if is_causal else window - 1)
    causal = is_causal and not has_mask
    allowed = masks.Sequences([0, 2, 6], causal=causal, window=reach).toarray(6)
    options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4, "max_length_k": 4}
    options |= {"is_causal": is_causal, "sliding_window": window}
    if has_mask:
        band = masks.Band(-4, 4).toarray(6)
        options["attention_mask"], allowed = torch.as_tensor(band)[None, None], allowed & band
    require(options, allowed, batch=1)


def test_other_options_are_those_of_attention():
    q, k, v = drawn_inputs()
    sinks = drawn(4).requires_grad_()
    options = {"scaling": 0.3, "softcap": 2.0, "s_aux": sinks, "deterministic": True}
    o, _ = attention(layer(), q, k, v, None, is_causal=False, **options)
    expected = cuflash.torch.attention(q, k, v, scale=0.3, softcap=2.0, sink=sinks).transpose(1, 2)
    assert torch.equal(o, expected) and o.requires_grad
    torch.manual_seed(3)
    dropped, _ = attention(layer(), q, k, v, None, dropout=0.5)
    torch.manual_seed(3)
    again, _ = attention(layer(), q, k, v, None, dropout=0.5)
    other, _ = attention(layer(), q, k, v, None, dropout=0.5)
    assert torch.equal(dropped, again) and not torch.equal(dropped, other)


def test_options_on_which_no_weight_depends_are_ignored():
    q, k, v = drawn_inputs()
    others = {
        "position_ids": torch.arange(6)[None], "cache_position": torch.arange(6), "use_cache": True, "labels": None,
        "output_hidden_states": True, "output_attentions": False, "num_items_in_batch": 3, "indices": None,
        "deterministic": False,
    }  # fmt: skip
    assert torch.equal(attention(layer(), q, k, v, None, **others)[0], attention(layer(), q, k, v, None)[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"indices": torch.arange(3)}, "indices must be None, since this attention has no such option; got Tensor: "
            "leave it out, or use attn_implementation='eager'",
        ),
        ({"sinks": 1.0}, "sinks must be None, since this attention has no such option; got 1.0: leave it out, or use"),
        ({"head_mask": np.ones(4)}, "head_mask must be None, since this attention has no such option; got an array of"),
        (
            {"output_attentions": True}, "output_attentions must be False, since no weights are stored; got True: use "
            "attn_implementation='eager'",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q and cu_seq_lens_k must be passed together, for "
            "a batch of 1; got ",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 8])}, "cu_seq_lens_q and "
            "cu_seq_lens_k must be passed together, for a batch of 1; got ",
        ),
        ({"sliding_window": "a"}, "sliding_window must be an int of at least 1; got 'a'"),
        ({"sliding_window": True}, "sliding_window must be an int of at least 1; got True"),
        ({"is_causal": "no"}, "is_causal must be True or False; got 'no'"),
        (
            {"sliding_window": 3, "is_causal": False}, "attention_mask must hold the window of 6 queries of 8 keys: "
            "register a mask function with AttentionMaskInterface, such as sdpa_mask",
        ),
    ],
)  # fmt: skip
def test_what_changes_results_is_refused(options, sentence):
    (reason,) = reasons_of(attention, layer(), *drawn_inputs(6, 8), None, **options)
    assert reason.startswith(sentence)


def test_what_is_no_tensor_is_refused_by_the_call():
    q, k, v = drawn_inputs()
    with pytest.raises(TypeError, match="^q must be a torch.Tensor; got an array"):
        attention(layer(), q.numpy(), k, v)
    with pytest.raises(TypeError, match="^bias must be a torch.Tensor; got an array"):
        attention(layer(), q, k, v, position_bias=np.zeros((6, 6)))
    for mask in (np.ones((6, 6), bool), torch.ones(6, 6, dtype=torch.bool)):
        assert torch.equal(attention(layer(), q, k, v, mask)[0], attention(layer(False), q, k, v)[0])


def test_every_reason_comes_at_once():
    options = {"sliding_window": 3, "indices": 3, "output_attentions": True}
    reasons = reasons_of(attention, layer(False), *drawn_inputs(6, 8), None, **options)
    assert [reason.split()[0] for reason in reasons] == ["indices", "output_attentions", "attention_mask"]
