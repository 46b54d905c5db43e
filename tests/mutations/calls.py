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
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import scipy.sparse
from mutations.planting import Edit
from mutations.python_guards import part
from foreign import Foreign

SIGNS = (AssertionError,)  # exceptions by which guards see a fault
Q = np.ones((2, 10, 8), np.float32)
NAMED = namedtuple("Pair", "first second")(1.0, 2.0)
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


def untouched(**options):
    """Return a probe: the call is refused before it writes."""

    def call(library):
        out = np.full_like(Q, 7)
        try:
            attends(out=out, **options)(library)
        except (TypeError, ValueError):
            pass
        return (out == 7).all()

    return takes(call)


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


def a_resolved_mask(library, is_used):
    shape = part(library, "masks.shape").MaskShape((), 1, 200, 200)
    mask = library.masks.BlockPattern(np.eye(100, dtype=bool), 2).resolve(shape)
    if is_used:
        mask.levels
    return mask


def an_example(library, is_used):
    example = part(library, "testing").Structure(seqlen_q=30, seqlen_kv=30).example()
    if is_used:
        example.bounds
    return example


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
    takes(lambda library: library.masks.Sparse(scipy.sparse.eye_array(3)).own_lengths == (3, 3)): {
        "sparse arrays are not known": Edit("arrays.py", "is_sparse", "return bool(issparse(value))", "return False"),
    },
    pickled_after_use(a_plan): {
        "a plan takes its calls along": Edit(
            "plans.py", "Plan.__getstate__", '{**vars(self), "_bound_calls": {}}', "vars(self)"
        ),
    },
    takes(replaced): {
        "a plan for another executor repeats the first's calls": Edit(
            "plans.py", "Plan",
            "default_factory=dict, init=False, repr=False",
            "default_factory=dict, repr=False",
        ),
    },
    pickled_after_use(a_plan): {
        "a work list takes its memos along": Edit(
            "blocks/work_list.py", "ListedWork.__getstate__",
            "def __getstate__(self) -> Any:\n    return without_memos(self)",
            "",
        ),
    },
    pickled_after_use(an_index): {
        "an index takes its memos along": Edit(
            "blocks/index.py", "BlockIndex.__getstate__", "return without_memos(self)", "return dict(vars(self))"
        ),
    },
    pickled_after_use(a_resolved_mask): {
        "a mask takes its memos along": Edit(
            "masks/content.py", "Described.__getstate__", "without_memos(self)", "vars(self)"
        ),
    },
    pickled_after_use(an_example): {
        "an example takes its memos along": Edit(
            "testing/assertions.py", "Example.__getstate__", "return without_memos(self)", "return vars(self)"
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
    takes(kept): {
        "what was published is not sealed": Edit(
            "sim/compiler.py", "_publish", "file.write(_seal(result.read_bytes()))", "pass"
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
        "the chosen folder is not used": Edit(
            "compiler/host_cache.py", "folder", "Path(chosen) if chosen else", "Path(chosen) if False else"
        ),
        "files of others are removed": Edit(
            "compiler/host_cache.py", "_files", "if _KEPT.fullmatch(entry.name):", "if entry.name:"
        ),
    },
    takes(while_it_is_loaded): {
        "what is being loaded is removed": Edit(
            "compiler/host_cache.py", "hold", "fcntl.flock(file, fcntl.LOCK_SH)", "pass"
        ),
        "what is being loaded is removed all the same": Edit(
            "compiler/host_cache.py", "_remove", "fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"
        ),
        "what was published is not held": Edit("sim/compiler.py", "_publish", "host_cache.hold(file)", "pass"),
        "what is being loaded is replaced": Edit(
            "sim/compiler.py", "_publish",
            "if (others := _opened(target)) is not None:", "if (others := None) is not None:",
        ),
        "what was replaced is there": Edit(
            "compiler/host_cache.py", "_is_in_place",
            "return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))", "return os.path.exists(file.name)",
        ),
    },
    takes(within_a_size): {
        "the cache grows": Edit("sim/compiler.py", "_publish", "host_cache.shrink(folder)", "pass"),
        "what is used is not noted": Edit("compiler/host_cache.py", "hold", "os.utime(file.fileno())", "pass"),
        "the newest is removed": Edit(
            "compiler/host_cache.py", "shrink", "key=lambda each: each[1].st_mtime_ns",
            "key=lambda each: -each[1].st_mtime_ns",
        ),
        "all is removed": Edit("compiler/host_cache.py", "shrink", "excess > 0 and _remove(file)", "_remove(file)"),
    },
    takes(made_once_more): {
        "what vanished is not made again": Edit(
            "sim/compiler.py", "build", "if not isinstance(error.__cause__, OSError):", "if True:"
        ),
        "what does not compile is compiled twice": Edit(
            "sim/compiler.py", "build", "if not isinstance(error.__cause__, OSError):", "if False:"
        ),
    },
    refuses(attends(k=np.ndarray), "k must be an array; got the class ndarray"): {
        "classes of arrays are arrays": Edit(
            "arrays.py", "is_array",
            "(np.ma.MaskedArray, np.matrix, np.generic, type)",
            "(np.ma.MaskedArray, np.matrix, np.generic)",
        ),
    },
    refuses(attends(k=np.float32(1)), "k must be an array; got np.float32(1.0)"): {
        "scalars of NumPy are arrays": Edit(
            "arrays.py", "is_array",
            "(np.ma.MaskedArray, np.matrix, np.generic, type)",
            "(np.ma.MaskedArray, np.matrix, type)",
        ),
    },
    refuses(attends(q=np.ndarray), "q must be an array; got the class ndarray"): {
        "a class has a namespace": Edit(
            "arrays.py", "namespace",
            'hasattr(array, "__array_namespace__") and not isinstance(array, type)',
            'hasattr(array, "__array_namespace__")',
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
    refuses(lambda library: library.ShapeDtype((2.5, 3), "f4"), "shape must be a tuple of ints"): {
        "shapes are truncated": Edit(
            "arrays.py", "ShapeDtype.__post_init__",
            "all(is_int(extent) and 0 <= extent < 2**63 for extent in shape)",
            "True",
        ),
    },
    refuses(attends(k=Foreign(Q, fault=AttributeError("no data_ptr"))), "k must be an array that", "no data_ptr"): {
        "an export fails with another library's error": Edit(
            "layouts.py", "taken", "except Exception as error:", "except BufferError as error:"
        ),
    },
    refuses(attends(k=Foreign(Q, device=None)), "k must say on which device it lies"): {
        "a device is rubbish": Edit(
            "layouts.py", "is_on_cuda", "except Exception as error:", "except BufferError as error:"
        ),
    },
    refuses(attends(k=Traced()), "k must be an array that DLPack gives away"): {
        "what is traced is taken": Edit(
            "plans.py", "as_arrays",
            "elif is_array(value) and namespace(value).__name__ not in _NAMESPACES.values():",
            "elif False:",
        ),
    },
    refuses(lambda library: a_pullback(library, False)(None), "do must be an array; got None"): {
        "do may be left out": Edit(
            "plans.py", "Plan.backward", "given = dict(zip(backward_names(dlse is not None, operands), arrays))",
            "given = {n: x for n, x in zip(backward_names(dlse is not None, operands), arrays) if x is not None}",
        ),
    },
    takes(lambda library: library.masks.Dense(Foreign(np.tri(10, dtype=bool))).allowed.shape == (10, 10)): {
        "arrays of another library are no masks": Edit(
            "masks/arrays.py", "Dense.__post_init__", 'take_arrays(self, {"allowed": "mask"}, np.bool_)', "pass"
        ),
    },
    takes(lambda library: library.masks.Lengths(kv=Foreign(np.array(3))).kv == 3): {
        "arrays of another library are no lengths": Edit(
            "masks/lengths.py", "Lengths.__post_init__", 'take_arrays(self, {"q": "q", "kv": "kv"})', "pass"
        ),
    },
    takes(lambda library: library.masks.PrefixLM(Foreign(np.array(3))).prefix == 3): {
        "arrays of another library are no prefix": Edit(
            "masks/diagonal.py", "PrefixLM.__post_init__", 'take_arrays(self, {"prefix": "prefix"})', "pass"
        ),
    },
    takes(lambda library: library.masks.Documents(Foreign(np.arange(3))).q_ids[2] == 2): {
        "arrays of another library are no documents": Edit(
            "masks/documents.py", "Documents.__post_init__",
            'take_arrays(self, {"q_ids": "q_ids", "kv_ids": "kv_ids"})',
            "pass",
        ),
    },
    takes(lambda library: library.masks.BlockPattern(Foreign(np.eye(3, dtype=bool)), 2).blocks[2, 2]): {
        "arrays of another library are no blocks": Edit(
            "masks/block_pattern.py", "BlockPattern.__post_init__", 'take_arrays(self, {"blocks": "blocks"}, np.bool_)',
            "pass"
        ),
    },
    refuses(attends(scale=True), "scale must be a finite number or None; got True"): {
        "any scale is a number": Edit(
            "planning/problem.py", "_scale_reasons",
            "is_number(number) and math.isfinite(number)",
            "math.isfinite(number)",
        ),
        "bools are ints": Edit("arrays.py", "is_int", "(bool, np.timedelta64)", "np.timedelta64"),
    },
    refuses(attends(scale=10**400), "scale must be a finite number or None; got an int of 1329 bits"): {
        "scales are huge": Edit("planning/problem.py", "_scale_reasons", "suppress(OverflowError)", "suppress()"),
    },
    takes(lambda library: (attends(scale=np.array(0.5))(library) == attends(scale=0.5)(library)).all()): {
        "a 0-d array is no scale": Edit("arrays.py", "as_number", "value.ndim == 0", "False"),
    },
    refuses(lambda library: library.reference.attention(Q, Q, Q, scale=True), "scale must be a number or None"): {
        "the reference takes any scale": Edit(
            "reference.py", "default_scale", "if not is_number(as_number(scale)):", "if False:"
        ),
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
    refuses(lambda library: library.masks.Causal(Q), "align must be 'bottom_right', ", "got an array"): {
        "alignments are arrays": Edit(
            "masks/diagonal.py", "_Aligned.__post_init__",
            'not (isinstance(align, str) and align in ("bottom_right", "top_left"))',
            'align not in ("bottom_right", "top_left")',
        ),
    },
    refuses(attends(window=(Q, 0)), "window must be (left, right)"): {
        "a side of a window is anything": Edit(
            "blocks/work_list.py", "_window",
            "if not is_pair or not all(side is None or is_int(side) for side in window):",
            "if not is_pair:",
        ),
    },
    refuses(attends(executor=["cpu"]), "executor must be 'auto'"): {
        "executors are unhashable": Edit(
            "calls/checked_plan.py", "_option_reasons",
            "if not isinstance(executor, str) or executor not in EXECUTORS:",
            "if executor not in EXECUTORS:",
        ),
    },
    refuses(attends(executor=Q), "executor must be 'auto'"): {
        "executors are arrays": Edit(
            "calls/checked_plan.py", "_executor",
            'if not isinstance(executor, str) or executor != "auto":', 'if executor != "auto":'
        ),
    },
    refuses(attends(kernel=Q), "kernel must be 'auto'"): {
        "kernels are arrays": Edit(
            "calls/checked_plan.py", "_option_reasons",
            """not (isinstance(kernel, str) and kernel == "auto")""",
            'kernel != "auto"',
        ),
    },
    refuses(lambda library: library.plan(Q, Q, Q, device="H100"), "device must be a DeviceSpec", "DeviceSpec.gpu"): {
        "devices are names": Edit(
            "calls/checked_plan.py", "planned",
            "if device is not None and not isinstance(device, DeviceSpec):", "if False:"
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
    takes(lambda library: library.plan(Q, Q, Q).forward(Q.tolist(), Q.tolist(), Q.tolist())[0].dtype == Q.dtype): {
        "a plan's lists have float64": Edit("plans.py", "Plan._taken", "if has_lists else None", "if False else None"),
    },
    refuses(lambda library: library.masks.Sequences([0, True]), "q_offsets must be a list of ints"): {
        "a flag among ints is an int": Edit("arrays.py", "of_list", "array.dtype != bool and", "False and"),
    },
    takes(lambda library: type(part(library, "arrays").of_list("q", NAMED)) is type(NAMED)): {
        "named tuples are lists": Edit("arrays.py", "is_list", "type(value) is tuple", "isinstance(value, tuple)"),
    },
    takes(lambda library: library.masks.Lengths(kv=[]).kv.dtype == np.int64): {
        "an empty list holds floats": Edit(
            "masks/fields.py", "taken_array", "of_list(name, value, dtype)", "of_list(name, value)"
        ),
    },
    takes(lambda library: library.scores.alibi([1, 2]).arrays["slopes"].dtype == np.float64): {
        "ints in a list are no numbers": Edit(
            "arrays.py", "of_list", '"iuf" if wanted in DTYPES', '"f" if wanted in DTYPES'
        ),
    },
    takes(lambda library: library.attention(list(Q), list(Q), list(Q)).dtype == Q.dtype): {
        "arrays in a list have no dtype": Edit(
            "arrays.py", "of_list", "isinstance(first, (np.ndarray, np.generic))", "False"
        ),
    },
    takes(lambda library: library.attention_vjp(Q, Q, Q, bias=Q[:, :, :1], wrt=["bias"])[1](Q)["bias"].any() == 0): {
        "names in a list are no names": Edit(
            "planning/operands.py", "wrt_of", "isinstance(names, (tuple, list))", "isinstance(names, tuple)"
        ),
    },
    refuses(attends(q=np.array([Q, Q[:, :1], None], object)[:2]), "q must be one array", "cuflash.pack(q)"): {
        "objects are numbers": Edit("arrays.py", "is_ragged", "value.dtype != object", "True"),
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
    untouched(return_lse=np.array([True, False])): {
        "results are written before a flag is looked at": Edit(
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
    refuses(lambda library: library.merge(None, None), "outs must be a sequence of arrays"): {
        "parts are whatever there is": Edit(
            "merging.py", "_parts",
            "except (TypeError, NotImplementedError) as error:",
            "except NotImplementedError as error:",
        ),
    },
    takes(lambda library: library.error_bound(Foreign(Q), Q, Q).o.shape == Q.shape): {
        "bounds take no arrays of another library": Edit(
            "bounds/host.py", "host_arrays", "arrays = as_arrays(given)", "arrays = given"
        ),
    },
    refuses(lambda library: library.error_bound(Q, Q, Q, Q[:, :3]), "do must have o's shape", "(2, 10, 8)"): {
        "bounds take any gradient": Edit(
            "bounds/elements.py", "error_bound", 'reasons += _cotangent_reasons("do", do, problem.o_shape())', ""
        ),
    },
    refuses(lambda library: library.error_bound(Q, Q, Q, product_dtype=int), "product_dtype must be a dtype of"): {
        "bounds are for any dtype of products": Edit(
            "bounds/elements.py", "_product_dtype", "except ValueError as error:", "except KeyError as error:"
        ),
    },
    refuses(
        lambda library: library.error_bound(Q, Q, Q, plan=library.plan(Q, Q, Q), causal=True), "causal must be left out"
    ): {
        "options beside a plan do not count": Edit(
            "bounds/elements.py", "_bounds_of_plan",
            "if type(value) is not type(usual[name]) or value != usual[name]", "if False",
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
        lambda library: library.plan(HALF, HALF, HALF, device=library.DeviceSpec.gpu("H100")).plan.product_dtype
        == np.float16
    ): {
        "tensor cores round no weights": Edit(
            "planning/plan.py", "KernelPlan.product_dtype", "if is_rounded else", "if False else"
        ),
    },
    refuses(
        lambda library: library.BlockIndex.from_mask("x", 2, 2, 2),
        "mask must be a Mask, a BlockIndex",
    ): {
        "a mask is made of anything": Edit(
            "masks/arrays.py", "as_mask",
            "if is_array(value) or is_foreign(value) or is_list(value):", "if True:",
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
    refuses(
        lambda library: library.BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, 2).to_scipy(elements=1),
        "elements must be True or False; got 1",
    ): {
        "1 stands for True where elements are asked for": Edit(
            "blocks/index.py", "BlockIndex.to_scipy", 'flag_reasons("elements", elements)', "[]"
        ),
    },
    refuses(lambda library: library.recall(Q, Q, Q, None), "mask must be a Mask"): {
        "recall keeps all without a mask": Edit("study/recall.py", "recall", "if mask is None:", "if False:"),
    },
    refuses(lambda library: library.masks.BlockPattern(scipy.sparse.coo_array(np.ones(3)), 8), "two axes"): {
        "sparse blocks have any number of axes": Edit(
            "masks/block_pattern.py", "BlockPattern.__post_init__", "if self.blocks.ndim != 2:", "if False:"
        ),
    },
    refuses(
        lambda library: library.BlockIndex.from_scipy(scipy.sparse.bsr_array(np.eye(4)), "4", 4),
        "seqlen_q must be an int",
    ): {
        "an index of blocks is of any length": Edit(
            "blocks/index.py", "BlockIndex.from_scipy",
            "reasons = count_reasons(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)",
            "reasons = []",
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
    refuses(
        lambda library: library.DeviceSpec(name="x", num_processors=0, tile_memory_bytes=1),
        "num_processors must be an int of at least 1; got 0",
    ): {
        "a device has no processors": Edit(
            "planning/device.py", "DeviceSpec.__post_init__", '(("num_processors", 1),', '(("num_processors", -1),'
        ),
    },
    refuses(lambda library: library.DeviceSpec.gpu([]), "name must be one of"): {
        "names of devices are unhashable": Edit(
            "planning/device.py", "DeviceSpec.gpu",
            'name.upper() if isinstance(name, str) else ""',
            "name.upper()",
        ),
    },
    refuses(lambda library: library.patterns.random(8, block=2, density=0.5, seed="x"), "seed must be an int"): {
        "a seed is anything": Edit(
            "patterns.py", "_generator", "if all(is_int(each) and each >= 0 for each in ints):", "if True:"
        ),
    },
    takes(lambda library: library.patterns.random(8, block=2, density=np.float32(0.5)) is not None): {
        "a density of NumPy is none": Edit(
            "arrays.py", "is_number",
            "is_int(value) or isinstance(value, (float, np.floating))",
            "is_int(value) or isinstance(value, float)",
        ),
    },
    takes(lambda library: library.patterns.butterfly(np.uint8(8), block=2).blocks.shape == (4, 4)): {
        "unsigned lengths wrap in patterns": Edit(
            "patterns.py", "_grid",
            "seqlen_q, seqlen_kv = _counts(seqlen_q=seqlen_q, seqlen_kv=seqlen_q if seqlen_kv is None else seqlen_kv)",
            "seqlen_kv = seqlen_q if seqlen_kv is None else seqlen_kv",
        ),
    },
    refuses(
        lambda library: library.BlockIndex.from_blocks(np.ones((1, 1), bool), 4, 4, 2**64), "block must be an int"
    ): {
        "a block is longer than any number": Edit(
            "masks/shape.py", "block_pair", "1 <= side < 2**63 for", "1 <= side for"
        ),
    },
}  # fmt: skip
