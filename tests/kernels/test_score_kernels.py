"""Score functions in the kernels of every family: exact results identify each position, index, slope and gradient.

The probe is a score function that chooses at most two keys per query. Their scores are 0 and all others -inf, so P is
0, 1/2 or 1. Every result is then a small multiple of 1/16 in any order of summation. Rounded to such a multiple, it
equals what NumPy computes with integers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuflash.planning.problem import Problem
from cuflash.testing import Example, assert_within_bounds
from executors import GPU, SIM, Run, in_turn, is_long, needs_compiler

import cuflash
from cuflash import DeviceSpec, masks, scores, sim
from cuflash.scores import Score
from cuflash.executors import sim as executor

pytestmark = needs_compiler
WRT = ("at", "column", "entry", "of_head", "row", "table")


def probe(s, b, h, i, j, weight, at, column, entry, of_head, row, table, bucket) -> Any:
    """Return the score: `at` for chosen keys, -inf for others. All other real arrays hold zeros."""
    factor = 4 * weight[h, j] - 3 * weight[h, j]
    zeros = (entry[b] + of_head[h] + row[..., h, i]) * factor + column[..., j] + table[np.clip(bucket[i % 5, j], 0, 6)]
    return factor * (s - at[..., h, i, j]) + zeros


class Probe:
    """Arguments of a call with the probe as its score function, and the expected results in float64.

    Parameters
    ----------
    mask : Mask, optional
        `at` is NaN where the mask hides a key.
    """

    def __init__(
        self,
        dtype: Any,
        mask: masks.Mask | None = None,
        batch: tuple[int, ...] = (2, 3),
        heads: tuple[int, int] = (2, 1),
        lengths: tuple[int, int] = (37, 45),
        dim: int = 16,
    ) -> None:
        rng = np.random.default_rng(0)
        (num_heads, num_kv_heads), (rows, columns) = heads, lengths

        def whole(*shape: int) -> Any:
            return rng.integers(-2, 3, shape).astype(dtype)

        self.q, self.do = whole(*batch, num_heads, rows, dim), whole(*batch, num_heads, rows, dim)
        self.k, self.v = whole(*batch, num_kv_heads, columns, dim), whole(*batch, num_kv_heads, columns, dim)
        self.mask = mask
        allowed = np.ones((*batch, num_heads, rows, columns), bool)
        if mask is not None:
            shape = Problem.of(self.q, self.k, self.v).mask_shape
            allowed = mask.resolve(shape).toarray(**shape._asdict()).reshape(allowed.shape)
        is_chosen = np.zeros(allowed.shape, bool)
        np.put_along_axis(is_chosen, rng.integers(0, columns, (*allowed.shape[:-1], 2)), True, -1)
        self.scale = 0.25
        wide_k, wide_v = (np.repeat(x.astype(np.float64), num_heads // num_kv_heads, -3) for x in (self.k, self.v))
        scores = self.scale * self.q.astype(np.float64) @ wide_k.swapaxes(-1, -2)
        self.arrays = {
            "weight": rng.integers(1, 3, (num_heads, columns)).astype(dtype),
            "at": _backwards(np.where(allowed, np.where(is_chosen, scores, np.inf), np.nan).astype(np.float32)),
            "column": np.zeros((*batch[-1:], columns), np.float32),
            "entry": np.zeros(int(np.prod(batch)), np.float32),
            "of_head": np.zeros(num_heads, dtype),
            "row": np.zeros((*_alternately(batch), num_heads, 2 * rows), np.float32)[..., ::2],
            "table": np.zeros(7, np.float32),
            "bucket": np.where(rng.random((5, columns)) < 0.1, 1 << 40, rng.integers(-2, 8, (5, columns))),
        }
        self.expected = self._expected(is_chosen & allowed, wide_k, wide_v)

    def _expected(self, is_seen: Any, k: Any, v: Any) -> dict[str, Any]:
        counts = is_seen.sum(-1, keepdims=True)
        p = is_seen / np.maximum(counts, 1)
        o, do, q = p @ v, self.do.astype(np.float64), self.q.astype(np.float64)
        df = p * (do @ v.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True))
        weight = self.arrays["weight"].astype(np.float64)[:, None, :]
        ds = df * weight
        group = self.q.shape[-3] // self.k.shape[-3]
        rows, bucket = np.arange(df.shape[-2]) % 5, np.clip(self.arrays["bucket"], 0, 6)
        table = np.zeros(7)
        np.add.at(table, np.broadcast_to(bucket[rows], df.shape), df)
        every, batch = tuple(range(df.ndim)), tuple(range(df.ndim - 3))
        return {
            "o": o,
            "lse": np.log(counts[..., 0], where=counts[..., 0] > 0, out=np.full(counts.shape[:-1], -np.inf)),
            "dq": self.scale * ds @ k,
            "dk": _summed(self.scale * ds.swapaxes(-1, -2) @ q, group),
            "dv": _summed(p.swapaxes(-1, -2) @ do, group),
            "at": -ds,
            "column": df.sum((*batch[:-1], -3, -2)),
            "entry": ds.sum(every[-3:]).reshape(-1),
            "of_head": ds.sum((*batch, -2, -1)),
            "row": ds.sum(-1).sum(batch[1::2], keepdims=True),
            "table": table,
        }

    def run_results(
        self, run: Run, wrt: tuple[str, ...] = WRT, *, is_backward: bool = True, library: ModuleType = cuflash
    ) -> dict[str, Any]:
        """Return the results of a run of the library."""
        q, k, v, do = map(run.put, (self.q, self.k, self.v, self.do))
        score = library.scores.Score(probe, **{name: run.put(array) for name, array in self.arrays.items()})
        mask = run.put_mask(self.mask, self.q, self.k, self.v)
        options = {"mask": mask, "scale": self.scale, "score": score, "return_lse": True, **run.options}
        if not is_backward:
            return dict(zip(("o", "lse"), map(run.get, library.attention(q, k, v, **options))))
        (o, lse), vjp = library.attention_vjp(q, k, v, wrt=wrt, **options)
        gradients = vjp(do)
        named = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients)))
        return {name: run.get(x) for name, x in (named | {name: gradients[name] for name in wrt}).items()}

    def check(self, results: dict[str, Any]) -> None:
        for name, x in results.items():
            expected = self.expected[name]
            if name == "lse":
                assert np.array_equal(np.rint(np.exp(x.astype(np.float64))), np.rint(np.exp(expected)))
                continue
            sixteenths = 16 * expected
            assert np.array_equal(sixteenths, np.rint(sixteenths)) and abs(sixteenths).max() < 1 << 15
            assert x.shape == expected.shape, name
            wrong = np.argwhere(np.rint(16 * x.astype(np.float64)) != sixteenths)
            assert not len(wrong), f"{name} is wrong at {wrong[:8].tolist()}, {len(wrong)} elements"


def _backwards(x: Any) -> Any:
    """Return an equal array whose last axis has a negative stride."""
    return x[..., ::-1].copy()[..., ::-1]


def _alternately(batch: tuple[int, ...]) -> list[int]:
    """Return batch extents with every second one replaced by 1."""
    return [1 if place % 2 else extent for place, extent in enumerate(batch)]


def _summed(x: Any, group: int) -> Any:
    """Sum an array over the heads that share keys."""
    return x.reshape(*x.shape[:-3], -1, group, *x.shape[-2:]).sum(-3)


FAMILIES = (("simt", "float32"), ("naive", "float32"), ("sm80", "float16"), ("sm90", "float16"))


def on_every_family(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test by families and masks; a short run on the simulator has one mask for each family, in turn."""
    parameters = []
    for number, (kernel, dtype) in enumerate(FAMILIES):
        of_simulator = names if is_long() else [names[number % len(names)]]
        marks = pytest.mark.gpu(9, 0) if kernel == "sm90" else pytest.mark.gpu
        for run, some, marked in ((SIM, of_simulator, ()), (GPU, names, marks)):
            parameters += [
                pytest.param(replace(run, kernel=kernel), dtype, name, id=f"{run}-{kernel}-{name}", marks=marked)
                for name in some
            ]
    return pytest.mark.parametrize(("run", "dtype", "mask"), parameters)


MASKS = {
    "nothing": None,
    "causal": masks.Causal("top_left"),
    "lengths": masks.Lengths(kv=np.array([[7, 45, 0], [31, 16, 44]])),
}


@on_every_family([*MASKS][::-1])
def test_every_position_slope_and_gradient_is_its_own(run: Run, dtype: str, mask: str) -> None:
    probe = Probe(dtype, MASKS[mask])
    probe.check(probe.run_results(run))


def test_the_host_gives_the_same() -> None:
    for mask in MASKS.values():
        probe = Probe("float32", mask)
        probe.check(probe.run_results(Run("cpu")))


@pytest.mark.parametrize(("kernel", "dtype"), [("simt", "float32"), ("sm80", "float16"), ("sm90", "float16")])
def test_listed_blocks_have_the_positions_of_their_keys(kernel: str, dtype: str) -> None:
    mask = masks.BlockPattern(np.random.default_rng(1).random((4, 2)) < 0.6, 32) & masks.Dilated(2, align="top_left")
    probe = Probe(dtype, mask, batch=(2,), heads=(2, 1), lengths=(110, 60))
    probe.check(probe.run_results(replace(SIM, kernel=kernel)))


def check_few_queries(num_heads: int, lengths: tuple[int, int]) -> None:
    """Check split-KV on tiles that hold the queries of all heads in a group, if the group has several."""
    probe = Probe("float16", masks.Causal("bottom_right"), batch=(), heads=(num_heads, 1), lengths=lengths)
    plan = cuflash.plan(probe.q, probe.k, probe.v, executor="sim", kernel="sm80", causal="bottom_right")._plan
    spec = plan.kernels.forward.launches["forward"].spec
    assert spec.is_split and spec.pack_gqa == (num_heads > 1)
    probe.check(probe.run_results(replace(SIM, kernel="sm80"), is_backward=False))


@pytest.mark.parametrize(("num_heads", "lengths"), [(4, (3, 600)), (1, (40, 600))], ids=["packed", "split"])
def test_blocks_that_share_keys_or_heads_know_their_positions(num_heads: int, lengths: tuple[int, int]) -> None:
    check_few_queries(num_heads, lengths)


def check_shared_elements() -> None:
    """Check a kernel with more warps than sub-tiles: gradients of 16 x 16 blocks with wide rows."""
    mask = masks.BlockPattern(np.array([[True, False], [True, True]]), 16)
    probe = Probe("float16", mask, batch=(), heads=(2, 1), lengths=(32, 32), dim=160)
    plan = cuflash.plan(probe.q, probe.k, probe.v, mask=mask, executor="sim", kernel="sm80")._plan
    assert plan.kernels.backward.launches["backward"].spec.num_warps > 1
    probe.check(probe.run_results(replace(SIM, kernel="sm80"), ("at", "column", "entry", "row")))


def test_warps_that_hold_the_same_elements_add_their_gradients_once() -> None:
    check_shared_elements()


def check_shared_bias(run: Run) -> None:
    """Check the gradients of a bias that has an element per score, or is shared by heads or batch entries."""
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.integers(-2, 3, (2, 2, rows, 16)).astype(np.float16) for rows in (20, 40, 40, 20))
    for shape in ((2, 2, 20, 40), (2, 1, 20, 40), (2, 20, 40), (20, 40)):
        bias = rng.integers(-1, 2, shape).astype(np.float32)
        _, vjp = cuflash.attention_vjp(*map(run.put, (q, k, v)), bias=run.put(bias), wrt="bias", **run.options)
        example = run.rounded(Example(q=q, k=k, v=v, do=do, score=scores.bias(bias), wrt=("bias",)))
        assert_within_bounds(example, others={"bias": run.get(vjp(run.put(do))["bias"])})


@pytest.mark.parametrize(
    "run", [replace(SIM, kernel="sm80"), pytest.param(replace(GPU, kernel="sm80"), marks=pytest.mark.gpu)], ids=str
)
def test_gradients_of_a_bias_are_summed_over_what_shares_it(run: Run) -> None:
    check_shared_bias(run)


def check_past_the_end(kernel: str) -> None:
    """Check a function that is infinite at q . k = 0, which is the score of rows past the last query."""
    rng = np.random.default_rng(0)
    dtype = np.float32 if kernel == "simt" else np.float16
    q, k, v, do = (rng.uniform(0.5, 1, (1, rows, 32)).astype(dtype) for rows in (37, 128, 128, 37))
    o, vjp = cuflash.attention_vjp(q, k, v, score=lambda s, b, h, i, j: 1 / s, executor="sim", kernel=kernel)
    for x in (o, *vjp(do)):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("kernel", ["simt", "sm80"])
def test_what_a_function_gives_past_the_end_does_not_matter(kernel: str) -> None:
    check_past_the_end(kernel)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3, 2, 2)], ids=str)
def test_any_number_of_leading_axes_has_its_batch_entries(batch: tuple[int, ...]) -> None:
    probe = Probe("float32", batch=batch, heads=(2, 1), lengths=(5, 6))
    probe.check(probe.run_results(SIM))


def check_shown_text(kernel: str, library: ModuleType = cuflash) -> None:
    """Check that `Score.cuda` shows the source that a plan's kernels are compiled with, and the source of its slope."""
    q = np.ones((2, 16, 8), np.float16 if kernel == "sm80" else np.float32)
    score = library.scores.Score(
        lambda s, b, h, i, j, slope: 30 * np.tanh(s / 30) - slope[h] * np.abs(i - j), slope=np.ones(2, np.float32)
    )
    ready = library.plan(q, q, q, score=score, kernel=kernel, executor="sim", device=library.DeviceSpec.gpu("A100"))
    source = importlib.import_module(f"{library.__name__}.compiler.source").source
    of_forward, of_backward = score.cuda(), score.cuda(backward=True)
    assert "slopes.d0 = " in of_backward and "slopes.d0 = " not in of_forward
    texts = [source(spec) for spec in ready._plan.specs.values() if spec.score is not None]
    assert any(of_forward in text for text in texts) and any(of_backward in text for text in texts)
    assert all(of_forward in text or of_backward in text for text in texts)


@pytest.mark.parametrize("kernel", ["simt", "sm80"])
def test_cuda_shows_what_kernels_are_compiled_with(kernel: str) -> None:
    check_shown_text(kernel)


def test_another_number_compiles_nothing() -> None:
    q = np.ones((2, 16, 8), np.float16)

    def specs(cap: float) -> Any:
        plan = cuflash.plan(q, q, q, softcap=cap, executor="sim", device=DeviceSpec.gpu("A100"))._plan
        return plan.specs

    assert specs(3.0) == specs(7.5)


@on_every_family(["causal", "nothing"])
def test_repeatable_gradients_are_those_of_every_array(run: Run, dtype: str, mask: str) -> None:
    """If dQ has a kernel of its own, exactly one of the two gradient kernels adds to captured gradients."""
    probe = Probe(dtype, MASKS[mask])
    probe.check(probe.run_results(replace(run, deterministic=True)))


ONE_TO_THREE_NUMBERS = {
    "one": lambda s, b, h, i, j: s + 1.5 * h,
    "two": lambda s, b, h, i, j: 0.5 * s + 1.5 * h,
    "three": lambda s, b, h, i, j: 0.5 * s + 1.5 * h - 0.25 * i,
}


@pytest.mark.parametrize("run", [SIM, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), in_turn(ONE_TO_THREE_NUMBERS, ["float16", "float32", "float64"]))
def test_a_function_has_any_number_of_numbers(name: str, run: Run, dtype: str) -> None:
    function = ONE_TO_THREE_NUMBERS[name]
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 20, 8)).astype(dtype)
    expected = cuflash.attention(q, k, v, score=function, executor="cpu")
    o = run.get(cuflash.attention(*map(run.put, (q, k, v)), score=function, **run.options))
    product_dtype = np.float16 if dtype == "float16" else None
    bound = cuflash.error_bound(q, k, v, score=function, product_dtype=product_dtype).o
    # each differs from the exact o by at most its bound
    assert (np.abs(o.astype(float) - expected.astype(float)) <= 2 * bound).all()


SHARED = {  # a bias by what shares it, and the kind of sum that its gradient needs
    "nothing": ((2, 3, 16, 16), "own"), "the batch": ((3, 16, 16), "parts b"), "heads": ((2, 1, 16, 16), "parts h"),
    "both": ((16, 16), "parts bh"), "queries": ((2, 3, 1, 16), "exact"),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "kind"), SHARED.values(), ids=SHARED)
def test_the_kind_of_sums_follows_what_shares_an_array(shape: tuple[int, ...], kind: str) -> None:
    q = np.ones((2, 3, 16, 8), np.float32)
    plan = cuflash.plan(q, q, q, bias=np.zeros(shape, np.float32), wrt="bias", deterministic=True, executor="sim")._plan
    assert plan.kernels.is_repeatable
    sums = {spec.score_sums for spec in plan.kernels.backward.specs.values()} - {()}
    assert sums == {(kind,)}
    default = cuflash.plan(q, q, q, bias=np.zeros(shape, np.float32), wrt="bias", executor="sim")._plan
    assert {spec.score_sums for spec in default.kernels.backward.specs.values()} == {()}
    assert default.kernels.is_repeatable <= (kind == "own")


def normal_example(kernel: str) -> Example:
    """Return an example whose captured gradients change bits if their terms are added in another order."""
    rng = np.random.default_rng(3)
    dtype = "float32" if kernel in ("simt", "naive") else "float16"
    q, k, v, do = (rng.standard_normal((2, 2, 70, 16)).astype(dtype) for _ in range(4))
    arrays = {
        "pairs": rng.standard_normal((2, 70, 70)).astype(np.float32),
        "slopes": rng.standard_normal(2).astype(np.float32),
        "table": rng.standard_normal((2, 8)).astype(np.float32),
    }

    def function(s: Any, b: Any, h: Any, i: Any, j: Any, pairs: Any, slopes: Any, table: Any) -> Any:
        return s + slopes[h] * (j - i) / 8 + table[h, (i * j) % 8] + pairs[h, i, j]

    return Example(q=q, k=k, v=v, do=do, score=Score(function, **arrays), wrt=tuple(arrays))


def normal_call(run: Run, kernel: str, library: ModuleType = cuflash, **others: Any) -> dict[str, Any]:
    """Return the gradients of the captured arrays of `normal_example`."""
    example = normal_example(kernel)
    q, k, v, do = (run.put(x) for x in (example.q, example.k, example.v, example.do))
    arrays = {name: run.put(x) for name, x in example.score.arrays.items()}
    options = {**run.options, "kernel": kernel, **others}
    _, vjp = library.attention_vjp(
        q, k, v, score=library.scores.Score(example.score.function, **arrays), wrt=example.wrt, **options
    )
    gradients = vjp(do)
    return {name: run.get(gradients[name]) for name in arrays}


@pytest.mark.parametrize("kernel", ["simt", "sm80"])
def test_repeatable_gradients_have_the_same_bits_in_every_order(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of blocks changes the default gradients' bits, but not those of the reproducible ones."""
    outputs = []
    for schedule in (sim.Schedule(), sim.Schedule(seed=5, order="random", resident_blocks=4)):
        monkeypatch.setattr(executor, "_SIMULATOR", executor.Simulator(schedule))
        outputs.append([normal_call(SIM, kernel, deterministic=deterministic) for deterministic in (True, False)])
    (first, default), (second, other) = outputs
    assert all(x.tobytes() == second[name].tobytes() for name, x in first.items())
    assert any(x.tobytes() != other[name].tobytes() for name, x in default.items())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["simt", "naive", "sm80", "sm90"])
def test_a_thousand_calls_on_a_gpu_have_the_same_bits(kernel: str) -> None:
    first = normal_call(GPU, kernel, deterministic=True)
    for _ in range(1000 if kernel == "sm90" else 50):
        again = normal_call(GPU, kernel, deterministic=True)
        assert all(again[name].tobytes() == x.tobytes() for name, x in first.items())
