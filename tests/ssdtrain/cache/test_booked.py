"""Under a table, what is alive is booked: nothing is left over, or missing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain

pytestmark = pytest.mark.usefixtures("virtual_time")


class Classifier(nn.Module):
    """Saves the logarithms of its softmax twice, behind other tensors that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        )
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.norm(self.blocks(x)), labels)


def test_what_is_kept_and_saved_twice_is_counted_once() -> None:
    """In each step that follows the plan the peak is the predicted one, and nothing is
    alive behind a backward."""
    torch.manual_seed(0)
    model = Classifier()
    settings: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 1.0}
    left = []
    with ssdtrain.offload(model, **settings) as session:
        for _ in range(6):
            for _ in range(2):
                x = torch.randn(32, 64, requires_grad=True)
                model(x, torch.arange(32)).backward()
                ledger = session.cache.ledger
                ledger.settle()
                left.append(ledger.live_bytes)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        plan, reports = session.plan, session.steps
    assert plan is not None and plan.prediction is not None
    peaks = [report.saved_peak_bytes for report in reports[2:]]
    assert peaks == [plan.prediction.peak_bytes] * 4
    # The program holds its input, which moves or does not.
    assert len(set(left[4:])) == 1 and left[-1] in (0, left[0])
