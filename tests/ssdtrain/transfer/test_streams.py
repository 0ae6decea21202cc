"""The cheap stream context leaves everything as it was, as `torch.cuda.stream` does."""

from dataclasses import dataclass

import pytest
import torch

from ssdtrain.transfer.cuda import OnStream


@dataclass(frozen=True)
class Stream:
    device_index: int
    stream_id: int
    device_type: int = 1


USERS, STORE = 0, 7


class Gpus:
    """Two devices, each with a current stream; setting one changes the device too."""

    def __init__(self, patch: pytest.MonkeyPatch, device: int) -> None:
        self.device = device
        self.streams = [Stream(0, USERS), Stream(1, USERS)]
        for name, function in {
            "_cuda_getDevice": lambda: self.device,
            "_cuda_getCurrentStream": self._current,
            "_cuda_setStream": self._set,
        }.items():
            patch.setattr(torch._C, name, function, raising=False)

    @property
    def state(self) -> tuple[int, list[Stream]]:
        return self.device, list(self.streams)

    def _current(self, device: int) -> tuple[int, int, int]:
        stream = self.streams[device]
        return stream.stream_id, stream.device_index, stream.device_type

    def _set(self, stream_id: int, device: int, kind: int) -> None:
        self.device = device
        self.streams[device] = Stream(device, stream_id, kind)


@pytest.mark.parametrize("users_device", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(
    monkeypatch: pytest.MonkeyPatch, users_device: int, fails: bool
) -> None:
    gpus = Gpus(monkeypatch, users_device)
    before, ours = gpus.state, Stream(1, STORE)
    try:
        with OnStream(ours, 1):  # type: ignore[arg-type]
            assert gpus.streams == [Stream(0, USERS), ours]
            if fails:
                raise ValueError("the copy")
    except ValueError:
        assert fails
    assert gpus.state == before
