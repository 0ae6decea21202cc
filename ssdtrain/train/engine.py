"""DeepSpeed, one shim: how it is started and configured."""

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from ssdtrain.errors import ConfigError
from ssdtrain.train.runner import build_optimizer, build_schedule
from ssdtrain.train.settings import Precision, RunSettings

_log = logging.getLogger(__name__)

_NEVER = 2**31 - 1


def import_deepspeed() -> Any:
    """Import DeepSpeed, for the CPU without a GPU. ConfigError: it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"engine=deepspeed needs DeepSpeed ({error}); install it with "
            "`pip install 'ssdtrain[deepspeed]'`, or set engine=plain."
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed sends between stages by broadcasting tensors that require a gradient.
    warnings.filterwarnings("ignore", "c10d::broadcast_: an autograd kernel")
    # ZeRO calls collectives by the names that torch 2.13 has replaced.
    renamed = r"`torch\.distributed\.\w+_tensor` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    return deepspeed


def join_deepspeed(deepspeed: Any) -> None:
    """Join the process group, or take the one that is there."""
    if deepspeed.comm.is_initialized():
        return
    if torch.cuda.is_available():
        deepspeed.init_distributed(dist_backend="nccl")
        return
    # On gloo DeepSpeed compiles a shared-memory all-reduce at start, which takes half
    # a minute and needs a C++ compiler. Saying that it is not compatible avoids both.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")


@contextmanager
def quiet() -> Iterator[None]:
    """Send what DeepSpeed prints to this module's debug log."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    for line in printed.getvalue().splitlines():
        _log.debug("%s", line)


def engine_config(settings: RunSettings) -> dict[str, Any]:
    """Return the DeepSpeed configuration that the settings imply, `engine.config`
    merged over. Raises ConfigError: DeepSpeed has no such precision."""
    train, engine = settings.train, settings.engine
    if train.precision is Precision.BF16_AUTOCAST:
        raise ConfigError(
            "train.precision=bf16-autocast is for engine=plain; DeepSpeed expects "
            "train.precision=bf16, fp16 or fp32."
        )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.num_micro_batches,
        "gradient_clipping": train.gradient_clipping,
        "steps_per_print": _NEVER,
        "zero_optimization": {"stage": engine.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": train.precision is Precision.BF16},
        "fp16": {"enabled": train.precision is Precision.FP16},
    }
    merged = OmegaConf.merge(config, engine.config or {})
    return cast(dict[str, Any], OmegaConf.to_container(merged))


class EngineRunner:
    """A DeepSpeed engine over a module: how it is built, saved, loaded and ended."""

    def __init__(self, deepspeed: Any, module: Any, settings: RunSettings) -> None:
        optimizer = build_optimizer(settings.train, module)
        self.attachable: Any
        self.attachable, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=build_schedule(settings.train, optimizer),
            config=engine_config(settings),
        )

    def save(self, directory: str, step: int) -> None:
        """Write this rank's part of a checkpoint; `latest` names the newest."""
        self.attachable.save_checkpoint(
            directory, tag=f"step{step}", client_state={"step": step}
        )

    def load(self, directory: str) -> int:
        """Read the newest checkpoint; return the step that comes next. Raises
        ConfigError: there is none."""
        path, state = self.attachable.load_checkpoint(directory)
        if path is None:
            raise ConfigError(
                f"train.resume expects a DeepSpeed checkpoint, got {directory}"
            )
        return int(state["step"])

    def close(self) -> None:
        """Let DeepSpeed take back what it hung on modules and optimizer."""
        self.attachable.destroy()
