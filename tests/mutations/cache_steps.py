"""Planted faults in the steps of a cache on a GPU: the addresses that they write, and the calls that skip checks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from mutations.planting import Edit
from mutations.python_guards import part

SIGNS = (AssertionError, IndexError)  # exceptions with which a guard reports a fault


class Given:
    """A CuPy-like array over host memory."""

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
    """A target that records the arguments of launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    tensor_map = lists = None

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def launcher(self, *launch: Any) -> Any:
        return lambda arguments, stream: self.launched.append(tuple(part.copy() for part in arguments.records))


def zeros(*shape: int, dtype: Any = np.float16) -> Given:
    return Given(np.zeros(shape, dtype))


def inputs() -> dict[str, Any]:
    """Return the arguments of an `attention` of one token and of an `append`, and the arrays of their cache."""
    tables = {name: zeros(3, dtype=np.int32) for name in ("table", "lengths", "num_faults", "counts", "arrivals")}
    pages = {name: zeros(3, 2, 100, 64) for name in ("k", "v")}
    single = {"lse": zeros(3, 4, 1, dtype=np.float32), "sink": zeros(4, dtype=np.float32)}
    return {"q": zeros(3, 4, 1, 64), "o": zeros(3, 4, 1, 64), **single, **pages, **tables}


def decode_pass_of(library: ModuleType, arrays: dict[str, Any]) -> Any:
    planning, problems = part(library, "planning.decoding"), part(library, "planning.problem")
    shapes = {name: library.ShapeDtype(array.shape, array.dtype) for name, array in arrays.items()}
    problem = problems.with_operands(problems.Problem.of(*(shapes[name] for name in "qkv")), {"sink": shapes["sink"]})
    layout = planning.CacheLayout(100, 100, 3, 1)
    return planning.decode_pass(problem, library.DeviceSpec.gpu("H100"), layout, left=None, right=0)


def steps_write_the_addresses_of_their_call(library: ModuleType) -> None:
    """Check that records equal those of a new binding except for addresses, and that concurrent calls share none."""
    steps, target = part(library, "cache.steps"), Recording()
    first, second = inputs(), inputs()
    second |= {name: first[name] for name in ("k", "v", "table", "lengths", "num_faults", "arrivals")}
    kernels = decode_pass_of(library, first)
    step = steps.DecodeStep(kernels, first, target, ("q", "sink"))
    memory = zeros(step.nbytes, dtype=np.uint8)
    for arrays, lse in ((first, None), (second, second["lse"].data.ptr)):
        q, o, counts, sink = (arrays[name].data.ptr for name in ("q", "o", "counts", "sink"))
        step.launch((q, sink, o, counts, *step.places(memory.data.ptr, lse)), None)
    parts = {"o_parts": zeros(1), "stats_parts": zeros(1)}
    record, _ = (np.frombuffer(each.tobytes(), kind) for each, kind in zip(
        target.launched[1], (part(library, "planning.decoding").DECODE, part(library, "planning.sinks").SINK)
    ))  # fmt: skip
    for name in parts:
        parts[name].data.ptr = int(record[name][0])
    part(library, "executors.launch").BoundPass.of(kernels, second | parts, (), target).launch((), None)
    assert [each.tobytes() for each in target.launched[1]] == [each.tobytes() for each in target.launched[2]]
    assert target.launched[0][0].tobytes() != target.launched[1][0].tobytes()
    starts = [*step.places(memory.data.ptr, None), memory.data.ptr + memory.nbytes]
    sizes = [*(kernels.workspaces[name].nbytes for name in parts), first["lse"].nbytes]
    assert starts[:2] == [each.data.ptr for each in parts.values()]
    assert all(start + size <= end for start, size, end in zip(starts, sizes, starts[1:]))
    assert all((start - memory.data.ptr) % 256 == 0 for start in starts)


def what_must_be_checked_is_not_taken(library: ModuleType) -> None:
    """Check that steps refuse arrays that are unaligned or may overlap, and options with types that need a check."""
    steps, arrays = part(library, "cache.steps"), inputs()
    q, o, sink = (arrays[name].data.ptr for name in ("q", "o", "sink"))
    step = steps.DecodeStep(decode_pass_of(library, arrays), arrays, Recording(), ("q", "sink"))
    far = (0, 16)
    assert step.takes([q, sink, o], [far]) and step.takes([q, sink], [far])
    start, end = o, o + arrays["o"].nbytes
    for own in ((start - 8, start + 2), (end - 2, end + 8), (start, end), (start - 8, end + 8), (start + 2, end - 2)):
        assert not step.takes([q, sink, o], [far, own])
    assert step.takes([q, sink, o], [(start - 8, start), (end, end + 8)])
    assert not step.takes([q, sink, q], [far])
    assert not step.takes([q + 1, sink], [far]) and not step.takes([q, sink + 1], [far])
    original, q = steps.layout_key, arrays["q"]
    steps.layout_key = lambda *arguments: len(arguments)
    try:
        right = (True, (3, None), None, "auto", "auto", "ieee")
        assert steps.decode_key(None, steps.Request(q, None, None, right, None, None)) is not None
        for place, value in enumerate((1, (True, None), True, None, None, None)):
            wrong = *right[:place], value, *right[place + 1 :]
            assert steps.decode_key(None, steps.Request(q, None, None, wrong, None, None)) is None
    finally:
        steps.layout_key = original


class Tensor:
    """The layout of a PyTorch tensor on a GPU."""

    def __init__(self, **others: Any) -> None:
        of_kind = {"is_cuda": True, "layout": "strided", "requires_grad": False, "negated": False, "start": 256}
        vars(self).update(of_kind | {"shape": (2, 8), "dtype": "float16", "device": "cuda:0"} | others)

    def is_neg(self) -> bool:
        return bool(self.negated)

    def data_ptr(self) -> int:
        return int(self.start)

    def get_device(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        if self.shape is None:
            raise RuntimeError("has no strides")
        return (self.shape[1], 1)


def tensors_that_must_be_taken_have_no_layout(library: ModuleType) -> None:
    """Check that only tensors that kernels on CuPy's stream can read in place have a layout."""
    layouts, of_tensor, stream = part(library, "layouts"), {"torch": 0}, SimpleNamespace(ptr=0)
    c_part = SimpleNamespace(
        _cuda_getCurrentRawStream=lambda device: of_tensor["torch"], _is_fwd_grad_enabled=lambda: True
    )
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    forward_ad = SimpleNamespace(_current_level=-1)
    torch = SimpleNamespace(
        Tensor=Tensor, strided="strided", _C=c_part, autograd=SimpleNamespace(forward_ad=forward_ad)
    )  # fmt: skip
    modules = {"torch": torch, "cupy": SimpleNamespace(cuda=cuda)}
    with patch.dict(sys.modules, modules):
        plain = layouts.tensors_layout(Tensor(), Tensor())
        assert plain is not None and plain == layouts.tensors_layout(Tensor(start=512), Tensor())
        for other in ({"shape": (2, 9)}, {"dtype": "float32"}, {"device": "cuda:1"}):
            assert layouts.tensors_layout(Tensor(), Tensor(**other)) not in (None, plain)
        for wrong in (
            {"is_cuda": False}, {"layout": "sparse"}, {"requires_grad": True}, {"negated": True}, {"start": 0},
            {"shape": None},
        ):  # fmt: skip
            assert layouts.tensors_layout(Tensor(), Tensor(**wrong)) is None
        assert layouts.tensors_layout(Tensor(), type("Other", (Tensor,), {})()) is None
        forward_ad._current_level = 0  # inside a level of forward mode, a tensor may carry a tangent
        assert layouts.tensors_layout(Tensor()) is None
        forward_ad._current_level = -1
        of_tensor["torch"] = 7
        assert layouts.tensors_layout(Tensor()) is None


def shared_memory_is_as_large_as_the_largest_call(library: ModuleType) -> None:
    steps = part(library, "cache.steps").Steps(zeros(3), zeros(3))
    small = steps.memory(100)
    large = steps.memory(150)
    assert small.nbytes >= 100 and large.nbytes >= 150 and steps.memory(100) is large and steps.memory(150) is large
    assert steps._memory[0] is small


FILE, RECORDS, ARGUMENTS = "cache/steps.py", "executors/_records.py", "executors/arguments.py"
FAULTS = {
    steps_write_the_addresses_of_their_call: {
        "an address is not written": Edit(ARGUMENTS, "Arguments.take", "addresses[number] + offset", "words[word]"),
        "a sink's address goes to the first record": Edit(
            RECORDS, "LaunchRecord.of", "places.append(Place(start + word,", "places.append(Place(word,"
        ),
        "counts are written before the record of the cache": Edit(
            "planning/launches.py", "leaves", "(inner, offset + start)", "(inner, start)"
        ),
        "an lse that is wanted is not written": Edit(
            FILE, "DecodeStep.places", "addresses[-1] = lse", "pass"
        ),
        "workspaces are not aligned": Edit(
            FILE, "DecodeStep.__init__", "-(-size // _ALIGNMENT) * _ALIGNMENT for", "size for"
        ),
    },
    what_must_be_checked_is_not_taken: {
        "an output over the end of the cache is taken": Edit(
            FILE, "Step.takes", "other < stop", "other < first"
        ),
        "an output over q is taken": Edit(FILE, "Step.takes", "others = [*others, (first, stop)]", "pass"),
        "an odd address is taken": Edit(
            FILE, "Step.takes", "if start & odd_bits:", "if False:"
        ),
    },
    tensors_that_must_be_taken_have_no_layout: {
        "a tensor with a tangent is read": Edit("layouts.py", "tensors_layout", "or has_dual_level()", ""),
        "a tensor that another stream writes is read": Edit(
            "layouts.py", "tensors_layout", "if _is_on_stream_of(tensors[0], cupy) else None", ""
        ),
        "a subclass of tensors is read": Edit("layouts.py", "_is_plain", "type(value) is torch.Tensor and", ""),
    },
    shared_memory_is_as_large_as_the_largest_call: {
        "a larger call gets the memory of a smaller one": Edit(
            FILE, "Steps.memory", "or self._memory[-1].nbytes < nbytes", ""
        ),
    },
}
