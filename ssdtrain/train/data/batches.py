"""Micro-batches as a pure function of (seed, step, micro-batch, data rank)."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from ssdtrain.train.data.tokens import check_length


class Batch(NamedTuple):
    """One micro-batch on the CPU."""

    inputs: tuple[Tensor, ...]
    """int64 [batch, sequence] each, in the order the model takes them."""
    labels: Tensor
    """int64 [batch, sequence]; IGNORED_LABEL where the loss skips."""


class Objective(Protocol):
    """Turns windows of text into inputs and labels."""

    @property
    def window(self) -> int:
        """Tokens of text that one sequence needs."""

    def batch(self, windows: NDArray[np.int64], random: Generator) -> Batch:
        """windows: int64 [batch, window]; draws only from `random`."""


class Batches:
    """Draws windows at random places; the same four numbers give the same batch, so a
    resumed run goes on exactly where it stopped and keeps no position."""

    def __init__(
        self,
        tokens: NDArray[np.uint32],
        objective: Objective,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        check_length(tokens, objective.window)
        self._tokens = tokens
        self._objective = objective
        self._micro_batch_size = micro_batch_size
        self._seed = seed

    def batch(self, step: int, micro_batch: int, data_rank: int) -> Batch:
        """Return one micro-batch of a step on one data-parallel rank."""
        random = np.random.default_rng([self._seed, step, micro_batch, data_rank])
        window = self._objective.window
        last = len(self._tokens) - window
        starts = random.integers(0, last, self._micro_batch_size, endpoint=True)
        windows = np.stack([self._tokens[s : s + window] for s in starts])
        return self._objective.batch(windows.astype(np.int64), random)
