"""Training steps of a node classifier."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hector.datasets.task import NodeClassification
from hector.sampling import SampledBatch


class Optimizers:
    """Several optimizers, of parameters that do not overlap, as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each."""
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Of each."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Of each, in order."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of each, in order."""
        for part, own in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(own)


class Steps:
    """Training steps of one model: what captures refer to, and what refers to none.

    `weight` makes a rank's mean over its own labels one of the whole batch's when ranks
    are averaged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        task: NodeClassification,
    ) -> None:
        self.model, self.optimizer, self.task = model, optimizer, task

    def full_batch(self) -> tuple[Tensor, Tensor]:
        """Weighted loss and accuracy of all labelled nodes on the whole graph."""
        return self.some(self.task.train_nodes, self.task.train_labels)

    def some(
        self, nodes: Tensor, goal: Tensor, weight: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of some nodes on the whole graph."""
        self.optimizer.zero_grad(set_to_none=True)
        return self._ended(self.model(self.task.graph)[nodes], goal, weight)

    def mini_batch(
        self, found: SampledBatch, goal: Tensor, *rows: Tensor, weight: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of a batch's seeds; `rows`: features of its nodes that were
        gathered before the step."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(found.graph, found.node_ids, *rows)[found.seeds]
        return self._ended(logits, goal, weight)

    def _ended(
        self, logits: Tensor, goal: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        if goal.numel():
            loss = functional.cross_entropy(logits, goal)
            correct = accuracy(logits.detach(), goal)
        else:  # other ranks wait for this one's gradients
            loss, correct = (
                logits.sum(),
                torch.zeros((), dtype=torch.float64, device="cpu"),
            )
        if weight != 1.0:
            loss, correct = loss * weight, correct * weight
        loss.backward()
        self.optimizer.step()
        return loss.detach(), correct.to(loss.device)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose largest logit is the label's, float64 []."""
    return (logits.argmax(1) == labels).double().mean()
