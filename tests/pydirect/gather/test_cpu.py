"""The paths that move bytes without a kernel."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydirect.gather.cpu import Run, Staging, copy_runs, find_runs
from pydirect.gather.request import Request


class Marker:
    """Counts, in place of a CUDA event."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited_at: list[int] = []

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited_at.append(self.recorded)


def request_of(rows: list[int], num_rows: int, row_bytes: int) -> Request:
    table = (torch.arange(num_rows * row_bytes) % 251).to(torch.uint8)
    return Request(
        table=table.view(num_rows, row_bytes),
        index=torch.tensor(rows, dtype=torch.int64),
        out=torch.full((len(rows), row_bytes), 255, dtype=torch.uint8),
    )


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 19), max_size=60),
    row_bytes=st.sampled_from([1, 3, 8, 24, 100]),
    buffer_bytes=st.sampled_from([1, 64, 1000]),
)
def test_staged_gather(rows: list[int], row_bytes: int, buffer_bytes: int) -> None:
    request = request_of(rows, 20, row_bytes)
    markers: list[Marker] = []

    def new_marker() -> Marker:
        markers.append(Marker())
        return markers[-1]

    Staging(new_marker, buffer_bytes).gather(request)
    assert torch.equal(request.out, request.table[request.index])
    # Every use of a buffer waited for the copy that used it before.
    assert all(m.waited_at == list(range(m.recorded)) for m in markers)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.integers(0, 6), max_size=40))
def test_runs_tile_the_index(rows: list[int]) -> None:
    runs = find_runs(torch.tensor(rows, dtype=torch.int64))
    spelled = [run.first_row + k for run in runs for k in range(run.num_rows)]
    assert spelled == rows
    for a, b in itertools.pairwise(runs):
        assert a.position + a.num_rows == b.position
        assert a.first_row + a.num_rows != b.first_row, (
            "runs are as long as they can be"
        )


def test_one_copy_a_run() -> None:
    request = request_of([5, 6, 7, 2, 3, 3], 9, 4)
    assert copy_runs(request) == 3
    assert torch.equal(request.out, request.table[request.index])
    assert find_runs(request.index)[0] == Run(0, 5, 3)
