"""Why a gather takes the path it takes: the models and the measured times, in words."""

from dataclasses import dataclass

import numpy as np
import torch

from pydirect import coalesce
from pydirect.gather.chooser import UNKNOWN, is_little, workload
from pydirect.gather.engine import Tuning
from pydirect.gather.front import front_of
from pydirect.gather.model import (
    predict_ms,
    reference_rates,
    reference_translation,
    worth_a_trial,
)
from pydirect.gather.request import Path, Request, as_request, check_index, host_tensor
from pydirect.memory import HostTable, Reach, reach

_MODELLED_ROWS = 4096
# What a copy by the copy engine asks for at once: its packets are longer than a load's.
_DMA_REQUEST_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is known about one gather; ``str()`` says it in words."""

    num_indices: int
    row_bytes: int
    table_bytes: int
    memory: Reach
    """How GPUs reach the table: NONE here also without a GPU."""

    path: Path
    """The path that such a gather takes next."""

    settled: bool
    """Whether the path was the fastest of measured ones; else it is foretold."""

    predicted_ms: dict[Path, float]
    """Milliseconds of each path by the model, from rates recorded on an H200."""

    measured_ms: dict[Path, float]
    """Milliseconds here, of the paths that gathers of this kind have tried."""

    requests_a_row: float
    """Requests on the link for a row, with aligned starts (the coalescing model)."""

    full_share: float
    """Share of those requests that fetch a whole line of 128 bytes."""

    link_share: float
    """Of what the copy engine reaches, the most that such requests can."""

    row_ns: float
    """A row in random order from small pages: link or translation, whichever is
    longer (the translation model)."""

    sorted_row_ns: float
    """The same in the order of pages."""

    def __str__(self) -> str:
        how = "measured here" if self.settled else "foretold, not measured yet"
        times = [f"path {self.path.value} ({how})"]
        for path in sorted(Path, key=self.predicted_ms.__getitem__):
            here = self.measured_ms.get(path)
            said = "not tried" if here is None else f"{here:.3f} ms here"
            times.append(
                f"  {path.value:8}{said}, {self.predicted_ms[path]:.3f} ms foretold"
            )
        pages = {
            Reach.MANAGED: "managed memory, mapped in pages of 2 MiB",
            Reach.PINNED: "pinned memory, mapped in pieces of 64 KiB at most",
            Reach.NONE: "plain memory, which no GPU reads in place",
        }
        return "\n".join(
            (
                f"{self.num_indices} rows of {self.row_bytes} bytes of a table of "
                f"{self.table_bytes} bytes, {pages[self.memory]}",
                *times,
                f"link: {self.requests_a_row:.2f} requests a row, "
                f"{self.full_share:.0%} of them whole lines: at most "
                f"{self.link_share:.2f} of the copy engine's rate",
                f"translation: {self.row_ns:.1f} ns a row at random from small pages, "
                f"{self.sorted_row_ns:.1f} in their order",
            )
        )


def explain(
    table: torch.Tensor | HostTable, rows: torch.Tensor, *, max_sms: int | None = None
) -> Explanation:
    """Tell how ``gather.index_select(table, rows)`` is carried out, and why.

    Gathers nothing and waits for nothing but an index that lies on a GPU.

    Args:
        table: host table, shape (num_rows, ...).
        rows: int32 or int64, shape (num_indices,), on the CPU or a GPU.
        max_sms: the budget that the gather is to have.

    Raises:
        ValueError: ``table`` or ``rows`` is not what it should be.
    """
    host = host_tensor(table)
    check_index(rows)
    if max_sms is not None and max_sms < 1:
        raise ValueError(f"max_sms: expects at least 1, or None, got {max_sms}")
    request = as_request(host, rows, host.new_empty((0, *host.shape[1:])))
    found = reach(host)
    large_pages = found is Reach.MANAGED
    look, dedup_below = UNKNOWN, Tuning(num_sms=1).dedup_below
    measured: dict[Path, float] = {}
    settled = None
    if rows.device.type == "cuda":
        front = front_of(rows.device)
        look = front.survey.look(request)
        cell = front.chooser.cell(request, look, found, max_sms)
        settled = front.chooser.trials.settled(cell)
        measured = {
            path: ns * request.num_indices / 1e6
            for path, ns in front.chooser.trials.times(cell).items()
        }
    work = workload(request, look, dedup_below)
    rates = reference_rates(request.table.nbytes, large_pages=large_pages)
    foretold = worth_a_trial(rates, work)[0]
    if found is Reach.NONE:
        foretold = Path.CPU
    elif is_little(request):
        foretold = Path.DIRECT
    requests, num_modelled = _requests(request)
    translated = reference_translation()
    size = max(1, host.nbytes)
    most = coalesce.header_share(_DMA_REQUEST_BYTES)
    return Explanation(
        num_indices=request.num_indices,
        row_bytes=request.row_bytes,
        table_bytes=host.nbytes,
        memory=found,
        path=settled or foretold,
        settled=settled is not None,
        predicted_ms={path: predict_ms(rates, work, path) for path in Path},
        measured_ms=measured,
        requests_a_row=requests.total / max(1, num_modelled),
        full_share=requests.full_share,
        link_share=min(1.0, requests.wire_efficiency / (1 - most)),
        row_ns=translated.random_row_ns(request.row_bytes, size),
        sorted_row_ns=translated.sorted_row_ns(
            request.row_bytes, size, max(1, request.num_indices)
        ),
    )


def _requests(request: Request) -> tuple[coalesce.Requests, int]:
    """Requests of the first rows, and how many rows those are."""
    rows = request.index[:_MODELLED_ROWS].cpu().numpy().astype(np.int64)
    # The model's tables start on a line, as those of pools do.
    counted = coalesce.row_requests(
        rows % max(1, request.num_rows),
        request.row_bytes,
        coalesce.Access.ALIGNED,
        element_bytes=4 if request.row_bytes % 4 == 0 else 1,
    )
    return counted, len(rows)
