"""Calls of the kernels for attention of many new tokens to a cache, where unused rows hold NaN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from cache_calls import NEW, Drawn, hidden, launch
from cuflash import DeviceSpec
from cuflash.planning.decoding import CacheLayout
from cuflash.planning.prefill import prefill_pass, prefill_reasons
from cuflash.planning.problem import Problem, with_operands
from executors import Run

CHIP = DeviceSpec.gpu("H100")
FAMILIES = ("sm80", "sm90")
LENGTHS = (193, 0, 65)
CHUNK = NEW | {"rows": 70}
KINDS = {
    "grouped heads and a sink": CHUNK | {"heads": 4, "dtype": ml_dtypes.bfloat16, "sink": True},
    "a window, and dims that are padded": CHUNK | {"window": (70, None), "dim": 40},
}


def with_counts() -> Drawn:
    """Return sequences of several steps with fewer rows than the arrays, and NaN in rows of no sequence."""
    rng, counts = np.random.default_rng(0), (133, 3)
    q, k, v = (rng.standard_normal((2, 2, rows, 64)).astype(np.float16) for rows in (140, 460, 460))
    for b, count in enumerate(counts):
        q[b, :, count:] = np.nan
    return Drawn(q, k, v, None, (450, 150), counts=counts)


def prefilled(
    run: Run, family: str, call: Drawn, pages: tuple[Any, Any, Any] | None = None, target: Any = None
) -> tuple[Any, Any, int]:
    """Return o, lse and the kernels' fault count; memory that they must not read holds NaN."""
    k, v, table = (*hidden(call), None) if pages is None else pages
    layout = CacheLayout(call.k.shape[2], k.shape[2], k.shape[0], 1 if table is None else table.shape[1])
    sink = {} if call.sink is None else {"sink": call.sink}
    problem = with_operands(Problem.of(call.q, call.k, call.v), sink)
    assert prefill_reasons(problem, CHIP, family) == []
    left, _ = call.window or (None, None)
    kernels = prefill_pass(problem, CHIP, layout, family, left=left, right=0)
    arrays = {
        "q": call.q, "k": k, "v": v, "o": np.full_like(call.q, np.nan), "table": table,
        "lse": np.full(call.q.shape[:3], np.nan, np.float32), "lengths": np.array(call.lengths, np.int32),
        "counts": None if call.counts is None else np.array(call.counts, np.int32),
        "num_faults": np.zeros(1, np.int32), **sink,
    }  # fmt: skip
    arrays = {name: run.put(array) for name, array in arrays.items()}
    launch(run, kernels, arrays, target)
    return run.get(arrays["o"]), run.get(arrays["lse"]), int(run.get(arrays["num_faults"])[0])
