"""Dispatch modes below autograd: whether one stands, and how many were ever entered.

[Note: modes below autograd]
What an operator gives under a mode may be the mode's work, and a recipe runs without
it. A mode that stands while a tensor is saved is seen then. But the tensor may be saved
after the mode has ended, and nothing under it need have saved anything. So entries are
counted, in the function that all of torch's modes go through, and in a step in which a
mode was entered no tensor is made again from then on. The hooks work without modes:
none sees autograd's own saving either, and what is made again in backward is what
forward made. Function modes and inference mode are put aside as well.
(tests/ssdtrain/rebuild/test_modes.py)
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from typing import Any

import torch
from torch import overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext


class Entries:
    """Counts the dispatch modes that are entered while somebody listens."""

    def __init__(self) -> None:
        self.num = 0
        self._num_listeners = 0
        self._theirs = self._ours = _python_dispatch._push_mode
        """Torch's function, and the one that counts."""
        self._lock = threading.Lock()

    def listen(self) -> Callable[[], None]:
        """Count from now on.

        Returns:
            Ends it; to be called once.
        """
        with self._lock:
            self._num_listeners += 1
            if self._ours is self._theirs:
                self._wrap()
        return self._leave

    def _wrap(self) -> None:
        self._theirs = theirs = _python_dispatch._push_mode

        @functools.wraps(theirs)
        def counted(mode: Any) -> None:
            self.num += 1
            theirs(mode)

        self._ours = _python_dispatch._push_mode = counted

    def _leave(self) -> None:
        with self._lock:
            self._num_listeners -= 1
            if self._num_listeners or self._ours is not _python_dispatch._push_mode:
                return  # or somebody has wrapped ours, and it stays
            self._ours = _python_dispatch._push_mode = self._theirs


ENTRIES = Entries()
"""Of the process, as the function that is wrapped is the process's."""


ASKED: tuple[Callable[[], int], Callable[[], int], Callable[[], bool]]
ASKED = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch.is_inference_mode_enabled,
)
"""What every saved tensor asks: how many dispatch and function modes stand, and whether
inference mode does. No functions of ours: they would cost more."""


def may_meddle() -> bool:
    """Whether anything stands that the hooks' own work must not meet."""
    dispatching, overriding, inferring = ASKED
    if dispatching() or inferring():
        return True
    num = overriding()
    # The default device alters nothing that names its device, and often stands.
    return num > 1 or (
        num == 1 and type(torch._C._get_function_stack_at(0)) is not DeviceContext
    )


AS_IT_IS = nullcontext()


def without_modes() -> AbstractContextManager[None]:
    """Around ssdtrain's own work: no mode sees it, and its tensors are none of
    inference mode's. A dispatch mode that stands counts as entered."""
    dispatching, overriding, inferring = ASKED
    if dispatching() or overriding() or inferring():
        return _aside()
    return AS_IT_IS


def is_batched() -> bool:
    """Whether gradients are taken under vmap (`is_grads_batched`)."""
    # Torch does not tell the older one's level otherwise.
    torch._C._vmapmode_increment_nesting()
    older: int = torch._C._vmapmode_decrement_nesting()
    return older > 0 or torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def unbatched() -> Iterator[None]:
    """Around what is made again in backward: vmap does not see it. What forward made is
    not batched, and vmap refuses draws and `requires_grad_`."""
    older = torch._C._vmapmode_increment_nesting() - 1
    for _ in range(older + 1):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(older):
            torch._C._vmapmode_increment_nesting()


@contextmanager
def _aside() -> Iterator[None]:
    dispatching, overriding, inferring = ASKED
    with ExitStack() as stack:
        if inferring():
            stack.enter_context(torch.inference_mode(False))
        for _ in range(overriding()):
            stack.enter_context(overrides._pop_mode_temporarily())
        if dispatching():
            ENTRIES.num += 1
            stack.enter_context(_python_dispatch._disable_current_modes())
        yield


def unseen(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook, without modes."""

    @functools.wraps(hook)
    def inner(given: Any) -> Any:
        with without_modes():
            return hook(given)

    return inner
