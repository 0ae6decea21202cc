"""A gather that shares the GPU with training."""

import functools
import statistics
from typing import Any

import torch

from pydirect import gather
from recipes.bench.gather.timing import indices, once_ms, time_ms
from recipes.bench.harness.timing import wait


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
