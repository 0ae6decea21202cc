"""The smallest engine: a scheduler that is no module, and what `offload` asks of it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.engines import known
from ssdtrain.engines.hints import Hints, Stage
from ssdtrain.engines.patch import MARK, Patches
from ssdtrain.engines.plain import Plain
from ssdtrain.errors import AttachError
from tests.ssdtrain.bits import same_bits

NUM_MICRO_BATCHES = 3


class Scheduler:
    """Somebody's framework: all forwards first, then their backward passes in
    reverse."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage = stage
        self.outputs: dict[int, Tensor] = {}

    def forward(self, micro_batch: int, x: Tensor) -> None:
        self.outputs[micro_batch] = self.stage(x)

    def backward(self, micro_batch: int) -> None:
        self.outputs.pop(micro_batch).square().sum().backward()

    def step(self, batch: Tensor) -> None:
        for number, x in enumerate(batch.chunk(NUM_MICRO_BATCHES)):
            self.forward(number, x)
        for number in reversed(range(NUM_MICRO_BATCHES)):
            self.backward(number)


class Scheduled(Plain):
    """Its engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__([scheduler.stage])
        self._scheduler = scheduler

    @classmethod
    def of(cls, model: Any) -> "Scheduled | None":
        """By class name in a real one, which imports no framework."""
        return cls(model) if isinstance(model, Scheduler) else None

    def attach(
        self, hints: Hints, patches: Patches, keep: Callable[[Tensor], None]
    ) -> None:
        scheduler = self._scheduler
        forward, backward, step = (
            scheduler.forward,
            scheduler.backward,
            scheduler.step,
        )

        @functools.wraps(forward)
        def hinted_forward(micro_batch: int, x: Tensor) -> None:
            with hints.forward(micro_batch=micro_batch):
                forward(micro_batch, x)

        @functools.wraps(backward)
        def hinted_backward(micro_batch: int) -> None:
            hints.set_next_stage(Stage.BACKWARD, micro_batch=micro_batch)
            hints.prefetch_last_module()
            backward(micro_batch)
            hints.wait_io()

        @functools.wraps(step)
        def hinted_step(batch: Tensor) -> None:
            step(batch)
            hints.step_end()

        patches.mark(scheduler)
        patches.set(scheduler, "forward", hinted_forward)
        patches.set(scheduler, "backward", hinted_backward)
        patches.set(scheduler, "step", hinted_step)


def gradients(scheduler: Scheduler, batch: Tensor) -> list[Tensor]:
    scheduler.stage.zero_grad()
    scheduler.step(batch)
    return [parameter.grad.clone() for parameter in scheduler.stage.parameters()]  # type: ignore[union-attr]


def test_an_engine_is_a_class_and_a_name_in_the_list(
    everything: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    pairs = [(nn.Linear(32, 32), nn.GELU()) for _ in range(2)]
    scheduler = Scheduler(nn.Sequential(*(part for pair in pairs for part in pair)))
    batch = torch.randn(8 * NUM_MICRO_BATCHES, 32)
    with pytest.raises(AttachError, match="got Scheduler"):
        ssdtrain.offload(scheduler, **everything)
    expected = gradients(scheduler, batch)
    before = set(vars(scheduler))
    monkeypatch.setattr(known, "ENGINES", (*known.ENGINES, Scheduled.of))
    with ssdtrain.offload(scheduler, **everything) as session:
        assert vars(scheduler)[MARK] == id(scheduler)
        for _ in range(2):
            found = gradients(scheduler, batch)
            for ours, theirs in zip(found, expected, strict=True):
                assert same_bits(ours, theirs)
        assert [step.bytes_offloaded > 0 for step in session.steps] == [True, True]
        assert session.cache.lanes.latest_name == f"model[{NUM_MICRO_BATCHES - 1}]"
    assert set(vars(scheduler)) == before
