"""One rank of the law test: every family on every DeepSpeed host, with and without
ssdtrain, in one process group. Not a test file; see test_zoo.py.

    torchrun --nproc-per-node 2 zoo_worker.py OUT.json DIRECTORY TEXT
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ssdtrain.train.data.batches import Batches
from ssdtrain.train.data.objectives import objective_of
from ssdtrain.train.data.tokens import token_file
from ssdtrain.train.data.vocabulary import Vocabulary
from ssdtrain.train.loop import Leg, Loop, make_directories
from ssdtrain.train.metrics import Sinks
from ssdtrain.train.models import model_of
from ssdtrain.train.ranks import Ranks
from ssdtrain.train.runner import Workload
from ssdtrain.train.settings import RunSettings
from ssdtrain.train.stop import Stop
from ssdtrain.train.tally import Beside
from ssdtrain.train.trainer import deterministic, runner_of
from tests.ranks import leave
from tests.ssdtrain.written import written_before_backward

# Without these ZeRO-3 keeps every parameter of a small model gathered for ever.
RELEASE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
TOTALS = ("bytes_saved", "bytes_offloaded", "bytes_written", "bytes_reloaded")
STEPS = 2
HOSTS: dict[str, dict[str, Any]] = {
    "zero0": {"num_stages": 0, "zero_stage": 0},
    "zero1": {"num_stages": 0, "zero_stage": 1},
    "zero2": {"num_stages": 0, "zero_stage": 2},
    "zero3": {
        "num_stages": 0,
        "zero_stage": 3,
        "config": {"zero_optimization": RELEASE},
    },
    # Last: a pipeline leaves its groups in DeepSpeed's process-wide state.
    "pipeline": {"num_stages": 2},
}
ALONE = {"zero1": "bert", "zero2": "t5"}
"""Of these two one family each: to a model they are as ZeRO-0."""
TIERED = (("gpt", "zero3"), ("bert", "pipeline"), ("bert", "zero1"), ("t5", "zero2"))
"""Host memory before the SSD: to a target all families are alike."""
TARGETS: dict[str, dict[str, Any]] = {
    "none": {},
    # Without recipes: those that need a parameter are refused under ZeRO-3, and bytes
    # are compared with ZeRO-0's.
    "ssd": {"max_overhead": 0.01, "target": "ssd", "recompute": "off"},
    "tiered": {"max_overhead": 0.01, "target": "tiered", "host_bytes": 512 * 1024},
    # Of one family, where parameters come and go.
    "host": {"max_overhead": 0.01, "target": "host", "recompute": "off"},
    "ssd full": {"max_overhead": 0.01, "target": "ssd", "recompute": "full"},
}


def workload_of(
    family: str, host: str, target: str, where: Path, text: str
) -> Workload:
    offload = dict(TARGETS[target])
    if offload:
        offload.update(
            directory=str(where), min_bytes=0, plan="offload-all", window_bytes=65536
        )
    settings = RunSettings.from_mapping(
        {
            "run_directory": str(where),
            "model": {
                "family": family,
                "hidden_size": 64,
                # Three T5 layers: the relative position bias crosses the stages.
                "num_layers": 3 if family == "t5" else 2,
                "num_heads": 4,
                "sequence_length": 32,
            },
            "engine": {"kind": "deepspeed", **HOSTS[host]},
            "data": {"files": [text], "cache_directory": str(where / "cache")},
            "train": {
                "steps": STEPS,
                "micro_batch_size": 4,
                "num_micro_batches": 4 if host == "pipeline" else 2,
            },
            "offload": offload,
        }
    )
    vocabulary = Vocabulary.from_tokenizer(None)
    tokens = token_file(settings.data, vocabulary)
    objective = objective_of(settings.model.family, 32, vocabulary)
    batches = Batches(tokens, objective, settings.train.micro_batch_size, 0)
    model = model_of(settings.model, vocabulary.num_rows)
    return Workload(settings, model, batches, Ranks.from_environment())


class GatheredBytes:
    """Bytes of gathered parameters that are alive when backward starts.

    By the life of their storage: a handle that holds a view of a gathered parameter
    keeps its bytes although the parameter itself was released.
    """

    def __init__(self, engine: Any) -> None:
        self.seen: list[int] = []
        self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for module in engine.module.modules():
            module.register_forward_pre_hook(self._gathered)
        backward = engine.backward

        def counted(loss: torch.Tensor) -> Any:
            self.seen.append(self._settled())
            return backward(loss)

        engine.backward = counted

    def _settled(self) -> int:
        # gloo's own threads hold what they gathered a moment longer.
        for _ in range(6000):
            alive = [size for ref, size in self._storages.values() if not ref.expired()]
            if not alive:
                break
            gc.collect()
            time.sleep(0.01)
        return sum(alive)

    def _gathered(self, module: nn.Module, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            storage = parameter.data.untyped_storage()
            reference = StorageWeakRef(storage)
            self._storages[reference.cdata] = (reference, storage.nbytes())
            self.most = max(self.most, storage.nbytes())


def run(family: str, host: str, target: str, where: Path, text: str) -> dict[str, Any]:
    workload = workload_of(family, host, target, where, text)
    runner = runner_of(workload)
    gathered = GatheredBytes(runner.attachable) if host == "zero3" else None
    leg = Leg.WITH if workload.settings.offload else Leg.WITHOUT
    make_directories(workload)
    try:
        result = Loop(
            workload,
            runner,
            leg,
            sinks=Sinks(),
            stop=Stop(),
            first=0,
            beside=Beside(workload),
        ).run()
    finally:
        runner.close()
    totals = {name: result.own.bytes[name] for name in TOTALS if result.own.bytes}
    return {
        "losses": [step.loss_hex for step in result.own.steps],
        "weights": result.weights_checksum,
        "peak_bytes": result.own.peak_bytes,
        "gathered_bytes": [] if gathered is None else gathered.seen,
        "gathered_most": 0 if gathered is None else gathered.most,
        **totals,
    }


def every_cell() -> Iterator[tuple[str, str, str]]:
    for host in HOSTS:  # a pipeline last, for all families
        for family in ("gpt", "bert", "t5"):
            if ALONE.get(host, family) != family:
                continue
            for target in TARGETS:
                once = target in ("host", "ssd full")
                if once and (family, host) != ("gpt", "zero3"):
                    continue
                if target == "tiered" and (family, host) not in TIERED:
                    continue
                yield family, host, target


def main(out: str, directory: str, text: str) -> None:
    ranks = Ranks.from_environment()
    gc.freeze()  # `GatheredBytes` collects often
    cells = {}
    for family, host, target in every_cell():
        if host == "zero0" and target != "ssd":
            continue  # it is here for the bytes that ZeRO-3 is compared with
        where = Path(directory) / f"{family}-{host}-{target}"
        with deterministic(True), written_before_backward():
            cell = run(family, host, target, where, text)
        cells[f"{family} {host} {target}"] = ranks.gather(cell)
    if ranks.is_first:
        Path(out).write_text(json.dumps(cells))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
