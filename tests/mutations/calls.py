"""Planted faults in what calls accept and refuse, in imports and pickles, each with the probe that must detect it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import ml_dtypes
import numpy as np
import scipy.sparse
from mutations.planting import Edit
from mutations.python_guards import part
from foreign import Foreign
from test_block_index import make_lists

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault
Q = np.ones((2, 10, 8), np.float32)
HALF = Q.astype(np.float16)


def refuses(call, *words):
    """Return a probe: the library's call raises one of its two error types, and the message contains these words."""

    def probe(library):
        try:
            call(library)
        except (TypeError, part(library, "errors").UnsupportedProblem) as error:
            assert all(word in str(error) for word in words), f"says {error}"
        except Exception as error:
            raise AssertionError(f"raises {error!r}") from error
        else:
            raise AssertionError("is taken")

    return probe


def rank_of(**options):
    """Return a call that creates a `ContextParallel` with options, on one rank."""

    def call(library):
        module = part(library, "distributed")
        module.run(lambda group: module.ContextParallel(group, seqlen=8, num_heads=2, **options), size=1)

    return call


def takes(call):
    """Return a probe: the library's call raises nothing and returns a true value."""

    def probe(library):
        try:
            assert call(library)
        except Exception as error:
            raise AssertionError(f"raises {error!r}") from error

    return probe


def attends(**options):
    return lambda library: library.attention(**{"q": Q, "k": Q, "v": Q, **options})


def attends_to_a_cache_by_scales(*scales):
    """Return a call that attends to a cache on the simulator with each scale, and runs no kernel."""

    def call(library):
        step = part(library, "cache._passes").SimulatedStep
        cache = library.KVCache(batch=1, num_kv_heads=2, head_dim=8, capacity=64, dtype=HALF.dtype)
        cache.append(HALF[None], HALF[None])
        with patch.object(step, "attend", lambda *arguments: None):
            for scale in scales:
                cache.attention(HALF[None, :, :1], scale=scale, executor="sim")

    return call


def scales_are_compared_as_floats(library):
    """Check that a scale that equals an earlier one in its own narrow dtype has its own result."""
    q = np.linspace(0, 1, 20)[:, None] * np.ones(8)
    for scale in (0.3, np.float16(0.3)):
        o = library.attention(q, q, q, scale=scale)
    assert (o == library.plan(q, q, q, scale=scale).forward(q, q, q)[0]).all()


def selects(**options):
    def call(library):
        return library.selectors.pooled(Q, Q, budget=library.selectors.Budget(top_k=1), block=4, **options)

    return call


def twice(first, second):
    def call(library):
        attends(**first)(library), attends(**first)(library)
        return attends(**second)(library)

    return call


def pickled_after_use(make):
    """Return a probe: a used object can be pickled, and its pickle is as long as that of a fresh one."""

    def call(library):
        fresh, used = make(library, False), make(library, True)
        copy.deepcopy(used)
        return abs(len(pickle.dumps(used)) - len(pickle.dumps(fresh))) < 64

    return takes(call)


def a_pullback(library, is_used):
    _, vjp = library.attention_vjp(Q, Q, Q)
    if is_used:
        vjp(Q)
    return vjp


def an_index(library, is_used):
    index = library.BlockIndex.from_blocks(np.eye(100, dtype=bool), 200, 200, 2)
    if is_used:
        index._block_rows, index._on_host
    return index


def imported_late(library):
    """Check in a new process that importing the library does not import NumPy, and calling it does not import SciPy."""
    folder, name = Path(library.__file__).parents[1], library.__name__
    call = "x = np.ones((3, 2)); c.attention(x, x, x, mask=lambda b, h, i, j: i >= j)"
    modules = "print([name for name in ('numpy', 'scipy') if name in sys.modules])"
    loaded = f"import sys; sys.path.insert(0, {str(folder)!r}); import {name} as c; {modules}"
    code = f"{loaded}; import numpy as np; {call}; {modules}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return run.stdout == "[]\n['numpy']\n"


def unserved_dtypes_are_not_sent_to_simt(library):
    plan = library.plan(HALF, HALF, HALF, device=library.DeviceSpec.gpu("H100"))._plan
    families = part(library, "planning.routing").FAMILIES.values()
    problem = replace(plan.problem, dtype=np.dtype(ml_dtypes.float8_e5m2))
    return not any("or use" in reason for family in families for reason in family.reasons(problem, plan.device))


FAULTS = {
    takes(imported_late): {
        "the package imports all of its modules": Edit(
            "__init__.py", None, "_one_import = RLock()", "_one_import = RLock()\nfrom .api import attention"
        ),
        "any mask imports SciPy": Edit("arrays.py", "is_sparse", 'if "scipy.sparse" not in sys.modules:', "if False:"),
    },
    pickled_after_use(an_index): {
        "an index takes its memos along": Edit(
            "blocks/index.py", "BlockIndex.__getstate__", "return super().__getstate__()", "return dict(vars(self))"
        ),
    },
    pickled_after_use(a_pullback): {
        "a vjp is a closure": Edit(
            "api.py", "attention_vjp",
            'Pullback(plan, arrays["q"], arrays["k"], arrays["v"], o, lse, operands)',
            "(lambda do, dlse=None: plan.backward(do, q, k, v, o, lse, dlse))",
        ),
    },
    takes(unserved_dtypes_are_not_sent_to_simt): {
        "any dtype is sent to simt": Edit("planning/families/family.py", "Family._instead", "if problem.dtype in", "if")
    },
    refuses(attends(k=np.float32(1)), "k must be an array; got np.float32(1.0)"): {
        "scalars of NumPy are arrays": Edit(
            "arrays.py", "is_array", "(np.ma.MaskedArray, np.matrix, np.generic,", "(np.ma.MaskedArray, np.matrix,"
        ),
    },
    refuses(attends(window=(np.timedelta64(3, "s"), 0)), "window must be (left, right)"): {
        "durations are ints": Edit("arrays.py", "is_int", "(bool, np.timedelta64)", "bool"),
    },
    takes(lambda library: (attends(deterministic=np.True_)(library) == attends()(library)).all()): {
        "flags of NumPy are none": Edit("arrays.py", "is_flag", "(value, (bool, np.bool))", "(value, bool)"),
    },
    refuses(
        lambda library: library.KVCache.over(
            np.lib.stride_tricks.as_strided(np.zeros(5000), (2, 1, 16, 4), (256, 512, 32, 8)), np.ones((2, 1, 16, 4)),
            np.array([[0], [1]]), [0, 0]
        ), "k_pages must not overlap itself in memory"
    ): {
        "rows may overlap in memory": Edit("layouts.py", "overlaps_itself", "step < stop", "step == 0"),
    },
    refuses(selects(share=np.ones(3)), 'share must be "query" or "group"; got an array of shape (3,)'): {
        "an array is compared with names": Edit(
            "selectors/by_query.py", "share_reasons", "isinstance(share, str) and share in", "share in"
        ),
        "a selector compares an array": Edit("selectors/estimates.py", "pooled", "str(share) ==", "share =="),
    },
    refuses(selects(executor=np.ones(3)), "executor must be 'auto', 'cpu', 'gpu', 'sim'; got an array"): {
        "a key compares an array": Edit("selectors/bound.py", "key_of", "str(executor) in", "executor in"),
    },
    refuses(attends(q_start=False), "q_start must be an int from 0 to 1073741824; got False"): {
        "a start may be what compares equal to 0": Edit(
            "calls/_call.py", "_posed", "{*map(type, starts)} != {int} or", ""
        ),
    },
    takes(lambda library: library.BlockIndex.from_mask(library.masks.Causal(), 8, 8, 4, num_heads=0).num_entries): {
        "an index of no heads hides all keys of others": Edit(
            "blocks/classify.py", "classify", "extents(mask, shape) if all(shape[2:])", "(0, 0) if 1"
        ),
    },
    refuses(rank_of(softcap=-1), "softcap must be a positive finite number; got -1"): {
        "ranks accept options before there are arrays": Edit(
            "distributed/_parallel.py", "ContextParallel.__init__",
            "self._posed.require_options(group._lanes.namespace)", "pass"
        ),
    },
    refuses(rank_of(executor="gpu"), "executor must be 'auto', 'cpu' or 'sim' for ranks with NumPy arrays"): {
        "ranks with arrays of NumPy accept kernels": Edit(
            "distributed/_posed.py", "Posed.require_options", '("auto", "cpu", "sim") if xp is np',
            '("auto", "gpu") if 0'
        ),
    },
    refuses(lambda library: part(library, "distributed").Machine(link=0), "link must be positive and finite; got 0"): {
        "a link without bytes": Edit("distributed/_model.py", "Machine.__post_init__", 'and name == "launch")', ")"),
    },
    refuses(lambda library: library.ShapeDtype((2, 3), None), "dtype must be a NumPy dtype or its name; got None"): {
        "None is a dtype": Edit("arrays.py", "as_dtype", "if dtype is not None:", "if True:"),
    },
    refuses(lambda library: a_pullback(library, False)(None), "do must be an array; got None"): {
        "do may be left out": Edit(
            "calls/pullback.py", "Pullback.__call__", 'ready._with_operands("backward", arrays, self.operands)',
            'ready._with_operands("backward", {n: x for n, x in arrays.items() if x is not None}, self.operands)',
        ),
    },
    scales_are_compared_as_floats: {
        "a key compares a scale in its own dtype": Edit(
            "planning/options.py", "Options.key", "None if self.scale is None else float(self.scale)", "scale"
        ),
    },
    refuses(attends_to_a_cache_by_scales(1, True), "scale must be a finite number or None; got True"): {
        "a cache has kernels for any scale that equals another": Edit(
            "cache/_passes.py", "_device_of", "not is_valid or", ""
        ),
    },
    takes(lambda library: library.selectors.Budget(mass=0.3) != library.selectors.Budget(mass=np.float16(0.3))): {
        "budgets of different precision are alike": Edit(
            "selectors/budget.py", "Budget.__post_init__", "None if number is None else float(number)", "number"
        ),
    },
    refuses(attends(scale=True), "scale must be a finite number or None; got True"): {
        "any scale is a number": Edit(
            "arrays.py", "is_finite", "is_number(value) and math.isfinite(", "math.isfinite("
        ),
    },
    refuses(
        lambda library: [attends(scale=scale)(library) for scale in (np.float16(0.5), 10**400)],
        "scale must be a finite number or None; got an int",
    ): {
        "keys hold numbers that no float can hold": Edit(
            "planning/options.py", "Options.key", "type(scale) is int and not is_finite(scale)", "False"
        ),
    },
    takes(lambda library: (attends(scale=np.array(0.5))(library) == attends(scale=0.5)(library)).all()): {
        "a 0-d array is refused as a scale": Edit("arrays.py", "as_number", "value.ndim == 0", "False"),
    },
    refuses(attends(precision=Q), "precision must be 'ieee'"): {
        "precisions are arrays": Edit(
            "planning/problem.py", "precision_reasons", "not isinstance(precision, str) or precision", "precision"
        ),
    },
    refuses(attends(causal=np.tri(10, dtype=bool)), "causal must be True, False"): {
        "causal is an array": Edit(
            "blocks/work_list.py", "requested_mask", "if isinstance(causal, str) and causal in (", "if causal in ("
        ),
    },
    refuses(attends(window=(Q, 0)), "window must be (left, right)"): {
        "a side of a window is anything": Edit(
            "masks/fields.py", "window_sides",
            "if not is_pair or not all(side is None or is_int(side) for side in window):",
            "if not is_pair:",
        ),
    },
    refuses(attends(executor=Q), "executor must be 'auto'"): {
        "executors are arrays": Edit(
            "calls/_call.py", "_executor", "if not isinstance(executor, str) or executor !=", "if executor !="
        ),
    },
    takes(lambda library: (library.attention(Q, Q.tolist(), Q.tolist()) == library.attention(Q, Q, Q)).all()): {
        "lists are refused as arrays": Edit(
            "plans/conversion.py", "as_arrays", "arrays[name] = of_list(name, value, known[name])", "pass"
        ),
        "a list next to float32 has float64": Edit(
            "layouts.py", "dtypes_of_lists",
            "next((dtype for dtype in known if dtype in DTYPES), np.dtype(np.float64))", "np.dtype(np.float64)",
        ),
    },
    refuses(lambda library: library.masks.Sequences([0, True]), "q_offsets must be a list of ints"): {
        "a flag among ints is an int": Edit("arrays.py", "of_list", "array.dtype != bool and", "False and"),
    },
    takes(lambda library: library.masks.Lengths(kv=[]).kv.dtype == np.int64): {
        "an empty list holds floats": Edit(
            "masks/fields.py", "taken_array", "of_list(name, value, dtype)", "of_list(name, value)"
        ),
    },
    refuses(attends(k=["a"]), "k must be an array; got ['a']: a list may contain only numbers"): {
        "strings are numbers": Edit("arrays.py", "of_list", 'array.dtype.kind in "OSU"', 'array.dtype.kind in "O"'),
    },
    refuses(attends(deterministic="no"), "deterministic must be True or False; got 'no'"): {
        "a flag is whatever is true": Edit(
            "calls/_call.py", "_deterministic_reasons", 'flag_reasons("deterministic", call.options.deterministic)',
            "[]",
        ),
    },
    refuses(attends(return_lse=1), "return_lse must be True or False; got 1"): {
        "lse is returned for whatever is true": Edit(
            "calls/_forward.py", "run", 'flag_reasons("return_lse", return_lse)', "[]"
        ),
    },
    refuses(twice({"scale": 2}, {"scale": 2 + 0j}), "scale must be a finite number or None; got (2+0j)"): {
        "what equals an option is one": Edit(
            "planning/options.py", "Options.key", "(scale) not in _SCALES or type(deterministic)", "(deterministic)"
        ),
    },
    takes(lambda library: library.merge([Foreign(Q)], [Foreign(Q[..., 0])])[0].shape == Q.shape): {
        "merge takes no arrays of another library": Edit(
            "merging.py", "_as_known_array", "return as_arrays({name: value}, {name: np.float64})[name]", "return value"
        ),
    },
    refuses(lambda library: library.error_bound(Q, Q, Q, Q[:, :3]), "do must have o's shape", "(2, 10, 8)"): {
        "bounds take any gradient": Edit(
            "bounds/elements.py", "error_bound", 'reasons += cotangent_reasons("do", do, call.problem.o_shape())', ""
        ),
    },
    refuses(
        lambda library: library.error_bound(Q, Q, Q[..., :3], plan=library.plan(Q, Q, Q)),
        "v must have shape (2, 10, 8)",
    ): {
        "a plan is of any arrays": Edit(
            "bounds/elements.py", "_bounds_of_plan",
            'reasons += _planned_reasons(plan, {"q": q, "k": k, "v": v, "sink": sink})', "",
        ),
    },
    takes(
        lambda library: library.BlockIndex.from_blocks(np.eye(2, dtype=bool), np.uint8(4), 4, 2).num_q_blocks == 2
    ): {
        "unsigned lengths wrap": Edit(
            "masks/shape.py", "MaskShape.__new__", "map(int, extents.values())", "extents.values()"
        ),
    },
    refuses(
        lambda library: library.BlockIndex.from_mask(library.masks.Causal(), 2, 2, 2, num_heads=2**70),
        "num_heads must be an int from 0 to",
    ): {
        "an index is for any shape": Edit(
            "blocks/index.py", "BlockIndex.from_mask", "shape_reasons(shape) or length_reasons(shape)", "[]"
        ),
    },
    refuses(lambda library: make_lists(library, indices=[2, 0, 1]), "indices must increase within each row"): {
        "lists are not inspected": Edit(
            "blocks/index.py", "BlockIndex.__post_init__", "refuse(list_reasons(self))", "pass"
        ),
        "rows of a list have any order": Edit(
            "blocks/classify.py", "list_reasons", "if not is_start.all() or", "if"
        ),
    },
    refuses(lambda library: make_lists(library, indices=[0, 3, 1]), "indices must increase within each row"): {
        "a block of a list is past the last": Edit(
            "blocks/classify.py", "list_reasons", "(columns <= last)", "(columns >= 0)"
        ),
    },
    refuses(lambda library: make_lists(library, indptr=[0, 3]), "indptr must have 3 numbers"): {
        "lists are of fewer rows": Edit(
            "blocks/classify.py", "list_reasons", "len(starts) != num_rows + 1 or", ""
        ),
    },
    refuses(lambda library: library.masks.BlockPattern(scipy.sparse.coo_array(np.ones(3)), 8), "two axes"): {
        "sparse blocks have any number of axes": Edit(
            "masks/block_pattern.py", "BlockPattern.__post_init__", "if self.blocks.ndim != 2:", "if False:"
        ),
    },
    refuses(
        lambda library: library.DeviceSpec(name="x", num_processors=0, tile_memory_bytes=1),
        "num_processors must be an int of at least 1; got 0",
    ): {
        "a device has no processors": Edit(
            "planning/device.py", "DeviceSpec.__post_init__", '(("num_processors", 1),', '(("num_processors", -1),'
        ),
    },
    refuses(lambda library: library.patterns.random(8, block=2, density=0.5, seed="x"), "seed must be an int"): {
        "a seed is anything": Edit(
            "dropout/generators.py", "generator_of", "if ints and all(is_int(each) and each >= 0 for each in ints)",
            "if True",
        ),
    },
    refuses(
        lambda library: library.BlockIndex.from_blocks(np.ones((1, 1), bool), 4, 4, 2**64), "block must be an int"
    ): {
        "a block is longer than any number": Edit(
            "masks/shape.py", "block_pair", "1 <= side < 2**63 for", "1 <= side for"
        ),
    },
    refuses(lambda library: library.study.recall(Q, Q, Q, mask=None), "mask must be a Mask"): {
        "recall keeps all without a mask": Edit("study/_recall.py", "recall", "if mask is None:", "if False:"),
    },
    refuses(
        lambda library: library.error_bound(Q, Q, Q, plan=library.plan(Q, Q, Q), causal=True), "causal must be left out"
    ): {
        "options next to a plan do not count": Edit(
            "bounds/elements.py", "_bounds_of_plan",
            "if type(value) is not type(usual[name]) or value != usual[name]", "if False",
        ),
    },
}  # fmt: skip
