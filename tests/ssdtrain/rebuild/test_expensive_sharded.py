"""Expensive recipes where weights are gathered and gone: FSDP2 on two ranks.

A recipe that reads a gathered weight outside its group's turn would read freed memory,
or make FSDP gather it once more; so none reads one that is not small enough to copy.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ssdtrain.cache.weights import COPIED_BYTES
from tests.ranks import leave, server
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.rebuild.sharded import trained

NARROW, WIDE = 16, 272
"""Weights of NARROW x WIDE are copied; those of WIDE x WIDE are too large for it."""
BATCH = 8


class Block(nn.Module):
    """A gated layer whose inner product has a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE, bias=False)
        self.wide = nn.Linear(WIDE, WIDE, bias=False)
        self.down = nn.Linear(WIDE, NARROW, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(x))
        return x + self.down(F.silu(self.wide(hidden)) * hidden)


def train(rank: int, settings: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    torch.manual_seed(1 + rank)
    return trained(model, lambda: torch.randn(BATCH, NARROW), settings)


def on_rank(rank: int, place: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{place}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    theirs, _ = train(rank, None)
    told = []
    for plan in ("keep-all", "offload-all"):
        ours, report = train(rank, {"plan": plan, "recompute": "full"})
        assert same_bits(ours, theirs)
        told.append(report.recipes)
    torch.save(told, f"{place}/told{rank}")
    leave()


def test_no_recipe_reads_a_large_weight_that_is_gathered(tmp_path: Path) -> None:
    assert NARROW * WIDE * 4 <= COPIED_BYTES < WIDE * WIDE * 4
    method = server().get_start_method()
    mp.start_processes(on_rank, (str(tmp_path),), nprocs=2, start_method=method)
    for rank in range(2):
        for recipes in torch.load(tmp_path / f"told{rank}", weights_only=True):
            # Blocks behind the first one rebuild one product from a copy of its weight;
            # the wide one is stored, and what reads it is made from that.
            assert recipes["MmBackward0"] == 2 * BATCH * WIDE * 4
            assert recipes["SiluBackward0"] == 6 * BATCH * WIDE * 4
