"""Pictures of masks and block indexes show the contents of their arrays."""

from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_mask_algebra import SHAPES_MASKS_AND_BLOCKS, tables

import cuflash
from cuflash import BlockIndex, UnsupportedProblem, masks, patterns


def states_of(table, block):
    """Return the state of each block of a boolean table: 0 for none, 1 for all, 2 for some."""
    grid = [-(-extent // side) for extent, side in zip(table.shape, block)]
    states = np.zeros(grid, int)
    for row, col in np.ndindex(*grid):
        part = table[row * block[0] : (row + 1) * block[0], col * block[1] : (col + 1) * block[1]]
        states[row, col] = 1 if part.all() else 2 * part.any()
    return states


def symbols(text):
    return np.array([["·█▒".index(symbol) for symbol in line] for line in text.split("\n")])


def check_pictures(library, drawn, b, h):
    """Check that pictures of a mask and of its index show the states of the blocks of the mask's array."""
    shape, mask, block = drawn
    b, h = b % shape.num_batch, h % shape.num_heads
    table = mask.toarray(**shape._asdict()).reshape(shape.num_batch, *shape[1:])[b, h]
    assert np.array_equal(symbols(mask.picture(**shape._asdict(), b=b, h=h)), states_of(table, (1, 1)))
    expected = states_of(table, block)
    assert np.array_equal(symbols(mask.picture(**shape._asdict(), block=block, b=b, h=h)), expected)
    index = library.BlockIndex.from_mask(mask, block=block, **shape._asdict())
    place = b % index.batch, h % index.num_heads
    assert np.array_equal(symbols(index.picture(*place)), expected)
    step = -(-expected.shape[1] // 3)
    coarse = states_of(table, (block[0] * step, block[1] * step))
    assert np.array_equal(symbols(mask.picture(**shape._asdict(), block=block, b=b, h=h, width=3)), coarse)
    assert np.array_equal(symbols(index.picture(*place, width=3)), coarse)


@given(SHAPES_MASKS_AND_BLOCKS, st.integers(0, 5), st.integers(0, 5))
def test_pictures(drawn, b, h):
    check_pictures(cuflash, drawn, b, h)


def check_functions_of_heads(library):
    """Check that a mask's function may read only the numbers of a batch entry and head."""
    mask = library.masks.FromFunction(lambda b, h, i, j: (b + h) % 2 == 0)
    assert [mask.picture(2, batch=(2,), num_heads=2, b=b, h=h) for b, h in ((1, 0), (1, 1))] == ["··\n··", "██\n██"]


def test_functions_of_heads():
    check_functions_of_heads(cuflash)


def cells(html):
    """Return the states of the cells of an SVG inside a page."""
    root = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + len("</svg>")])
    _, _, width, height = map(int, root.get("viewBox").split())
    states = np.zeros((height, width), int)
    for each in root:
        x, y, extent = (int(each.get(name)) for name in ("x", "y", "width"))
        assert (states[y, x : x + extent] == 0).all()
        states[y, x : x + extent] = {"#1f4e79": 1, "#9dc3e6": 2}[each.get("fill")]
    return states


@given(tables(most=20))
def test_notebooks_show_the_states(drawn):
    table, _, block = drawn
    index = BlockIndex.from_mask(table, *table.shape, block)
    assert np.array_equal(cells(index._repr_html_()), states_of(table, block))
    assert index._repr_html_().startswith("<pre>&lt;BlockIndex of ")
    lengths = table.shape if 1 not in table.shape else (None, None)
    if None not in lengths:
        assert np.array_equal(cells(masks.Dense(table)._repr_html_()), table)


SHOWN = {
    "a mask for any lengths": (masks.Causal(), np.tri(32)),
    "with blocks": (
        masks.Causal() & patterns.checkerboard(40, block=20), np.tri(40) * np.kron(np.eye(2), np.ones((20, 20)))
    ),
    "documents": (masks.Documents(np.array([1, 1, 2])), [[1, 1, 0], [1, 1, 0], [0, 0, 1]]),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "table"), SHOWN.values(), ids=SHOWN)
def test_notebooks_show_a_mask_at_its_own_lengths(mask, table):
    assert np.array_equal(cells(mask._repr_html_()), table)


def test_notebooks_show_the_words_of_a_mask_that_needs_more():
    mask = masks.Lengths(kv=np.array([1, 2]))
    assert mask._repr_html_() == "<pre>Lengths(kv=array([1, 2]))</pre>"


@given(tables())
def test_matplotlib_shows_the_states(drawn):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.figure import Figure

    table, _, block = drawn
    for make in (
        lambda ax: masks.Dense(table).plot(*table.shape, block=block, ax=ax),
        lambda ax: BlockIndex.from_mask(table, *table.shape, block).plot(ax=ax),
    ):
        axes = Figure().add_subplot()
        assert make(axes) is axes
        (image,) = axes.images
        assert np.array_equal(image.get_array(), states_of(table, block))
        assert axes.get_xlim() == (0, table.shape[1]) and axes.get_ylim() == (table.shape[0], 0)
        covered = [-(-extent // side) * side for extent, side in zip(table.shape, block)]
        assert image.get_extent() == [0, covered[1], covered[0], 0]


def test_a_long_mask_is_shown_without_its_elements():
    text = masks.Causal().picture(1 << 20)
    assert np.array_equal(symbols(text), np.tri(64, k=-1, dtype=int) + 2 * np.eye(64, dtype=int))


def test_an_index_is_written_in_two_lines():
    index = BlockIndex.from_mask(masks.Causal(), 8, 8, 2, num_heads=3)
    assert repr(index) == (
        "<BlockIndex of 6 full and 4 partial blocks of 2 x 2, 62.5 % of all\n"
        "    with lengths (8, 8), batch 1, num_heads 1>"
    )


INDEX = BlockIndex.from_mask(masks.Causal(), 8, 8, 2)
REFUSED = {
    "a head of a mask": (lambda: masks.Causal().picture(8, h=1), "h must be an int from 0 to 0; got 1"),
    "an entry of an index": (lambda: INDEX.picture(3), "b must be an int from 0 to 0; got 3"),
    "a position that is not an int": (lambda: INDEX.plot("a"), "b must be an int from 0 to 0; got 'a'"),
    "a width": (lambda: masks.Causal().picture(8, width=0), "width must be an int of at least 1; got 0"),
    "a block": (lambda: masks.Causal().plot(8, block=0), "block must be an int of at least 1"),
    "axes": (lambda: masks.Causal().plot(8, ax=3), "ax must be the axes of a matplotlib figure; got int"),
    "all at once": (lambda: masks.Causal().picture(8, block=0, b=2, h=2), "(?s)3 reasons.*block.*b must.*h must"),
    "no entries": (lambda: masks.Causal().picture(8, num_heads=0), "h needs an entry to show"),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shown_is_refused_in_words(call, words):
    if "plot" in call.__code__.co_names:
        pytest.importorskip("matplotlib")
    with pytest.raises(UnsupportedProblem, match=words):
        call()
