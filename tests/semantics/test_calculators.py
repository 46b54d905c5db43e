"""The calculators return the memory of arrays, caches and plans, which must equal what is allocated."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from executors import DTYPES
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import KVCache, UnsupportedProblem
from cuflash.study import kv_cache_bytes, largest_length
from cuflash.study.calculators import memory_report
from cuflash.testing import Structure

MODEL = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": np.float16}
SIZES = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 5),
        "num_kv_heads": st.integers(1, 5),
        "head_dim": st.sampled_from([1, 8, 40]),
        "value_dim": st.none() | st.just(7),
        "dtype": st.sampled_from(["float16", "float32", "float64", "float8_e4m3fn"]),
    }
)


def caches_of(sizes: dict[str, Any], **fields: Any) -> int:
    """Return the bytes of the caches of all layers."""
    sizes = dict(sizes)
    return sizes.pop("num_layers") * KVCache(**sizes, **fields).nbytes


@given(SIZES, st.integers(1, 4), st.integers(1, 50))
def test_a_contiguous_cache_takes_what_is_calculated(sizes: dict[str, Any], batch: int, tokens: int) -> None:
    assert kv_cache_bytes(**sizes, tokens=[tokens] * batch) == caches_of(sizes, batch=batch, capacity=tokens)


@given(SIZES, st.lists(st.integers(1, 50), min_size=1, max_size=4), st.sampled_from([16, 32]))
def test_pages_take_what_is_calculated(sizes: dict[str, Any], lengths: list[int], page_size: int) -> None:
    calculated = kv_cache_bytes(**sizes, tokens=lengths, page_size=page_size)
    a_page = caches_of(sizes, batch=1, capacity=9, page_size=page_size, num_pages=1)
    cache = KVCache(batch=len(lengths), num_kv_heads=1, head_dim=1, capacity=50, dtype="f4", page_size=page_size,
                    num_pages=calculated // a_page)  # fmt: skip
    cache.reserve(lengths)
    assert cache.num_free_pages == 0 and calculated % a_page == 0


@given(SIZES, st.integers(1, 4), st.none() | st.sampled_from([16, 64]), st.integers(0, 1 << 20))
def test_the_largest_length_fits_and_one_more_does_not(sizes: Any, batch: int, page_size: Any, room: int) -> None:
    length = largest_length(room, **sizes, batch=batch, page_size=page_size)
    taken = [
        kv_cache_bytes(**sizes, tokens=[tokens] * batch, page_size=page_size) for tokens in (length, length + 1)
    ]
    assert taken[0] <= room < taken[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_call_is_that_of_its_arrays(dtype: str) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "seqlen_q": 30, "seqlen_kv": 50, "value_dim": 5}
    example = Structure(q_batch=(2,), k_batch=(1,), v_batch=(), dtype=dtype, **sizes).example()
    arrays = example.q, example.k, example.v
    (o, lse), vjp = cuflash.attention_vjp(*arrays, return_lse=True)
    for plan in (cuflash.plan(*arrays), cuflash.plan(*arrays)._plan, cuflash.plan(*arrays, executor="sim")):
        report = cuflash.study.memory(plan)
        assert report.inputs == sum(array.nbytes for array in arrays) and report.results == o.nbytes + lse.nbytes
        assert report.gradients == sum(gradient.nbytes for gradient in vjp(o))
        assert (
            report.workspace == plan.workspace_bytes
            and report.forward == report.inputs + report.results + report.workspace
        )


def test_the_command_says_what_a_cache_takes() -> None:
    sizes = ["--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--tokens", "100", "--batch", "2"]
    more = ["--page-size", "64", "--dtype", "float32", "--heads", "64", "--available", "2"]
    model = {"num_layers": 80, "head_dim": 128, "dtype": "float32", "page_size": 64}
    whole = kv_cache_bytes(num_kv_heads=8, tokens=[100, 100], **model) / 2**30
    ungrouped = kv_cache_bytes(num_kv_heads=64, tokens=[100, 100], **model) / 2**30
    longest = largest_length(2 * 2**30, num_kv_heads=8, batch=2, **model)
    lines = [line.split() for line in memory_report([*sizes, *more]).splitlines()]
    assert lines[0] == ["one", "token", "640.00", "KiB"]
    assert lines[1] == ["2", "x", "100", "tokens", f"{whole:.2f}", "GiB"]
    assert lines[2][:5] == ["with", "64", "heads", f"{ungrouped:.2f}", "GiB"]
    assert lines[3][:5] == ["in", "2", "GiB", str(longest), "tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layers 2", "the following arguments are required"),
        ("--dtype float17", "error: --dtype must be a NumPy dtype or its name;"),
        ("--dtype bool", "error: --dtype must be a dtype of numbers; got bool"),
        ("--kv-heads x", "invalid int value: 'x'"),
        ("--page-size 0", "error: --page-size must be a multiple of 16, at most 1024; got 0"),
        ("--available nan", "error: --available must be a number of GiB from 0 to 2**70; got nan"),
        ("--layers 0 --head-dim -1", "--layers must be at least 1; got 0; --head-dim must be at least 1; got -1"),
        ("--tokens -1", "error: --tokens must be at least 0; got -1"),
        ("--batch 0", "error: --batch must be at least 1; got 0"),
        ("--heads 7 --kv-heads 2", "--heads must be a multiple of --kv-heads, 2; got 7"),
        ("--heads 0", "--heads must be a multiple of --kv-heads, 1; got 0"),
    ],
)  # fmt: skip
def test_the_command_refuses_what_makes_no_cache(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = [] if words == "--layers 2" else "--layers 1 --kv-heads 1 --head-dim 1 --tokens 1".split()
    with pytest.raises(SystemExit) as caught:
        memory_report([*good, *words.split()])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "python -m cuflash memory: error:" in said and message in said


FLAGS = {
    "layers": "num_layers", "kv-heads": "num_kv_heads", "head-dim": "head_dim", "tokens": "tokens",
    "batch": "batch", "page-size": "page_size", "heads": "num_kv_heads", "available": "available_bytes",
}  # fmt: skip


@given(st.fixed_dictionaries({name: st.integers(-1, 40) for name in FLAGS}))
def test_the_command_speaks_of_its_flags_alone(sizes: dict[str, int]) -> None:
    """An error names the wrong flags as they are typed on the command line; valid flags give a report."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            report = memory_report([word for name, size in sizes.items() for word in (f"--{name}", str(size))])
        except SystemExit as left:
            assert left.code == 2
            _, _, reasons = said.getvalue().partition("error: ")
            assert all(reason.startswith("--") for reason in reasons.split("; ")[::2])
            assert not any(name in reasons for name in FLAGS.values() if "_" in name)
        else:
            assert f"{sizes['batch']} x {sizes['tokens']} tokens" in report and not said.getvalue()


def test_the_command_takes_batches_of_any_size() -> None:
    words = "--layers 1 --kv-heads 1 --head-dim 1 --tokens 2 --batch 1000000000000000"
    assert f"{8e15 / 2**30:.2f} GiB" in memory_report(words.split())


def test_tokens_in_an_array_are_those_in_a_list() -> None:
    assert kv_cache_bytes(**MODEL, tokens=np.array([100, 1000])) == kv_cache_bytes(**MODEL, tokens=[100, 1000])


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(UnsupportedProblem, match="4 reasons"):
        kv_cache_bytes(**MODEL | {"num_layers": 0, "dtype": "x"}, tokens=-1, page_size=0.5)
