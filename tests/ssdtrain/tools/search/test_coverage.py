"""Every described operator has a case, and DTensor's strategies agree."""

import random
from collections.abc import Iterator

import pytest
from torch import distributed

from recipes.bench.search.coverage import UNSPLIT, compared, core, kinds
from recipes.bench.search.operator_cases import cases
from ssdtrain.tools.search.calls import described_names, describer_of, name_of

DIFFERS = {
    "aten::_cdist_forward": "no strategy",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "knows batch and heads alone",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "no strategy",
    "aten::addmv": "cuts what is added, too",
    "aten::all": "reduces by a product",
    "aten::any": "reduces by a sum",
    "aten::avg_pool2d_backward": "no strategy",
    "aten::convolution": "says that pieces of channels are copies",
    "aten::convolution_backward": "knows the batch alone",
    "aten::expand": "never cuts what is repeated",
    "aten::huber_loss": "averages parts; here they are scaled and added",
    "aten::mean": "averages parts; here they are scaled and added",
    "aten::mse_loss": "averages parts; here they are scaled and added",
    "aten::native_group_norm_backward": "fails on pieces of the batch",
    "aten::nll_loss_forward": "averages parts, whatever the weights of the rows",
    "aten::reflection_pad2d": "no strategy",
    "aten::replication_pad2d": "no strategy",
    "aten::smooth_l1_loss": "averages parts; here they are scaled and added",
    "aten::tril": "does not cut the batch",
    "aten::view": "refuses pieces of some sizes",
}
"""What DTensor does otherwise. `test_operators.py` shows that the parts are right."""
NOT_ON_A_CPU = {
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
}
SAMPLE = {
    f"aten::{name}"
    for name in (
        "mm addmm bmm _softmax native_layer_norm embedding transpose relu sum "
        "mean cat add view"
    ).split()
}
"""All operators: `python -m recipes.bench search.coverage`."""


@pytest.fixture
def fake_workers() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_dtensor_agrees(fake_workers: None) -> None:
    found = compared(0, SAMPLE)
    others = {name for name, told in found.items() if set(told) != {"agrees"}}
    assert others <= set(DIFFERS), others - set(DIFFERS)
    assert len(found) == len(SAMPLE)


def test_core_operators() -> None:
    found = kinds()
    assert sorted(found["not described: run whole"]) == [
        "aten::_local_scalar_dense",
        "aten::adaptive_avg_pool1d",
        "aten::as_strided",
        "aten::avg_pool1d",
        "aten::nonzero",
    ]
    described = len(found["own description"]) + len(found["elementwise"])
    assert described >= 0.8 * len(core())


def test_every_description_has_a_case() -> None:
    tried = {name_of(func) for func, _, _ in cases(random.Random(0))}
    for name in described_names():
        unsplit = getattr(describer_of(name), "__name__", "") in UNSPLIT
        on_gpu = name.removesuffix("_backward") in NOT_ON_A_CPU
        assert name in tried or unsplit or on_gpu, name
