"""Gathers that share: indices that repeat or run on, and the GPU with training."""

import functools
import statistics
from typing import Any

import torch

from pydirect import gather
from recipes.bench.gather.timing import DEVICE, check_rows, indices, once_ms, time_ms
from recipes.bench.harness.timing import wait

_SURVEY_EVERY = 17


def repeats_and_runs(table: torch.Tensor, num: int) -> dict[str, Any]:
    """Milliseconds by path for indices that repeat (power law) and run on (slices)."""
    length = max(1, num // 50)
    uniform = torch.rand(num, device=DEVICE).clamp_min(1e-7)
    hot = ((uniform**-2.0).clamp_max(1e12).long() * 7919) % table.shape[0]
    starts = torch.randint(0, table.shape[0] - length, (num // length, 1))
    slices = (starts + torch.arange(length)).flatten().to(DEVICE)
    found: dict[str, Any] = {"row_bytes": table.shape[1], "batch": num}
    for name, index in (("power law", hot), ("slices", slices)):
        out = torch.empty(len(index), table.shape[1], dtype=torch.uint8, device=DEVICE)
        ms = {}
        for path in (None, *gather.Path):
            if path is gather.Path.DMA and name != "slices":
                continue  # a copy for each row: seconds

            work = functools.partial(_select, table, index, out, path)

            for _ in range(_SURVEY_EVERY if path is None else 0):
                work(0)
                wait()
            out.fill_(255)
            ms["ours" if path is None else path.value] = round(time_ms(work, 3), 4)
            check_rows(table, index, out)
        distinct = index.unique().numel() / len(index)
        found[name] = {"distinct_share": round(distinct, 4), "ms": ms}
    return found


def _select(
    table: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    path: gather.Path | None,
    _: int,
) -> None:
    gather.index_select(table, index, out=out, path=path)


def sm_budget(table: torch.Tensor) -> dict[str, Any]:
    """Gather beside matrix products: what each costs the other, by SM budget."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    num = 1_000_000
    sets = indices(num, table.shape[0], 4)
    out = torch.empty(num, table.shape[1], dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    main = torch.cuda.current_stream()

    def products() -> None:
        for _ in range(12):
            torch.mm(a, a)

    def fetch(k: int, sms: int) -> None:
        gather.index_select(
            table, sets[k % 4], out=out, path="direct", max_sms=sms, stream=side
        )

    def only(sms: int, k: int) -> None:
        fetch(k, sms)
        main.wait_stream(side)

    def both(sms: int, k: int) -> None:
        fetch(k, sms)
        products()
        main.wait_stream(side)

    products()
    wait()
    alone = statistics.median(once_ms(products) for _ in range(3))
    found: dict[str, Any] = {"products_ms": round(alone, 3), "by_sms": {}}
    for sms in (2, 4, 8, 16, 32):
        found["by_sms"][sms] = {
            "gather_ms": round(time_ms(functools.partial(only, sms), 3), 3),
            "both_ms": round(time_ms(functools.partial(both, sms), 3), 3),
        }
    return found
