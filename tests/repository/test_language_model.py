"""The experiment's language model: its gradients, and equal generated text with and without a KV cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cuflash

SIZES = {"vocabulary": 11, "context": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "width": 8}


@pytest.fixture
def model(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("model")


def tokens(*shape: int) -> Any:
    return np.random.default_rng(1).integers(0, SIZES["vocabulary"], shape)


def test_gradients_are_the_slopes_of_the_loss(model: ModuleType) -> None:
    """Central differences in float64 with a step of eps^(1/3) have errors near eps^(2/3); sqrt(eps) leaves a margin."""
    config, text = model.Config(**SIZES), tokens(3, 14)
    weights = model.parameters(config, dtype=np.float64)
    _, gradients = model.loss_and_gradients(weights, text, config)
    eps, rng = np.finfo(np.float64).eps, np.random.default_rng(2)
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        direction, step = rng.standard_normal(gradient.shape), eps ** (1 / 3)
        losses = [
            model.loss_and_gradients({**weights, name: weights[name] + side * step * direction}, text, config)[0]
            for side in (1, -1)
        ]
        slope = (losses[0] - losses[1]) / (2 * step)
        assert abs(slope - (gradient * direction).sum()) <= eps**0.5 * np.abs(gradient * direction).sum()


def test_the_same_text_is_written_with_a_cache_and_without(model: ModuleType) -> None:
    config, prompt = model.Config(**SIZES), tokens(6)
    weights = model.parameters(config, dtype=np.float64)
    recomputed, cached = (model.write(weights, prompt, 18, config, is_cached=is_cached) for is_cached in (False, True))
    assert recomputed.tokens == cached.tokens and len(set(cached.tokens)) > 1
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 3, "tokens": 24, "dtype": np.float64}
    assert (recomputed.cache_bytes, cached.cache_bytes) == (0, cuflash.study.kv_cache_bytes(**sizes))


def test_training_lowers_the_loss(model: ModuleType) -> None:
    config = model.Config(**SIZES)
    text = np.tile(np.arange(SIZES["vocabulary"]), 12)
    losses = model.train(model.parameters(config), text, config, steps=60, batch=2)
    assert losses[-1] < np.log(SIZES["vocabulary"]) / 2  # half the loss of random guessing


def test_the_script_trains_writes_and_compares(
    model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["model.py", "--steps", "2", "--batch", "1", "--count", "5"])
    model.main()
    printed = capsys.readouterr().out
    assert "trained 2 steps" in printed and "equal texts: True" in printed
    assert f"characters/s, {2 * 2 * 2 * 16 * 96 * 4} bytes of cache" in printed
