"""[Note: parameters]: weights are never moved and never pinned by an alias."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache.handles import ParameterViewHandle
from ssdtrain.cache.record import Kept, ParameterView
from ssdtrain.errors import InPlaceError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved, rows_of


def swap_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    parameter.data = data


def settle(session: ssdtrain.Session, model: nn.Module, x: torch.Tensor) -> None:
    """Run steps until rows of a plan serve them; the weights stay as they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(9):
        if number == 5:
            session.follow(all_moved(session))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "ParameterViewRow" in rows_of(session)


def test_weights_and_their_views_are_not_saved_bytes(everything: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    with ssdtrain.offload(model, **everything) as session:
        x = torch.randn(4, 16, requires_grad=True)
        model(x).sum().backward()
        report = session.last_step
    weights = 2 * 16 * 16 * 4
    assert report is not None
    # Two transposed weights, and the norm's weight and bias.
    assert report.bytes_parameters >= weights
    # x, the norm's input, mean and 1/std, and the second layer's input.
    assert report.bytes_saved == (3 * 4 * 16 + 2 * 4) * 4


@pytest.mark.parametrize("is_settled", [False, True])
def test_gathered_weights_can_be_freed_and_come_back_elsewhere(
    everything: Any, is_settled: bool
) -> None:
    """What ZeRO-3 does: data are swapped out after forward, and in for backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number  # its mark
    x = torch.randn(3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    saved = [p.detach().clone() for p in model.parameters()]
    plan = {"plan": "auto", "max_overhead": 0.0} if is_settled else {}
    with ssdtrain.offload(model, **{**everything, **plan}) as session:
        if is_settled:
            settle(session, model, x)
        loss = model(x).square().sum()
        gathered = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
        for parameter in model.parameters():
            swap_data(parameter, torch.empty(0))
        assert all(storage() is None for storage in gathered), "pinned by a handle"
        for parameter, value in zip(model.parameters(), saved, strict=True):
            padded = torch.empty(value.numel() + 5)
            padded[5:] = value.flatten()
            swap_data(parameter, padded[5:].view(value.shape))
        ours = torch.autograd.grad(loss, [x, *model.parameters()])
    for a, b in zip(ours, expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("recompute", ["off", "auto", "full", "regions"])
@pytest.mark.parametrize("plan", ["offload-all", "auto"])
def test_replaced_weights_are_what_plain_autograd_reads(
    everything: Any, plan: str, recompute: str
) -> None:
    """A saved view shows the old data and a saved parameter the new ones, and what is
    made again is made of the old ones; or a region says that it cannot."""

    def run(settings: dict[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
        )
        session = None if settings is None else ssdtrain.offload(model, **settings)
        found = []
        for number in range(6):
            loss = model(torch.randn(3, 8)).square().sum()
            if number in (0, 5):  # before a plan, and behind its rows
                for parameter in model.parameters():
                    parameter.data = parameter.data * 0.5
            try:
                found += torch.autograd.grad(loss, list(model.parameters()))
            except InPlaceError:
                assert recompute == "regions"
                found += [torch.zeros(0)] * 8
        if session is not None:
            session.close()
        return found

    changed = {"plan": plan, "recompute": recompute, "max_overhead": 1.0}
    ours, theirs = run({**everything, **changed}), run(None)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert same_bits(a, b) or (recompute == "regions" and not a.numel())


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_weight_changed_in_place_behind_its_saved_view_is_refused(
    everything: Any, is_settled: bool
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = {"plan": "auto", "max_overhead": 0.0} if is_settled else {}
    with ssdtrain.offload(model, **{**everything, **plan}) as session:
        x = torch.randn(3, 8)
        if is_settled:
            settle(session, model, x)
        loss = model(x).square().sum()
        with torch.no_grad():
            model[1].weight.mul_(2.0)
        with pytest.raises(InPlaceError, match="a parameter"):
            loss.backward()


def test_a_held_view_says_where_it_lies_if_its_elements_are_the_weights() -> None:
    """One that takes the bytes for other numbers is read as it is, and checked."""
    weight = nn.Parameter(torch.randn(4, 6))
    part = weight.detach()[1:].t()
    view = ParameterViewHandle((weight, weight._version, part)).source
    assert view == ParameterView(weight, 0, (6, 3), (1, 6), 6, part)
    other = weight.detach().view(torch.int32)
    kept = ParameterViewHandle((weight, weight._version, other)).source
    assert isinstance(kept, Kept) and kept.rebuild() is other
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(InPlaceError):
        kept.rebuild()


def test_buffers_stay(everything: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("table", torch.randn(100, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.table * self.weight) * x).sum()

    model = Scaled()
    with ssdtrain.offload(model, **everything) as session:
        model(torch.ones(8)).backward()
        report = session.last_step
    assert report is not None
    # Only the product is saved bytes; the buffer lives as long as the model.
    assert report.bytes_saved <= 100 * 8 * 4 + 8 * 4
