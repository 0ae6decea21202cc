"""The choice between staging and kvikio: the faster one, with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain import rates
from ssdtrain.storage import PosixStorage, measure
from ssdtrain.storage.measure import choose_path
from tests.ssdtrain.throttle import ThrottledStorage
from tests.ssdtrain.virtual_time import VirtualTime

MIB = 1024 * 1024
Aligned = Callable[..., torch.Tensor]


@pytest.fixture
def posix(directory: Path) -> PosixStorage:
    return PosixStorage(directory, extent_bytes=MIB)


def test_what_is_written_is_drawn_from_a_generator_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that measures paths leaves what its user draws next as it was."""
    monkeypatch.setattr(measure, "RECORD_BYTES", 64)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    found = measure.device_buffers(torch.device("cpu"), 2)
    assert torch.equal(torch.rand(4), expected)
    assert not torch.equal(*found)


class SlowGds(ThrottledStorage):
    """Stands in for `GdsStorage` at a given rate."""

    gb_per_s = 0.0
    fails = False
    released = 0

    time = VirtualTime()

    def __init__(self, posix: PosixStorage) -> None:
        super().__init__(
            posix,
            write_gb_per_s=self.gb_per_s,
            read_gb_per_s=self.gb_per_s,
            clock=self.time.monotonic,
            sleep=self.time.sleep,
        )

    def write(self, slot: Any, buffer: torch.Tensor) -> None:
        if self.fails:
            raise OSError("cuFile error: no P2P")
        super().write(slot, buffer)

    def release(self) -> None:
        type(self).released += 1


def choose(
    posix: PosixStorage | list[PosixStorage],
    monkeypatch: pytest.MonkeyPatch,
    aligned: Aligned,
    *,
    staged: float,
    direct: float,
    fails: bool = False,
    gds: type[SlowGds] | None = None,
) -> tuple[measure.PathChoice, type[SlowGds]]:
    time = VirtualTime()
    fake = type("Fake", (SlowGds,), {"gb_per_s": direct, "fails": fails, "time": time})
    fake = gds or fake
    monkeypatch.setattr(rates, "time", time)
    monkeypatch.setattr(measure, "RECORD_BYTES", MIB)
    monkeypatch.setattr(measure, "GdsStorage", fake)
    monkeypatch.setattr(measure, "set_threads", lambda _: None)
    monkeypatch.setattr(
        measure, "device_buffers", lambda *_: [aligned(MIB, seed=i) for i in range(4)]
    )
    monkeypatch.setattr(
        measure,
        "StagedPath",
        lambda storage: time.throttled(
            storage, write_gb_per_s=staged, read_gb_per_s=staged
        ),
    )
    monkeypatch.setattr(measure, "why_no_gds", lambda: "")
    made = choose_path(
        posix if isinstance(posix, list) else [posix], torch.device("cpu")
    )
    return made, fake


def test_the_faster_path_is_taken(
    posix: PosixStorage, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, fake = choose(posix, monkeypatch, aligned, staged=0.05, direct=0.2)
    assert made.is_direct and isinstance(made.members[0], fake)
    assert made.why.startswith("GDS (measured fastest); GDS 0.")
    assert "; staging + posix 0." in made.why
    assert posix.stats().used_bytes == 0
    made, fake = choose(posix, monkeypatch, aligned, staged=0.2, direct=0.05)
    assert not made.is_direct and made.members == (posix,)
    assert made.why.startswith("staging + posix (no other is faster by enough); GDS")
    assert fake.released == 1


def test_one_directory_that_refuses_a_mode_refuses_it_for_all(
    tmp_path: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    files = [PosixStorage(place, extent_bytes=MIB) for place in places]
    opened: list[PosixStorage] = []

    class Refuses(SlowGds):
        gb_per_s = 0.2

        def __init__(self, posix: PosixStorage) -> None:
            if posix is files[1]:
                raise OSError("no nvidia-fs for this file system")
            opened.append(posix)
            super().__init__(posix)

    made, _ = choose(files, monkeypatch, aligned, staged=0.1, direct=0.2, gds=Refuses)
    assert made.members == tuple(files) and not made.is_direct
    assert opened == [files[0]] and Refuses.released == 1
    assert "no GDS: no nvidia-fs for this file system" in made.why
    made, fake = choose(files, monkeypatch, aligned, staged=0.1, direct=0.2)
    assert made.is_direct and [type(m) for m in made.members] == [fake, fake]
    assert all(one.stats().used_bytes == 0 for one in files)


def test_a_path_that_fails_is_named(
    posix: PosixStorage, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = choose(posix, monkeypatch, aligned, staged=0.2, direct=0.2, fails=True)
    assert made.members == (posix,) and not made.is_direct
    assert "no GDS: cuFile error: no P2P" in made.why


def test_a_full_disk_is_not_measured(
    directory: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    posix = PosixStorage(directory, extent_bytes=MIB, capacity_bytes=3 * MIB)
    made, fake = choose(posix, monkeypatch, aligned, staged=1.0, direct=1.0)
    assert made.members == (posix,) and not made.is_direct
    assert fake.released == 1
    assert "no GDS: [Errno 28] no room" in made.why
    assert posix.stats().used_bytes == 0


def test_without_gpudirect_storage_nothing_is_measured(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "why_no_gds", lambda: "no driver")
    made = choose_path([posix], torch.device("cuda"))
    assert made.members == (posix,) and not made.is_direct
    assert made.why == "staging + posix (the only path here); no GDS: no driver"
    assert posix.stats().allocated_bytes == 0
