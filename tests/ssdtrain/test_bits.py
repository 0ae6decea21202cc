"""The comparison that the law's tests lean on can fail."""

import pytest
import torch

from tests.ssdtrain.bits import same_bits

ZERO, ONE = torch.zeros(2), torch.ones(2)


def nested(part: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([part], layout=torch.jagged)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (-ZERO, ZERO),
        (ZERO, ZERO.int()),
        (ZERO, ZERO.view(1, 2)),
        ([ZERO], [ZERO, ONE]),
        ([ZERO, ONE], [ZERO]),
        ([ZERO], []),
        ([ZERO, None], [ZERO, ZERO]),
        ({"a": ZERO}, {"b": ZERO}),
        ({"a": [ZERO]}, {"a": [-ZERO]}),
        (-0.0, 0.0),
        (1, 1.0),
        (ONE.to_sparse(), torch.tensor([1.0, 0.0]).to_sparse()),
        (ONE.to_sparse(), ONE),
        (nested(ZERO), nested(-ZERO)),
        (torch.view_as_complex(-ZERO), torch.view_as_complex(ZERO)),
    ],
)
def test_differences(ours: object, theirs: object) -> None:
    assert not same_bits(ours, theirs)
    assert not same_bits(theirs, ours)


@pytest.mark.parametrize(
    "value",
    [
        torch.full((3,), torch.nan),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(1.0),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        [ONE, None, {"loss": float("nan")}],
        ONE.to_sparse(),
    ],
)
def test_equal(value: object) -> None:
    copy = value.clone() if isinstance(value, torch.Tensor) else value
    assert same_bits(value, copy)


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="something to compare"):
        same_bits([], ())
