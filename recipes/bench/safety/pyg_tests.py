"""PyG's own tests of aggregations, explainers and samplers, on hector and pydirect.

    python -m recipes.bench safety.pyg_tests --source pytorch_geometric --out tests.json

`--source` is a checkout of PyG, whose tests are run as they are. Before they are
imported, PyG's names stand for ours: sums, means and extremes are reducers of
`hector.message`, the layers of explainers' tests an `RGATConv` of one relation, and
`NeighborLoader` and `LinkNeighborLoader` draw by `KeyedNeighborSampler`. A test that
asks for what a loader of ours does not take is skipped with the reason; one that needs
data sets to be downloaded, a GPU or another package is left out.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hector import message
from hector.message import functions as fn

FILES = (
    "nn/aggr/test_basic.py",
    "explain/algorithm/test_gnn_explainer.py",
    "explain/algorithm/test_pg_explainer.py",
    "loader/test_neighbor_loader.py",
    "loader/test_link_neighbor_loader.py",
    "loader/test_imbalanced_sampler.py",
)
DATA = "needs a data set"
REASONS = (
    ("karate", DATA),
    ("URLError", DATA),
    ("get_dataset", DATA),
    ("ConnectionError", DATA),
)


def reduced(how: str, x: Tensor, index: Tensor, size: int | None, dim: int) -> Tensor:
    """A reducer of `hector.message` along an axis."""
    if size is not None and len(index) and int(index.max()) >= size:
        raise IndexError("an index beyond dim_size")  # PyG's class says so in its words
    rows = x.movedim(dim, 0)
    count = size if size is not None else int(index.max()) + 1 if len(index) else 0
    ends = (torch.arange(len(index)), index)
    frames = (message.frame.Frame(len(index), x.device, "node"),) * 2
    if len(index) != count:
        frames = (frames[0], message.frame.Frame(count, x.device, "node"))
    g = message.relation.Relation(ends, frames)
    g.edata["x"] = rows
    g.update_all(fn.copy_e("x", "m"), getattr(fn, how)("m", "o"))
    return g.dstdata["o"].movedim(0, dim)


def replace_aggregations() -> None:
    """Sums, means and extremes."""
    from torch_geometric.nn import aggr

    names = ("Sum", "Mean", "Max", "Min")
    for name in names:
        kind = getattr(aggr, f"{name}Aggregation")

        def forward(
            self: Any,
            x: Tensor,
            index: Tensor | None = None,
            ptr: Tensor | None = None,
            dim_size: int | None = None,
            dim: int = -2,
            how: str = name.lower(),
            **_: Any,
        ) -> Tensor:
            if index is None and ptr is not None:
                sizes = ptr.diff()
                index = torch.arange(len(sizes)).repeat_interleave(sizes)
                dim_size = len(sizes) if dim_size is None else dim_size
            if index is None:
                index, dim_size = x.new_zeros(x.shape[dim], dtype=torch.long), 1
            return reduced(how, x, index, dim_size, dim)

        kind.forward = forward


def layer(name: str) -> type:
    """A layer of one relation under a name of PyG."""
    from hector.nn import RGATConv, explainable

    class Conv(nn.Module):
        def __init__(self, ins: int, outs: int, *_: Any, **named: Any) -> None:
            super().__init__()
            if named:
                pytest.skip(f"arguments of {name}: {sorted(named)}")
            self.conv = RGATConv(ins, outs, 1)
            explainable(self.conv)

        def forward(self, x: Tensor, edge_index: Tensor, *_: Any) -> Tensor:
            kinds = torch.zeros_like(edge_index[0])
            out: Tensor = self.conv(x, edge_index, kinds)
            return out

    Conv.__name__ = name
    return Conv


def loader(base: type, name: str) -> type:
    """A loader of PyG's arguments that draws by keys."""
    from pydirect.integrations.pyg_sampling import KeyedNeighborSampler

    sampler_options = ("replace", "disjoint", "temporal_strategy", "time_attr")

    class Keyed(base):  # type: ignore[misc,valid-type]
        def __init__(self, data: Any, num_neighbors: Any, **named: Any) -> None:
            kind = named.pop("subgraph_type", "directional")
            if str(getattr(kind, "value", kind)) != "directional":
                pytest.skip(f"subgraph_type {kind}")
            if isinstance(data, tuple):
                pytest.skip("feature and graph stores")
            for gone in ("is_sorted", "directed"):
                named.pop(gone, None)
            options = {k: named.pop(k) for k in sampler_options if k in named}
            options["weight_attr"] = named.pop("weight_attr", None)
            sampler = KeyedNeighborSampler(data, num_neighbors, device="cpu", **options)
            super().__init__(data, sampler, **named)

    Keyed.__name__ = name
    return Keyed


class Plugin:
    """Replaces PyG's names before tests are imported, and keeps what became of them."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_configure(self) -> None:
        import torch_geometric.loader as loaders
        import torch_geometric.nn as layers
        import torch_geometric.testing as testing
        import torch_geometric.typing

        replace_aggregations()
        for name in ("GCNConv", "TransformerConv", "GraphConv"):
            setattr(layers, name, layer(name))
        loaders.NeighborLoader = loader(loaders.NodeLoader, "NeighborLoader")
        loaders.LinkNeighborLoader = loader(loaders.LinkLoader, "LinkNeighborLoader")
        testing.onlyNeighborSampler = lambda f: f
        package = testing.withPackage

        def with_package(*names: str) -> Any:
            # The keyed sampler does what is asked of pyg-lib.
            if all(n.startswith("pyg_lib") for n in names):
                return lambda f: f
            return package(*names)

        testing.withPackage = with_package
        for name in ("WEIGHTED", "EDGE_TIME"):
            setattr(torch_geometric.typing, f"WITH_{name}_NEIGHBOR_SAMPLE", True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr or "")
            self.found[report.nodeid] = (report.outcome, text)


def _reason(text: str) -> str:
    """The error's own line, or the reason of a skip."""
    said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    if said:
        return said[0][:160]
    return text.rpartition("Skipped: ")[2].strip("')\"")[:160]


def judged(found: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Counts by file, and every test that did not pass with its reason."""
    files: dict[str, Counter[str]] = {}
    others: dict[str, str] = {}
    for name, (outcome, text) in found.items():
        counts = files.setdefault(name.partition("::")[0], Counter())
        data = next((r for key, r in REASONS if key in text or key in name), "")
        if outcome == "passed":
            counts["passed"] += 1
            continue
        away = bool(data) or outcome == "skipped"
        counts["does not apply" if away else "failed"] += 1
        others[name] = data or _reason(text)
    passed, failed = (sum(c[k] for c in files.values()) for k in ("passed", "failed"))
    share = round(passed / max(passed + failed, 1), 3)
    return {"files": files, "share": share, "others": others}


def main(*, source: Path, out: Path | None = None) -> None:
    """Run it.

    Args:
        source: PyG's checkout
    """
    plugin = Plugin()
    root = source / "test"
    paths = [str(root / f) for f in FILES]
    pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", *paths], [plugin])
    result = judged(plugin.found)
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
