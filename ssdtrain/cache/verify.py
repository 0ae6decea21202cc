"""Verify mode: is what backward gets what autograd saved?

It stands around `pack` and `unpack`, so it checks everything between them at once:
identity, placement, copies, storage, recipes and views. Layout and bits are compared
at every unpack, without a wait; the bytes by a digest (`checksum`) or against a copy
(`shadow`).

[Note: when verify raises]
A comparison with the host's eyes waits for the device, and one wait for every tensor
would cost more than the digests. So on a GPU the digests' differences stay on the
device, and the host looks at all of them at once when the backward's graph task ends,
before `backward()` returns: no optimizer can step with the gradients. On a CPU, and
under `shadow`, the error comes from the very unpack.
(tests/ssdtrain/cache/test_verify.py)

[Note: self-check]
Under `off` one rebuilt tensor in `SELF_CHECK_PERIOD`, drawn at random, is sealed and
compared all the same: a recipe that a rule of ours lets through wrongly is found in the
steps after, and not never. The digest reads the tensor twice; recipes are a few per
cent of a step, so this is a few hundredths of one. On a GPU nothing waits: differences
are copied to the host in stream order, and looked at when the next backward ends.
(tests/ssdtrain/cache/test_self_check.py)

[Note: state of no dropout]
Attention's kernels for GPUs save where the generator stood, and leave those one or two
integers unwritten where there is no dropout. Nobody reads them, and a forward that runs
again finds other garbage: they are not compared.
(tests/ssdtrain/cache/test_verify.py)

What the cache never moves is not checked, because it is the same object: tensors
below `min_bytes`, parameters and what has no plain storage.
"""

import random
import sys
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ssdtrain.cache.digest import Digests, chunks, elements, word_bytes
from ssdtrain.cache.identity import View, is_plain, view_of
from ssdtrain.cache.record import Handle, RebuiltView, RecordView, part_of
from ssdtrain.cache.savedindex import FromRegion
from ssdtrain.cache.wrapped import bytes_of
from ssdtrain.config import Verify
from ssdtrain.counters import Count, Counters
from ssdtrain.errors import ActivationChangedError
from ssdtrain.forks import ForkedLock, Owner

Pack = Callable[[Tensor], Handle]
Unpack = Callable[[Handle], Tensor]
SELF_CHECK_PERIOD = 256
ADVICE = (
    "Its gradients would be silently wrong, so backward stops: restart from the last "
    "checkpoint. Check the storage and the host memory; if both are sound, report "
    "this text as a bug."
)


class Verifier:
    """Stands around the hooks. This one trusts the cache; `Verified` does not."""

    checks_all = False
    """Whether every tensor is checked, so that none may go past the general path."""
    left = sys.maxsize
    """Tensors that are made again before the next one that is checked."""

    def around(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """The hooks to give to autograd."""
        return pack, unpack

    def seal(self, handle: Handle, tensor: Tensor) -> None:
        """Hear of a handle that was given past the hook `pack`."""

    def draws(self) -> bool:
        """Whether what comes next is checked."""
        return False

    def compare(self, stored: Tensor, computed: Tensor, text: str) -> None:
        """Compare what was stored with what computing it again gave.

        Raises:
            ActivationChangedError: they differ.
        """


class Seal(NamedTuple):
    """What was seen of a tensor when it was saved."""

    look: View
    """All of it but its bytes."""
    module: str
    """Innermost module whose forward was running, "" outside any."""
    word_bytes: int
    evidence: Tensor
    """The digest (0-D int64), or a copy of the elements."""


class Doubt(NamedTuple):
    """A comparison whose result is still on the device."""

    text: str
    differs: Tensor
    """0-D bool."""


class Moment(Enum):
    """When the host looks at a digest's comparison. See [Note: when verify raises]."""

    AT_UNPACK = auto()
    AT_BACKWARD_END = auto()


class Modules:
    """Names the module that runs, from the interpreter's frames: no hook is needed."""

    _CALLS = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._names = {
            id(module): f"{name or 'model'} ({type(module).__name__})"
            for root in roots
            for name, module in root.named_modules()
        }

    def running(self) -> str:
        """The innermost one, by its name in the model."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code in self._CALLS:
                name = self._names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name
        return ""


class ByDigest:
    """Takes digests for evidence."""

    def __init__(self, device: torch.device) -> None:
        self._digests = Digests(device)
        self._doubts: list[Doubt] = []
        self._armed: set[int] = set()
        """Backwards at whose end comparisons are looked at."""
        self._lock = ForkedLock()

    def evidence(self, tensor: Tensor, word: int) -> Tensor:
        """The digest; nothing waits."""
        return self._digests.of(tensor, word)


class Checksum(ByDigest):
    """Compares digests."""

    def __init__(self, device: torch.device, moment: Moment) -> None:
        super().__init__(device)
        self._moment = moment
        self._streams: set[torch.cuda.Stream] = set()

    def compare(self, tensor: Tensor, seal: Seal, text: str) -> None:
        """Compare now or at the end of this backward.

        Raises:
            ActivationChangedError: the digests differ.
        """
        found = self._digests.of(tensor, seal.word_bytes)
        differs = found.ne(seal.evidence)
        text += "; verify='shadow' names the first byte that differs"
        task = torch._C._current_graph_task_id()
        with self._lock.here():
            self._doubts.append(Doubt(text, differs))
            if tensor.is_cuda:
                self._streams.add(torch.cuda.current_stream(tensor.device))
            wait = self._moment is Moment.AT_BACKWARD_END and task != -1
            if wait and task not in self._armed:
                self._armed.add(task)
                Variable._execution_engine.queue_callback(lambda: self._end_of(task))
        if not wait:
            self.settle()

    def _end_of(self, task: int) -> None:
        self._armed.discard(task)
        self.settle()

    def settle(self) -> None:
        """Look at every comparison that is still on the device; waits for it.

        Raises:
            ActivationChangedError: at least one tensor is not what was saved.
        """
        with self._lock.here():
            doubts, self._doubts = self._doubts, []
            streams, self._streams = self._streams, set()
        if not doubts:
            return
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        flags = torch.stack([doubt.differs for doubt in doubts])
        raise_if([doubt.text for doubt in doubts], flags)


class PendingComparison(NamedTuple):
    """Comparisons on their way to the host."""

    texts: list[str]
    differs: Tensor
    """1-D bool, pinned."""
    behind: torch.cuda.Event


class LateChecksum(ByDigest):
    """Compares digests and never waits for the device. See [Note: self-check]."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copied: list[PendingComparison] = []

    def compare(self, tensor: Tensor, seal: Seal, text: str) -> None:
        """Compare now on a CPU; else look at the result when the next backward ends.

        Raises:
            ActivationChangedError: the digests differ, here or in the step before.
        """
        differs = self._digests.of(tensor, seal.word_bytes).ne(seal.evidence)
        if not differs.is_cuda:
            raise_if([text], differs.reshape(1))
            return
        task = torch._C._current_graph_task_id()
        with self._lock.here():
            self._doubts.append(Doubt(text, differs))
            wait = task != -1 and task not in self._armed
            if wait:
                self._armed.add(task)
                Variable._execution_engine.queue_callback(lambda: self._end_of(task))

    def _end_of(self, task: int) -> None:
        with self._lock.here():
            self._armed.discard(task)
            doubts, self._doubts = self._doubts, []
            copied, self._copied = self._copied, []
            if doubts:  # none where another backward, ended before, has taken them
                self._copied.append(_to_host(doubts))
        _look(copied)  # of the step before: mostly over

    def settle(self) -> None:
        """Look at what the last backward has left; waits for it.

        Raises:
            ActivationChangedError: digests differ.
        """
        with self._lock.here():
            copied, self._copied = self._copied, []
        _look(copied)


def _to_host(doubts: list[Doubt]) -> PendingComparison:
    flags = torch.stack([doubt.differs for doubt in doubts])
    host = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flags, non_blocking=True)
    behind = torch.cuda.Event()
    behind.record()
    return PendingComparison([doubt.text for doubt in doubts], host, behind)


def _look(copied: list[PendingComparison]) -> None:
    for each in copied:
        each.behind.synchronize()
        raise_if(each.texts, each.differs)


def raise_if(texts: list[str], differs: Tensor) -> None:
    """Look at comparisons on the host.

    Raises:
        ActivationChangedError: at least one tensor is not what was saved.
    """
    wrong = [at for (at,) in differs.nonzero().tolist()]
    if wrong:
        more = f" {len(wrong) - 1} more tensors differ." if wrong[1:] else ""
        raise ActivationChangedError(f"{texts[wrong[0]]}.{more} {ADVICE}")


class Shadow:
    """Compares with a copy, byte by byte; waits for the device at every tensor."""

    def evidence(self, tensor: Tensor, word: int) -> Tensor:
        """A copy of the distinct elements, dense."""
        return elements(tensor).clone(memory_format=torch.contiguous_format)

    def compare(self, tensor: Tensor, seal: Seal, text: str) -> None:
        """Compare and name the first byte that differs.

        Raises:
            ActivationChangedError: a byte differs.
        """
        before = 0
        parts = zip(chunks(elements(tensor)), chunks(seal.evidence), strict=True)
        for found, saved in parts:
            ours, theirs = _bytes_of(found), _bytes_of(saved)
            if not torch.equal(ours, theirs):
                wrong = ours.ne(theirs).nonzero().flatten()
                at = int(wrong[0])
                raise ActivationChangedError(
                    f"{text}: byte {before + at} of {seal.evidence.nbytes} is the "
                    f"first that differs (saved {int(theirs[at]):#04x}, came back "
                    f"{int(ours[at]):#04x}). {ADVICE}"
                )
            before += ours.numel()


def _bytes_of(tensor: Tensor) -> Tensor:
    # Not view(-1): what is empty is contiguous at any stride, and keeps it.
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class Verified(Verifier):
    """Seals what autograd saves and checks what backward gets."""

    def __init__(
        self,
        mode: Checksum | LateChecksum | Shadow,
        device: torch.device,
        modules: Modules,
        counters: Counters,
        lots: random.Random | None = None,
    ) -> None:
        self._mode = mode
        self._device = device
        self._modules = modules
        self._counters = counters
        self._lots = lots
        """Draws what is checked; None: everything."""
        self.checks_all = lots is None
        self.left = 0
        """See `Verifier`."""
        self._owner = Owner()

    def around(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """The hooks with a check around both."""

        def packing(tensor: Tensor) -> Handle:
            handle = pack(tensor)
            self.seal(handle, tensor)
            return handle

        def unpacking(handle: Handle) -> Tensor:
            tensor = unpack(handle)
            if handle.seal is not None:
                self._check(bytes_of(tensor), handle, handle.seal)
            return tensor

        return packing, unpacking

    def seal(self, handle: Handle, tensor: Tensor) -> None:
        """Remember what was saved, if it is drawn."""
        if self._is_drawn(handle):
            part = bytes_of(tensor)
            # A region also makes again what no digest can read, or not here.
            if is_plain(part) and part.device == self._device:
                handle.seal = self._seal(part)

    def _is_drawn(self, handle: Handle) -> bool:
        if self._lots is None:
            kinds = RecordView | RebuiltView | FromRegion
            return isinstance(part_of(handle).source, kinds)
        return _is_made_again(handle) and self.draws()

    def draws(self) -> bool:
        """Whether what comes next is checked: everything, or one in many."""
        if self._lots is None:
            return True
        self.left -= 1
        if self.left >= 0:
            return False
        # On the average one in SELF_CHECK_PERIOD, and no place is left out.
        self.left = self._lots.randrange(2 * SELF_CHECK_PERIOD - 1)
        return True

    def compare(self, stored: Tensor, computed: Tensor, text: str) -> None:
        """Compare what was stored with what computing it again gave.

        Raises:
            ActivationChangedError: they differ; here, or when backward ends.
        """
        with torch.no_grad():
            word = min(word_bytes(stored), word_bytes(computed))
            evidence = self._mode.evidence(stored, word)
            seal = Seal(view_of(stored, 0), "", word, evidence)
            self._mode.compare(computed, seal, text)

    def _seal(self, tensor: Tensor) -> Seal:
        with torch.no_grad():
            word = word_bytes(tensor)
            evidence = self._mode.evidence(tensor, word)
        return Seal(view_of(tensor, 0), self._modules.running(), word, evidence)

    def _check(self, tensor: Tensor, handle: Handle, seal: Seal) -> None:
        if _is_unwritten(tensor):
            return
        if not self._owner.is_elsewhere:  # see [Note: after a fork]
            self._counters.add(Count.TENSORS_VERIFIED)
            self._counters.add(Count.VERIFIED, tensor.nbytes)
        text = describe(handle, seal)
        if (back := view_of(tensor, 0)) != seal.look:
            raise ActivationChangedError(
                f"{text}: saved as {seal.look}, came back as {back}. {ADVICE}"
            )
        with torch.no_grad():
            self._mode.compare(tensor, seal, text)


def _is_unwritten(tensor: Tensor) -> bool:
    """Whether backward asks for the state of no dropout: see the note."""
    if tensor.numel() > 2 or tensor.dtype not in (torch.int64, torch.uint64):
        return False
    rate = getattr(torch._C._current_autograd_node(), "_saved_dropout_p", None)
    return rate == 0.0


def _is_made_again(handle: Handle) -> bool:
    source = part_of(handle).source
    if isinstance(source, RecordView):
        return source.record.region is not None
    return isinstance(source, RebuiltView | FromRegion)


def describe(handle: Handle, seal: Seal) -> str:
    """Record, module and operator of a tensor that is being checked."""
    source = part_of(handle).source
    if isinstance(source, RebuiltView):
        name, how = source.rebuilt.name, "rebuilt by a recipe"
    elif isinstance(source, RecordView):
        name = f"{source.record.name}, record {source.record.ordinal}"
        away = source.record.transfer is not None
        how = "brought back" if away else "kept on the device"
        if source.record.region is not None:
            how = f"made again by {source.record.region.region.path}"
    elif isinstance(source, FromRegion):
        name, how = "a tensor of a region", f"made again by {source.call.region.path}"
    else:
        raise TypeError(f"no seal is put on {type(source).__name__}")
    node = torch._C._current_autograd_node()
    operator = "a reader outside backward" if node is None else node.name()
    shape = "x".join(map(str, seal.look.shape))
    where = seal.module or "outside any module"
    return (
        f"the tensor that {operator} asks for is not the one that was saved: {name} "
        f"({seal.look.dtype}, {shape}; saved in {where}; {how})"
    )


def open_verifier(
    mode: Verify,
    device: torch.device,
    modules: Iterable[nn.Module],
    counters: Counters,
    seed: int = 0,
) -> Verifier:
    """The verifier that a configuration asks for."""
    names = Modules(modules)
    if mode is Verify.OFF:
        lots = random.Random(seed)
        return Verified(LateChecksum(device), device, names, counters, lots)
    if mode is Verify.SHADOW:
        return Verified(Shadow(), device, names, counters)
    on_gpu = device.type == "cuda"
    moment = Moment.AT_BACKWARD_END if on_gpu else Moment.AT_UNPACK
    return Verified(Checksum(device, moment), device, names, counters)
