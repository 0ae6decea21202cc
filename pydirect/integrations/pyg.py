"""PyTorch Geometric: features in host memory after its own interfaces.

Importing this module imports torch_geometric. `unify_data` needs the unified device
(`pydirect.enable`); `UnifiedFeatureStore` does not.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch_geometric.data import FeatureStore, TensorAttr

import pydirect
from pydirect.gather import index_select
from pydirect.memory import HostTable
from pydirect.tiering import TieredTable

_Data = TypeVar("_Data")


def unify_data(data: _Data, *names: str) -> _Data:
    """Put attributes of a ``Data`` or ``HeteroData`` into unified memory, in place.

    Everything that indexes them afterwards (``data.subgraph``, PyG's loaders, your
    loop) gathers on the GPU: the two-line change for code that uses ``Data``. Workers
    of a loader cannot use the GPU: they gather into CPU tensors in shared memory. With
    ``filter_per_worker=False`` the training process gathers, on the GPU.

    Args:
        data: PyG object; every node or edge store that has the attribute is changed.
        names: attribute names; ``"x"`` if none is given.

    Raises:
        NotEnabledError: `pydirect.enable` has not been called.
        ValueError: no store has one of the attributes.
    """
    for name in names or ("x",):
        stores = [store for store in data.stores if name in store]  # type: ignore[attr-defined]
        if not stores:
            raise ValueError(f"unify_data expects an attribute {name!r}, got {data}")
        for store in stores:
            store[name] = pydirect.unify(store[name].contiguous())
    return data


class AttachRows:
    """A ``transform`` for PyG's loaders: puts the rows of a batch's nodes on it.

    The loader samples nodes and edges, of data without features; the rows come from a
    host table or a `TieredTable`, gathered on the device. It runs where the loader
    joins its batches, which must be the training process (``filter_per_worker=False``).
    """

    def __init__(
        self,
        table: torch.Tensor | HostTable | TieredTable,
        device: torch.device | str,
        *,
        name: str = "x",
        node_type: str | None = None,
    ) -> None:
        """
        Args:
            table: shape (num_nodes, ...), of the nodes of ``node_type``.
            device: where the rows are wanted; that of a `TieredTable`.
            name: attribute of the batch.
            node_type: of a ``HeteroData``; None for a ``Data``.
        """
        self._table = table
        self._device = torch.device(device)
        self._name = name
        self._node_type = node_type

    def __call__(self, batch: Any) -> Any:
        """The batch with its rows.

        Raises:
            ValueError: the batch does not say which nodes it has (``n_id``).
        """
        store = batch if self._node_type is None else batch[self._node_type]
        if "n_id" not in store:
            raise ValueError(
                f"AttachRows expects a batch of a PyG loader, with n_id, got {store}"
            )
        index = store.n_id.to(self._device, non_blocking=True)
        if isinstance(self._table, TieredTable):
            store[self._name] = self._table.index_select(index)
        else:
            store[self._name] = index_select(self._table, index)
        return batch


class UnifiedFeatureStore(FeatureStore):  # type: ignore[misc]
    """A PyG feature store whose tensors stay in host memory.

    ``put_tensor`` keeps the memory it is given (no copy); ``get_tensor`` with an index
    returns rows on the GPU, gathered from there (on the CPU without a GPU).
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_tables"] = {}

    def _put_tensor(self, tensor: torch.Tensor | np.ndarray, attr: TensorAttr) -> bool:
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor)
        if attr.index is not None:
            self._table(attr)[attr.index] = tensor
            return True
        if tensor.device.type != "unified":
            tensor = pydirect.unify(tensor.contiguous())
        self._tables[_key(attr)] = tensor
        return True

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor | None:
        table: torch.Tensor | None = self._tables.get(_key(attr))
        if table is None or attr.index is None:
            return table
        if get_worker_info() is not None:
            table = pydirect.to_host(table)  # a loader's worker has no GPU
        rows: torch.Tensor = table[attr.index]
        return rows

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._tables.pop(_key(attr), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        found = self._get_tensor(attr)
        return None if found is None else tuple(found.shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """One attribute for each stored tensor."""
        return [
            self._tensor_attr_cls(group_name=group, attr_name=name)
            for group, name in self._tables
        ]

    def _table(self, attr: TensorAttr) -> torch.Tensor:
        if _key(attr) not in self._tables:
            raise KeyError(
                f"{attr}: rows can be written into a stored tensor only; put the whole "
                "tensor first (index=None)"
            )
        table: torch.Tensor = self._tables[_key(attr)]
        return table


def _key(attr: TensorAttr) -> tuple[Any, Any]:
    return attr.group_name, attr.attr_name
