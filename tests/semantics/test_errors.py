"""Invalid input raises one error before any work, which names the argument, the rule, the value and the fix."""

import subprocess
import sys
from inspect import signature

import ml_dtypes
import numpy as np
import pytest
import refusals
from device_double import to_device

import cuflash
from cuflash import BlockIndex, UnsupportedProblem, masks, patterns
from cuflash.arrays import describe
from cuflash.compiler import nvrtc as compiling

Q = np.ones((2, 4, 10, 8), np.float32)


def reasons_of(*arrays, **options):
    return refusals.reasons_of(cuflash.attention, *arrays, **options)


@pytest.mark.parametrize(
    "arrays, words",
    [
        ((Q[0, 0, 0], Q, Q), ["q must have shape", "(8,)"]),
        ((Q[0, 0], Q, Q), ["q, k and v must all have an axis of heads, or none of them", "q (10, 8)"]),
        ((Q, Q[:, :3], Q[:, :3]), ["q's 4 heads must be a multiple of k's 3"]),
        ((Q, Q[:, :0], Q[:, :0]), ["q's 4 heads must be a multiple of k's 0"]),
        ((Q, Q, Q[:, :2]), ["v must have k's 4 heads", "(2, 2, 10, 8)"]),
        ((Q, Q[..., :4], Q), ["k must have q's head_dim=8", "(2, 4, 10, 4)"]),
        ((Q, Q, Q[:, :, :3]), ["v must have k's seqlen_kv=10", "(2, 4, 3, 8)"]),
        ((Q, np.ones((3, 4, 10, 8), np.float32), Q), ["must broadcast by NumPy's rules", "(3,)"]),
        ((Q.astype(np.float16), Q, Q), ["must share one dtype", "q float16", "k float32"]),
        ((np.ones((4, 257), np.float32),) * 3, ["head_dim) must be 1..256", "(4, 257)"]),
    ],
)
def test_a_wrong_array_is_named_with_its_rule_and_what_came(arrays, words):
    text = "\n".join(reasons_of(*arrays))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "options, words",
    [
        ({"causal": "bottom"}, ["causal must be True, False, 'bottom_right' or 'top_left'", "'bottom'"]),
        ({"causal": 1}, ["causal must be True, False", "1"]),
        ({"window": 3}, ["window must be (left, right)", "3"]),
        ({"window": (-1, 0)}, ["left must be an int of at least 0", "got -1: write None, which is what -1 means"]),
        ({"window": (0, -1)}, ["right must be an int of at least 0", "got -1: write None, which is what -1 means"]),
        ({"window": (-2, 0)}, ["(the window's keys on that side, or None for all); got -2"]),
        ({"mask": masks.Causal(), "dropout": 0.0}, ["dropout must be a Dropout; got 0.0: omit dropout="]),
        ({"dropout": 0.25}, ["got 0.25: write dropout=cuflash.Dropout(0.25, seed=0)"]),
        ({"dropout": "0.1"}, ["got '0.1': write dropout=cuflash.Dropout(0.1, seed=0)"]),
        ({"mask": np.zeros((10, 9), bool)}, ["mask must broadcast to", "(2, 4, 10, 10)", "(10, 9)"]),
        ({"mask": BlockIndex.from_blocks(np.ones((2, 2), bool), 8, 8, 4)}, ["block index must be for", "(8, 8)"]),
        ({"mask": BlockIndex.from_blocks(np.ones((3, 1, 1), bool), 10, 10, 10)}, ["num_heads 1 or 4", "3"]),
        ({"mask": masks.BlockPattern(np.ones((2, 2), bool), 4)}, ["blocks must have shape (..., 3, 3)", "(2, 2)"]),
        ({"mask": masks.Documents(np.zeros(7, int))}, ["q_ids must have shape (..., seqlen_q=10)", "(7,)"]),
        ({"mask": masks.Lengths(kv=np.ones(3, int))}, ["the leading axes of kv must broadcast to (2,)", "(3,)"]),
        ({"executor": "gpu"}, ["executor='gpu' takes CuPy arrays", "pass cupy.asarray(q), or leave executor= out"]),
        ({"executor": "tpu"}, ["executor must be 'auto', 'cpu', 'gpu', 'sim'", "'tpu'"]),
        ({"executor": "sim", "kernel": "sm91"}, ["kernel must be 'auto', 'simt'", "'sm91'"]),
        ({"kernel": "sm90"}, ["kernel must be 'auto' on the CPU ('simt', ", "got 'sm90': leave kernel= out"]),
        ({"kernel": "flash"}, ["are for executor='gpu' and 'sim'); got 'flash': leave kernel= out"]),
        ({"precision": "tf64"}, ["precision must be 'ieee', 'tf32', 'tf32x3'", "'tf64'"]),
        ({"precision": "tf32"}, ["precision='tf32' needs a GPU's tensor cores", "precision='ieee'"]),
        ({"out": np.empty((2, 4, 10, 9), np.float32)}, ["out must have shape (2, 4, 10, 8)", "(2, 4, 10, 9)"]),
        ({"out": np.empty(Q.shape)}, ["out must have shape", "float32", "float64"]),
        ({"out": Q}, ["out must not overlap q"]),
        ({"out": "o"}, ["out must be a NumPy array", "'o'"]),
    ],
)
def test_a_wrong_option_is_named_with_its_rule_and_what_came(options, words):
    text = "\n".join(reasons_of(Q, Q, Q, **options))
    assert all(word in text for word in words), text


def test_an_array_of_another_dtype_alone_is_told_how_to_cast_it():
    o, vjp = cuflash.attention_vjp(Q, Q, Q)
    with pytest.raises(cuflash.UnsupportedProblem, match=r"and float64: cast it to float32$"):
        vjp(np.ones(o.shape))
    with pytest.raises(cuflash.UnsupportedProblem, match=r"got \(2, 4, 10, 9\) and float64$"):
        vjp(np.ones((2, 4, 10, 9)))
    cache = cuflash.KVCache(batch=2, num_kv_heads=4, head_dim=8, capacity=20, dtype=np.float32)
    with pytest.raises(cuflash.UnsupportedProblem, match=r"and float64: cast it to float32$"):
        cache.append(Q, Q.astype(float))
    with pytest.raises(cuflash.UnsupportedProblem, match=r"got \(2, 4, 10, 7\) and float64$"):
        cache.append(Q, Q[..., :7].astype(float))


def test_a_module_that_is_not_imported_is_named_with_its_import():
    names = ("diagnosis", "jax", "testing", "torch")
    code = f"""import cuflash
for name in {names}:
    try:
        getattr(cuflash, name)
    except AttributeError as error:
        print(error)
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.partition("cuflash.")[2] for line in output] == [
        f"{name} must be imported before it is used: write import cuflash.{name}" for name in names
    ]


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'cuflash' has no attribute 'attend'"):
        cuflash.attend
    assert not hasattr(cuflash, "attend")


def test_unequal_lengths_need_an_alignment_by_name():
    for options in ({"causal": True}, {"window": (2, 0)}, {"mask": masks.Causal()}, {"mask": masks.PrefixLM(2)}):
        (reason,) = reasons_of(Q[:, :, :4], Q, Q, **options)
        assert "seqlen_q=4 and seqlen_kv=10" in reason and "'bottom_right'" in reason and "'top_left'" in reason


@pytest.mark.parametrize("call", [cuflash.attention, cuflash.attention_vjp, cuflash.plan, cuflash.error_bound])
@pytest.mark.parametrize(
    "hider", [{"scale": np.nan}, {"mask": np.ones((10, 10))}, {"return_lse": 1}], ids=lambda hider: next(iter(hider))
)
def test_no_wrong_argument_hides_another(call, hider):
    others = {"causal": 3, "window": 5, "bias": np.ones((10, 10), bool), "sink": np.zeros(3, np.float32), "dropout": 1}
    wrong = {**others, **{name: value for name, value in hider.items() if name in signature(call).parameters}}
    with pytest.raises(UnsupportedProblem) as caught:
        call(Q, Q, Q, **wrong)
    assert sorted(reason.split()[0] for reason in caught.value.reasons) == sorted(wrong)


def test_a_list_is_written_out_where_it_is_short():
    assert describe([1, -2.5, "a"]) == "[1, -2.5, 'a']" and describe([[1]]) == "[[1]]"
    assert describe([["a" * 50] * 4, 1]) == "list"
    assert describe(list(range(2000))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...] of 2000 items"


def test_arrays_on_a_gpu_without_cupy_name_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(compiling, "_has_warned", True)
    device = to_device(Q)
    with pytest.raises(RuntimeError, match=r"CuPy is missing .*pip install '\.\[cuda13\]'"):
        cuflash.attention(device, device, device)


def test_a_read_only_or_broadcast_output_is_refused():
    frozen = np.empty_like(Q)
    frozen.flags.writeable = False
    assert "out must be writeable" in reasons_of(Q, Q, Q, out=frozen)[0]
    repeated = np.broadcast_to(np.empty((10, 8), np.float32), Q.shape)
    assert any("must not overlap itself in memory" in reason for reason in reasons_of(Q, Q, Q, out=repeated))


def test_outputs_that_overlap_each_other_are_refused():
    both = np.empty(Q.size + Q.size // 8, np.float32)
    o, lse = both[: Q.size].reshape(Q.shape), both[: Q.size // 8].reshape(Q.shape[:-1])
    assert "must not overlap" in reasons_of(Q, Q, Q, out=(o, lse))[0]


def test_an_output_beside_its_inputs_in_one_buffer_is_accepted():
    packed = np.random.default_rng(0).standard_normal((2, 10, 4, 4, 8), dtype=np.float32)
    q, k, v, o = (packed[:, :, part].swapaxes(1, 2) for part in range(4))
    expected = cuflash.attention(q, k, v)
    assert cuflash.attention(q, k, v, out=o) is o
    assert (o == expected).all()


def test_the_vjp_refuses_a_wrong_cotangent():
    o, vjp = cuflash.attention_vjp(Q, Q, Q)
    with pytest.raises(cuflash.UnsupportedProblem, match=r"do must have shape \(2, 4, 10, 8\)"):
        vjp(o[..., :4])
    with pytest.raises(cuflash.UnsupportedProblem, match="dlse must have shape .* and dtype float32"):
        vjp(o, np.zeros(Q.shape[:-1]))
    with pytest.raises(TypeError, match="do must be an array"):
        vjp(1.0)


def test_a_plan_refuses_arrays_it_was_not_made_for():
    ready = cuflash.plan(Q, Q, Q)
    with pytest.raises(cuflash.UnsupportedProblem, match="k must have shape"):
        ready.forward(Q, Q[:, :, :5], Q)


def test_a_plan_for_a_gpu_explains_itself_and_does_not_run():
    ready = cuflash.plan(Q, Q, Q, device=cuflash.DeviceSpec.gpu("A100"))
    assert "sm_80, 108 multiprocessors" in ready.explain()
    with pytest.raises(cuflash.UnsupportedProblem, match="q must be a cupy array .* got numpy.ndarray"):
        ready.forward(Q, Q, Q)


def test_an_unknown_gpu_names_the_known_ones():
    with pytest.raises(cuflash.UnsupportedProblem, match="H100"):
        cuflash.DeviceSpec.gpu("H1000")
    with pytest.raises(cuflash.UnsupportedProblem, match=r"got host: write DeviceSpec.gpu\('H100'\)"):
        cuflash.precompile(Q, Q, Q, device=cuflash.DeviceSpec.host())


@pytest.mark.parametrize("name", ["h100", "H100", "rtx 4090", "Rtx 4090", np.str_("b200")])
def test_a_gpu_is_named_in_upper_or_lower_case(name):
    device = cuflash.DeviceSpec.gpu(name)
    assert device == cuflash.DeviceSpec.gpu(str(name).upper()) and device.name == str(name).upper()


def test_merge_refuses_parts_that_do_not_fit():
    o, lse = cuflash.attention(Q, Q, Q, return_lse=True)
    for outs, lses in (([], []), ([o], []), ([o, o[:1]], [lse, lse]), ([o, o], [lse, lse.astype(float)])):
        with pytest.raises(cuflash.UnsupportedProblem):
            cuflash.merge(outs, lses)
    with pytest.raises(TypeError, match=r"outs\[0\] must be an array"):
        cuflash.merge([1.0], [2.0])
    with pytest.raises(cuflash.UnsupportedProblem, match=r"one pair \(o, lse\): write merge\(\*zip\(left, right\)\)"):
        cuflash.merge((o, lse), (o, lse))


@pytest.mark.parametrize(
    ("value", "same"),
    [
        ({"causal": np.True_}, {"causal": True}), ({"causal": np.False_}, {"causal": False}),
        ({"causal": np.str_("top_left")}, {"causal": "top_left"}),
        ({"deterministic": np.True_}, {"deterministic": True}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}), ({"scale": np.int8(2)}, {"scale": 2}),
        ({"scale": np.array(0.5)}, {"scale": 0.5}), ({"scale": ml_dtypes.bfloat16(0.5)}, {"scale": 0.5}),
        ({"executor": np.str_("cpu")}, {"executor": "cpu"}), ({"window": [3, 0]}, {"window": (3, 0)}),
    ],
)  # fmt: skip
def test_numbers_flags_and_words_of_numpy_are_taken_as_such(value, same):
    q = np.random.default_rng(0).standard_normal(Q.shape, dtype=np.float32)
    for _ in range(2):
        (o, lse), expected = (cuflash.attention(q, q, q, return_lse=np.True_, **options) for options in (value, same))
        assert (o == expected[0]).all() and (lse == expected[1]).all()
    assert isinstance(cuflash.attention(q, q, q, return_lse=np.False_, **value), np.ndarray)
    assert patterns.random(40, block=4, density=np.float32(0.5)).blocks.sum() == 50


def test_what_a_refused_call_was_to_write_is_left_as_it_was():
    out = np.full_like(Q, 7)
    for options in ({"return_lse": "no"}, {"return_lse": np.ones(2, bool)}, {"deterministic": "x"}, {"scale": 10**400}):
        (reason,) = reasons_of(Q, Q, Q, out=out, **options)
        assert reason.startswith(f"{next(iter(options))} must be") and (out == 7).all()


def test_out_of_memory_raises_memory_error_and_leaves_the_process_usable():
    few = np.zeros((1, 1), np.float32)
    huge = np.broadcast_to(few, (1 << 40, 1, 1 << 20, 1))  # the output would need 4 EiB
    before = cuflash.attention(Q, Q, Q)
    with pytest.raises(MemoryError):
        cuflash.attention(huge, few[None, None], few[None, None])
    np.testing.assert_array_equal(cuflash.attention(Q, Q, Q), before)
