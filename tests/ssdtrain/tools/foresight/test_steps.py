"""Steps captured while they run: eager, compiled, with optimizers, by the command."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.errors import ConfigError
from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.call import KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.device import bare_device
from ssdtrain.tools.foresight.graph import Graph, read_graph
from ssdtrain.tools.foresight.lowering import lower
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.price import estimate_step
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.steps import capture_step, roles_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH, ROWS = 64, 32
GENERATED = """
triton_or_other = None
cpp_fused_gelu_0 = async_compile.cpp_pybinding(['float*', 'const float*'], r'''
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       float* out_ptr1)
{
}
''')
"""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def step_of(model: nn.Module, call: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """A whole training step, two micro-batches, weights clipped by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            call(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1.0, 1.0)
        optimizer.step()

    return step


def product_flops(graph: Graph, phase: StepPhase) -> float:
    """FLOPs of all matrix products."""
    return sum(
        call.flops
        for node in graph.nodes
        if node.phase is phase
        for call in lower(graph, node).calls
        if call.family is KernelFamily.PRODUCT
    )


def check(graph: Graph) -> None:
    """Two micro-batches of two products: one forward each, and backward all but the
    first input's gradient."""
    each = 2.0 * ROWS * WIDTH * WIDTH
    assert product_flops(graph, StepPhase.FORWARD) == 2 * 2 * each
    assert product_flops(graph, StepPhase.BACKWARD) == 2 * 3 * each
    updates = [n.name for n in graph.nodes if n.phase is StepPhase.UPDATE]
    assert updates.count("aten::clamp_") == 4 + 2
    assert "aten::_fused_adamw_" in updates
    step = estimate_step(graph, bare_device("h100"))
    assert step.step_us > 0 and step.by_family_us[KernelFamily.OPTIMIZER] > 0
    assert estimate_peak(graph).peak_bytes > 4 * graph.parameter_bytes
    assert graph.parameter_bytes == sum(p.nbytes for p in network().parameters())


def test_an_eager_step_is_seen_whole() -> None:
    model = network()
    graph = capture_step(step_of(model, model), model, num_warm=0)
    check(graph)
    assert {"0", "1", "2", "3"} <= {node.module for node in graph.nodes}


def test_what_runs_is_what_the_meta_device_shows() -> None:
    """And a second capture of one model starts anew."""
    model, x = network(), torch.randn(ROWS, WIDTH)
    with torch.device("meta"):
        twin, y = network(), torch.randn(ROWS, WIDTH)
        graph = capture(twin, lambda: twin(y).sum(), on=Kind.CPU)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        ran = capture_step(lambda: model(x).sum().backward(), model, num_warm=0)
        assert [n.name for n in ran.nodes] == [n.name for n in graph.nodes]
        seed = "aten::ones_like"  # of the root's gradient: between the two
        phases = [[n.phase for n in g.nodes if n.name != seed] for g in (ran, graph)]
        assert phases[0] == phases[1]
        live = [
            [(s.num_bytes, s.born, s.dies) for s in g.storages.values() if s.born >= 0]
            for g in (ran, graph)
        ]
        assert sorted(live[0]) == sorted(live[1])


def test_a_compiled_step_runs_compiled_and_is_seen_whole() -> None:
    """With `aot_eager`, whose regions are operators: fewer than eager ones, since
    gradients are not detached one by one."""
    model = network()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    step = step_of(model, call)
    graph = capture_step(step, model)
    check(graph)
    assert not {"0", "1", "2", "3"} & {node.module for node in graph.nodes}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
# The processor's vector units are used without a trial program for each of them.
@torch._inductor.config.patch({"cpp.vec_isa_ok": True})
def test_generated_kernels_are_seen_and_put_back() -> None:
    """Inductor: one kernel between the products, its tensors and their lives."""
    from torch._inductor.codecache import PyCodeCache

    model = network()
    graph = capture_step(step_of(model, torch.compile(model)), model)
    check(graph)
    fused = [node for node in graph.nodes if node.name.startswith("inductor::")]
    assert {node.phase for node in fused} == {StepPhase.FORWARD, StepPhase.BACKWARD}
    assert not any("gelu" in node.name for node in graph.nodes if node not in fused)
    assert all(node.inputs and node.outputs for node in fused)
    calls = [call for node in fused for call in lower(graph, node).calls]
    assert all(call.family is KernelFamily.MEMORY for call in calls)
    assert min(call.num_bytes for call in calls) >= ROWS * WIDTH * 4
    names = [vars(module) for module in PyCodeCache.modules]
    kinds = {type(v).__name__ for n in names for k, v in n.items() if "fused" in k}
    assert "_Kernel" not in kinds


def test_generated_code_names_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "generated.py"
    path.write_text(GENERATED)
    module = type(torch)("generated")
    module.__file__ = str(path)
    kernel = object()
    roles = roles_of(kernel, "cpp_fused_gelu_0", module)
    assert roles == ("in_out_ptr0", "in_ptr0", "out_ptr1")
    with pytest.raises(ConfigError, match="cpp_fused_other"):
        roles_of(kernel, "cpp_fused_other", module)


def test_the_command_captures_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, saved = tmp_path / "mine.py", tmp_path / "graph.json"
    mine.write_text(
        "import torch\n"
        "def prepare():\n"
        "    net, x = torch.nn.Linear(8, 8), torch.randn(4, 8)\n"
        "    return net, lambda: net(x).sum().backward()\n"
    )
    words = ["foresight", "capture", "--step", f"{mine}:prepare", "--save", str(saved)]
    assert main(words) == 0
    graph = read_graph(saved)
    products = [n.name for n in graph.nodes if n.name.endswith("mm")]
    assert products == ["aten::addmm", "aten::mm"]
    capsys.readouterr()
    assert main(["foresight", "predict", "--graph", str(saved), "--json"]) == 0
    assert '"step_us"' in capsys.readouterr().out
    # Under a launcher no rank writes over another's graph, with a group or without.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(words) == 0
    assert read_graph(tmp_path / "graph.rank1.json").nodes == graph.nodes
    words[3] = f"{mine}:nothing"
    assert main(words) == 2
    assert "has no function" in capsys.readouterr().err


def test_a_step_without_operators_is_refused() -> None:
    with pytest.raises(ConfigError, match="no operator was seen"):
        capture_step(lambda: None, network())
