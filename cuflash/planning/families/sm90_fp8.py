"""The sm90 family's FP8 (e4m3) kernel: the FP8 forward pass of FlashAttention-3 on Hopper.

It shares the producers of the sm90 family's forward kernel. Consumers hold two accumulators in registers: O, and the
sum of the current step. Since tensor cores keep only 14 bits of a sum of e4m3 products, steps are added in float32.
"""

from __future__ import annotations

from ...arrays import UP_TO_FLOAT32
from ...blocks.work_list import WorkList
from ...errors import UnsupportedProblem
from ..device import DeviceSpec
from ..launches import Kernels, Pass
from ..problem import Problem
from ..scales import SCALE_ARRAYS
from ..spec import SM90, Boxes, Entry, KernelSpec
from ..tile_order import forward_order
from ._passes import forward_pass
from .family import FORWARD_INPUTS, Family, Request, resident_blocks
from .sm90 import LIST_BLOCK
from .sm90_storage import ROWS, storage_bytes

_DIMS = (64, 128)  # dimensions that kernels are compiled for
_KEYS = 128  # keys of a step
_MIN_KEYS = 64
_STAGES = 4
_Q_STAGES = 2  # query tiles that are in shared memory at once
_THREAD_ROOM = 16  # bytes of shared memory per consumer thread for its state


def _shared_bytes(spec: KernelSpec) -> int:
    """Return the bytes of operands, messages and barriers, scales, thread states and the rounded O."""
    operands = _Q_STAGES * spec.block_q * spec.head_dim
    operands += spec.num_stages * spec.block_kv * (spec.head_dim + spec.value_dim)
    storage = storage_bytes(spec, _Q_STAGES)
    scales = 20 * spec.num_stages + 28
    end = operands + storage + scales + -scales % 16 + _THREAD_ROOM * 128 * (spec.block_q // ROWS)
    return end + -end % 1024 + (2 * spec.block_q * spec.value_dim if spec.dtype.itemsize == 2 else 0)


def _boxes(spec: KernelSpec) -> Boxes:
    """Return the rows and columns of TMA's boxes, which are panels of at most 128 bytes; V is transposed."""
    head_panel, key_panel = (128 if width % 128 == 0 else 64 for width in (spec.head_dim, spec.block_kv))
    boxes = {"q": (spec.block_q, head_panel), "k": (spec.block_kv, head_panel), "v": (spec.value_dim, key_panel)}
    return boxes | ({"o": (ROWS // 4, 64)} if spec.dtype.itemsize == 2 else {})


_FORWARD = Entry(
    family=SM90, name="forward_fp8", shared_bytes=_shared_bytes, boxes=_boxes, is_persistent=True
)  # fmt: skip


class Sm90Fp8(Family):
    """The FP8 forward kernel, for compute capability 9.0 only; there is no backward pass."""

    name = "sm90_fp8"
    dtypes = UP_TO_FLOAT32
    operands = ("sink",)
    oldest = (9, 0)
    waits_at_barriers = True

    def reasons(self, problem: Problem, device: DeviceSpec | None) -> list[str]:
        reasons = [
            f"{operand.name} is not supported with FP8 q, k and v on a GPU; got one: use executor='cpu'"
            for operand in problem.operands
            if not operand.is_captured and operand.name not in self.operands
        ]
        changes = {"score, softcap and bias": problem.score, "dropout": problem.dropout}
        reasons += [
            f"{name} must be None with FP8 q, k and v on a GPU: use executor='cpu'"
            for name, value in changes.items()
            if value is not None
        ]
        for name, columns in (("q", problem.head_dim), ("v", problem.value_dim)):
            if columns > _DIMS[-1]:
                reasons.append(
                    f"{name} must have at most {_DIMS[-1]} columns for FP8 on a GPU, because registers hold "
                    f"two accumulators of this width; got {columns}: use executor='cpu', or pass {name}.dequantized()"
                )
        rows = problem.rows_per_scale
        assert rows is not None
        reasons += [
            f"{name}'s scales must each cover a multiple of {_MIN_KEYS} rows on a GPU; got {count} rows: "
            f"quantize with block={_KEYS}"
            for name, count in (("k", rows.k), ("v", rows.v))
            if count % _MIN_KEYS
        ]
        if device is not None and device.compute_capability not in (None, self.oldest):
            reasons.append(f"FP8 needs compute capability 9.0; got {device.name}: use executor='cpu'")
        return reasons

    def architecture(self, capability: tuple[int, int]) -> str:
        return super().architecture(capability) + "a"

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        return LIST_BLOCK

    def specs(self, request: Request) -> dict[str, KernelSpec]:
        problem, largest, rows = request.problem, request.largest, request.problem.rows_per_scale
        assert rows is not None
        head_dim, value_dim = (next(x for x in _DIMS if x >= dim) for dim in (problem.head_dim, problem.value_dim))
        block_q = 2 * ROWS if problem.seqlen_q > ROWS else ROWS
        keys = [rows.k, rows.v]
        if largest is not None:
            if largest[0] % ROWS or largest[1] % _MIN_KEYS:
                raise UnsupportedProblem(
                    [
                        f"mask's blocks must be multiples of {ROWS} queries and {_MIN_KEYS} keys with FP8 q, k and v "
                        f"on a GPU; got blocks of {largest}: pass the original mask, or use executor='cpu'"
                    ]
                )
            block_q = ROWS if largest[0] % block_q else block_q
            keys.append(largest[1])
        block_kv = _MIN_KEYS if block_q == ROWS or any(count % _KEYS for count in keys) else _KEYS
        return {
            "forward": KernelSpec(
                entry=_FORWARD, dtype=problem.dtype, head_dim=head_dim, value_dim=value_dim,
                block_q=block_q, block_kv=block_kv, num_warps=4 * (1 + block_q // ROWS),
                min_blocks=2 if block_q == ROWS else 1, is_listed=largest is not None,
                num_stages=_STAGES,
                is_quantized=True,
            )
        }  # fmt: skip

    def launches(self, request: Request, work: WorkList) -> Kernels:
        rows, spec = request.problem.rows_per_scale, self.specs(request)["forward"]
        assert rows is not None
        forward = forward_pass(request, work, spec, (*FORWARD_INPUTS, *SCALE_ARRAYS))
        forward = forward.changed(lambda _, launch: launch.taking("scales"), rows.feature())
        blocks = resident_blocks(spec, request.device)
        order = forward_order(request.problem, request.device, work, (spec.block_q, spec.block_kv), blocks)
        return Kernels(forward=forward, backward=Pass({}), order=order)
