"""Backward begins when everything has left, however busy the disk is: a backward that
asks for a tensor before it is written cancels the write."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ssdtrain.transfer.offloader import Offloader


@contextmanager
def written_before_backward() -> Iterator[None]:
    """For every session that is opened inside."""
    offloaders: list[Offloader] = []
    start, close = Offloader.__init__, Offloader.close
    backward = torch.autograd.backward

    def starting(self: Offloader, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        offloaders.append(self)

    def closing(self: Offloader) -> None:
        offloaders[:] = [each for each in offloaders if each is not self]
        close(self)

    def waiting(*given: Any, **named: Any) -> None:
        for offloader in offloaders:
            offloader.wait_io()
        backward(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offloader, "__init__", starting)
        patch.setattr(Offloader, "close", closing)
        patch.setattr(torch.autograd, "backward", waiting)
        yield
