"""Experiments with rows that no other test reads run at tiny sizes, and produce rows, tables and plots."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

Load = Callable[[str], ModuleType]

ON_THE_HOST: dict[str, dict[str, Any]] = {
    "chosen_decode": {"host": True, "keys": (256,), "heads": 4, "kv_heads": 2, "page": 16, "replays": 1},
    "chosen_recall": {"data": ("language",), "ns": (2,), "rows": (1, 16)},
    "compiled_step": {
        "libraries": ("jax", "torch"), "tokens": (32,), "tokens_of_batch": 64, "vocabulary": 16, "layers": 1,
        "heads": 2, "head_dim": 8, "dtype": "float32", "repeats": 1,
    },
    "cpu_score_functions": {"tokens": 32, "heads": 2, "head_dim": 8, "repeats": 1},
    "cpu_speed": {
        "num_heads": 1, "seqlen": 256, "densities": (1.0, 0.25), "block": 32, "short_seqlens": (64,),
        "memory_seqlen": 512, "window": 31, "seconds": 0.0, "pairs": 2,
    },
    "crossover": {"seqlens": (128, 256), "blocks": (32, 64), "densities": (0.5, 1.0), "head_dim": 16, "repeats": 1},
    "flashattention1_tables": {"seqlens": (256, 128), "num_heads": 1, "head_dim": 16, "budget_s": 0.05},
    "drawn_ranks": {"problems": 8},
    "fp8_error": {"head_dims": (64,), "heads": 1, "seqlens": (256,), "queries": 128, "bounded": 32, "sim": True},
    "load": {"calls": 60, "threads": (1, 3), "new_masks": 8},
    "long_range": {
        "seqlens": (32, 64), "block": 2, "batch": 4, "steps": 2, "tests": 6, "names": ("exact", "window"), "seeds": (0,)
    },
    "mask_compile": {
        "documents_seqlen": 5000, "mean_document": 100, "butterfly_seqlen": 8192, "block": 64, "repeats": 1
    },
    "nsa_layer": {
        "kinds": ("nsa", "moba", "rows", "dense"), "context": 32, "block": 4, "run": 4, "stride": 2, "window": 6,
        "batch": 1, "steps": 2, "characters": 4000, "checked_tokens": 12, "blocks": 2,
    },
    "numerical_error": {
        "dtypes": ("float16", "float64"), "seqlens": (64,), "logit_stds": (8.0,), "outliers": (0.0, 0.01)
    },
    "pattern_zoo": {"block": 128},
    "scaling": {"seqlens": (2048,), "ranks": (2, 8)},
    "simulator_speed": {"seqlen": 40, "schedules": 3, "repeats": 1},
    "tile_sweep": {"num_heads": 1, "seqlen": 256, "blocks_q": (64,), "blocks_kv": (64, 128), "repeats": 1},
}  # fmt: skip
WITH_LIBRARIES = {"compiled_step": ("jax", "torch"), "jax_calls": ("jax",)}
ON_A_GPU: list[tuple[str, dict[str, Any]]] = [
    ("before_after", {
        "before": str(Path(__file__).parents[2]), "head_dims": (64,), "seqlens": (256,), "masks": ("causal",),
        "tokens": 512, "hidden": 128, "passes": ("forward", "backward"), "rounds": 2, "repeats": 2,
    }),
    ("block_sparsity", {
        "gpu": True, "gpu_seqlens": (512,), "gpu_blocks": (64,), "gpu_densities": (0.25, 1.0), "gpu_hidden": 128,
        "gpu_head_dim": 64, "gpu_dtype": "float16", "gpu_repeats": 3,
    }),
    ("chosen_speed", {
        "seqlens": (256,), "groups": (16, 4), "regimes": ("random", "0.8"), "chosen": (2, 1), "repeats": 1
    }),
    ("crossover", {
        "gpu": True, "gpu_seqlens": (512,), "gpu_densities": (0.25, 1.0), "blocks": (32, 128), "gpu_num_heads": 2,
        "gpu_head_dim": 64, "gpu_repeats": 2,
    }),
    ("chosen_decode", {"keys": (2048,), "batch": (2,), "replays": 1}),
    ("exponential_rate", {"rounds": 64, "repeats": 1}),
    ("fp8_error", {"head_dims": (64,), "heads": 1, "seqlens": (256,), "queries": 128, "bounded": 32, "gpu": True}),
    ("flash_ladder", {
        "gpu": True, "gpu_kernels": ("naive", "simt"), "gpu_seqlens": (256, 512), "gpu_batch": 1, "gpu_num_heads": 2,
        "gpu_head_dim": 64, "gpu_repeats": 2,
    }),
    ("flashattention1_tables", {
        "gpu": True, "methods": ("standard", "fa1", "dense", "butterfly"), "gpu_seqlens": (256, 512), "batch": 1,
        "gpu_num_heads": 2, "gpu_budget_s": 0.05,
    }),
    ("load", {"gpu": True, "calls": 400, "threads": (1, 4), "new_masks": 40}),
    ("long_range", {
        "gpu": True, "gpu_seqlens": (1024,), "gpu_steps": 3, "gpu_steps_more": 2, "gpu_tests": 64, "gpu_seeds": (0,),
        "gpu_tokens": 4096,
    }),
    ("scaling", {
        "gpu": True, "masks": ("causal",), "seqlens": (2048,), "ranks": (2,), "gpu_seqlens": (2048,), "repeats": 2,
        "gpu_kinds": ("measured", "weak"),
    }),
    ("selector_shootout", {
        "gpu": True, "data": ("minilm", "slashes"), "gpu_top_ks": (4,), "top_ks": (4,), "gpu_seqlen": 512,
        "gpu_num_heads": 2, "gpu_repeats": 1,
    }),
    ("selection_speed", {
        "kinds": ("queries",), "query_seqlens": (1024,), "query_heads": 4, "query_kv_heads": 2, "repeats": 1,
        "host_calls": 1,
    }),
    ("tile_sweep", {
        "gpu": True, "head_dims": (64,), "passes": ("forward", "backward"), "masks": ("causal",), "gpu_seqlen": 1024,
        "sm90_tokens": 1024, "sm80_tokens": 1024, "simt_tokens": 1024, "gpu_hidden": 128, "gpu_repeats": 3,
    }),
]  # fmt: skip


def check(experiment: ModuleType, options: dict[str, Any]) -> None:
    rows = list(experiment.run(experiment.Config(**options)))
    assert rows
    for row in rows:
        times = [value for name, value in row.items() if name == "ms" or name.endswith("_ms") and "spread" not in name]
        assert all(value is None or value > 0 for value in times), row
    table = experiment.table(rows)
    assert table.row_count if hasattr(table, "row_count") else table.renderables
    assert not hasattr(experiment, "plot") or experiment.plot(rows).axes


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")  # PyTorch's compiler emits it
@pytest.mark.parametrize("name", ON_THE_HOST)
def test_an_experiment_runs_on_the_host(load: Load, name: str) -> None:
    if name in ("fp8_error", "simulator_speed") and shutil.which("g++") is None:
        pytest.skip("the simulator needs g++: apt install g++")
    for library in WITH_LIBRARIES.get(name, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    check(load(name), ON_THE_HOST[name])


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), ON_A_GPU, ids=[name for name, _ in ON_A_GPU])
def test_an_experiment_runs_on_a_gpu(load: Load, name: str, options: dict[str, Any]) -> None:
    check(load(name), options)


def test_chosen_speed_tells_which_libraries_are_absent(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what draws, times and compiles on a GPU runs on the host."""
    speed, rng = load("chosen_speed"), np.random.default_rng(0)
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = SimpleNamespace  # no array is one
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None))
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def lists_of(seqlen: int, num_lists: int, chosen: int, regime: str) -> Any:
        own = np.arange(seqlen)[:, None] // speed.BLOCK
        return np.where(np.arange(chosen) > 0, rng.integers(-1, own + 1, (num_lists, seqlen, chosen)), own)

    def absent(arrays: Any, lists: Any) -> Any:
        raise speed.Unavailable("it serves no such group")

    def served(arrays: Any, lists: Any) -> Any:
        yield from (("forward fla", lambda: None), ("backward fla", lambda: None))

    def time_on_device(calls: dict[str, Callable[[], Any]], **options: int) -> Any:
        return {name: (call(), speed_timing(2.0, 0.1, 1))[1] for name, call in calls.items()}

    speed_timing = sys.modules[speed.time_on_device.__module__].Timing
    replaced = {
        "HOST_CALLS": 2, "HOST_TOKENS": 64, "why_no_gpu": lambda: None, "gpu_versions": dict,
        "check": lambda groups: None, "lists_of": lists_of, "_is_hopper": lambda: False,
        "time_on_device": time_on_device, "OTHERS": {"fla": served, "moba": absent},
        "_normal": lambda heads, seqlen: rng.standard_normal((heads, seqlen, 8)).astype(np.float16),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(speed, name, value)
    config = speed.Config(seqlens=(70, 130), groups=(16,), regimes=("random",), chosen=(2, 1), repeats=1)
    rows = list(speed.run(config))
    assert speed.table(rows).row_count == len(rows) == 23 and all(axes.lines for axes in speed.plot(rows).axes)
    assert [row["way"] for row in rows[:2]] == ["host", "host"] and all(row["host_us"] > 0 for row in rows[:2])
    ways = ["chosen", "chosen", "dense", "dense", "fla", "fla", "moba"]
    assert [row["way"] for row in rows[2:]] == 3 * ways
    assert [(row["seqlen"], row["chosen"]) for row in rows[2::7]] == [(70, 2), (130, 2), (130, 1)]
    assert {row["note"] for row in rows if row["way"] == "moba"} == {"Unavailable: it serves no such group"}
    assert all(row["of_dense"] == row["of_fla"] == 1 for row in rows[2:] if row["way"] != "moba")
