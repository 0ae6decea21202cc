"""A kept DTensor costs the host little: tensor parallel steps are bound by it."""

from typing import Any

import pytest
import torch
from torch import distributed as dist

from ssdtrain.cache.rows import KeptRow, WrappedRow
from ssdtrain.errors import InPlaceError
from tests.ssdtrain.calls import calls_of

MOST_CALLS = {"pack": 8, "get": 3}
"""Of Python, which were 14 and 12."""

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)


class NoRun:
    """Of a lane whose rows serve everything."""

    def unpack_generally(self, handle: Any) -> torch.Tensor:
        """Never asked."""
        raise AssertionError(handle)

    leave_table = unpack_generally


@pytest.fixture
def saved(mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.arange(24.0).view(4, 6).t()
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False)


def test_a_kept_wrapper_takes_few_calls(saved: Any) -> None:
    run: Any = NoRun()
    row = WrappedRow(KeptRow(saved._local_tensor.nbytes))
    row.pack(saved, run)
    handle, num_packed = calls_of(lambda: row.pack(saved, run), ("call",))
    found, num_used = calls_of(lambda: handle.get(), ("call",))
    assert num_packed <= MOST_CALLS["pack"] and num_used <= MOST_CALLS["get"]
    assert type(found) is type(saved) and found.placements == saved.placements
    assert found.device_mesh is saved.device_mesh
    assert found.shape == saved.shape and found.stride() == saved.stride()
    assert not found.requires_grad and found.grad_fn is None
    local = found._local_tensor
    assert local.data_ptr() == saved._local_tensor.data_ptr()
    assert torch.equal(local, saved._local_tensor)
    assert torch.equal((found * 2).to_local(), (saved * 2).to_local())


@pytest.mark.parametrize("through", ["the wrapper", "its part"])
def test_a_kept_wrapper_that_was_changed_is_found(saved: Any, through: str) -> None:
    run: Any = NoRun()
    row = WrappedRow(KeptRow(saved._local_tensor.nbytes))
    for _ in range(2):  # the first one, and one that the row knows
        handle: Any = row.pack(saved, run)
        written = saved if through == "the wrapper" else saved._local_tensor
        with torch.no_grad():
            written.add_(1)
        with pytest.raises(InPlaceError):
            handle.get()


def test_a_wrapper_around_other_than_plain_bytes_leaves_the_table(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = NoRun()
    row = WrappedRow(KeptRow(saved._local_tensor.nbytes))
    row.pack(saved, run)
    saved._local_tensor = saved._local_tensor.to_sparse()
    with pytest.raises(AssertionError, match="DTensor"):
        row.pack(saved, run)
