"""Small programs that have broken activation offloading, as data.

Each is a function of a `Runner` and returns the gradients to compare. The runner says
how forwards and steps are run: plainly, under ssdtrain, or under a peer
(`recipes/bench/safety/survival.py`). A program whose plain run raises must raise
elsewhere too. Sizes are above the least bytes that the peers move (1 KiB).
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

N = 48


class Holder(nn.Module):
    """Runs any function as its forward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(N, N, generator=generator))
        self.function: Callable[..., Any] = lambda holder, x: x

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Runner:
    """Plain autograd; others override the contexts."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.holder = Holder().to(device)

    def around_step(self) -> AbstractContextManager[Any]:
        """Around forward and backward."""
        return nullcontext()

    def around_forward(self) -> AbstractContextManager[Any]:
        """Around a forward."""
        return nullcontext()

    def forward(self, function: Callable[..., Any], *inputs: Any) -> Any:
        self.holder.function = function
        with self.around_forward():
            return self.holder(*inputs)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(shape or (N, N), generator=generator)
        if dtype.is_complex:
            drawn = torch.complex(drawn, drawn.flip(0))
        return drawn.to(self.device, dtype).requires_grad_()

    def gradient(self, function: Callable[..., Tensor], *inputs: Tensor) -> list[Any]:
        """One step."""
        self.holder.weight.grad = None
        with self.around_step():
            self.forward(function, *inputs).backward()
        return [*(x.grad for x in inputs), self.holder.weight.grad]


Scenario = Callable[[Runner], list[Any]]


def saved_twice_around_a_change(run: Runner) -> list[Any]:
    """The first product is logged and not differentiated, which is legal."""

    def forward(_: Holder, x: Tensor) -> Tensor:
        y = x * 1
        first = y * y
        others = x.sigmoid().tanh().sum()  # the first bytes leave
        y.add_(1)
        return (y * y).sum() + others + 0 * first.detach().sum()

    return run.gradient(forward, run.leaf())


def halves_of_one_storage(run: Runner) -> list[Any]:
    """What LSTM and GRU do: one storage, two version counters."""

    def forward(_: Holder, x: Tensor) -> Tensor:
        first, second = torch.unsafe_chunk(x * 2, 2)
        first = first.sigmoid_()
        others = x.sigmoid().tanh().sum()  # the first half leaves
        second = second.tanh_()
        return (first * first * second).sum() + (second * second).sum() + others

    return run.gradient(forward, run.leaf())


def tensor_and_its_transpose(run: Runner) -> list[Any]:
    def forward(_: Holder, x: Tensor) -> Tensor:
        y = x.exp()
        return ((y @ y.t()) * y.t()).sum()

    return run.gradient(forward, run.leaf())


def view_at_an_offset(run: Runner) -> list[Any]:
    def forward(_: Holder, x: Tensor) -> Tensor:
        y = (x * 2)[5:, 3:]
        z = (x * 3).reshape(-1)[7:]
        return (y * y).sum() + (z * z).sum()

    return run.gradient(forward, run.leaf())


def last_rows_strided(run: Runner) -> list[Any]:
    """as_strided at the end of a storage: out of bounds in a dense copy."""

    def forward(_: Holder, x: Tensor) -> Tensor:
        y = (x * 2).as_strided((N // 2, N), (2 * N, 1), N)
        return (y * y).sum()

    return run.gradient(forward, run.leaf())


def broadcast(run: Runner) -> list[Any]:
    def forward(_: Holder, x: Tensor) -> Tensor:
        y = (x[0] * 2).expand(2 * N, N)
        return (y * y.flip(0)).sum() + (y * y).sum()

    return run.gradient(forward, run.leaf())


def conj_and_neg_views(run: Runner) -> list[Any]:
    def forward(_: Holder, z: Tensor) -> Tensor:
        y = (z * 2).conj()
        return (y * y).real.sum() + (y.imag * y.imag).sum()

    return run.gradient(forward, run.leaf(N, N, dtype=torch.complex64))


def changed_after_save(run: Runner) -> list[Any]:
    """Plain autograd refuses it."""

    def forward(_: Holder, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * y
        y.add_(1)
        return z.sum()

    return run.gradient(forward, run.leaf())


def cheap_result_changed_after_save(run: Runner) -> list[Any]:
    """The same, where the result could be computed again."""

    def forward(m: Holder, x: Tensor) -> Tensor:
        y = F.gelu(x @ m.weight)
        z = y * y
        y.add_(1)
        return z.sum()

    return run.gradient(forward, run.leaf())


def weights_swapped_before_backward(run: Runner) -> list[Any]:
    """ZeRO-3 and FSDP: the parameter's memory is freed and comes back elsewhere."""
    x = run.leaf()
    weight = run.holder.weight
    with run.around_step():
        loss = run.forward(lambda m, t: (t @ m.weight.t()).square().sum(), x)
        value = weight.detach().clone()
        held = torch.empty(0, device=weight.device)
        weight.data = held
        gc.collect()
        weight.data = value * 1
        loss.backward()
    return [x.grad, weight.grad]


def backward_twice(run: Runner) -> list[Any]:
    x = run.leaf()
    with run.around_step():
        loss = run.forward(lambda m, t: F.gelu(t @ m.weight).square().sum(), x)
        loss.backward(retain_graph=True)
        loss.backward()
    return [x.grad]


def two_forwards_then_backwards(run: Runner) -> list[Any]:
    """Micro-batches of a pipeline."""
    x, y = run.leaf(), run.leaf()
    with run.around_step():
        first = run.forward(lambda m, t: F.gelu(t @ m.weight).square().sum(), x)
        second = run.forward(lambda m, t: F.gelu(t @ m.weight).exp().sum(), y)
        first.backward()
        second.backward()
    return [x.grad, y.grad]


def forward_without_backward(run: Runner) -> list[Any]:
    """A loss that was only logged; the next step must not care."""
    function = lambda m, t: F.gelu(t @ m.weight).square().sum()  # noqa: E731
    with run.around_step():
        loss = run.forward(function, run.leaf())
        del loss
    return run.gradient(function, run.leaf())


def evaluation_in_between(run: Runner) -> list[Any]:
    """Generation between forward and backward (GRPO)."""
    x = run.leaf()
    function = lambda m, t: F.gelu(t @ m.weight).square().sum()  # noqa: E731
    with run.around_step():
        loss = run.forward(function, x)
        with torch.no_grad():
            run.forward(function, run.leaf())
        loss.backward()
    return [x.grad]


def exception_in_forward(run: Runner) -> list[Any]:
    """A batch that fails is skipped; the next one trains."""

    def failing(m: Holder, t: Tensor) -> Tensor:
        F.gelu(t @ m.weight).square().sum()
        raise ValueError("bad batch")

    with suppress(ValueError), run.around_step():
        run.forward(failing, run.leaf())
    return run.gradient(lambda m, t: F.gelu(t @ m.weight).square().sum(), run.leaf())


def second_order(run: Runner) -> list[Any]:
    x = run.leaf()
    with run.around_step():
        loss = run.forward(lambda m, t: (t @ m.weight).tanh().square().sum(), x)
        (first,) = torch.autograd.grad(loss, [x], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), [x])
    return [second]


def checkpoint_inside(run: Runner) -> list[Any]:
    def forward(m: Holder, x: Tensor) -> Tensor:
        body = lambda t: F.gelu(t @ m.weight)  # noqa: E731
        for _ in range(3):
            x = checkpoint(body, x, use_reentrant=False)
        return x.square().sum()

    return run.gradient(forward, run.leaf())


def sparse_matrix(run: Runner) -> list[Any]:
    def forward(m: Holder, x: Tensor) -> Tensor:
        matrix = torch.eye(N, device=x.device).to_sparse()
        return torch.sparse.mm(matrix, x * x).square().sum()

    return run.gradient(forward, run.leaf())


def churn(run: Runner) -> list[Any]:
    """Forty steps of changing sizes: blocks and buffers are reused across steps."""
    found: list[Any] = []
    for step in range(40):
        rows = 64 + 32 * (step % 5)
        x = run.leaf(rows, N)

        def forward(m: Holder, t: Tensor) -> Tensor:
            for _ in range(6):
                t = F.gelu(t @ m.weight).tanh() + t
            return t.square().sum()

        found += run.gradient(forward, x)
    return found


class Row(NamedTuple):
    """One scenario and where it comes from."""

    scenario: Scenario
    evidence: str


ROWS = [
    Row(saved_twice_around_a_change, "one record per storage"),
    Row(halves_of_one_storage, "key without the base; LSTM, GRU"),
    Row(tensor_and_its_transpose, "ms-swift#10157"),
    Row(view_at_an_offset, "axolotl#3833"),
    Row(last_rows_strided, "TRL: as_strided out of bounds"),
    Row(broadcast, "stride-0 broadcast"),
    Row(conj_and_neg_views, "conj and neg bits"),
    Row(changed_after_save, "version check is lost under hooks"),
    Row(cheap_result_changed_after_save, "and under recomputation"),
    Row(weights_swapped_before_backward, "pytorch#106360, llama-cookbook#115"),
    Row(backward_twice, "retain_graph; DeepSpeed's tuple outputs"),
    Row(two_forwards_then_backwards, "pipeline micro-batches"),
    Row(forward_without_backward, "TRL#4280: tracker not cleared"),
    Row(evaluation_in_between, "Megatron#3043, NeMo-RL#2279"),
    Row(exception_in_forward, "hooks leak on an exception"),
    Row(second_order, "create_graph"),
    Row(checkpoint_inside, "pytorch#84907, verl#3629"),
    Row(sparse_matrix, "no storage to copy"),
    Row(churn, "Megatron#7398, torchtitan#2581, DeepSpeed#8186"),
]


def bytes_of(found: list[Any]) -> list[bytes | None]:
    """Gradients as bytes: NaN equals itself and -0 differs from 0."""
    return [
        None
        if g is None
        else g.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        for g in found
    ]


def verdict(row: Row, plain: Runner, other: Callable[[], Runner]) -> str:
    """`equal`, `refused` as plain autograd does, `WRONG` (silently) or the error."""
    try:
        expected: list[bytes | None] | None = bytes_of(row.scenario(plain))
    except RuntimeError:
        expected = None
    try:
        found = bytes_of(row.scenario(other()))
    except Exception as error:
        if expected is None and "inplace" in str(error):
            return "refused"
        return f"{type(error).__name__}: {error}".split("\n")[0][:90]
    if expected is None:
        return "WRONG: ran what autograd refuses"
    return "equal" if found == expected else "WRONG gradients"
