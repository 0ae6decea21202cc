"""Captures the execution graph of a training step on the meta device.

The model is built and run as it is, without a GPU and without memory; a dispatch mode
notes every operator that autograd leaves, in forward and backward. The optimizer's
update is added as the one fused operator that it is on a GPU. Steps that really run
(compiled, over several ranks) are captured by `steps.py` with the same `Recorder`.

[Note: as on the device]
The meta device takes some composite paths that the device does not. Attention, and for
CUDA dropout, are sent to the operators that the device runs. There is no data to look
into: a yes or no that the host asks a tensor for ("is nothing masked?") is taken as
yes, and counted in the graph's notes; a number that it asks for ends the capture with
an error.
(tests/ssdtrain/foresight/test_graph.py, tests/ssdtrain/foresight/test_own.py)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ssdtrain.errors import ConfigError
from ssdtrain.foresight.graph import Graph
from ssdtrain.foresight.overheads import Phase
from ssdtrain.foresight.recorder import STATES, Recorder
from ssdtrain.foresight.spec import Kind
from ssdtrain.foresight.steps import Collectives


def capture(
    model: nn.Module,
    forward: Callable[[], Any],
    *,
    optimizer: str | None = None,
    notes: dict[str, str] | None = None,
    on: Kind = Kind.CUDA,
) -> Graph:
    """The graph of one forward, backward and, where named, optimizer update.

    Args:
        model: its parameters are on the meta device.
        forward: runs it; gives a tensor, or a nest of them, that backward starts from.
        optimizer: a key of `STATES`; None: the step ends with backward.
        notes: go into the graph.
        on: the kind of device whose operators are recorded.

    Raises:
        ConfigError: nothing needs a gradient, the optimizer is unknown, or an operator
            needs data, which the meta device does not have.
    """
    if optimizer is not None and optimizer not in STATES:
        raise ConfigError(
            f"optimizer expects one of {', '.join(sorted(STATES))}, got {optimizer!r}"
        )
    recorder = Recorder(model, amend=Collectives().amend)
    record(recorder, forward, on)
    if optimizer is not None:
        recorder.update(optimizer)
    return recorder.graph(dict(notes or {}))


def loss_of(forward: Callable[[], Any]) -> list[Tensor]:
    """Run a forward; its floating-point results that need a gradient.

    Raises:
        ConfigError: there is none.
    """
    out = [x for x in tree_leaves(forward()) if isinstance(x, Tensor)]
    loss = [x for x in out if x.requires_grad and x.is_floating_point()]
    if not loss:
        raise ConfigError(
            "the model's function gave no floating-point tensor that needs a "
            "gradient; let it run the forward and give the loss."
        )
    return loss


def record(recorder: "Recorder", forward: Callable[[], Any], on: Kind) -> None:
    """Run forward and backward under a `Recorder`.

    Raises:
        ConfigError: nothing needs a gradient, or an operator needs data.
    """
    try:
        with recorder.modules(), AsOn(on), recorder:
            loss = loss_of(forward)
            recorder.phase = Phase.BACKWARD
            torch.autograd.backward(loss, [torch.ones_like(x) for x in loss])
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the step cannot be captured on the meta device: {error}. Values that "
            "the host looks into (Tensor.item(), boolean masks) have to be constants."
        ) from error


class AsOn(TorchFunctionMode):
    """See [Note: as on the device]."""

    def __init__(self, kind: Kind = Kind.CUDA) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            found = fused_attention(self._kind, *args, **kwargs)
            if found is not None:
                return found
        if func is F.dropout and self._kind is Kind.CUDA:
            found = fused_dropout(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def fused_attention(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor | None:
    """What the device runs for unmasked attention, CUDA in half precision and a CPU
    without dropout; else None."""
    if kind is Kind.CUDA:
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        fits = query.dtype in (torch.float16, torch.bfloat16)
    else:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        fits = dropout_p == 0.0
    if attn_mask is not None or not fits:
        return None
    out = fused(query, key, value, dropout_p, is_causal, scale=more.get("scale"))[0]
    return out  # type: ignore[no-any-return]


def fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """What CUDA runs for dropout out of place; None where that is nothing."""
    if not training or inplace or p == 0.0:
        return None
    return torch.native_dropout(input, p, True)[0]
