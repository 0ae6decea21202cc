"""One rank of `ssdtrain train engine=megatron` on the CPU stand-in; run as a script.

train_ranks.py OUT_FILE [override ...]
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from omegaconf import OmegaConf
from standin import cpu_for_cuda

from ssdtrain.train.compose import compose_config
from ssdtrain.train.mcore.runner import MegatronRunner
from ssdtrain.train.trainer import Trainer


@contextlib.contextmanager
def every_one_kept() -> Iterator[None]:
    """A checkpoint has a directory of its step: no later one takes its place."""
    save = MegatronRunner.save

    def saved(runner: MegatronRunner, directory: str, step: int) -> None:
        save(runner, f"{directory}/step{step}", step)

    with mock.patch.object(MegatronRunner, "save", saved):
        yield


def main() -> None:
    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    with cpu_for_cuda(), every_one_kept():
        config = compose_config("ssdtrain.yaml", overrides)
        values = OmegaConf.to_container(config, resolve=True)
        result = Trainer.from_config(values).run()
    if os.environ["RANK"] == "0":
        kept = {name: result[name] for name in ("ok", "verdict", "legs")}
        out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
