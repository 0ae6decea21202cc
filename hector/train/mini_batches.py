"""Epochs of training by sampled mini-batches."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from hector.capture import CapturedBatches, CapturedSampler
from hector.sampling import Drawn, NeighborSampler
from hector.train.ranks import Ranks
from hector.train.stages import Ahead
from hector.train.steps import Steps


class MiniBatches:
    """Train on samples around the labelled nodes, `batch` of them a step."""

    def __init__(
        self,
        steps: Steps,
        sampler: NeighborSampler,
        *,
        batch: int,
        ranks: Ranks,
        gathered: Callable[[Tensor], tuple[Tensor, ...]],
        capture: bool,
    ) -> None:
        """`gathered(node_ids)` gives the rows that a captured step reads; with
        `capture` draws and gathers run ahead of it ([Note: stages ahead])."""
        self._steps, self._sampler, self._gathered = steps, sampler, gathered
        self._batch, self._ranks = batch, ranks
        self._captured: CapturedBatches | None = None
        if capture:
            self._captured = CapturedBatches(steps.mini_batch, sampler.graph)
            self._draws = CapturedSampler(sampler, batch)

    def epoch(self, seed_own: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Train on all labelled nodes in random order, the same on all ranks: their
        mean loss and accuracy. `seed_own` gives this rank random numbers of its own."""
        nodes = self._steps.task.train_nodes
        order = torch.randperm(nodes.numel(), device=nodes.device)
        loss = torch.zeros((), dtype=torch.float64, device=nodes.device)
        correct = torch.zeros_like(loss)
        seed_own()
        # Draws have numbers of their own: they run beside steps, which drop out.
        generator = torch.Generator(nodes.device)
        generator.manual_seed(int(torch.randint(1 << 62, (), device="cpu")))
        parts = order.split(self._batch)
        if self._captured is None:
            trained = self._plain(parts, generator)
        else:
            trained = self._replayed(self._captured, parts, generator)
        # Closed at once, whatever ends the loop: its threads end with it.
        with closing(trained):
            for part, (mean, right) in zip(parts, trained, strict=True):
                share = part.numel() / nodes.numel()
                loss += share * mean
                correct += share * right
        return self._ranks.mean(loss), self._ranks.mean(correct)

    def _plain(
        self, parts: Sequence[Tensor], generator: torch.Generator
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        task = self._steps.task
        for part in parts:
            chosen = self._ranks.share(part)
            weight = self._ranks.world_size * chosen.numel() / part.numel()
            found = self._sampler.sample(task.train_nodes[chosen], generator)
            goal = task.train_labels[chosen]
            yield self._steps.mini_batch(found, goal, weight=weight)

    def _replayed(
        self,
        batches: CapturedBatches,
        parts: Sequence[Tensor],
        generator: torch.Generator,
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Replay a step while later batches are drawn and their features gathered."""
        task, device = self._steps.task, self._steps.task.train_nodes.device

        def draw(chosen: Tensor) -> tuple[Drawn, Tensor]:
            found = self._draws.draw(task.train_nodes[chosen], generator)
            return found, task.train_labels[chosen]

        def gather(
            found: tuple[Drawn, Tensor],
        ) -> tuple[Drawn, Tensor, tuple[Tensor, ...]]:
            return *found, self._gathered(found[0].node_ids)

        with (
            Ahead(draw, parts, device) as drawn,
            Ahead(gather, drawn, device) as gathered,
        ):
            for found, goal, rows in gathered:
                yield batches(found, goal, rows=rows)
