"""Captures the execution graph of a training step on the meta device, without a GPU: a
dispatch mode notes every operator that autograd leaves; the optimizer's update is added
as one fused operator. Steps that really run are captured by `steps.py`.

[Note: as on the device]
The meta device takes some composite paths that the device does not. Attention, and for
CUDA dropout, are sent to the operators that the device runs; `nn.MultiheadAttention`
and backward, which runs checkpointed forwards again, are looked into. There is no data:
a yes or no that the host asks a tensor for is taken as yes, and counted in the graph's
notes; a number that it asks for ends the capture with an error. What else a capture
leaves out goes into the notes as well (`caveats.py` puts them into words).
(tests/ssdtrain/tools/foresight/test_graph.py, test_own.py, test_users.py)
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.autocast import AutocastEmulation
from ssdtrain.tools.foresight.caveats import SCANNED, UNFUSED, caveats_of, explained
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.recorder import STATES, Recorder
from ssdtrain.tools.foresight.scans import fused_scans
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.steps import Collectives


def capture(
    model: nn.Module,
    forward: Callable[[], Any],
    *,
    optimizer: str | None = None,
    notes: dict[str, str] | None = None,
    on: Kind = Kind.CUDA,
) -> Graph:
    """The graph of one forward, backward and, where named, optimizer update, of a model
    on the meta device. Raises ConfigError: nothing needs a gradient, the optimizer is
    unknown, the forward raised, or an operator needs data. `forward`: gives what
    backward starts from; `optimizer`: a key of `STATES`; `notes`: go into the graph;
    `on`: whose operators."""
    if optimizer is not None and optimizer not in STATES:
        raise ConfigError(
            f"optimizer expects one of {', '.join(sorted(STATES))}, got {optimizer!r}"
        )
    recorder = Recorder(model, amend=Collectives().amend)
    seen = record(recorder, forward, on)
    if optimizer is not None:
        recorder.update(optimizer)
    return recorder.graph({**(notes or {}), **seen, **caveats_of(model, forward)})


def loss_of(forward: Callable[[], Any]) -> list[Tensor]:
    """Run a forward; give its results that need a gradient, or the loss alone where it
    is told by that name. Raises ConfigError: there is none."""
    given = forward()
    named = given.get("loss") if isinstance(given, Mapping) else None
    if isinstance(named, Tensor):
        given = named
    out = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    loss = [x for x in out if x.requires_grad and x.is_floating_point()]
    if not loss:
        raise ConfigError(
            "the model's function gave no floating-point tensor that needs a "
            "gradient; let it run the forward and give the loss."
        )
    return loss


def record(
    recorder: "Recorder", forward: Callable[[], Any], on: Kind
) -> dict[str, str]:
    """Run forward and backward under a `Recorder`; give what was left out, as notes.
    Raises ConfigError: as `capture` does."""
    autocast = AutocastEmulation(on)
    as_on = AsOn(on, autocast)
    none: AbstractContextManager[list[str]] = nullcontext([])
    fused = fused_scans() if on is Kind.CUDA else none
    try:
        with recorder.modules(), autocast.noted(), fused as scans, as_on, recorder:
            loss = loss_of(forward)
            recorder.phase = StepPhase.BACKWARD
            torch.autograd.backward(loss, [torch.ones_like(x) for x in loss])
    except ConfigError:
        raise
    except Exception as error:
        what = "the step cannot be captured on the meta device"
        raise explained(error, what) from error
    counts = {UNFUSED: as_on.num_unfused, SCANNED: len(scans)}
    return {name: str(count) for name, count in counts.items() if count}


class AsOn(TorchFunctionMode):
    """See [Note: as on the device]."""

    def __init__(
        self, kind: Kind = Kind.CUDA, autocast: AutocastEmulation | None = None
    ) -> None:
        super().__init__()
        self._kind = kind
        self._autocast = autocast or AutocastEmulation(kind)
        self.num_unfused = 0
        """Attentions that the device runs in one kernel, captured as several."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._autocast.arguments(func, args, kwargs or {})
        if func is Tensor.backward:
            func, (args, kwargs) = torch.autograd.backward, _of_engine(*args, **kwargs)
            with self:
                return func(*args, **kwargs)
        module = LOOKED_INTO.get(func)
        if module is not None and hasattr(module, "has_torch_function"):
            with self, _looked_into(module):
                return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            found = fused_attention(self._kind, *args, **kwargs)
            if found is not None:
                return found
            self.num_unfused += self._kind is Kind.CUDA
        if func is F.dropout and self._kind is Kind.CUDA:
            found = fused_dropout(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


LOOKED_INTO: Mapping[Callable[..., Any], Any] = {
    F.multi_head_attention_forward: F,
    torch.autograd.backward: torch.autograd,
    torch.autograd.grad: torch.autograd,
}
"""Functions that ask their module whether a mode is there, before they call others."""


def _of_engine(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `Tensor.backward` as `torch.autograd.backward` takes them."""
    return (tensor, gradient, retain_graph, create_graph), {"inputs": inputs}


@contextmanager
def _looked_into(module: Any) -> Iterator[None]:
    """Let the module's next function run its own body under a function mode."""
    own = module.has_torch_function

    def once(tensors: Any) -> bool:
        module.has_torch_function = own
        return False

    module.has_torch_function = once
    try:
        yield
    finally:
        module.has_torch_function = own


HALF = (torch.float16, torch.bfloat16)


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
    """What the device runs in one kernel: CUDA in half precision, and a CPU without
    dropout or a mask, each in batches of heads. Else None."""
    if query.dim() != 4:
        return None
    scale = more.get("scale")
    if kind is not Kind.CUDA:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        fits = dropout_p == 0.0 and attn_mask is None
    elif attn_mask is not None or query.shape[-1] != value.shape[-1]:
        return _masked_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale
        )
    else:
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        fits = query.dtype in HALF
    if not fits:
        return None
    out = fused(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out  # type: ignore[no-any-return]


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """What CUDA runs for attention with a mask or a bias, or values of another width
    than keys."""
    if query.dtype not in HALF or key.shape[1] != query.shape[1]:
        return None
    if mask is not None and mask.requires_grad and not is_causal:
        return _attention_with_learned_bias(query, key, value, mask, dropout_p, scale)
    bias = mask
    if mask is not None and mask.dtype is torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype)
        bias = bias.masked_fill(mask.logical_not(), -math.inf)
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    out = fused(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return out  # type: ignore[no-any-return]


def _attention_with_learned_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Operators in float32, as no kernel of one piece takes a bias that learns."""
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else abs(scale))
    scores = query.float() * root @ (key.float().transpose(-2, -1) * root)
    shares = torch.ops.aten._safe_softmax(scores.add_(bias), -1)
    if dropout_p > 0.0:
        shares = torch.native_dropout(shares, dropout_p, True)[0]
    found: Tensor = (shares @ value.float()).to(query.dtype)
    return found


def fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """What CUDA runs for dropout out of place; None where that is nothing."""
    if not training or inplace or p == 0.0:
        return None
    return torch.native_dropout(input, p, True)[0]
