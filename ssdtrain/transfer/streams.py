"""Small contexts around calls on CUDA streams.

They stand in for `torch.cuda.stream` and for generators at every copy and every wait:
there the host's time counts, because a GPU with small layers runs dry behind it.
"""

import torch

Timed = tuple[torch.cuda.Event, torch.cuda.Event]


class CurrentStream:
    """Looks up the current stream of a device without making an object each time."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._known: dict[int, torch.cuda.Stream] = {}

    def get(self) -> torch.cuda.Stream:
        """The current stream."""
        number, device, kind = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(number)
        if stream is None:
            stream = torch.cuda.Stream(
                stream_id=number, device_index=device, device_type=kind
            )
            self._known[number] = stream
        return stream


class OnStream:
    """Makes a stream current, as `torch.cuda.stream` does at several times the cost.

    Setting a stream makes its device current as well. Both are put back, also where the
    caller's current device is another one.
    """

    __slots__ = ("_before", "_here", "_index", "_stream")

    def __init__(self, stream: torch.cuda.Stream, index: int) -> None:
        self._stream = stream
        self._index = index

    def __enter__(self) -> None:
        self._before = self._here = torch._C._cuda_getCurrentStream(self._index)
        device = torch._C._cuda_getDevice()
        if device != self._index:
            self._here = torch._C._cuda_getCurrentStream(device)
        stream = self._stream
        torch._C._cuda_setStream(
            stream.stream_id, stream.device_index, stream.device_type
        )

    def __exit__(self, *error: object) -> None:
        torch._C._cuda_setStream(*self._before)
        if self._here is not self._before:
            torch._C._cuda_setStream(*self._here)


class Stall:
    """Two timed events on a stream, around what may leave it idle."""

    __slots__ = ("_before", "_stalls", "_stream")

    def __init__(self, stream: torch.cuda.Stream, stalls: "Stalls") -> None:
        self._stream = stream
        self._stalls = stalls

    def __enter__(self) -> None:
        self._before = self._stalls.event()
        self._before.record(self._stream)

    def __exit__(self, *error: object) -> None:
        behind = self._stalls.event()
        behind.record(self._stream)
        self._stalls.pairs.append((self._before, behind))


class Stalls:
    """The account that stalls of any thread go to."""

    def __init__(self) -> None:
        self.pairs: list[Timed] = []
        self._free: list[torch.cuda.Event] = []

    def event(self) -> torch.cuda.Event:
        """A timed event; one that was read before, if there is any."""
        try:
            return self._free.pop()
        except IndexError:  # not asked first: another thread may take the last one
            return torch.cuda.Event(enable_timing=True)

    def cut(self) -> list[Timed]:
        """The account so far; a new one begins."""
        pairs, self.pairs = self.pairs, []
        return pairs

    def sum_ms(self, pairs: list[Timed]) -> float:
        """Device time between the events of each pair, which are then used again."""
        for _, behind in pairs:
            behind.synchronize()
        found = sum(before.elapsed_time(behind) for before, behind in pairs)
        self.reuse(pairs)
        return float(found)

    def reuse(self, pairs: list[Timed]) -> None:
        """These have been read."""
        for pair in pairs:
            self._free.extend(pair)
        pairs.clear()
