"""[Note: numerics]: what decides on bits is set back as a forward had it."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssdtrain.numerics import ON_CPU, ON_GPU, numerics, restored

BACKENDS: Any = torch.backends
CHANGES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "benchmark": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
    "TF32": lambda: torch.set_float32_matmul_precision("high"),
    "TF32 of products": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "TF32 of convolutions": lambda: setattr(
        BACKENDS.cudnn.conv, "fp32_precision", "ieee"
    ),
    "TF32 of everything": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "oneDNN in bf16": lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "fp16 accumulation": lambda: setattr(
        BACKENDS.cuda.matmul, "allow_fp16_accumulation", True
    ),
    "flash attention": lambda: BACKENDS.cuda.enable_flash_sdp(False),
    "order of attentions": lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4]),
    "oneDNN": lambda: torch._C._set_mkldnn_enabled(False),
    "NNPACK": lambda: torch._C._set_nnpack_enabled(not torch._C._get_nnpack_enabled()),
    "denormals": lambda: torch.set_flush_denormal(True),
}
OF_GPUS = ("benchmark", "TF32 of products", "TF32 of convolutions")
OF_GPUS += ("fp16 accumulation", "order of attentions")


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_of_forward_comes_back_for_a_while(name: str) -> None:
    device = torch.device("cuda" if name in OF_GPUS else "cpu")
    before = numerics(device)
    try:
        CHANGES[name]()
        behind = numerics(device)
        assert behind != before
        with restored(before, device):
            assert numerics(device) == before
        assert numerics(device) == behind
    finally:
        settings = ON_GPU if name in OF_GPUS else ON_CPU
        for (read, write), value in zip(settings, before, strict=True):
            if read() != value:
                write(value)
    assert numerics(device) == before


FIRST_ATTENTION = """
import torch
from ssdtrain.numerics import numerics, settle

device = torch.device("cuda")
settle(device)
before = numerics(device)
query = torch.randn(1, 2, 512, 64, dtype=torch.bfloat16, device=device)
torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
assert numerics(device) == before, (before, numerics(device))
"""


@pytest.mark.gpu
def test_no_setting_changes_in_the_first_attention_of_a_process() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    subprocess.run([sys.executable, "-c", FIRST_ATTENTION], check=True, timeout=120)
