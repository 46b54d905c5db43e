"""A pass binds to a record of its launches with the contents that features describe; several records join into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cuflash.executors._records import LaunchRecord
from cuflash.executors.launch import BoundPass, pass_record
from cuflash.executors.sim import Simulator
from cuflash.planning.launches import MATRICES, Feature, Launch, Pass, Workspace, record_of
from cuflash.planning.selection_kernels import selection_spec
from hypothesis import given
from hypothesis import strategies as st

INNER = np.dtype([("rows", MATRICES), ("size", np.int64), ("table", np.uint64)], align=True)
OUTER = np.dtype(
    [
        ("q", MATRICES), ("sink", MATRICES), ("inner", INNER), ("seed", np.int64), ("bias", np.uint64),
        ("bias_strides", np.int64, (3,)), ("first", np.uint64), ("second", np.uint64), ("counter", np.uint64),
    ],
    align=True,
)  # fmt: skip
FEATURE = Feature(
    "outer", OUTER, {"inner": {"size": 7}}, ("table", "bias", "results", "counter"), numbers=("seed",),
    names={"inner.rows": "k", "inner.table": "table", "first": "results", "second": "results"}, starts={"second": 512},
)  # fmt: skip
SPEC = selection_spec("draw", np.dtype(np.float32))
LAUNCH = Launch(spec=SPEC, tiles=3, reads=(), writes=(), features=("outer",))
PASS = Pass({"draw": LAUNCH}, {"counter": Workspace((4,), np.dtype(np.int32), is_zeroed=True)}, (FEATURE,))


class Recording(Simulator):
    """A simulator that stores the arguments of launches, and runs nothing."""

    launched: list[tuple[Any, int, tuple[bytes, ...]]] = []

    def launch(self, spec: Any, grid: int, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
        self.launched.append((spec, grid, tuple(each.tobytes() for each in arguments)))


def launched(bound: BoundPass, addresses: list[int]) -> list[Any]:
    """Return the params records of OUTER that kernels receive."""
    Recording.launched.clear()
    bound.launch(addresses, None)
    assert all((spec, grid) == (SPEC, 3) for spec, grid, _ in Recording.launched)
    return [np.frombuffer(argument, OUTER)[0] for *_, (argument,) in Recording.launched]


def arrays_of(shape: tuple[int, ...], order: str) -> dict[str, Any]:
    """Return arrays [batch, heads, rows, columns], [batch, heads, rows] and [heads], and some others."""
    q = np.zeros(shape, np.float16, order)  # type: ignore[call-overload]
    return {
        "q": q, "k": np.zeros(shape[:3], np.float32), "sink": np.zeros(shape[1], np.float32), "table": np.zeros(3),
        "bias": np.zeros((4, 1, 5), np.float32), "results": np.zeros(99),
    }  # fmt: skip


@given(
    st.tuples(*[st.integers(1, 3)] * 4), st.sampled_from("CF"), st.sets(st.sampled_from(["q", "k", "bias", "results"])),
    st.integers(0, 1 << 40),
)  # fmt: skip
def test_a_record_holds_what_the_feature_says(
    shape: tuple[int, ...], order: str, given_names: set[str], seed: int
) -> None:
    arrays = arrays_of(shape, order)
    names, addresses = sorted(given_names), {name: array.ctypes.data for name, array in arrays.items()}
    counter = np.zeros(4, np.int32)
    bound = BoundPass.of(PASS, {**arrays, "counter": counter}, names, Recording())
    addresses |= {name: 4096 * (number + 1) for number, name in enumerate(names)}
    (launched_arguments,) = launched(bound, [*(addresses[name] for name in names), seed])

    def matrices(name: str, *strides: int) -> tuple[Any, ...]:
        batch, head, row, column = (*strides, 0, 0, 0)[:4]
        return addresses[name], (batch,) * 3, head, row, column, 0

    steps = {
        name: [step // array.itemsize * (extent > 1) for step, extent in zip(array.strides, array.shape)]
        for name, array in arrays.items()
    }
    inner = {"rows": matrices("k", *steps["k"]), "size": 7, "table": addresses["table"]}
    expected = record_of(OUTER, {
        "q": matrices("q", *steps["q"]), "sink": matrices("sink", 0, *steps["sink"]), "inner": inner, "seed": seed,
        "bias": addresses["bias"], "bias_strides": [5, 0, 1], "first": addresses["results"],
        "second": addresses["results"] + 512, "counter": counter.ctypes.data,
    })  # fmt: skip
    assert launched_arguments == expected
    assert bound.record.workspaces == {} and bound.record.names == tuple(names)


def test_an_array_that_is_left_out_has_no_address() -> None:
    arrays = {**arrays_of((1, 1, 1, 1), "C"), "bias": None, "table": None}
    (launched_arguments,) = launched(BoundPass.of(PASS, arrays, ["table"], Recording()), [0, 0])
    assert (
        launched_arguments["bias"] == launched_arguments["inner"]["table"] == 0 and launched_arguments["counter"] != 0
    )


def test_records_join_into_one_with_names_of_the_whole() -> None:
    """One part writes what another reads; workspaces are shared, and arrays that no caller passes have address 0."""
    kernels, target = replace(PASS, features=(replace(FEATURE, numbers=()),)), Recording()
    names, arrays = ["q", "k", "results"], arrays_of((1, 2, 3, 4), "C")
    part = pass_record(kernels, arrays, names, target)
    assert (part.names, list(part.workspaces)) == (("q", "k", "results"), ["counter"])
    scratch = Workspace((600,), np.dtype(np.uint8))
    whole = LaunchRecord.joined(
        [(part, {"results": "scratch"}), (part, {"q": "scratch", "k": "other"})], ["q", "k", "results"],
        {"scratch": scratch},
    )  # fmt: skip
    assert whole.names == ("q", "k", "results") and list(whole.workspaces) == ["scratch", "counter"]
    first, second = launched(BoundPass(whole, target), [100, 200, 300])
    assert (first["q"]["data"], first["inner"]["rows"]["data"]) == (100, 200)
    assert second["q"]["data"] == first["first"] == first["second"] - 512 not in (0, 300)
    assert (second["inner"]["rows"]["data"], second["first"], second["second"]) == (0, 300, 812)
    assert first["counter"] == second["counter"] != 0 and first["sink"] == second["sink"]


def test_arrays_that_are_set_to_zero_have_their_bytes() -> None:
    arrays = arrays_of((1, 2, 3, 4), "C")
    record = pass_record(replace(PASS, zeroed=("results", "q")), arrays, ["q", "table", "results"], Recording())
    assert record.zeroed == ((2, arrays["results"].nbytes), (0, arrays["q"].nbytes))
