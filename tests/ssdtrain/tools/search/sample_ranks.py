"""A sample of what recipes/bench/search runs on four ranks, in one start of them.

python sample_ranks.py OUT
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

from recipes.bench.search import launch_ranks, planned_ranks
from tests.ranks import leave

PLANNED = ("mlp", "halo")
LAUNCHED = "FSDP2 and sequence parallelism"


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(3)
    cases = planned_ranks.cases()
    planned = {name: planned_ranks.run(name, cases[name]) for name in PLANNED}
    train, own = launch_ranks.CASES[LAUNCHED]
    found = {"planned": planned, "losses": train(own)}
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
