"""A hop of `hector.NeighborSampler.draw_padded` as one kernel: see [Note: sampled by
hashing] and [Note: stages ahead]."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hector.graph import Grouping

_BLOCK = 256


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["num", "hop"])  # type: ignore[untyped-decorator]
def _hop(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    slots, live, ptr, items, src, key, edges, nodes, real, hop, num,
    FANOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    slot = at // FANOUT
    draw = at % FANOUT
    alive = tl.load(live + slot, mask=inside, other=0) != 0
    node = tl.load(slots + slot, mask=alive, other=0)
    first = tl.load(ptr + node, mask=alive, other=0)
    degree = tl.load(ptr + node + 1, mask=alive, other=0) - first
    count = tl.minimum(degree, FANOUT)
    some = tl.maximum(count, 1)
    low = draw * degree // some
    size = (draw + 1) * degree // some - low
    own = _mixed(first + _mixed(tl.load(key) + hop))
    turn = (_mixed(own + FANOUT) * tl.where(degree > FANOUT, degree, 0)) >> 32
    place = low + ((_mixed(own + draw) * size) >> 32) + turn
    place = tl.where(place < degree, place, place - degree)
    drawn = draw < count
    edge = tl.load(items + first + place, mask=drawn, other=-1)
    tl.store(edges + at, edge, mask=inside)
    tl.store(nodes + at, tl.load(src + edge, mask=drawn, other=0), mask=inside)
    tl.store(real + at, drawn.to(tl.uint8), mask=inside)


def padded_hop(
    slots: Tensor, live: Tensor, group: Grouping, src: Tensor, key: Tensor, fanout: int,
    hop: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Draw the in-edges of `slots` that are `live`: edges [slots * fanout], -1 where
    there is none, the nodes that they come from, and which are there."""
    num = slots.numel() * fanout
    edges, nodes = (slots.new_empty(num) for _ in range(2))
    real = torch.empty(num, dtype=torch.uint8, device=slots.device)
    # The interpreter runs on a CPU.
    where: Any = torch.cuda.device(slots.device) if slots.is_cuda else torch.no_grad()
    with where:
        _hop[(triton.cdiv(num, _BLOCK),)](
            *(slots, live.view(torch.uint8), group.ptr, group.items, src, key),
            *(edges, nodes, real, hop, num),
            FANOUT=fanout,
            BLOCK=_BLOCK,
        )
    return edges, nodes, real.view(torch.bool)
