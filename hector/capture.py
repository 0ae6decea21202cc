"""A training step as one CUDA graph.

[Note: captured steps] On a small graph a step's time is the host's: tens of launches,
each a few microseconds. Where shapes and the graph are fixed, everything that a step
launches (forward, backward, optimizer) is captured once and replayed by one call. What
the step reads must stay where it is: parameters, graph and inputs are changed in place.
"""

from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
"""Calls before the capture: they compile, allocate and run as they are."""


class CapturedStep:
    """`step()` as one CUDA graph; see [Note: captured steps].

    The first calls run the step itself, so every call is one step. Results are the
    tensors of the last call: clone what is to be kept. Random numbers go on from call
    to call as without a capture. An optimizer needs `capturable=True`, and gradients
    `zero_grad(set_to_none=True)` inside the step.
    """

    def __init__(self, step: Callable[[], Any], warm_up: int = WARM_UP) -> None:
        if warm_up < 1:
            raise ValueError(f"expected warm_up of at least 1, got {warm_up}")
        if not torch.cuda.is_available():
            raise ValueError("expected a CUDA device to capture a step on, got none")
        self._step, self._left = step, warm_up
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None

    def __call__(self) -> Any:
        """One step."""
        if self._left:
            self._left -= 1
            return self._aside()
        if self._graph is None:
            # Capturing launches nothing: the replay below is this call's step.
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._results = self._step()
            self._graph = captured
        self._graph.replay()
        return self._results

    def _aside(self) -> Any:
        """On a stream of its own, as captures want their warm-up."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            found = self._step()
        here.wait_stream(aside)
        return found
