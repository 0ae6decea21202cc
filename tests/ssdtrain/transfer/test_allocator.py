"""Torch's caching allocator: [Note: growing segments], [Note: one segment], and who
hears that device memory is short."""

from typing import Any

import pytest
import torch

from ssdtrain.errors import ConfigError
from ssdtrain.transfer import allocator as arena
from ssdtrain.transfer.allocator import (
    LEAST_BYTES,
    SPARE_BYTES,
    GrowingSegments,
    Observer,
    Shortages,
    begin_with,
)

ASKED = "expandable_segments:True"
BACK = "expandable_segments:False"
CUDA = torch.device("cuda", 0)


class Allocator:
    """Records what is set."""

    def __init__(self, backend: str = "native", told: str | None = "") -> None:
        self.name, self.told = backend, told
        self.calls: list[str] = []
        self.can = True

    def backend(self) -> str:
        return self.name

    def settings(self) -> str | None:
        return self.told

    def set(self, settings: str) -> None:
        self.calls.append(settings)
        if self.told is not None:
            self.told = settings

    def grows(self) -> bool:
        return self.can and self.calls[-1].endswith(ASKED)


def test_the_last_user_puts_it_back() -> None:
    own = Allocator()
    segments = GrowingSegments(own, {})
    one, leave_one = segments.use()
    other, leave_other = segments.use()
    assert (one, other) == ("", "") and own.calls == [ASKED]
    leave_one()
    assert own.calls == [ASKED]
    leave_other()
    assert own.calls == [ASKED, BACK]
    assert segments.use()[0].startswith("it is set already")  # by whoever set it last


@pytest.mark.parametrize("told", ["max_split_size_mb:64", None])
def test_other_settings_stay(told: str | None) -> None:
    """Torch forgets those that are not named; an older one does not tell them."""
    own = Allocator(told=told)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    reason, leave = GrowingSegments(own, environment).use()
    leave()
    assert reason == ""
    assert own.calls == [f"max_split_size_mb:64,{each}" for each in (ASKED, BACK)]


@pytest.mark.parametrize(
    ("allocator", "environment", "reason"),
    [
        (Allocator("cudaMallocAsync"), {}, "the allocator is cudaMallocAsync"),
        (Allocator(told=BACK), {}, f"it is set already ({BACK})"),
        (Allocator(told=None), {"PYTORCH_ALLOC_CONF": ASKED}, "it is set already"),
        (Allocator(), {"PYTORCH_CUDA_ALLOC_CONF": BACK}, "it is set already"),
        (
            Allocator(),
            {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"},
            "NCCL registers segments",
        ),
    ],
)
def test_others_have_a_say(
    allocator: Allocator, environment: dict[str, str], reason: str
) -> None:
    found, leave = GrowingSegments(allocator, environment).use()
    leave()
    assert found.startswith(reason) and allocator.calls == []


def test_a_driver_that_cannot_is_told_so() -> None:
    own = Allocator()
    own.can = False
    assert GrowingSegments(own, {}).use()[0] == "the driver cannot"
    assert own.calls == [ASKED, BACK]


def test_a_torch_that_refuses_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Allocator):
        def set(self, settings: str) -> None:
            raise ValueError("no such option")

    assert (
        GrowingSegments(Refusing(), {}).use()[0] == "torch refused it: no such option"
    )
    assert "stays set" in caplog.text


def test_what_somebody_changed_meanwhile_stays() -> None:
    own = Allocator()
    _, leave = GrowingSegments(own, {}).use()
    own.told = BACK + ",max_split_size_mb:32"
    leave()
    assert own.calls == [ASKED]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the allocator of a device with 8 GiB left was told."""
    found: list[tuple[str, int]] = []

    def take(num_bytes: int, index: int, stream: Any) -> int:
        assert index == CUDA.index
        found.append(("take", num_bytes))
        return 4096

    own = torch.cuda
    monkeypatch.setattr(own, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    monkeypatch.setattr(own, "current_stream", lambda device: "the captured one")
    monkeypatch.setattr(own, "caching_allocator_alloc", take)
    monkeypatch.setattr(
        own, "caching_allocator_delete", lambda address: found.append(("give", address))
    )
    for name in arena.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_piece_is_taken_and_left_to_the_pool(calls: list[tuple[str, int]]) -> None:
    assert begin_with(2 << 30, CUDA, Allocator(told=None))
    assert calls == [("take", (2 << 30) + SPARE_BYTES), ("give", 4096)]


@pytest.mark.parametrize(
    ("num_bytes", "allocator"),
    [
        (LEAST_BYTES - 1, Allocator()),
        (8 << 30, Allocator()),
        (2 << 30, Allocator(backend="cudaMallocAsync")),
        (2 << 30, Allocator(told="max_split_size_mb:512")),
    ],
)
def test_none_is_taken_that_would_be_of_no_use(
    num_bytes: int, allocator: Allocator, calls: list[tuple[str, int]]
) -> None:
    assert not begin_with(num_bytes, CUDA, allocator)
    assert calls == []


def test_a_block_that_is_never_cut_serves_nobody(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older torch does not tell its settings."""
    monkeypatch.setenv(arena.VARIABLES[0], "max_split_size_mb:512")
    assert not begin_with(2 << 30, CUDA, Allocator(told=None))


def test_a_cpu_has_no_pools(calls: list[tuple[str, int]]) -> None:
    assert not begin_with(2 << 30, torch.device("cpu"), Allocator())


def test_one_observer_asks_who_still_listens() -> None:
    attached: list[Observer] = []
    shortages = Shortages(attached.append)
    heard: list[tuple[str, int]] = []
    assert not attached  # until somebody wants to hear

    def fails(asked: int) -> None:
        raise ConfigError(f"{asked} bytes are short")

    end_first = shortages.listen(0, lambda asked: heard.append(("first", asked)))
    end_other = shortages.listen(1, lambda asked: heard.append(("other", asked)))
    (observer,) = attached
    observer(0, 20, 100, 5)
    observer(1, 30, 100, 5)
    assert heard == [("first", 20), ("other", 30)]
    for _ in range(2):
        end_first()
    observer(0, 40, 100, 5)
    assert len(heard) == 2
    shortages.listen(1, fails)
    with pytest.raises(ConfigError, match="50 bytes"):
        observer(1, 50, 100, 5)
    assert heard[2:] == [("other", 50)] and len(attached) == 1
    end_other()
