"""The end-of-run table: with ssdtrain next to without, and the verdict."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from ssdtrain.quantities import ABSENT, bytes_text

WITHOUT = "without ssdtrain"
WITH = "with ssdtrain"
MOST_VALUES = 5
"""Of a list that is written out."""


class TableRow(NamedTuple):
    """One line of the table, as text."""

    name: str
    without: str
    with_: str
    note: str = ""


def figures(result: Mapping[str, Any]) -> list[TableRow]:
    """Return any trainer's lines; a graph trainer's figures stand in `with_`."""
    if "legs" in result:
        return result_rows(result)
    # Its settings have dots in their names, and stand in the run's config.
    own = {name: value for name, value in result.items() if "." not in name}
    return [TableRow(label(name), ABSENT, text_of(name, own[name])) for name in own]


_MEASURES = (("_ms", " time"), ("_seconds", " time"), ("_bytes", " memory"))


def label(name: str) -> str:
    """Return a figure's name in words; its unit goes with the value."""
    for suffix, what in _MEASURES:
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + what
    return name.replace("_", " ")


def text_of(name: str, value: Any) -> str:
    """Write a figure with the unit that its name says."""
    if value is None:
        return ABSENT
    if isinstance(value, list):
        return _texts(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith(("accuracy", "accuracies")):
        return f"{100 * value:.2f} %"
    if name.endswith("_bytes"):
        return bytes_text(value)
    for suffix, unit in (("_ms", "ms"), ("_seconds", "s")):
        if name.endswith(suffix):
            return f"{value:.2f} {unit}"
    return f"{value:.6g}"


def _texts(name: str, values: Sequence[Any]) -> str:
    texts = [text_of(name, value) for value in values]
    if len(texts) <= MOST_VALUES:
        return ", ".join(texts)
    return f"{texts[0]} to {texts[-1]} ({len(texts)} values)"


def result_rows(result: Mapping[str, Any]) -> list[TableRow]:
    """Return the lines for one `result.json`; a leg that did not run is absent."""
    legs = result["legs"]
    pair, peak = (legs.get(WITHOUT), legs.get(WITH)), "activation peak"
    lines = [
        _both("first loss", pair, lambda leg: f"{leg['losses'][0]:.9g}"),
        _both("last loss", pair, lambda leg: f"{leg['losses'][-1]:.9g}"),
        _both("step, median", pair, lambda leg: f"{leg['step_ms']:.1f} ms"),
        _both(f"{peak}, all steps ({result['peak_of']})", pair, _most("peak_bytes")),
        _both(f"{peak}, last step", pair, _most("last_peak_bytes")),
    ]
    why = result.get("why_nothing_left")
    traffic = _traffic(legs.get(WITH), why, result.get("written_to", "SSD"))
    return [*_with_notes(lines, result, pair), *traffic]


def _most(key: str) -> Any:
    return lambda leg: bytes_text(max(leg[key]))


def _both(name: str, pair: tuple[Any, Any], text: Any) -> TableRow:
    return TableRow(name, *(ABSENT if leg is None else text(leg) for leg in pair))


def _with_notes(
    lines: list[TableRow], result: Mapping[str, Any], pair: tuple[Any, Any]
) -> list[TableRow]:
    if None in pair:
        return lines
    first, last, step, peak, last_peak = lines
    equal, weights = (result["verdict"][f"{of}_equal"] for of in ("losses", "weights"))
    ratio = result["step_ratio"]
    told = (
        f"x {ratio:.3f}" if ratio is not None else str(result.get("why_no_ratio") or "")
    )
    return [
        first._replace(note=_verdict(equal, "all losses equal to the last bit")),
        last._replace(note=_verdict(weights, "all weights equal to the last bit")),
        step._replace(note=told),
        peak._replace(note=_ratio(pair, "peak_bytes")),
        last_peak._replace(note=_ratio(pair, "last_peak_bytes")),
    ]


def _ratio(pair: tuple[Any, Any], key: str) -> str:
    without, with_ = (max(leg[key]) for leg in pair)
    return f"x {with_ / without:.3f}" if without else "nothing to compare"


def _verdict(good: bool, what: str) -> str:
    return what if good else f"NOT: {what}"


def _traffic(
    leg: Mapping[str, Any] | None, why: str | None, place: str
) -> list[TableRow]:
    if leg is None:
        return []
    totals = leg["totals"]
    if not totals:  # no saved tensor was large enough for a report
        return [TableRow("offloaded", ABSENT, bytes_text(0), why or "")]
    everything = why is None and totals["bytes_kept"] == totals["bytes_saved"]
    lines = [
        TableRow(name, ABSENT, bytes_text(totals[key]), note)
        for name, key, note in (
            ("saved by autograd", "bytes_saved", "all steps, all ranks"),
            ("kept", "bytes_kept", "everything" if everything else ""),
            ("recomputed", "bytes_recomputed", ""),
            ("offloaded", "bytes_offloaded", why or ""),
            ("forwarded", "bytes_forwarded", "asked for before they had left"),
            ("reloaded", "bytes_reloaded", ""),
            (f"written to {place}", "bytes_written", _written_note(leg)),
        )
    ]
    lines.append(TableRow("exposed stall", ABSENT, f"{totals['stall_ms']:.1f} ms", ""))
    lines += [
        TableRow(name, ABSENT, str(count), "fallbacks")
        for name, count in leg["fallbacks"].items()
    ]
    return lines


def _written_note(leg: Mapping[str, Any]) -> str:
    """Return what the operating system counted, or why nothing was written."""
    totals = leg["totals"]
    if not totals["bytes_offloaded"]:
        return "nothing was offloaded"
    if not totals["bytes_written"]:
        early = totals["bytes_forwarded"] >= totals["bytes_offloaded"]
        return "all was asked for before it was written" if early else "host memory"
    counts = [rank["process_bytes"] for rank in leg["os_written"]]
    if None in counts:
        return "the system has no counter for this process"
    return f"/proc/self/io counted {bytes_text(sum(counts))}"


def render(result: Mapping[str, Any]) -> Table:
    """Build the table for a terminal."""
    ranks = result["num_ranks"]
    facts = [result["model"], f"engine={result['engine']}", steps_of(result)]
    facts.insert(2, f"{ranks} rank{'s' * (ranks > 1)}")
    title = ", ".join(filter(None, facts))
    table = Table(title=title, caption=caption(result))
    table.add_column("")
    table.add_column(WITHOUT, justify="right")
    table.add_column(WITH, justify="right")
    table.add_column("")
    for row in result_rows(result):
        table.add_row(*row)
    return table


def steps_of(result: Mapping[str, Any]) -> str:
    """Return which steps the figures are of: `8 steps`, or `steps 7 to 8`."""
    first, last = result.get("first_step"), result.get("last_step")
    if first is None or last is None:
        return ""
    if first != 1:
        return f"steps {first} to {last}"
    return f"{last} step{'s' * (last > 1)}"


def caption(result: Mapping[str, Any]) -> str:
    """Return the verdict in a line: what is verified, or what is not and why."""
    verdict, why = result.get("verdict", {}), result.get("why_failed", {})
    bad = [_failure(name, why) for name, good in verdict.items() if not good]
    if bad:
        return "FAILED: " + ", ".join(bad)
    names = ", ".join(name.replace("_", " ") for name in verdict)
    return f"verified: {names}" if names else "nothing to compare with"


def _failure(name: str, why: Mapping[str, str]) -> str:
    told = name.replace("_", " ")
    return f"{told} ({why[name]})" if name in why else told
