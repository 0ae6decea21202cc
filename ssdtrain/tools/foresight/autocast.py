"""What `torch.autocast` does to a step that is captured on the meta device.

[Note: autocast without data]
Autocast does nothing to tensors of the meta device, and turns itself off where there is
no GPU: a step would be captured in single precision. So `torch.autocast` notes what it
was asked for, and functions get their arguments as the device's autocast would give
them, by the lists of torch's documentation. A weight is cast once, as autocast keeps
it. Of functions that torch composes in C++, the arguments are cast before.
(tests/ssdtrain/tools/foresight/test_users.py)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ssdtrain.tools.foresight.spec import Kind

LOWER = frozenset(
    (
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm"),
        *("addmv", "addr", "baddbmm", "addbmm", "chain_matmul", "multi_dot", "einsum"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "conv_tbc", "prelu", "gru_cell", "lstm_cell"),
        *("rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention"),
    )
)
"""Their floating-point arguments become the lower precision, on every device."""
SINGLE = frozenset(
    (
        *("__pow__", "__rpow__", "pow", "acos", "asin", "cosh", "sinh", "tan", "exp"),
        *("expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "erfinv"),
        *("layer_norm", "group_norm", "norm", "renorm", "dist", "cdist", "pdist"),
        *("cosine_similarity", "cosine_embedding_loss", "cross_entropy", "nll_loss"),
        *("binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "kl_div", "poisson_nll_loss", "hinge_embedding_loss"),
        *("margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "softplus", "softmin"),
        *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "normalize"),
    )
)
"""Single precision under CUDA's autocast."""
SINGLE_ON_CPU = frozenset(
    (
        *("mse_loss", "l1_loss", "smooth_l1_loss", "nll_loss", "cross_entropy"),
        *("cosine_embedding_loss", "poisson_nll_loss", "hinge_embedding_loss", "prod"),
        *("triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss"),
    )
)
LOWER_DTYPES: Mapping[Kind, torch.dtype] = {
    Kind.CUDA: torch.float16,
    Kind.CPU: torch.bfloat16,
}
"""Where autocast is given none."""
HALF = (torch.float16, torch.bfloat16)


class _Asked(NamedTuple):
    """What one `torch.autocast(...)` was asked for."""

    device_type: str
    dtype: torch.dtype | None
    enabled: bool


_ASKED = "_ssdtrain_asked"


class AutocastEmulation:
    """The present precision, and weights that were cast. One for a capture."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._entered: list[torch.dtype | None] = []
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it `torch.autocast` notes what it is asked for, and does nothing."""
        own: Any = torch.autocast
        kept = own.__init__, own.__enter__, own.__exit__

        def init(
            at: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            setattr(at, _ASKED, _Asked(device_type, dtype, enabled))

        def enter(at: Any) -> Any:
            asked = getattr(at, _ASKED, None)
            if asked is None:  # made before
                kept[1](at)
                asked = _Asked(at.device, at.fast_dtype, at._enabled)
            self._enter(asked)
            return at

        def leave(at: Any, *error: Any) -> Any:
            self._entered.pop()
            if not any(self._entered):
                self._weights.clear()
            return None if hasattr(at, _ASKED) else kept[2](at, *error)

        own.__init__, own.__enter__, own.__exit__ = init, enter, leave
        try:
            yield
        finally:
            own.__init__, own.__enter__, own.__exit__ = kept
            self._weights.clear()

    def _enter(self, asked: _Asked) -> None:
        present = self._entered[-1] if self._entered else None
        if asked.device_type in (self._kind.value, "meta"):
            lower = asked.dtype or LOWER_DTYPES[self._kind]
            present = lower if asked.enabled else None
        self._entered.append(present)

    def arguments(
        self, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Of a function, as autocast passes them on."""
        lower = self._entered[-1] if self._entered else None
        if lower is None:
            return args, kwargs
        name = getattr(function, "__name__", "")
        single = SINGLE if self._kind is Kind.CUDA else SINGLE_ON_CPU
        dtype = lower if name in LOWER else torch.float32 if name in single else None
        if dtype is None:
            return args, kwargs
        found: tuple[Any, Any] = tree_map(
            lambda value: self._cast(value, dtype, lower), (tuple(args), dict(kwargs))
        )
        return found

    def _cast(self, value: Any, dtype: torch.dtype, lower: torch.dtype) -> Any:
        eligible = (*HALF, torch.float32)
        if not isinstance(value, Tensor) or value.dtype not in eligible:
            return value
        if value.dtype is dtype:
            return value
        is_weight = value.is_leaf and value.requires_grad and dtype is lower
        known = self._weights.get(id(value)) if is_weight else None
        if known is not None and known[0] is value:
            return known[1]
        cast = value.to(dtype)
        if is_weight:
            self._weights[id(value)] = value, cast
        return cast
