"""How features of several types are reached, in DGL's words."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from hector.message.frame import Frame


class TypeView:
    """`nodes[type].data` and `nodes(type)`, as DGL writes them."""

    def __init__(self, frame: Callable[[Any], Any], call: Callable[..., Any]) -> None:
        self._frame, self._call = frame, call

    def __getitem__(self, kind: Any) -> "TypeSpace":
        return TypeSpace(self._frame(kind))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._call(*args, **named)


class TypeSpace:
    """What `nodes[type]` gives: `data`, which may be assigned as a whole."""

    def __init__(self, frame: Any) -> None:
        self.data = frame


class RowsView(MutableMapping[str, Tensor]):
    """Features of some nodes or edges: read as copies, set where the others stay."""

    def __init__(self, frame: Frame, ids: Tensor) -> None:
        self._frame, self._ids = frame, ids

    def __getitem__(self, name: str) -> Tensor:
        return self._frame[name].index_select(0, self._ids)

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._frame.write(name, self._ids, value)

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"expected to delete {name!r} of all rows, not of some")

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class ColumnsByType(MutableMapping[str, dict[Any, Tensor]]):
    """Features of several types: a name's columns by type."""

    def __init__(self, frames: Mapping[Any, Any]) -> None:
        self._all = frames

    def __getitem__(self, name: str) -> dict[Any, Tensor]:
        found = {k: f[name] for k, f in self._all.items() if name in f}
        if not found:
            raise KeyError(f"expected a feature {name!r}, no type has it")
        return found

    def __setitem__(self, name: str, columns: Any) -> None:
        if not isinstance(columns, Mapping):
            raise ValueError(
                f"expected columns of {name!r} by type of {list(self._all)}, got "
                f"{type(columns).__name__}"
            )
        for kind, value in columns.items():
            if kind not in self._all:
                raise ValueError(
                    f"expected a type of {list(self._all)} for {name!r}, got {kind!r}"
                )
            self._all[kind][name] = value

    def __delitem__(self, name: str) -> None:
        for kind in self[name]:
            del self._all[kind][name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for f in self._all.values() for name in f))

    def __len__(self) -> int:
        return len(list(iter(self)))
