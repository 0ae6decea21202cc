"""The link file: curve evaluation, JSON round trip, refusal of other files."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.curves import Curve, Sigmoid
from ssdtrain.tools.machine.fit import fit_curve
from ssdtrain.tools.machine.links import LINK_FILE, LinkFile, LinkKind, Sample
from tests.ssdtrain.tools.machine.made import link

KIB = 1024
SIZES = [4 * KIB * 4**step for step in range(10)]


def samples_of(startup: float, rate: float, sizes: list[int]) -> list[Sample]:
    return [Sample(size_bytes=m, seconds=startup + m / rate) for m in sizes]


def link_file() -> LinkFile:
    return LinkFile(
        created_utc="2026-01-02T03:04:05+00:00",
        links=(link(LinkKind.D2H, 50, SIZES), link(LinkKind.SSD_WRITE, 2.5, SIZES)),
        machine={"host": "box", "gpus": ["H200"]},
    )


def test_the_three_pieces_of_eq_5_2() -> None:
    curve = Curve(
        startup_seconds=1e-5,
        bytes_per_second=1e10,
        small_bytes=8 * KIB,
        large_bytes=1 << 24,
        sigmoid=Sigmoid(height=2.0, steepness=0.8, middle=18.0, base=8.0),
        fit_error=0.0,
    )
    assert curve.seconds(1) == curve.seconds(8 * KIB) == 1e-5
    assert curve.seconds(1 << 26) == pytest.approx(1e-5 + (1 << 26) / 1e10)
    # At the middle the bandwidth is 10 ** (height / 2 + base).
    assert curve.seconds(1 << 18) == pytest.approx((1 << 18) / 1e9)
    assert curve.seconds(0) == 0.0


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    LINK_FILE.write(path, link_file())
    assert LINK_FILE.read(path) == link_file()
    assert [p.name for p in tmp_path.iterdir()] == ["links.json"]
    plain = json.loads(path.read_text())
    assert (plain["schema"], plain["schema_version"]) == ("ssdtrain-links", 1)
    assert plain["links"][1]["kind"] == "ssd_write"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    LINK_FILE.write(path, link_file())
    unwritable = LinkFile(created_utc="x", links=(), machine={"a": object()})
    with pytest.raises(TypeError):
        LINK_FILE.write(path, unwritable)
    assert LINK_FILE.read(path) == link_file()
    assert [p.name for p in tmp_path.iterdir()] == ["links.json"]


@settings(deadline=None, max_examples=12)
@given(
    startup=st.floats(1e-6, 1e-3),
    rate=st.floats(1e8, 1e12),
    noise=st.lists(st.floats(0.7, 1.4), min_size=10, max_size=10),
)
def test_time_never_falls_with_size(
    startup: float, rate: float, noise: list[float]
) -> None:
    samples = [
        Sample(size_bytes=s.size_bytes, seconds=s.seconds * factor)
        for s, factor in zip(samples_of(startup, rate, SIZES), noise, strict=True)
    ]
    curve = fit_curve(samples)
    grid = [int(1000 * 1.5**step) for step in range(45)]
    times = [curve.seconds(m) for m in grid]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times))
