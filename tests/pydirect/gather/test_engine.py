"""The GPU engine with its kernels run on the CPU: orders, repeats, faults."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydirect.gather import GatherIndexError, Path
from pydirect.gather.cpu import Staging
from pydirect.gather.engine import Engine, Tuning
from pydirect.gather.request import Request, Tiers

CPU = torch.device("cpu")


class Marker:
    """A copy on the CPU is done when it returns."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture(scope="module")
def engine(host_module: Any) -> Engine:
    return Engine(CPU, host_module, Staging(Marker, 256), Tuning(num_sms=3))


def request_of(rows: list[int], num_rows: int, row_bytes: int) -> Request:
    table = (torch.arange(num_rows * row_bytes) * 31 % 253).to(torch.uint8)
    return Request(
        table=table.view(num_rows, row_bytes),
        index=torch.tensor(rows, dtype=torch.int64),
        out=torch.full((len(rows), row_bytes), 255, dtype=torch.uint8),
    )


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=80),
    row_bytes=st.sampled_from([4, 16, 100, 1600]),
    path=st.sampled_from(Path),
    distinct_share=st.sampled_from([1.0, 0.5]),
    max_sms=st.sampled_from([None, 1, 500]),
)
def test_every_path(
    engine: Engine,
    rows: list[int],
    row_bytes: int,
    path: Path,
    distinct_share: float,
    max_sms: int | None,
) -> None:
    request = request_of(rows, 100, row_bytes)
    engine.gather(request, path, max_sms=max_sms, distinct_share=distinct_share)
    assert torch.equal(request.out, request.table[request.index])
    engine.check()


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("distinct_share", [1.0, 0.5])
@pytest.mark.parametrize("bad", [-1, 9, 1 << 40])
def test_bad_index_is_raised_once(
    engine: Engine, path: Path, distinct_share: float, bad: int
) -> None:
    request = request_of([3, bad, 4], 9, 16)
    with pytest.raises(GatherIndexError, match=f"index {bad} at position 1 ") as caught:
        engine.gather(request, path, distinct_share=distinct_share)
        engine.raise_if_any()
    assert caught.value.num_rows == 9
    engine.check()
    good = request_of([3, 4], 9, 16)
    engine.gather(good, path)
    engine.check()
    assert torch.equal(good.out, good.table[good.index])


class Recording:
    """The kernels, and how many blocks each launch took."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.blocks: list[tuple[str, int]] = []

    def kernel(self, name: str) -> Any:
        kernel = self._module.kernel(name)

        def launch(*, grid: int, **rest: Any) -> None:
            self.blocks.append((name, grid))
            kernel.launch(grid=grid, **rest)

        return type("Kernel", (), {"launch": staticmethod(launch)})


@pytest.mark.parametrize("path", [Path.DIRECT, Path.SORTED])
@pytest.mark.parametrize("distinct_share", [1.0, 0.5])
def test_no_launch_takes_more_than_the_budget(
    host_module: Any, path: Path, distinct_share: float
) -> None:
    """Ordering and copying repeats included."""
    module = Recording(host_module)
    engine = Engine(CPU, module, Staging(Marker, 256), Tuning(num_sms=16))
    rows = torch.randint(0, 4000, (4000,)).tolist()
    request = request_of(rows, 4000, 128)
    engine.gather(request, path, max_sms=3, distinct_share=distinct_share)
    assert torch.equal(request.out, request.table[request.index])
    names = {name for name, _ in module.blocks}
    steps = {
        "bucket_clear",
        "bucket_count_i64",
        "bucket_sum",
        "bucket_base",
        "bucket_place_i64",
    }
    once = {"bucket_elect_i64", "copy_repeats"} if distinct_share < 0.8 else set()
    expected = (steps | once) if path is Path.SORTED else set()
    assert names == expected | {"gather_i64_w16_short"}
    assert max(blocks for _, blocks in module.blocks) == 3
    module.blocks.clear()
    engine.gather(request, path, distinct_share=distinct_share)
    free = {name: blocks for name, blocks in module.blocks}
    assert free["gather_i64_w16_short"] == 16, "without a budget there is no limit"
    if path is Path.SORTED:
        assert free["bucket_count_i64"] > 3


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(st.integers(-100, 99), min_size=1, max_size=80),
    row_bytes=st.sampled_from([3, 4, 16, 100, 1600]),
    replicated=st.integers(0, 60),
    spread=st.integers(0, 40),
    num_gpus=st.integers(1, 4),
    scored=st.booleans(),
    path=st.sampled_from([Path.DIRECT, Path.SORTED]),
    distinct_share=st.sampled_from([1.0, 0.5]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_tiers_are_read_from_where_they_lie(
    engine: Engine,
    rows: list[int],
    row_bytes: int,
    replicated: int,
    spread: int,
    num_gpus: int,
    scored: bool,
    path: Path,
    distinct_share: float,
    dtype: torch.dtype,
) -> None:
    """Each tier holds other bytes here, so the place that was read shows."""
    made = request_of([0], 100, row_bytes)
    order = torch.randperm(100) if scored else torch.arange(100)
    heat = torch.empty(100, dtype=torch.int32)
    heat[order] = torch.arange(100, dtype=torch.int32)
    local = made.table[order[:replicated]] ^ 0x55
    dealt = order[replicated : replicated + spread]
    shares = tuple(made.table[dealt[g::num_gpus]] ^ 0xAA for g in range(num_gpus))
    expected = made.table.clone()
    expected[order[:replicated]] ^= 0x55
    expected[dealt] ^= 0xAA
    index = torch.tensor(rows, dtype=dtype)
    request = Request(
        table=made.table,
        index=index,
        out=torch.full((len(rows), row_bytes), 7, dtype=torch.uint8),
        wraps=True,
        tiers=Tiers(heat=heat if scored else None, local=local, shares=shares),
    )
    engine.gather(request, path, distinct_share=distinct_share)
    assert torch.equal(request.out, expected[index.long()])
    engine.check()
