"""Features of nodes and edges by name, one row a node or edge."""

from collections.abc import Callable, Iterator, MutableMapping

import torch
from torch import Tensor

from hector.message.edges import Edges


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


class _Sorted:
    """A column in the graph's order, until somebody asks for it in the caller's."""

    def __init__(self, rows: Tensor, edges: Edges) -> None:
        self.rows, self.edges = rows, edges
        self._given: Tensor | None = None

    def given(self) -> Tensor:
        """Return the column in the caller's order, the same tensor each time; its
        history is that of the rows, whoever asks first."""
        if self._given is None:
            inverse = self.edges.inverse
            with torch.inference_mode(False), torch.enable_grad():
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
    ) -> None:
        super().__init__(num_rows, device, "edge", fill)
        self._made: dict[str, _Sorted] = {}

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        return super().__getitem__(name) if made is None else made.given()

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self._made.pop(name, None)

    def __delitem__(self, name: str) -> None:
        if name in self._made:
            del self._made[name]
        else:
            super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._columns, **self._made})

    def __len__(self) -> int:
        return len({**self._columns, **self._made})

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
        made = EdgeFrame(self.num_rows, self.device, self.fill)
        made._columns, made._made = dict(self._columns), dict(self._made)
        return made
