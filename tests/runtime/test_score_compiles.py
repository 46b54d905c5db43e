"""Another softcap, temperature or array of slopes is only another argument of kernels that are already compiled."""

from __future__ import annotations

import cupy_machine
import numpy as np
import pytest
from executors import needs_compiler

import cuflash
from cuflash import scores
from cuflash.scores import Score
from cuflash.executors import sim as simulated

RNG = np.random.default_rng(5)
Q, K, V, DO = (RNG.standard_normal((2, 12, 8)).astype(np.float32) for _ in range(4))
SLOPES = np.array([0.5, 0.25], np.float32)


@pytest.fixture
def cupy(tmp_path, monkeypatch):
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine


@needs_compiler
@pytest.mark.parametrize("executor", ["gpu", "sim"])
def test_new_numbers_compile_nothing(cupy, executor):
    send = cupy.asarray if executor == "gpu" else np.asarray

    def results(cap: float, temperature: float, slopes: np.ndarray) -> list[np.ndarray]:
        score = scores.alibi(send(slopes)) @ Score(lambda s, b, h, i, j: s * temperature)
        arguments = {"softcap": cap, "score": score, "wrt": "slopes", "executor": executor}
        o, vjp = cuflash.attention_vjp(*map(send, (Q, K, V)), **arguments)
        gradients = vjp(send(DO))
        return [x.get() if executor == "gpu" else x for x in (o, *gradients, gradients["slopes"])]

    def num_compiled() -> tuple[int, int]:
        return len(cupy.compiled), simulated._kernel.cache_info().misses

    first = results(3.0, 0.75, SLOPES)
    before = num_compiled()
    assert before[executor == "sim"] > 0
    for changed in ((1.5, 0.75, SLOPES), (3.0, 1.25, SLOPES), (3.0, 0.75, 3 * SLOPES)):
        actual = results(*changed)
        assert num_compiled() == before
        assert all((ours != theirs).any() for ours, theirs in zip(actual, first, strict=True))
