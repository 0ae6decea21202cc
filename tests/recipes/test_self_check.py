"""What being sure costs, of steps whose times are known."""

import math

import pytest

from recipes.bench.safety.self_check import BLOCK_STEPS, measure, summary
from recipes.bench.safety.tables import self_check


@pytest.mark.parametrize("cost", [0.0, 0.01])
def test_an_even_drift_and_slow_steps_are_not_the_cost(cost: float) -> None:
    steps = 0

    def block(sure: bool) -> list[float]:
        nonlocal steps
        times = []
        for _ in range(BLOCK_STEPS):
            steps += 1
            ms = 60 * (1 + 1e-4 * steps) * (1 + cost * sure)
            times.append(5 * ms if steps % 61 == 0 else ms)
        return times

    found = summary(measure(block, num_pairs=12, num_rounds=4))
    low, high = found["interval"]
    assert low <= 1 + cost <= high
    assert high - low < 0.005 and len(found["pair_ratios"]) == 12


def test_two_orders_take_turns() -> None:
    order = []

    def block(sure: bool) -> list[float]:
        order.append(sure)
        return [1.0] * BLOCK_STEPS

    measure(block, num_pairs=2, num_rounds=1)
    assert order == [True, False, False, True, False, True, True, False]


def test_the_line_of_the_page() -> None:
    cell = {"over": 1.0012, "interval": [0.9998, 1.0026], "step_ms": 61.234}
    text = self_check(
        {
            "environment": {
                "device": "H100",
                "num_devices": 1,
                "num_cpus": 16,
                "versions": {"torch": "2"},
                "date": "",
            },
            "settings": {"batch": 8, "sequence": 1024, "pairs": 12},
            "cells": {"4096x4/recipes": cell, "broken": {"error": "x"}},
        }
    )
    assert "| 4096x4/recipes | 61.2 | +0.12 % | -0.02 to +0.26 % |" in text
    assert "broken" not in text


def test_one_pair_has_no_interval() -> None:
    found = summary(measure(lambda sure: [1.0] * BLOCK_STEPS, 1, 1))
    assert math.isnan(found["interval"][0]) and found["over"] == 1
