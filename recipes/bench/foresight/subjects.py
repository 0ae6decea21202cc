"""Training steps whose time is predicted, then measured: six kinds of model.

`subject(name, size)` builds on torch's present default device (meta for predictions),
so that one function serves both. Weights and inputs are random.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.bench.harness.timing import wait
from ssdtrain.tools.foresight.overheads import Phase

Step = Callable[[], Any]


class Subject(NamedTuple):
    model: nn.Module
    forward: Callable[[], Tensor]
    """Gives the loss."""
    optimizer: str
    """`adamw` or `sgd`, fused."""


def _ids(vocabulary: int, *shape: int) -> Tensor:
    if torch.get_default_device().type == "meta":
        return torch.empty(shape, dtype=torch.long)
    return torch.randint(0, vocabulary, shape)


def _finished(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return model.to(dtype).train()


def _language(
    model: nn.Module, words: int, size: tuple[int, int], **more: Any
) -> Subject:
    """A model of transformers that gives logits of each token."""
    model = _finished(model)
    ids, labels = _ids(words, *size), _ids(words, *size)

    def forward() -> Tensor:
        logits = model(input_ids=ids, **more).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Subject(model, forward, "adamw")


def bert(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    return _language(BertForMaskedLM(config), 30522, (batch, sequence))


def gpt(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=hidden // 64, n_positions=sequence
    )
    size = batch, sequence
    return _language(GPT2LMHeadModel(config), 50257, size, use_cache=False)


def llama(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        intermediate_size=256 * (hidden * 11 // 4 // 256),
        vocab_size=32000,
        max_position_embeddings=sequence,
    )
    size = batch, sequence
    return _language(LlamaForCausalLM(config), 32000, size, use_cache=False)


def vit(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    """`sequence` is the side of the image; patches are of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        image_size=sequence,
        num_labels=1000,
    )
    model = _finished(ViTForImageClassification(config))
    images = torch.randn(batch, 3, sequence, sequence, dtype=torch.bfloat16)
    labels = _ids(1000, batch)

    def forward() -> Tensor:
        pixels = images.to(next(model.parameters()).dtype)
        return F.cross_entropy(model(pixel_values=pixels).logits.float(), labels)

    return Subject(model, forward, "adamw")


class _Dlrm(nn.Module):
    """Bottom MLP, one lookup a table, pairwise products, top MLP (fp32)."""

    def __init__(self, tables: int, rows: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.bottom = _mlp([13, 512, 256, dim])
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = _mlp([dim + pairs, hidden, hidden, hidden // 2, 1], last=False)
        at = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("at", at)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked = [table(ids[i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([x, *looked], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = products[:, self.at[0], self.at[1]]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(1)


def _mlp(widths: list[int], last: bool = True) -> nn.Sequential:
    modules: list[nn.Module] = []
    for at, (a, b) in enumerate(itertools.pairwise(widths)):
        modules.append(nn.Linear(a, b))
        if last or at < len(widths) - 2:
            modules.append(nn.ReLU())
    return nn.Sequential(*modules)


def dlrm(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    """`layers` tables of `sequence` rows, 128 wide."""
    model = _Dlrm(layers, sequence, 128, hidden).train()
    dense = torch.randn(batch, 13)
    ids, labels = _ids(sequence, layers, batch), torch.ones(batch)

    def forward() -> Tensor:
        return F.binary_cross_entropy_with_logits(model(dense, ids), labels)

    return Subject(model, forward, "sgd")


class _Relational(nn.Module):
    """One product a relation on the rows of its edges, summed into the targets."""

    def __init__(self, relations: int, hidden: int) -> None:
        super().__init__()
        shape = (2, relations, hidden, hidden)
        self.weight = nn.Parameter(torch.randn(shape) * hidden**-0.5)
        self.root = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        for layer in range(2):
            out = self.root[layer](x)
            for relation in range(self.weight.shape[1]):
                rows = x.index_select(0, sources[relation])
                sent = rows @ self.weight[layer, relation]
                out = out.index_add(0, targets[relation], sent)
            x = torch.relu(out)
        return x


def relational(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    """`batch` thousand edges a relation, `layers` relations, `sequence` nodes."""
    model = _Relational(layers, hidden).train()
    x = torch.randn(sequence, hidden)
    sources = _ids(sequence, layers, batch * 1000)
    targets = _ids(sequence, layers, batch * 1000)
    return Subject(model, lambda: model(x, sources, targets).square().mean(), "adamw")


MAKERS: dict[str, Callable[..., Subject]] = {
    "bert": bert,
    "gpt": gpt,
    "llama": llama,
    "vit": vit,
    "dlrm": dlrm,
    "relational": relational,
}
# Shapes by purpose: `explore` while the models were made, `test` and `held` to `held4`
# predicted before they ran, `ranks` likewise over two of them, `cpu` in fp32 on one
# thread. The host binds the first batch of each.
SHAPES: dict[str, dict[str, tuple[dict[str, int], tuple[int, ...]]]] = {
    "tiny": {
        "bert": (dict(hidden=128, layers=2, sequence=64), (1, 2)),
        "gpt": (dict(hidden=128, layers=2, sequence=64), (1, 2)),
        "llama": (dict(hidden=1024, layers=2, sequence=64), (1, 2)),
        "vit": (dict(hidden=128, layers=2, sequence=64), (1, 2)),
        "dlrm": (dict(hidden=64, layers=3, sequence=100), (16, 32)),
        "relational": (dict(hidden=32, layers=3, sequence=100), (1, 2)),
    },
    "cpu": {
        "bert": (dict(hidden=256, layers=4, sequence=64), (1, 4, 12)),
        "gpt": (dict(hidden=256, layers=4, sequence=96), (1, 3, 8)),
        "llama": (dict(hidden=512, layers=2, sequence=64), (1, 2, 6)),
        "vit": (dict(hidden=192, layers=4, sequence=96), (2, 6, 20)),
        "dlrm": (dict(hidden=256, layers=6, sequence=5000), (64, 256, 1024)),
        "relational": (dict(hidden=64, layers=6, sequence=2000), (1, 3, 8)),
    },
    "explore": {
        "bert": (dict(hidden=1024, layers=24, sequence=384), (1, 8, 32)),
        "gpt": (dict(hidden=1280, layers=24, sequence=1024), (1, 4, 12)),
        "llama": (dict(hidden=2048, layers=16, sequence=2048), (1, 3, 6)),
        "vit": (dict(hidden=1024, layers=24, sequence=224), (4, 32, 128)),
        "dlrm": (dict(hidden=1024, layers=12, sequence=80_000), (512, 4096, 16384)),
        "relational": (dict(hidden=128, layers=24, sequence=20_000), (2, 20, 100)),
    },
    "test": {
        "bert": (dict(hidden=768, layers=12, sequence=512), (4, 24, 64)),
        "gpt": (dict(hidden=1600, layers=20, sequence=768), (1, 6, 16)),
        "llama": (dict(hidden=3072, layers=10, sequence=4096), (1, 2, 3)),
        "vit": (dict(hidden=768, layers=12, sequence=384), (4, 24, 80)),
        "dlrm": (dict(hidden=2048, layers=20, sequence=50_000), (1024, 6000, 24000)),
        "relational": (dict(hidden=256, layers=12, sequence=30_000), (4, 30, 120)),
    },
    "held": {
        "bert": (dict(hidden=1280, layers=16, sequence=256), (2, 16, 96)),
        "gpt": (dict(hidden=1024, layers=16, sequence=512), (2, 12, 40)),
        "llama": (dict(hidden=4096, layers=6, sequence=1024), (1, 4, 12)),
        "vit": (dict(hidden=1152, layers=16, sequence=256), (6, 40, 128)),
        "dlrm": (dict(hidden=1536, layers=26, sequence=100_000), (2048, 8192, 32768)),
        "relational": (dict(hidden=192, layers=16, sequence=24_000), (3, 24, 90)),
    },
    "held2": {
        "bert": (dict(hidden=896, layers=18, sequence=320), (3, 20, 72)),
        "gpt": (dict(hidden=1152, layers=14, sequence=896), (1, 8, 20)),
        "llama": (dict(hidden=2560, layers=8, sequence=3072), (1, 2, 5)),
        "vit": (dict(hidden=960, layers=14, sequence=288), (5, 36, 110)),
        "dlrm": (
            dict(hidden=1280, layers=18, sequence=120_000),
            (1500, 10_000, 40_000),
        ),
        "relational": (dict(hidden=160, layers=20, sequence=36_000), (4, 40, 110)),
    },
    "held3": {
        "bert": (dict(hidden=640, layers=20, sequence=448), (2, 28, 80)),
        "gpt": (dict(hidden=1408, layers=12, sequence=640), (1, 9, 24)),
        "llama": (dict(hidden=3072, layers=7, sequence=1536), (1, 3, 8)),
        "vit": (dict(hidden=896, layers=18, sequence=320), (3, 28, 90)),
        "dlrm": (dict(hidden=1792, layers=22, sequence=60_000), (1200, 7000, 28_000)),
        "relational": (dict(hidden=224, layers=14, sequence=28_000), (3, 36, 100)),
    },
    "held4": {
        "bert": (dict(hidden=1152, layers=14, sequence=288), (3, 32, 88)),
        "gpt": (dict(hidden=896, layers=22, sequence=704), (1, 10, 28)),
        "llama": (dict(hidden=1536, layers=10, sequence=1280), (1, 6, 20)),
        "vit": (dict(hidden=1088, layers=13, sequence=352), (4, 30, 84)),
        "dlrm": (dict(hidden=1408, layers=24, sequence=90_000), (900, 9000, 36_000)),
        "relational": (dict(hidden=176, layers=18, sequence=32_000), (2, 32, 96)),
    },
    "ranks": {
        "bert": (dict(hidden=2048, layers=6, sequence=512), (8, 32, 112)),
        "gpt": (dict(hidden=1280, layers=12, sequence=768), (4, 20, 40)),
        "llama": (dict(hidden=5120, layers=6, sequence=2048), (1, 3, 10)),
    },
}


def layers(name: str, model: nn.Module) -> Any:
    """The repeated layers of a transformer."""
    at = {"bert": "bert.encoder.layer", "gpt": "transformer.h", "llama": "model.layers"}
    return model.get_submodule(at[name])


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """An optimizer's groups: no fused update takes DTensors and others at once."""
    kinds: dict[type, list[Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return [{"params": own} for own in kinds.values()]


class TrainingStep:
    """Forward, backward and a fused optimizer's update."""

    def __init__(self, subject: Subject) -> None:
        """Make the optimizer; its state comes with the first step."""
        parameters = groups_of(subject.model)
        if subject.optimizer == "adamw":
            self._optimizer: Any = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=1e-5, fused=True)
        self._forward = subject.forward

    def __call__(self) -> None:
        """Run one step."""
        for part in self._parts():
            part()

    def host_us(self, num_steps: int = 5) -> dict[str, float]:
        """Microseconds that the host takes for each phase, the median of some steps.

        The device has nothing to do when a step starts; one that falls behind by more
        launches than its queue holds makes the host wait all the same.
        """
        rounds: list[list[float]] = []
        for _ in range(num_steps):
            at = [wait()]
            for part in self._parts():
                part()
                at.append(time.perf_counter())
            rounds.append([(b - a) * 1e6 for a, b in itertools.pairwise(at)])
        medians = (round(statistics.median(us), 1) for us in zip(*rounds, strict=True))
        return dict(zip((phase.value for phase in Phase), medians, strict=True))

    def _parts(self) -> Iterator[Step]:
        """By phase: forward, backward, update."""
        self._optimizer.zero_grad(set_to_none=True)
        found: list[Tensor] = []
        yield lambda: found.append(self._forward())
        yield lambda: found.pop().backward()
        yield self._optimizer.step
