"""Exported programs compute the same bits in another process, or are refused there."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash import masks  # noqa: E402
from test_torch_compile import CALLS, K, Q, V, attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export emits its own

EXPORTED = (
    "causal", "window", "bias and sink", "a mask in closed form", "a tensor as mask", "a score", "a function as score",
    "dropout", "new lengths", "an index",
)  # fmt: skip
MINE = masks.FromFunction(lambda b, h, i, j: j <= i)
IN_ANOTHER_PROCESS = """
import sys
import torch
import cuflash.torch
from cuflash import UnsupportedProblem
folder, *names = sys.argv[1:]
q, k, v = torch.load(f"{folder}/tensors")
for causal in (True, False):
    call = torch.compile(lambda: cuflash.torch.attention(q, k, v, causal=causal), backend="aot_eager", fullgraph=True)
    call()  # the first calls of this process are not those of the programs
for number, name in enumerate(names):
    q.grad = None
    try:
        o = torch.export.load(f"{folder}/{number}.pt2").module()(q, k, v)
        o.square().sum().backward()
    except UnsupportedProblem as error:
        print(name, "is refused:", error)
        continue
    expected = torch.load(f"{folder}/{number}")
    assert torch.equal(o, expected[0]) and torch.equal(q.grad, expected[1]), name
"""


def test_a_length_of_a_tensor_is_a_constant_of_a_program():
    """A window of half the length does not stay that of the first length: the program refuses other lengths."""
    call = Module(lambda q, k, v: attention(q, k, v, window=(q.shape[-2] // 2, 0)))
    length = torch.export.Dim("length", min=4, max=64)
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        torch.export.export(call, (Q, K, V), dynamic_shapes={"q": {2: length}, "k": {2: length}, "v": {2: length}})


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v)


def test_a_saved_program_computes_the_same_bits_in_another_process(tmp_path):
    tensors = [each.clone().requires_grad_() for each in (Q, K, V)]
    torch.save(tensors, tmp_path / "tensors")
    calls = {name: CALLS[name] for name in EXPORTED}
    calls["a function as mask"] = lambda q, k, v: attention(q, k, v, mask=MINE)
    for number, call in enumerate(calls.values()):
        program = torch.export.export(Module(call), (Q, K, V), strict=number % 2 == 0)
        torch.export.save(program, tmp_path / f"{number}.pt2")
        o = call(*tensors)
        torch.save((o.detach(), torch.autograd.grad(o.square().sum(), tensors[0])[0]), tmp_path / str(number))
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path, *calls]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    refused = [line.partition(" is ")[0] for line in done.stdout.splitlines() if "torch.export cannot save" in line]
    assert refused == ["an index", "a function as mask"], done.stdout
