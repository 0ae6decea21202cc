"""Learns kernel models from measured times (scikit-learn; the product needs only JSON):
the constants of the family's closed form (`laws.py`), and a forest of the logarithm of
measured over that time, or over the roofline, which carries over to other devices."""

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.features import feature_names, row_of
from ssdtrain.tools.foresight.laws import FAMILIES, Law, fit_law, law_us, least_times
from ssdtrain.tools.foresight.spec import DeviceSpec, Kind
from ssdtrain.tools.foresight.trees import Forest, Tree

Times = Sequence[tuple[Call, float]]
FLOOR = 4e-4
"""Added to errors before their logarithm, so that a perfect one is finite."""
NUM_FOLDS = 4
LEAST_TIMES = 27
"""Of a family's model: 20 are left where a fold is held out."""
NUM_TREES = {
    KernelFamily.PRODUCT: 350,
    KernelFamily.MEMORY: 200,
    KernelFamily.ATTENTION: 200,
}
FEW_TREES = 120
NUM_BAGS = 2
"""Boosted forests that a forest is the mean of."""
MAX_LEAVES = 12
LEARNING_RATE = 0.06
SUBSAMPLE = 0.6


def scikit_learn() -> Any:
    """Return what trains kernel models. Raises ConfigError: it is not installed."""
    try:
        from sklearn import ensemble
    except ImportError as error:
        raise ConfigError(
            "training kernel models needs scikit-learn; "
            "pip install 'ssdtrain[foresight]'."
        ) from error
    return ensemble


def fit_closed_form(
    times: Times,
    spec: DeviceSpec,
    *,
    relatives: Sequence[tuple[Times, DeviceSpec]] = (),
) -> Law | None:
    """The closed form of the times' family; None where it has none, where the times are
    too few for one, and for CPUs. `relatives`: times on other devices, which join
    in."""
    family = times[0][0].family
    few = len(times) < least_times(family)
    if spec.kind is Kind.CPU or few or family not in FAMILIES:
        return None
    return fit_law(family, [(times, spec), *relatives])


def fit_forest(
    times: Times,
    spec: DeviceSpec,
    *,
    law: Law | None = None,
    seed: int = 0,
    relatives: Sequence[tuple[Times, DeviceSpec]] = (),
) -> Forest:
    """Boosted trees over the times of one family, next to its `law` or the roofline.
    Raises ConfigError: fewer than 20 times, several families, or no scikit-learn.
    `relatives`: times on other devices, which join in."""
    families = {call.family for call, _ in times}
    if len(families) != 1 or len(times) < 20:
        raise ConfigError(
            f"a kernel model expects 20 or more times of one family, got {len(times)} "
            f"of {', '.join(sorted(family.value for family in families)) or 'none'}; "
            "gather longer, or choose another family (--family)"
        )
    family = families.pop()
    rows, targets = [], []
    for own, sheet in ((times, spec), *relatives):
        known = law_us(law, [call for call, _ in own], sheet)
        for (call, us), by_law in zip(own, known, strict=True):
            rows.append(row_of(call, sheet, by_law))
            targets.append(math.log(us / by_law))
    base, trees = 0.0, []
    for bag in range(NUM_BAGS):
        model = scikit_learn().GradientBoostingRegressor(
            loss="huber",
            alpha=0.9,
            n_estimators=NUM_TREES.get(family, FEW_TREES),
            max_leaf_nodes=MAX_LEAVES,
            max_depth=None,
            min_samples_leaf=4,
            learning_rate=LEARNING_RATE,
            subsample=SUBSAMPLE,
            max_features=0.5,
            random_state=seed * NUM_BAGS + bag,
        )
        model.fit(rows, targets)
        base += float(model.init_.constant_[0][0]) / NUM_BAGS
        trees += [_tree(one[0].tree_) for one in model.estimators_]
    return Forest(names=feature_names(family), base=base, trees=tuple(trees))


def _tree(fitted: Any) -> Tree:
    """Depth first, thresholds and leaves rounded to what decides."""
    features: list[int] = []
    values: list[float] = []
    rights: list[int] = []

    def add(node: int) -> None:
        at = len(features)
        left, right = int(fitted.children_left[node]), int(fitted.children_right[node])
        leaf = left < 0
        features.append(-1 if leaf else int(fitted.feature[node]))
        number = float(fitted.value[node][0][0]) * LEARNING_RATE / NUM_BAGS
        values.append(
            float(f"{number:.3g}") if leaf else float(f"{fitted.threshold[node]:.5g}")
        )
        rights.append(0)
        if not leaf:
            add(left)
            rights[at] = len(features)
            add(right)

    add(0)
    return Tree(tuple(features), tuple(values), tuple(rights))


def _shape(call: Call) -> tuple[Any, ...]:
    """What tells one call of a design from another."""
    sizes = {k: v for k, v in call.sizes.items() if k not in ("distinct_rows", "skew")}
    return call.variant, call.dtype, tuple(sorted(sizes.items()))


def geometric_mean_error(errors: Sequence[float]) -> float:
    """exp of the mean logarithm of |relative error| (Lin 2023: GMAE)."""
    return math.exp(statistics.fmean(math.log(error + FLOOR) for error in errors))


def errors_of(
    forest: Forest, times: Times, spec: DeviceSpec, law: Law | None = None
) -> list[float]:
    """|predicted - measured| / measured."""
    found = []
    known = law_us(law, [call for call, _ in times], spec)
    for (call, us), by_law in zip(times, known, strict=True):
        ratio = math.exp(forest.predict(row_of(call, spec, by_law)))
        found.append(abs(by_law * ratio / us - 1.0))
    return found


def score(
    times: Times,
    spec: DeviceSpec,
    *,
    relatives: Sequence[tuple[Times, DeviceSpec]] = (),
) -> dict[str, float]:
    """Cross-validated errors of a forest, and of the bare roofline scaled to fit.
    Returns `gmae` and `mean` over all times, each held out once; `spread`, the standard
    deviation of the folds' `gmae`; the roofline's as above."""
    errors: list[float] = []
    bare: list[float] = []
    each: list[float] = []
    shuffled = list(times)
    random.Random(0).shuffle(shuffled)
    for fold in range(NUM_FOLDS):
        train = [one for at, one in enumerate(shuffled) if at % NUM_FOLDS != fold]
        test = shuffled[fold::NUM_FOLDS]
        # A shape that is held out is held out of the relatives' times, too.
        unseen = {_shape(call) for call, _ in test}
        others = [
            ([(c, us) for c, us in more if _shape(c) not in unseen], sheet)
            for more, sheet in relatives
        ]
        law = fit_closed_form(train, spec, relatives=others)
        forest = fit_forest(train, spec, law=law, relatives=others)
        found = errors_of(forest, test, spec, law)
        each.append(geometric_mean_error(found))
        errors += found
        scale = statistics.median(us / spec.roofline_us(call) for call, us in train)
        bare += [abs(scale * spec.roofline_us(c) / us - 1.0) for c, us in test]
    return {
        "held_out": len(errors),
        "gmae": geometric_mean_error(errors),
        "spread": statistics.pstdev(each),
        "mean": statistics.fmean(errors),
        "roofline_gmae": geometric_mean_error(bare),
        "roofline_mean": statistics.fmean(bare),
    }
