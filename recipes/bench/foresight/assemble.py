"""From what `collect` measured to a device file, and the measurements to be kept.

    python -m recipes.bench foresight.assemble --device h100 RESULT.json [MORE.json]

Writes `ssdtrain/tools/foresight/data/NAME.device.json` (what the product reads) and
`recipes/bench/results/foresight/kernels_NAME.json` (every kernel time, one row each).
`--collectives RANKS.json`, what `collectives` wrote, makes nothing but the curves of
collectives: into `ssdtrain/tools/foresight/data/nvlink.fabric.json`, the times that
they are of into `collectives_NAME.json`. Kernel times that were kept before join in,
and with `--pool DEVICE` another device's: what models learn is relative to each
device's data sheet. Without traces, and without `--host`, host times stay as they are
shipped; with `--family` the models of all others do.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.bench.harness import records as results_of
from recipes.bench.harness.records import RESULTS
from ssdtrain.curves import Curve
from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import Call, Family
from ssdtrain.tools.foresight.collectives import (
    FABRIC_FORMAT,
    FABRIC_SUFFIX,
    Collective,
    Fabric,
    bus_bytes,
    load_fabric,
)
from ssdtrain.tools.foresight.device import (
    DATA,
    SUFFIX,
    VERSION,
    Device,
    from_json,
    write_device,
)
from ssdtrain.tools.foresight.fit import (
    fit_closed_form,
    fit_forest,
    geometric_mean_error,
    score,
)
from ssdtrain.tools.foresight.host import HostTable, fit_correction
from ssdtrain.tools.foresight.power import Power
from ssdtrain.tools.foresight.spec import SPECS
from ssdtrain.tools.machine.fit import fit_corners, fit_curve
from ssdtrain.tools.machine.links import Sample

Times = list[tuple[Call, float]]


def times_of(result: dict[str, Any]) -> dict[Family, Times]:
    """Kernel times by family, those that failed left out."""
    found: dict[Family, Times] = {}
    for row in result["cells"].get("kernels", {}).get("rows", ()):
        values = {k: v for k, v in row.items() if k not in ("us", "index", "error")}
        call = Call.from_dict(values)
        if row["us"] is not None:
            found.setdefault(call.family, []).append((call, float(row["us"])))
    return found


def compact(times: dict[Family, Times]) -> dict[str, Any]:
    """By family: the columns, and a row of numbers each."""
    found: dict[str, Any] = {}
    for family, rows in times.items():
        sizes = sorted(rows[0][0].sizes)
        found[family.value] = {
            "columns": ["variant", "dtype", "warm", *sizes, "us"],
            "rows": [
                [
                    call.variant,
                    call.dtype,
                    int(call.warm_bytes > 0),
                    *(round(call.sizes[name]) for name in sizes),
                    float(f"{us:.4g}"),
                ]
                for call, us in rows
            ],
        }
    return found


def recorded(device: str) -> dict[Family, Times]:
    """The kernel times that were kept of a device: what `compact` made."""
    path = RESULTS / "foresight" / f"kernels_{device}.json"
    found: dict[Family, Times] = {}
    for name, table in json.loads(path.read_text()).items():
        family = Family(name)
        found[family] = [
            (_call(family, dict(zip(table["columns"], row, strict=True))), row[-1])
            for row in table["rows"]
        ]
    return found


def _call(family: Family, row: dict[str, Any]) -> Call:
    variant, dtype, warm = row["variant"], row["dtype"], bool(row["warm"])
    sizes = {
        name: value
        for name, value in row.items()
        if name not in ("variant", "dtype", "warm", "us", "skew")
    }
    backward = variant == "backward"
    if family is Family.PRODUCT:
        bias = bool(sizes.pop("bias"))
        return calls.product(dtype=dtype, layout=variant, bias=bias, warm=warm, **sizes)
    if family is Family.ATTENTION:
        flags = {name: bool(sizes.pop(name)) for name in ("causal", "dropout")}
        return calls.attention(backward=backward, dtype=dtype, **flags, **sizes)
    if family is Family.CONVOLUTION:
        return calls.convolution(backward=backward, dtype=dtype, **sizes)
    if family is Family.LOOKUP:
        return calls.lookup(variant, dtype=dtype, **sizes)
    if family is Family.OPTIMIZER:
        return calls.optimizer(variant, dtype=dtype, **sizes)
    maker = calls.norm if family is Family.NORM else calls.memory
    return maker(variant, dtype=dtype, warm=warm, **sizes)


def host_table(results: Sequence[dict[str, Any]]) -> HostTable:
    """Pooled over the traced programs, the profiler's cost taken off."""
    cells = [cell for r in results for cell in r["cells"].values()]
    first = [cell for cell in cells if cell.get("at") == 0]
    alone = {(c["model"], c["batch"]): c["step_us"] for c in first if "step_us" in c}
    traces = [cell for cell in first if "host" in cell]
    programs = [
        (cell["host"], alone[cell["model"], cell["batch"]])
        for cell in traces
        if (cell["model"], cell["batch"]) in alone
    ]
    correction = fit_correction(programs)
    print(f"profiler: {correction}")
    return HostTable([row for cell in traces for row in cell["host"]], correction)


FITS: dict[str, Callable[[Sequence[Sample]], Curve]] = {
    "sigmoid": fit_curve,  # Lin 2023, Eq. 5.2
    "corners": fit_corners,
}


LEAST_SIZES = 6
"""Of a curve, to be judged by half of them."""


def fabric_of(collectives: dict[str, Any], name: str) -> tuple[Fabric, dict[str, Any]]:
    """Curves of every operation, and the errors of both kinds of curve at sizes that
    were held out."""
    curves: dict[Collective, Curve] = {}
    found: dict[str, Any] = {}
    for kind in Collective:
        samples = [
            Sample(
                size_bytes=max(
                    1, round(bus_bytes(kind, row["bytes"], collectives["ranks"]))
                ),
                seconds=row["us"] * 1e-6,
            )
            for row in collectives["links"]
            if row["kind"] == kind.value
        ]
        if len(samples) < LEAST_SIZES:
            continue
        own = [row for row in collectives["links"] if row["kind"] == kind.value]
        found[kind.value] = judged(samples) | repeated(own)
        curves[kind] = fit_corners(samples)
    shipped = load_fabric(name)
    return replace(shipped, curves={**shipped.curves, **curves}), found


def judged(samples: Sequence[Sample]) -> dict[str, float]:
    """Errors of both kinds of curve at every other size, and at every other size of
    every other one, whose neighbours are farther apart."""
    wide = samples[::2]
    return {
        f"{name}{how}": round(geometric_mean_error(held_out(some, fit)), 4)
        for some, how in ((samples, ""), (wide, ", wide"))
        for name, fit in FITS.items()
        if len(some) >= LEAST_SIZES
    }


def repeated(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By how much a round differs from the median of all in the mean, where they were
    kept."""
    off = [abs(us / row["us"] - 1) for row in rows for us in row.get("times_us", ())]
    return {"a round, mean": round(statistics.fmean(off), 4)} if off else {}


def write_collectives(collectives: dict[str, Any], device: str) -> None:
    """Their curves, what these are off by, and the times."""
    fabric, errors = fabric_of(collectives, "nvlink")
    FABRIC_FORMAT.write(DATA / f"nvlink{FABRIC_SUFFIX}", fabric)
    print("collectives, held out:", errors)
    kept = {key: collectives[key] for key in ("ranks", "links")}
    results_of.write(
        RESULTS / "foresight" / f"collectives_{device}.json",
        {"held_out": errors, **kept},
    )


def held_out(
    samples: Sequence[Sample], fit: Callable[[Sequence[Sample]], Curve]
) -> list[float]:
    """Errors at every other size of a curve through the rest."""
    half = fit(samples[::2])
    return [abs(half.seconds(s.size_bytes) / s.seconds - 1) for s in samples[1::2]]


def _shipped_host(path: Path) -> HostTable:
    """Of a device file, whatever its version."""
    return HostTable.from_dict(json.loads(path.read_text())["host"])


def _without(path: Path, families: Sequence[Family]) -> Device:
    """A shipped device without some families' models, which may be of another
    version."""
    values = json.loads(path.read_text())
    for part in ("forests", "laws", "errors"):
        for family in families:
            values[part].pop(family.value, None)
    return from_json({**values, "schema_version": VERSION}, str(path))


def main(
    paths: tuple[Path, ...] = (),
    /,
    *,
    device: str,
    pool: tuple[str, ...] = (),
    family: tuple[Family, ...] = (),
    host: Path | None = None,
    context_bytes: int = 72_000_000,
    collectives: Path | None = None,
) -> None:
    """Write the device's files.

    Args:
        paths: results of foresight.collect
        device: one of foresight.specs.SPECS
        pool: other devices whose times teach, too
        family: only these
        host: host times of another result
        collectives: their curves alone
    """
    name = device
    if collectives is not None:
        write_collectives(json.loads(collectives.read_text()), name)
        return
    spec = SPECS[name]
    results = [json.loads(path.read_text()) for path in paths]
    times = recorded(name)
    for result in results:
        for kind, rows in times_of(result).items():
            times.setdefault(kind, []).extend(rows)
    pooled = [(recorded(each), SPECS[each]) for each in pool]
    hosts = [json.loads(host.read_text())] if host else results
    has_traces = any("host" in cell for r in hosts for cell in r["cells"].values())
    path = DATA / f"{name}{SUFFIX}"
    made = (
        _without(path, family)
        if family
        else Device(
            spec=spec,
            host=host_table(hosts) if has_traces else _shipped_host(path),
            host_scale=json.loads(path.read_text())["host_scale"],
            power=POWER,
            context_bytes=context_bytes,
        )
    )
    forests, laws = dict(made.forests), dict(made.laws)
    errors = dict(made.errors)
    for kind, rows in times.items():
        if family and kind not in family:
            continue
        relatives = [(more[kind], sheet) for more, sheet in pooled if kind in more]
        found = score(rows, spec, relatives=relatives)
        errors[kind] = round(found["gmae"], 4)
        law = fit_closed_form(rows, spec, relatives=relatives)
        forests[kind] = fit_forest(rows, spec, law=law, relatives=relatives)
        if law is not None:
            laws[kind] = law
        print(kind.value, len(rows), {k: round(v, 4) for k, v in found.items()})
    DATA.mkdir(exist_ok=True)
    write_device(path, replace(made, forests=forests, laws=laws, errors=errors))
    path = RESULTS / "foresight" / f"kernels_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(compact(times), separators=(",", ":"))
    path.write_text(text + "\n")
    print(f"{path.stat().st_size} bytes of kernel times")


# Of arithmetic: what products of 8192 at length drew of an H200 (calibrate.drawn).
POWER = Power(
    limit_watts=650.0, idle_watts=130.0, joules_per_tflop=1.28, joules_per_gb=0.13
)
