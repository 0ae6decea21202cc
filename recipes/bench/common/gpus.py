"""The GPUs of a host, which share what is to be measured."""

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def visible_gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls those that this process sees."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [each.strip() for each in told.split(",") if each.strip()]
    return named or [str(each) for each in range(torch.cuda.device_count())]


def on_gpus(
    names: Sequence[str], work: Callable[[str, str], None], gpus: Sequence[str]
) -> None:
    """Call `work` with every name and the GPU that is free for it; "": a CPU.

    gpus: one that is named twice does two things at a time.
    """
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def one(name: str) -> None:
        gpu = free.get()
        try:
            work(name, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(one, names))
