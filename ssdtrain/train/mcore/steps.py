"""Forward steps: what a schedule calls for one micro-batch of each family."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssdtrain.train.data.batches import Batch
from ssdtrain.train.models.base import IGNORED_LABEL
from ssdtrain.train.settings import Family

Step = Callable[[Iterator[Batch], Any], tuple[Tensor, Callable[[Tensor], Any]]]


def step_of(family: Family, device: torch.device) -> Step:
    """Return the `forward_step_func` of a family, on this device."""
    call = {Family.GPT: _gpt, Family.BERT: _bert, Family.T5: _t5}[family]

    def forward_step(
        batches: Iterator[Batch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        inputs: tuple[Tensor | None, ...] = tuple(
            to_device(tensor, device) for tensor in batch.inputs
        )
        if family is Family.BERT and bool(batch.inputs[1].all()):
            # Seen on the CPU: without padding no mask is needed, and attention is fast.
            inputs = (inputs[0], None)
        labels = to_device(batch.labels, device)
        counted = labels != IGNORED_LABEL
        output = call(model, inputs, labels.masked_fill(~counted, 0))
        return output, partial(mean_loss, counted)

    return forward_step


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy for which the host does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def mean_loss(counted: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of losses, float (B, S), over `counted`, bool (B, S), twice."""
    mask = counted.to(torch.float32)
    mean = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    return mean, {"loss": mean.detach().clone()}


def _gpt(model: Any, inputs: tuple[Any, ...], labels: Tensor) -> Any:
    (ids,) = inputs
    places = torch.arange(ids.size(1), dtype=torch.int64, device=ids.device)
    places = places.expand_as(ids)
    return model(ids, places, _causal(ids), labels=labels)


def _bert(model: Any, inputs: tuple[Any, ...], labels: Tensor) -> Any:
    ids, text = inputs
    output = model(ids, text, lm_labels=labels)
    return output[0] if isinstance(output, tuple) else output


def _t5(model: Any, inputs: tuple[Any, ...], labels: Tensor) -> Any:
    """Only the future is hidden: spans fill the source but for a few places."""
    source, target = inputs
    return model(source, target, None, _causal(target), None, labels)


def _causal(ids: Tensor) -> Tensor:
    """Bool (1, 1, S, S), True where a token may not look."""
    length = ids.size(1)
    seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    return ~seen[None, None]
