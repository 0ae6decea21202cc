"""The optimizers of torchtitan 0.3, as far as ssdtrain meets them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.config import Configurable


@dataclass(kw_only=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any]


class OptimizersContainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        implementation: str = "fused"

    def __init__(self, config: Any, *, model_parts: list[torch.nn.Module]) -> None:
        [group] = config.param_groups
        parameters = [p for part in model_parts for p in part.parameters()]
        kind = getattr(torch.optim, group.optimizer_name)
        self.optimizer = kind(parameters, **group.optimizer_kwargs)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
