"""Six kinds of model whose training steps are predicted, then measured.

All are built on torch's present default device: meta for predictions. Weights and
inputs are random.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.bench.models.stock import encoder


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


def _stock(kind: str, head: str, **settings: Any) -> nn.Module:
    """A model of transformers, in bf16."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{kind}{head}")(config)
    return model.to(torch.bfloat16).train()


def _language(
    model: nn.Module, words: int, size: tuple[int, int], **more: Any
) -> Subject:
    """A model of transformers that gives logits of each token."""
    ids, labels = _ids(words, *size), _ids(words, *size)

    def forward() -> Tensor:
        logits = model(input_ids=ids, **more).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Subject(model, forward, "adamw")


def bert(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    model = _stock("Bert", "ForMaskedLM", **encoder(hidden, layers, hidden // 64))
    return _language(model, 30522, (batch, sequence))


def gpt(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": hidden // 64}
    model = _stock("GPT2", "LMHeadModel", **sizes, n_positions=sequence)
    return _language(model, 50257, (batch, sequence), use_cache=False)


def llama(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    model = _stock(
        *("Llama", "ForCausalLM"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        intermediate_size=256 * (hidden * 11 // 4 // 256),
        vocab_size=32000,
        max_position_embeddings=sequence,
    )
    return _language(model, 32000, (batch, sequence), use_cache=False)


def vit(batch: int, *, hidden: int, layers: int, sequence: int) -> Subject:
    """`sequence` is the side of the image; patches are of 16."""
    more = {"image_size": sequence, "num_labels": 1000}
    settings = encoder(hidden, layers, hidden // 64, **more)
    model = _stock("ViT", "ForImageClassification", **settings)
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
# Hidden size, layers, sequence, batches: the host binds the first of them. No model was
# made on any of these.
SHAPES: dict[str, dict[str, tuple[int, int, int, tuple[int, ...]]]] = {
    "tiny": {
        "bert": (128, 2, 64, (1, 2)),
        "gpt": (128, 2, 64, (1, 2)),
        "llama": (1024, 2, 64, (1, 2)),
        "vit": (128, 2, 64, (1, 2)),
        "dlrm": (64, 3, 100, (16, 32)),
        "relational": (32, 3, 100, (1, 2)),
    },
    "test": {
        "bert": (768, 12, 512, (4, 24, 64)),
        "gpt": (1600, 20, 768, (1, 6, 16)),
        "llama": (3072, 10, 4096, (1, 2, 3)),
        "vit": (768, 12, 384, (4, 24, 80)),
        "dlrm": (2048, 20, 50000, (1024, 6000, 24000)),
        "relational": (256, 12, 30000, (4, 30, 120)),
    },
    "held3": {
        "bert": (640, 20, 448, (2, 28, 80)),
        "gpt": (1408, 12, 640, (1, 9, 24)),
        "llama": (3072, 7, 1536, (1, 3, 8)),
        "vit": (896, 18, 320, (3, 28, 90)),
        "dlrm": (1792, 22, 60000, (1200, 7000, 28000)),
        "relational": (224, 14, 28000, (3, 36, 100)),
    },
    "held4": {
        "bert": (1152, 14, 288, (3, 32, 88)),
        "gpt": (896, 22, 704, (1, 10, 28)),
        "llama": (1536, 10, 1280, (1, 6, 20)),
        "vit": (1088, 13, 352, (4, 30, 84)),
        "dlrm": (1408, 24, 90000, (900, 9000, 36000)),
        "relational": (176, 18, 32000, (2, 32, 96)),
    },
}


def subject_of(model: str, batch: int, shapes: str) -> Subject:
    """Build a model at a batch of a set of shapes."""
    hidden, layers, sequence, _ = SHAPES[shapes][model]
    return MAKERS[model](batch, hidden=hidden, layers=layers, sequence=sequence)
