"""What a test says of calls that must not wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """An error where anything inside waits for the device.

    PyTorch warns when the mode is first set, after it has set it: as an error that
    would leave the mode to all tests that follow.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
