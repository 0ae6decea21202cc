"""One device from another's kernels, by its data sheet.

    python -m recipes.bench.foresight.by_data_sheet --source h100 --target h200

Models learn from the recorded kernels of `source` alone and predict the recorded ones
of `target`, by its specification; then the recorded steps of `target`. Writes
`results/foresight/by_data_sheet.json`.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

from recipes.bench.common import results
from recipes.bench.common.cells import RESULTS
from recipes.bench.foresight import subjects
from recipes.bench.foresight.assemble import recorded
from recipes.bench.foresight.evaluate import errors, graph_of
from ssdtrain.foresight.device import Device, load_device, transferred
from ssdtrain.foresight.fit import (
    errors_of,
    fit_closed_form,
    fit_forest,
    geometric_mean_error,
)
from ssdtrain.foresight.price import estimate_step
from ssdtrain.foresight.spec import SPECS

STEPS = {"test": "steps_{}.json", "held": "steps_held_{}.json"}


def learned(source: str, target: str) -> tuple[Device, dict[str, Any]]:
    """The target by the source's kernels, and the errors of its own kernels."""
    forests, laws, found = {}, {}, {}
    others = recorded(target)
    for family, times in recorded(source).items():
        law = fit_closed_form(times, SPECS[source])
        forests[family] = fit_forest(times, SPECS[source], law=law)
        if law is not None:
            laws[family] = law
        shapes = {str(call) for call, _ in times}
        unseen = [(c, us) for c, us in others[family] if str(c) not in shapes]
        each = errors_of(forests[family], unseen, SPECS[target], law)
        found[family.value] = {
            "kernels": len(unseen),
            "gmae": round(geometric_mean_error(each), 4),
        }
        print(family.value, found[family.value], flush=True)
    device = replace(load_device(source), forests=forests, laws=laws)
    return transferred(device, SPECS[target]), found


def steps(device: Device, target: str, kind: str) -> dict[str, Any] | None:
    """Errors over the recorded steps of one set of shapes."""
    path = RESULTS / "foresight" / STEPS[kind].format(target)
    if not path.is_file():
        return None
    rows = []
    for row in json.loads(path.read_text())["steps"]:
        shape = subjects.SHAPES[kind][row["model"]][0]
        graph = graph_of({**row, "shape": shape})
        found = estimate_step(graph, device).step_us
        rows.append({"measured_us": row["measured_us"], "predicted_us": found})
    return errors(rows, "predicted_us", "measured_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="h100", choices=sorted(SPECS))
    parser.add_argument("--target", default="h200", choices=sorted(SPECS))
    args = parser.parse_args()
    device, kernels = learned(args.source, args.target)
    found: dict[str, Any] = {
        "source": args.source,
        "target": args.target,
        "kernels": kernels,
        "steps": {kind: steps(device, args.target, kind) for kind in STEPS},
    }
    print(found["steps"])
    results.write(RESULTS / "foresight" / "by_data_sheet.json", found)


if __name__ == "__main__":
    main()
