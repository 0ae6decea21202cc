"""Features of nodes and edges by name, one row a node or edge."""

from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hector.indexing import check_range, integers, tensor_of
from hector.kept import lasting
from hector.message.batches import FeatureView
from hector.message.edges import Edges

MASK = "_mask"
"""Edge feature of `Relation.masked`."""


def ids_of(
    name: str,
    nodes: Any,
    limit: int,
    device: torch.device,
    limit_name: str = "num_nodes",
) -> Tensor:
    """Return ids [n] of an id, ids, a slice or a boolean mask [limit], on `device`.

    Raises:
        ValueError: ids that are none, or a mask of another length.
    """
    if isinstance(nodes, slice):
        return torch.arange(limit, device=device)[nodes]
    given = tensor_of([nodes] if isinstance(nodes, int) else nodes)
    if given.dtype is torch.bool:
        if given.shape != (limit,):
            raise ValueError(
                f"expected a mask {name} of shape [{limit}], got {list(given.shape)}"
            )
        return given.to(device).nonzero().flatten()
    ids = integers(name, given.view(1) if given.dim() == 0 else given).to(device)
    check_range(name, ids, limit, limit_name)
    return ids


def ends_of(u: Any, v: Any, device: torch.device) -> list[Tensor]:
    """Return sources and destinations of new edges; one id alone is that of all.

    Raises ValueError on ids that are no integers, and on two lengths.
    """
    found = [
        integers(name, tensor_of([e] if isinstance(e, int) else e)).to(device)
        for name, e in (("u", u), ("v", v))
    ]
    if isinstance(u, int) or isinstance(v, int):
        found = list(torch.broadcast_tensors(*found))
    if found[0].shape != found[1].shape:
        raise ValueError(
            f"expected u and v of one length, got {found[0].numel()} and "
            f"{found[1].numel()}"
        )
    return found


def _recorded() -> AbstractContextManager[None]:
    """Make what a frame keeps of features: its history is that of the features, in
    whatever mode it is asked for first."""
    return nullcontext() if torch.is_grad_enabled() else _recording()


@contextmanager
def _recording() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Frame(MutableMapping[str, Tensor]):
    """Hold named tensors with the same number of rows on one device.

    A column is replaced, never written to: what a caller or autograd holds stays.
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        rows: str,
        fill: Callable[[str], Tensor] | None = None,
        names: Collection[str] = (),
    ) -> None:
        """Take `fill`, which makes a column of `names` that was not set: a part of a
        graph gathers rows."""
        self.num_rows, self.device, self.rows = num_rows, device, rows
        self.fill, self.names = fill, names
        self._columns: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._columns.get(name)
        if found is not None:
            return found
        if self.fill is None or name not in self.names:
            raise KeyError(
                f"expected a {self.rows} feature {name!r}, there are {sorted(self)}"
            )
        with _recorded():
            found = self._columns[name] = self.fill(name)
        return found

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.check(name, value)
        self._columns[name] = value

    def check(self, name: str, value: Tensor) -> None:
        """Raise ValueError unless `value` has a row for each node or edge, on the
        device."""
        if not isinstance(value, Tensor) or value.shape[:1] != (self.num_rows,):
            found = list(getattr(value, "shape", ())) or type(value).__name__
            raise ValueError(
                f"expected {name!r} with {self.num_rows} {self.rows} rows, got {found}"
            )
        if value.device != self.device:
            raise ValueError(
                f"expected {name!r} on {self.device}, got {value.device}; move it or "
                f"the graph"
            )

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self.names = [n for n in self.names if n != name]
        self._columns.pop(name, None)

    def _unfilled(self) -> list[str]:
        return [n for n in self.names if n not in self._columns]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._columns, *self._unfilled()])

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self.names

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getstate__(self) -> dict[str, Any]:
        """A frame whose columns are all there goes without those it came from."""
        made = {} if self._unfilled() else {"fill": None, "names": ()}
        return vars(self) | made

    def copied(self) -> "Frame":
        """Return a frame of the same columns; what is set in one is not seen in the
        other."""
        made = Frame(self.num_rows, self.device, self.rows, self.fill, self.names)
        made._columns = dict(self._columns)
        return made

    def part(self, ids: Tensor) -> "Frame":
        """Return a frame of the rows `ids`, gathered when they are read."""
        now, ids = self.copied(), lasting(ids)
        return Frame(
            ids.numel(),
            self.device,
            self.rows,
            partial(_gathered, now, ids),
            tuple(now),
        )

    def padded(self, num_rows: int) -> "Frame":
        """Return a frame of more rows, the new ones zeros."""
        made = Frame(num_rows, self.device, self.rows)
        made.update(_longer(self, num_rows))
        return made

    def rows_at(self, ids: Tensor | None) -> FeatureView:
        """Return what a user's function reads: rows `ids`, or all."""
        return FeatureView(lambda n: self[n] if ids is None else self[n][ids], self)

    def write(self, name: str, ids: Tensor, value: Tensor) -> None:
        """Set a new column with changed rows; a new feature is zero elsewhere."""
        old = self[name] if name in self else None
        if old is None or old.shape[1:] != value.shape[1:]:
            old = value.new_zeros(self.num_rows, *value.shape[1:])
        if not torch.can_cast(value.dtype, old.dtype):
            raise ValueError(
                f"expected rows of {old.dtype} for {name!r}, which other rows of it "
                f"are, got {value.dtype}; convert it or choose another name"
            )
        self[name] = old.index_copy(0, ids, value.to(old.dtype))


class _Sorted:
    """A column in the graph's order, until somebody asks for it in the caller's."""

    def __init__(self, rows: Tensor, edges: Edges) -> None:
        self.rows, self.edges = rows, edges
        self._given: Tensor | None = None

    def given(self) -> Tensor:
        """Return the column in the caller's order, the same tensor each time."""
        if self._given is None:
            inverse = self.edges.inverse
            with _recorded():
                self._given = (
                    self.rows if inverse is None else self.rows.index_select(0, inverse)
                )
        return self._given

    def sorted(self, edges: Edges) -> Tensor | None:
        """Return the rows in the order of `edges`, unless the caller may have changed
        them since."""
        return self.rows if self._given is None and edges is self.edges else None


class EdgeFrame(Frame):
    """Hold edge features in the caller's order, or as a program left them.

    [Note: two orders] Compiled programs read edge rows sorted by destination. A column
    that the caller set is permuted in each call: a kept copy would not know that its
    source was written to, trained, or first read where no gradients were wanted. A
    column that a program made stays in the graph's order until somebody asks for it:
    attention that one call makes and the next one reads is never permuted.
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        fill: Callable[[str], Tensor] | None = None,
        names: Collection[str] = (),
    ) -> None:
        super().__init__(num_rows, device, "edge", fill, names)
        self._made: dict[str, _Sorted] = {}

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        return super().__getitem__(name) if made is None else made.given()

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self._made.pop(name, None)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._made.pop(name, None)

    def _unfilled(self) -> list[str]:
        return [n for n in super()._unfilled() if n not in self._made]

    def __iter__(self) -> Iterator[str]:
        return iter([*super().__iter__(), *self._made])

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._made or name in self.names

    def sorted(self, name: str, edges: Edges) -> Tensor:
        """Return the column in the order of `edges`."""
        made = self._made.get(name)
        found = None if made is None else made.sorted(edges)
        if found is not None:
            return found
        given, order = self[name], edges.order
        return given if order is None else given.index_select(0, order)

    def set_sorted(self, name: str, value: Tensor, edges: Edges) -> None:
        """Set a column that is in the order of `edges`."""
        self.check(name, value)
        self._columns.pop(name, None)
        self._made[name] = _Sorted(value, edges)

    def either(self, name: str) -> Tensor:
        """Return the column in whichever order is at hand: for its shape and dtype."""
        made = self._made.get(name)
        return self[name] if made is None else made.rows

    def copied(self) -> "EdgeFrame":
        """Return a frame of the same columns; what is set in one is not seen in the
        other."""
        made = EdgeFrame(self.num_rows, self.device, self.fill, self.names)
        made._columns, made._made = dict(self._columns), dict(self._made)
        return made

    def part(self, ids: Tensor) -> "EdgeFrame":
        """Return a frame of the rows `ids`, gathered when they are read."""
        now, ids = self.copied(), lasting(ids)
        return EdgeFrame(
            ids.numel(),
            self.device,
            partial(_gathered, now, ids),
            tuple(now),
        )

    def padded(self, num_rows: int) -> "EdgeFrame":
        """Return a frame of more rows, the new ones zeros."""
        made = EdgeFrame(num_rows, self.device)
        made.update(_longer(self, num_rows))
        return made


def _gathered(frame: Frame, ids: Tensor, name: str) -> Tensor:
    return frame[name].index_select(0, ids)


def _longer(frame: Frame, num_rows: int) -> dict[str, Tensor]:
    return {
        k: torch.cat((v, v.new_zeros(num_rows - v.shape[0], *v.shape[1:])))
        for k, v in frame.items()
    }
