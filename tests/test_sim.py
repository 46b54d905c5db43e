"""The simulator: every operation does what PTX says; every broken rule is reported at its line, and nothing else."""

from __future__ import annotations

import itertools
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import sim_probes
from numpy.testing import assert_array_equal
from sim_probes import build, line_of

from cuflash import sim
from cuflash.sim import compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
ORDERS = ("round_robin", "first_warp", "last_warp", "random", "priorities")
COPIES = ("eager", "late", "random")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _cold_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cache_directory", lambda: cache)


def schedules(count: int) -> Iterator[sim.Schedule]:
    kinds = itertools.cycle(itertools.product(ORDERS, COPIES, (False, True)))
    for seed, (order, copies, shuffle_lanes) in zip(range(count), kinds):
        yield sim.Schedule(seed=seed, order=order, copies=copies, shuffle_lanes=shuffle_lanes)


# ---- operations of the tensor cores ----

MATRICES = """#include <ptx/ldmatrix.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

struct Params {
  const uint16_t* memory;      // 32 rows of 8
  const int* rows;             // of each lane
  const uint32_t* fragments;   // 32 lanes of 4
  uint32_t* loaded;            // 6 forms, 32 lanes of 4
  uint16_t* stored;            // 6 forms, 32 rows of 8
};

CUFLASH_DEVICE void fill(uint16_t* shared, const uint16_t* from) {
  for (int i = 0; i < 8; ++i) shared[8 * threadIdx.x + i] = from ? from[8 * threadIdx.x + i] : 0;
  __syncwarp();
}

template <int kMatrices, class Load, class Store>
CUFLASH_DEVICE void both(const Params& params, int form, Load load, Store store) {
  uint16_t* shared = ptx::dynamic_shared<uint16_t>();
  const uint32_t address = ptx::shared_address(shared + 8 * params.rows[threadIdx.x]);
  uint32_t matrices[kMatrices];
  fill(shared, params.memory);
  load(matrices, address);
  for (int i = 0; i < kMatrices; ++i) params.loaded[(form * 32 + threadIdx.x) * 4 + i] = matrices[i];
  __syncwarp();
  fill(shared, nullptr);
  for (int i = 0; i < kMatrices; ++i) matrices[i] = params.fragments[4 * threadIdx.x + i];
  store(address, matrices);
  __syncwarp();
  for (int i = 0; i < 8; ++i) params.stored[(form * 32 + threadIdx.x) * 8 + i] = shared[8 * threadIdx.x + i];
  __syncwarp();
}

extern "C" __global__ void matrices(const Params params) {
  both<1>(params, 0, [](auto& m, uint32_t a) { ptx::ldmatrix_x1(m, a); },
          [](uint32_t a, auto& m) { ptx::stmatrix_x1(a, m); });
  both<2>(params, 1, [](auto& m, uint32_t a) { ptx::ldmatrix_x2(m, a); },
          [](uint32_t a, auto& m) { ptx::stmatrix_x2(a, m); });
  both<4>(params, 2, [](auto& m, uint32_t a) { ptx::ldmatrix_x4(m, a); },
          [](uint32_t a, auto& m) { ptx::stmatrix_x4(a, m); });
  both<1>(params, 3, [](auto& m, uint32_t a) { ptx::ldmatrix_x1_trans(m, a); },
          [](uint32_t a, auto& m) { ptx::stmatrix_x1_trans(a, m); });
  both<2>(params, 4, [](auto& m, uint32_t a) { ptx::ldmatrix_x2_trans(m, a); },
          [](uint32_t a, auto& m) { ptx::stmatrix_x2_trans(a, m); });
  both<4>(params, 5, [](auto& m, uint32_t a) { ptx::ldmatrix_x4_trans(m, a); },
          [](uint32_t a, auto& m) { ptx::stmatrix_x4_trans(a, m); });
}
"""


def pointers(*arrays: np.ndarray) -> np.void:
    """A struct of pointers, and of the ints that follow them."""
    fields = [(f"f{i}", "u8" if isinstance(a, np.ndarray) else "i4") for i, a in enumerate(arrays)]
    values = tuple(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arrays)
    return np.array(values, np.dtype(fields, align=True))[()]


def test_ldmatrix_and_stmatrix_place_elements_as_ptx_says() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 2**16, (32, 8), np.uint16)
    rows = rng.permutation(32).astype(np.int32)
    fragments = rng.integers(0, 2**32, (32, 4), np.uint32)
    loaded, stored = np.zeros((6, 32, 4), np.uint32), np.zeros((6, 32, 8), np.uint16)
    build(MATRICES, "matrices")(1, 32, (pointers(memory, rows, fragments, loaded, stored),), 512)
    for form, (trans, count) in enumerate(itertools.product((False, True), (1, 2, 4))):
        matrices = memory[rows].reshape(4, 8, 8)
        matrices = matrices.swapaxes(1, 2) if trans else matrices
        expected = np.ascontiguousarray(matrices).reshape(4, 32, 2).view(np.uint32)[..., 0].T.copy()
        expected[:, count:] = 0
        assert_array_equal(loaded[form], expected)
        tiles = np.ascontiguousarray(fragments.T).view(np.uint16).reshape(4, 8, 8)
        tiles = tiles.swapaxes(1, 2) if trans else tiles
        placed = np.zeros((32, 8), np.uint16)
        placed[rows[: 8 * count]] = tiles.reshape(32, 8)[: 8 * count]
        assert_array_equal(stored[form], placed)


MMA = """#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mma.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

// Operands by the pairing that the instructions were made for: ldmatrix of a, and of b's columns stored as rows.
template <class T>
CUFLASH_DEVICE void multiply(const uint16_t* a, const uint16_t* b_columns, float* d) {
  uint16_t* shared = ptx::dynamic_shared<uint16_t>();
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) shared[8 * lane + i] = a[8 * lane + i];
  for (int i = 0; i < 4; ++i) shared[256 + 4 * lane + i] = b_columns[4 * lane + i];
  __syncwarp();
  uint32_t a_frag[4], b_frag[2];
  ptx::ldmatrix_x4(a_frag, ptx::shared_address(shared + lane % 16 * 16 + lane / 16 * 8));
  ptx::ldmatrix_x2(b_frag, ptx::shared_address(shared + 256 + lane % 8 * 16 + lane / 8 % 2 * 8));
  float frag[4];
  for (int i = 0; i < 4; ++i) frag[i] = d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  ptx::mma_m16n8k16(T{}, frag, a_frag, b_frag);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = frag[i];
  __syncwarp();
}

extern "C" __global__ void mma(const uint16_t* half_a, const uint16_t* half_b, float* half_d,
                               const uint16_t* bfloat16_a, const uint16_t* bfloat16_b, float* bfloat16_d,
                               const float* a, const float* b, float* d) {
  multiply<ptx::Half>(half_a, half_b, half_d);
  multiply<ptx::BFloat16>(bfloat16_a, bfloat16_b, bfloat16_d);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const uint32_t a_frag[4] = {ptx::to_tf32(a[g * 8 + t]), ptx::to_tf32(a[(g + 8) * 8 + t]),
                              ptx::to_tf32(a[g * 8 + t + 4]), ptx::to_tf32(a[(g + 8) * 8 + t + 4])};
  const uint32_t b_frag[2] = {ptx::to_tf32(b[t * 8 + g]), ptx::to_tf32(b[(t + 4) * 8 + g])};
  float frag[4];
  for (int i = 0; i < 4; ++i) frag[i] = d[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
  ptx::mma_m16n8k8_tf32(frag, a_frag, b_frag);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = frag[i];
}
"""


def test_mma_multiplies_matrices() -> None:
    rng = np.random.default_rng(1)
    params, expected = [], []
    for dtype, depth in ((np.float16, 16), (ml_dtypes.bfloat16, 16), (np.float32, 8)):
        # Small integers: every sum is exact, so one element at a wrong place shows.
        a, b = rng.integers(-8, 9, (16, depth)), rng.integers(-8, 9, (depth, 8))
        d = rng.integers(-99, 99, (16, 8)).astype(np.float32)
        columns = b.T if depth == 16 else b
        params += [a.astype(dtype), np.ascontiguousarray(columns).astype(dtype), d]
        expected.append(d + (a @ b).astype(np.float32))
    build(MMA, "mma")(1, 32, tuple(params), 1024)
    for d, right in zip(params[2::3], expected):
        assert_array_equal(d, right)


# ---- words of the language ----

WORDS = """extern "C" __global__ void words(int* shuffled, unsigned* votes, int* reduced, double* wide) {
  const int lane = threadIdx.x % 32;
  int* mine = shuffled + 8 * threadIdx.x;
  mine[0] = __shfl_sync(0xffffffffu, 10 * lane, lane + 5, 8);
  mine[1] = __shfl_xor_sync(0xffffffffu, 10 * lane, 9, 16);
  mine[2] = __shfl_up_sync(0xffffffffu, 10 * lane, 3, 8);
  mine[3] = __shfl_down_sync(0xffffffffu, 10 * lane, 3, 8);
  mine[4] = __shfl_sync(0xffffffffu, 10 * lane, 40);
  mine[5] = __shfl_xor_sync(0xffffffffu, 10 * lane, 4, 4);
  // The halves of the warp go their own ways.
  if (lane < 16) mine[6] = __shfl_down_sync(0x0000ffffu, lane, 1, 16);
  else mine[6] = __shfl_up_sync(0xffff0000u, lane, 1, 16);
  votes[4 * threadIdx.x] = __ballot_sync(0xffffffffu, lane % 3 == 0);
  votes[4 * threadIdx.x + 1] = __any_sync(0xffffffffu, lane == 7);
  votes[4 * threadIdx.x + 2] = __all_sync(0xffffffffu, lane < 32);
  votes[4 * threadIdx.x + 3] = __all_sync(0xffffffffu, lane != 31);
  reduced[6 * threadIdx.x] = __reduce_add_sync(0xffffffffu, lane - 20);
  reduced[6 * threadIdx.x + 1] = __reduce_min_sync(0xffffffffu, lane - 20);
  reduced[6 * threadIdx.x + 2] = __reduce_max_sync(0xffffffffu, lane - 20);
  reduced[6 * threadIdx.x + 3] = static_cast<int>(__reduce_or_sync(0xffffffffu, 1u << lane % 5));
  reduced[6 * threadIdx.x + 4] = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(lane - 20)));
  reduced[6 * threadIdx.x + 5] = max(-1, lane) + min(lane, 3) + __popc(lane) + __clz(lane | 1) + __ffs(lane);
  wide[threadIdx.x] = __shfl_xor_sync(0xffffffffu, lane + 0.5, 1) + fmaxf(1.0f, __int_as_float(0x7fc00000));
}
"""


def test_shuffles_votes_and_reductions_do_what_cuda_says() -> None:
    shuffled, votes = np.zeros((64, 8), np.int32), np.zeros((64, 4), np.uint32)
    reduced, wide = np.zeros((64, 6), np.int32), np.zeros(64)
    build(WORDS, "words")(1, 64, (shuffled, votes, reduced, wide), 0, sim.Schedule(order="random", shuffle_lanes=True))
    lane = np.arange(64) % 32
    up, down = np.where(lane % 8 < 3, lane, lane - 3), np.where(lane % 8 > 4, lane, lane + 3)
    xor = np.where((lane ^ 4) > (lane | 3), lane, lane ^ 4)
    halves = np.where(lane < 16, np.minimum(lane + 1, 15), np.maximum(lane - 1, 16))
    chosen = lane // 8 * 8 + (lane + 5) % 8
    expected = [10 * chosen, 10 * (lane ^ 9), 10 * up, 10 * down, 80 + 0 * lane, 10 * xor, halves]
    assert_array_equal(shuffled[:, :7].T, expected)
    assert_array_equal(votes, np.broadcast_to([sum(1 << i for i in range(0, 32, 3)), 1, 1, 0], (64, 4)))
    sums = [(lane[:32] - 20).sum(), -20, 11, 31, -1]
    assert_array_equal(reduced[:, :5], np.broadcast_to(sums, (64, 5)))
    bits = [i + min(i, 3) + i.bit_count() + 32 - max(i.bit_length(), 1) + (i & -i).bit_length() for i in range(32)]
    assert_array_equal(reduced[:, 5], bits * 2)
    assert_array_equal(wide, (lane ^ 1) + 1.5)


ATOMICS = """extern "C" __global__ void atomics(float* sums, int* extremes, int* lock, int* counter, unsigned* bits) {
  atomicAdd(sums, static_cast<float>(threadIdx.x));
  atomicMax(extremes, static_cast<int>(threadIdx.x));
  atomicMin(extremes + 1, -static_cast<int>(threadIdx.x));
  atomicOr(bits, 1u << threadIdx.x % 32);
  if (threadIdx.x % 32 == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    const int seen = *counter;
    __nanosleep(20);
    *counter = seen + 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_atomics_lose_nothing_and_spinning_starves_nobody(order: str) -> None:
    sums, extremes, counter = np.zeros(1, np.float32), np.zeros(2, np.int32), np.zeros(1, np.int32)
    bits = np.zeros(1, np.uint32)
    params = (sums, extremes, np.zeros(1, np.int32), counter, bits)
    build(ATOMICS, "atomics")(3, 128, params, 0, sim.Schedule(order=order, seed=5))
    assert (sums[0], *extremes, counter[0], bits[0]) == (3 * sum(range(128)), 127, -127, 12, 0xFFFFFFFF)


MATH = """#include <ptx/math.cuh>
using namespace cuflash;

extern "C" __global__ void math(const float* x, float* half, float* bfloat16, unsigned* packed,
                                unsigned* packed_bfloat16, unsigned* tf32, float* power, double* wide, int count) {
  for (int i = blockIdx.x * 64 + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    half[i] = ptx::to_float(ptx::Half{static_cast<unsigned short>(i)});
    bfloat16[i] = ptx::to_float(ptx::BFloat16{static_cast<unsigned short>(i)});
    packed[i] = ptx::pack2(ptx::Half{}, x[i], -x[i]) ^ ptx::from_float<ptx::Half>(x[i]).bits;
    packed_bfloat16[i] = ptx::pack2(ptx::BFloat16{}, x[i], 1.0f) ^ ptx::from_float<ptx::BFloat16>(x[i]).bits << 16;
    tf32[i] = ptx::to_tf32(x[i]);
    power[i] = ptx::exp2_approx(x[i]);
  }
  wide[0] = ptx::negative_infinity<double>();
  wide[1] = ptx::negative_infinity<float>();
  wide[2] = ptx::exp2_accurate(0.5) + ptx::log_accurate(2.0) + ptx::log2_accurate(8.0) + ptx::fma(2.0, 3.0, 4.0);
  wide[3] = ptx::exp2_accurate(0.5f) + ptx::log_accurate(2.0f) + ptx::log2_accurate(8.0f) + ptx::fma(2.0f, 3.0f, 4.0f);
}
"""


def test_conversions_round_as_the_gpu_does() -> None:
    count = 2**16
    bits = np.random.default_rng(2).integers(0, 2**32, count, np.uint32)
    # Ties, subnormals and overflow of the 16-bit types, which random bits seldom meet.
    bits[: count // 2] = np.arange(count // 2, dtype=np.uint32) * 0x1000 + 0x33000000 & 0xFFFFFFFF
    x = bits.view(np.float32)
    half, bfloat16, power = (np.zeros(count, np.float32) for _ in range(3))
    packed, packed_bfloat16, tf32 = (np.zeros(count, np.uint32) for _ in range(3))
    wide = np.zeros(4)
    outputs = (half, bfloat16, packed, packed_bfloat16, tf32, power, wide)
    build(MATH, "math")(4, 64, (x, *outputs, np.int32(count)))
    every = np.arange(count).astype(np.uint16)
    assert_array_equal(half, every.view(np.float16).astype(np.float32))
    assert_array_equal(bfloat16, every.view(ml_dtypes.bfloat16).astype(np.float32))
    number = ~np.isnan(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        low, high = (np.where(number, v.astype(np.float16).view(np.uint16), 0x7FFF).astype(np.uint32) for v in (x, -x))
        # ml_dtypes keeps more of a NaN than the GPU does.
        short = np.where(number, x.astype(ml_dtypes.bfloat16).view(np.uint16), 0x7FFF).astype(np.uint32)
        right_power = np.exp2(x.astype(np.float64))
    assert_array_equal(packed, (low | high << 16) ^ low)
    assert_array_equal(packed_bfloat16, (short | 0x3F80 << 16) ^ short << 16)
    rounded = (bits.astype(np.uint64) + 0x1000 & 0xFFFFE000).astype(np.uint32)
    assert_array_equal(tf32, np.where(number, rounded, 0x7FFFFFFF))
    normal = number & (right_power >= 2.0**-126) & (right_power < 2.0**128)
    np.testing.assert_allclose(power[normal], right_power[normal], rtol=2.0**-22)
    assert (power[number & (right_power < 2.0**-126)] == 0).all()
    assert_array_equal(wide[:2], [-np.inf, -np.inf])
    np.testing.assert_allclose(wide[2:], 2**0.5 + np.log(2) + 3 + 10, rtol=1e-6)


# ---- copies and barriers ----

COPY = """#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

extern "C" __global__ void copy(const unsigned char* from, unsigned char* to, const int* sizes, int* handed) {
  unsigned char* shared = ptx::dynamic_shared<unsigned char>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 0) {
    const uint32_t row = ptx::shared_address(shared + 64 * lane);
    const int size = sizes[lane];
    ptx::cp_async_ca_4(row, from + 64 * lane, size % 5);
    ptx::cp_async_commit();
    ptx::cp_async_ca_8(row + 8, from + 64 * lane + 8, size % 9);
    ptx::cp_async_ca_16(row + 16, from + 64 * lane + 16, size);
    ptx::cp_async_commit();
    ptx::cp_async_cg_16(row + 32, from + 64 * lane + 32, size);
    ptx::cp_async_wait<1>();
    for (int i = 0; i < 4; ++i) to[64 * lane + i] = shared[64 * lane + i];
    ptx::cp_async_wait<0>();
    for (int i = 8; i < 32; ++i) to[64 * lane + i] = shared[64 * lane + i];
    ptx::cp_async_wait_all();
    for (int i = 32; i < 48; ++i) to[64 * lane + i] = shared[64 * lane + i];
  }
  // Warp 1 hands on to warp 2, which warp 1 does not wait for; warps 0 and 3 are not concerned.
  int* letter = reinterpret_cast<int*>(shared + 2048);
  if (warp == 1) {
    letter[lane] = 3 * lane;
    ptx::bar_arrive(1, 64);
    ptx::bar_sync(2, 64);
    letter[lane] = -1;
  } else if (warp == 2) {
    ptx::bar_sync(1, 64);
    handed[lane] = letter[31 - lane];
    ptx::bar_arrive(2, 64);
  }
}
"""


def test_copies_fill_with_zeros_and_named_barriers_order_their_warps() -> None:
    kernel = build(COPY, "copy")
    data = np.random.default_rng(3).integers(1, 256, (32, 64), np.uint8)
    sizes = np.arange(32, dtype=np.int32) % 17
    expected = np.zeros((32, 64), np.uint8)
    for lane, size in enumerate(sizes):
        for start, bytes_ in ((0, size % 5), (8, size % 9), (16, size), (32, size)):
            expected[lane, start : start + bytes_] = data[lane, start : start + bytes_]
    for schedule in schedules(60):
        to, handed = np.zeros((32, 64), np.uint8), np.zeros(32, np.int32)
        kernel(1, 128, (data, to, sizes, handed), 2048 + 128, schedule)
        assert_array_equal(to, expected, err_msg=repr(schedule))
        assert_array_equal(handed, 3 * np.arange(31, -1, -1), err_msg=repr(schedule))


# ---- schedules ----


def test_no_schedule_troubles_a_correct_kernel() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    for schedule in schedules(200):
        out, expected = sim_probes.run_pipeline(kernel, schedule)
        assert_array_equal(out, expected, err_msg=repr(schedule))


@pytest.mark.parametrize("fault", range(1, 5), ids=sim_probes.PIPELINE_FAULTS)
def test_a_missing_barrier_or_wait_shows_under_hostile_schedules(fault: int) -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    wrong = 0
    for seed in range(20):
        hostile = sim.Schedule(seed=seed, order="random", copies="late" if seed % 2 else "random", shuffle_lanes=True)
        out, expected = sim_probes.run_pipeline(kernel, hostile, fault)
        wrong += not np.array_equal(out, expected)
    assert wrong >= 10


def test_a_launch_is_repeated_bit_for_bit_by_its_schedule() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    for schedule in schedules(30):
        first, again = (sim_probes.run_pipeline(kernel, schedule, fault=1)[0] for _ in range(2))
        assert first.tobytes() == again.tobytes()


# ---- broken rules ----

BUGS = """#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/mma.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

__noinline__ int descend(volatile int* x, int depth) {
  volatile int here[64];
  here[depth % 64] = x[0];
  return depth == 0 ? 0 : descend(x, depth - 1) + here[depth % 64];
}

extern "C" __global__ void bugs(const char* name, int* x, int zero) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* shared = ptx::dynamic_shared<float>();
  const uint32_t address = ptx::shared_address(shared);
  uint32_t matrix[1];
  const auto is = [&](const char* other) {
    int i = 0;
    while (name[i] && name[i] == other[i]) ++i;
    return name[i] == other[i];
  };
  if (is("barrier in a branch") && lane < 16)
    __syncthreads();  // barrier in a branch
  if (is("barriers in two branches")) {
    if (lane < 16) __syncthreads();
    else __syncthreads();  // barriers in two branches
  }
  if (is("exited lane")) {
    if (lane == 5) return;
    x[lane] = __shfl_sync(0xffffffffu, lane, 0);  // exited lane
  }
  if (is("lane outside the mask") && lane < 16)
    x[lane] = __shfl_sync(0x0000ffffu, lane, 20);  // lane outside the mask
  if (is("not in the mask"))
    __syncwarp(0x0000ffffu);  // not in the mask
  if (is("shuffles in two branches")) {
    if (lane < 16) x[lane] = __shfl_xor_sync(0xffffffffu, lane, 1);
    else x[lane] = __shfl_xor_sync(0xffffffffu, lane, 2);  // shuffles in two branches
  }
  if (is("overlapping masks")) {
    if (lane < 16) __syncwarp(0x0001ffffu);
    else if (lane > 16) __syncwarp(0xffff0000u);
    else __syncwarp(0x00010003u);  // overlapping masks
  }
  if (is("left waiting")) {
    if (lane < 16) __syncwarp(0x0001ffffu);  // left waiting
    else __syncwarp(0xffff0000u);
  }
  if (is("misaligned row"))
    ptx::ldmatrix_x1(matrix, address + 16 * lane + 8);  // misaligned row
  if (is("row outside"))
    ptx::ldmatrix_x1(matrix, address + 512 * lane);  // row outside
  if (is("copy not waited for"))
    ptx::cp_async_ca_4(address + 4 * lane, x + lane, 4);  // copy not waited for
  if (is("misaligned copy"))
    ptx::cp_async_ca_16(address + 16 * lane, x + 1, 16);  // misaligned copy
  if (is("copy too long"))
    ptx::cp_async_ca_4(address + 4 * lane, x + lane, 5);  // copy too long
  if (is("lonely barrier") && warp == 0)
    ptx::bar_sync(1, 64);  // lonely barrier
  if (is("barrier of two sizes"))
    ptx::bar_sync(1, warp == 0 ? 64 : 32);  // barrier of two sizes
  if (is("barrier too large"))
    ptx::bar_sync(1, 96);  // barrier too large
  if (is("barrier 16"))
    ptx::bar_sync(16, 64);  // barrier 16
  if (is("nobody waits") && warp == 0)
    ptx::bar_arrive(3, 64);  // nobody waits
  if (is("arrives twice") && warp == 0)
    for (int i = 0; i < 2; ++i) ptx::bar_arrive(3, 64);  // arrives twice
  if (is("past shared memory")) {
    __syncwarp();  // past shared memory
    shared[512 + lane] = 1.0f;
  }
  if (is("not shared"))
    x[lane] = static_cast<int>(ptx::shared_address(x));  // not shared
  if (is("trap"))
    __trap();  // trap
  if (is("wild store") && lane == 3)
    *reinterpret_cast<volatile int*>(static_cast<uint64_t>(zero) + 4) = 1;  // wild store
  if (is("deep recursion"))
    x[lane] = descend(x, 1 << 20);
  if (is("division by zero"))
    x[lane] = 5 / zero;  // division by zero
  if (is("endless operations"))
    for (;;) __syncwarp();  // endless operations
  if (is("endless atomics"))
    while (atomicAdd(x, 0) == 0) {}  // endless atomics
}
"""
FOUND = {
    "barrier in a branch": r"deadlock.*\n  warp 0 lanes 0-15: waits in __syncthreads at bugs.cu:{line}\n"
    r"  warp 0 lanes 16-31: exited\n",
    "barriers in two branches": r"bugs.cu:{line}: the warp diverged: this lane reaches barrier 0 here, lanes 0000ffff",
    "exited lane": r"bugs.cu:{line}: __shfl_sync: mask ffffffff names lanes 00000020, which have exited|"
    r"exits while lanes 0000001f of its warp wait for it in __shfl_sync",
    "lane outside the mask": r"bugs.cu:{line}: __shfl_sync: lane 0 reads lane 20, which does not take part",
    "not in the mask": r"bugs.cu:{line}: __syncwarp: the calling lane is not in its mask 0000ffff\n.*lane 16\)",
    "shuffles in two branches": r"bugs.cu:{line}: the warp diverged: .* lanes 0000ffff wait in __shfl_xor_sync",
    "overlapping masks": r"bugs.cu:{line}: the warp diverged: .* with mask 00010003 here, while lanes 0000ffff wait",
    "left waiting": r"bugs.cu:{line}: the thread exits while lanes 0000ffff of its warp wait for it in __syncwarp",
    "misaligned row": r"bugs.cu:{line}: ldmatrix_x1: shared address must be a multiple of 16; got offset 8",
    "row outside": r"bugs.cu:{line}: ldmatrix_x1: 16 bytes at shared offset 2048 are outside the 2048 bytes",
    "copy not waited for": r"bugs.cu:{line}: the thread exits with 1 copies of cp.async",
    "misaligned copy": r"bugs.cu:{line}: cp_async_ca_16: address must be a multiple of 16",
    "copy too long": r"bugs.cu:{line}: cp_async_ca_4 copies from 0 to 4 bytes; got 5",
    "lonely barrier": r"deadlock.*\n  warp 0 lanes 0-31: waits in bar_sync at bugs.cu:{line}\n"
    r"  warp 1 lanes 0-31: exited",
    "barrier of two sizes": r"bugs.cu:{line}: barrier 1 is for 32 threads here, and for 64 at bugs.cu:{line}",
    "barrier too large": r"bugs.cu:{line}: barrier 1: .* at most the block's 64; got 96",
    "barrier 16": r"bugs.cu:{line}: a barrier's id is from 0 to 15; got 16",
    "nobody waits": r"bugs.cu:{line}: the block \(0, 0, 0\) ends with 32 of 64 threads counted at barrier 3",
    "arrives twice": r"bugs.cu:{line}: this thread arrives at barrier 3 a second time",
    "past shared memory": r"bugs.cu:{line}: block \(0, 0, 0\) wrote into the byte 0 past the end of its 2048 bytes",
    "not shared": r"bugs.cu:{line}: shared_address: the pointer is not into the 2048 bytes",
    "trap": r"bugs.cu:{line}: __trap: the kernel gave up",
    "wild store": r"a load or store at 0x4, which is no memory(.*\n)*  interrupted at bugs.cu:{line}\n",
    "deep recursion": r"the thread's stack of 262144 bytes overflowed",
    "endless operations": r"bugs.cu:{line}: the launch passed its time limit of 0.2 s here, in __syncwarp",
    "endless atomics": r"the launch passed its time limit of 0.2 s",
}
if platform.machine() == "x86_64":  # others divide by zero and go on
    FOUND["division by zero"] = r"integer division by zero(.*\n)*  interrupted at bugs.cu:{line}\n"


def run_bug(name: str, schedule: sim.Schedule = sim.Schedule(), block: int = 64) -> None:
    text = np.frombuffer(name.encode() + b"\0", np.uint8)
    time_limit = 0.2 if name.startswith("endless") else 60.0
    params = (text, np.zeros(64, np.int32), np.int32(0))
    build(BUGS, "bugs")(1, block, params, 2048, schedule, time_limit=time_limit)


def test_a_loop_without_operations_is_stopped_where_it_runs() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    before = line_of(sim_probes.PIPELINE, "// before")
    match = rf"pipeline.cu:{before}: the launch passed its time limit(.*\n)*  interrupted at pipeline.cu:{before + 1}"
    with pytest.raises(sim.SimulationError, match=match):
        sim_probes.run_pipeline(kernel, sim.Schedule(), sim_probes.ENDLESS, time_limit=0.2)


@pytest.mark.parametrize("name", FOUND)
def test_a_broken_rule_is_reported_at_its_line(name: str) -> None:
    line = 0 if name == "deep recursion" else line_of(BUGS, f"// {name}")
    with pytest.raises(sim.SimulationError, match=FOUND[name].replace("{line}", str(line))) as caught:
        run_bug(name)
    assert "block (0, 0, 0)" in str(caught.value) and "under Schedule(seed=0, " in str(caught.value)
    run_bug("")  # and the next launch is not disturbed


def test_no_rule_is_broken_where_no_bug_is_asked_for() -> None:
    for schedule in schedules(30):
        run_bug("", schedule)


def test_tensor_core_operations_ask_for_whole_warps() -> None:
    out = np.zeros((16, 16), np.float32)
    with pytest.raises(sim.SimulationError, match="ldmatrix_x4 needs all 32 lanes of a warp, and this one has 16"):
        build(MMA, "mma")(1, 48, (out,) * 9, 4096)


UNDEFINED = """extern "C" __global__ void undefined(int which, int* x) {
  int small[4] = {1, 2, 3, 4};
  if (which == 0)
    x[0] = x[1] + 2147483647;  // 0
  if (which == 1)
    x[0] = *reinterpret_cast<int*>(reinterpret_cast<char*>(x) + 2 * x[1]);  // 1
  if (which == 2)
    x[0] = small[x[1] + 3];  // 2
  if (which == 3)
    x[0] = 1 << (x[1] + 31 + threadIdx.x);  // 3
  if (which == 4)
    x[0] = x[1] * 2147483647 / 2 - 7;
}
"""
UNDEFINED_FOUND = ("overflow in an addition", "not aligned for its type", "index outside", "a shift by")


@pytest.mark.parametrize("which", range(4), ids=UNDEFINED_FOUND)
def test_undefined_behaviour_is_an_exception(which: int) -> None:
    kernel = build(UNDEFINED, "undefined", "undefined")
    match = f"undefined.cu:{line_of(UNDEFINED, f'// {which}')}: undefined behaviour: .*{UNDEFINED_FOUND[which]}"
    with pytest.raises(sim.SimulationError, match=match):
        kernel(1, 1, (np.int32(which), np.ones(8, np.int32)))
    kernel(1, 1, (np.int32(4), np.ones(8, np.int32)))


def in_child(sanitize: compiler.Sanitizer, cache: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {paths}\n{sim_probes.CHILD}"
    command = ["env", *(f"{name}={value}" for name, value in sim.preload_environment(sanitize).items())]
    command += [sys.executable, "-c", code, sanitize, str(cache)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_thread_sanitizer_sees_every_missing_barrier_and_wait_in_a_friendly_run(cache: Path) -> None:
    run = in_child("thread", cache)
    correct, *faulty = run.stderr.split(": done\n")[:5]
    assert "WARNING" not in correct, correct
    reads, copies, before = (
        f"pipeline.cu:{line_of(sim_probes.PIPELINE, f'// {marker}')}" for marker in ("reads", "copies", "before")
    )
    for report in faulty:
        assert "WARNING: ThreadSanitizer: data race" in report
        assert reads in report and copies in report
    # A loop that calls nothing cannot be interrupted here, so the process is ended.
    assert run.returncode == 70, run.stderr
    assert f"passed its time limit of 0.2 s in a loop without operations, entered after {before}" in run.stderr


@pytest.mark.slow
def test_address_sanitizer_sees_reads_and_stores_outside_arrays(cache: Path) -> None:
    run = in_child("address", cache)
    assert run.stderr.startswith("correct: done\n"), run.stderr
    line = line_of(sim_probes.PIPELINE, "// copies")
    assert "cp_async_cg_16 reads 16 bytes at 0x" in run.stdout and "is outside its buffer" in run.stdout, run.stdout
    assert f"pipeline.cu:{line}" in run.stdout, run.stdout
    assert "heap-buffer-overflow" in run.stderr
    assert f"pipeline.cu:{line_of(sim_probes.PIPELINE, '// past the end')}" in run.stderr
    assert "end" not in run.stderr.splitlines()[-1]


# ---- from Python ----

TWICE = 'extern "C" __global__ void twice(float* x, int count) { if (threadIdx.x < count) x[threadIdx.x] *= 2.0f; }\n'


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"params": [np.zeros(3)]}, TypeError, "params must be a tuple; got list"),
        ({"params": (np.zeros(3),)}, TypeError, "twice takes 2 parameters; got 1"),
        ({"params": (np.zeros(3), 3)}, TypeError, r"params\[1\] must be an array or a NumPy scalar, as np.int32\(3\)"),
        ({"params": (np.zeros(3), np.int64(3))}, TypeError, r"params\[1\] must have the 4 bytes .* got 8 \(int64 of"),
        ({"grid": 0}, ValueError, "grid must be 1 to 3 positive ints; got 0"),
        ({"grid": (1, 1, 1, 1)}, ValueError, "grid must be 1 to 3 positive ints"),
        ({"block": 1025}, ValueError, "block must be from 1 to 1024 threads; got 1025"),
        ({"shared_bytes": 1 << 20}, ValueError, "shared_bytes must be from 0 to 232448; got 1048576"),
        ({"time_limit": 0.0}, ValueError, "time_limit must be a positive number of seconds; got 0.0"),
    ],
)
def test_a_launch_refuses_what_it_cannot_pass(keywords: dict, error: type[Exception], match: str) -> None:
    given = {"grid": 1, "block": 4, "params": (np.zeros(4, np.float32), np.int32(4))} | keywords
    with pytest.raises(error, match=match):
        build(TWICE, "twice")(**given)


def test_a_schedule_refuses_unknown_words() -> None:
    with pytest.raises(ValueError, match="order must be one of round_robin, .*; got 'fifo'"):
        sim.Schedule(order="fifo")
    with pytest.raises(ValueError, match="copies must be one of eager, late, random; got 'never'"):
        sim.Schedule(copies="never")
    with pytest.raises(ValueError, match="seed must be from 0"):
        sim.Schedule(seed=-1)


def test_calls_from_several_threads_take_turns() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    wrong: list[int] = []

    def run(seed: int) -> None:
        for again in range(10):
            out, expected = sim_probes.run_pipeline(kernel, sim.Schedule(seed=seed + again, order="random"))
            wrong.extend([seed] * (not np.array_equal(out, expected)))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build(TWICE, "twice")
    compiled: list[Path] = []
    monkeypatch.setattr(compiler, "_publish", lambda commands, target, *rest: compiled.append(target))
    build(TWICE, "twice")
    assert compiled == []
    with pytest.raises(OSError, match="cannot open shared object"):
        build(TWICE.replace("2.0f", "3.0f"), "twice")
    assert len(compiled) == 1


def test_a_compile_error_shows_our_line_and_where_the_text_is() -> None:
    text = TWICE + "\n#line 41 \"kernels_cu/simt/forward.cu\"\n__device__ int broken() { return one; }\n"
    with pytest.raises(sim.BuildError, match="kernels_cu/simt/forward.cu:41:.*one.* was not declared") as caught:
        build(text, "twice")
    kept = Path(str(caught.value).rpartition("The whole text is in ")[2])
    assert "return one;" in kept.read_text("utf-8")
    with pytest.raises(sim.BuildError, match=r"shared memory comes from ptx::dynamic_shared<T>\(\), not from"):
        build(TWICE + "__device__ void wrong() { __shared__ int x; }", "twice")


def test_a_missing_compiler_or_sanitizer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sim.BuildError, match=r"needs libtsan.so in the process .*sim.preload_environment\('thread'\)"):
        build(TWICE, "twice", "thread")
    with pytest.raises(ValueError, match="sanitize must be one of '', 'undefined', 'address', 'thread'; got 'memory'"):
        build(TWICE, "twice", "memory")
    with pytest.raises(ValueError, match="entry must be the name of an extern \"C\" function; got 'a::b'"):
        build(TWICE, "a::b")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(sim.BuildError, match=r"needs the C\+\+ compiler g\+\+, .* on the path; .* apt install g\+\+"):
        build(TWICE, "twice")


def test_an_unwritable_home_is_said_and_does_not_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert compiler.cache_directory() == tmp_path / ".cache" / "cuflash" / "sim"
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(Path, "home", lambda: file)
    with pytest.warns(RuntimeWarning, match="compiled anew in every process: .*Not a directory"):
        folder = compiler.cache_directory()
    assert folder.is_dir() and compiler.cache_directory() == folder


def names(file: Path) -> set[str]:
    """The functions and types of a room of instructions that kernels may use."""
    room = file.read_text("utf-8").rpartition("namespace cuflash::ptx {")[2]
    return set(re.findall(r"^(?:CUFLASH_DEVICE \S+|CUFLASH_DEVICE T\*|struct) (\w+(?:<\w+>)?)", room, re.MULTILINE))


def test_both_rooms_of_instructions_have_the_same_names() -> None:
    device = Path(__file__).parents[1] / "kernels_cu" / "ptx"
    files = sorted(path.name for path in device.iterdir())
    assert files == sorted(path.name for path in sim_probes.PTX.iterdir()) and len(files) == 7
    for file in files:
        assert names(device / file) == names(sim_probes.PTX / file) != set()
