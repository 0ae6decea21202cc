"""`ray.train.torch` of ray 2.60: one worker, in this process."""

from collections.abc import Callable
from typing import Any

import torch
from ray.train import LATEST, FailureConfig, Result, RunConfig, ScalingConfig


def prepare_model(model: torch.nn.Module) -> torch.nn.Module:
    return model


def get_device() -> torch.device:
    return torch.device("cpu")


class TorchTrainer:
    def __init__(
        self,
        train_loop_per_worker: Callable[[dict[str, Any]], None],
        *,
        train_loop_config: dict[str, Any],
        scaling_config: ScalingConfig,
        run_config: RunConfig,
    ) -> None:
        self.loop, self.config = train_loop_per_worker, train_loop_config
        failures = run_config.failure_config or FailureConfig()
        self.starts = 1 + failures.max_failures

    def fit(self) -> Result:
        for start in range(self.starts):
            try:
                self.loop(self.config)
            except Exception:
                if start + 1 == self.starts:
                    raise
            else:
                break
        return LATEST
