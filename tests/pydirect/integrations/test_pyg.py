"""PyG with features in unified memory."""

from types import ModuleType

import numpy as np
import pytest
import torch


def test_data_works_as_before(pyg: ModuleType) -> None:
    from pydirect.integrations.pyg import unify_data

    x = torch.arange(20.0).reshape(5, 4)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    data = pyg.data.Data(x=x, edge_index=edges, y=torch.arange(5))
    assert unify_data(data) is data and data.x.is_unified
    assert data.x.data_ptr() == x.data_ptr()
    nodes = torch.tensor([3, 1, 4])
    part = data.subgraph(nodes)
    assert not part.x.is_unified and torch.equal(part.x.cpu(), x[nodes])
    hetero = pyg.data.HeteroData()
    hetero["paper"].x, hetero["author"].x = x.clone(), x.clone()
    unify_data(hetero, "x")
    assert hetero["paper"].x.is_unified and hetero["author"].x.is_unified
    with pytest.raises(ValueError, match="an attribute 'z'"):
        unify_data(data, "z")


def test_feature_store(pyg: ModuleType) -> None:
    from pydirect.integrations.pyg import UnifiedFeatureStore

    store = UnifiedFeatureStore()
    x = torch.arange(12.0).reshape(4, 3)
    assert store.put_tensor(x, group_name="paper", attr_name="x", index=None)
    whole = store.get_tensor(group_name="paper", attr_name="x", index=None)
    assert whole.is_unified and whole.data_ptr() == x.data_ptr()
    index = torch.tensor([2, 0])
    rows = store.get_tensor(group_name="paper", attr_name="x", index=index)
    assert torch.equal(rows.cpu(), x[[2, 0]])
    store.put_tensor(np.ones((2, 2)), group_name="b", attr_name="x", index=None)
    assert store["b", "x", None].sum().item() == 4
    assert store.remove_tensor(group_name="b", attr_name="x", index=None)
    assert store["paper", "x", None] is whole
    assert store.get_tensor_size(group_name="paper", attr_name="x") == (4, 3)
    assert [(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()] == [
        ("paper", "x")
    ]
    put = {"group_name": "paper", "attr_name": "x", "index": torch.tensor([1])}
    store.put_tensor(torch.zeros(1, 3), **put)
    assert x[1].tolist() == [0, 0, 0]
    with pytest.raises(KeyError, match="put the whole"):
        store.put_tensor(x, group_name="a", attr_name="x", index=torch.tensor([0]))
    assert store.remove_tensor(group_name="paper", attr_name="x", index=None)
    assert store.get_all_tensor_attrs() == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("affinity", ["gpu", "host"])
@pytest.mark.parametrize("filter_there", [True, False])
def test_loaders_with_workers(
    pyg: ModuleType, affinity: str, filter_there: bool
) -> None:
    from torch_geometric.loader import LinkLoader, NodeLoader

    from pydirect.integrations.pyg import unify_data
    from pydirect.integrations.pyg_sampling import KeyedNeighborSampler

    plain = pyg.data.Data(
        x=torch.randn(40, 3),
        edge_index=torch.randint(40, (2, 200)),
        edge_attr=torch.randn(200, 2),
        num_nodes=40,
    )
    data = unify_data(plain.clone(), "x", "edge_attr")
    data.x.set_affinity_(affinity)
    sampler = KeyedNeighborSampler(plain, [3, 3], device="cpu")
    options = {
        "batch_size": 15,
        "num_workers": 2,
        "filter_per_worker": filter_there,
    }
    loaders = [
        NodeLoader(data, sampler, persistent_workers=True, **options),
        LinkLoader(data, sampler, edge_label_index=plain.edge_index[:, :30], **options),
    ]
    for loader in loaders:
        for batch in [*loader, *loader]:
            assert torch.equal(batch.x.cpu(), plain.x[batch.n_id])
            assert torch.equal(batch.edge_attr.cpu(), plain.edge_attr[batch.e_id])
        # Its workers end now. The collector takes the queues first that would tell
        # them, and then waits five seconds for each.
        loader._iterator = None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tiered", [False, True])
def test_rows_are_attached_to_batches_of_a_loader(
    pyg: ModuleType, tiered: bool
) -> None:
    from torch_geometric.loader import NeighborLoader

    from pydirect.integrations.pyg import AttachRows
    from pydirect.memory import pin
    from pydirect.tiering import TieredTable

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features = pin(torch.randn(50, 6))
    table = features
    if tiered:
        table = TieredTable(
            features, torch.rand(50), device=device, budget_bytes=10 * 24
        )
    edges = torch.randint(0, 50, (2, 300))
    data = pyg.data.Data(edge_index=edges, num_nodes=50)
    seeds = {"input_nodes": torch.arange(20), "batch_size": 8}
    try:
        loader = NeighborLoader(
            data, [4, 3], transform=AttachRows(table, device), **seeds
        )
    except ImportError:
        pytest.skip("PyG's loaders need pyg-lib or torch-sparse")
    try:
        for batch in loader:
            assert batch.x.device.type == device.type
            assert torch.equal(batch.x.cpu(), features[batch.n_id])
    except ImportError:
        pytest.skip("PyG's loaders need pyg-lib or torch-sparse")
    hetero = pyg.data.HeteroData()
    hetero["paper"].n_id = torch.tensor([3, 1])
    attach = AttachRows(table, device, name="f", node_type="paper")
    assert torch.equal(attach(hetero)["paper"].f.cpu(), features[[3, 1]])
    with pytest.raises(ValueError, match="n_id"):
        attach(pyg.data.HeteroData(paper={}))
