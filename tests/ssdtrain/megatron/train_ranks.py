"""One rank of `ssdtrain train engine=megatron` on the CPU stand-in; run as a script.

train_ranks.py OUT_FILE [override ...]
"""

import json
import os
import sys
from pathlib import Path

from omegaconf import OmegaConf
from standin import cpu_for_cuda

from ssdtrain.train.compose import compose_config
from ssdtrain.train.trainer import Trainer


def main() -> None:
    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    with cpu_for_cuda():
        config = compose_config("ssdtrain.yaml", overrides)
        values = OmegaConf.to_container(config, resolve=True)
        result = Trainer.from_config(values).run()
    if os.environ["RANK"] == "0":
        kept = {name: result[name] for name in ("ok", "verdict", "legs")}
        out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
