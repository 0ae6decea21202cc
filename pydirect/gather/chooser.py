"""Choose the path of a gather on a GPU."""

import logging

import torch

from pydirect.gather.calibrate import load, measure_and_store, size_class
from pydirect.gather.model import Rates, Workload, choose_path
from pydirect.gather.on_gpu import Engine
from pydirect.gather.request import Path, Request
from pydirect.gather.survey import Look
from pydirect.memory import Reach

_REMEMBERED = 4096
# Smaller gathers are over before a measurement would have paid: they do not start one.
_WORTH_BYTES = 4 << 20

RatesKey = tuple[Reach, int, int]
logger = logging.getLogger(__name__)


class Chooser:
    """Paths for one engine; rates are calibrated when a size class is first met."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rates: dict[RatesKey, Rates] = {}
        self._not_cached: set[RatesKey] = set()
        # Weighing takes longer than launching; training repeats its shapes.
        self._chosen: dict[object, Path] = {}

    def choose(self, request: Request, look: Look, found: Reach) -> Path:
        """The path with the least predicted time; CPU for memory that is not pinned.

        Before there are rates, small gathers go DIRECT and large ones measure them.
        """
        if found is Reach.NONE:
            return Path.CPU
        key = (
            found,
            torch.get_num_threads(),
            request.num_rows,
            request.row_bytes,
            request.num_indices,
            look,
        )
        path = self._chosen.get(key)
        if path is None:
            worth = request.num_indices * request.row_bytes >= _WORTH_BYTES
            rates = self.rates(request.table_bytes, found, measure=worth)
            if rates is None:
                return Path.DIRECT
            dedup_below = self._engine.tuning.dedup_below
            path = choose_path(rates, workload(request, look, dedup_below))
            if len(self._chosen) >= _REMEMBERED:
                self._chosen.clear()
            self._chosen[key] = path
        return path

    def known(self) -> dict[RatesKey, Rates]:
        """All rates so far, by (memory, size class, number of threads)."""
        return dict(self._rates)

    def rates(
        self, table: torch.Tensor, found: Reach, *, measure: bool = True
    ) -> Rates | None:
        """The calibrated rates for ``table``, which GPUs reach as ``found``; None if
        there are none yet and ``measure`` is off."""
        key = (found, size_class(table.nbytes), torch.get_num_threads())
        if key in self._rates:
            return self._rates[key]
        if key not in self._not_cached:
            cached = load(self._engine, table)
            if cached is not None:
                self._rates[key] = cached
                return cached
            self._not_cached.add(key)
        if not measure:
            return None
        self._rates[key] = measure_and_store(self._engine, table)
        logger.info("gather rates for size class %s: %s", key, self._rates[key])
        return self._rates[key]


def workload(request: Request, look: Look, dedup_below: float) -> Workload:
    """What the model needs to know of a request; the engine reads repeats once where
    fewer than ``dedup_below`` are distinct, and only there."""
    reads_once = look.distinct_share < dedup_below
    return Workload(
        num_indices=request.num_indices,
        row_bytes=request.row_bytes,
        table_bytes=request.table.nbytes,
        distinct_share=look.distinct_share if reads_once else 1.0,
        run_rows=look.run_rows,
        aligned=(request.table.data_ptr() | request.row_bytes) % 32 == 0,
    )
