"""One row of `real_models`, measured in a process of its own.

A step is forward, backward and fused AdamW. Gradients stay allocated between steps, so
the activation peak is what forward and backward need above the level before the step.
"""

import contextlib
import functools
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.bench.harness.timing import Clock, Peak
from recipes.bench.models.real_build import build
from recipes.bench.models.real_catalogue import Row, settings_of
from recipes.bench.models.stock import checkpoint, num_tokens, shape_of

MOST_WARM_UP_STEPS = 100
LEAST_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Run:
    """What all rows of a run share."""

    num_steps: int = 5
    """Timed ones."""
    device: str = "cuda"
    budget_bytes: int | None = None
    """For activations: of a row that asks for a share of another's."""
    warm_up_s: float = math.inf
    """Steps are timed from then on, settled or not: the row says which."""


def measure(row: Row, run: Run) -> dict[str, Any]:
    """Train under the row's column, in a process that has not loaded ssdtrain for the
    columns of others, and say what it took."""
    found = trained(row, run)
    if not row.is_ours and "ssdtrain" in sys.modules:
        raise RuntimeError("a peer's row imported ssdtrain")
    return found


def trained(row: Row, run: Run) -> dict[str, Any]:
    """Train under the row's column and say what it took."""
    device = torch.device(run.device, int(os.environ.get("LOCAL_RANK", "0")))
    free_gb = 0.0
    if device.type == "cuda":
        torch.cuda.set_device(device)
        free_gb = torch.cuda.mem_get_info()[0] / 1e9
    torch.manual_seed(0)
    began, num = time.perf_counter(), num_tokens(row.tokens)
    trainer = Trainer(row, build(row, device, num), device)
    found: dict[str, Any] = {"loss": trainer.loss_kind, "num_layers": trainer.layers}
    found["free_gb"] = free_gb  # before the row took anything
    with around(row, run, trainer) as session:
        found["build_s"] = round(time.perf_counter() - began, 2)
        # The first step allocates gradients and optimizer states.
        warm_up = [trainer.step(num)]
        until, goes_on = began + run.warm_up_s, as_the_first(row)
        warm_up += warmed(trainer, num, session, until, goes_on)
        timed = [trainer.step(num) for _ in range(run.num_steps)]
        found |= summary(warm_up, timed) | of_session(session)
    return found


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: marks on the device's time line, its loss, and what it needed."""

    clock: Clock
    began: Any
    ended: Any
    loss: Tensor
    peak_bytes: int
    """Of forward and backward, above the level before the step."""
    allocated_bytes: int
    reserved_bytes: int

    @property
    def ms(self) -> float:
        """Waits for the device."""
        return self.clock.ms(self.began, self.ended)


class Trainer:
    """A plain training loop on random tokens."""

    def __init__(self, row: Row, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.around_forward: Callable[[], Any] = contextlib.nullcontext
        self.layers = shape_of(row.model).depth
        self.loss_kind = "liger" if device.type == "cuda" else "transformers"
        self._device, self._clock = device, Clock(device)
        self._vocabulary = shape_of(row.model).settings["vocab_size"]
        trained = [p for p in model.parameters() if p.requires_grad]
        # A fused step takes tensors of one kind, on one mesh.
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in trained:
            mesh = getattr(parameter, "device_mesh", None)
            by_mesh.setdefault(mesh, []).append(parameter)
        groups = [{"params": own} for own in by_mesh.values()]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)

    def forward(self, num: int) -> Tensor:
        """The loss of a step of `num` tokens; the same ones every time."""
        draw = torch.Generator(self._device).manual_seed(1)
        ids = torch.randint(
            self._vocabulary, (1, num), device=self._device, generator=draw
        )
        with self.around_forward():
            found = self.model(input_ids=ids, labels=ids, return_dict=True)
        return found.loss  # type: ignore[no-any-return]

    def step(self, num: int) -> "Step":
        """A step; nothing waits for the device, as in a loop that logs now and then."""
        cuda, memory = self._device.type == "cuda", Peak(self._device)
        began = self._clock.mark()
        loss = self.forward(num)
        loss.backward()
        peak = memory.most
        self.update()
        return Step(
            clock=self._clock,
            began=began,
            ended=self._clock.mark(),
            loss=loss.detach(),
            peak_bytes=peak,
            allocated_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
            reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0,
        )

    def update(self) -> None:
        """Take the gradients, and zero them where they are: of a mesh this rank's
        parts. torch zeroes tensors of one kind at once, and no sum still to be made."""
        self._optimizer.step()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
            torch._foreach_zero_(parts)


def warmed(
    trainer: Trainer,
    num: int,
    session: Any,
    until: float = math.inf,
    goes_on: Callable[[bool], bool] = bool,
) -> list[Step]:
    """Steps until nothing settles any more.

    Args:
        until: and no longer than to this time of `time.perf_counter`.
        goes_on: what all ranks do where this one would (not) go on.
    """
    steps = []
    for number in range(MOST_WARM_UP_STEPS):
        over = number >= LEAST_WARM_UP_STEPS and (
            session is None or session.is_settled or time.perf_counter() >= until
        )
        if not goes_on(not over):
            break
        steps.append(trainer.step(num))
    gc.collect()
    return steps


def as_the_first(row: Row) -> Callable[[bool], bool]:
    """What the first rank decides.

    Each rank has a clock of its own, and the one that searches for plans settles later
    than those that are told: one that began to time its steps earlier would leave the
    others in a collective. Asked over gloo, so that no device is waited for.
    """
    if row.mode.num_ranks == 1:
        return bool
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")

    def asked(wanted: bool) -> bool:
        flag = torch.tensor([wanted])
        dist.broadcast(flag, 0, group=group)
        return bool(flag.item())

    return asked


def summary(warm_up: list[Step], timed: list[Step]) -> dict[str, Any]:
    """The row's figures out of its steps."""
    every = warm_up + timed
    return {
        "step_ms": statistics.median(step.ms for step in timed),
        "peak_gb": max(step.peak_bytes for step in timed) / 1e9,
        "allocated_gb": max(step.allocated_bytes for step in every[1:]) / 1e9,
        "reserved_gb": max(step.reserved_bytes for step in every[1:]) / 1e9,
        "num_warm_up": len(warm_up),
        "losses": [step.loss.item() for step in every],
        "steps_ms": [round(step.ms, 2) for step in every],
    }


def of_session(session: Any) -> dict[str, Any]:
    """What ssdtrain predicted and reported."""
    if session is None:
        return {}
    found: dict[str, Any] = {"settled": session.is_settled}
    report = session.last_step
    if report is not None:
        found["report"] = report.as_dict()
    plan = session.plan
    if plan is not None and plan.prediction is not None:
        prediction = plan.prediction
        found["predicted_ms"] = prediction.step_ms
        found["predicted_gb"] = prediction.peak_bytes / 1e9
        found["believed_keep_ms"] = prediction.keep_ms
        found["explain"] = session.explain().splitlines()
    return found


@contextlib.contextmanager
def around(row: Row, run: Run, trainer: Trainer) -> Iterator[Any]:
    """The column in force; gives the session of ours."""
    model, column = trainer.model, row.column
    if row.is_ours:
        import ssdtrain

        settings = settings_of(column)
        if row.model.startswith("tiny"):
            settings.setdefault("min_bytes", 1)
        if run.budget_bytes is not None:
            settings["memory_budget"] = run.budget_bytes
        with ssdtrain.offload(model, **settings) as session:
            yield session
        return
    if column.startswith("gc"):
        checkpoint_layers(model, every=2 if "2nd" in column else 1)
    if column == "selective":
        checkpoint_layers(model, context_fn=selective_contexts)
    if "trl" in column:
        trainer.around_forward = trl_context()
    yield None


def checkpoint_layers(model: nn.Module, every: int = 1, **settings: Any) -> None:
    """transformers' own checkpointing, non-reentrant, on every n-th layer."""
    stock: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    checkpoint(stock, {"use_reentrant": False, **settings})
    for number, layer in enumerate(stock.model.layers):
        layer.gradient_checkpointing = number % every == 0


def selective_contexts(first: bool = True) -> Any:
    """Selective checkpointing: attention and every second matrix product are saved.

    first: whether the first product is one of them.
    """
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        create_selective_checkpoint_contexts,
    )

    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    products = {aten.mm.default, aten.addmm.default}
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator in attention:
            return CheckpointPolicy.MUST_SAVE
        if operator in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == first:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def trl_context() -> Callable[[], Any]:
    """TRL's OffloadActivations, its defaults, around forward."""
    from accelerate import PartialState
    from trl.models.activation_offloading import OffloadActivations

    PartialState()  # TRL's logger asks for it
    return functools.partial(OffloadActivations)
