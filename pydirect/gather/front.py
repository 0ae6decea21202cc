"""Engine, survey, chooser and counters of one device, brought together."""

import functools

import torch

from pydirect.gather.chooser import Chooser
from pydirect.gather.counters import Counters
from pydirect.gather.on_gpu import engine_on
from pydirect.gather.request import Path, Request
from pydirect.gather.survey import UNKNOWN, Survey
from pydirect.memory import Reach, reach


class Front:
    """Gathers onto one device, path included."""

    def __init__(self, device: torch.device) -> None:
        self.engine = engine_on(device)
        self.chooser = Chooser(self.engine)
        self._survey = Survey(self.engine.module, device)

    def gather(self, request: Request, path: Path | None, max_sms: int | None) -> None:
        """Gather on the current stream; ``path`` None lets the chooser decide.

        Raises:
            ValueError: a zero-copy path on memory that is not pinned.
        """
        self.engine.raise_if_any()
        if request.num_indices == 0 or request.row_bytes == 0:
            return
        found = reach(request.table)
        if found is Reach.NONE and path in (Path.DIRECT, Path.SORTED):
            raise ValueError(
                f"path {path.value!r} expects a pinned table, got plain memory of "
                f"{request.table.nbytes} bytes: pass it through pydirect.memory.pin"
            )
        look = UNKNOWN
        if path in (None, Path.SORTED):
            look = self._survey.look(request.table, request.index)
        chosen = path
        if chosen is None:
            chosen = self.chooser.choose(request, look, found)
        process_counters().count(
            chosen,
            request.out.nbytes,
            unpinned=path is None and found is Reach.NONE,
        )
        self.engine.gather(
            request, chosen, max_sms=max_sms, distinct_share=look.distinct_share
        )


@functools.cache
def front_of(device: torch.device) -> Front:
    """The front of a device (with an index)."""
    with torch.cuda.device(device):
        return Front(device)


@functools.cache
def process_counters() -> Counters:
    """The counters of this process."""
    return Counters()
