"""Steps with tensors that are not plain, or are saved in unusual ways.

Each takes a program and a tensor and returns a tensor, as those of `generator.py`.
What ssdtrain cannot move (subclasses, DTensor, sparse, nested, other devices) must pass
through it unharmed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

Step = Callable[[Any, Tensor], Tensor]


def floating(tensor: Tensor) -> Tensor:
    """A real tensor of what is given."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def rows_of(tensor: Tensor) -> Tensor:
    """A real 2-D tensor with at least one element."""
    real = floating(tensor)
    flat = real.reshape(-1) if real.numel() else real.sum().reshape(1)
    return flat.reshape(2, -1) if flat.numel() % 2 == 0 else flat.reshape(1, -1)


def complexed(tensor: Tensor) -> Tensor:
    """A complex tensor of what is given."""
    if tensor.is_complex():
        return tensor
    real = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return torch.complex(real, real * 0.5)


class Named(Tensor):
    """A subclass that changes nothing."""


class Wrap(torch.autograd.Function):
    """Into a wrapper subclass of two tensors."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return TwoTensor(tensor.clone(), tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.a.clone() if isinstance(gradient, TwoTensor) else gradient


class Unwrap(torch.autograd.Function):
    """Out of it again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.a.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return TwoTensor(gradient.clone(), gradient.clone())


class Float8(torch.autograd.Function):
    """Saves a quantized copy and its scale, as TransformerEngine does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        scale = tensor.detach().abs().float().sum().clamp(min=1e-6) / 448
        ctx.save_for_backward((tensor / scale).to(torch.float8_e4m3fn), scale)
        return tensor * tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        quantized, scale = ctx.saved_tensors
        return gradient * 2 * (quantized.float() * scale).to(gradient.dtype)


class SavesOutput(torch.autograd.Function):
    """Saves an input and its own output."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        result = tensor * 2
        ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        tensor, result = ctx.saved_tensors
        return gradient * 2 + (result - 2 * tensor) * gradient


class Written(torch.autograd.Function):
    """Stands for a kernel: writes where its version does not show, and returns it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        if tensor.numel():
            # Through memory that torch does not know of, as Triton and C do.
            tensor.data.mul_(factor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Column(torch.autograd.Function):
    """Fills one column, as torchdiffeq's Runge-Kutta steps do."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, column: int) -> Tensor:
        ctx.column = column
        scratch.data[..., column] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient[..., ctx.column], None


def columns_filled(program: Any, tensor: Tensor) -> Tensor:
    """Each column is filled once, before it is first read."""
    rows, num = rows_of(tensor), program.random.randint(2, 4)
    scratch = rows.new_zeros(*rows.shape, num).detach()
    for column in range(num):
        scratch = Column.apply(scratch, rows.tanh() * (column + 1), column)
        known = scratch[..., : column + 1]
        weights = torch.linspace(1, 2, column + 1, dtype=rows.dtype).to(rows.device)
        rows = rows + (known * weights.requires_grad_()).sum(-1)
        rows = rows + (scratch[..., column] * scratch[..., column]) * 0.1
    return rows


def history_filled(program: Any, tensor: Tensor) -> Tensor:
    """A buffer that NumPy fills, read by parts and as a whole."""
    rows = rows_of(tensor).float()
    history = torch.zeros(4, *rows.shape)
    alias, total = history.numpy(), rows.sum() * 0
    for at in range(4):
        alias[at] = rows.detach().cpu().numpy() * (at + 1)
        part = history[: at + 1] if program.random.random() < 0.5 else history[at]
        total = total + (part.to(rows.device) * rows).sum()
    return total + (history.to(rows.device) * rows).tanh().sum()


def part_rotated(program: Any, tensor: Tensor) -> Tensor:
    """A joint projection; one part is saved, and then another one is rotated."""
    rows = rows_of(tensor)
    joint = torch.cat([rows, rows * 2, rows * 3], -1)
    if program.random.random() < 0.5:
        joint = joint * 1.5  # saves nothing: what was saved must not be written to
    query, key, value = joint.chunk(3, -1)
    saved = F.gelu(value) * value
    if program.random.random() < 0.7:
        query, key = Written.apply(query, 0.5), Written.apply(key, -1.5)
    elif joint.grad_fn.name() == "CatBackward0":
        # A kernel that is called on the tensor: the graph does not show it, and no
        # recipe makes it.
        query.data.mul_(0.25)
    return (query * key) * saved


def written_whole(_: Any, tensor: Tensor) -> Tensor:
    """What recipes make is written to before it is saved; a like one is not."""
    rows = rows_of(tensor)
    clean = F.gelu(F.silu(rows))
    made = Written.apply(F.silu(rows + 1), 0.5)
    return F.gelu(made) * clean


def saved_around_a_kernel(_: Any, tensor: Tensor) -> Tensor:
    """The first product dies unused: only what the second save saw counts."""
    fresh = floating(tensor) * 1
    fresh * fresh
    fresh = Written.apply(fresh, 0.5)
    return fresh * fresh


def subclass(_: Any, tensor: Tensor) -> Tensor:
    named = (tensor * 1).as_subclass(Named)
    return (named * named).as_subclass(Tensor)


def wrapper(_: Any, tensor: Tensor) -> Tensor:
    both = Wrap.apply(floating(tensor))
    return Unwrap.apply(both * both)


def distributed(_: Any, tensor: Tensor) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    there = DTensor.from_local(floating(tensor), mesh, [Replicate()], run_check=False)
    return (there * there).exp().to_local()


def sparse(_: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor).double()
    matrix = torch.eye(rows.shape[0], dtype=torch.float64).to_sparse()
    return torch.sparse.mm(matrix, rows * rows)


def nested(_: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor).float()
    ragged = torch.nested.as_nested_tensor([rows, rows * 2], layout=torch.jagged)
    return (ragged * ragged).to_padded_tensor(0.0)


def two_devices(_: Any, tensor: Tensor) -> Tensor:
    moved = tensor.to("cpu" if tensor.is_cuda else "cuda")
    return (moved * moved).to(tensor.device)


def in_place_on_view(_: Any, tensor: Tensor) -> Tensor:
    fresh = tensor * 1
    if fresh.dim():
        fresh[..., :1].mul_(0.5)
    return fresh * fresh


def view_then_change_base(_: Any, tensor: Tensor) -> Tensor:
    fresh = tensor * 1
    view = fresh.reshape(-1)[: max(1, fresh.numel() // 2)]
    fresh.mul_(2)
    return view * view


def masked_fill(_: Any, tensor: Tensor) -> Tensor:
    real = floating(tensor) * 1
    return real.masked_fill_(real.detach() > 0.5, 0.25) * 3


def bool_product(_: Any, tensor: Tensor) -> Tensor:
    real = floating(tensor)
    return real * (real.detach() > 0)


def integers(program: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor)
    index = torch.arange(rows.shape[1]).flip(0).expand_as(rows).to(rows.device)
    return rows.gather(1, index) * rows


def embedding(_: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor)
    index = torch.zeros(3, dtype=torch.long, device=rows.device)
    return F.embedding(index, rows)


def split(_: Any, tensor: Tensor) -> Tensor:
    parts = rows_of(tensor).unbind(0)
    return sum((part * part).sum() for part in parts) + parts[0]


def layer_norm(program: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor)
    return F.layer_norm(rows, rows.shape[1:]) * rows


def gelu(_: Any, tensor: Tensor) -> Tensor:
    real = floating(tensor)
    return F.gelu(real) * F.silu(real)


def cast(_: Any, tensor: Tensor) -> Tensor:
    low = floating(tensor).to(torch.bfloat16)
    return (low * low).float() * low.float()


def dropout(_: Any, tensor: Tensor) -> Tensor:
    real = floating(tensor)
    return F.dropout(real, 0.3) * real


def attention(_: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor).float()[None, None]
    return F.scaled_dot_product_attention(rows, rows, rows)


def parameter_view(program: Any, tensor: Tensor) -> Tensor:
    rows = rows_of(tensor)
    table = program.table.to(rows.dtype).t()[: rows.shape[1]]
    if table.shape[0] < rows.shape[1]:
        return rows.sum() * program.table.t().sum().to(rows.dtype)
    return rows @ table


def odd_address(_: Any, tensor: Tensor) -> Tensor:
    real = floating(tensor).to(torch.bfloat16).reshape(-1) * 1
    part = real[3::2]
    return part * part


def reentrant(_: Any, tensor: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: (x * x).tanh() * x, tensor, use_reentrant=True)


UNUSUAL: dict[str, Step] = {
    "subclass": subclass,
    "wrapper subclass": wrapper,
    "sparse": sparse,
    "nested": nested,
    "fp8 container": lambda p, t: Float8.apply(floating(t)),
    "columns filled": columns_filled,
    "history filled": history_filled,
    "part rotated": part_rotated,
    "written whole": written_whole,
    "saved around a kernel": saved_around_a_kernel,
    "saves its output": lambda p, t: SavesOutput.apply(t),
    "in place on a view": in_place_on_view,
    "view, base changed": view_then_change_base,
    "masked fill": masked_fill,
    "bool saved": bool_product,
    "integers saved": integers,
    "embedding": embedding,
    "unbind": split,
    "layer norm": layer_norm,
    "gelu and silu": gelu,
    "cast": cast,
    "dropout": dropout,
    "attention": attention,
    "parameter view": parameter_view,
    "odd address": odd_address,
    "reentrant checkpoint": reentrant,
    "conj view": lambda p, t: complexed(t).conj(),
    "neg view": lambda p, t: complexed(t).conj().imag,
}
TWO_DEVICES: dict[str, Step] = {"two devices": two_devices}
DISTRIBUTED: dict[str, Step] = {"DTensor": distributed}
