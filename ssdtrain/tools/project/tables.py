"""GPUs, SSDs and models as data, in GB of 1e9 and PB of 1e15 bytes. Drives are those of
Table 5.1 and 5.4.4, with their prices; rates and watts are the vendors'."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.spec import (
    A100_PCIE,
    A100_SXM,
    B200,
    H100,
    H200,
    DeviceSpec,
)

GB = 1e9
PB = 1e15
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class GpuSheet:
    """A GPU's data sheet, and what it costs."""

    name: str
    spec: DeviceSpec
    """Rates and nominal memory; a card holds about 7 % more than that in GB of 1e9,
    which is left to the CUDA context and to fragmentation."""
    price_usd: float | None
    """The source's price where it gives one; else set `--gpu-price`."""

    @property
    def memory_gb(self) -> float:
        """Nominal memory in GB."""
        return self.spec.memory_bytes / GB

    @property
    def tflops(self) -> float:
        """Peak dense fp16/bf16 tensor throughput in TFLOP/s."""
        return self.spec.tflops["fp16"]

    @property
    def peer_gb_per_s(self) -> float:
        """One direction to another GPU of the node (NVLink; PCIe where there is none).
        Raises ConfigError: the data sheet does not name it."""
        if self.spec.peer_gb_per_s is None:
            raise ConfigError(f"{self.name}: no rate between GPUs is known")
        return self.spec.peer_gb_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for tables and JSON."""
        return {
            "name": self.name,
            "memory_gb": self.memory_gb,
            "tflops": self.tflops,
            "memory_gb_per_s": self.spec.memory_gb_per_s,
            "host_gb_per_s": self.spec.host_gb_per_s,
            "peer_gb_per_s": self.spec.peer_gb_per_s,
            "watts": self.spec.power_limit_watts,
            "price_usd": self.price_usd,
        }


@dataclass(frozen=True)
class Ssd:
    """A drive and its endurance rating."""

    name: str
    capacity_tb: float
    rated_pbw: float
    """Petabytes that may be written under the JESD219 workload."""
    price_per_pbw_usd: float
    write_gb_per_s: float
    """Sequential writes, sustained (not into a cache of faster cells)."""
    watts: float
    cells: str
    source: str

    @property
    def price_usd(self) -> float:
        """Price of one drive: price per PBW times PBW, as the source computes it."""
        return self.price_per_pbw_usd * self.rated_pbw


@dataclass(frozen=True)
class TransformerShape:
    """A decoder- or encoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"model {self.name}: {field} expects 1 or more, got "
                    f"{getattr(self, field)}"
                )

    @property
    def layer_parameters(self) -> int:
        """12 h^2 weights and 13 h biases and norms (Narayanan et al. 2021, Eq. 2)."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def parameters(self) -> int:
        """All layers and the (shared) word and position embeddings."""
        embeddings = (self.vocabulary + self.sequence) * self.hidden
        return self.layers * self.layer_parameters + embeddings


GPUS = (
    GpuSheet(name="a100-pcie", spec=A100_PCIE, price_usd=10_000),
    GpuSheet(name="a100-sxm", spec=A100_SXM, price_usd=None),
    GpuSheet(name="h100-sxm", spec=H100, price_usd=None),
    GpuSheet(name="h200-sxm", spec=H200, price_usd=None),
    GpuSheet(name="b200-sxm", spec=B200, price_usd=None),
)

_SOLIDIGM = "Table 5.1, Solidigm D7-"
_OPTANE = "5.4.4, Intel Optane P5800X (100 writes a day for 5 years)"
_980_PRO = "5.4.4, Samsung 980 PRO 1 TB (600 TBW; four for US$360)"
SSDS = (
    Ssd("fl6", 3.2, 342, 13.9, 5.8, 20, "96L SLC", "Table 5.1, Kioxia FL6"),
    Ssd("d7-p5620", 12.8, 65.4, 43.8, 4.2, 20, "144L TLC", f"{_SOLIDIGM}P5620"),
    Ssd("d7-p5810", 1.6, 146, 11.1, 4.0, 20, "144L SLC", f"{_SOLIDIGM}P5810"),
    Ssd("p5800x", 1.6, 292, 10.27, 6.2, 20, "3D XPoint", _OPTANE),
    # Its sheet's 5.0 GB/s hold for the first 100 GB or so.
    Ssd("980-pro", 1.0, 0.6, 150.0, 2.0, 20, "128L TLC", _980_PRO),
)
MODELS = (
    TransformerShape("gpt-22b", 48, 6144, 64),
    TransformerShape("gpt-175b", 96, 12288, 96),
    TransformerShape("gpt-530b", 105, 20480, 128),
    TransformerShape("gpt-1t", 128, 25600, 160),
)


Row = TypeVar("Row", GpuSheet, Ssd, TransformerShape)


def find_row(table: Iterable[Row], name: str, what: str) -> Row:
    """Return the row of that name. Raises ConfigError, with the names there are."""
    rows = {row.name: row for row in table}
    if name not in rows:
        known = ", ".join(rows)
        raise ConfigError(f"no {what} is called {name!r}; known: {known}")
    return rows[name]
