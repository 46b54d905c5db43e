"""Hugging Face transformers models run with the attention function that the documentation page registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_docs import blocks  # noqa: E402

import cuflash.torch  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
TOKENS = torch.randint(1, 50, (3, 11), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones_like(TOKENS)
PADDING[0, :3] = 0
PADDING[1, -4:] = 0

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and its imports emit warnings


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    """Register the attention function by running the page's own code."""
    exec(compile(blocks(PAGE)[0].source, str(PAGE), "exec"), {})


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))
    return model.to(torch.float64).eval()


def trained(model: Any, name: str, tokens: Any = TOKENS, padding: Any = PADDING) -> tuple[Any, Any, Any]:
    """Return the logits of tokens other than padding, the loss, and the gradients of all parameters.

    No token is predicted from padding, whose queries attend whatever transformers' mask function allows them.
    """
    follows_padding = torch.nn.functional.pad(padding[:, :-1], (1, 0), value=1) == 0
    labels = tokens.masked_fill((padding == 0) | follows_padding, -100)
    model.set_attn_implementation(name)
    model.zero_grad()
    out = model(tokens, attention_mask=padding, labels=labels)
    out.loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return out.logits[padding.bool()].detach(), out.loss.detach(), gradients


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Record queries, keys and options of the calls of `cuflash.torch.attention`."""
    recorded: list[tuple[Any, Any, dict[str, Any]]] = []
    attention = cuflash.torch.attention
    monkeypatch.setattr(
        cuflash.torch,
        "attention",
        lambda q, k, v, **options: recorded.append((q, k, options)) or attention(q, k, v, **options),
    )
    return recorded


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("padding", [torch.ones_like(TOKENS), PADDING], ids=["whole", "padded"])
def test_loss_and_gradients_of_llama_are_those_of_pytorch(calls: Any, num_kv_heads: int, padding: Any) -> None:
    model = llama(num_key_value_heads=num_kv_heads)
    theirs = trained(model, "sdpa", padding=padding)
    assert calls == []
    for mine, right in zip(trained(model, "exact", padding=padding), theirs):
        torch.testing.assert_close(mine, right)
    assert len(calls) == 2 and {key.shape[1] for _, key, _ in calls} == {num_kv_heads}


def test_generation_with_a_cache_writes_the_same_tokens(calls: Any) -> None:
    model, tokens, padding = llama(), TOKENS[[0, 2]], PADDING[[0, 2]]
    written = []
    for name in ("sdpa", "exact"):
        model.set_attn_implementation(name)
        written.append(model.generate(tokens, attention_mask=padding, max_new_tokens=6, do_sample=False))
    assert (written[0] == written[1]).all() and written[0].shape == (2, 17)
    assert {(q.shape[2], k.shape[2]) for q, k, _ in calls} == {(11, 11), *((1, length) for length in range(12, 17))}


def test_a_sequence_may_come_in_pieces(calls: Any) -> None:
    """Several new queries attend the keys of a cache and their own keys."""
    model = llama()
    model.set_attn_implementation("exact")
    with torch.no_grad():
        whole = model(TOKENS).logits
        first = model(TOKENS[:, :5], use_cache=True)
        rest = model(TOKENS[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)
    assert (6, 11) in {(q.shape[2], k.shape[2]) for q, k, _ in calls}


@pytest.mark.parametrize("kind", ["Gemma2", "GptOss"])
def test_caps_and_sinks_of_other_models_are_taken(calls: Any, kind: str) -> None:
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"this version of transformers has no {kind}")
    more = {"num_local_experts": 2, "num_experts_per_tok": 1} if kind == "GptOss" else {"query_pre_attn_scalar": 8}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more, attention_dropout=0.0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    theirs = trained(model, "eager")
    for mine, right in zip(trained(model, "exact"), theirs):
        torch.testing.assert_close(mine, right)
    option = {"Gemma2": "softcap", "GptOss": "sink"}[kind]
    assert calls and all(options[option] is not None for _, _, options in calls)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Mistral"])
@pytest.mark.parametrize("sizes", [(6, 5), (1, 1, 4, 1), (11,)])
def test_a_static_cache_gives_the_logits_of_a_whole_sequence(kind, sizes):
    """The cache is longer than the tokens written to it, and the prompt's mask may be omitted."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, sliding_window=8, query_pre_attn_scalar=8)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    tokens = TOKENS[:, : sum(sizes)]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        model.set_attn_implementation("exact")
        cache = transformers.StaticCache(config=config, max_cache_len=24)
        parts = [model(part, past_key_values=cache).logits for part in tokens.split(sizes, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("kind", ["CLIPText", "SiglipText", "Bert", "ModernBert"])
def test_encoders_are_causal_where_they_say_so(kind):
    if not hasattr(transformers, f"{kind}Model"):
        pytest.skip(f"this version of transformers has no {kind}")
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    ends = {"pad_token_id": 0, "eos_token_id": 49, "bos_token_id": 48, "cls_token_id": 48, "sep_token_id": 49}
    config = getattr(transformers, f"{kind}Config")(**sizes, **ends, num_attention_heads=4, local_attention=4)
    torch.manual_seed(0)
    model, results = getattr(transformers, f"{kind}Model")(config).double().eval(), []
    for name in ("sdpa", "exact"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            whole = model(input_ids=TOKENS).last_hidden_state
            padded = model(input_ids=TOKENS[1:], attention_mask=PADDING[1:]).last_hidden_state[PADDING[1:].bool()]
        results.append((whole, padded))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5"])
def test_relative_positions_of_encoders_and_decoders_are_added_and_learnt(kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    results = []
    for name in ("eager", "exact"):
        torch.manual_seed(0)
        make = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config
        model = make(config, attn_implementation=name).double().eval()
        out = model(input_ids=TOKENS, attention_mask=PADDING, decoder_input_ids=TOKENS[:, :5])
        out.logits.square().mean().backward()
        biases = [each.grad for place, each in model.named_parameters() if "relative_attention_bias" in place]
        assert biases and all(each.count_nonzero() for each in biases)
        written = model.generate(TOKENS, attention_mask=PADDING, max_new_tokens=4, do_sample=False)
        results.append((out.logits.detach(), *biases, written))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_window_without_a_mask_is_that_of_the_model(calls):
    """The page's mask function creates no mask."""
    exec(compile(blocks(PAGE)[-1].source, str(PAGE), "exec"), vars(transformers) | {"cuflash": cuflash})
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=4)
    model = transformers.MistralForCausalLM(config).double().eval()
    whole = torch.ones_like(TOKENS)
    theirs = trained(model, "eager", padding=whole)
    for mine, right in zip(trained(model, "exact_unpadded", padding=whole), theirs):
        torch.testing.assert_close(mine, right)
    assert all(options["window"] == (3, 0) and options["mask"] is None for _, _, options in calls)
    written = []
    for name in ("eager", "exact_unpadded"):
        model.set_attn_implementation(name)
        written.append(model.generate(TOKENS, max_new_tokens=6, do_sample=False))
    assert (written[0] == written[1]).all()


def test_an_option_that_a_model_needs_and_attention_lacks_is_refused():
    model = llama()
    model.set_attn_implementation("exact")
    with pytest.raises(cuflash.UnsupportedProblem, match="^output_attentions must be False"):
        model(TOKENS, output_attentions=True)
    with pytest.raises(cuflash.UnsupportedProblem, match="^indices must be None"):
        model(TOKENS, indices=torch.arange(3))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_dropout_is_drawn_from_pytorch_s_generator(calls: Any, checkpoints: bool) -> None:
    """Equal generator states give equal steps, also if layers are recomputed for their gradients."""
    model = llama(attention_dropout=0.5).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(trained(model, "exact"))
    assert all(torch.equal(mine, again) for mine, again in zip(results[0], results[1]))
    assert not torch.equal(results[0][1], results[2][1])
    drawn = [options["dropout"] for _, _, options in calls]
    assert len({each.seed for each in drawn}) == 4 and {each.p for each in drawn} == {0.5}
    assert len(drawn) == (12 if checkpoints else 6)
    model.gradient_checkpointing_disable()
    torch.manual_seed(0)
    for mine, whole in zip(results[0], trained(model, "exact")):
        torch.testing.assert_close(mine, whole)
    assert all(torch.equal(x, y) for x, y in zip(trained(model.eval(), "exact"), trained(llama(), "exact")))
