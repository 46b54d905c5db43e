"""Records that kernels take as arguments, filled from array layouts, and the launches of a pass as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype
from ..layouts import dense_strides
from ..planning._params import HEAD_VECTORS
from ..planning.launches import MATRICES, Feature, Launch, Pass, Workspace, leaves, record_of
from .arguments import Place, Words
from .tensor_map import BoxedArray, Template


class View(NamedTuple):
    """The layout of an array in memory: everything that a kernel needs to know about it except its address."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes

    @classmethod
    def of(cls, name: str, array: Array) -> View:
        return cls(name, array.dtype, array.shape, array.strides)

    @classmethod
    def of_new(cls, name: str, array: ShapeDtype | Workspace, axes: Sequence[int] | None = None) -> View:
        """Return the layout of a dense array that is not allocated yet; `axes` are in memory order, outermost first."""
        steps = dense_strides(array.shape, axes)
        return cls(name, array.dtype, array.shape, tuple(array.dtype.itemsize * step for step in steps))

    @property
    def steps(self) -> list[int]:
        """Strides in elements, 0 along axes of length 1."""
        return [step // self.dtype.itemsize * (extent != 1) for extent, step in zip(self.shape, self.strides)]

    @property
    def nbytes(self) -> int:
        """Total size of the elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def boxes(self, box: tuple[int, ...]) -> BoxedArray:
        """Return the array in boxes of its last axes, with the five axes of a tensor map.

        A leading axis of stride 0 gets extent 1.
        """
        axes = [(extent if step else 1, step) for extent, step in zip(self.shape[:-2], self.strides)]
        axes = [(1, 0)] * (5 - len(self.shape)) + axes + list(zip(self.shape, self.strides))[-2:]
        shape, strides = (tuple(side) for side in zip(*axes))
        return BoxedArray(self.dtype, shape, strides, (*[1] * (5 - len(box)), *box), box[-1] * self.dtype.itemsize)


class Argument(NamedTuple):
    """A record that kernels take by value, complete except for the values that change with each call.

    Attributes
    ----------
    record : NumPy record
        Its size is a multiple of 8 bytes.
    addresses : list of (int, str)
        The words to which addresses are added, each with the name of its array.
    numbers : list of int
        The words to which numbers are added.
    """

    record: Any
    addresses: list[tuple[int, str]]
    numbers: list[int]

    @classmethod
    def of(
        cls, feature: Feature, views: Mapping[str, View], tensor_map: Callable[[BoxedArray], Template]
    ) -> Argument:
        """Return a feature's record with its numbers, the strides of its tables, and its tensor maps.

        Fields of type MATRICES stay unset; `fill` sets them.
        """
        argument, fields = cls(record_of(feature.dtype, feature.values), [], []), leaves(feature.dtype)
        for path, start in feature.starts.items():
            argument.words.view(np.int64)[fields[path][1] // 8] = start
        for name, _, offset in feature.addresses():
            argument.addresses.append((offset // 8, name))
            if (steps := f"{name}_strides") in fields and name in views:
                argument.record[steps] = views[name].steps
        for path, (name, box) in feature.boxes.items():
            if name in views:
                argument.put_map(path, name, views[name].boxes(box), tensor_map)
        for name in feature.numbers:
            word, rest = divmod(fields[name][1], 8)
            assert not rest, f"{name} is the second half of a word, to which its number cannot be added"
            argument.numbers.append(word)
        return argument

    @property
    def words(self) -> Words:
        words: Words = self.record.reshape(1).view(np.uint64)
        return words

    def put_map(
        self, path: str, name: str, boxed: BoxedArray, tensor_map: Callable[[BoxedArray], Template], start: int = 0
    ) -> None:
        """Put the tensor map of an array, offset by `start` bytes, into a field, if the hardware can copy its boxes."""
        if boxed.reasons(address=0):
            return
        template = tensor_map(boxed)
        word = leaves(self.record.dtype)[path][1] // 8 + template.offset
        self.record[path] = template.words, 1
        self.words[word] = start
        self.addresses.append((word, name))

    def fill(self, word: int, matrices: tuple[Any, ...]) -> None:
        """Fill the MATRICES field that starts at a word."""
        self.words[word : word + MATRICES.itemsize // 8].view(MATRICES)[0] = matrices


def arguments_of(
    features: Sequence[Feature], views: Mapping[str, View], tensor_map: Callable[[BoxedArray], Template]
) -> dict[str, Argument]:
    """Return the records of features by name, for arrays with one batch axis.

    Parameters
    ----------
    views : dict of View by name
        Arrays of shape [batch, heads, rows, columns], [batch, heads, rows] or [heads].
    """
    arguments = {}
    for feature in features:
        argument = arguments[feature.name] = Argument.of(feature, views, tensor_map)
        for name, kind, offset in feature.addresses():
            if kind == MATRICES and name in views:
                steps = views[name].steps
                batch, head, row, column = (0, *steps, 0, 0) if name in HEAD_VECTORS else (*steps, 0, 0, 0)[:4]
                # Some kernels read the stride of the single batch axis at the first position, others at the last.
                argument.fill(offset // 8, (0, (batch, batch, batch), head, row, column, 0))
    return arguments


class KernelRecord(NamedTuple):
    """A launch of a kernel.

    Attributes
    ----------
    launch : Launch
        The kernel, its number of threads and its bytes of shared memory.
    grid : int
        Number of thread blocks.
    arguments : tuple of slice
        The words of each argument, as slices of `LaunchRecord.words`.
    """

    launch: Launch
    grid: int
    arguments: tuple[slice, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class LaunchRecord:
    """The launches of a pass over arrays of one layout, complete except for the values that change with each call.

    A call supplies the addresses of arrays, then numbers, then the addresses of workspaces.

    Attributes
    ----------
    words : array of uint64
        The arguments of all kernels.
    places : tuple of Place
        The words that calls set.
    kernels : tuple of KernelRecord
        In the order of the launches.
    names : tuple of str
        The arrays whose addresses calls supply.
    zeroed : tuple of (int, int)
        The arrays, by position in `names`, that are set to zero before the first kernel, and their sizes in bytes.
    workspaces : dict of Workspace by name
    """

    words: Words
    places: tuple[Place, ...]
    kernels: tuple[KernelRecord, ...]
    names: tuple[str, ...]
    zeroed: tuple[tuple[int, int], ...]
    workspaces: Mapping[str, Workspace]

    @classmethod
    def of(
        cls, kernels: Pass, templates: Sequence[Mapping[str, Argument]], names: Sequence[str],
        views: Mapping[str, View], workspaces: Mapping[str, Workspace], fixed: Mapping[str, int], num_batch: int = 1,
    ) -> LaunchRecord:  # fmt: skip
        """Build the launches of a pass.

        Parameters
        ----------
        templates : sequence of dict of Argument by name
            One set of arguments per repetition: each kernel is launched once for each set.
        names : sequence of str
            The arrays whose addresses calls supply.
        views : dict of View by name
            Their layouts, needed for arrays that the pass sets to zero; these must be contiguous.
        workspaces : dict of Workspace by name
        fixed : dict of int by name
            Addresses of arrays that are the same in every call. All other arrays get address 0.
        num_batch : int
            Batch entries per launch.
        """
        num_numbers = sum(len(argument.numbers) for argument in templates[0].values())
        positions = {name: number for number, name in enumerate(names)}
        positions |= {name: number for number, name in enumerate(workspaces, len(names) + num_numbers)}
        parts, slices, places, start = list[Words](), list[dict[str, slice]](), list[Place](), 0
        for arguments in templates:
            number = count(len(names))
            slices.append({})
            for name, argument in arguments.items():
                words = argument.words.copy()
                signed = words.view(np.int64)
                for word, array in argument.addresses:
                    signed[word] += fixed.get(array, 0)
                    if array in positions:
                        places.append(Place(start + word, int(signed[word]), positions[array]))
                places += (Place(start + word, int(words[word]), next(number)) for word in argument.numbers)
                parts.append(words)
                slices[-1][name] = slice(start, start + len(words))
                start += len(words)
        grids = [(launch, launch.grid(num_batch)) for launch in kernels.launches.values()]
        return cls(
            words=np.concatenate(parts), places=tuple(places), names=tuple(names), workspaces=workspaces,
            zeroed=tuple((list(names).index(name), views[name].nbytes) for name in kernels.zeroed),
            kernels=tuple(
                KernelRecord(launch, grid, tuple(one[name] for name in launch.features))
                for launch, grid in grids if grid
                for one in slices
            ),
        )  # fmt: skip

    @classmethod
    def joined(
        cls, parts: Sequence[tuple[LaunchRecord, Mapping[str, str]]], names: Sequence[str],
        workspaces: Mapping[str, Workspace],
    ) -> LaunchRecord:  # fmt: skip
        """Join the launches of records that take no numbers.

        Parameters
        ----------
        parts : sequence of (LaunchRecord, dict of str by name)
            Each record, with the new names of its arrays that are renamed.
        names : sequence of str
            The arrays whose addresses calls supply. An array that is neither listed nor a workspace gets address 0.
        workspaces : dict of Workspace by name
            Workspaces in addition to those of the records.
        """
        every = {**workspaces, **{name: each for record, _ in parts for name, each in record.workspaces.items()}}
        positions = {name: number for number, name in enumerate((*names, *every))}
        kernels, places, start = list[KernelRecord](), list[Place](), 0
        for record, renamed in parts:
            own = [renamed.get(name, name) for name in (*record.names, *record.workspaces)]
            places += (
                Place(start + word, offset, positions[own[number]])
                for word, offset, number in record.places if own[number] in positions
            )  # fmt: skip
            for launch, grid, arguments in record.kernels:
                moved = tuple(slice(start + each.start, start + each.stop) for each in arguments)
                kernels.append(KernelRecord(launch, grid, moved))
            start += len(record.words)
        return cls(
            words=np.concatenate([record.words for record, _ in parts]), places=tuple(places),
            kernels=tuple(kernels), names=tuple(names), zeroed=(), workspaces=every,
        )  # fmt: skip
