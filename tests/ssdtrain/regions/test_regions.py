"""Regions run again: bitwise as plain training and as torch's own checkpoint."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.errors import ConfigError, InPlaceError, RegionError
from ssdtrain.regions.find import find_regions
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.unseen import Behind

WIDTH, BATCH = 32, 8


class Block(nn.Module):
    """Saves more than its input, and counts how often it runs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        RUNS.append(self)
        hidden = self.dropout(torch.sin(F.gelu(self.up(self.norm(x)))))
        hidden = self.down(hidden)
        return x + (hidden if scale is None else hidden * scale)


class Runs:
    """How often blocks ran. Behind a proxy: anything else would be a side effect."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0

    def append(self, block: nn.Module) -> None:
        self.count += 1


_RUNS = Runs()
RUNS = Behind(_RUNS)


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3, kind: Callable[[], nn.Module] = Block):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def offloaded(model: nn.Module, **options: Any) -> ssdtrain.Session:
    settings = {"recompute": "regions", "plan": "keep-all", "min_bytes": 64}
    return ssdtrain.offload(model, **{**settings, **options})


Backward = Callable[[nn.Module, Tensor], list[Tensor]]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check(
    model: nn.Module, run: Backward = gradients, steps: int = 2, **options: Any
) -> list[ssdtrain.Session]:
    """Plain and with regions: the same bits, step for step. Returns the session."""
    results = []
    for regions in (False, True):
        own = copy.deepcopy(model)
        session = offloaded(own, **options) if regions else None
        torch.manual_seed(5)
        found = []
        for _ in range(steps):
            own.zero_grad()
            found.extend(t.clone() for t in run(own, torch.randn(BATCH, WIDTH)))
            for p in own.parameters():
                p.data.add_(1e-3)
        found.append(torch.rand(1))  # the generator stands where it would
        results.append(found)
        if session is not None:
            session.close()
    plain, ours = results
    assert len(plain) == len(ours)
    assert same_bits(plain, ours)
    return [session] if session is not None else []


def remade(session: ssdtrain.Session) -> int:
    last = session.last_step
    assert last is not None
    return last.recipes.get("region", 0)


def torch_checkpointed(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward
        block.forward = lambda *a, _inner=inner, **k: checkpoint(
            _inner, *a, use_reentrant=False, **k
        )


@pytest.mark.parametrize("plan", ["keep-all", "offload-all"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("autocast", [False, True])
def test_bits_are_those_of_plain_and_of_checkpointing(
    plan: str, dropout: float, autocast: bool
) -> None:
    torch.manual_seed(0)
    model = Stack(kind=lambda: Block(dropout))

    def run(own: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = own(x)
        loss.backward()
        return [loss.detach(), *(p.grad for p in own.parameters())]  # type: ignore[misc]

    (session,) = check(model, run, plan=plan)
    assert remade(session) > 0
    twin = copy.deepcopy(model)
    torch_checkpointed(twin)
    torch.manual_seed(1)
    x, state = torch.randn(BATCH, WIDTH), torch.get_rng_state()
    theirs = run(twin, x)
    with offloaded(model, plan=plan):
        torch.set_rng_state(state)
        ours = run(model, x)
    assert same_bits(theirs, ours)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "encoder"])
def test_real_layers(kind: str) -> None:
    torch.manual_seed(0)
    model: Any
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        model = nn.Sequential(nn.Embedding(17, WIDTH), stack, nn.Linear(WIDTH, 1))
    else:
        transformers = pytest.importorskip("transformers")
        prefix = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
        settings = getattr(transformers, f"{prefix}Config")(
            vocab_size=17,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            attention_dropout=0.1,
            use_cache=False,
        )
        model = getattr(transformers, f"{prefix}ForCausalLM")(settings)

    def run(own: Any, x: Tensor) -> list[Tensor]:
        ids = x.argsort(dim=1)[:, :17] % 17
        own.train()
        loss = own(ids).square().mean() if kind == "encoder" else own(ids, labels=ids)
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in own.parameters())]

    (session,) = check(model, run)
    assert remade(session) > 0
    assert session.last_step is not None and not session.last_step.fallbacks


def test_only_one_region_is_alive() -> None:
    """Forward holds the inputs and one region; backward one region and its input."""
    model, x = Stack(num_blocks=8), torch.randn(BATCH, WIDTH)
    with offloaded(model, recompute="off", verify="checksum") as plain:
        model(x).backward()
    with offloaded(model) as session:
        RUNS.count = 0
        model(x).backward()
        assert RUNS.count == 16
    assert session.last_step is not None and plain.last_step is not None
    kept = plain.last_step.saved_peak_bytes
    inputs = 8 * x.nbytes
    assert session.last_step.saved_peak_bytes <= inputs + kept // 8 + 2 * x.nbytes
    assert session.live_bytes == 0


def test_stops_behind_the_last_tensor_that_is_needed() -> None:
    """Nothing that is behind the last saved tensor of a region runs again."""
    runs = Runs()
    behind = Behind(runs)

    class Tail(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x, scale)
            behind.append(self)
            return y + 1

    check(Stack(kind=Tail))
    model = Stack(kind=Tail)
    with offloaded(model):
        behind.count = RUNS.count = 0
        model(torch.randn(BATCH, WIDTH)).backward()
    assert (RUNS.count, behind.count) == (6, 3)


# -- how it is called -----------------------------------------------------------------


def test_tensor_keywords_structures_and_several_outputs() -> None:
    class Pair(Block):
        def forward(self, x: Any, *, more: Any = None) -> Any:  # type: ignore[override]
            out = super().forward(x["x"], more[0])
            return {"x": out, "side": out.sum() * more[1]["n"]}

    class Caller(Stack):
        def forward(self, x: Tensor) -> Tensor:
            side = x.new_zeros(())
            scale = x.mean(0, keepdim=True).requires_grad_()
            state = {"x": x}
            for block in self.blocks:
                state = block(state, more=(scale, {"n": 2}))
                side = side + state["side"]
            return self.head(state["x"]).square().mean() + side.square()

    (session,) = check(Caller(kind=Pair))
    assert remade(session) > 0


def test_regions_inside_regions_are_the_outermost() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Block(0.1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:
                x = torch.sin(block(x))
            return x

    model = Stack(kind=Outer)
    (session,) = check(model)
    assert remade(session) > 0
    with offloaded(model):
        RUNS.count = 0
        model(torch.randn(BATCH, WIDTH)).backward()
    assert RUNS.count == 2 * 6


def test_the_first_of_a_stack_may_be_of_another_kind() -> None:
    """As in Wav2Vec2's convolutions."""

    class First(Block):
        pass

    kinds = [First, Block, Block]
    model = Stack(kind=lambda: kinds.pop(0)())
    with offloaded(model):
        RUNS.count = 0
        model(torch.randn(BATCH, WIDTH)).backward()
    assert RUNS.count == 2 * 3


@pytest.mark.parametrize("is_named", [False, True])
def test_one_model_in_a_list_is_no_region(is_named: bool) -> None:
    """Its layers are."""
    stack = Stack()
    around = nn.ModuleDict({"one": stack}) if is_named else nn.ModuleList([stack])
    found = find_regions(nn.Sequential(around))
    assert [region.module for region in found] == list(stack.blocks)


def test_the_only_layer_of_a_list_may_be_called_many_times() -> None:
    """As in ALBERT, whose layers share their weights."""

    class Shared(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x).square().mean()

    model = Shared()
    model.blocks = nn.ModuleList([Block()])
    (session,) = check(model)
    assert remade(session) > 0
    with offloaded(model):
        RUNS.count = 0
        model(torch.randn(BATCH, WIDTH)).backward()
    assert RUNS.count == 2 * 3


def test_like_modules_under_names_of_their_own() -> None:
    """As in a U-Net; two are a pair, and containers are no layers."""
    net = nn.Module()
    for name in ("down1", "down2", "down3"):
        setattr(net, name, Block())
    net.query, net.key = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    for name in ("a", "b", "c"):
        setattr(net, name, nn.Sequential(nn.Linear(2, 2)))
    model = nn.ModuleDict({"net": net})
    assert [region.path for region in find_regions(model)] == [
        *("net.down1", "net.down2", "net.down3"),
    ]
    for name in ("tower1", "tower2", "tower3"):  # their layers are
        setattr(net, name, Stack())
    paths = {region.path for region in find_regions(model)}
    assert "net.tower1.blocks.0" in paths and "net.tower1" not in paths


def test_of_a_stage_its_layers_are_regions() -> None:
    """As in torchvision's ConvNeXt; a module of its own around a list is a layer."""
    stages = nn.Sequential(
        nn.Sequential(Block(), Block()),
        nn.Sequential(Block(), Block(), Block(), nn.Linear(2, 2)),
    )
    found = [region.path for region in find_regions(nn.ModuleDict({"a": stages}))]
    assert found == ["a.0", "a.1.0", "a.1.1", "a.1.2"]


def test_layers_that_transformers_can_checkpoint() -> None:
    """Also where each is of a kind of its own."""

    class Mamba(Block):
        gradient_checkpointing = False

    class Attention(Block):
        gradient_checkpointing = False

    model = nn.Sequential(nn.ModuleList([Mamba(), Attention()]))
    assert [region.path for region in find_regions(model)] == ["0.0", "0.1"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_of_the_user(inside: bool, reentrant: bool) -> None:
    class Inner(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            own = super().forward
            y = checkpoint(own, x, use_reentrant=reentrant, preserve_rng_state=True)
            return torch.sin(y)

    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x).square().mean()

    class Plain(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.requires_grad_())

    (session,) = check(Plain(kind=Inner) if inside else Outer(kind=lambda: Block(0.1)))
    # A block that the user checkpoints is the user's to run again.
    assert (remade(session) > 0) == inside


def test_what_a_backward_does_not_ask_for_goes_with_it() -> None:
    model = Stack()
    with offloaded(model) as session:
        loss = model(torch.randn(BATCH, WIDTH))
        before = session.live_bytes
        torch.autograd.grad(loss, [model.blocks[2].down.bias], retain_graph=True)
        assert session.live_bytes <= before
        loss.backward()
    assert session.live_bytes == 0


def test_a_backward_inside_the_forward_of_a_region() -> None:
    class Force(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return x + torch.sin(force) + energy

    class Forces(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.requires_grad_())

    (session,) = check(Forces(kind=Force))
    assert remade(session) > 0


def test_an_exception_in_the_middle_of_a_region() -> None:
    class Broken(Block):
        fails = False

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise KeyError("in the middle")
            return torch.sin(y)

    model, x = Stack(kind=Broken), torch.randn(BATCH, WIDTH)
    with offloaded(model) as session:
        model.blocks[1].fails = True
        for _ in range(2):
            with pytest.raises(KeyError):
                model(x)
        model.blocks[1].fails = False
        ours = gradients(model, x)
        model.blocks[1].fails = True  # and in the re-run
        model.blocks[1].fails = False
    assert session.live_bytes == 0
    model.zero_grad()
    assert same_bits(gradients(model, x), ours)


def test_an_exception_in_the_rerun_reaches_the_user() -> None:
    class Broken(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                raise KeyError("in the re-run")
            return super().forward(x)

    model, x = Stack(kind=Broken), torch.randn(BATCH, WIDTH)
    with offloaded(model):
        loss = model(x)
        with pytest.raises(KeyError, match="in the re-run"):
            loss.backward()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_closing_the_session_restores_the_modules() -> None:
    model, x = Stack(), torch.randn(BATCH, WIDTH)
    before = [dict(vars(block)) for block in model.blocks]
    with offloaded(model):
        model(x).backward()
        twin = copy.deepcopy(model)
        RUNS.count = 0
        twin(x).backward()  # a copy is no model of the session
        assert RUNS.count == 3
    assert [dict(vars(block)) for block in model.blocks] == before


def test_bytes_that_left_are_compared() -> None:
    (session,) = check(Stack(), verify="shadow")
    assert session.last_step is not None and session.last_step.num_verified > 9


# -- what a setting may say -----------------------------------------------------------


def test_a_setting_names_regions() -> None:
    model, x = Stack(), torch.randn(BATCH, WIDTH)
    for patterns, runs in (("blocks.1", 4), ("Block", 6), (["blocks.0", "*.2"], 5)):
        with offloaded(model, regions=patterns):
            RUNS.count = 0
            model(x).backward()
            assert RUNS.count == runs
    with pytest.raises(ConfigError, match="names no module"):
        offloaded(model, regions="layers.*")
    with pytest.raises(ConfigError, match="regions expects"):
        offloaded(model, regions=[1])


# -- what changes between forward and backward ----------------------------------------


def test_a_weight_that_is_written_is_noticed() -> None:
    model = Stack()
    with offloaded(model):
        loss = model(torch.randn(BATCH, WIDTH))
        with torch.no_grad():
            model.blocks[0].up.bias.add_(1.0)  # autograd has not saved it
        with pytest.raises(InPlaceError, match=r"blocks\.0"):
            loss.backward()


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_steps_between_two_backwards(fused: bool) -> None:
    """Only biases are trained: plain autograd has saved none of them."""

    def run(own: nn.Module, x: Tensor) -> list[Tensor]:
        biases = [p for p in own.parameters() if p.dim() == 1 and p.numel() > WIDTH]
        for p in own.parameters():
            p.requires_grad_(any(p is bias for bias in biases))
        optimizer = torch.optim.SGD(biases, 0.1, fused=fused)
        first, second = own(x), own(x + 1)
        first.backward()
        optimizer.step()
        second.backward()
        return [p.grad for p in biases]  # type: ignore[misc]

    (session,) = check(Stack(), run)
    assert remade(session) > 0


def test_a_forward_that_does_something_else_is_noticed() -> None:
    class Fickle(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            if torch._C._current_graph_task_id() != -1:
                return torch.cos(torch.sin(y)[:, :1])
            return torch.sin(torch.cos(y))

    model = Stack(kind=Fickle)
    with offloaded(model):
        loss = model(torch.randn(BATCH, WIDTH))
        with pytest.raises(RegionError, match=r"blocks\.2"):
            loss.backward()


# -- what stays behind ----------------------------------------------------------------


class Seen:
    """Storages of tensors inside of blocks, by weak references."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def add(self, tensor: Tensor) -> Tensor:
        """Remember a tensor."""
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    @property
    def num_alive(self) -> int:
        """How many have not been freed."""
        return sum(not each.expired() for each in self.storages)


_SEEN = Seen()
SEEN = Behind(_SEEN)


def test_a_rerun_leaves_nothing_behind() -> None:
    """Autograd's nodes hold the hooks: no cycle may go through them, because the
    garbage collector does not look into nodes."""

    class Watched(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                assert SEEN.num_alive <= 2  # of the region before
            return x + self.down(torch.sin(SEEN.add(self.up(self.norm(x)))))

    SEEN.storages.clear()
    model = Stack(num_blocks=4, kind=Watched)
    with offloaded(model, plan="offload-all", window_bytes=1) as session:
        model(torch.randn(BATCH, WIDTH)).backward()
        assert remade(session) > 0
        assert len(SEEN.storages) == 8 and SEEN.num_alive == 0


# -- compiled -------------------------------------------------------------------------


# Dynamo looks at `.grad` of what it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_layers_are_regions_and_compiled_models_are_not(whole: bool) -> None:
    class Pure(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return x + self.down(torch.sin(F.gelu(self.up(self.norm(x)))))

    torch.manual_seed(0)
    model = Stack(kind=Pure)
    if whole:
        model.compile(backend="aot_eager")
    else:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    x = torch.randn(BATCH, WIDTH)
    plain = [t.clone() for t in gradients(model, x)]
    model.zero_grad()
    with offloaded(model) as session:
        for _ in range(2):
            model.zero_grad()
            ours = gradients(model, x)
        assert bool(remade(session)) is not whole
        told = "the whole model is compiled; compile its layers one by one"
        assert set(session.regions_refused.values()) <= {told}
    assert same_bits(plain, ours)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_model_that_is_compiled_later_is_one_graph() -> None:
    """The wrappers of regions go: they would break its graph at every layer."""
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    class Pure(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return x + self.down(torch.sin(self.up(self.norm(x))))

    model, x = Stack(kind=Pure), torch.randn(BATCH, WIDTH)
    with offloaded(model, recompute="auto", plan="auto"):
        compiled = torch.compile(model, backend=counting)
        compiled(x).backward()
        assert not any("forward" in vars(block) for block in model.blocks)
        graphs.clear()
        torch.compiler.reset()
        compiled(x).backward()
        assert len(graphs) == 1


@pytest.mark.parametrize("again", [False, True])
def test_what_does_not_fit_says_where_and_what_would(again: bool) -> None:
    class Large(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            if again is (torch._C._current_graph_task_id() != -1):
                raise torch.OutOfMemoryError("Tried to allocate 152.00 MiB.")
            return torch.sin(y)

    class Last(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(Large())

    model = Last()
    with offloaded(model, regions=["blocks.*"]):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.randn(BATCH, WIDTH)).backward()
    text = str(caught.value)
    assert "Tried to allocate 152.00 MiB" in text and "blocks.3" in text
    assert "smaller micro-batch" in text and "MB of saved tensors" in text


def test_a_step_behind_a_weight_that_was_written_is_a_step() -> None:
    """Plain steps; only a backward of the old graph would raise."""
    torch.manual_seed(0)
    model = Stack()
    session = offloaded(model)
    loss = model(torch.randn(BATCH, WIDTH))
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(InPlaceError):
        loss.backward()
    session.close()


class SparseBlock(Block):
    """Saves a sparse matrix as well, and changes one of its buffers on wish."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = False
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        mixing = torch.eye(BATCH).to_sparse()
        if self.changes:
            self.seen += 1
        return super().forward(torch.sparse.mm(mixing, x), scale)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("verify", ["off", "checksum", "shadow"])
def test_what_no_digest_reads_is_made_again_unchecked(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssdtrain.cache.verify, "SELF_CHECK_PERIOD", 1)
    torch.manual_seed(0)
    [session] = check(Stack(kind=SparseBlock), verify=verify)
    assert remade(session) > 0
    assert session.last_step.num_verified > 3 * 4  # the dense ones are checked


def test_what_a_refused_region_keeps_is_counted() -> None:
    reports = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = Stack(num_blocks=2, kind=SparseBlock)
        for block in model.blocks:
            block.changes = changes
        with offloaded(model) as session:
            model(torch.randn(BATCH, WIDTH)).backward()
            reports.append(session.last_step)
    again, stays = reports
    assert stays.bytes_saved == again.bytes_saved > 0
    assert again.bytes_recomputed > 0 == stays.bytes_recomputed
    assert stays.bytes_kept - again.bytes_kept == again.bytes_recomputed


class Unwrapped(torch.autograd.Function):
    """A plain tensor of a wrapper."""

    @staticmethod
    def forward(ctx: Any, wrapper: TwoTensor) -> Tensor:
        return wrapper.a.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return TwoTensor(gradient, gradient.clone())


class MixingBlock(SparseBlock):
    """Its sparse matrix is there before and behind its forward."""

    def __init__(self, wrapped: bool = False) -> None:
        super().__init__()
        self.mixing = torch.eye(BATCH) if wrapped else torch.eye(BATCH).to_sparse()
        if wrapped:
            self.mixing = TwoTensor(self.mixing, self.mixing.clone())

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.changes:
            self.seen += 1
        if type(self.mixing) is TwoTensor:
            mixed: Any = Unwrapped.apply(self.mixing @ x)
            return Block.forward(self, mixed)
        return Block.forward(self, torch.sparse.mm(self.mixing, x))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_a_change_of_what_is_not_plain_bytes_is_seen(
    wrapped: bool, refused: bool
) -> None:
    torch.manual_seed(0)
    model = Stack(num_blocks=2, kind=partial(MixingBlock, wrapped))
    for block in model.blocks:
        block.changes = refused
    x = torch.randn(BATCH, WIDTH, requires_grad=True)

    def changed() -> None:
        loss = model(x)
        with torch.no_grad():
            model.blocks[1].mixing.mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed()
    error = InPlaceError if refused else (InPlaceError, RegionError)
    with offloaded(model), pytest.raises(error):
        changed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_forward_mode_in_a_step_of_regions(inside: bool) -> None:
    """Tangents are gone in backward: no region whose forward begins under them runs
    again."""

    class Tangent(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                y = forward_ad.unpack_dual(super().forward(dual))
                return y.primal + y.tangent

    torch.manual_seed(0)
    # A mask has no tangent: it is what a re-run would be asked for.
    kind = partial(Tangent if inside else Block, dropout=0.5)
    model, x = Stack(kind=kind), torch.randn(BATCH, WIDTH)

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        if inside:
            return gradients(model, x)
        with forward_ad.dual_level():
            return gradients(model, forward_ad.make_dual(x, torch.ones_like(x)))

    plain = step()
    with offloaded(model) as session:
        for _ in range(2):
            assert same_bits(step(), plain)
        assert any(step.recipes.get("region") for step in session.steps) is inside
