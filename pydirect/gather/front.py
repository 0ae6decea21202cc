"""Engine, survey, chooser and counters of one device, brought together."""

import functools

import torch

from pydirect.gather.chooser import Chooser
from pydirect.gather.counters import Counters
from pydirect.gather.on_gpu import Engine
from pydirect.gather.request import Path, Request
from pydirect.gather.survey import Look, Survey
from pydirect.memory import is_pinned


class Front:
    """Gathers onto one device, path included."""

    def __init__(self, device: torch.device) -> None:
        self.engine = Engine(device)
        self.chooser = Chooser(self.engine)
        self._survey = Survey(self.engine.module, device)

    def gather(self, request: Request, path: Path | None, max_sms: int | None) -> None:
        """Gather on the current stream; ``path`` None lets the chooser decide."""
        self.engine.raise_if_any()
        if request.num_indices == 0 or request.row_bytes == 0:
            return
        look = Look()
        if path in (None, Path.SORTED):
            look = self._survey.look(request.table, request.index)
        chosen = self.chooser.choose(request, look) if path is None else path
        counters().count(
            chosen,
            request.out.nbytes,
            unpinned=path is None and not is_pinned(request.table),
        )
        self.engine.gather(
            request, chosen, max_sms=max_sms, distinct_share=look.distinct_share
        )


@functools.cache
def front(device: torch.device) -> Front:
    """The front of a device (with an index)."""
    with torch.cuda.device(device):
        return Front(device)


@functools.cache
def counters() -> Counters:
    """The counters of this process."""
    return Counters()
