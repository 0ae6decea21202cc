"""Models as users have them: what is captured, what notes say it leaves out, and peaks
beside those of real steps on a CPU. What the command says of them: test_user_errors.py.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.autocast import AutocastEmulation
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.caveats import UNFUSED, left_out
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.lowering import lower
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.price import estimate_step, price
from ssdtrain.tools.foresight.spec import Kind

Forward = Callable[[], Any]


def mlp(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    layers = [part for a, b in pairs for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def captured(
    build: Callable[[int], tuple[nn.Module, Forward]],
    on: Kind = Kind.CUDA,
    optimizer: str | None = None,
) -> Graph:
    with torch.device("meta"), AutocastEmulation(on).noted():
        model, forward = build(8)
        return capture(model, forward, on=on, optimizer=optimizer)


def calls_of(graph: Graph, phase: StepPhase | None = None) -> list[Call]:
    return [
        call
        for node in graph.nodes
        if phase in (None, node.phase)
        for call in lower(graph, node).calls
    ]


# -- autocast -------------------------------------------------------------------------


def in_autocast(device_type: str) -> Callable[[int], tuple[nn.Module, Forward]]:
    """A step in bfloat16 with a part in single precision; the precision's context is
    made before the step, as training loops do."""

    def build(batch: int) -> tuple[nn.Module, Forward]:
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
        last = nn.Linear(32, 4)
        model.append(last)
        x, labels = torch.randn(batch, 32), torch.zeros(batch, dtype=torch.long)
        kind = x.device.type if device_type == "own" else device_type
        outer = torch.autocast(kind, dtype=torch.bfloat16)

        def forward() -> Tensor:
            with outer:
                hidden = model[:3](x)
                with torch.autocast(kind, enabled=False):
                    hidden = last(hidden.float())
                again = model[2](model[1](model[0](x)))
                return F.cross_entropy(hidden, labels) + (again @ again.t()).sum()

        return model, forward

    return build


# -- attention ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", ["a learned bias", "booleans"])
def test_attention_with_a_mask_is_one_kernel_in_half_precision(
    dtype: torch.dtype, mask: str
) -> None:
    """But for a bias that learns, as T5's does: no such kernel takes that."""

    def build(batch: int) -> tuple[nn.Module, Forward]:
        model = nn.Linear(8, 3 * 8, dtype=dtype)
        model.bias_of = nn.Parameter(torch.zeros(1, 2, 16, 16, dtype=dtype))
        seen: Any = model.bias_of
        if mask == "booleans":
            seen = torch.ones(16, 16, dtype=torch.bool).tril()
        x = torch.randn(batch, 16, 8, dtype=dtype)

        def forward() -> Tensor:
            qkv = model(x).view(batch, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*qkv, attn_mask=seen).sum()

        return model, forward

    graph = captured(build, Kind.CUDA)
    calls = [c for c in calls_of(graph) if c.family is KernelFamily.ATTENTION]
    if dtype is torch.float32:
        assert not calls and graph.notes[UNFUSED] == "1"
        return
    assert UNFUSED not in graph.notes
    is_whole = mask == "booleans"
    assert len(calls) == (2 if is_whole else 0)
    names = {node.name for node in graph.nodes}
    assert ({"aten::bmm", "aten::_safe_softmax"} <= names) == (not is_whole)


class Types(TorchDispatchMode):
    """The precision of every product that really runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.products.append("bf16" if out.dtype is torch.bfloat16 else "fp32")
        return out


def test_autocast_casts_what_the_devices_own_would() -> None:
    """As on a CPU, which has an autocast that runs here."""
    _model, forward = in_autocast("cpu")(8)
    with Types() as seen:
        forward().backward()
    assert set(seen.products) == {"bf16", "fp32"}
    for device_type in ("cpu", "own"):
        graph = captured(in_autocast(device_type), Kind.CPU)
        found = [c.dtype for c in calls_of(graph) if c.family is KernelFamily.PRODUCT]
        assert found == seen.products


@pytest.mark.parametrize("device_type", ["cuda", "own"])
def test_a_step_under_autocast_is_not_one_in_single_precision(device_type: str) -> None:
    own = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__
    graph = captured(in_autocast(device_type))
    assert own == (
        torch.autocast.__init__,
        torch.autocast.__enter__,
        torch.autocast.__exit__,
    )
    forward = calls_of(graph, StepPhase.FORWARD)
    products = [c.dtype for c in forward if c.family is KernelFamily.PRODUCT]
    assert products == ["bf16", "bf16", "fp32", "bf16", "bf16", "bf16"]
    norms = {c.dtype for c in forward if c.family is KernelFamily.NORM}
    assert norms == {"fp32"}  # layer norm and the softmax of the loss
    # Two weights and two biases are cast, once each, and the input twice.
    casts = [n for n in graph.nodes if n.name == "aten::_to_copy"]
    to_half = [
        graph.tensors[n.outputs[0]].shape
        for n in casts
        if n.phase is StepPhase.FORWARD and graph.tensors[n.outputs[0]].dtype == "bf16"
    ]
    assert sorted(to_half) == sorted(
        [(64, 32), (64,), (32, 64), (32,)] + 2 * [(8, 32), (8, 64)]
    )


def test_autocast_is_torchs_again_after_an_error() -> None:
    own = torch.autocast.__enter__

    def build(batch: int) -> tuple[nn.Module, Forward]:
        model = nn.Linear(4, 4)
        x = torch.randn(batch, 5)

        def forward() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                result: Tensor = model(x)
            return result

        return model, forward

    with pytest.raises(ConfigError, match="sizes differ"):
        captured(build)
    assert torch.autocast.__enter__ is own


# -- what is captured, and what is left out -------------------------------------------


def test_an_answer_of_the_data_and_compiled_functions_are_told() -> None:
    def build(batch: int) -> tuple[nn.Module, Forward]:
        model, other = mlp(8, 8), mlp(8, 8)
        other.compile(backend="eager")
        compiled = torch.compile(other, backend="eager")
        x = torch.randn(batch, 8)

        def forward() -> Tensor:
            y: Tensor = model(x)
            return (compiled(y) if y.sum() > 0 else y).square().mean()

        return model, forward

    text = "\n".join(left_out(captured(build).notes))
    assert "1 x an answer of the data" in text
    assert "1 x a compiled function" in text
    plain = captured(lambda batch: _plain(mlp(8, 8), torch.randn(batch, 8)))
    assert left_out(plain.notes) == []


def _plain(model: nn.Module, x: Tensor) -> tuple[nn.Module, Forward]:
    return model, lambda: model(x).square().mean()


def test_recurrent_layers_are_told() -> None:
    def build(batch: int) -> tuple[nn.Module, Forward]:
        model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(batch, 3, 8)
        return model, lambda: model(x)[0].square().mean()

    [text] = left_out(captured(build).notes)
    assert text.startswith("1 x a recurrent layer")
    device = load_device("h100")
    assert not price(captured(build), device).generic  # gates are element-wise


@pytest.mark.parametrize(("half", "fused"), [(True, 1), (False, 0)])
def test_attention_within_torchs_own_layer(half: bool, fused: int) -> None:
    """In half precision the kernel that a GPU runs; else what that leaves out."""

    def build(batch: int) -> tuple[nn.Module, Forward]:
        dtype = torch.bfloat16 if half else torch.float32
        model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(dtype)
        return _plain(model, torch.randn(batch, 16, 64, dtype=dtype))

    own = F.has_torch_function  # type: ignore[attr-defined]
    graph = captured(build)
    assert F.has_torch_function is own  # type: ignore[attr-defined]
    forward = calls_of(graph, StepPhase.FORWARD)
    assert sum(c.family is KernelFamily.ATTENTION for c in forward) == fused
    assert len(left_out(graph.notes)) == 1 - fused


def test_backward_starts_from_the_loss_of_an_output() -> None:
    """Outputs of transformers hold logits as well."""

    def build(batch: int) -> tuple[nn.Module, Forward]:
        model, x = mlp(8, 16, 4), torch.randn(batch, 8)

        def forward() -> dict[str, Tensor]:
            logits = model(x)
            return {"loss": logits.square().mean(), "logits": logits}

        return model, forward

    def alone(batch: int) -> tuple[nn.Module, Forward]:
        model, forward = build(batch)
        return model, lambda: forward()["loss"]

    names = [[node.name for node in captured(b).nodes] for b in (build, alone)]
    assert names[0] == names[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_a_checkpointed_forward_runs_again_as_it_ran(
    reentrant: bool, within: bool
) -> None:
    """Attention among it; `within`: a first backward is the step's own."""

    def build(batch: int) -> tuple[nn.Module, Forward]:
        model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model = model.to(torch.bfloat16)
        x = torch.randn(batch, 16, 64, dtype=torch.bfloat16, requires_grad=True)

        def loss() -> Tensor:
            out: Tensor = checkpoint(model, x, use_reentrant=reentrant)
            return out.square().mean()

        def forward() -> Tensor:
            if within:
                loss().backward()
            return loss()

        return model, forward

    own = torch.autograd.has_torch_function  # type: ignore[attr-defined]
    graph = captured(build)
    assert torch.autograd.has_torch_function is own  # type: ignore[attr-defined]
    found = [c.variant for c in calls_of(graph) if c.family is KernelFamily.ATTENTION]
    once = ["forward", "forward", "backward"]
    assert found == once * (1 + within)
    assert left_out(graph.notes) == []


def test_a_gradient_of_a_gradient_is_captured() -> None:
    def build(batch: int) -> tuple[nn.Module, Forward]:
        model, x = mlp(8, 8, 1), torch.randn(batch, 8, requires_grad=True)

        def forward() -> Tensor:
            y = model(x).sum()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            result: Tensor = y + grad.square().sum()
            return result

        return model, forward

    assert any("gelu_backward" in node.name for node in captured(build).nodes)


def test_groups_of_channels_are_no_groups_of_ranks() -> None:
    def build(batch: int) -> tuple[nn.Module, Forward]:
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU())
        return _plain(model, torch.randn(batch, 3, 16, 16))

    graph, device = captured(build), load_device("h100")
    assert estimate_step(graph, device).step_us > 0.0
    norms = [c for c in calls_of(graph) if c.family is KernelFamily.NORM]
    assert [(c.sizes["rows"], c.sizes["columns"]) for c in norms] == 2 * [
        (32, 4 * 14 * 14)
    ]
    assert not price(graph, device).generic


def test_experts_products_are_products() -> None:
    """Eight experts, 64 tokens by 32: FLOPs of all tokens, in all three products."""

    def build(batch: int) -> tuple[nn.Module, Forward]:
        model = nn.Module()
        half = torch.bfloat16
        model.weight = nn.Parameter(torch.randn(8, 32, 16, dtype=half))
        x = torch.randn(64, 32, dtype=half, requires_grad=True)
        offsets = torch.zeros(8, dtype=torch.int32)

        def forward() -> Tensor:
            out: Tensor = torch._grouped_mm(x, model.weight, offs=offsets)
            return out.float().square().mean()

        return model, forward

    products = [
        c for c in calls_of(captured(build)) if c.family is KernelFamily.PRODUCT
    ]
    assert [c.flops for c in products] == 3 * [2.0 * 64 * 32 * 16]


def test_a_step_of_nothing_is_predicted() -> None:
    graph = captured(lambda batch: _plain(nn.Linear(8, 8), torch.randn(0, 8)))
    assert estimate_step(graph, load_device("h100")).step_us > 0.0


# -- peaks beside a CPU's -------------------------------------------------------------


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
        self.norm, self.out = nn.BatchNorm2d(16), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        out: Tensor = self.out(torch.relu(self.second(x)).mean((2, 3)))
        return out


def _llama(batch: int) -> tuple[nn.Module, Forward]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=500,
    )
    model, ids = LlamaForCausalLM(config), torch.zeros(batch, 48, dtype=torch.long)
    return model, lambda: model(input_ids=ids, labels=ids)


def _pictures(batch: int) -> tuple[nn.Module, Forward]:
    return _plain(Pictures(), torch.randn(batch, 3, 32, 32))


def _checkpointed(batch: int) -> tuple[nn.Module, Forward]:
    model, x = mlp(256, 1024, 256), torch.randn(8 * batch, 256, requires_grad=True)
    return model, lambda: checkpoint(model, x, use_reentrant=False).square().mean()


def _accumulated(batch: int) -> tuple[nn.Module, Forward]:
    """Two micro-batches, the first one's backward within the step."""
    model = mlp(256, 512, 256)
    first, second = torch.randn(8 * batch, 256), torch.randn(8 * batch, 256)

    def forward() -> Tensor:
        (model(first).square().mean() / 2).backward()
        last: Tensor = model(second).square().mean() / 2
        return last

    return model, forward


class Rounded(torch.autograd.Function):
    """Saves its input in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        ctx.save_for_backward((x / scale).round().to(torch.int8), scale, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rounded, scale, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ (rounded.to(grads[0].dtype) * scale)


def _rounded(batch: int) -> tuple[nn.Module, Forward]:
    model = nn.Linear(512, 512, bias=False)
    x = torch.randn(32 * batch, 512, requires_grad=True)
    apply: Any = Rounded.apply
    return model, lambda: apply(x, model.weight).square().mean()


def sizes_of(tensors: Iterator[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def measured_peak(
    model: nn.Module, forward: Forward, optimizer: torch.optim.Optimizer
) -> int:
    """What a real step allocates at most on this CPU, beside its weights and state."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        if not isinstance(loss, Tensor):
            loss = loss["loss"]  # and the rest goes
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    level = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


@pytest.mark.parametrize(
    "build", [_llama, _pictures, _checkpointed, _accumulated, _rounded]
)
def test_peaks_without_running_are_those_of_a_real_step(
    build: Callable[[int], tuple[nn.Module, Forward]],
) -> None:
    if build is _llama:
        pytest.importorskip("transformers")
    model, forward = build(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    real = measured_peak(model, forward, optimizer)
    found = estimate_peak(captured(build, Kind.CPU, "adamw"))
    resident = sizes_of(iter([*model.parameters(), *model.buffers()]))
    resident += 2 * sizes_of(model.parameters())
    # Inputs are resident as well; each storage is rounded to 512 bytes.
    assert 0 <= found.resident_bytes - resident < 0.2 * (real + resident)
    ahead = found.peak_bytes - found.resident_bytes
    assert ahead == pytest.approx(real, rel=0.03)
