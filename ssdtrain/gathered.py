"""Parameters whose data come for forward and backward, and go in between.

[Note: two faces] A module that is sharded by `fully_shard` holds each parameter as a
shard (a DTensor) or as the gathered whole, two objects that FSDP2 puts there in turns.
(tests/ssdtrain/engines/test_meshes.py)
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor, nn

MARK = "ds_id"
FSDP2 = "torch.distributed.fsdp"


def is_gathered(parameter: Tensor) -> bool:
    """Whether ZeRO-3 gathers its data: it marks such parameters."""
    return hasattr(parameter, MARK)


def any_gathered(parameters: Iterable[Tensor]) -> bool:
    """Whether one of them is; without a call of Python for each."""
    # Without DeepSpeed nobody marks them.
    return "deepspeed" in sys.modules and any(map(hasattr, parameters, repeat(MARK)))


def _fsdp2_module() -> Any:
    loaded: Any = sys.modules.get(FSDP2)  # nobody shards without it
    return getattr(loaded, "FSDPModule", None)


def is_gathering(module: nn.Module) -> bool:
    """Whether FSDP2 gathers its weights before its forward is called."""
    kind = _fsdp2_module()
    return kind is not None and isinstance(module, kind)


def gathered_inside(modules: Sequence[nn.Module]) -> set[int]:
    """Ids of the modules whose parameters FSDP2 gathers while the first of them runs,
    which holds all others. See [Note: two faces]."""
    kind = _fsdp2_module()
    if kind is None:
        return set()
    units = [module for module in modules[1:] if isinstance(module, kind)]
    return {id(each) for unit in units for each in unit.modules()}


def is_other_face(before: Tensor | None, now: Tensor | None) -> bool:
    """Whether FSDP2 may have put one in the place of the other."""
    if before is None or now is None or before.shape != now.shape:
        return False
    return hasattr(before, "device_mesh") or hasattr(now, "device_mesh")
