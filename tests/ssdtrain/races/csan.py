"""Teaches torch's stream sanitizer what it takes wrongly. A pytest plugin too.

It takes every `aten::set_` for a kernel that writes, and would report the one that
builds a view of a tensor whose copy out is still reading.

It fails by itself where non-reentrant checkpoint leaves a recomputation early: that is
an exception out of a pack hook; what the unwinding frees reaches the sanitizer's hook
for freed memory, which runs Python while that exception is set (`SystemError:
__import__ returned a result with an exception set`). So tests recompute to the end.
It does so without ssdtrain as well.
"""

import re
from collections.abc import Iterator

import pytest
from torch.cuda import _sanitizer
from torch.utils.checkpoint import set_checkpoint_early_stop

_sanitizer.FACTORY_FUNCTION_REGEX = re.compile(r"(new_.*|.*_like|aten::set_)")


@pytest.fixture(autouse=True)
def recomputed_to_the_end() -> Iterator[None]:
    """No recomputation is left early."""
    with set_checkpoint_early_stop(False):
        yield
