"""Features of nodes and edges by name, one row a node or edge."""

from collections.abc import Callable, Iterator, MutableMapping

import torch
from torch import Tensor


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
    ) -> None:
        """Take `fill`, which makes a column that was not set: a part of a graph gathers
        rows."""
        self.num_rows, self.device, self.rows = num_rows, device, rows
        self.fill = fill
        self._columns: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if self.fill is not None and name not in self._columns:
            self._columns[name] = self.fill(name)
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(
                f"expected a {self.rows} feature {name!r}, there are {sorted(self)}"
            ) from None

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
        del self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def copied(self) -> "Frame":
        """Return a frame of the same columns; what is set in one is not seen in the
        other."""
        made = Frame(self.num_rows, self.device, self.rows, self.fill)
        made._columns = dict(self._columns)
        return made


class EdgeFrame(Frame):
    """Hold edge features in the caller's order, and in the graph's where that was asked
    for.

    [Note: two orders] Compiled programs read edge rows sorted by destination. A column
    is permuted when the other order is first read, and both are kept: attention that
    one call makes and the next one reads is never permuted.
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        fill: Callable[[str], Tensor] | None = None,
    ) -> None:
        super().__init__(num_rows, device, "edge", fill)
        self._sorted: dict[str, Tensor] = {}
        self.order: Tensor | None = None
        """Row i of the graph's order is the caller's row `order[i]`; None: the same."""
        self.inverse: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns and name in self._sorted:
            found = self._sorted[name]
            self._columns[name] = (
                found if self.inverse is None else found.index_select(0, self.inverse)
            )
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self._sorted.pop(name, None)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._columns.pop(name, None)
        self._sorted.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._columns, **self._sorted})

    def __len__(self) -> int:
        return len({**self._columns, **self._sorted})

    def sorted(self, name: str) -> Tensor:
        """Return the column in the graph's order, made of the caller's on first use."""
        if name not in self._sorted:
            given = self[name]
            self._sorted[name] = (
                given if self.order is None else given.index_select(0, self.order)
            )
        return self._sorted[name]

    def set_sorted(self, name: str, value: Tensor) -> None:
        """Set a column that is in the graph's order."""
        self.check(name, value)
        self._columns.pop(name, None)
        self._sorted[name] = value

    def either(self, name: str) -> Tensor:
        """Return the column in whichever order is at hand: for its shape and dtype."""
        known = self._sorted.get(name)
        return self[name] if known is None else known

    def copied(self) -> "EdgeFrame":
        """Return a frame of the same columns, both orders among them."""
        made = EdgeFrame(self.num_rows, self.device, self.fill)
        made._columns, made._sorted = dict(self._columns), dict(self._sorted)
        made.order, made.inverse = self.order, self.inverse
        return made
