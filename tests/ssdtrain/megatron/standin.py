"""Test-only stand-in for the GPU: megatron-core's code, unmodified, on gloo and CPU.

Megatron asks for "cuda" devices and for CUDA's random states. Here such devices are
the CPU, and the states are the CPU generator's own, so that Megatron's tracker of
random states works as on a GPU (dropout differs between tensor-parallel ranks).
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


class OnCpu(TorchFunctionMode):
    """Every device that is a GPU becomes the CPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers know their parameters by this name.
            return function(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") is not None and is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if function is torch.Tensor.to and len(args) > 1 and not is_tensor(args[1]):
            args = (args[0], CPU if is_device(args[1]) else args[1], *args[2:])
        return function(*args, **kwargs)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_device(value: Any) -> bool:
    return isinstance(value, int | str | torch.device) and is_cuda(value)


class NoFp8:
    is_fp8_enabled = staticmethod(lambda: False)


class OnlyStream:
    """The CPU's one stream: everything in it is done when it was asked for."""

    def wait(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = wait

    def record_event(self, *_: Any) -> "OnlyStream":
        return self


def nullcontext(**_: Any) -> Any:
    return contextlib.nullcontext()


def get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """As long as this lasts, Megatron trains on the CPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    replaced = [
        (token_dispatcher, "maybe_move_tensor_to_cpu", on_cpu),
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: OnlyStream()),
        (torch.cuda, "Stream", OnlyStream),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "set_rng_state", set_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_get_cuda_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
    ]
    # On a GPU a dropout does not touch the CPU's generator; here it is the same one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    with ExitStack() as stack:
        if not hasattr(random, "FP8GlobalStateManager"):
            # Transformer Engine is a GPU's; recomputed norms ask it whether fp8 is on.
            add = {"FP8GlobalStateManager": NoFp8, "fp8_autocast": nullcontext}
            add["activation_recompute_forward"] = nullcontext
            stack.enter_context(mock.patch.multiple(random, create=True, **add))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(OnCpu())
        yield
