"""What a rank stores in: its own disk, metered, on the fastest path, or host memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ssdtrain
from ssdtrain.config import OffloadConfig, Target, TargetName
from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError, StorageFullError
from ssdtrain.storage import PosixStorage, measure
from ssdtrain.storage import open as opening
from ssdtrain.storage.base import ForwardingStorage
from ssdtrain.storage.gds import GdsStorage
from ssdtrain.storage.measure import PathChoice
from ssdtrain.storage.open import (
    Opened,
    Opener,
    RankId,
    budget_bytes_per_s,
    directories_of,
    open_for_rank,
    rank_of,
    wear_of,
)
from ssdtrain.storage.stripe import StripeStorage
from ssdtrain.storage.wear import Endurance, MeteredStorage, WearLog, disk_of
from tests.ssdtrain.targets import TARGETS, all_written, settings_of
from tests.ssdtrain.throttle import ThrottledStorage

PAGE = 4096
CUDA = torch.device("cuda")
Aligned = Callable[..., torch.Tensor]


@pytest.fixture
def endurance(tmp_path: Path) -> Endurance:
    return Endurance(budget_bytes=4 * PAGE, log=WearLog(tmp_path / "wear.json"))


def test_type_checkers_know_every_target() -> None:
    assert get_args(TargetName) == TARGETS


@pytest.mark.parametrize("target", Target)
def test_every_target_opens(target: Target, tmp_path: Path) -> None:
    """What its row names opens what it says lies there."""
    opener: Opener = resolve_name(target.behind.opener)
    options = OffloadConfig(**settings_of(target.value, tmp_path))
    found = opener(options, torch.device("cpu"), lambda _: None)
    assert isinstance(found, Opened) and found.why
    row = target.behind
    assert (found.storage is not None) == (row.is_disk or row.is_staged)
    if found.storage is not None:
        found.storage.close()


def test_a_rank_without_an_ssd_works_in_host_memory(tmp_path: Path) -> None:
    told: list[Fallback] = []
    (tmp_path / "nvme0").mkdir()
    name = str(tmp_path / "nvme{local_rank}")
    first = open_for_rank([name], RankId(0, 0, 2), on_fallback=told.append)
    second = open_for_rank([name], RankId(1, 1, 2), on_fallback=told.append)
    assert first.storage is not None and not first.takes_device
    assert second.storage is None
    assert second.why == f"host memory: {tmp_path / 'nvme1'} does not exist"
    assert told == [Fallback.NO_SSD_ON_RANK]
    first.storage.close()


def test_a_missing_directory_without_placeholder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_for_rank([tmp_path / "none"], RankId())


def test_every_disk_is_metered(
    tmp_path: Path, endurance: Endurance, aligned: Aligned
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    made = open_for_rank(places, RankId(), endurance=endurance)
    stripe = made.storage
    assert isinstance(stripe, StripeStorage)
    assert all(isinstance(each.storage, MeteredStorage) for each in stripe.members)
    reports = wear_of(stripe)
    assert [r.disk for r in reports] == [disk_of(place) for place in places]
    assert all(r.budget_bytes == 4 * PAGE for r in reports)
    slow = ThrottledStorage(stripe, write_gb_per_s=1.0)
    assert [r.disk for r in wear_of(slow)] == [r.disk for r in reports]
    assert wear_of(None) == wear_of(PosixStorage(places[0])) == []
    stripe.close()


@pytest.mark.parametrize("installed", [True, False])
def test_no_direct_path_is_counted_where_it_was_asked_for(
    installed: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Fallback] = []
    monkeypatch.setattr(measure, "why_no_gds", lambda: "no driver")
    monkeypatch.setattr(measure, "kvikio_installed", lambda: installed)
    made = open_for_rank([directory], RankId(), device=CUDA, on_fallback=told.append)
    assert made.why == "staging + posix (the only path here); no GDS: no driver"
    assert told == ([Fallback.NO_GDS] if installed else [])
    assert made.storage is not None and not made.takes_device
    made.storage.close()


def test_the_chosen_storage_is_metered_too(
    directory: Path,
    endurance: Endurance,
    aligned: Aligned,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        opening,
        "choose_path",
        lambda posix, _: PathChoice(tuple(posix), False, "measured"),
    )
    made = open_for_rank([directory], RankId(), device=CUDA, endurance=endurance)
    storage = made.storage
    assert isinstance(storage, MeteredStorage)
    slot = storage.allocate(4 * PAGE)
    storage.write(slot, aligned(4 * PAGE))
    with pytest.raises(StorageFullError, match="write_budget"):
        storage.allocate(PAGE)
    storage.close()


class TakesAll(GdsStorage):
    """Takes kvikio's place: host buffers alone reach it here."""

    def __init__(self, posix: PosixStorage) -> None:
        ForwardingStorage.__init__(self, posix)

    write = ForwardingStorage.write
    read = ForwardingStorage.read
    stats = ForwardingStorage.stats
    close = ForwardingStorage.close
    describe = ForwardingStorage.describe

    def release(self) -> None:
        """Nothing is open."""


def test_several_directories_take_the_direct_path_together(
    tmp_path: Path,
    endurance: Endurance,
    aligned: Aligned,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured as one stripe; every disk is metered, and takes its share."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    measured: list[Any] = []

    def choose(posix: Any, device: Any) -> PathChoice:
        measured.append(measure.as_one(posix))
        members = tuple(map(TakesAll, posix))
        return PathChoice(members, True, "GDS (measured fastest)")

    monkeypatch.setattr(opening, "choose_path", choose)
    ample = replace(endurance, budget_bytes=None)
    made = open_for_rank(places, RankId(), device=CUDA, endurance=ample)
    assert made.takes_device and made.why.startswith("GDS (measured fastest)")
    assert made.why.endswith("; over 2 directories")
    stripe = made.storage
    assert isinstance(measured[0], StripeStorage) and isinstance(stripe, StripeStorage)
    assert [report.disk for report in wear_of(stripe)] == [disk_of(p) for p in places]
    slots = [stripe.allocate(PAGE) for _ in range(8)]
    sent = aligned(PAGE, seed=3)
    for slot in slots:
        stripe.write(slot, sent)
        back = aligned(PAGE)
        stripe.read(slot, back)
        assert torch.equal(sent, back)
    assert len({slot.file for slot in slots}) == 2
    stripe.close()


def test_a_session_reports_wear_and_holds_the_budget(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on when the day's budget is spent, with tensors kept, counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    budget = 300_000
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    session = ssdtrain.offload(
        model,
        **all_written(directory),
        host_bytes=1 << 26,
        write_budget=budget,
        ssd_rated_bytes=10**15,
    )
    for _ in range(4):
        model(torch.randn(128, 128)).sum().backward()
        session.cache.offloader.wait_io()
    assert session.path.startswith("staging + posix: posix ")
    (wear,) = session.wear
    assert 0 < wear.today_bytes <= budget
    assert wear.lifetime_years is not None and wear.lifetime_years > 1000
    kept = [s.fallbacks.get(Fallback.KEPT_STORAGE_FULL.value, 0) for s in session.steps]
    assert sum(kept) > 0
    session.close()


def test_the_budget_of_a_disk_is_shared_by_its_ranks(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes a day and disk become bytes a second of one rank."""
    names = [tmp_path / f"nvme{number}" for number in range(3)]
    for name in names[:2]:
        name.mkdir()
    monkeypatch.setattr(opening, "disk_of", lambda path: Path(path).name)
    day = 86_400 * 1000
    assert budget_bytes_per_s(names[:1], RankId(), day) == 1000
    assert budget_bytes_per_s(names[:2], RankId(), day) == 2000  # a stripe
    assert budget_bytes_per_s(names[:1], RankId(5, 1, 4), day) == 250
    assert budget_bytes_per_s(names[:2], RankId(5, 1, 4), day) == 500
    own = [f"{tmp_path}/nvme{{local_rank}}"]
    assert budget_bytes_per_s(own, RankId(1, 1, 3), day) == 1000
    assert budget_bytes_per_s(own, RankId(2, 2, 3), day) == 0.0  # has no disk


def test_a_plan_holds_the_budget(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gibibyte a day is some hundred bytes a step: nothing may leave."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ssdtrain.offload(
        model,
        target="ssd",
        directory=str(directory),
        min_bytes=0,
        recompute="off",
        max_overhead=1.0,
        host_bytes=1 << 26,
        write_budget=1 << 30,
    ) as session:
        for _ in range(8):
            model(torch.randn(256, 256)).sum().backward()
            optimizer.step()
            if session.plan is not None:
                break
        assert session.plan is not None and session.profile is not None
        assert "MB/s" in session.profile.notes["write_budget"]
        step = session.plan.prediction
        allowed = (1 << 30) * step.step_ms / 86_400e3
        assert step.links["ssd_write"].num_bytes <= allowed


def test_a_lone_process_takes_all() -> None:
    assert directories_of(["/a", "/b"], RankId()).paths == (Path("/a"), Path("/b"))


def test_its_own_by_name(tmp_path: Path) -> None:
    (tmp_path / "nvme1").mkdir()
    name = str(tmp_path / "nvme{local_rank}")
    assert directories_of([name], RankId(9, 1, 2)).paths == (tmp_path / "nvme1",)
    # A rank without an SSD: host memory, and the report can name the place.
    other = directories_of([name], RankId(8, 0, 2))
    assert other.paths == ()
    assert other.missing == (tmp_path / "nvme0",)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(1, 9))
def test_shares_cover_all_and_overlap_only_if_they_must(
    num_directories: int, num_ranks: int
) -> None:
    names = [f"/nvme{i}" for i in range(num_directories)]
    shares = [
        directories_of(names, RankId(r, r, num_ranks)).paths for r in range(num_ranks)
    ]
    assert all(shares)
    used = [path for share in shares for path in share]
    assert set(used) == set(map(Path, names))
    if num_directories >= num_ranks:
        assert len(used) == num_directories
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert len(used) == num_ranks


def test_mistakes() -> None:
    with pytest.raises(
        ConfigError, match=r"placeholder that is not known; set \{local"
    ):
        directories_of(["/x{local_rank}{node}"], RankId())
    with pytest.raises(ConfigError, match="LOCAL_RANK expects 0 to 1"):
        directories_of(["/x"], RankId(2, 2, 2))


def test_from_the_environment() -> None:
    assert rank_of({}) == RankId(0, 0, 1)
    launched = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert rank_of(launched) == RankId(5, 1, 4)
    deepspeed = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "WORLD_SIZE": "8"}
    assert rank_of(deepspeed) == RankId(1, 1, 2)
    assert rank_of({"RANK": "3", "WORLD_SIZE": "4"}) == RankId(3, 3, 4)
    assert rank_of({"LOCAL_RANK": "2"}) == RankId(0, 2, 3)
