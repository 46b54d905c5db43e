"""Faults in what calls take and refuse, in pickles and in the kernel cache, each with the probe that must see it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from mutations.planting import Edit
from mutations.python_guards import part
from foreign import Foreign

SIGNS = (AssertionError,)  # exceptions by which guards see a fault
Q = np.ones((2, 10, 8), np.float32)
HALF = Q.astype(np.float16)


class Traced:
    shape, ndim, dtype = Q.shape, Q.ndim, Q.dtype

    def __array_namespace__(self):
        return np.testing


class Tracer(Traced):
    """Stands for the tracer that JAX's transformations pass."""


def refuses(call, *words):
    """Return a probe: the library's call raises one of its two errors, whose message has these words."""

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


def takes(call):
    """Return a probe: the library's call raises nothing and returns a true value."""

    def probe(library):
        try:
            assert call(library)
        except Exception as error:
            raise AssertionError(f"raises {error!r}") from error

    return probe


class KVCache:
    """Stand-in with the methods by which messages recognize a cache."""


def attends(**options):
    return lambda library: library.attention(**{"q": Q, "k": Q, "v": Q, **options})


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


def a_plan(library, is_used):
    index = library.BlockIndex.from_blocks(np.eye(5, dtype=bool), 10, 10, 2)
    ready = library.plan(Q, Q, Q, mask=index)
    if is_used:
        ready.backward(Q, Q, Q, Q, *ready.forward(Q, Q, Q))
    return ready


def a_pullback(library, is_used):
    _, vjp = library.attention_vjp(Q, Q, Q)
    if is_used:
        vjp(Q)
    return vjp


def an_index(library, is_used):
    index = library.BlockIndex.from_blocks(np.eye(100, dtype=bool), 200, 200, 2)
    if is_used:
        index.block_rows, index.on_host
    return index


def replaced(library):
    ready = a_plan(library, True)
    return not dataclasses.replace(ready, executor="sim")._bound_calls


def kept(library):
    """Return whether a shared library that was cut short is known to be incomplete."""
    compiler = part(library, "sim.compiler")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.so"
        (Path(folder) / "made").write_bytes(b"machine code")
        compiler._publish([["cp", str(Path(folder) / "made"), target.name]], target, "a kernel").close()
        with compiler._opened(target) or contextlib.nullcontext() as is_whole:
            target.write_bytes(target.read_bytes()[:-3])
            return is_whole and compiler._opened(target) is None


def without_libraries(library):
    """Return whether the folder of a file system that is mounted with noexec keeps nothing."""
    host_cache = part(library, "compiler.host_cache")
    stand_in = SimpleNamespace(**vars(os) | {"statvfs": lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC)})
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(host_cache, "os", stand_in):
        return "noexec" in host_cache.made(Path(folder))


def of_others(library):
    """The folder that other users may write to keeps nothing that is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o770)
        return "other users may write" in part(library, "compiler.host_cache").made(Path(folder))


@contextlib.contextmanager
def chosen_folder():
    """Set CUFLASH_CACHE_DIR, and the user's cache folder to another one, which a fault may empty instead."""
    with tempfile.TemporaryDirectory() as chosen, tempfile.TemporaryDirectory() as users:
        with mock.patch.dict(os.environ, CUFLASH_CACHE_DIR=chosen, XDG_CACHE_HOME=users, HOME=users):
            yield chosen


def in_chosen_folder(library):
    """Kernels for the host are kept where CUFLASH_CACHE_DIR says, and removed there, but nothing else is."""
    host_cache = part(library, "compiler.host_cache")
    with chosen_folder() as chosen:
        (Path(chosen) / "sim" / f"prelude-{'0f' * 16}").mkdir(parents=True)
        for name in (f"kernel-{'0f' * 16}.so", f"prelude-{'0f' * 16}/prelude.hpp.gch", "notes.so"):
            (Path(chosen) / "sim" / name).write_bytes(b"12345")
        removed = host_cache.cache_clear()
        return (removed.entries, removed.nbytes) == (1, 10) and os.listdir(Path(chosen) / "sim") == ["notes.so"]


def while_it_is_loaded(library):
    """A file that is open to be loaded stays until it is closed."""
    host_cache, compiler = part(library, "compiler.host_cache"), part(library, "sim.compiler")
    with chosen_folder() as chosen:
        target = compiler.cache_directory() / f"kernel-{'0f' * 16}.so"
        made = Path(chosen) / "made"
        made.write_bytes(b"machine code")
        with compiler._publish([["cp", str(made), target.name]], target, "a kernel"):
            stays = host_cache.cache_clear().entries == 0 and target.exists()
        with compiler._opened(target):
            stays = stays and host_cache.cache_clear().entries == 0 and target.exists()
        with target.open("rb") as before:
            inode = target.stat().st_ino
            compiler._publish([["cp", str(made), target.name]], target, "a kernel").close()
            stays = stays and target.stat().st_ino == inode
            os.replace(shutil.copy(target, made), target)
            is_known = not host_cache.hold(before)
        return stays and is_known and host_cache.cache_clear().entries == 1


def within_a_size(library):
    """Beyond the size that is kept, what was used least recently is removed when a kernel is published."""
    host_cache, compiler = part(library, "compiler.host_cache"), part(library, "sim.compiler")
    with chosen_folder() as chosen, mock.patch.object(host_cache, "MOST_BYTES", 100):
        made, targets = Path(chosen) / "made", []
        made.write_bytes(b"machine code")
        for number in range(3):
            targets.append(compiler.cache_directory() / f"kernel-{number:032x}.so")
            compiler._publish([["cp", str(made), targets[-1].name]], targets[-1], "a kernel").close()
            if number == 1:
                os.utime(targets[0], ns=(1, 1)), os.utime(targets[1], ns=(2, 2))
                compiler._opened(targets[0]).close()
        return [target.exists() for target in targets] == [True, False, True]


def made_once_more(library):
    """A build that a removed folder stopped is tried a second time, and what does not compile is not."""
    compiler = part(library, "sim.compiler")

    def attempts(cause):
        error = compiler.BuildError("no kernel")
        error.__cause__ = cause
        with (
            mock.patch.object(compiler, "_built", side_effect=[error, "a kernel"]) as built,
            mock.patch.object(compiler, "_compiler", lambda: "g++"),
            contextlib.suppress(compiler.BuildError),
        ):
            compiler.build("", "entry")
        return built.call_count

    return [attempts(FileNotFoundError("gone")), attempts(None)] == [2, 1]


def imported_late(library):
    """In a new process, importing the library does not import NumPy, and calling it does not import SciPy."""
    folder, name = Path(library.__file__).parents[1], library.__name__
    call = "x = np.ones((3, 2)); c.attention(x, x, x, mask=lambda b, h, i, j: i >= j)"
    modules = "print([name for name in ('numpy', 'scipy') if name in sys.modules])"
    loaded = f"import sys; sys.path.insert(0, {str(folder)!r}); import {name} as c; {modules}"
    code = f"{loaded}; import numpy as np; {call}; {modules}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return run.stdout == "[]\n['numpy']\n"


FAULTS = {
    takes(imported_late): {
        "the package imports all of its modules": Edit(
            "__init__.py", None, "_one_import = RLock()", "_one_import = RLock()\nfrom .api import attention"
        ),
        "any mask imports SciPy": Edit("arrays.py", "is_sparse", 'if "scipy.sparse" not in sys.modules:', "if False:"),
    },
    pickled_after_use(a_plan): {
        "a plan takes its calls along": Edit(
            "plans.py", "Plan.__getstate__", '{**vars(self), "_bound_calls": {}}', "vars(self)"
        ),
    },
    pickled_after_use(an_index): {
        "an index takes its memos along": Edit(
            "blocks/index.py", "BlockIndex.__getstate__", "return without_memos(self)", "return dict(vars(self))"
        ),
    },
    pickled_after_use(a_pullback): {
        "a vjp is a closure": Edit(
            "api.py", "attention_vjp",
            'Pullback(ready, given["q"], given["k"], given["v"], o, lse, operands)',
            "(lambda do, dlse=None: ready.backward(do, q, k, v, o, lse, dlse))",
        ),
    },
    takes(kept): {
        "what was cut short is whole": Edit(
            "sim/compiler.py", "_opened", "data[-_SEAL_BYTES:] == _seal(data[:-_SEAL_BYTES])", "len(data) > 0"
        ),
    },
    takes(without_libraries): {
        "libraries are kept where none is loaded": Edit(
            "compiler/host_cache.py", "fault", 'if os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):', "if False:"
        ),
    },
    takes(of_others): {
        "libraries of others are loaded": Edit(
            "compiler/host_cache.py", "fault", "if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):", "if False:"
        ),
    },
    takes(in_chosen_folder): {
        "files of others are removed": Edit(
            "compiler/host_cache.py", "_files", "if _KEPT.fullmatch(entry.name):", "if entry.name:"
        ),
    },
    takes(while_it_is_loaded): {
        "what is being loaded is removed": Edit(
            "compiler/host_cache.py", "hold", "fcntl.flock(file, fcntl.LOCK_SH)", "pass"
        ),
        "what was published is not held": Edit("sim/compiler.py", "_publish", "host_cache.hold(file)", "pass"),
        "what is being loaded is replaced": Edit(
            "sim/compiler.py", "_publish",
            "if (others := _opened(target)) is not None:", "if (others := None) is not None:",
        ),
    },
    takes(within_a_size): {
        "the cache grows": Edit("sim/compiler.py", "_publish", "host_cache.shrink(folder)", "pass"),
        "the newest is removed": Edit(
            "compiler/host_cache.py", "shrink", "key=lambda each: each[1].st_mtime_ns",
            "key=lambda each: -each[1].st_mtime_ns",
        ),
    },
    takes(made_once_more): {
        "what vanished is not made again": Edit(
            "sim/compiler.py", "build", "if not isinstance(error.__cause__, OSError):", "if True:"
        ),
    },
    refuses(attends(k=np.float32(1)), "k must be an array; got np.float32(1.0)"): {
        "scalars of NumPy are arrays": Edit(
            "arrays.py", "is_array",
            "(np.ma.MaskedArray, np.matrix, np.generic, type)",
            "(np.ma.MaskedArray, np.matrix, type)",
        ),
    },
    refuses(attends(window=(np.timedelta64(3, "s"), 0)), "window must be (left, right)"): {
        "durations are ints": Edit("arrays.py", "is_int", "(bool, np.timedelta64)", "bool"),
    },
    takes(lambda library: (attends(deterministic=np.True_)(library) == 1).all()): {
        "flags of NumPy are none": Edit("arrays.py", "is_flag", "(value, (bool, np.bool))", "(value, bool)"),
    },
    refuses(lambda library: library.ShapeDtype((2, 3), None), "dtype must be a NumPy dtype or its name; got None"): {
        "None is a dtype": Edit("arrays.py", "as_dtype", "if dtype is not None:", "if True:"),
    },
    refuses(lambda library: a_pullback(library, False)(None), "do must be an array; got None"): {
        "do may be left out": Edit(
            "plans.py", "Plan.backward", "given = dict(zip(backward_names(dlse is not None, operands), arrays))",
            "given = {n: x for n, x in zip(backward_names(dlse is not None, operands), arrays) if x is not None}",
        ),
    },
    refuses(attends(scale=True), "scale must be a finite number or None; got True"): {
        "any scale is a number": Edit(
            "planning/problem.py", "_scale_reasons",
            "is_number(number) and math.isfinite(number)",
            "math.isfinite(number)",
        ),
    },
    takes(lambda library: (attends(scale=np.array(0.5))(library) == attends(scale=0.5)(library)).all()): {
        "a 0-d array is no scale": Edit("arrays.py", "as_number", "value.ndim == 0", "False"),
    },
    refuses(attends(precision=Q), "precision must be 'ieee'"): {
        "precisions are arrays": Edit(
            "planning/problem.py", "precision_reasons",
            "not isinstance(precision, str) or precision not in PRECISIONS",
            "precision not in PRECISIONS",
        ),
    },
    refuses(attends(causal=np.tri(10, dtype=bool)), "causal must be True, False"): {
        "causal is an array": Edit(
            "blocks/work_list.py", "requested_mask",
            'if isinstance(causal, str) and causal in ("bottom_right", "top_left") else None',
            'if causal in ("bottom_right", "top_left") else None',
        ),
    },
    refuses(attends(window=(Q, 0)), "window must be (left, right)"): {
        "a side of a window is anything": Edit(
            "blocks/work_list.py", "_window",
            "if not is_pair or not all(side is None or is_int(side) for side in window):",
            "if not is_pair:",
        ),
    },
    refuses(attends(executor=Q), "executor must be 'auto'"): {
        "executors are arrays": Edit(
            "calls/checked_plan.py", "_executor",
            'if not isinstance(executor, str) or executor != "auto":', 'if executor != "auto":'
        ),
    },
    takes(lambda library: (library.attention(Q, Q.tolist(), Q.tolist()) == library.attention(Q, Q, Q)).all()): {
        "lists are no arrays": Edit(
            "plans.py", "as_arrays", "arrays[name] = of_list(name, value, known[name])", "pass"
        ),
        "a list beside float32 has float64": Edit(
            "layouts.py", "dtypes_of_lists",
            "next((dtype for dtype in found if dtype in DTYPES), np.dtype(np.float64))", "np.dtype(np.float64)",
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
    refuses(attends(k=["a"]), "k must be an array; got ['a']: lists may hold numbers alone"): {
        "strings are numbers": Edit("arrays.py", "of_list", 'array.dtype.kind in "OSU"', 'array.dtype.kind in "O"'),
    },
    refuses(attends(deterministic="no"), "deterministic must be True or False; got 'no'"): {
        "a flag is whatever is true": Edit(
            "calls/checked_plan.py", "planned", 'reasons += flag_reasons("deterministic", options.deterministic)', ""
        ),
    },
    refuses(attends(return_lse=1), "return_lse must be True or False; got 1"): {
        "lse is returned for whatever is true": Edit(
            "api.py", "require_flag",
            "if type(value) is not bool and (reasons := flag_reasons(name, value)):",
            "if False and (reasons := flag_reasons(name, value)):",
        ),
    },
    refuses(twice({"scale": 2}, {"scale": 2 + 0j}), "scale must be a finite number or None; got (2+0j)"): {
        "what equals an option is one": Edit(
            "planning/options.py", "Options.key",
            "type(scale) not in _SCALES or type(deterministic)", "type(deterministic)",
        ),
    },
    takes(lambda library: library.merge([Foreign(Q)], [Foreign(Q[..., 0])])[0].shape == Q.shape): {
        "merge takes no arrays of another library": Edit(
            "merging.py", "_as_known_array", "return as_arrays({name: value}, {name: np.float64})[name]", "return value"
        ),
    },
    refuses(lambda library: library.error_bound(Q, Q, Q, Q[:, :3]), "do must have o's shape", "(2, 10, 8)"): {
        "bounds take any gradient": Edit(
            "bounds/elements.py", "error_bound", 'reasons += _cotangent_reasons("do", do, problem.o_shape())', ""
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
            "masks/shape.py", "MaskShape.__new__",
            "whole_number(name, value, 0)",
            "value",
        ),
    },
}  # fmt: skip
