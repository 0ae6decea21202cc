"""One transformer layer: what autograd saves, and what each operator costs, a GPU and
micro-batch: 16-bit data, FlashAttention, a 4h MLP, two dropouts. The inventory is
Korthikanti et al. 2022 (arXiv 2205.05198), section 4, less its 5 a s / h attention
term; the first 10 of its 34 s b h bytes are divided only under sequence parallelism."""

from dataclasses import dataclass
from typing import NamedTuple

from ssdtrain.tools.project.tables import TransformerShape

HALF = 2
SINGLE = 4


@dataclass(frozen=True, kw_only=True)
class Split:
    """How one layer is divided, and the micro-batch it sees."""

    micro_batch: float
    """Sequences."""
    tensor: int = 1
    """Tensor-parallel GPUs."""
    sequence_parallel: bool = False
    """Norms and dropouts are divided over the tensor-parallel GPUs too."""

    @property
    def outer(self) -> int:
        """Divisor of what lies between the tensor-parallel regions."""
        return self.tensor if self.sequence_parallel else 1


class Operator(NamedTuple):
    """A sub-layer: floating-point operations and bytes of GPU memory traffic."""

    name: str
    flops: float
    num_bytes: float


def saved_bytes(
    model: TransformerShape, split: Split, dropout_mask_bytes: float = 1.0
) -> float:
    """Return the bytes one layer saves for backward on one GPU."""
    tokens = split.micro_batch * model.sequence
    wide = tokens * model.hidden / split.outer
    inner = tokens * model.hidden / split.tensor
    statistics = 2 * SINGLE * tokens / split.outer
    # In the order of the forward.
    tensors = (
        ("attention norm input", HALF * wide),
        ("attention norm mean and deviation", statistics),
        ("query, key and value product input", HALF * wide),
        ("query, key, value", 3 * HALF * inner),
        ("attention output", HALF * inner),
        ("attention log-sum-exp", SINGLE * tokens * model.heads / split.tensor),
        ("attention dropout mask", dropout_mask_bytes * wide),
        ("MLP norm input", HALF * wide),
        ("MLP norm mean and deviation", statistics),
        ("first MLP product input", HALF * wide),
        ("GELU input", 4 * HALF * inner),
        ("second MLP product input", 4 * HALF * inner),
        ("MLP dropout mask", dropout_mask_bytes * wide),
    )
    return sum(size for _, size in tensors)


def operators(model: TransformerShape, split: Split) -> tuple[Operator, ...]:
    """Forward operators of one layer on one GPU. Products count 2 m n k; attention
    counts both in full, as Megatron-LM does (a causal kernel does half of it)."""
    tokens = split.micro_batch * model.sequence
    h = model.hidden
    wide = HALF * tokens * h / split.outer
    inner = HALF * tokens * h / split.tensor
    weight = HALF * h * h / split.tensor
    product = 2 * tokens * h * h / split.tensor
    # A tensor-parallel region reads its whole input, gathered where it was divided.
    whole = HALF * tokens * h
    attention = 4 * tokens * model.sequence * h / split.tensor
    mask = tokens * h / split.outer
    costs = (
        ("attention norm", 0.0, 2 * wide),
        ("query, key and value product", 3 * product, whole + 3 * weight + 3 * inner),
        ("attention", attention, 4 * inner),
        ("attention output product", product, inner + weight + whole),
        ("attention dropout and sum", 0.0, 3 * wide + mask),
        ("MLP norm", 0.0, 2 * wide),
        ("first MLP product", 4 * product, whole + 4 * weight + 4 * inner),
        ("GELU", 0.0, 8 * inner),
        ("second MLP product", 4 * product, 4 * inner + 4 * weight + whole),
        ("MLP dropout and sum", 0.0, 3 * wide + mask),
    )
    return tuple(Operator(*cost) for cost in costs)


def reduced_bytes(model: TransformerShape, split: Split) -> float:
    """Return the bytes a GPU sends in a layer's forward for tensor parallelism: two
    ring all-reduces (or gather and scatter) of the hidden state."""
    state = HALF * split.micro_batch * model.sequence * model.hidden
    return 2 * 2 * (split.tensor - 1) / split.tensor * state
