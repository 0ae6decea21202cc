"""[Note: torn blocks] in numbers: what an optimizer's state leaves of the memory."""

import pytest
import torch
from torch import nn

from ssdtrain.observe.room import Room
from ssdtrain.plan.goal import DEVICE_RESERVE
from tests.ssdtrain.observe.blocks import MIB, PAGE, Block, BlockDevice, Blocks

LAYER = (32, 8, 8, 32, 112, 112, 112)
"""MiB of the weights of one; of a 7B model's."""
NUM_LAYERS = 4
STREAM, INSIDE, LOGITS = 64, 224, 1024
"""MiB of what 8k tokens are there."""


class Decoder(nn.Module):
    """Its weights, without bytes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [256, *NUM_LAYERS * LAYER, 256]
        self.weights = nn.ParameterList(
            nn.Parameter(
                torch.empty(size * MIB // 2, dtype=torch.bfloat16, device="meta")
            )
            for size in sizes
        )

    @property
    def sizes(self) -> list[int]:
        """In bytes."""
        return [each.nbytes for each in self.weights]


class Training:
    """Steps in which all layers run again, on that device and in that room."""

    def __init__(self, limit: int) -> None:
        self.device = BlockDevice(limit)
        self.blocks = self.device.blocks
        self.room = Room(self.device)
        self.model = Decoder()
        self._weights = [self.blocks.take(size) for size in self.model.sizes]
        self._state: list[Block] = []
        self.room.open_for([self.model])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def steps(self, number: int, kept: int = 0) -> None:
        """kept: MiB of each layer that a plan keeps."""
        for _ in range(number):
            if self._state:
                self.room.trim()
            gradients = self._forward_and_backward(kept)
            self.room.before_step(self.optimizer, (), {})
            if not self._state:
                both = [size for size in self.model.sizes for _ in "ab"]
                self._state = [self.blocks.take(size) for size in both]
            for gradient in gradients:
                self.blocks.give(gradient)

    def _forward_and_backward(self, kept: int) -> list[Block]:
        take, give = self.blocks.take, self.blocks.give
        inputs, stays = [take(STREAM * MIB)], []
        for _ in range(NUM_LAYERS):
            stays.append([take(64 * MIB) for _ in range(kept // 64)])
            self._run(4 * [STREAM] + 3 * [INSIDE])
            inputs.append(take(STREAM * MIB))
        # Logits in half precision, in full, their softmax, and the gradients of both.
        self._run([LOGITS // 2, LOGITS, LOGITS])
        slopes = [take(LOGITS * MIB), take(LOGITS // 2 * MIB)]
        gradients = [take(self.model.sizes[-1])]
        slope = take(STREAM * MIB)
        for each in (*slopes, inputs.pop()):
            give(each)
        sizes = self.model.sizes
        for number in reversed(range(NUM_LAYERS)):
            inside = [take(size * MIB) for size in 4 * [STREAM] + 3 * [INSIDE]]
            first = 1 + len(LAYER) * number
            for size in reversed(sizes[first : first + len(LAYER)]):
                both = take(INSIDE * MIB)
                gradients.append(take(size))
                give(both)
                give(inside.pop())
            after = take(STREAM * MIB)
            for each in (slope, inputs.pop(), *stays[number]):
                give(each)
            slope = after
        gradients.append(take(sizes[0]))
        give(slope)
        return gradients

    def _run(self, sizes: list[int]) -> None:
        """Each one lives until the next but one is there."""
        alive: list[Block] = []
        for size in sizes:
            alive.append(self.blocks.take(size * MIB))
            if len(alive) > 2:
                self.blocks.give(alive.pop(0))
        for each in alive:
            self.blocks.give(each)


LIMIT = 12 * 1024 * MIB


def test_an_optimizers_state_gets_blocks_that_grew_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = Training(LIMIT)
    assert early.room.segments == "growing"
    early.steps(3)
    monkeypatch.setattr(Room, "open_for", lambda *_: None)
    late = Training(LIMIT)
    assert late.room.segments == "whole"
    late.steps(3)
    assert late.room.segments == "growing"  # too late
    for own in (early, late):
        assert own.blocks.allocated == 3 * sum(own.model.sizes)
    assert early.room.stuck_bytes < 0.02 * LIMIT
    assert late.room.stuck_bytes > 4 * early.room.stuck_bytes


def test_where_what_is_stuck_and_the_reserve_stay_free_training_goes_on() -> None:
    own = Training(LIMIT)
    own.steps(3)
    assert own.blocks.num_retries == 0
    kept = 0
    most = (1 - DEVICE_RESERVE) * LIMIT - own.room.stuck_bytes
    while peak_of(kept + 64) < most:
        kept += 64
    assert kept
    own.steps(4, kept)
    assert own.blocks.num_retries <= 1


def peak_of(kept: int) -> int:
    """What is allocated at most, with all the memory there is."""
    training = Training(1 << 60)
    take, most = training.blocks.take, [0]

    def taken(size: int) -> Block:
        found = take(size)
        most[0] = max(most[0], training.blocks.allocated)
        return found

    training.blocks.take = taken  # type: ignore[method-assign]
    training.steps(2, kept)
    return most[0]


def test_little_that_is_trained_needs_no_segments_that_grow() -> None:
    model = Decoder()
    for each in list(model.weights)[1:]:
        each.requires_grad_(False)
    room = Room(BlockDevice(LIMIT))
    room.open_for([model])
    assert room.segments == "whole"
    lazy = nn.LazyLinear(4, device="meta")
    room.open_for([lazy, nn.Linear(2, 2)])
    assert room.segments == "whole"
    room.open_for([Decoder()])
    assert room.segments == "growing"


def test_the_model_of_the_allocator() -> None:
    own = Blocks(100 * MIB)
    small, other = own.take(4 * MIB), own.take(4 * MIB)
    assert own.reserved == PAGE and own.allocated == 8 * MIB
    large = own.take(30 * MIB)
    own.give(small)
    own.give(large)
    own.empty()  # its other part is in use
    assert own.reserved == PAGE
    own.grows = True
    grown = own.take(50 * MIB)
    assert own.reserved == 80 * MIB
    own.give(grown)
    last = own.take(70 * MIB)
    assert own.num_retries == 0 and own.reserved == 100 * MIB
    own.give(last)
    own.give(other)
    own.empty()
    assert own.reserved == own.allocated == 0
    with pytest.raises(torch.OutOfMemoryError):
        own.take(101 * MIB)
