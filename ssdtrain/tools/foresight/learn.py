"""Learns the machine at hand from nothing, a CPU among them: kernels of the random
design are timed into a file; the ceilings are the highest rates that any of them
reached; host times come from traces. A shipped device needs less: `calibrate.py` scales
it.

[Note: own machine]
The traces come last: a profiler that was used once slows every later launch. A CPU runs
an operator's kernel within the operator, so of its traces only the gaps between
operators (T1) and the times of views (T5) are used: other operators become launches
that cost nothing next to their kernel.
(tests/ssdtrain/tools/foresight/test_own.py)
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.calibrate import Program
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.device import DeviceCosts
from ssdtrain.tools.foresight.fit import (
    LEAST_TIMES,
    Times,
    fit_closed_form,
    fit_forest,
    scikit_learn,
    score,
)
from ssdtrain.tools.foresight.gather import gather, read_times
from ssdtrain.tools.foresight.host import HostTable, fit_correction
from ssdtrain.tools.foresight.lowering import NOTHING
from ssdtrain.tools.foresight.overheads import operator_means
from ssdtrain.tools.foresight.spec import DeviceSpec, Kind
from ssdtrain.tools.foresight.tracing import Step, step_us, traced

COUNTS = {
    KernelFamily.PRODUCT: 400,
    KernelFamily.MEMORY: 300,
    KernelFamily.ATTENTION: 140,
    KernelFamily.NORM: 100,
    KernelFamily.LOOKUP: 90,
    KernelFamily.OPTIMIZER: 30,
    KernelFamily.CONVOLUTION: 60,
}
"""Calls of a round; what a budget leaves over is split in these proportions."""
ROUNDS = 10
# Traffic above it is memory's, not a cache's.
CACHES = 2.0
DEFAULT_L2_BYTES = 16e6


def own_device(kind: Kind) -> torch.device:
    """The present machine's device of a kind. Raises ConfigError: there is none."""
    if kind is Kind.CUDA and not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no CUDA device; --on cpu learns or times its CPU."
        )
    return torch.device(kind.value)


def own_spec(kind: Kind, times: Times) -> DeviceSpec:
    """The machine's sizes, and as ceilings the highest rates that were measured. Raises
    ConfigError: without products in fp32 or element-wise operators no ceiling is known.
    `kind`: of the device; `times`: calls and their microseconds."""
    l2_bytes, num_sms, memory_bytes, name = _sizes(kind)
    tflops: dict[str, float] = {}
    for call, us in times:
        if call.family is KernelFamily.PRODUCT:
            rate = call.flops / us / 1e6
            tflops[call.dtype] = max(tflops.get(call.dtype, 0.0), rate)
    moved = [(c, us) for c, us in times if c.family is KernelFamily.MEMORY]
    moved.sort(key=lambda pair: pair[0].num_bytes)
    cold = [(c, us) for c, us in moved if c.num_bytes >= CACHES * l2_bytes]
    cold = cold or moved[-1 - len(moved) // 10 :]
    if "fp32" not in tflops or not cold:
        raise ConfigError(
            "a machine's ceilings need times of fp32 products and of element-wise "
            f"operators, got {len(times)} times without; gather for longer."
        )
    return DeviceSpec(
        name=name,
        kind=kind,
        num_sms=num_sms,
        l2_bytes=l2_bytes,
        memory_bytes=memory_bytes,
        memory_gb_per_s=max(c.num_bytes / us for c, us in cold) / 1e3,
        tflops=tflops,
        power_limit_watts=0.0,
    )


def _sizes(kind: Kind) -> tuple[float, int, float, str]:
    """(bytes of the last cache, units, bytes of memory, name)."""
    if kind is Kind.CUDA:
        found = torch.cuda.get_device_properties(0)
        sizes = float(found.L2_cache_size), found.multi_processor_count
        return *sizes, float(found.total_memory), found.name
    l2_bytes = 0
    if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        l2_bytes = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_threads = torch.get_num_threads()
    name = f"cpu of {num_threads} thread{'s' if num_threads > 1 else ''}"
    return float(l2_bytes) or DEFAULT_L2_BYTES, num_threads, float(memory_bytes), name


class _Words(nn.Module):
    """Embedding, two transformer layers, logits: the operators of language models."""

    def __init__(self, width: int, vocabulary: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.out = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) of words to the loss of telling each from itself."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


class _Dense(nn.Module):
    """A multilayer perceptron over joined inputs, as recommendation models have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to a scalar."""
        for layer in self.layers:
            x = torch.relu(layer(torch.cat([x, x.tanh()], dim=1))) + x * 0.5
        return x.square().mean()


def host_bound_steps(device: torch.device) -> list[Step]:
    """Training steps so small that the host's time is nearly all of them."""
    with device:
        ids = torch.randint(0, 64, (2, 16))
        words, dense = _Words(32).train(), _Dense(16).train()
        x = torch.randn(4, 16)
    each = [
        Program(words, lambda: words(ids), "adamw"),
        Program(dense, lambda: dense(x), "adamw"),
    ]
    return [one.step() for one in each]


def host_table(kind: Kind, steps: Sequence[Step]) -> HostTable:
    """Host times of the operators of some steps. See [Note: own machine]."""
    alone = [step_us(step) for step in steps]
    rows = [operator_means(traced(step, 6)) for step in steps]
    # A trace of six steps tells of six; a program is one.
    counted = [[{**row, "count": row["count"] / 6} for row in own] for own in rows]
    correction = fit_correction(list(zip(counted, alone, strict=True)))
    found = HostTable([row for own in rows for row in own], correction).as_dict()
    if kind is Kind.CPU:
        found = {
            key: value if _is_bare(key.partition(" ")[2]) else (value[0], 0, 0, 0, 0, 1)
            for key, value in found.items()
        }
    return HostTable.from_dict(found)


def _is_bare(name: str) -> bool:
    """Whether an operator runs no kernel: a view, or memory without content."""
    short = name.removeprefix("aten::")
    if short in (*NOTHING, "_unsafe_view", "_reshape_alias"):
        return True
    packet = getattr(torch.ops.aten, short, None)
    if packet is None:
        return False
    returned = getattr(packet, packet.overloads()[0])._schema.returns
    aliases = [one.alias_info for one in returned if one.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def assemble(kind: Kind, times: Times, host: HostTable) -> DeviceCosts:
    """A device of measured ceilings, a host, and forests where the times suffice."""
    spec = own_spec(kind, times)
    by_family: dict[KernelFamily, list[tuple[Call, float]]] = {}
    for call, us in times:
        by_family.setdefault(call.family, []).append((call, us))
    device = DeviceCosts(spec=spec, host=host)
    for family, own in by_family.items():
        if len(own) >= LEAST_TIMES:
            device = fitted(device, family, own, score(own, spec)["gmae"])
    return device


def fitted(
    device: DeviceCosts,
    family: KernelFamily,
    times: Times,
    error: float,
    *,
    relatives: Sequence[tuple[Times, DeviceSpec]] = (),
) -> DeviceCosts:
    """The device with a family's model learned from these times. `relatives`: times on
    other devices, which join in."""
    law = fit_closed_form(times, device.spec, relatives=relatives)
    forest = fit_forest(times, device.spec, law=law, relatives=relatives)
    laws = {other: one for other, one in device.laws.items() if other is not family}
    return replace(
        device,
        forests={**device.forests, family: forest},
        laws=laws if law is None else {**laws, family: law},
        errors={**device.errors, family: error},
    )


def learn(kind: Kind, path: Path, *, seconds: float, seed: int = 0) -> DeviceCosts:
    """Time kernels for `seconds` into `path`, or go on with it, then trace and fit.
    Raises ConfigError: no such device, no scikit-learn, or too few times."""
    device = own_device(kind)
    scikit_learn()  # missed now, and not behind a minute of timing
    counts = {family: ROUNDS * count for family, count in COUNTS.items()}
    gather(counts, path, device, seed=seed, budget_s=seconds)
    return assemble(kind, read_times(path), host_table(kind, host_bound_steps(device)))
