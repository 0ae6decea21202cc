"""Sizes, fractions and paths as people write them, and how slips are refused."""

from pathlib import Path
from typing import Any, get_type_hints

import pytest

import ssdtrain
from ssdtrain.config import AdvancedOptions, OffloadConfig, OffloadOptions
from ssdtrain.errors import ConfigError
from ssdtrain.quantities import Share, did_you_mean, resolved


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (4096, 4096),
        (1e9, 10**9),
        (8 * 2**30, 8 * 2**30),
        ("4096", 4096),
        ("1e9", 10**9),
        ("8G", 8 * 10**9),
        ("8 GiB", 8 * 2**30),
        ("8gb", 8 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("1.5M", 1_500_000),
        ("512k", 512_000),
        ("512kib", 512 * 1024),
        ("1_000b", 1000),
        ("0", 0),
    ],
)
def test_sizes(given: Any, expected: int) -> None:
    found = OffloadConfig(min_bytes=given).min_bytes
    assert found == expected and type(found) is int


@pytest.mark.parametrize(
    "given", ["", "8X", "many", "-1", "80%", 1.5, True, float("nan"), None, [1]]
)
def test_no_sizes(given: Any) -> None:
    if given is None:  # min_bytes has no None; the others do
        assert OffloadConfig(window_bytes=None).window_bytes is None
        return
    with pytest.raises(ConfigError, match="min_bytes expects"):
        OffloadConfig(min_bytes=given)


@pytest.mark.parametrize(
    ("given", "expected"), [("1%", 0.01), (0.01, 0.01), ("0.05", 0.05), (0, 0.0)]
)
def test_fractions(given: Any, expected: float) -> None:
    assert OffloadConfig(max_overhead=given).max_overhead == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (5, "did you mean 0.05 or '5%'?"),
        (-0.5, "got -0.5"),
        ("200%", "got '200%'"),
        (float("nan"), "got nan"),
        (True, "got True"),
        ("much", "got 'much'"),
    ],
)
def test_no_fractions(given: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(max_overhead=given)
    assert text in str(caught.value)


def test_shares_are_resolved_where_the_memory_is_known() -> None:
    config = OffloadConfig(host_bytes="80%", memory_budget_bytes="50%")
    assert config.host_bytes == Share(0.8) and str(config.host_bytes) == "80%"
    assert resolved(config.memory_budget, lambda: 1000) == 500
    assert resolved(7, lambda: 1000) == 7 and resolved(None, lambda: 1000) is None
    again = OffloadConfig.merged(config, {"seed": 3})
    assert again.host_bytes == Share(0.8) and again.seed == 3
    with pytest.raises(ConfigError, match="more than 0 %"):
        OffloadConfig(host_bytes="0%")


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert OffloadConfig(directory=Path("~/x")).directories == ("/home/me/x",)
    both = OffloadConfig(directory=["~/x", Path("/y")])
    assert both.directories == ("/home/me/x", "/y")
    assert OffloadConfig(plan=Path("~/p.json")).plan == "/home/me/p.json"
    for wrong in ("", 3, [3], b"x"):
        with pytest.raises(ConfigError, match="directory expects a path"):
            OffloadConfig(directory=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"target": "sdd"}, "did you mean 'ssd'?"),
        ({"plan": "offload_all"}, "did you mean 'offload-all'?"),
        ({"verify": "check"}, "did you mean 'checksum'?"),
        ({"min_byte": 1}, "did you mean 'min_bytes'?"),
        ({"io_threads": 0}, "io_threads expects an integer from 1 to 1024, got 0"),
        ({"io_threads": 1.5}, "io_threads expects an integer from 1 to 1024, got 1.5"),
        ({"host_bytes": 0}, "host_bytes expects at least 1 bytes, got 0"),
    ],
)
def test_slips_get_the_nearest_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_mapping(settings)
    assert text in str(caught.value)
    assert did_you_mean("zzz", ["abc"]) == ""


def test_editors_and_checkers_see_every_field() -> None:
    """The typed keywords, the fields and the shown signature are the same names."""
    import inspect
    from dataclasses import fields

    names = [field.name for field in fields(OffloadConfig)]
    taken = {*names, "advanced", "memory_budget_bytes"}
    assert set(OffloadOptions.__annotations__) == taken
    assert get_type_hints(OffloadOptions)  # every annotation means something
    advanced = list(AdvancedOptions.__annotations__)
    shown = [name for name in names if name not in advanced]
    assert [*shown, *advanced] == names and len(shown) < 12
    for door, own in (
        (ssdtrain.offload, ["model", "config"]),
        (ssdtrain.OffloadCallback, ["config"]),
    ):
        parameters = list(inspect.signature(door).parameters)
        assert parameters == [*own, *shown, "advanced"]
        typed = door if inspect.isfunction(door) else door.__init__
        assert typed.__annotations__["overrides"] == "Unpack[OffloadOptions]"


def test_settings_by_their_old_names_and_in_advanced() -> None:
    for config in (
        OffloadConfig(memory_budget_bytes="1GB", advanced={"io_threads": 8}),
        OffloadConfig.from_mapping({"memory_budget_bytes": 10**9, "io_threads": 8}),
        OffloadConfig.merged(
            OffloadConfig(memory_budget=1, io_threads=2),
            {"memory_budget_bytes": 10**9, "advanced": {"io_threads": 8}},
        ),
    ):
        assert config.memory_budget == 10**9 and config.io_threads == 8
    assert OffloadConfig(memory_budget_bytes=None).memory_budget is None
    for options, text in (
        ({"memory_budget": 1, "memory_budget_bytes": 2}, "set twice"),
        ({"io_threads": 1, "advanced": {"io_threads": 2}}, "set twice"),
        ({"advanced": {"io_thread": 2}}, "did you mean 'io_threads'"),
        ({"advanced": {"target": "ssd"}}, "unknown advanced setting"),
        ({"advanced": "fast"}, "expects a mapping"),
    ):
        with pytest.raises(ConfigError, match=text):
            OffloadConfig(**options)  # type: ignore[typeddict-item]


def test_without_any_goal_a_plan_fits() -> None:
    assert OffloadConfig().wanted_memory == "fit"
    for options in (
        {"max_overhead": 0.0},
        {"memory_budget": 1},
        {"plan": "keep-all"},
        {"plan": "saved.json"},
    ):
        assert OffloadConfig(**options).wanted_memory is None  # type: ignore[typeddict-item]
    assert OffloadConfig(device_memory="8GB", memory_budget=1).wanted_memory == 8e9


CHECKED = """
from pathlib import Path
from typing_extensions import Unpack
from ssdtrain.config import AdvancedOptions, OffloadConfig, OffloadOptions
def offload(**overrides: Unpack[OffloadOptions]) -> None: ...
offload(directory=Path("x"), min_bytes="8GB", max_overhead="1%")
OffloadConfig(host_bytes="80%", target="host", memory_budget_bytes=8e9)
offload(tarjet="ssd")  # E: tarjet
offload(target="tape")  # E: target
OffloadConfig(io_threads="4")  # E: io_threads
"""


def test_a_type_checker_sees_slips(tmp_path: Path) -> None:
    import subprocess
    import sys

    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(CHECKED)
    root = Path(__file__).resolve().parents[2]
    # Reading torch's own types takes most of a minute and tells nothing here.
    settings = tmp_path / "mypy.ini"
    skipped = "[mypy-{0}]\nfollow_imports = skip\n"
    own = ("api", "counters", "rebuild.*", "train.*")
    parts = ("torch.*", *(f"ssdtrain.{name}" for name in own))
    settings.write_text("[mypy]\n" + "".join(map(skipped.format, parts)))
    options = ["--config-file", str(settings), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(script)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    expected = [
        (number, line.partition("# E: ")[2])
        for number, line in enumerate(CHECKED.splitlines(), 1)
        if "# E: " in line
    ]
    assert len(found) == len(expected), done.stdout
    for line, (number, word) in zip(found, expected, strict=True):
        assert f"script.py:{number}:" in line and word in line
