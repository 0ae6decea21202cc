"""One rank of `ssdtrain train host=megatron` on the CPU stand-in; run as a script.

train_ranks.py OUT_FILE OVERRIDES

OVERRIDES: JSON, a list of overrides for each run; the runs share one process, since
importing Megatron costs more than a run.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from standin import cpu_for_cuda

from ssdtrain.train.compose import compose_config
from ssdtrain.train.trainer import Trainer


def train(overrides: list[str]) -> dict[str, Any]:
    config = compose_config("ssdtrain.yaml", overrides)
    values = OmegaConf.to_container(config, resolve=True)
    result = Trainer.from_config(values).run()
    return {name: result[name] for name in ("ok", "verdict", "legs")}


def main() -> None:
    out, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    with cpu_for_cuda():
        results = [train(overrides) for overrides in runs]
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
