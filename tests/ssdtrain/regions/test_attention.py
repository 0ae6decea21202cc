"""What a plan stores of attention is taken in a re-run, and never anything else."""

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.cache import verify
from ssdtrain.cache.attention import Spare
from ssdtrain.counters import Fallback
from ssdtrain.errors import ActivationChangedError, RegionError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import Item
from ssdtrain.regions import attention
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.graphs.layers import Doubled
from tests.ssdtrain.regions.plans import some_again

WIDTH, HEADS, LENGTH = 32, 4, 24
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1,
    "window_bytes": 1 << 14,
}
NUM_OBSERVED, NUM_STEPS = 2, 7


class Block(nn.Module):
    """Attention with rotated queries and keys, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return found

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 2 * HEADS, -1)
        q, k, v = parts.transpose(1, 2).split([HEADS, HEADS // 2, HEADS // 2], 1)
        q, k = q * angle.cos() + q.flip(-1) * angle.sin(), k * angle.cos()
        found = self.attend(q, k, v)
        x = x + self.dropout(self.out(found.transpose(1, 2).reshape(batch, length, -1)))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        angle = torch.arange(x.shape[1]).view(1, 1, -1, 1) / 100
        for block in self.blocks:
            x = block(x, angle)
        return x


def batch(number: int, length: int = LENGTH) -> Tensor:
    torch.manual_seed(100 + number)
    return torch.randn(2, length, WIDTH)


def mean(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(batch(number)).square().mean()
    return loss


def planned(
    session: ssdtrain.Session,
    stored: Placement = Placement.KEEP,
    num_storing: int | None = None,
) -> None:
    """Follow a plan in which all regions run again, and the results of attention in so
    many of them are placed so."""

    def place(item: Item) -> Placement:
        return stored if item.region >= 0 else Placement.KEEP

    session.follow(some_again(session, place, num_storing=num_storing))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happens to the attention calls of re-runs."""
    told: list[str] = []
    serve = attention.RerunAttention.serve

    def serving(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        made = serve(self, func, args, kwargs)
        if func._schema.name in attention.OPERATORS:
            is_taken = self._is_open and self._call.is_answer
            told.append("taken" if is_taken else "computed")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(attention.RerunAttention, "serve", serving)
        yield told


def run_both(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    loss_of: Callable[[nn.Module, int], Tensor] = mean,
    settings: dict[str, Any] | None = None,
    **plan: Any,
) -> tuple[list[str], ssdtrain.Session]:
    """Plain training, and training under a plan that stores attention: the same bits.

    Returns:
        What happened to attention in the last step's re-runs, and the session.
    """
    plain = list(train(copy.deepcopy(model), loss_of, NUM_STEPS))
    own = {**SETTINGS, **(settings or {})}
    session = ssdtrain.offload(model, **own, recompute="regions")
    with session, counted(monkeypatch) as told:
        for number, found in enumerate(train(model, loss_of, NUM_STEPS)):
            assert same_bits(found, plain[number]), number
            if number == NUM_OBSERVED:
                planned(session, **plan)
            last = list(told)
            told.clear()
    return last, session


@pytest.mark.parametrize("stored", [Placement.KEEP, Placement.OFFLOAD])
def test_what_is_stored_is_taken(
    stored: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, session = run_both(Net(), monkeypatch, stored=stored)
    assert told == ["taken"] * 3
    last = session.last_step
    assert last is not None and not last.fallbacks, last
    assert last.recipes["region"] > 0
    if stored is Placement.OFFLOAD:
        assert last.bytes_offloaded > 0


def test_a_plan_may_store_it_in_some_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    told, session = run_both(Net(), monkeypatch, num_storing=1)
    assert told == ["taken"]  # in the others no mode stands
    assert session.last_step is not None and not session.last_step.fallbacks


def test_it_comes_back_from_an_ssd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"max_overhead": 0.01, "target": "ssd", "directory": str(tmp_path)}
    told, session = run_both(
        Net(), monkeypatch, settings=settings, stored=Placement.OFFLOAD_SSD
    )
    assert told == ["taken"] * 3
    last = session.last_step
    assert last is not None and last.bytes_written > 0 and not last.fallbacks


@pytest.mark.parametrize("num_storing", [2, 1])
def test_statistics_below_min_bytes_stay(
    num_storing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No item of a plan: too small; but not tiny."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        loss: Tensor = model(batch(number, 136)).square().mean()
        return loss

    told, session = run_both(
        Net(num_blocks=2),
        monkeypatch,
        loss_of,
        settings={"max_overhead": 0.01, "min_bytes": 8192},
        num_storing=num_storing,
    )
    assert told == ["taken"] * num_storing
    assert session.profile is not None
    for run in session.profile.regions["model/0"]:
        ((item,),) = (part.items for part in run.parts)
        assert "FlashAttention" in session.profile.kinds["model/0"][item].name
    assert session.last_step is not None and not session.last_step.fallbacks


class Masked(Block):
    """A mask instead of causality, and as many keys as queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mask = torch.ones(q.shape[-2], q.shape[-2]).tril().log()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)


class TwoInARow(Block):
    """The output of the first is the query of the second."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = super().attend(q, k, v)
        return super().attend(first, k, v) + first * first


class Below(TorchDispatchMode):
    """A mode of the program's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Entering(Block):
    """It enters a mode around attention, and leaves it behind."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with Below():
            return super().attend(q, k, v)


class Peeking(Block):
    """The same call without gradients stands before the one that counts."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            super().attend(q, k, v)
        return super().attend(q, k, v)


class Checkpointed(Block):
    """The same call in a checkpoint of the program's stands before it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = super().attend
        first = checkpoint(attend, q, k, v, use_reentrant=False)
        return first + attend(q, k, v)


class Cast(Block):
    """Under autocast."""

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, angle)


@pytest.mark.parametrize(
    ("block", "num_taken"),
    [
        (Masked, 2),
        (TwoInARow, 4),
        (Entering, 0),  # the mode might change what it is given
        (Peeking, 2),
        (Checkpointed, 2),
        (Cast, 2),
    ],
)
def test_models_that_call_it_otherwise(
    block: type[Block], num_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, session = run_both(Net(block, 2), monkeypatch)
    assert told.count("taken") == num_taken, told
    assert session.last_step is not None and not session.last_step.fallbacks


class Later(Block):
    """It enters a mode around attention, once the plan knows where attention is."""

    is_last = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with Doubled() if Later.is_last else nullcontext():
            return super().attend(q, k, v)


def test_a_mode_that_is_entered_behind_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        monkeypatch.setattr(Later, "is_last", number == NUM_STEPS - 1)
        return mean(model, number)

    told, _ = run_both(Net(Later, 2), monkeypatch, loss_of)
    assert told == ["computed"] * 2


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As flash-attn's own operator: output, statistics, a mask, a generator's state."""
    scores = q @ k.transpose(-2, -1)
    statistics = scores.logsumexp(-1)
    output = (scores - statistics.unsqueeze(-1)).exp() @ v
    return output, statistics, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


class FlashAttnFunc(torch.autograd.Function):
    """As flash-attn's: what it saves is made without a node."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, statistics, _, state = flash_forward(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, output, statistics, state)
        return output[..., : v.shape[-1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, output, statistics, _ = ctx.saved_tensors
        (grad,) = grads
        p = (q @ k.transpose(-2, -1) - statistics.unsqueeze(-1)).exp()
        ds = p * (grad @ v.transpose(-2, -1) - (grad * output).sum(-1, keepdim=True))
        return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad


class Flash(Block):
    """By a function of Python's, around an operator of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return FlashAttnFunc.apply(q, k, v)  # type: ignore[no-any-return]


def test_flash_attns_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    told, session = run_both(Net(Flash, 2), monkeypatch)
    assert told == ["taken"] * 2
    assert session.last_step is not None and not session.last_step.fallbacks


class Eager(Block):
    """No operator of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1)
        return scores.softmax(-1) @ v.repeat_interleave(2, 1)


def test_eager_attention_has_nothing_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    told, session = run_both(Net(Eager, 2), monkeypatch)
    assert not told and session.profile is not None
    assert not any(run.parts for run in session.profile.regions["model/0"])


class Scaled(Block):
    """Its scores' scale is set from outside."""

    scale = 0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, scale=self.scale
        )
        return found


def test_other_arguments_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        for block in model.blocks:  # type: ignore[union-attr]
            block.scale = 0.5 if number < NUM_STEPS - 2 else 0.25  # type: ignore[union-attr]
        return mean(model, number)

    told, session = run_both(Net(Scaled), monkeypatch, loss_of)
    assert told == ["taken"] * 3
    reason = Fallback.ATTENTION_COMPUTED.value
    counts = [step.fallbacks.get(reason, 0) for step in session.steps]
    assert counts[-3:] == [0, 3, 0]


def test_nothing_is_left_of_a_rerun() -> None:
    """What was taken is a part of its graph, whose nodes hold their hooks."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        assert session.cache.is_idle, number
        return mean(model, number)

    model = Net(num_blocks=2)
    gc.disable()
    try:
        with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
            for number, _ in enumerate(train(model, loss_of, NUM_STEPS)):
                if number == NUM_OBSERVED:
                    planned(session)
    finally:
        gc.enable()


# -- what must not go wrong -----------------------------------------------------------


def trained(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor] = mean,
    **settings: Any,
) -> None:
    """Some steps under a plan that stores attention."""
    own = {**SETTINGS, **settings, "recompute": "regions"}
    with ssdtrain.offload(model, **own) as session:
        for number, _ in enumerate(train(model, loss_of, NUM_OBSERVED + 4)):
            if number == NUM_OBSERVED:
                planned(session)


class Changing(Block):
    """Changes something in place once it is told to."""

    what = ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = super().attend(q, k, v)
        if self.what:
            with torch.no_grad():
                {"query": q, "result": found}[self.what].mul_(2.0)
        return found


@pytest.mark.parametrize("what", ["query", "result"])
def test_what_is_changed_in_place_raises(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(Changing, 2)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        if number == NUM_OBSERVED + 3:
            monkeypatch.setattr(Changing, "what", what)
        return mean(model, number)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(model, loss_of)


class Fewer(Block):
    """Its re-run leaves attention out."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1 and lazy:
            return q * k[:, :1] * v[:, :1]
        return super().attend(q, k, v)


lazy: list[bool] = []


def test_a_rerun_without_the_call_raises() -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        lazy[:] = [True] * (number > NUM_OBSERVED + 2)
        return mean(model, number)

    try:
        with pytest.raises(RegionError):
            trained(Net(Fewer, 2), loss_of)
    finally:
        lazy.clear()


def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored comes back with a wrong byte."""
    find = Spare.tensor

    def spoiling(self: Spare, cache: Any) -> Tensor | None:
        found = find(self, cache)
        return None if found is None else found + 1e-3

    monkeypatch.setattr(Spare, "tensor", spoiling)


def test_a_wrong_result_is_found_by_the_self_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "SELF_CHECK_PERIOD", 1)
    spoiled(monkeypatch)
    with pytest.raises(ActivationChangedError, match="ran again"):
        trained(Net(num_blocks=2))


def test_shadow_compares_every_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told, session = run_both(Net(), monkeypatch, settings={"verify": "shadow"})
    assert told == ["taken"] * 3 and session.last_step is not None
    spoiled(monkeypatch)
    with pytest.raises(ActivationChangedError, match="ran again"):
        trained(Net(num_blocks=2), verify="shadow")
