"""Tokens, functions and edits: an edit's tokens must occur exactly once in the function that it names."""

from __future__ import annotations

from pathlib import Path

import lexing
import pytest

from mutations import planting
from mutations.planting import Edit, replaced


def texts(source: str, language: lexing.Language) -> list[str]:
    return [token.text for token in lexing.tokens(source, language)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a//b\n+/* c\nd */e", ["a", "+", "e"]),
        ('f("// no comment", \'"\');', ["f", "(", '"// no comment"', ",", "'\"'", ")", ";"]),
        ("x>>=1.5e-3f, 4'000u >> y->z", ["x", ">>=", "1.5e-3f", ",", "4'000u", ">>", "y", "->", "z"]),
        ('R"(a "b" // c)" u8"d"', ['R"(a "b" // c)"', 'u8"d"']),
        ("#define X \\\n  1", ["#", "define", "X", "1"]),
        ('"open', ['"', "open"]),
    ],
)
def test_tokens_of_cuda(source: str, expected: list[str]) -> None:
    assert texts(source, "cuda") == expected


CUDA = """
#include <a.cuh>
namespace n {
enum class Kind : int { kA, kB };
constexpr Tile k_smem{0};  // a table is not a function
const auto table = [](int i) { return i; };
template <class T, bool Is = (1 > 0)>
struct alignas(16) Tile {
  int at[3] = {};
  struct Inner { int x; };
 public:
  __device__ explicit Tile(int i) : first_{i}, last_(i) { f(); }
  CUFLASH_DEVICE bool operator()(int i) const { return i; }
  CUFLASH_DEVICE void operator=(const Tile& from) { f(); }
  ~Tile() {}
  bool operator==(const Tile&) const = default;
  T first_, last_;
};
template <>
struct Tile<int> {
  void f() { for (int i = 0; i < 3; ++i) { f({i}); } }
};
CUFLASH_DEVICE void f(int i = 3);
template <class T>
CUFLASH_DEVICE auto f(T x) -> decltype(x) { const auto g = [&](int y) { return y; }; return g(x); }
}
extern "C" {
extern "C" __global__ void __launch_bounds__(kThreads, 1) entry(const __grid_constant__ Params params) { f(1); }
}
"""


def test_functions_and_structs_of_cuda_are_found() -> None:
    functions = [(span.name, CUDA[span.start : span.stop].split("\n")[0]) for span in lexing.spans(CUDA, "cuda")]
    assert functions == [
        ("Kind", "enum class Kind : int { kA, kB }"),
        ("Tile.Inner", "struct Inner { int x; }"),
        ("Tile.Tile", "__device__ explicit Tile(int i) : first_{i}, last_(i) { f(); }"),
        ("Tile.operator()", "CUFLASH_DEVICE bool operator()(int i) const { return i; }"),
        ("Tile.operator=", "CUFLASH_DEVICE void operator=(const Tile& from) { f(); }"),
        ("Tile.Tile", "~Tile() {}"),
        ("Tile", "template <class T, bool Is = (1 > 0)>"),
        ("Tile.f", "void f() { for (int i = 0; i < 3; ++i) { f({i}); } }"),
        ("Tile", "template <>"),
        ("f", "template <class T>"),
        ("entry", 'extern "C" __global__ void __launch_bounds__(kThreads, 1) entry(const __grid_constant__ Params '
         "params) { f(1); }"),
    ]  # fmt: skip


PYTHON = """
class A:
    @property
    def x(self):
        return f(1)  # one

    def y(self):
        def inner():
            return f(2)
        if inner():
            return f(2)

def y():
    return f(1)
"""


def test_functions_and_classes_of_python_are_found() -> None:
    spans = lexing.spans(PYTHON, "python")
    assert {span.name: PYTHON[span.start : span.stop].split("\n")[0].strip() for span in spans} == {
        "A": "class A:", "A.x": "@property", "A.y": "def y(self):", "A.y.inner": "def inner():", "y": "def y():"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "anchor", "replacement", "expected"),
    [
        ("f(a,  b); // c\ng();", "f(a, b);", "", " // c\ng();"),
        ("f();  // one\n  // two\n  g();", "f();g();", "g(); f();", "g(); f();"),
        ("if (a) return b;", "(a) return", "(!a) return", "if (!a) return b;"),
        ("x = a /* first */ + b;", "a + b", "a", "x = a;"),
        ("return(x)y;", "(x)", "", "return y;"),
        ("a+b+c", "b", "+d", "a+ +d+c"),
        ('p("b // c")', '"b // c"', '""', 'p("")'),
        ("#pragma unroll\nfor (;;) f();", "unroll\nfor", "unroll 1\nfor", "#pragma unroll 1\nfor (;;) f();"),
    ],
)
def test_an_edit_fits_by_its_tokens(text: str, anchor: str, replacement: str, expected: str) -> None:
    assert replaced(text, anchor, replacement) == expected


@pytest.mark.parametrize(
    ("anchor", "replacement", "function", "expected"),
    [
        ("f(1)", "f(3)", "A.x", PYTHON.replace("f(1)  #", "f(3)  #")),
        ("f(1)", "f(3)", "A", PYTHON.replace("f(1)  #", "f(3)  #")),
        ("f(2)", "0", "inner", PYTHON.replace("f(2)", "0", 1)),
        ("if inner(): return f(2)", "pass", None, PYTHON.replace("if inner():\n            return f(2)", "pass")),
        ("return f(1)", "if f(3):\n    return f(4)\nreturn 5", "x",
         PYTHON.replace("return f(1)  #", "if f(3):\n            return f(4)\n        return 5  #")),
    ],
)  # fmt: skip
def test_an_edit_fits_in_its_function(anchor: str, replacement: str, function: str | None, expected: str) -> None:
    assert replaced(PYTHON, anchor, replacement, function, language="python") == expected


@pytest.mark.parametrize(
    ("anchor", "function", "why"),
    [
        ("f(1)", None, r"'f\(1\)' stands 2 times: bring the edit up to date"),
        ("f(1)", "inner", "stands 0 times in inner: bring the edit up to date"),
        ("f(2)", "y", "stands 2 times in y: bring the edit up to date"),  # in A.y and in y
        ("return f", "x.y", "there is no x.y: bring the edit up to date"),
        ("# one", None, "holds a comment"),
        ("f(3) # three", None, "holds a comment"),
        ("", None, "has no tokens"),
        ("f( 2 )", "inner", "is replaced by the same tokens"),
    ],
)
def test_an_edit_that_does_not_fit_fails(anchor: str, function: str | None, why: str) -> None:
    with pytest.raises((LookupError, ValueError), match=why):
        replaced(PYTHON, anchor, "f(2)" if anchor == "f( 2 )" else "pass", function, language="python")


def test_an_edit_whose_anchor_is_gone_is_not_planted(tmp_path: Path) -> None:
    edit = Edit("simt/forward.cu", "simt_forward", "no such line", "")
    with pytest.raises(LookupError, match="simt/forward.cu: .* stands 0 times in simt_forward"):
        with planting.planted(tmp_path / "kernels_cu", edit):
            pass
    assert len(planting.misfits([edit])) == 1
