"""Faults in the steps of a cache on a GPU: the addresses that they write, and what they take without a check."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from mutations.planting import Edit
from mutations.python_guards import part

SIGNS = (AssertionError, IndexError)


class Given:
    """An array of CuPy's kind over memory of the host."""

    def __init__(self, host: Any) -> None:
        self.host, self.shape, self.strides, self.dtype, self.size = (
            host, host.shape, host.strides, host.dtype, host.size
        )  # fmt: skip
        self.nbytes, self.data = host.nbytes, SimpleNamespace(ptr=host.ctypes.data, device_id=0)

    def __array_namespace__(self) -> Any:
        stream = SimpleNamespace(is_capturing=lambda: False)
        cuda = SimpleNamespace(get_current_stream=lambda: stream)
        return SimpleNamespace(empty=lambda *args: Given(np.empty(*args)), cuda=cuda)


class Recording:
    """A target that keeps the arguments of launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def launcher(self, *launch: Any) -> Any:
        return lambda arguments, stream: self.launched.append(tuple(part.copy() for part in arguments.records))


def zeros(*shape: int, dtype: Any = np.float16) -> Given:
    return Given(np.zeros(shape, dtype))


def given() -> dict[str, Any]:
    """Make the arguments of an `attention` of one token and of an `append`, and the arrays of their cache."""
    tables = {name: zeros(3, dtype=np.int32) for name in ("table", "lengths", "num_faults", "counts", "arrivals")}
    pages = {name: zeros(3, 2, 100, 64) for name in ("k", "v")}
    single = {"lse": zeros(3, 4, 1, dtype=np.float32), "sink": zeros(4, dtype=np.float32)}
    return {"q": zeros(3, 4, 1, 64), "o": zeros(3, 4, 1, 64), **single, **pages, **tables}


def decode_plan_of(library: ModuleType, arrays: dict[str, Any]) -> Any:
    planning, problems = part(library, "planning.decoding"), part(library, "planning.problem")
    shapes = {name: library.ShapeDtype(array.shape, array.dtype) for name, array in arrays.items()}
    problem = problems.with_operands(problems.Problem.of(*(shapes[name] for name in "qkv")), {"sink": shapes["sink"]})
    layout = planning.CacheLayout(100, 100, 3, 1)
    return planning.decode_plan(problem, library.DeviceSpec.gpu("H100"), layout, left=None, right=0)


def steps_write_the_addresses_of_their_call(library: ModuleType) -> None:
    """All other bytes of the records are those of a launch that is bound anew; calls at once have their own."""
    steps, decoding, target = part(library, "cache.steps"), part(library, "executors.decoding"), Recording()
    first, second = given(), given()
    second |= {name: first[name] for name in ("k", "v", "table", "lengths", "num_faults", "arrivals")}
    plan = decode_plan_of(library, first)
    step = steps.DecodeStep(plan, first | {"o_parts": None, "stats_parts": None}, target)
    memory = zeros(step.nbytes, dtype=np.uint8)
    for arrays, lse in ((first, None), (second, second["lse"])):
        step.run(arrays["q"], arrays["o"], lse, arrays["counts"], arrays["sink"], memory, None)
    parts = {"o_parts": zeros(1), "stats_parts": zeros(1)}
    record, _ = (np.frombuffer(each.tobytes(), kind) for each, kind in zip(
        target.launched[1], (part(library, "planning.decoding").DECODE, part(library, "planning.sinks").SINK)
    ))  # fmt: skip
    for name in parts:
        parts[name].data.ptr = int(record[name][0])
    decoding.bound_decode(plan, second | parts, (), target)((), None)
    assert [each.tobytes() for each in target.launched[1]] == [each.tobytes() for each in target.launched[2]]
    assert target.launched[0][0].tobytes() != target.launched[1][0].tobytes()
    starts = [memory.data.ptr, *(each.data.ptr for each in parts.values()), memory.data.ptr + memory.nbytes]
    sizes = [first["lse"].nbytes, *(plan.workspaces[name].nbytes for name in parts)]
    assert all(start + size <= end for start, size, end in zip(starts, sizes, starts[1:]))
    assert all((start - memory.data.ptr) % 256 == 0 for start in starts)


def what_must_be_checked_is_not_taken(library: ModuleType) -> None:
    """Arrays that are not aligned or may overlap the cache or an input, and options whose type may not be right."""
    steps, arrays = part(library, "cache.steps"), given()
    q, o = arrays["q"], arrays["o"]
    step = steps.DecodeStep(
        decode_plan_of(library, arrays), arrays | {"o_parts": None, "stats_parts": None}, Recording()
    )
    far = (0, 16)
    assert step.takes(q, o, arrays["sink"], [far]) and step.takes(q, None, arrays["sink"], [far])
    start, end = o.data.ptr, o.data.ptr + o.nbytes
    for own in ((start - 8, start + 2), (end - 2, end + 8), (start, end), (start - 8, end + 8), (start + 2, end - 2)):
        assert not step.takes(q, o, arrays["sink"], [far, own])
    assert step.takes(q, o, arrays["sink"], [(start - 8, start), (end, end + 8)])
    assert not step.takes(q, q, arrays["sink"], [far])
    for odd in (q, arrays["sink"]):
        odd.data.ptr += 1
        assert not step.takes(q, None, arrays["sink"], [far])
        odd.data.ptr -= 1
    kept = steps.layout_key
    steps.layout_key = lambda *given: len(given)
    try:
        right = (True, (3, None), None, "auto", "auto", "ieee")
        assert steps._decode_key(q, None, None, right) is not None
        for place, value in enumerate((1, (True, None), True, None, None, None)):
            assert steps._decode_key(q, None, None, (*right[:place], value, *right[place + 1 :])) is None
    finally:
        steps.layout_key = kept


def shared_memory_is_as_large_as_the_largest_call(library: ModuleType) -> None:
    steps = part(library, "cache.steps").Steps(zeros(3), zeros(3))
    small = steps.memory(100)
    large = steps.memory(150)
    assert small.nbytes >= 100 and large.nbytes >= 150 and steps.memory(100) is large and steps.memory(150) is large
    assert steps._memory[0] is small


FILE, LAUNCH, ARGUMENTS = "cache/steps.py", "executors/bound_launch.py", "executors/arguments.py"
FAULTS = {
    steps_write_the_addresses_of_their_call: {
        "an address is not written": Edit(ARGUMENTS, "Arguments.take", "addresses[number] + offset", "words[word]"),
        "a sink's address goes to the first record": Edit(
            LAUNCH, "BoundLaunch.__init__", "ends[number] + offset // 8", "offset // 8"
        ),
        "counts are written before the record of the cache": Edit(
            "executors/decoding.py", "offset_of", "int(start) + offset_of(kind, name)", "offset_of(kind, name)"
        ),
        "an lse that is wanted is not written": Edit(
            FILE, "DecodeStep.run", "addresses[0] = lse.data.ptr", "pass"
        ),
        "workspaces are not aligned": Edit(
            FILE, "DecodeStep.__init__", "-(-size // _ALIGNMENT) * _ALIGNMENT for", "size for"
        ),
    },
    what_must_be_checked_is_not_taken: {
        "an output over the end of the cache is taken": Edit(
            FILE, "_Place.is_apart", "other_first < end", "other_first < first"
        ),
        "an output over q is taken": Edit(FILE, "DecodeStep.takes", "[*own, self._q.extent(q)]", "own"),
        "an odd address is taken": Edit(
            FILE, "_Place.is_aligned", "return not array.data.ptr & self._odd_bits", "return True"
        ),
        "1 is taken for True": Edit(FILE, "_decode_key", "type(causal) is not bool or", ""),
    },
    shared_memory_is_as_large_as_the_largest_call: {
        "a larger call gets the memory of a smaller one": Edit(
            FILE, "Steps.memory", "or self._memory[-1].nbytes < nbytes", ""
        ),
    },
}
