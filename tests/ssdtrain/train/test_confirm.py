"""Writes that the operating system does not confirm are told with their reason."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdtrain.config import Target
from ssdtrain.tools.report.table import caption
from ssdtrain.train.confirm import doubt_of_writes
from ssdtrain.train.loop import Leg, LegResult
from ssdtrain.train.settings import RunSettings
from ssdtrain.train.tally import Tally
from ssdtrain.train.trainer import Trainer
from tests.ssdtrain.train.legs import leg_result
from tests.ssdtrain.written import written_before_backward

MEMORY = Path("/dev/shm")


def wrote(claimed: int, process: int | None, *, file_system: str = "ext4") -> LegResult:
    """A rank that says it has written `claimed` bytes."""
    own = Tally(
        bytes={"bytes_written": claimed}, process_bytes=process, device_bytes=None
    )
    return leg_result(Leg.WITH.value, own, file_systems=(file_system,))


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([wrote(5, 5), wrote(5, 6)], ""),
        (
            [wrote(5, 5), wrote(5000, 4000)],
            "rank 1 says 5,000 bytes, the operating system",
        ),
        ([wrote(5, None)], "the system has no counter of this process's writes"),
        (
            [wrote(5, 0, file_system="tmpfs")] * 2,
            "offload.directory is on tmpfs, which",
        ),
    ],
)
def test_each_reason(results: list[LegResult], told: str) -> None:
    found = doubt_of_writes(Target.SSD, results)
    assert found is not None and found.startswith(told) and bool(found) == bool(told)
    assert found.count("tmpfs") <= 1  # two ranks say it once
    assert doubt_of_writes(Target.HOST, results) is None


def test_memory_is_no_drive(tiny: Callable[..., RunSettings]) -> None:
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        offload = {
            "target": "ssd",
            "directory": directory,
            "min_bytes": 0,
            "plan": "offload-all",
        }
        settings = tiny(train={"steps": 1}, offload=offload)
        told = pytest.warns(UserWarning, match="it is main memory, not an SSD")
        with told, written_before_backward():
            result = Trainer(settings).run()
    assert not result["ok"]
    assert caption(result).startswith(
        "FAILED: writes confirmed (offload.directory is on tmpfs, which is main memory"
    )
