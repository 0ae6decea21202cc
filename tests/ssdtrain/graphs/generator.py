"""Random differentiable programs: every way in which tensors share, change and hide.

A program is drawn from a seed and run twice, with and without a session; the law is
byte equality of all gradients, or the same refusal. Features are counted, so that a
campaign can say what it covered.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.ssdtrain.graphs.unusual import DISTRIBUTED, TWO_DEVICES, UNUSUAL

Step = Callable[["Program", Tensor], Tensor]
SIZES = [(4, 6), (3, 5), (2, 3, 4), (7,), (1, 8), (6, 6), (0, 3)]


class Program:
    """One random forward. Deterministic in its seed."""

    def __init__(self, seed: int, features: Counter[str], device: str = "cpu") -> None:
        self.device = device
        self.random = random.Random(seed)
        self.features = features
        self.size = self.random.choice(SIZES)
        self.dtype = self.random.choice(
            [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
        )
        self.length = self.random.randint(2, 9)
        self.live: list[Tensor] = []
        self.table: Tensor | None = None
        self.steps = available_steps()

    def inputs(self) -> list[Tensor]:
        """Leaves, drawn from torch's generator."""
        leaves = [torch.randn(self.size).to(self.dtype) for _ in range(2)]
        return [leaf.to(self.device).requires_grad_() for leaf in leaves]

    def run(self, module: Any, *leaves: Tensor) -> Tensor:
        """The forward: a scalar of everything that is still alive."""
        # Twice the same program: the choices are drawn again from a saved state.
        state = self.random.getstate()
        self.features[str(self.dtype).removeprefix("torch.")] += 1
        self.features["zero size"] += 0 in self.size
        self.table = module.table
        self.live = [leaf * 1 for leaf in leaves]
        self.live.append(module.weight * leaves[0].flatten().narrow(0, 0, 0).sum().real)
        for _ in range(self.length):
            name = self.random.choice(list(self.steps))
            tensor = self.pick()
            self.count(name, tensor)
            self.live.append(self.steps[name](self, tensor))
        result = torch.stack([self.scalar(t) for t in self.live]).sum()
        self.random.setstate(state)
        return result

    def count(self, name: str, tensor: Tensor) -> None:
        """What this step meets, for the campaign's account."""
        self.features[name] += 1
        for trait, present in (
            ("of a conj view", tensor.is_conj()),
            ("of a neg view", tensor.is_neg()),
            ("of a view", tensor._base is not None),
            ("of a tensor with gaps or strides", not tensor.is_contiguous()),
            ("of nothing", tensor.numel() == 0),
        ):
            self.features[trait] += present

    def pick(self) -> Tensor:
        """A tensor of the program so far, mostly a recent one."""
        return self.live[-1 - int(self.random.random() ** 2 * len(self.live))]

    def mate(self, tensor: Tensor) -> Tensor:
        """Another tensor of the same shape and dtype, or the tensor itself."""
        same = [
            t for t in self.live if t.shape == tensor.shape and t.dtype == tensor.dtype
        ]
        return self.random.choice(same) if same else tensor

    def scalar(self, tensor: Tensor) -> Tensor:
        """A double that depends on every element."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        return (tensor.double() * 0.5).tanh().sum()


def _view(change: Callable[[Program, Tensor], Tensor]) -> Step:
    def step(program: Program, tensor: Tensor) -> Tensor:
        return change(program, tensor)

    return step


def _matmul(program: Program, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor * tensor
    flat = tensor.reshape(tensor.shape[0], -1)
    return flat @ flat.t().conj()


def _in_place_before_save(program: Program, tensor: Tensor) -> Tensor:
    """Legal: the tensor is saved after the change."""
    fresh = tensor * 1
    fresh.mul_(0.5).add_(0.25)
    return fresh * fresh


def _in_place_after_save(program: Program, tensor: Tensor) -> Tensor:
    """Often illegal; then both sides must refuse."""
    fresh = tensor * 1
    out = fresh * fresh if program.random.random() < 0.5 else fresh + fresh
    fresh.add_(1)
    return out


def _save_twice_around_a_change(program: Program, tensor: Tensor) -> Tensor:
    """The first product dies unused: only the second save counts."""
    fresh = tensor * 1
    fresh * fresh
    fresh.add_(1)
    return fresh * fresh


def _unsafe_chunks(program: Program, tensor: Tensor) -> Tensor:
    fresh = tensor.reshape(-1) * 1
    parts = torch.unsafe_chunk(fresh, 2)
    changed = [part.mul_(n + 0.5) for n, part in enumerate(parts)]
    return sum((part * part).sum() for part in changed) + tensor.sum() * 0


def _strided(program: Program, tensor: Tensor) -> Tensor:
    fresh = tensor * 1
    count = fresh.numel()
    if count < 6:
        return fresh
    return fresh.reshape(-1).as_strided((2, 3), (1, 1), count - 5) * 2


def _odd_bytes(program: Program, tensor: Tensor) -> Tensor:
    fresh = tensor.reshape(-1) * 1
    odd = fresh[1:] if fresh.numel() > 1 else fresh
    return (odd * odd).sum() + tensor.sum()


def _mask(program: Program, tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return torch.where(real > 0, real, real * 0.5)


def _conj(program: Program, tensor: Tensor) -> Tensor:
    return tensor.conj() * tensor if tensor.is_complex() else tensor * 2


def _neg(program: Program, tensor: Tensor) -> Tensor:
    if not tensor.is_complex():
        return -tensor
    hidden = tensor.conj().imag
    return hidden * hidden


def _checkpoint(program: Program, tensor: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: (x * x).tanh() * x, tensor, use_reentrant=False)


STEPS: dict[str, Step] = {
    "exp": lambda p, t: (t * 0.1).exp(),
    "tanh": lambda p, t: t.tanh(),
    "sigmoid": lambda p, t: t.sigmoid(),
    "multiply": lambda p, t: t * p.mate(t),
    "divide": lambda p, t: t / (p.mate(t).abs() + 1),
    "matmul": _matmul,
    "transpose": _view(lambda p, t: t.transpose(0, -1) if t.dim() else t),
    "expand": _view(lambda p, t: t.unsqueeze(0).expand(3, *t.shape)),
    "slice": _view(lambda p, t: t[..., 1:] if t.dim() and t.shape[-1] else t),
    "step slice": _view(lambda p, t: t[..., ::2] if t.dim() else t),
    "select": _view(lambda p, t: t[0] if t.dim() and t.shape[0] else t),
    "reshape": _view(lambda p, t: t.reshape(-1)),
    "flip": lambda p, t: t.flip(0) if t.dim() else t,
    "diagonal": _view(lambda p, t: t.diagonal() if t.dim() == 2 else t),
    "contiguous": lambda p, t: t.transpose(0, -1).contiguous() if t.dim() else t,
    "in place before save": _in_place_before_save,
    "in place after save": _in_place_after_save,
    "save twice": _save_twice_around_a_change,
    "unsafe chunks": _unsafe_chunks,
    "strided": _strided,
    "odd bytes": _odd_bytes,
    "where": _mask,
    "conj": _conj,
    "neg": _neg,
    "checkpoint": _checkpoint,
    "detach": lambda p, t: t * t.detach(),
    "softmax": lambda p, t: _mask(p, t).softmax(-1) if t.dim() else t * t,
    "concatenate": lambda p, t: torch.cat([t, t * 2]) if t.dim() else t,
    "norm": lambda p, t: t / (t.abs().square().sum() + 1).sqrt(),
    "cumulative product": lambda p, t: t.cumprod(0) if t.dim() else t,
    **UNUSUAL,
}


def available_steps() -> dict[str, Step]:
    """DTensor needs a process group, and two devices a GPU."""
    distributed = torch.distributed
    steps = dict(STEPS)
    if distributed.is_available() and distributed.is_initialized():
        steps |= DISTRIBUTED
    if torch.cuda.is_available():
        steps |= TWO_DEVICES
    return steps


class Holder(nn.Module):
    """A module around a program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.linspace(-1, 1, 64).reshape(4, 16))
        self.program: Program | None = None

    def forward(self, *leaves: Tensor) -> Tensor:
        if self.program is None:
            raise RuntimeError("no program")
        return self.program.run(self, *leaves)


class Outcome(dict[str, Any]):
    """Gradients as bytes, or the kind of refusal."""


def outcome(holder: Holder, seed: int, features: Counter[str]) -> Outcome:
    """Run the program of this seed forward and backward."""
    torch.manual_seed(seed)
    device = holder.weight.device.type
    holder.program = program = Program(seed, features, device)
    holder.zero_grad()
    leaves = program.inputs()
    try:
        loss = holder(*leaves)
        # Some graphs are walked twice: what was stored must outlive its first use.
        for again in range(2 if seed % 8 == 0 else 1):
            features["backward twice"] += again
            loss.backward(retain_graph=seed % 8 == 0)
    except RuntimeError as error:
        return Outcome(refused="inplace" in str(error), text=str(error))
    found = [leaf.grad for leaf in [*leaves, holder.weight, holder.table]]
    return Outcome(gradients=[None if g is None else as_bytes(g) for g in found])


def as_bytes(tensor: Tensor) -> bytes:
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .cpu()
        .numpy()
        .tobytes()
    )


def difference(ours: Outcome, theirs: Outcome) -> str | None:
    """What is different, or None. An in-place refusal equals an in-place refusal."""
    if "gradients" in theirs and "gradients" in ours:
        same = ours["gradients"] == theirs["gradients"]
        return None if same else "gradients differ"
    if ours.get("refused") and theirs.get("refused"):
        return None
    if "text" in ours and ours.get("text") == theirs.get("text"):
        return None
    return f"ours {ours.get('text', 'ran')}; theirs {theirs.get('text', 'ran')}"
