"""Ranks of one training run on gloo and shared memory; run as a script by test_ranks.

python ranks_script.py OUT
"""

import json
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pydirect.datasets import NodeDataset, load, share_dataset
from pydirect.loader import LoaderConfig
from pydirect.memory import HostMemoryError
from pydirect.memory.shared import SharedFile, open_shared
from pydirect.ranks import Ranks
from pydirect.sampling import Graph, GraphStatistics
from pydirect.tiering import spread_table
from pydirect.train import NodeClassificationTrainer

SMALL = GraphStatistics(
    num_nodes=600, num_edges=4000, num_classes=4, num_features=8, train_share=0.35
)


def training(dataset: NodeDataset, ranks: Ranks, **changes: Any) -> dict[str, Any]:
    """Losses and accuracy of two epochs on whole neighbourhoods."""
    from torch_geometric.nn import GraphSAGE

    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        net: torch.nn.Module = GraphSAGE(in_channels, 16, 2, out_channels)
        return net

    trainer = NodeClassificationTrainer(
        dataset=dataset,
        model=model,
        loader=LoaderConfig(
            batch_size=64 // ranks.size, fanouts=(-1, -1), sampling="device"
        ),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        epochs=2,
        progress=False,
        device="cpu",
        ranks=ranks,
        **changes,
    )
    result = trainer.fit()
    weights = torch.cat([p.detach().flatten() for p in trainer.network.parameters()])
    found = {
        "losses": result.losses,
        "valid": result.valid_accuracy,
        "test": result.test_accuracy,
        "weights": weights.tolist(),
        "num_batches": len(trainer.batches),
    }
    if changes.get("fetch") == "tiered":
        table = trainer.tiered_table
        found |= {
            "num_near": table.num_near,
            "spread": table.plan.spread_rows,
            "hit_ratio": table.hit_ratio(),
        }
    return found


def sharing(ranks: Ranks) -> dict[str, Any]:
    """Memory is one, not copies; odd tensors travel too."""
    first = ranks.is_first
    table = ranks.share(torch.arange(40.0).view(10, 4) if first else None)
    ranks.wait()
    if not first:
        table[3] = -1.0
    ranks.wait()
    seen = table.tolist()
    odd = [
        torch.empty(0, 3, dtype=torch.int32),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.arange(6).view(1, 2, 3).half(),
    ]
    got = [ranks.share(tensor if first else None) for tensor in odd]
    same = all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, odd, strict=True)
    )
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return {
        "table": seen,
        "odd": same,
        "open_files": sum("memfd:pydirect" in name for name in files),
    }


def spreading(ranks: Ranks) -> dict[str, Any]:
    """Every row comes from the place that the plan says, peers' memory included."""
    rows = torch.arange(50.0).view(25, 2)
    table = ranks.share(rows.clone() if ranks.is_first else None)
    score = torch.rand(25, generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for name, replicated in (("spread", 0.0), ("mixed", 0.5), ("copies", 1.0)):
        # The second rank could hold more: the least counts for all.
        tiered = spread_table(
            ranks,
            table,
            score,
            budget_bytes=5 * 8 + 16 * ranks.rank,
            replicated_share=replicated,
        )
        ranks.wait()
        # Changed behind its back: near rows keep what they had.
        if ranks.is_first:
            table.neg_()
        ranks.wait()
        got = tiered.index_select(torch.arange(25))
        near = (got[:, 0] > 0) | (got[:, 1] > 0)
        values = bool(torch.equal(got.abs(), rows))
        found[name] = {
            "near": int(near.sum()),
            "hot": score.argsort(descending=True)[: tiered.num_near]
            .sort()
            .values.tolist()
            == near.nonzero().flatten().tolist(),
            "values": values,
            "plan": [tiered.plan.replicated_rows, tiered.plan.spread_rows],
        }
        ranks.wait()
        if ranks.is_first:
            table.neg_()
        ranks.wait()
    empty = spread_table(ranks, table, score, budget_bytes=0)
    found["empty"] = bool(torch.equal(empty.index_select(torch.arange(25)), rows))
    return found


def errors(ranks: Ranks) -> list[str]:
    """What is refused; every rank refuses it."""
    told = []
    for call in (
        lambda: spread_table(
            ranks, torch.zeros(2, 2), None, budget_bytes=0, replicated_share=2.0
        ),
        lambda: open_shared(SharedFile(pid=os.getpid(), descriptor=4000, num_bytes=8)),
        lambda: ranks.share(torch.ones(2, dtype=torch.cfloat)),
        lambda: out_of_reach(ranks),
    ):
        try:
            call()
        except (ValueError, HostMemoryError) as error:
            told.append(str(error))
    return told


def out_of_reach(ranks: Ranks) -> None:
    """Memory that only its maker opens."""
    block = ranks.new_block((2, 2), torch.float32)
    handle = block.handle if ranks.is_first else b"1 4000".ljust(64)
    ranks.open_all(replace(block, handle=handle))


def last_words(ranks: Ranks) -> dict[str, Any]:
    """The second rank is killed; the first keeps what they shared, and is told."""
    table = ranks.share(torch.arange(6.0) if ranks.is_first else None)
    if not ranks.is_first:
        table[2] = 7.0
        ranks.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.wait()
    try:
        ranks.share(torch.ones(3))
    except RuntimeError as error:
        return {"told": str(error), "table": (table + 1).tolist()}
    return {}


def main() -> None:
    """Write what this rank saw to OUT/rankN.json."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    ranks = Ranks.join("cpu")
    torch.set_num_threads(1)
    dataset = load("generated", statistics=SMALL, device="cpu")
    record = {
        "rank": ranks.rank,
        "sum": int(ranks.total(torch.tensor(ranks.rank + 1))),
        "least": ranks.least(5 + ranks.rank),
        "sharing": sharing(ranks),
        "spreading": spreading(ranks),
        "errors": errors(ranks),
        "direct": training(dataset, ranks, run_directory=str(out / f"run{ranks.size}")),
        "tiered": training(dataset, ranks, fetch="tiered", cache_bytes=60 * 32),
    }
    weighted = Graph(
        offsets=dataset.graph.offsets,
        neighbors=dataset.graph.neighbors,
        weights=torch.ones(dataset.graph.num_edges),
        symmetric=True,
    )
    given = NodeDataset(
        name="é",
        graph=weighted,
        features=dataset.features,
        labels=dataset.labels,
        num_classes=4,
        train_nodes=dataset.train_nodes,
        valid_nodes=dataset.valid_nodes,
        test_nodes=dataset.test_nodes,
    )
    again = share_dataset(ranks, given if ranks.is_first else None)
    record["dataset"] = [
        again.name,
        again.graph.symmetric,
        again.graph.weights is not None,
        float(again.features.double().sum()),
    ]
    ranks.close()
    written = out / f"rank{ranks.rank}of{ranks.size}.json"
    written.write_text(json.dumps(record))
    if ranks.size > 1:
        record["last"] = last_words(ranks)
        written.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
