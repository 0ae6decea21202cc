"""The set-ups of the source's figures and tables. Figure 5.10's are those of Narayanan
et al. 2021 (arXiv 2104.04473, Table 2): PTD-P against ZeRO-3, sequence 2048, with the
throughput measured there, which counts recomputation as work done."""

from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.tools.project.model import Case, Sharding, Throughput
from ssdtrain.tools.project.tables import (
    GB,
    GPUS,
    MODELS,
    TERA,
    GpuSheet,
    TransformerShape,
    find_row,
)

GIB = 1 << 30


class CaseSet(str, Enum):
    """Groups of cases the command can print."""

    FIGURE_5_10 = "figure-5.10"
    """Twelve large systems; also those of Figure 5.13."""
    TABLE_5_4 = "table-5.4"
    """BERT on two A100, measured by the source."""
    TABLE_5_5 = "table-5.5"
    """The same scaled up to 64 GPUs."""


class MeasuredCase(NamedTuple):
    """One column of the source's Table 5.4: BERT, batch 16, sequence 1024, TP 2."""

    hidden: int
    layers: int
    offloaded_gib: float
    """Printed as GB; see docs/project.md for why it is read as GiB."""
    estimate_gib: float
    write_gb_per_s: float


TABLE_5_4 = (
    MeasuredCase(8192, 4, 10.37, 11.13, 18.0),
    MeasuredCase(12288, 3, 12.85, 12.60, 13.8),
    MeasuredCase(16384, 2, 10.75, 11.50, 8.76),
)

# (model, GPUs, batch, micro-batch, reached TFLOP/s) of ZeRO-3, and of PTD-P with
# (model, GPUs, pipeline stages, chunks a GPU, batch, TFLOP/s), micro-batch 1, TP 8.
ZERO3_ROWS = (
    ("gpt-175b", 384, 1536, 4, 144),
    ("gpt-175b", 768, 1536, 2, 88),
    ("gpt-175b", 1536, 1536, 1, 44),
    ("gpt-530b", 640, 2560, 4, 138),
    ("gpt-530b", 1120, 2240, 2, 98),
    ("gpt-530b", 2240, 2240, 1, 48),
)
PTD_ROWS = (
    ("gpt-175b", 384, 12, 2, 1536, 153),
    ("gpt-175b", 768, 12, 2, 1536, 149),
    ("gpt-175b", 1536, 12, 2, 1536, 141),
    ("gpt-530b", 560, 35, 3, 2240, 171),
    ("gpt-530b", 1120, 35, 3, 2240, 167),
    ("gpt-530b", 2240, 35, 3, 2240, 159),
)
SCALING = ((4, 1), (8, 1), (8, 2), (8, 4), (8, 8))
"""(tensor, pipeline) of Table 5.5: first tensor, then pipeline with more layers."""


def cases(which: CaseSet, gpu: GpuSheet | None = None) -> tuple[Case, ...]:
    """Return the cases of one set; another GPU's peak scales the reached throughput."""
    makers = {
        CaseSet.FIGURE_5_10: figure_5_10,
        CaseSet.TABLE_5_4: table_5_4,
        CaseSet.TABLE_5_5: table_5_5,
    }
    return makers[which](gpu or find_row(GPUS, "a100-pcie", "GPU"))


def figure_5_10(gpu: GpuSheet) -> tuple[Case, ...]:
    """Return six ZeRO-3 and six PTD-P systems."""
    scale = gpu.tflops / find_row(GPUS, "a100-pcie", "GPU").tflops
    zero3 = [
        Case(
            name=f"{gpus} ZeRO3 {model[4:].upper()}",
            model=find_row(MODELS, model, "model"),
            gpu=gpu,
            gpus=gpus,
            sharding=Sharding.ZERO3,
            batch=batch,
            micro_batch=micro_batch,
            tflops=tflops * scale,
            throughput=Throughput.END_TO_END,
        )
        for model, gpus, batch, micro_batch, tflops in ZERO3_ROWS
    ]
    ptd = [
        Case(
            name=f"{gpus} Megatron {model[4:].upper()}",
            model=find_row(MODELS, model, "model"),
            gpu=gpu,
            gpus=gpus,
            tensor=8,
            pipeline=pipeline,
            chunks=chunks,
            sequence_parallel=True,
            batch=batch,
            micro_batch=1,
            tflops=tflops * scale,
            throughput=Throughput.END_TO_END,
        )
        for model, gpus, pipeline, chunks, batch, tflops in PTD_ROWS
    ]
    return (*zero3, *ptd)


def bert(hidden: int, layers: int) -> TransformerShape:
    """Return the evaluation's BERT: heads of 128, sequence 1024."""
    return TransformerShape(
        name=f"bert-h{hidden}-l{layers}",
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        sequence=1024,
        vocabulary=30522,
    )


def implied_tflops(measured: MeasuredCase) -> float:
    """Model TFLOP/s a GPU that Table 5.4's figures imply: the FLOPs of a step over
    the step time, which is twice the offloaded amount over the bandwidth."""
    step = 2 * measured.offloaded_gib * GIB / (measured.write_gb_per_s * GB)
    h, s = measured.hidden, 1024
    forward = measured.layers * 16 * s * (24 * h**2 + 4 * s * h)
    return 3 * forward / 2 / step / TERA


def table_5_4(gpu: GpuSheet) -> tuple[Case, ...]:
    """Return the three measured BERTs, at the throughput their figures imply."""
    scale = gpu.tflops / find_row(GPUS, "a100-pcie", "GPU").tflops
    return tuple(
        Case(
            name=f"H{row.hidden} L{row.layers}",
            model=bert(row.hidden, row.layers),
            gpu=gpu,
            gpus=2,
            tensor=2,
            batch=16,
            micro_batch=16,
            tflops=implied_tflops(row) * scale,
            throughput=Throughput.END_TO_END,
        )
        for row in TABLE_5_4
    )


def table_5_5(gpu: GpuSheet, sequence_parallel: bool = True) -> tuple[Case, ...]:
    """Table 5.4's cases as measured, then scaled up from 2 to 64 GPUs by the rule of
    the printed table, which is lost: tensor parallelism first, then stages with more
    layers. The pair's throughput is taken for that of the kernels, communication is
    added, and 8 micro-batches of 16 sequences fill the pipeline."""
    rows = []
    for pair, measured in zip(table_5_4(gpu), TABLE_5_4, strict=True):
        rows.append(replace(pair, name=f"{pair.name}, 2 GPUs, TP 2 PP 1"))
        for tensor, pipeline in SCALING:
            model = bert(measured.hidden, measured.layers * pipeline)
            gpus = tensor * pipeline
            rows.append(
                replace(
                    pair,
                    name=f"{pair.name}, {gpus} GPUs, TP {tensor} PP {pipeline}",
                    model=model,
                    gpus=gpus,
                    tensor=tensor,
                    pipeline=pipeline,
                    sequence_parallel=sequence_parallel,
                    batch=8 * 16,
                    throughput=Throughput.KERNEL,
                )
            )
    return tuple(rows)


def parse_set(text: str) -> CaseSet:
    """Return the case set of that name. Raises ConfigError: no such set."""
    try:
        return CaseSet(text)
    except ValueError:
        known = ", ".join(each.value for each in CaseSet)
        raise ConfigError(f"no case set is called {text!r}; known: {known}") from None
