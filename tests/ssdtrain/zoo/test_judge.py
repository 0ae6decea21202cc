"""The judge of the zoo: what it calls equal, different, refused, and so on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.errors import RegionError
from tests.ssdtrain.zoo import judge

HOST = judge.GROUPS[0]
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x)) + x


class Model(nn.Module):
    """Two layers; at step `at` something happens that the class says."""

    at = 5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.number += 1
        return self.happens(x) if self.number > self.at else x

    def happens(self, x: Tensor) -> Tensor:
        return x


def is_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Other(Model):
    def happens(self, x: Tensor) -> Tensor:
        return x * 2 if is_hooked() else x


class Draws(Model):
    def happens(self, x: Tensor) -> Tensor:
        if is_hooked():
            torch.rand(1)
        return x


class Writes(Model):
    def happens(self, x: Tensor) -> Tensor:
        if is_hooked():
            with torch.no_grad():
                self.layers[0].linear.bias.add_(0.0).copy_(x.detach()[0])
        return x


class Refused(Model):
    def happens(self, x: Tensor) -> Tensor:
        if is_hooked():
            raise RegionError("as ours are")
        return x


class Crash(Model):
    def happens(self, x: Tensor) -> Tensor:
        if is_hooked():
            raise IndexError("as no error of ours is")
        return x


class Fails(Model):
    def happens(self, x: Tensor) -> Tensor:
        raise TypeError("plain's own")


class Endless(Model):
    def happens(self, x: Tensor) -> Tensor:
        return x * float("inf")


class Nobody(Model):
    """Two runs differ."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.own = float(self.runs)

    def happens(self, x: Tensor) -> Tensor:
        return x * self.own


class Nothing(Model):
    def happens(self, x: Tensor) -> Tensor:
        return x.detach()


def verdict(kind: type[Model], group: judge.Group, directory: Path) -> dict[str, Any]:
    def make(cached: bool) -> judge.Made:
        torch.manual_seed(0)
        return kind(), {"x": torch.ones(4, WIDTH)}

    return judge.verdict(make, str(directory), [group])


@pytest.mark.parametrize(
    ("kind", "expected", "why"),
    [
        (Model, "equal", ""),
        (Other, "different", "step 5: other loss, gradients"),
        (Draws, "different", "step 5: other next random numbers"),
        (Writes, "different", "step 5: other weights"),
        (Refused, "refused", "step 5: RegionError: as ours are"),
        (Crash, "crash", "step 5: IndexError: as no error of ours is"),
        (Fails, "plain fails", "TypeError: plain's own"),
        (Endless, "plain fails", "the loss is not finite"),
        (Nobody, "plain fails", "two plain runs differ"),
        (Nothing, "plain fails", "NoLoss: no result of this model has a gradient"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_every_verdict(
    kind: type[Model], expected: str, why: str, tmp_path: Path
) -> None:
    found = verdict(kind, HOST, tmp_path)
    assert found["verdict"] == expected, found
    if expected != "equal":
        whys = [found.get("why", "")]
        whys += [one.get("why", "") for one in found.get("variants", {}).values()]
        assert any(each.startswith(why) for each in whys), found


@pytest.mark.parametrize("group", judge.GROUPS, ids=lambda group: "-".join(group.plans))
def test_every_group_moves_or_makes_again(group: judge.Group, tmp_path: Path) -> None:
    found = verdict(Model, group, tmp_path)
    assert found["verdict"] == "equal"
    variants = found["variants"]
    assert list(variants) == list(group.plans)
    assert any(judge.is_moved(one) for one in variants.values())
    for name, one in variants.items():
        assert one["bytes"]["saved"] > 0
        sums = one["bytes"]
        assert (name != "host") or sums["moved"] == sums["saved"] - sums["held"] > 0
        assert (name != "regions") or one["bytes"]["regions"] > 0
        assert (name != "ssd") or one["bytes"]["rebuilt"] > 0


def test_what_stays_does_not_count(tmp_path: Path) -> None:
    found = verdict(Model, HOST, tmp_path)["variants"]["host"]
    found["bytes"] |= {"moved": 0, "rebuilt": found["bytes"]["saved"] // 2}
    assert judge.overall({"host": found}) == "unmoved"
