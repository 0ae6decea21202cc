"""What a rank holds, by framework: next to measured peaks, and DeepSpeed's own."""

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.cluster import cluster_of
from ssdtrain.tools.foresight.spec import H200
from ssdtrain.tools.search.frameworks import BUCKET, Framework, RankWeights, StepMoment
from ssdtrain.tools.search.layout_search import Asked, search
from ssdtrain.tools.search.parallel_layout import Division, Job, ParallelLayout
from ssdtrain.tools.search.pricing import PricedLayout, Pricer
from ssdtrain.tools.search.stage_costs import ActivationCost, PerLayer, StageCosts
from ssdtrain.tools.search.stores import Stores

QWEN = (1.00930816e8, 3.8895872e8), (6.97466904e8, 7.553957896e9)
HALF = (5.0468096e7, 1.9448064e8), (3.48749848e8, 3.77803572e9)
"""Qwen3-4B, 4,096 tokens, whole and with two tensor ranks that divide the sequence:
parameters of a layer and of the ends, activations likewise."""
T5 = (737668096 / 48, 0.0), (2611085316 / 48, 0.0)
"""T5-large, 16 sequences, checkpointed, with masked attention in one kernel as CUDA
runs it."""


def costs(parameters: tuple[float, float], held: tuple[float, float]) -> StageCosts:
    """Those of a step whose activations are gone before gradients are there."""
    gone = dict.fromkeys(StepMoment, PerLayer(layer=0.0, ends=0.0))
    own = ActivationCost(
        milliseconds=PerLayer(layer=1.0, ends=1.0),
        activation_bytes={
            **gone,
            StepMoment.PEAK: PerLayer(layer=held[0], ends=held[1]),
        },
    )
    count = PerLayer(layer=parameters[0], ends=parameters[1])
    return StageCosts(ways={"plain": own}, parameters=count, head=0.0)


def priced(layers: int, batch: int, **more: int) -> PricedLayout:
    plain = {"data": 2, "tensor": 1, "pipeline": 1, "sequences": 1, "way": "plain"}
    whole = T5 if layers == 48 else QWEN
    pricer = Pricer(
        job=Job(layers=layers, hidden=2560, tokens=4096, batch=batch, gpus=2),
        spec=H200,
        cluster=cluster_of("nvlink:2", H200),
        capacity_bytes=H200.memory_bytes,
        stores=Stores(host_bytes=0.0),
        costs={
            (1, 1, Division.NONE): costs(*whole),
            (2, 1, Division.INPUTS_WHOLE): costs(*HALF),
        },
    )
    return pricer.price(ParallelLayout(**{**plain, **more}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "priced"),
    [
        (57963545088, priced(36, 2, zero=3)),
        (8579867136, priced(48, 2, zero=2)),
        (53612585984, priced(36, 2, data=1, tensor=2, zero=3, divided=True)),
    ],
    ids=["Qwen3-4B, ZeRO-3", "T5, ZeRO-2", "Qwen3-4B, sequence parallelism"],
)
def test_peaks_of_fsdp2_on_two_h200s(measured: int, priced: PricedLayout) -> None:
    """recipes/bench/results/search/layout_regret.json; the third has two
    micro-batches."""
    assert priced.memory_bytes == pytest.approx(measured, rel=0.03)


def test_gradients_are_there_from_the_second_micro_batch_on() -> None:
    one, two = priced(36, 2, zero=3), priced(36, 4, zero=3)
    shard = (36 * QWEN[0][0] + QWEN[0][1]) / 2
    assert two.memory_bytes - one.memory_bytes == pytest.approx(4 * shard)


def test_fsdp2_gathers_once_where_weights_stay_whole() -> None:
    """And hides it: two H200s trained ZeRO-2 as fast as ZeRO-3, or faster."""
    two, three = (priced(36, 8, zero=zero) for zero in (2, 3))
    assert 0 < two.parts_ms["data parallelism"] < three.parts_ms["data parallelism"]


def test_the_end_of_backward_under_fsdp2() -> None:
    """Next to torch's FSDPMemTracker: 8 layers of Qwen3-4B, two ranks, 512 tokens,
    fp32 shards left out."""
    layer, root = QWEN[0]
    weights = RankWeights(
        shared=[(8 * layer + root, 2)],
        layer=layer,
        root=root,
        head=0.0,
        zero=3,
        accumulates=False,
    )
    end = dict(weights.held(Framework.FSDP2))[StepMoment.AFTER]
    tracked = 7.523e9 - 2.393e9
    assert tracked < end["reduced"] + end["gradients"] < 1.08 * tracked


def test_what_deepspeed_holds() -> None:
    """Bytes of a parameter on one rank, counted in DeepSpeed 0.19.8: before backward,
    after it, and at most in the update."""

    def held(zero: int, accumulates: bool) -> list[float]:
        weights = RankWeights(
            shared=[(1e12, 1)],
            layer=0.0,
            root=0.0,
            head=0.0,
            zero=zero,
            accumulates=accumulates,
        )
        return [
            round(sum(one.values()) / 1e12, 1)
            for moment, one in weights.held(Framework.DEEPSPEED)
            if moment is not StepMoment.LAST
        ]

    assert held(2, False) == held(1, False) == [14.0, 16.0, 22.0]
    assert held(2, True) == held(1, True) == [16.0, 16.0, 22.0]
    assert held(3, False) == [16.0, 16.0, 20.0]


@pytest.mark.parametrize("framework", Framework)
@pytest.mark.parametrize("zero", range(4))
def test_more_of_zero_never_holds_more(framework: Framework, zero: int) -> None:
    """Of many weights over many ranks, at either instant."""

    def held(zero: int) -> list[float]:
        own = RankWeights(
            shared=[(7e10, 64)],
            layer=8e8,
            root=1e9,
            head=0.0,
            zero=zero,
            accumulates=True,
        )
        return [sum(one.values()) for _, one in own.held(framework)]

    buckets = 2 * BUCKET * 2
    for less, more in zip(held(zero), held(min(3, zero + 1)), strict=True):
        assert more <= less + buckets


def test_a_framework_that_launches_nothing() -> None:
    with pytest.raises(ConfigError, match="fsdp2 launches no layout of 1 GPUs"):
        search(
            Asked(model="qwen3-0.6b", gpus=1, tokens=256, framework=Framework.FSDP2),
            lambda text: None,
        )
