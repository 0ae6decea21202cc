"""Draws what stands around a session: defaults, modes and contexts of the program."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, ROWS, NUM_STEPS = 8, 4, 3
Ambient = Callable[[], AbstractContextManager[Any]]


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As it is."""
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As it is."""
        return func(*args, **(kwargs or {}))


@contextmanager
def _set(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


EVERYWHERE: dict[str, Ambient] = {
    "nothing": nullcontext,
    "default device": lambda: _set(torch.set_default_device, "meta", None),
    "device": lambda: torch.device("meta"),
    "double": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "functions": _Functions,
    "dispatch": _Dispatch,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
}
"""What a program may train under."""
AT_ATTACH: dict[str, Ambient] = EVERYWHERE | {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "fake": FakeTensorMode,
}
"""And what it may call `offload` under."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"plan": "offload-all"},
    {"plan": "offload-all", "recompute": "full"},
    {"plan": "offload-all", "recompute": "regions"},
    {"plan": "keep-all", "recompute": "regions"},
    {"plan": "offload-all", "verify": "shadow"},
    {"memory_budget_bytes": 1 << 20},
)


@dataclass(frozen=True)
class Surroundings:
    """Names of what stands, and the settings of the session."""

    attach: str
    steps: str
    forward: str
    layers: str
    """Entered by the model's own forward around its layers."""
    settings: dict[str, Any]


def drawn(seed: int) -> Surroundings:
    """The same for the same seed."""
    draw = random.Random(seed)
    names = list(EVERYWHERE)
    return Surroundings(
        attach=draw.choice(list(AT_ATTACH)),
        steps=draw.choice([*names, "nothing", "nothing"]),
        forward=draw.choice([*names, "nothing", "nothing"]),
        layers=draw.choice([*names, "nothing", "nothing"]),
        settings=draw.choice(SETTINGS),
    )


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        self.norm = nn.LayerNorm(WIDTH, **options)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, **options)
        self.down = nn.Linear(2 * WIDTH, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) to the same; its scale follows the defaults."""
        here = torch.ones(1)
        scale = 0.5 if here.is_meta else 1.0 + here.element_size() / 8
        y = F.gelu(self.up(self.norm(x) * scale))
        return x + F.dropout(self.down(y), 0.1)


class _Model(nn.Module):
    def __init__(self, around: Ambient) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.around = [around]

    def forward(self, x: Tensor) -> Tensor:
        with self.around[0]():
            for layer in self.layers:
                x = layer(x)
        return x


def train(case: Surroundings, offload: Callable[..., Any] | None) -> list[Tensor]:
    """Gradients of every step.

    Args:
        offload: None: a plain run.
    """
    torch.manual_seed(0)
    model = _Model(EVERYWHERE[case.layers])
    session = None
    if offload is not None:
        with AT_ATTACH[case.attach]():
            session = offload(model, min_bytes=0, **case.settings)
    found: list[Tensor] = []
    try:
        with EVERYWHERE[case.steps]():
            for number in range(NUM_STEPS):
                torch.manual_seed(number)
                x = torch.randn(ROWS, WIDTH, device="cpu", dtype=torch.float32)
                with EVERYWHERE[case.forward]():
                    loss = model(x).float().square().mean()
                loss.backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    found.append(parameter.grad.clone())
                    parameter.grad = None
    finally:
        if session is not None:
            with AT_ATTACH[case.attach]():
                session.explain()
                session.close()
    return found
