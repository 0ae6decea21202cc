"""Walks: every step is an edge, and as likely as its definition says."""

from itertools import pairwise

import pytest
import torch

from pydirect.sampling import KeyedWalks

KIND = ("n", "e", "n")
# 0 - 1 - 2 are a triangle, 3 hangs on 1 and 4 on 3; 5 has no way out.
PAIRS = [(0, 1), (0, 2), (1, 2), (1, 3), (3, 4)]
SRC = torch.tensor([a for a, b in PAIRS] + [b for a, b in PAIRS] + [4])
DST = torch.tensor([b for a, b in PAIRS] + [a for a, b in PAIRS] + [5])
EDGES = set(zip(SRC.tolist(), DST.tolist(), strict=True))
RUNS = 6000


def walks(**more: object) -> KeyedWalks:
    return KeyedWalks({KIND: (SRC, DST)}, {"n": 6}, device="cpu", **more)  # type: ignore[arg-type]


def check(found: torch.Tensor) -> None:
    for walk in found.tolist():
        for a, b in pairwise(walk):
            assert (a, b) in EDGES or (b == -1 and a in (-1, 5))


def near(counts: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (counts / counts.sum() - wanted).abs()
    noise = (wanted * (1 - wanted) / counts.sum()).sqrt()
    assert bool((error <= 4.5 * noise + 1e-9).all()), (counts, wanted)


def test_uniform_walks() -> None:
    found = walks().walk(torch.arange(6).repeat(50), length=8)
    assert found.shape == (300, 9)
    check(found)
    first = walks().walk(torch.ones(RUNS).long(), length=1)[:, 1]
    near(torch.bincount(first, minlength=4).double(), torch.tensor([1, 0, 1, 1]) / 3)
    # The same call again, another batch, another seed.
    again = walks().walk(torch.arange(6).repeat(50), length=8)
    assert torch.equal(found, again)
    other = walks(seed=1).walk(torch.arange(6).repeat(50), length=8)
    assert not torch.equal(found, other)
    assert not torch.equal(found, walks().walk(found[:, 0], length=8, batch=1))


def test_weighted_walks() -> None:
    weights = torch.where(DST == 3, 0.0, torch.where(DST == 2, 3.0, 1.0))
    found = walks(weights={KIND: weights}).walk(torch.ones(RUNS).long(), length=1)
    counts = torch.bincount(found[:, 1], minlength=4).double()
    near(counts, torch.tensor([0.25, 0.0, 0.75, 0.0]))
    # 4 leads to 3, which weighs nothing, and to 5.
    stuck = walks(weights={KIND: weights}).walk(torch.tensor([4] * 20), length=2)
    assert stuck[:, 1].tolist() == [5] * 20 and stuck[:, 2].tolist() == [-1] * 20


@pytest.mark.parametrize(("p", "q"), [(0.25, 4.0), (4.0, 0.5), (1.0, 1.0), (1e-4, 1e3)])
def test_node2vec(p: float, q: float) -> None:
    """The second step of walks that came from 0 to 1."""
    found = walks().node2vec(torch.zeros(4 * RUNS).long(), 2, p=p, q=q)
    check(found)
    second = found[found[:, 1] == 1][:, 2]
    wanted = torch.tensor([1 / p, 0.0, 1.0, 1 / q], dtype=torch.float64)
    near(torch.bincount(second, minlength=4).double(), wanted / wanted.sum())


def test_node2vec_where_most_candidates_are_rejected() -> None:
    """A hub with 40 spokes: the way back is one candidate of 40, all others are
    rejected 99,999 times of 100,000, so that weights are added up in the end."""
    src = torch.cat((torch.arange(1, 41), torch.zeros(40).long()))
    dst = torch.cat((torch.zeros(40).long(), torch.arange(1, 41)))
    made = KeyedWalks({KIND: (src, dst)}, {"n": 41}, device="cpu")
    found = made.node2vec(torch.arange(1, 41), 2, p=1e-6, q=1.0)
    assert torch.equal(found[:, 2], found[:, 0])


def test_metapaths_and_restarts() -> None:
    buys, sold = ("u", "buys", "i"), ("i", "sold", "u")
    u, i = torch.randint(5, (30,)), torch.randint(4, (30,))
    made = KeyedWalks({buys: (u, i), sold: (i, u)}, {"u": 6, "i": 4}, device="cpu")
    found = made.walk(torch.arange(6), metapath=[buys, sold, buys])
    pairs = set(zip(u.tolist(), i.tolist(), strict=True))
    for walk in found[:5].tolist():
        assert (walk[0], walk[1]) in pairs and (walk[2], walk[1]) in pairs
    assert found[5].tolist() == [5, -1, -1, -1]
    ended = made.walk(
        torch.zeros(RUNS).long(), metapath=[buys, sold], restart_prob=[0.0, 0.3]
    )
    assert bool((ended[:, 1] >= 0).all())
    share = torch.bincount((ended[:, 2] < 0).long()).double()
    near(share, torch.tensor([0.7, 0.3]))
    with pytest.raises(ValueError, match="to begin at 'i'"):
        made.walk(torch.arange(2), metapath=[buys, buys])
    with pytest.raises(ValueError, match="expects one where there are 2"):
        made.walk(torch.arange(2), length=2)
    with pytest.raises(ValueError, match="nodes 0 to 5"):
        made.walk(torch.tensor([6]), metapath=[buys])
    with pytest.raises(ValueError, match="length or metapath"):
        made.walk(torch.tensor([0]))
    with pytest.raises(ValueError, match="lead back"):
        made.pinsage(
            torch.tensor([0]),
            [buys],
            num_traversals=1,
            termination_prob=0.5,
            num_walks=1,
            num_neighbors=1,
        )


def test_pinsage_neighbors_are_those_visited_most() -> None:
    buys, sold = ("u", "buys", "i"), ("i", "sold", "u")
    u, i = torch.randint(9, (60,)), torch.randint(7, (60,))
    made = KeyedWalks({buys: (u, i), sold: (i, u)}, {"u": 9, "i": 7}, device="cpu")
    seeds = torch.tensor([3, 0, 6])
    found = made.pinsage(
        seeds,
        [sold, buys],
        num_traversals=2,
        termination_prob=0.5,
        num_walks=20,
        num_neighbors=3,
        batch=4,
    )
    walked = made.walk(
        seeds.repeat_interleave(20),
        metapath=[sold, buys] * 2,
        restart_prob=[0.0, 0.0, 0.5, 0.0],
        batch=4,
    )
    for place in range(3):
        mine = walked[place * 20 : place * 20 + 20, [2, 4]].flatten().tolist()
        counts = {n: mine.count(n) for n in mine if n >= 0}
        wanted = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
        rows = found.position == place
        pairs = zip(
            found.source[rows].tolist(), found.visits[rows].tolist(), strict=True
        )
        assert list(pairs) == wanted
