"""Names of torchvision's operators, so that it imports beside any build of torch.

PyPI's torchvision is for torch's CUDA build. Beside the CPU build its library does not
load, and its Python part then stops at "operator torchvision::nms does not exist".
What models use of it (transforms, a frozen batch norm) is Python: with the operators
declared, it works; one that is called says that it has no kernel.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

OPERATORS = ("roi_align", "_roi_align_backward", "ps_roi_align", "nms", "qnms")
OPERATORS += ("_ps_roi_align_backward", "roi_pool", "_roi_pool_backward", "qroi_align")
OPERATORS += ("ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d")
OPERATORS += ("_deform_conv2d_backward",)
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Declare them once, where torchvision is there and its library does not load."""
    found = find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for name in OPERATORS:
            _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
