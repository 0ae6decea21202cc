"""One device from another's kernels, by its data sheet.

    python -m recipes.bench foresight.by_data_sheet --source h100 --target h200

Models learn from the recorded kernels of `source` alone and predict the recorded ones
of `target`, by its specification; then the recorded steps of `target`. Writes
`results/foresight/by_data_sheet.json`.

Shapes that `source` never ran have two errors in them: the model's at a new shape,
which it has on its own device, too, and the data sheet's. `same_shapes` has the second
alone: kernels that both devices ran, each predicted from its time on `source` and what
the models say the target's data sheet changes.
"""

import json
import math
from dataclasses import replace
from typing import Any

from recipes.bench.foresight.assemble import recorded
from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.evaluate import cells_of, graph_of
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.call import Call
from ssdtrain.tools.foresight.device import Device, load_device, transferred
from ssdtrain.tools.foresight.features import row_of
from ssdtrain.tools.foresight.fit import (
    Times,
    errors_of,
    fit_closed_form,
    fit_forest,
    geometric_mean_error,
)
from ssdtrain.tools.foresight.laws import Law, law_us
from ssdtrain.tools.foresight.price import estimate_step
from ssdtrain.tools.foresight.spec import SPECS, Spec
from ssdtrain.tools.foresight.trees import Forest

Model = tuple[Law | None, Forest]
STEPS = {"test": "test_{}.json", "held": "held_{}.json"}


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
        found[family.value]["same_shapes"] = same_shapes(
            times, others[family], (law, forests[family]), SPECS[source], SPECS[target]
        )
        print(family.value, found[family.value], flush=True)
    device = replace(load_device(source), forests=forests, laws=laws)
    return transferred(device, SPECS[target]), found


def same_shapes(
    times: Times, others: Times, model: Model, source: Spec, target: Spec
) -> dict[str, Any]:
    """Errors where the kernel's own time on the source is known."""
    measured = {str(call): us for call, us in times}
    each = []
    for call, us in others:
        if str(call) in measured:
            ratio = by_model(call, model, target) / by_model(call, model, source)
            each.append(abs(measured[str(call)] * ratio / us - 1.0))
    if not each:
        return {"kernels": 0}
    return {"kernels": len(each), "gmae": round(geometric_mean_error(each), 4)}


def by_model(call: Call, model: Model, spec: Spec) -> float:
    """Microseconds of a call on a device of that data sheet."""
    law, forest = model
    [known] = law_us(law, [call], spec)
    return known * math.exp(forest.predict(row_of(call, spec, known)))


def steps(device: Device, target: str, kind: str) -> dict[str, Any] | None:
    """Errors over the recorded steps of one set of shapes."""
    path = RESULTS / "steps" / STEPS[kind].format(target)
    if not path.is_file():
        return None
    rows = []
    for cell in cells_of(json.loads(path.read_text()), kind):
        found = estimate_step(graph_of(cell), device).step_us
        rows.append({"measured_us": cell["step_us"], "predicted_us": found})
    return errors(rows, "predicted_us", "measured_us")


def main(*, source: str = "h100", target: str = "h200") -> None:
    """Run it.

    Args:
        source: device whose times are known
        target: device to predict
    """
    device, kernels = learned(source, target)
    found: dict[str, Any] = {
        "source": source,
        "target": target,
        "kernels": kernels,
        "steps": {kind: steps(device, target, kind) for kind in STEPS},
    }
    print(found["steps"])
    records.write(RESULTS / "foresight" / "by_data_sheet.json", found)
