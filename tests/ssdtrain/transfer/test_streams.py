"""The cheap stream context leaves everything as it was, as `torch.cuda.stream` does."""

from dataclasses import dataclass

import pytest
import torch

from ssdtrain.transfer.streams import OnStream


@dataclass(frozen=True)
class Stream:
    device: int
    name: str


class Gpus:
    """Two devices, each with a current stream; `set_stream` changes the device too."""

    def __init__(self, patch: pytest.MonkeyPatch, device: int) -> None:
        self.device = device
        self.streams = [Stream(0, "user's"), Stream(1, "user's")]
        patch.setattr(torch.cuda, "current_device", lambda: self.device)
        patch.setattr(torch.cuda, "current_stream", self._current)
        patch.setattr(torch.cuda, "set_stream", self._set)

    @property
    def state(self) -> tuple[int, list[Stream]]:
        return self.device, list(self.streams)

    def _current(self, device: int | None = None) -> Stream:
        return self.streams[self.device if device is None else device]

    def _set(self, stream: Stream) -> None:
        self.device = stream.device
        self.streams[stream.device] = stream


@pytest.mark.parametrize("users_device", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(
    monkeypatch: pytest.MonkeyPatch, users_device: int, fails: bool
) -> None:
    gpus = Gpus(monkeypatch, users_device)
    before, ours = gpus.state, Stream(1, "store")
    try:
        with OnStream(ours, 1):  # type: ignore[arg-type]
            assert gpus.streams == [Stream(0, "user's"), ours]
            if fails:
                raise ValueError("the copy")
    except ValueError:
        assert fails
    assert gpus.state == before
