"""Stages that run ahead: order, errors, and an end whenever it is wanted."""

import threading
from collections.abc import Iterator

import pytest
import torch

from hector.train.stages import DEPTH, Ahead
from tests.ranks import SOON_S

CPU = torch.device("cpu")


def running() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hector-")]


def test_results_come_in_order_through_two_stages() -> None:
    here = threading.get_ident()
    seen = set()

    def double(x: int) -> int:
        seen.add(threading.get_ident())
        return 2 * x

    with Ahead(double, range(50), CPU) as one, Ahead(str, one, CPU) as two:
        assert list(two) == [str(2 * x) for x in range(50)]
    assert here not in seen and len(seen) == 1
    assert not running()


def test_no_more_is_made_than_may_wait() -> None:
    begun: list[int] = []
    third = threading.Event()

    def note(x: int) -> int:
        begun.append(x)
        if len(begun) == DEPTH + 1:
            third.set()
        return x

    with Ahead(note, iter(range(1000)), CPU) as made:
        results = iter(made)
        assert next(results) == 0
        # Taking one lets one more begin; the next of them is not asked for.
        assert third.wait(SOON_S)
        assert begun == list(range(DEPTH + 1))
    assert not running() and len(begun) <= DEPTH + 2


@pytest.mark.parametrize("at", ["stage", "items"])
def test_an_error_reaches_whoever_takes_the_results(at: str) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        if at == "items":
            raise ValueError("third")

    def stage(x: int) -> int:
        if at == "stage" and x == 2:
            raise ValueError("third")
        return x

    got = []
    with (
        pytest.raises(ValueError, match="third"),
        Ahead(stage, items(), CPU) as one,
        Ahead(lambda x: x, one, CPU) as two,
    ):
        got.extend(two)
    assert got == list(range(3 if at == "items" else 2))
    assert not running()


def test_leaving_early_stops_the_threads() -> None:
    with Ahead(lambda x: x, range(10**9), CPU) as one, Ahead(float, one, CPU) as two:
        for x in two:
            if x == 5.0:
                break
    assert not running()
