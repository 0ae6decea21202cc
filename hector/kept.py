"""What is kept next to a graph, and where it is made.

[Note: what is kept] Next to a graph only what its edges alone decide is kept: orders,
groups, sizes and what is made of those numbers, and programs. Features and parameters
that are permuted, joined or converted are made again in every call, inside autograd:
not all writes to them leave a trace. What is kept is made apart from the call that
first asks for it, outside of inference mode and autograd, so every later call can use
it; and every tensor of hector's own is made on the device of a graph or of a feature,
whatever the program's default device is.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StaleGraphError(RuntimeError):
    """Tensors were changed while their graph was in use."""


def apart() -> AbstractContextManager[None]:
    """Make what outlives the call that it is made in."""
    return _outside() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def kept(known: MutableMapping[Any, Any], key: Any, make: Callable[[], T]) -> T:
    """Return what is known by `key`, made when it is not; see [Note: what is kept]."""
    if key not in known:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with apart():
                known[key] = make()
        else:  # already apart, or as good
            known[key] = make()
    found: T = known[key]
    return found


def lasting(t: Tensor) -> Tensor:
    """Return integers that autograd may save: a copy of inference tensors."""
    if not t.is_inference():
        return t
    with apart():
        return t.clone()
