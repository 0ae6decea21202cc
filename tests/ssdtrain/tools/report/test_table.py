"""The end-of-run table says what the numbers say, failures loudest."""

from typing import Any

from rich.console import Console

from ssdtrain.tools.report.table import render, result_rows


def a_result(**changes: Any) -> dict[str, Any]:
    totals = {
        "bytes_saved": 4000,
        "bytes_kept": 1000,
        "bytes_offloaded": 3000,
        "bytes_recomputed": 0,
        "bytes_forwarded": 500,
        "bytes_reloaded": 2500,
        "bytes_written": 2600,
        "stall_ms": 1.25,
        "recompute_ms": 0.0,
    }
    leg = {"losses": [2.0, 1.0], "step_ms": 10.0, "totals": {}, "fallbacks": {}}
    result = {
        "model": "gpt",
        "engine": "plain",
        "num_ranks": 2,
        "peak_of": "saved tensors",
        "step_ratio": 1.1,
        "verdict": {"losses_equal": True, "weights_equal": True},
        "legs": {
            "without ssdtrain": {
                **leg,
                "peak_bytes": [8000, 4000],
                "last_peak_bytes": [8000, 4000],
                "os_written": [],
            },
            "with ssdtrain": {
                **leg,
                "step_ms": 11.0,
                "peak_bytes": [2000, 1000],
                "last_peak_bytes": [1600, 1000],
                "totals": totals,
                "fallbacks": {"kept: a write failed": 3},
                "os_written": [
                    {"process_bytes": 2000, "device_bytes": None},
                    {"process_bytes": 700, "device_bytes": None},
                ],
            },
        },
    }
    return {**result, **changes}


def shown(result: dict[str, Any]) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(render(result))
    return console.export_text()


def test_rows_hold_the_figures() -> None:
    table = {row.name: row for row in result_rows(a_result())}
    assert table["last loss"][1:3] == ("1", "1")
    assert table["step, median"][1:] == ("10.0 ms", "11.0 ms", "x 1.100")
    peak = table["activation peak, all steps (saved tensors)"]
    assert peak[1:] == ("8.00 kB", "2.00 kB", "x 0.250")
    peak = table["activation peak, last step"]
    assert peak[1:] == ("8.00 kB", "1.60 kB", "x 0.200")
    assert table["forwarded"].with_ == "500 B"
    assert table["written to SSD"][2:] == ("2.60 kB", "/proc/self/io counted 2.70 kB")
    assert table["exposed stall"].with_ == "1.2 ms"
    assert table["kept: a write failed"].with_ == "3"


def test_a_bad_verdict_is_shouted() -> None:
    bad = a_result(verdict={"losses_equal": False, "weights_equal": True})
    text = shown(bad)
    assert "FAILED: losses equal" in text
    assert "NOT: all losses equal" in text
    assert "verified: losses equal, weights equal" in shown(a_result())
    why = {"writes_confirmed": "it is on tmpfs"}
    why_failed = a_result(why_failed=why)
    why_failed["verdict"]["writes_confirmed"] = False
    assert "FAILED: writes confirmed (it is on tmpfs)" in shown(why_failed)


def test_one_leg_alone() -> None:
    result = a_result(verdict={})
    del result["legs"]["with ssdtrain"]
    assert [row.with_ for row in result_rows(result)] == ["-"] * 5
    assert "without ssdtrain" in shown(result)


def test_a_missing_counter_is_said() -> None:
    result = a_result()
    counters = result["legs"]["with ssdtrain"]["os_written"]
    counters[0]["process_bytes"] = None
    [row] = (row for row in result_rows(result) if row.name == "written to SSD")
    assert row.note == "the system has no counter for this process"


def test_steps_that_differ_too_much_have_no_ratio() -> None:
    why = "not compared: steps with it took 100 to 140 ms"
    table = shown(a_result(step_ratio=None, why_no_ratio=why))
    assert "not compared: steps with it" in table
    assert "x 1.1" not in table
