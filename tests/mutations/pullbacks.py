"""Planted faults in the checks of arrays that a vjp reads a second time."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle

import numpy as np
from mutations.planting import Edit
from test_unchanged import DTYPES, LONG_SHAPES, SHAPE, change, check_checksum, drawn_bits, everything

# exceptions with which a guard reports a fault; ValueError if NumPy refuses the faulty view
SIGNS = (AssertionError, ValueError)


def checksums_are_right(library):
    """Check that a checksum depends on every bit and its position, and not on strides."""
    for shape, dtype in itertools.product([(5, 4), LONG_SHAPES[1], LONG_SHAPES[-1]], DTYPES):
        for place in (0, -1):
            check_checksum(library, drawn_bits(shape, dtype, 1), place)


def changes_are_seen(library):
    """Check that a vjp, its copies and its pickles refuse every array that they read and that has changed."""
    arrays, _ = everything()
    table, is_kept, seed = arrays["table"], arrays["is_kept"], arrays["dropout_seed"]
    function = lambda s, b, h, i, j, table, is_kept: np.where(is_kept[j], s + table[i], s)  # noqa: E731
    score = library.scores.Score(function, table=table, is_kept=is_kept)
    (arrays["o"], arrays["lse"]), vjp = library.attention_vjp(
        arrays["q"], arrays["k"], arrays["v"], score=score, dropout=library.Dropout(0.1, seed), return_lse=True
    )
    for name in ("q", "k", "v", "o", "lse", "table", "is_kept", "dropout_seed"):
        before = arrays[name].copy()
        change(arrays[name], 5)
        for pullback in (vjp, copy.copy(vjp), pickle.loads(pickle.dumps(vjp))):
            try:
                pullback(arrays["q"])
            except RuntimeError as error:
                assert str(error).startswith(f"{name} must"), f"says {error}"
            else:
                raise AssertionError(f"{name} may change")
        arrays[name][...] = before
    vjp(arrays["q"])
    sink = np.ones(2, np.float32)
    _, vjp = library.attention_vjp(arrays["q"], arrays["q"], arrays["q"], sink=sink)
    sink += 1
    try:
        vjp(arrays["q"])
    except RuntimeError as error:
        raise AssertionError(f"a sink without a gradient is not read: {error}") from error


def flags_are_right(library):
    """Check that results are read-only while a vjp or a copy of it lives, and writable afterwards, in any order."""
    q = np.ones(SHAPE, np.float32)
    (o, lse), vjp = library.attention_vjp(q, q, q, return_lse=True)
    assert not o.flags.writeable and not lse.flags.writeable
    twin = copy.copy(vjp)
    del vjp
    gc.collect()
    assert not o.flags.writeable
    del twin
    gc.collect()
    assert o.flags.writeable and lse.flags.writeable
    buffer, frozen = np.empty_like(o), np.empty_like(o)
    view = buffer[:1]
    _, of_view = library.attention_vjp(q[:1], q[:1], q[:1], out=view)
    try:
        vjps = [library.attention_vjp(q, q, q, out=buffer)[1] for _ in range(3)]
    except ValueError as error:
        raise AssertionError(f"an output cannot be used again: {error}") from error
    assert not buffer.flags.writeable
    del of_view
    gc.collect()
    assert view.flags.writeable and not buffer.flags.writeable
    while vjps:
        assert not buffer.flags.writeable
        del vjps[0]
        gc.collect()
    assert buffer.flags.writeable
    exported = np.from_dlpack(frozen)
    _, vjp = library.attention_vjp(q, q, q, out=exported)
    del vjp
    gc.collect()
    assert exported.flags.writeable, "memory of another library stays as it is"


FAULTS = {
    checksums_are_right: {
        "places of a row count alike": Edit("calls/unchanged.py", "checksum", "* _ODD | 1", "* 0 | 1"),
        "rows count alike": Edit(
            "calls/unchanged.py", "checksum",
            'zlib.crc32(np.einsum("...i,i->...", words, factors).tobytes())',
            'int(np.einsum("...i,i->...", words, factors).sum())',
        ),
    },
    changes_are_seen: {
        "nothing is compared": Edit("calls/pullback.py", "Pullback.__call__", "if self._sums:", "if False:"),
        "captured arrays are not compared": Edit(
            "calls/pullback.py", "Pullback._read", '"lse": self.lse, **operands}', '"lse": self.lse}'
        ),
        "operands of the forward pass are compared": Edit(
            "calls/pullback.py", "Pullback._read", "if not is_of_forward(name)", "if True"
        ),
    },
    flags_are_right: {
        "results may be written to": Edit(
            "calls/unchanged.py", "Held.__init__", "array.flags.writeable = False", "pass"
        ),
        "flags stay": Edit("calls/unchanged.py", "Held.__del__", "if self.was_writeable:", "if False:"),
        "a copy does not hold the results": Edit(
            "calls/pullback.py", "Pullback.__setstate__", "held(self.o, self.lse)", "()"
        ),
        "an array in use is refused": Edit("api.py", "attention_vjp", "with writeable(out):", "with writeable(None):"),
        "a view under a held array stays read-only": Edit(
            "calls/unchanged.py", "_make_writeable", "owner.flags.writeable = True", "pass"
        ),
        "memory of another library is held": Edit(
            "calls/unchanged.py", "held",
            "(not array.flags.writeable or _make_writeable(array.view(np.ndarray)[...]))", "True",
        ),
    },
}  # fmt: skip
