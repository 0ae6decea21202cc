"""The models of a shipped device, made again from the kernel times that were kept.

    python -m recipes.bench foresight.kernels --name h100 --pool h200
    ssdtrain foresight gather --times new.jsonl        # more times, on a device
    python -m recipes.bench foresight.kernels --name h100 --more new.jsonl --save

Reads `results/foresight/kernels_NAME.json`, one row a kernel. What models learn is
relative to each device's data sheet, so that another device's times teach too. With
`--save` the times that are new are kept, and the device file of the package is
written.
"""

import json
from pathlib import Path
from typing import Any

from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.device import DATA, SUFFIX, load_device, write_device
from ssdtrain.tools.foresight.fit import score
from ssdtrain.tools.foresight.gather import read_times
from ssdtrain.tools.foresight.learn import fitted
from ssdtrain.tools.foresight.spec import SPECS

Times = list[tuple[Call, float]]


def path_of(device: str) -> Path:
    """Where its kernel times are kept."""
    return RESULTS / "foresight" / f"kernels_{device}.json"


def compact(times: dict[KernelFamily, Times]) -> dict[str, Any]:
    """Give the columns of each family, and a row of numbers a kernel."""
    found: dict[str, Any] = {}
    for family, rows in times.items():
        sizes = sorted(rows[0][0].sizes)
        found[family.value] = {
            "columns": ["variant", "dtype", "warm", *sizes, "us"],
            "rows": [
                [
                    *(call.variant, call.dtype, int(call.warm_bytes > 0)),
                    *(round(call.sizes[name]) for name in sizes),
                    float(f"{us:.4g}"),
                ]
                for call, us in rows
            ],
        }
    return found


def recorded(device: str) -> dict[KernelFamily, Times]:
    """Read what `compact` made of a device's times."""
    found: dict[KernelFamily, Times] = {}
    for name, table in json.loads(path_of(device).read_text()).items():
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        found[KernelFamily(name)] = [
            (_call(KernelFamily(name), row), row["us"]) for row in rows
        ]
    return found


def _call(family: KernelFamily, row: dict[str, Any]) -> Call:
    variant, dtype, warm = row["variant"], row["dtype"], bool(row["warm"])
    others = ("variant", "dtype", "warm", "us", "skew")
    sizes = {name: value for name, value in row.items() if name not in others}
    backward = variant == "backward"
    if family is KernelFamily.PRODUCT:
        bias = bool(sizes.pop("bias"))
        return calls.product(dtype=dtype, layout=variant, bias=bias, warm=warm, **sizes)
    if family is KernelFamily.ATTENTION:
        flags = {name: bool(sizes.pop(name)) for name in ("causal", "dropout")}
        return calls.attention(backward=backward, dtype=dtype, **flags, **sizes)
    if family is KernelFamily.CONVOLUTION:
        return calls.convolution(backward=backward, dtype=dtype, **sizes)
    if family is KernelFamily.LOOKUP:
        return calls.lookup(variant, dtype=dtype, **sizes)
    if family is KernelFamily.OPTIMIZER:
        return calls.optimizer(variant, dtype=dtype, **sizes)
    maker = calls.norm if family is KernelFamily.NORM else calls.memory
    return maker(variant, dtype=dtype, warm=warm, **sizes)


def main(
    *,
    name: str,
    pool: tuple[str, ...] = (),
    more: Path | None = None,
    family: tuple[KernelFamily, ...] = (),
    save: bool = False,
) -> None:
    """Fit every family, and say how far off it is at shapes that are held out.

    Args:
        name: of a shipped device
        pool: other devices whose times teach, too
        more: new times, of `ssdtrain foresight gather`
        family: only these
        save: write the files
    """
    device, spec, times = load_device(name), SPECS[name], recorded(name)
    for call, us in read_times(more) if more else ():
        times.setdefault(call.family, []).append((call, us))
    pooled = [(recorded(each), SPECS[each]) for each in pool]
    for kind in family or times:
        rows = times[kind]
        relatives = [(more[kind], sheet) for more, sheet in pooled if kind in more]
        found = score(rows, spec, relatives=relatives)
        print(kind.value, len(rows), {k: round(v, 4) for k, v in found.items()})
        error = round(found["gmae"], 4)
        device = fitted(device, kind, rows, error, relatives=relatives)
    if save:
        write_device(DATA / f"{name}{SUFFIX}", device)
        text = json.dumps(compact(times), separators=(",", ":"))
        path_of(name).write_text(text + "\n")
