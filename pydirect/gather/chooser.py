"""Choose the path of a gather on a GPU."""

import logging

import torch

from pydirect.gather.calibrate import load_or_measure, size_class
from pydirect.gather.model import Rates, Workload, choose_path
from pydirect.gather.on_gpu import Engine
from pydirect.gather.request import Path, Request
from pydirect.gather.survey import Look
from pydirect.memory import Reach

_REMEMBERED = 4096

RatesKey = tuple[Reach, int, int]
logger = logging.getLogger(__name__)


class Chooser:
    """Paths for one engine; rates are calibrated when a size class is first met."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rates: dict[RatesKey, Rates] = {}
        # Weighing takes longer than launching; training repeats its shapes.
        self._chosen: dict[object, Path] = {}

    def choose(self, request: Request, look: Look, found: Reach) -> Path:
        """The path with the least predicted time; CPU for memory that is not pinned."""
        if found is Reach.NONE:
            return Path.CPU
        key = (
            found,
            torch.get_num_threads(),
            request.table.shape,
            request.index.shape[0],
            look,
        )
        path = self._chosen.get(key)
        if path is None:
            rates = self.rates(request.table, found)
            path = choose_path(rates, workload(request, look))
            if len(self._chosen) >= _REMEMBERED:
                self._chosen.clear()
            self._chosen[key] = path
        return path

    def known(self) -> dict[RatesKey, Rates]:
        """All rates so far, by (memory, size class, number of threads)."""
        return dict(self._rates)

    def rates(self, table: torch.Tensor, found: Reach) -> Rates:
        """The calibrated rates for ``table``, which GPUs reach as ``found``."""
        key = (found, size_class(table.nbytes), torch.get_num_threads())
        if key not in self._rates:
            self._rates[key] = load_or_measure(self._engine, table)
            logger.info("gather rates for size class %s: %s", key, self._rates[key])
        return self._rates[key]


def workload(request: Request, look: Look) -> Workload:
    """What the model needs to know of a request."""
    return Workload(
        num_indices=request.num_indices,
        row_bytes=request.row_bytes,
        table_bytes=request.table.nbytes,
        distinct_share=look.distinct_share,
        run_rows=look.run_rows,
        aligned=(request.table.data_ptr() | request.row_bytes) % 32 == 0,
    )
