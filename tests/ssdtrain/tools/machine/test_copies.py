"""Copy measurements: host to host anywhere, GPU links where there is a GPU."""

import pytest
import torch

from ssdtrain.tools.machine.copies import (
    CopyBudget,
    measure_gpu_copies,
    measure_host_copy,
    measure_peer_copy,
)
from ssdtrain.tools.machine.links import LinkKind

SIZES = (4096, 65536, 1 << 20, 1 << 23)
SHORT = CopyBudget(max_seconds=0.4, sizes_bytes=SIZES)


def test_host_copy() -> None:
    link = measure_host_copy(SHORT)
    assert link.kind is LinkKind.HOST_COPY
    assert [s.size_bytes for s in link.samples] == list(SIZES)
    # Between a floppy disk and ten times the fastest memory bus.
    assert 0.05 < link.curve.gb_per_s(1 << 23) < 5000


def test_a_budget_needs_three_sizes() -> None:
    with pytest.raises(ValueError, match="three"):
        CopyBudget(sizes_bytes=(4096, 8192))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_copies() -> None:
    links = {link.kind: link for link in measure_gpu_copies(0, SHORT)}
    assert set(links) == {LinkKind.D2H, LinkKind.H2D, LinkKind.BOTH}
    both, d2h = links[LinkKind.BOTH].curve, links[LinkKind.D2H].curve
    size = SIZES[-1]
    # Two directions cannot be done faster than one of them.
    assert both.seconds(size) > 0.8 * d2h.seconds(size)
    assert d2h.gb_per_s(size) > 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_peer_copy() -> None:
    link = measure_peer_copy(0, 1, SHORT)
    assert (link.source, link.target) == ("cuda:0", "cuda:1")
    assert link.curve.gb_per_s(SIZES[-1]) > 1
