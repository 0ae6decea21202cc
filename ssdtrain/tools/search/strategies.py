"""How one operator is split: found in its description, for any sizes.

Splitting an index variable of the results (case 1) cuts them along it; splitting one of
a reduction (case 2) leaves parts that are reduced. What a worker reads of an operand
follows from the intervals of its accesses: a cut, a cut with a halo, or all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.interval import Box, End, Interval
from ssdtrain.tools.search.language import Access, Description, Merged
from ssdtrain.tools.search.placement import COPIED, Copied, Cut, Placement, Unreduced

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Strategy:
    """One way to split an operator among the workers of an axis."""

    index: str
    """The variable that is split."""
    needs: tuple[Placement, ...]
    """Of the operands."""
    gives: tuple[Placement, ...]
    """Of the results."""
    once: frozenset[int] = frozenset()
    """Operands that are zero for all workers but the first."""
    is_exact: bool = False
    """Only equal pieces will do: a view's merged dimensions, a stride's rows."""


NO_SPLIT = "*"
"""Index of the strategy where every worker runs the whole operator."""


def whole(operands: int, results: int) -> Strategy:
    """Return the way of an operator that cannot be split."""
    return Strategy(NO_SPLIT, (COPIED,) * operands, (COPIED,) * results)


def extents(
    described: Description, operands: Sequence[Shape], results: Sequence[Shape]
) -> dict[str, int]:
    """Return the size of every index variable. Raises ConfigError: a variable's size is
    in no shape, and was not given."""
    found = dict(described.sizes)
    asked: dict[str, None] = {}
    for result, shape in zip(described.results, results, strict=True):
        for names, size in zip(result.dims, shape, strict=True):
            asked.update(dict.fromkeys(names))
            if len(names) == 1:
                found.setdefault(names[0], size)
        asked.update(dict.fromkeys((*result.term.reduced, *result.term.fixed)))
        for read in result.term.reads:
            for dim, size in zip(read.dims, operands[read.operand], strict=True):
                name = dim if isinstance(dim, tuple) else _plain(dim)
                if name and len(name) == 1:
                    found.setdefault(name[0], size)
    missing = [name for name in asked if name not in found]
    if missing:
        raise ConfigError(
            f"the description expects sizes of the index variables {missing}; give "
            "them in `sizes`"
        )
    return found


def _plain(dim: Interval | None) -> Merged:
    """Return the variable that a dimension is indexed by, alone and unchanged."""
    if dim is None or len(dim.indices) != 1:
        return ()
    [name] = dim.indices
    return (name,) if dim == Interval.of(name) else ()


def splittable(described: Description) -> list[str]:
    """Return index variables along which every result can be split or reduced."""
    names: dict[str, None] = {}
    fixed: set[str] = set()
    for result in described.results:
        outer = [name for merged in result.dims for name in merged]
        names.update(dict.fromkeys((*outer, *result.term.reduced)))
        inside = {n for read in result.term.reads for n in _inside(read)}
        fixed |= result.term.fixed | (inside - set(outer) - set(result.term.reduced))
    return [name for name in names if name not in fixed]


def _inside(read: Access) -> set[str]:
    dims = [dim for dim in read.dims if dim is not None]
    return {n for d in dims for n in (d if isinstance(d, tuple) else d.indices)}


def strategies(
    described: Description, operands: Sequence[Shape], results: Sequence[Shape]
) -> list[Strategy]:
    """Return all ways to split an operator of these shapes on one axis."""
    sizes = extents(described, operands, results)
    found = []
    for name in splittable(described):
        one = _split(described, name, operands, sizes)
        if one is not None and sizes[name] > 1:
            found.append(one)
    return found


def _split(
    described: Description,
    name: str,
    operands: Sequence[Shape],
    sizes: Mapping[str, int],
) -> Strategy | None:
    needs: list[Placement | None] = [None] * len(operands)
    gives: list[Placement] = []
    once: frozenset[int] = frozenset()
    is_exact = False
    for result in described.results:
        given = _given(result.dims, name, sizes)
        if name in result.term.reduced:
            given = Unreduced(result.term.reduced[name])
            once |= result.term.once
        if given is None:
            return None
        gives.append(given)
        is_exact |= any(name in merged and len(merged) > 1 for merged in result.dims)
        for read in result.term.reads:
            need = _need(read, name, operands[read.operand], sizes)
            before = needs[read.operand]
            if need is None or before not in (None, need):
                return None
            needs[read.operand] = need
            is_exact |= _is_scaled(read, name)
    used = tuple(COPIED if need is None else need for need in needs)
    return Strategy(name, used, tuple(gives), once, is_exact)


def _outermost(merged: Merged, name: str, sizes: Mapping[str, int]) -> bool:
    """True if a cut of the variable is a cut of the merged dimension."""
    return next((one for one in merged if sizes[one] > 1), "") == name


def _given(
    dims: Sequence[Merged], name: str, sizes: Mapping[str, int]
) -> Placement | None:
    """Return a result's placement; None: its pieces are no cut."""
    for dim, merged in enumerate(dims):
        if name in merged:
            return Cut(dim) if _outermost(merged, name, sizes) else None
    return COPIED


def _is_scaled(read: Access, name: str) -> bool:
    """True if rows of an operand and of the result correspond only in equal pieces."""
    for dim in read.dims:
        if isinstance(dim, tuple):
            if name in dim and len(dim) > 1:
                return True
        elif dim is not None and dim.lower.terms.get(End(name, False), 1) != 1:
            return True
    return False


def _need(
    read: Access, name: str, shape: Shape, sizes: Mapping[str, int]
) -> Placement | None:
    """Return what a worker reads of an operand; None: no equal cut with a halo."""
    found: Placement = COPIED
    for at, dim in enumerate(read.dims):
        if dim is None:
            continue
        if isinstance(dim, tuple):
            if name not in dim:
                continue
            cut: Cut | None = Cut(at) if _outermost(dim, name, sizes) else None
        elif name not in dim.indices:
            continue
        else:
            cut = _window(dim, name, at, shape[at], sizes)
        if cut is None or not isinstance(found, Copied):
            return None  # two dimensions by one variable: no piece is an input
        found = cut
    return found


def _window(
    dim: Interval, name: str, at: int, size: int, sizes: Mapping[str, int]
) -> Cut | None:
    """Return the cut that covers `stride * name + window - padding`."""
    stride = dim.lower.terms.get(End(name, False))
    same = dim.upper.terms.get(End(name, True))
    if stride is None or stride != same or stride < 1 or stride.denominator != 1:
        return None
    if stride * sizes[name] != size:
        return None
    first, last = region(dim, {n: (0, sizes[n] - 1) for n in dim.indices})
    return Cut(at, max(0, -first), max(0, last - size + 1))


def region(dim: Interval | Merged | None, box: Box, size: int = 0) -> tuple[int, int]:
    """Return the first and last index of a dimension (`size`, if all of it) that is
    read."""
    if dim is None:
        return 0, size - 1
    if isinstance(dim, tuple):
        raise ConfigError("a merged dimension has no interval; its variables have")
    return dim.at(box)
