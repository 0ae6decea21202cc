"""[Note: growing segments]: who asks for them, who has a say, and what is put back."""

import pytest

from ssdtrain.transfer.allocator import GrowingSegments

ASKED = "expandable_segments:True"
BACK = "expandable_segments:False"


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
