"""What attach refuses, and how sessions share the schedules' two functions."""

import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.engines import megatron
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.train.mcore.indexed import prefix_of, tokens_of
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import DataSettings, Family, ModelSettings
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
installed = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed"
)


@pytest.mark.parametrize("name", sorted(megatron.REFUSED))
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    config = SimpleNamespace(**{name: True})
    with pytest.raises(AttachError, match=name):
        megatron.check_config(config)
    megatron.check_config(SimpleNamespace(**{name: False}))


def test_cuda_graphs_are_refused() -> None:
    with pytest.raises(AttachError, match="cuda_graph_impl='none'"):
        megatron.check_config(SimpleNamespace(cuda_graph_impl="local"))
    megatron.check_config(SimpleNamespace(cuda_graph_impl="none"))


def schedules(backward: Any = None) -> Any:
    """A stand-in for Megatron's module, with its signatures."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        return [torch.zeros(1)], 0

    def backward_step(
        input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
    ) -> str:
        return "theirs"

    names = megatron.FORWARD.split(", ")
    kind = megatron.inspect.Parameter
    parameters = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in names]
    forward_step.__signature__ = megatron.inspect.Signature(  # type: ignore[attr-defined]
        parameters
    )
    return SimpleNamespace(
        forward_step=forward_step, backward_step=backward or backward_step
    )


def test_an_unknown_version_is_refused() -> None:
    def backward_step(input_tensor: Any, something_new: Any) -> None: ...

    megatron.check_schedules(schedules())
    with pytest.raises(AttachError, match=r"something_new.*0\.16\.1, 0\.19\.2"):
        megatron.check_schedules(schedules(backward_step))
    with pytest.raises(AttachError, match="forward_step takes"):
        megatron.check_schedules(SimpleNamespace())


def test_sessions_come_and_go_in_any_order() -> None:
    module = schedules()
    before = dict(vars(module))
    router = megatron.Router(module, SimpleNamespace(), SimpleNamespace())
    one, two = (
        megatron.Schedule([nn.Linear(1, 1)], hints=Any, keep=print)  # type: ignore[arg-type]
        for _ in range(2)
    )
    router.add(one)
    router.add(two)
    assert module.forward_step is not before["forward_step"]
    router.remove(one)
    assert module.forward_step is not before["forward_step"]
    # A tensor of a session that has gone is nobody's.
    output = torch.zeros(1)
    setattr(output, megatron.OUTPUT_MARK, megatron.OutputMark(one, 0, 0))
    assert module.backward_step(None, [output], None, None) == "theirs"
    router.remove(two)
    assert vars(module) == before


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Saves nothing itself."""
    return x * 2


class Discarding(nn.Module):
    """Saves a tensor that is emptied in forward, as CheckpointWithoutOutput does."""

    def __init__(self, checkpoint: SimpleNamespace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.checkpoint = checkpoint
        self.norm = torch.zeros(0)

    def forward(self) -> torch.Tensor:
        norm = self.checkpoint.checkpoint(doubled, self.weight)
        loss = (norm * norm).sum()
        self.norm = norm.detach()
        norm.untyped_storage().resize_(0)
        return loss

    def fill(self) -> None:
        again = doubled(self.weight.detach())
        self.norm.untyped_storage().resize_(64 * 4)
        self.norm.untyped_storage().copy_(again.untyped_storage())


def test_outputs_that_megatron_empties_stay_where_they_are() -> None:
    """See [Note: discarded outputs]."""

    def checkpoint(run: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x)
        return result

    theirs = SimpleNamespace(checkpoint=checkpoint)
    router = megatron.Router(
        schedules(), SimpleNamespace(CheckpointWithoutOutput=theirs), SimpleNamespace()
    )
    model = Discarding(theirs)
    settings: dict[str, Any] = {"min_bytes": 0, "plan": "offload-all"}
    with ssdtrain.offload(model, target="host", recompute="off", **settings) as session:
        cache = session.cache
        schedule = megatron.Schedule([model], session.hints, cache.keep_storage_of)
        router.add(schedule)
        loss = model()
        model.fill()
        loss.backward()
        router.remove(schedule)
        assert session.last_step is None, "nothing was taken over"
        del loss, model.norm
        assert not cache._resident, "storages are not remembered beyond their life"
    assert torch.equal(model.weight.grad, 8 * model.weight.detach())


@installed
def test_only_the_compute_stream_is_waited_for_between_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """See [Note: waiting for a neighbour]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, on import
        from megatron.core.pipeline_parallel import p2p_communication as neighbours

    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(neighbours, "_batched_p2p_ops", lambda **_: [])
    between = object.__new__(neighbours.P2PCommunicator)
    between.pp_group, between.next_rank, between.prev_rank = None, 1, 1
    between.config = SimpleNamespace(
        batch_p2p_comm=True,
        batch_p2p_sync=True,
        use_ring_exchange_p2p=False,
        variable_seq_lengths=False,
        mtp_standalone=False,
    )

    def exchange() -> list[str]:
        waits.clear()
        between._communicate(
            tensor_send_next=None,
            tensor_send_prev=None,
            recv_prev=False,
            recv_next=False,
            tensor_shape=None,
        )
        return list(waits)

    router = megatron.Router(schedules(), SimpleNamespace(), neighbours)
    schedule = megatron.Schedule([nn.Linear(1, 1)], hints=Any, keep=print)  # type: ignore[arg-type]
    assert exchange() == ["device"]
    router.add(schedule)
    assert exchange() == ["stream"]
    assert between.config.batch_p2p_sync
    between.config.batch_p2p_sync = False
    assert exchange() == []
    between.config.batch_p2p_sync = True
    router.remove(schedule)
    assert exchange() == ["device"]


def test_plain_modules_are_not_megatrons() -> None:
    assert not megatron.is_megatron([nn.Linear(1, 1), object()])


@installed
@pytest.mark.filterwarnings("ignore")
def test_a_chunk_outside_the_schedules_is_a_plain_module() -> None:
    from megatron.core.pipeline_parallel import schedules as real
    from megatron.core.transformer.module import MegatronModule

    class Chunk(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(SimpleNamespace(fp16=False, bf16=False))
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.layer(x).tanh().sum()

    chunk, x = Chunk(), torch.randn(4, 8)
    before = dict(vars(real))
    expected = torch.autograd.grad(chunk(x), list(chunk.parameters()))
    settings: dict[str, Any] = {"min_bytes": 0, "plan": "offload-all"}
    with ssdtrain.offload([chunk], target="host", **settings) as session:
        assert real.forward_step is not before["forward_step"]
        chunk(x).backward()
        assert session.last_step is not None
        assert session.last_step.bytes_offloaded > 0
    assert dict(vars(real)) == before
    for parameter, gradient in zip(chunk.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    chunk.config.gradient_accumulation_fusion = True
    with pytest.raises(AttachError, match="gradient_accumulation_fusion=False"):
        ssdtrain.offload([chunk], target="host", **settings)
    assert dict(vars(real)) == before
    assert "forward" not in vars(chunk)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tensor": 0}, "parallel.tensor expects 1"),
        ({"virtual_pipeline": 2}, "2 or more stages"),
        ({"sequence": True}, "parallel.tensor=2"),
        ({"recompute": "some"}, "'full', 'selective'"),
    ],
)
def test_impossible_layouts_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Parallel(**values)


def test_ranks_must_hold_whole_models() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        Parallel(tensor=2, pipeline=2).check_ranks(6)


@installed
@pytest.mark.filterwarnings("ignore")
def test_what_megatron_cannot_build_is_refused_in_a_sentence() -> None:
    from omegaconf import OmegaConf

    from ssdtrain.train.compose import compose_config
    from ssdtrain.train.mcore import models, runner
    from ssdtrain.train.trainer import Trainer

    def refuse(family: Family, layout: Parallel, text: str) -> None:
        settings = ModelSettings(
            family=family, hidden_size=32, num_layers=4, num_heads=4, sequence_length=16
        )
        with pytest.raises(ConfigError, match=text):
            models.check_layout(settings, layout)

    deep = "encoder | decoder on two stages"
    refuse(Family.T5, Parallel(pipeline=4), re.escape(deep))
    interleaved = Parallel(pipeline=2, virtual_pipeline=2)
    refuse(Family.T5, interleaved, re.escape(deep))
    refuse(Family.GPT, Parallel(pipeline=3), "divisible by the stages")
    refuse(Family.BERT, Parallel(tensor=2, sequence=True), "BERT head")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a GPU on every rank"):
            runner.megatron_device()
        values = OmegaConf.to_container(
            compose_config("ssdtrain.yaml", ["engine=megatron"]), resolve=True
        )
        with pytest.raises(ConfigError, match="needs a GPU on every rank"):
            Trainer.from_config(values).ranks_to_start()


@installed
@pytest.mark.filterwarnings("ignore")
def test_indexed_datasets_are_read(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    documents = [[5, 6, 7], [300, 2]]
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    for name in (str(prefix), f"{prefix}.bin"):
        found = prefix_of(DataSettings(files=(name,)))
        assert found == prefix
    tokens = tokens_of(prefix)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [5, 6, 7, 300, 2]
    assert prefix_of(DataSettings(files=(str(tmp_path),))) is None
    with pytest.raises(ConfigError, match="alone"):
        prefix_of(DataSettings(files=(str(prefix), "other.txt")))
    (tmp_path / "text.idx").unlink()
    with pytest.raises(ConfigError, match=r"text\.idx is not"):
        prefix_of(DataSettings(files=(str(prefix),)))


def train(directory: Path, *more: str) -> dict[str, Any]:
    """`ssdtrain train engine=megatron` on two ranks; the first one's result."""
    out = directory / "result.json"
    overrides = [
        *("engine=megatron", "model=t5", "parallel.pipeline=2"),
        *("parallel.distributed_optimizer=true", "train.tensorboard=false"),
        *("size.hidden_size=32", "size.num_heads=2", "size.num_layers=4"),
        *("size.sequence_length=32", "train.num_micro_batches=3", "train.steps=3"),
        *("train.micro_batch_size=2", "train.checkpoint_every=2"),
        *("offload.min_bytes=0", f"data.files=[{ROOT / 'README.md'}]"),
        f"data.cache_directory={directory}/tokens",
    ]
    script = Path(__file__).with_name("train_ranks.py")
    command = [script, out, *overrides, *more]
    run_ranks(command, directory, PYTHONWARNINGS="ignore")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@installed
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_trainer_runs_it_from_the_configs_and_resumes(tmp_path: Path) -> None:
    result = train(tmp_path, f"run_directory={tmp_path}/run")
    assert result["ok"]
    assert result["verdict"]["losses_equal"] and result["verdict"]["weights_equal"]
    leg = result["legs"]["with ssdtrain"]
    # A disk under load may write nothing before backward asks for it.
    assert leg["totals"]["bytes_offloaded"] > 0
    resumed = train(
        tmp_path,
        f"run_directory={tmp_path}/resumed",
        f"train.resume={tmp_path}/run/checkpoints/step2",
        "train.compare=false",
    )
    assert resumed["legs"]["with ssdtrain"]["losses"] == leg["losses"][2:]
