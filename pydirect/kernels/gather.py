"""Launch the kernels of gather.cu. Shapes and alignment are settled here."""

import ctypes
import functools
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from pydirect.kernels.driver import Kernel, Module
from pydirect.kernels.launch import members
from pydirect.kernels.nvrtc import load_cubin

_LINE_BYTES = 128
_WARP = 32
_FLAT_THREADS = 512
_RUN, _RUNS = 32, 64
"""Buckets of a run and runs of a block of them; the same names in gather.cu."""


MAX_GPUS = 8


class TierArgs(ctypes.Structure):
    """Mirrors ``Tiers`` in gather.cu."""

    _fields_ = (
        ("heat", ctypes.c_void_p),
        *members(ctypes.c_int64, "replicated spread"),
        ("num_gpus", ctypes.c_int),
        ("local", ctypes.c_void_p),
        ("share", ctypes.c_void_p * MAX_GPUS),
    )


class GatherArgs(ctypes.Structure):
    """Mirrors the struct of the same name in gather.cu."""

    _fields_ = (
        *members(ctypes.c_void_p, "table out index position total split error fault"),
        *members(ctypes.c_int64, "num_indices num_rows row_bytes"),
        *members(ctypes.c_int, "lanes align_bytes contiguous check wraps"),
        ("tiers", TierArgs),
    )


class BucketArgs(ctypes.Structure):
    """Mirrors the struct of the same name in gather.cu."""

    _fields_ = (
        *members(
            ctypes.c_void_p,
            "index counts sums rank order position owner slots error fault",
        ),
        *members(
            ctypes.c_int64,
            "num_indices num_rows row_bytes num_buckets num_sums num_slots",
        ),
        *members(ctypes.c_int, "shift wraps near_buckets"),
        ("tiers", TierArgs),
    )


class RepeatArgs(ctypes.Structure):
    """Mirrors the struct of the same name in gather.cu."""

    _fields_ = (
        *members(ctypes.c_void_p, "out owner"),
        *members(ctypes.c_int64, "num_indices row_bytes"),
    )


class SurveyArgs(ctypes.Structure):
    """Mirrors the struct of the same name in gather.cu."""

    _fields_ = (
        *members(ctypes.c_void_p, "index bitmap counts"),
        *members(ctypes.c_int64, "num_indices num_bits"),
    )


class Share(Enum):
    """How blocks divide the index."""

    INTERLEAVED = 0
    CONTIGUOUS = 1


class Start(Enum):
    """Where the lanes of a row start; see [Note: Aligned starts] in gather.cu."""

    LINE = 0
    ROW = 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a gather kernel is laid over the GPU."""

    num_blocks: int
    threads: int = 512
    share: Share = Share.INTERLEAVED
    start: Start = Start.LINE


@functools.cache
def gather_module(device: torch.device, options: tuple[str, ...] = ()) -> Module:
    """The compiled kernels on one device; ``options`` go to the compiler."""
    return load_cubin(Path(__file__).with_name("gather.cu"), device, options)


def set_layout(arguments: GatherArgs, start: Start) -> str:
    """Choose word, lanes and alignment; returns the kernel's middle name."""
    table, row_bytes = arguments.table or 0, arguments.row_bytes
    all_bits = table | (arguments.out or 0) | row_bytes
    word = 16 if all_bits % 16 == 0 else 4
    kind = "w16" if word == 16 else "w4" if all_bits % 4 == 0 else "w1"
    if start is Start.ROW and kind != "w1":
        align = word
    elif _LINE_BYTES % row_bytes == 0 and row_bytes >= word:
        align = row_bytes  # such rows never cross a line
    else:
        align = _LINE_BYTES
    arguments.align_bytes = align
    spanned = -(-row_bytes // align) * align
    arguments.lanes = min(_WARP, max(1, 1 << (spanned // word - 1).bit_length()))
    return kind


def launch_gather(
    module: Module, arguments: GatherArgs, index: torch.dtype, shape: Shape, stream: int
) -> None:
    """Launch the gather for ``arguments`` (pointers, sizes, check, positions, tiers).

    A gather with tiers takes an index of int64.
    """
    kind = set_layout(arguments, shape.start)
    arguments.contiguous = shape.share.value
    length = "long" if arguments.row_bytes > 1024 else "short"
    family = "tiered" if arguments.tiers.num_gpus else "gather"
    kernel = module.kernel(f"{family}_{_letters(index)}_{kind}_{length}")
    kernel.launch(
        grid=shape.num_blocks, block=shape.threads, arguments=arguments, stream=stream
    )


def launch_repeats(
    module: Module, arguments: RepeatArgs, *, num_blocks: int, stream: int
) -> None:
    """Copy the rows that have another owner from the owner's place in the output."""
    kernel = module.kernel("copy_repeats")
    kernel.launch(grid=num_blocks, block=512, arguments=arguments, stream=stream)


def num_sums(num_buckets: int) -> int:
    """Elements of ``sums`` for so many buckets."""
    runs = -(-(num_buckets + 1) // _RUN)
    return runs + -(-runs // _RUNS)


def launch_order(
    module: Module,
    arguments: BucketArgs,
    index: torch.dtype,
    *,
    num_blocks: int,
    stream: int,
) -> None:
    """Write the order by page; see [Note: Order without a sort] in gather.cu.

    Args:
        module: where the kernels are.
        arguments: pointers and sizes; ``owner`` and ``slots`` null to read repeats.
        index: dtype of the index.
        num_blocks: blocks a launch takes at most; each runs on one multiprocessor.
        stream: raw handle.
    """
    letters, num = _letters(index), arguments.num_indices
    runs = -(-(arguments.num_buckets + 1) // _RUN)
    steps = [
        ("bucket_clear", max(arguments.num_buckets, arguments.num_slots)),
        (f"bucket_elect_{letters}", num),
        (f"bucket_count_{letters}", num),
        ("bucket_sum", runs),
        ("bucket_base", runs),
        (f"bucket_place_{letters}", num),
    ]
    if not arguments.owner:
        del steps[1]
    for name, items in steps:
        _flat(module.kernel(name), arguments, items, num_blocks, stream)


def launch_survey(
    module: Module,
    arguments: SurveyArgs,
    index: torch.dtype,
    *,
    num_blocks: int,
    stream: int,
) -> None:
    """Count breaks of runs and distinct values; bitmap and counts start at zero."""
    kernel = module.kernel(f"survey_{_letters(index)}")
    _flat(kernel, arguments, arguments.num_indices, num_blocks, stream)


def _flat(
    kernel: Kernel,
    arguments: BucketArgs | SurveyArgs,
    items: int,
    num_blocks: int,
    stream: int,
) -> None:
    """One thread an item, in strides where ``num_blocks`` are too few."""
    blocks = max(1, min(num_blocks, -(-items // _FLAT_THREADS)))
    kernel.launch(grid=blocks, block=_FLAT_THREADS, arguments=arguments, stream=stream)


def _letters(index: torch.dtype) -> str:
    return "i32" if index == torch.int32 else "i64"
