"""The Python code around the operator that is saving a tensor.

[Note: unsaved tensors]
A chain of recipes may pass a tensor that nobody saved: autograd keeps the operators on
both sides of it, and nobody its version. If the model wrote to it in between (under
`no_grad`), its producer would make other bytes than the consumer read. Whether it did
may differ from step to step, so bytes that were equal once prove nothing. Each time,
one of these must hold:
- it is an argument of the innermost module that runs, still alive and at version 0
  (a linear under autocast, whose cast reads its argument);
- that module's forward is pure ([Note: pure code]) and made it: whatever is reached
  from a tensor of that frame without passing an argument was made in that call;
- a dropout saw it at version 0 when it began (`notes_of(...).witnessed`);
- it is a view of a tensor for which a guard or one of these holds: they share the
  version.
Otherwise the tensor is stored, and counted. Writes that no version counts (through
`.data`, or in kernels that do not tell autograd) are seen by the second alone.
(tests/ssdtrain/rebuild/test_attacks.py)

[Note: epsilon]
A fused normalization's node keeps no epsilon, its module's attribute need not be what
it was called with, and comparing bytes does not tell 1e-12 from 1e-8. But while the
operator saves its input, `torch.nn.functional.layer_norm` or `rms_norm` is running and
has the epsilon in its frame. One that was called past them has no recipe.
(tests/ssdtrain/rebuild/test_attacks.py)
"""

import sys
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.rebuild.expression import Epsilon
from ssdtrain.rebuild.purity import Purity

# Of hooks, and of the function mode behind `torch.set_default_device`.
_BETWEEN = (
    *("ssdtrain.cache", "ssdtrain.observe", "ssdtrain.rebuild"),
    *("torch._dynamo", "torch.utils._device"),
)
_CALL: CodeType = nn.Module._call_impl.__code__
# With hooks on the module the forward is called in there; they run outside of it.
_CALL_WITH_HOOKS = tuple(
    code
    for code in _CALL.co_consts
    if isinstance(code, CodeType) and code.co_name == "inner"
)
_NORMS: tuple[CodeType, ...] = (F.layer_norm.__code__, F.rms_norm.__code__)
# From an operator to its module's call: helpers of a pure forward, torch's functions.
MAX_FRAMES = 8


UNFUSED_GELU_ADDEND = 1.0


def is_unfused_gelu(module: nn.Module | None) -> bool:
    """transformers' NewGELU: 0.5 x (1.0 + tanh(...)), in separate operators.

    Its `1.0 +` is the one constant that no node shows.
    """
    kind = type(module)
    return (
        kind.__name__ == "NewGELUActivation"
        and kind.__module__ == "transformers.activations"
    )


def epsilon_now() -> Epsilon | None:
    """Of the normalization that is running: [Note: epsilon]."""
    frame = operators_frame()
    if frame is None:
        return None
    for code in _NORMS:  # two: a generator would cost more
        if frame.f_code is code:
            break
    else:
        return None
    value = frame.f_locals.get("eps")
    return Epsilon(value) if value is None or isinstance(value, float | int) else None


def operators_frame() -> FrameType | None:
    """The frame that called the operator whose hook is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


class CallerFrame:
    """The innermost module call, as it is now. Made when a tensor is saved."""

    def __init__(self, purity: Purity, frame: FrameType | None) -> None:
        """frame: that called the operator."""
        self.module: nn.Module | None = None
        """None: no module runs."""
        self.arguments: list[Any] = []
        self.is_pure = False
        """Whether the operator was called by a pure forward."""
        codes: list[CodeType] = []
        while frame is not None and len(codes) < MAX_FRAMES:
            if frame.f_code is _CALL:
                self._look_at(frame, codes, purity)
                return
            if not any(frame.f_code is code for code in _CALL_WITH_HOOKS):
                codes.append(frame.f_code)
            frame = frame.f_back

    def _look_at(self, call: FrameType, codes: list[CodeType], purity: Purity) -> None:
        found = call.f_locals
        module = found.get("self")
        if not isinstance(module, nn.Module):
            return
        self.module = module
        self.arguments = [*found.get("args", ()), *found.get("kwargs", {}).values()]
        certificate = purity.certificate(module)
        # A function mode, too, has a frame on the way, and is in no certificate.
        if certificate is not None and all(map(certificate.covers, codes)):
            self.is_pure = certificate.holds_for(module, self.arguments)

    @property
    def addend(self) -> float | None:
        """The number that the pure forward adds to a tensor of its own."""
        known = self.is_pure and is_unfused_gelu(self.module)
        return UNFUSED_GELU_ADDEND if known else None

    def saves(self, node: Any, number: int) -> bool:
        """Whether the running forward surely saves this output of a node, in an
        operator whose backward runs if any of its backwards does."""
        # The unfused GELU's power saves its argument.
        return self.addend is not None and self.argument(node, number) is not None

    def argument(self, node: Any, number: int) -> Tensor | None:
        """The argument that this output of this node is, or that is a view of it."""
        for tensor in self.arguments:
            if not isinstance(tensor, Tensor):
                continue
            whole = tensor if tensor._base is None else tensor._base
            for each in (tensor, whole):
                if each.grad_fn is node and each.output_nr == number:
                    return tensor
        return None
