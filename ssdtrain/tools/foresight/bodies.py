"""Runs calls on a device: the operator that each call stands for, on normal random
numbers (their bits move the device's power), in as many copies as keep the L2 cache
cold."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import Call, KernelFamily

COLD_BYTES = 150e6
MAX_COPIES = 8
POOL_BYTES = {"cuda": 6 << 30, "cpu": 1 << 28}
ALIGNMENT = 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LR, EPS = 1e-6, 1e-5
aten = torch.ops.aten

Body = Callable[[], Any]
"""Runs the operator once on one copy of its tensors."""


class Pool:
    """Normal random numbers on a device, in slices one after the other, which is faster
    than drawing; the next slice is cold, as the pool is many times the cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        num_bytes = POOL_BYTES.get(device.type, POOL_BYTES["cpu"])
        self._pools: dict[torch.dtype, Tensor] = {}
        for dtype in (torch.bfloat16, torch.float32):
            count = num_bytes // dtype.itemsize
            self._pools[dtype] = torch.randn(count, device=device, dtype=dtype)
        self._at = dict.fromkeys(self._pools, 0)

    def normal(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """A contiguous tensor; nobody else's until the pool has gone round."""
        if dtype not in self._pools:
            return torch.randn(shape, device=self.device, dtype=dtype)
        pool, count = self._pools[dtype], math.prod(shape)
        if count > pool.numel():
            return torch.randn(shape, device=self.device, dtype=dtype)
        step = ALIGNMENT // dtype.itemsize
        start = self._at[dtype]
        if start + count > pool.numel():
            start = 0
        self._at[dtype] = start + -(-count // step) * step
        return pool[start : start + count].view(shape).detach()


def bodies_of(call: Call, pool: Pool) -> tuple[Call, list[Body]]:
    """The call as it was really drawn, and one body for each copy of its tensors."""
    maker = _MAKERS[call.family]
    copies = 1
    if call.warm_bytes == 0.0 or call.family is KernelFamily.LOOKUP:
        needed = math.ceil(COLD_BYTES / max(call.num_bytes, 1.0))
        copies = max(1, min(MAX_COPIES, needed + (needed > 1)))
    drawn, bodies = call, []
    for _ in range(copies):
        drawn, body = maker(call, _Tensors(call, pool))
        bodies.append(body)
    return drawn, bodies


class _Tensors:
    """Makes the tensors of one call."""

    def __init__(self, call: Call, pool: Pool) -> None:
        self.dtype = DTYPES[call.dtype]
        self.device = pool.device
        self._pool = pool

    def normal(self, *shape: int) -> Tensor:
        return self._pool.normal(self.dtype, *shape)

    def mask(self, rows: int, columns: int) -> Tensor:
        return self.normal(rows, columns) > 0


def _ints(call: Call, *names: str) -> list[int]:
    return [int(call.sizes[name]) for name in names]


def _product(call: Call, make: _Tensors) -> tuple[Call, Body]:
    batch, m, n, k = _ints(call, "batch", "m", "n", "k")
    lead = (batch,) if batch > 1 else ()
    first, second = call.variant[0], call.variant[1]
    a = make.normal(*lead, k, m).mT if first == "t" else make.normal(*lead, m, k)
    b = make.normal(*lead, n, k).mT if second == "t" else make.normal(*lead, k, n)
    if call.sizes["bias"]:
        bias = make.normal(n)
        return call, lambda: torch.addmm(bias, a, b)
    return call, (lambda: torch.bmm(a, b)) if batch > 1 else (lambda: torch.mm(a, b))


def _attention(call: Call, make: _Tensors) -> tuple[Call, Body]:
    names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
    batch, heads, kv_heads, queries, keys, head_dim = _ints(call, *names)
    # Laid out as models make them: (batch, sequence, heads, dim), transposed.
    query = make.normal(batch, queries, heads, head_dim).transpose(1, 2)
    key = make.normal(batch, keys, kv_heads, head_dim).transpose(1, 2)
    value = make.normal(batch, keys, kv_heads, head_dim).transpose(1, 2)
    inputs = [t.requires_grad_() for t in (query, key, value)]
    dropout_p = 0.1 if call.sizes["dropout"] else 0.0

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout_p,
            is_causal=bool(call.sizes["causal"]),
            enable_gqa=heads != kv_heads,
        )

    if call.variant == "forward":
        return call, forward
    with torch.enable_grad():
        out = forward()
    gradient = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return call, backward


def _norm(call: Call, make: _Tensors) -> tuple[Call, Body]:
    rows, columns = _ints(call, "rows", "columns")
    x = make.normal(rows, columns)
    name = call.variant
    if name == "softmax":
        return call, lambda: aten._softmax(x, -1, False)
    if name == "log_softmax":
        return call, lambda: aten._log_softmax(x, -1, False)
    gradient = make.normal(rows, columns)
    if name == "softmax_backward":
        return call, lambda: aten._softmax_backward_data(gradient, x, -1, x.dtype)
    if name == "log_softmax_backward":
        return call, lambda: aten._log_softmax_backward_data(gradient, x, -1, x.dtype)
    weight, bias = make.normal(columns), make.normal(columns)
    shape = [columns]
    if name == "layer_norm":
        return call, lambda: aten.native_layer_norm(x, shape, weight, bias, EPS)
    if name == "rms_norm":
        return call, lambda: aten._fused_rms_norm(x, shape, weight, EPS)
    if name == "layer_norm_backward":
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, EPS)
        mask = [True, True, True]
        return call, lambda: aten.native_layer_norm_backward(
            gradient, x, shape, mean, rstd, weight, bias, mask
        )
    _, rstd = aten._fused_rms_norm(x, shape, weight, EPS)
    return call, lambda: aten._fused_rms_norm_backward(
        gradient, x, shape, rstd, weight, [True, True]
    )


def _memory(call: Call, make: _Tensors) -> tuple[Call, Body]:
    rows, columns = _ints(call, "rows", "columns")
    name = call.variant
    x = make.normal(rows, columns)
    if name in _UNARY:
        function = _UNARY[name]
        return call, lambda: function(x)
    if name == "permute":
        # Two heads and two rows at least: of one, `contiguous` would copy nothing.
        heads = next(
            h for h in (16, 8, 4, 2, *range(3, columns + 1)) if columns % h == 0
        )
        groups = next(g for g in (8, 4, 2, 1) if rows % g == 0 and rows > g)
        shaped = x.view(groups, rows // groups, heads, columns // heads)
        return call, lambda: shaped.transpose(1, 2).contiguous()
    if name == "cat":
        half = max(1, columns // 2)
        first, second = x[:, :half].contiguous(), x[:, half:].contiguous()
        return call, lambda: torch.cat([first, second], dim=-1)
    if name == "where":
        mask, other = make.mask(rows, columns), make.normal(rows, columns)
        return call, lambda: torch.where(mask, x, other)
    if name == "dropout_backward":
        mask = make.mask(rows, columns)
        return call, lambda: aten.native_dropout_backward(x, mask, 1.1)
    if name == "mul_strided":
        heads = next(h for h in (16, 8, 4, 2, 1) if rows % h == 0)
        turned = make.normal(heads, rows // heads, columns).transpose(0, 1)
        x = x.view(rows // heads, heads, columns)
        return call, lambda: x * turned
    if name in ("mul_rows", "mul_columns"):
        few = make.normal(1, columns) if name == "mul_rows" else make.normal(rows, 1)
        return call, lambda: x * few
    y = make.normal(rows, columns)
    binary = _BINARY[name]
    return call, lambda: binary(x, y)


_UNARY: dict[str, Callable[[Tensor], Any]] = {
    "fill": torch.zeros_like,
    "copy": torch.clone,
    "scale": lambda x: x * 0.5,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "square": lambda x: x.pow(2),
    "dropout": lambda x: torch.native_dropout(x, 0.1, True),
    "sum_rows": lambda x: x.sum(0, keepdim=True),
    "sum_columns": lambda x: x.sum(1, keepdim=True),
    "sum_all": torch.sum,
    "cast_up": lambda x: x.float() if x.dtype != torch.float32 else x.double(),
    "cast_down": lambda x: x.bfloat16(),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "relu_backward": lambda x, y: aten.threshold_backward(x, y, 0),
    "gelu_backward": aten.gelu_backward,
    "silu_backward": aten.silu_backward,
    "tanh_backward": aten.tanh_backward,
}


def draw_indices(rows: int, table_rows: int, skew: float, device: Any) -> Tensor:
    """Row numbers with Zipf's exponent `skew` (0: uniform), by inverting a power law's
    integral; popular rows are scattered over the table."""
    u = torch.rand(rows, device=device, dtype=torch.float64)
    if skew <= 0.0:
        return (u * table_rows).long().clamp_(max=table_rows - 1)
    if abs(skew - 1.0) < 1e-3:
        rank = torch.exp(u * math.log(table_rows))
    else:
        power = 1.0 - skew
        rank = (u * (table_rows**power - 1.0) + 1.0) ** (1.0 / power)
    rank = (rank.long() - 1).clamp_(0, table_rows - 1)
    return rank * 2_654_435_761 % table_rows


def _lookup(call: Call, make: _Tensors) -> tuple[Call, Body]:
    rows, columns, table_rows = _ints(call, "rows", "columns", "table_rows")
    skew = call.sizes.get("skew", 0.0)
    index = draw_indices(rows, table_rows, skew, make.device)
    drawn = calls.lookup(
        call.variant,
        rows=rows,
        columns=columns,
        table_rows=table_rows,
        distinct_rows=int(index.unique().numel()),
        dtype=call.dtype,
    )
    if call.variant == "lookup":
        table = make.normal(table_rows, columns)
        return drawn, lambda: aten.embedding(table, index)
    values = make.normal(rows, columns)
    if call.variant == "lookup_backward":
        return drawn, lambda: aten.embedding_dense_backward(
            values, index, table_rows, -1, False
        )
    table = make.normal(table_rows, columns)
    return drawn, lambda: table.index_add_(0, index, values)


def _convolution(call: Call, make: _Tensors) -> tuple[Call, Body]:
    names = ("batch", "channels", "side", "filters", "kernel", "stride")
    batch, channels, side, filters, kernel, stride = _ints(call, *names)
    padding = 0 if stride == kernel else kernel // 2
    x = make.normal(batch, channels, side, side)
    weight = make.normal(filters, channels, kernel, kernel)

    def forward() -> Tensor:
        return F.conv2d(x, weight, stride=stride, padding=padding)

    if call.variant == "forward":
        return call, forward
    gradient = torch.randn_like(forward())
    mask = [bool(call.sizes["input_gradient"]), True, False]
    where = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)
    return call, lambda: aten.convolution_backward(gradient, x, weight, None, *where)


def _optimizer(call: Call, make: _Tensors) -> tuple[Call, Body]:
    elements, tensors = _ints(call, "elements", "tensors")
    each = elements // tensors

    def states(count: int) -> list[list[Tensor]]:
        """None below 0: the root of some is taken."""
        return [
            [make.normal(each).abs_() for _ in range(tensors)] for _ in range(count)
        ]

    steps = [
        torch.ones((), dtype=torch.float32, device=make.device) for _ in range(tensors)
    ]
    if call.variant == "adamw":
        params, grads, means, squares = states(4)
        adam: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "lr": LR}
        adam |= {"weight_decay": 0.01, "amsgrad": False, "maximize": False}
        return call, lambda: torch._fused_adamw_(
            params, grads, means, squares, [], steps, **adam
        )
    momentum = 0.9 if call.variant == "sgd_momentum" else 0.0
    params, grads, moments = [*states(2), states(1)[0] if momentum else []]
    sgd: dict[str, Any] = {"weight_decay": 0.0, "momentum": momentum, "lr": LR}
    sgd |= {"dampening": 0.0, "nesterov": False, "maximize": False}
    return call, lambda: torch._fused_sgd_(
        params, grads, moments, **sgd, is_first_step=False
    )


_MAKERS: dict[KernelFamily, Callable[[Call, _Tensors], tuple[Call, Body]]] = {
    KernelFamily.PRODUCT: _product,
    KernelFamily.ATTENTION: _attention,
    KernelFamily.NORM: _norm,
    KernelFamily.MEMORY: _memory,
    KernelFamily.LOOKUP: _lookup,
    KernelFamily.CONVOLUTION: _convolution,
    KernelFamily.OPTIMIZER: _optimizer,
}
