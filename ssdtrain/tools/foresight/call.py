"""What one operator asks of the device: the input of every kernel model. Graphs, the
random design and the gatherer speak of the same sizes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class KernelFamily(str, Enum):
    """Which kernel model prices a call."""

    PRODUCT = "product"
    """Matrix products; variant: layout of both operands (`nn`, `nt`, `tn`, `tt`)."""
    ATTENTION = "attention"
    """Fused attention; variant: `forward` or `backward`."""
    NORM = "norm"
    """Row-wise normalizations, softmax and their backward; variant: operator."""
    MEMORY = "memory"
    """Element-wise operators, copies and reductions; variant: operator."""
    LOOKUP = "lookup"
    """Rows read from, or added to, a table; variant: operator."""
    CONVOLUTION = "convolution"
    """2-d convolutions; variant: `forward` or `backward`."""
    OPTIMIZER = "optimizer"
    """One update of many parameters; variant: operator."""


ELEMENT_BYTES: Mapping[str, int] = {
    **{"bool": 1, "int8": 1, "fp8": 1, "bf16": 2, "fp16": 2, "int16": 2, "fp32": 4},
    **{"int32": 4, "fp64": 8, "int64": 8, "complex64": 8, "complex128": 16},
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operator with its sizes. Bytes and FLOPs are of the whole operator."""

    family: KernelFamily
    variant: str
    dtype: str
    """A key of `ELEMENT_BYTES`."""
    sizes: Mapping[str, float] = field(default_factory=dict)
    """What the family's model reads: `m`, `n`, `k`, `rows` and so on."""
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    warm_bytes: float = 0.0
    """Part of `read_bytes` that the L2 cache may still hold."""

    @property
    def num_bytes(self) -> float:
        """Traffic in both directions."""
        return self.read_bytes + self.written_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = asdict(self)
        values["family"] = self.family.value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Call":
        """Build a `Call` from what `as_dict` made."""
        return cls(**{**values, "family": KernelFamily(values["family"])})
