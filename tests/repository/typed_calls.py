"""Calls that mypy accepts, refuses, or infers the result types of; `make types` checks this file, and nothing runs it.

In strict mode, an ignored error that does not occur is itself an error.
"""

from typing import Any, assert_type

import numpy as np
import scipy.sparse

import cuflash
from cuflash import masks

q = np.ones((2, 4, 3), np.float32)
shape = cuflash.ShapeDtype((2, 4, 3), np.float32)
cuflash.attention(q, q, q, mask=masks.Causal(), causal="top_left", window=(3, None), executor="sim", kernel="simt")
cuflash.attention(q, q, q, mask=q[0, :, :1] < q[0, :, :1].T, precision="tf32", sink=q[:, 0, 0], bias=q[0, :1, :1])
cuflash.attention(q, q, q, mask=lambda b, h, i, j: j <= i, score=lambda s, b, h, i, j: s / 2, out=(q, None))
cuflash.attention(q, q, q, mask=cuflash.BlockIndex.from_mask(masks.Causal(), 4, 4, 2), scale=2, deterministic=True)
cuflash.attention(q, q, q, mask=scipy.sparse.eye_array(4), score=cuflash.scores.softcap(5.0) @ cuflash.scores.bias(q))
cuflash.attention_vjp(q, q, q, wrt=("sink",), sink=q[:, 0, 0])
cuflash.attention(q, cuflash.quantize(q), q, precision="tf32", dropout=cuflash.Dropout(0.1, seed=3))
cuflash.attention("q", "k", "v")  # type: ignore[call-overload]
cuflash.attention(q, q, q, dropout=0.1)  # type: ignore[call-overload]
cuflash.attention(q, q, q, executor="cuda")  # type: ignore[call-overload]
cuflash.attention(q, q, q, mask="x")  # type: ignore[call-overload]
cuflash.attention(q, q, q, mask=3)  # type: ignore[call-overload]
cuflash.attention(q, q, q, causal="yes")  # type: ignore[call-overload]
cuflash.attention(q, q, q, window=3)  # type: ignore[call-overload]
cuflash.attention(q, q, q, kernel="sm70")  # type: ignore[call-overload]
cuflash.attention(q, q, q, precision="fp32")  # type: ignore[call-overload]
cuflash.attention(q, q, q, bias=1.0)  # type: ignore[call-overload]
cuflash.attention(q, q, q, soft_cap=5.0)  # type: ignore[call-overload]
cuflash.attention(q, q, q, wrt="sink")  # type: ignore[call-overload]
cuflash.attention_vjp(q, q, q, wrt=3)  # type: ignore[call-overload]
cuflash.attention_jvp(q, q, q, q, tangents={"sink": q[:, 0, 0]}, sink=q[:, 0, 0], causal=True)
cuflash.attention_jvp(q, q, q, q_dot=3)  # type: ignore[call-overload]
cuflash.attention_hvp(q, q, q, q, v_dot="v")  # type: ignore[arg-type]
cuflash.plan(shape, shape, shape, executor="cuda")  # type: ignore[arg-type]
cuflash.precompile(shape, shape, shape, kernel="sm70")  # type: ignore[arg-type]
cuflash.study.recall(q, q, q, mask="window")  # type: ignore[arg-type]
masks.Lengths(3)  # type: ignore[call-arg]
assert_type(cuflash.attention(q, q, q, return_lse=True), tuple[Any, Any])
assert_type(cuflash.attention(q, q, q), Any)
assert_type(cuflash.attention(q, q, q, return_lse=bool(q.any())), Any | tuple[Any, Any])
assert_type(cuflash.attention_vjp(q, q, q, return_lse=True)[0], tuple[Any, Any])
assert_type(cuflash.attention_vjp(q, q, q)[1](q), cuflash.Gradients)
assert_type(cuflash.plan(q, q, q), cuflash.Plan)
