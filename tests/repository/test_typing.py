"""A type checker refuses arguments that no call takes, and knows what each call returns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A line is followed by the kind of error that mypy must report of it, or by the type that it must reveal.
CLIENT = """
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
cuflash.attention(q, cuflash.quantize(q), q, precision="fp8", dropout=cuflash.Dropout(0.1, seed=3))
cuflash.attention("q", "k", "v")  # call-overload
cuflash.attention(q, q, q, dropout=0.1)  # call-overload
cuflash.attention(q, q, q, executor="cuda")  # call-overload
cuflash.attention(q, q, q, mask="x")  # call-overload
cuflash.attention(q, q, q, mask=3)  # call-overload
cuflash.attention(q, q, q, causal="yes")  # call-overload
cuflash.attention(q, q, q, window=3)  # call-overload
cuflash.attention(q, q, q, kernel="sm70")  # call-overload
cuflash.attention(q, q, q, precision="fp32")  # call-overload
cuflash.attention(q, q, q, bias=1.0)  # call-overload
cuflash.attention(q, q, q, soft_cap=5.0)  # call-overload
cuflash.attention(q, q, q, wrt="sink")  # call-overload
cuflash.attention_vjp(q, q, q, wrt=3)  # call-overload
cuflash.plan(shape, shape, shape, executor="cuda")  # arg-type
cuflash.precompile(shape, shape, shape, kernel="sm70")  # arg-type
cuflash.recall(q, q, q, "window")  # arg-type
masks.Lengths(3)  # call-arg
reveal_type(cuflash.attention(q, q, q, return_lse=True))  # tuple[Any, Any]
reveal_type(cuflash.attention(q, q, q))  # Any
reveal_type(cuflash.attention(q, q, q, return_lse=bool(q.any())))  # Any | tuple[Any, Any]
reveal_type(cuflash.attention_vjp(q, q, q, return_lse=True)[0])  # tuple[Any, Any]
reveal_type(cuflash.attention_vjp(q, q, q)[1](q))  # cuflash.plans.Gradients
reveal_type(cuflash.plan(q, q, q))  # cuflash.plans.Plan
"""


def test_a_type_checker_refuses_what_no_call_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    client, config = tmp_path / "client.py", tmp_path / "mypy.ini"
    client.write_text(CLIENT.lstrip())
    config.write_text("[mypy]\nstrict = True\n[mypy-scipy.*,ml_dtypes.*]\nignore_missing_imports = True\n")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    said, _, _ = api.run([str(client), f"--config-file={config}", f"--cache-dir={tmp_path}", "--hide-error-context"])
    found: dict[int, str] = {}
    for number, kind, revealed in re.findall(
        r'client\.py:(\d+): (?:error: .*\[([\w-]+)\]|note: Revealed type is "(.*)")$', said, re.MULTILINE
    ):
        found[int(number)] = kind or revealed
    lines = enumerate(CLIENT.lstrip().splitlines(), 1)
    expected = {number: line.rpartition("  # ")[2] for number, line in lines if "  # " in line}
    assert found == expected, said
