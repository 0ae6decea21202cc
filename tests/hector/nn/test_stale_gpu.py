"""Tensors changed behind PyTorch on a GPU: never a number from a stale graph."""

import copy

import pytest
import torch
from torch import Tensor

from hector.kept import StaleGraphError
from hector.nn import RGCNConv
from hector.runtime.watch import DeviceWatch
from tests.no_waits import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NODES, EDGES, RELATIONS, WIDTH = 1000, 20_000, 3, 32


def case() -> tuple[RGCNConv, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    conv = RGCNConv(WIDTH, WIDTH, RELATIONS).cuda()
    ends = torch.randint(NODES, (2, EDGES), device="cuda")
    kinds = torch.randint(RELATIONS, (EDGES,), device="cuda")
    return conv, torch.randn(NODES, WIDTH, device="cuda"), ends, kinds


def exchanged(kinds: Tensor) -> None:
    first = int((kinds != kinds[0]).nonzero()[0])
    kinds.data[[0, first]] = kinds.data[[first, 0]]


def test_results_are_nan_until_the_next_call_raises() -> None:
    conv, x, ends, kinds = case()
    assert bool(conv(x, ends, kinds).isfinite().all())
    graph = conv.graph_of(ends, kinds, NODES, RELATIONS)
    assert type(graph.state.watch) is DeviceWatch
    exchanged(kinds)
    assert bool(conv(x, ends, kinds).isnan().all())
    with pytest.raises(StaleGraphError, match="changed through"):
        conv(x, ends, kinds)
    found = conv(x, ends, kinds)
    wanted = copy.deepcopy(conv)(x, ends.clone(), kinds.clone())
    torch.testing.assert_close(found, wanted)


def test_versions_are_seen_at_once() -> None:
    conv, x, ends, kinds = case()
    before = conv(x, ends, kinds)
    kinds.copy_((kinds + 1) % RELATIONS)
    after = conv(x, ends, kinds)
    wanted = copy.deepcopy(conv)(x, ends.clone(), kinds.clone())
    torch.testing.assert_close(after, wanted)
    assert not torch.allclose(before, after)


def test_no_call_waits_for_the_device() -> None:
    conv, x, ends, kinds = case()
    for _ in range(3):
        conv(x, ends, kinds).sum().backward()
    with no_waits():
        conv(x, ends, kinds).sum().backward()


def test_a_captured_call_is_watched() -> None:
    conv, x, ends, kinds = case()
    with torch.no_grad():
        for _ in range(3):
            conv(x, ends, kinds)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = conv(x, ends, kinds)
        captured.replay()
        assert bool(out.isfinite().all())
        exchanged(kinds)
        captured.replay()
        assert bool(out.isnan().all())
        with pytest.raises(StaleGraphError):
            conv(x, ends, kinds)
