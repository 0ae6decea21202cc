"""Trainers of compiled relational models, built by Hydra from `configs/gnn/`."""

from hector.train.config import (
    DataConfig,
    LayerKind,
    ModelConfig,
    OptimizerConfig,
    Resume,
    RunConfig,
)
from hector.train.model import LayerSpec, NodeClassifier
from hector.train.trainer import NodeClassificationTrainer, TrainingResult

__all__ = [
    "DataConfig",
    "LayerKind",
    "LayerSpec",
    "ModelConfig",
    "NodeClassificationTrainer",
    "NodeClassifier",
    "OptimizerConfig",
    "Resume",
    "RunConfig",
    "TrainingResult",
]
