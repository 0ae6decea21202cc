"""Errors say what was expected and what came."""

import ctypes

import pytest
import torch

from pydirect import gather
from pydirect.gather.bounds import Faults


@pytest.mark.parametrize("path", list(gather.Path))
@pytest.mark.parametrize("bad", [7, -1, 1 << 40])
def test_index_out_of_range_names_value_and_position(
    path: gather.Path, bad: int
) -> None:
    table = torch.arange(14.0).view(7, 2)
    out = torch.full((3, 2), -5.0)
    with pytest.raises(
        gather.GatherIndexError, match=f"index {bad} at position 1 "
    ) as e:
        gather.index_select(table, torch.tensor([0, bad, bad]), path=path, out=out)
    assert (e.value.value, e.value.position, e.value.num_rows) == (bad, 1, 7)
    assert out.eq(-5.0).all(), "nothing is written when an index is bad"


@pytest.mark.parametrize(
    "index", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.long), torch.tensor(1)]
)
def test_index_of_wrong_shape_or_dtype(index: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="1-D index of int32 or int64"):
        gather.index_select(torch.zeros(4, 2), index)


def test_out_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"expects out of shape \(1, 2\)"):
        gather.index_select(torch.zeros(4, 2), torch.tensor([1]), out=torch.zeros(2, 2))


def test_table_must_be_contiguous_on_the_host() -> None:
    with pytest.raises(ValueError, match="contiguous CPU table"):
        gather.index_select(torch.zeros(4, 4).t(), torch.tensor([1]))
    with pytest.raises(ValueError, match="contiguous CPU table"):
        gather.index_select(torch.zeros(4, 4, device="meta"), torch.tensor([1]))


def test_wrong_device() -> None:
    index = torch.tensor([1], device="meta")
    with pytest.raises(ValueError, match=r"on the CPU or a GPU, got meta: move it"):
        gather.index_select(torch.zeros(4, 2), index)
    with pytest.raises(ValueError, match=r"on unified:0.*pydirect\.to_host"):
        gather.index_select(torch.zeros(4, 2).to("unified"), torch.tensor([1]))


def test_no_multiprocessor_is_too_few() -> None:
    with pytest.raises(ValueError, match="max_sms: expects at least 1, or None, got 0"):
        gather.index_select(torch.zeros(4, 4), torch.tensor([1]), max_sms=0)


def test_unknown_path() -> None:
    with pytest.raises(ValueError, match="teleport"):
        gather.index_select(torch.zeros(4, 4), torch.tensor([1]), path="teleport")


def device_that_reports(values: list[int]) -> Faults:
    """Faults of a device whose kernels report one of ``values`` in each wait."""

    def wait() -> None:
        if values:
            record = (ctypes.c_int64 * 3).from_address(faults.record_address)
            record[:] = (5, values.pop(0), 3)

    faults = Faults(torch.device("cpu"), wait=wait)
    return faults


def test_what_kernels_report_while_they_are_waited_for() -> None:
    faults = device_that_reports([9])
    faults.raise_if_any()
    with pytest.raises(gather.GatherIndexError, match="index 9 at position 4 "):
        faults.wait_and_raise()
    faults.wait_and_raise()


def test_a_late_report_belongs_to_the_error_before() -> None:
    faults = device_that_reports([9, 8])
    with pytest.raises(gather.GatherIndexError, match="index 8 "):
        faults.wait_and_raise()
    faults.raise_if_any()
