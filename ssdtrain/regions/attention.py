"""Takes attention's stored results in a re-run instead of computing them again.

[Note: stored attention]
At long contexts attention is most of a layer's forward and its results are small, so a
plan may store them although their region runs again. In the re-run the attention
operator then gives aliases of what was stored. That happens below autograd, in a
dispatch mode: torch builds its own node, which saves what it saved in forward, and
whatever surrounds the operator (casts, padding, grouped heads) runs as ever. A mode
slows every operator down, so ours is entered with the last tensor saved before
attention's own, and only where no other mode stands, so below any that a model enters.
It stands to the end of the re-run: a compiled function puts the dispatcher's state of
its beginning back at its end, and a mode that was left inside would still be looked
for. One that was entered inside is not seen, so next time it is entered earlier.
An operator is answered only at its place among the saved tensors, with a call of the
same name, tensors (dtype, device, rank, version) and other arguments as was seen
computing here before, without dropout. Sizes and strides may differ from that call, but
not from forward's: the re-run compares those of every tensor that it saves, queries,
keys and values among them, with those that forward saved. Each answer must be saved at
the very place at which forward saved it, or the forward runs once more without answers.
All else is computed, and counted.
(tests/ssdtrain/regions/test_attention.py, test_attention_call.py,
test_attention_compiled.py)
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

NODES = ("ScaledDotProduct", "FlashAttention")
"""How the names of attention's autograd nodes begin."""
OPERATORS = frozenset(
    """
    aten::_scaled_dot_product_flash_attention
    aten::_scaled_dot_product_flash_attention_for_cpu
    aten::_scaled_dot_product_efficient_attention
    aten::_scaled_dot_product_cudnn_attention
    aten::_flash_attention_forward
    flash_attn::_flash_attn_forward
    flash_attn::_flash_attn_varlen_forward
    """.split()
)
LENGTHS = {
    "aten::_scaled_dot_product_flash_attention": {4: 0, 5: 1},
    "aten::_scaled_dot_product_cudnn_attention": {4: 0, 5: 1},
}
"""Results that are the length of an argument, by their numbers."""
LENGTH_DIM = 2
MAX_STATE = 16
"""Most elements of a random generator's state."""
NUM_INPUTS = 8
"""Places looked at before an attention's output for what else it saves."""
NUM_BEHIND = 4
"""And after it: the states of random generators."""
MAX_SIGNATURES = 16
"""Calls that are remembered for one attention."""

OTHERS_STAND = torch._C._len_torch_dispatch_stack
"""Asked before our mode is entered."""
Check = Callable[[Tensor, Tensor], None]
"""Compares a stored result with a computed one."""


def is_attentions(tensor: Tensor) -> bool:
    """Whether an attention operator made it."""
    node = tensor.grad_fn
    return node is not None and node.name().startswith(NODES)


class Form(NamedTuple):
    """All of a tensor but its bytes."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """Of a plain tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.stride(), tensor.device)

    def is_like(self, other: "Form") -> bool:
        """Whether a tensor of another length may have the other one."""
        own = self.dtype, self.device, len(self.shape)
        return own == (other.dtype, other.device, len(other.shape))


class Result(NamedTuple):
    """One result of an attention operator."""

    form: Form | None
    """None: it is no tensor."""
    place: int = -1
    """Where autograd saves it; -1: it is empty, or the state of a generator from which
    nothing was drawn, and a new one will do."""
    argument: int | None = None
    """Whose length it is, if it is a number."""


class Spot:
    """One attention call of a region's forward, by the tensors saved before it."""

    def __init__(self, start: int, at: int, results: tuple[Result, ...]) -> None:
        self.start = start
        """Its first place."""
        self.at = at
        """Tensors saved when its operator runs."""
        self.places = tuple(sorted(each.place for each in results if each.place >= 0))
        """Of its results."""
        self.known: dict[Any, tuple[Result, ...]] = {}
        """Results by the signature of the call."""

    def is_like(self, other: "Spot") -> bool:
        """Whether it lies where the other one does."""
        own = self.start, self.at, self.places
        return own == (other.start, other.at, other.places)

    def learn(self, signature: Any, results: tuple[Result, ...]) -> None:
        """Remember what a call gave."""
        if len(self.known) >= MAX_SIGNATURES:
            self.known.clear()
        self.known[signature] = results


class Attention:
    """What is known of the attention calls of a region, by its number of places."""

    def __init__(self) -> None:
        self._spots: dict[int, list[Spot]] = {}
        self.places: frozenset[int] = frozenset()
        """At which a result may be stored."""

    def of(self, num_places: int) -> list[Spot]:
        """The calls of a forward that saves so many tensors, in order."""
        return self._spots.get(num_places, [])

    def learn(self, num_places: int, spots: list[Spot]) -> None:
        """Replace what is known; calls seen before are not forgotten."""
        for new in spots:
            for old in self.of(num_places):
                if new.is_like(old):
                    new.known = {**old.known, **new.known}
        self._spots[num_places] = spots
        every = (spot for each in self._spots.values() for spot in each)
        self.places = frozenset(place for spot in every for place in spot.places)


@dataclass
class AttentionCall:
    """An attention operator that ran, or was answered."""

    name: str
    signature: Any
    """None: it must not be answered."""
    start: int
    at: int
    made: tuple[Any, ...]
    is_answer: bool
    before: Any = None
    behind: Any = None
    """Moments around it, if it was timed."""
    found: dict[int, int] = field(default_factory=dict)
    """Places of its results, by the number of the result."""

    def match(self, number: int, tensor: Tensor, address: int) -> None:
        """Look whether the tensor saved at this place is one of its results."""
        for at, own in enumerate(self.made):
            if at not in self.found and isinstance(own, Tensor) and own.numel():
                if own.data_ptr() == address and Form.of(own) == Form.of(tensor):
                    self.found[at] = number
                    return

    def results(self) -> tuple[Result, ...] | None:
        """What it gave and where that was saved; None: some of it nowhere, and what
        follows may read it."""
        results: list[Result] = []
        lengths = LENGTHS.get(self.name, {})
        for at, own in enumerate(self.made):
            if isinstance(own, Tensor):
                is_state = not own.is_floating_point() and own.numel() <= MAX_STATE
                if own.numel() and not is_state and at not in self.found:
                    return None
                place = -1 if is_state else self.found.get(at, -1)
                results.append(Result(Form.of(own), place))
            elif own is None or at in lengths:
                results.append(Result(None, argument=lengths.get(at)))
            else:
                return None
        return tuple(results) if 0 in self.found else None

    def is_in_place(self, results: Sequence[Result]) -> bool:
        """Whether each stored result was saved where forward had saved it."""
        return all(
            self.found.get(at) == result.place
            for at, result in enumerate(results)
            if result.place >= 0
        )


class Learnt(NamedTuple):
    """An attention call that was seen computing, and the moments around it."""

    spot: Spot
    before: Any
    behind: Any


class Window(NamedTuple):
    """Places from the first to the last of which the mode stands."""

    start: int
    end: int
    spot: Spot | None = None
    """Whose call is to be answered; None: look for calls."""


def windows_around(outputs: Sequence[int], num_places: int) -> list[Window]:
    """Where to look for the calls whose outputs are saved at these places."""
    if "flash_attn" in sys.modules and num_places:
        # What its functions save is made without a node.
        return [Window(0, num_places - 1)]
    found: list[Window] = []
    for place in outputs:
        start, end = max(0, place - NUM_INPUTS), place + NUM_BEHIND
        if found and start <= found[-1].end + 1:
            start = found.pop().start
        found.append(Window(start, end))
    return found


def windows_of(spots: Sequence[Spot]) -> list[Window]:
    """Where to answer these calls."""
    found: list[Window] = []
    for spot in spots:
        start = max(spot.start, found[-1].end + 1 if found else 0)
        found.append(Window(start, spot.places[-1], spot))
    return found


class RerunAttention:
    """The attention calls of one re-run.

    Args:
        windows: where they are expected, in order.
        stored: results that are stored, by place.
        check: compares a stored result with one that was computed; None: trust it.
        now: tells the moment; None: nothing is timed.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        stored: Mapping[int, Tensor],
        check: Check | None = None,
        now: Callable[[], Any] | None = None,
    ) -> None:
        self._windows = list(reversed(windows))
        self._stored = dict(stored)
        """Emptied at the end: an answer belongs to the graph of the re-run, and nodes
        hold their hooks, and so this object."""
        self._check = check
        self._now = now
        self._mode: _Mode | None = None
        """From the first window to the end of the re-run. It holds this object: a cycle
        would hold the re-run's graph until the garbage is collected."""
        self._is_open = False
        """Whether a window is open."""
        self._num_placed = 0
        self._last: list[int] = []
        """Addresses of what was saved last."""
        self._call: AttentionCall | None = None
        self.learnt: list[Learnt] = []
        self.reasons: list[str] = []
        """Why stored results were not taken."""
        self.is_wrong = False
        """Whether an answer was not saved where it belongs: the re-run is of no use."""

    @property
    def hears(self) -> Callable[[int, Tensor], None] | None:
        """What is to hear of saved tensors; None: nothing is expected."""
        return self.placed if self._windows else None

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Around the re-run."""
        self._open()
        try:
            yield
        finally:
            while self._windows:
                self._close()
            self._stored.clear()
            mode, self._mode = self._mode, None
            if mode is not None:
                _take_off(mode)

    def placed(self, number: int, tensor: Tensor) -> None:
        """Autograd has saved this tensor at this place."""
        self._num_placed = number + 1
        if self._is_open and not self._is_on_top:
            self._is_open = False  # another mode may change what the operator gives
        if self._is_open:
            address = tensor.data_ptr() if is_strided(tensor) else 0
            self._last = [*self._last[1 - NUM_INPUTS :], address]
            if self._call is not None and address:
                self._call.match(number, tensor, address)
        if self._windows and number >= self._windows[-1].end:
            self._close()
        self._open()

    def _open(self) -> None:
        """Open a window if the next tensor is its first one."""
        if not self._windows or self._num_placed != self._windows[-1].start:
            return
        if self._mode is None and not OTHERS_STAND():
            # Not by `with`: it ends in another call, and is no mode of the program's.
            self._mode = _Mode(self)
            torch._C._push_on_torch_dispatch_stack(self._mode)
        self._is_open = self._is_on_top

    @property
    def _is_on_top(self) -> bool:
        """Whether our mode stands, and none that was entered since: what it answers
        would pass through that one again."""
        num = torch._C._len_torch_dispatch_stack()
        if self._mode is None or not num:
            return False
        return torch._C._get_dispatch_stack_at(num - 1) is self._mode

    def _close(self) -> None:
        window, call = self._windows.pop(), self._call
        was_open, self._is_open = self._is_open, False
        spot = window.spot
        if spot is not None and (call is None or not call.is_answer):
            self.reasons.append(_reason(spot, call, was_open))
            if call is None:
                spot.start = max(0, spot.start - NUM_INPUTS)
        self._settle(spot)
        self._last = []

    def _settle(self, spot: Spot | None) -> None:
        """The last call's results have been saved."""
        call, self._call = self._call, None
        if call is None:
            return
        if call.is_answer:
            if spot is None or not call.is_in_place(spot.known[call.signature]):
                self.is_wrong = True
                self.reasons.append("what was taken was not saved in its place")
            return
        results = call.results()
        if results is None or call.signature is None:
            return
        found = Spot(call.start, call.at, results)
        if spot is not None and found.places == spot.places and call.at == spot.at:
            found = spot
        found.learn(call.signature, results)
        self.learnt.append(Learnt(found, call.before, call.behind))

    def serve(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer an operator, or run it."""
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name not in OPERATORS or not self._is_open:
            return func(*args, **kwargs)
        signature = signature_of(schema, args, kwargs)
        spot = self._windows[-1].spot if self._windows else None
        at, has_answered = self._num_placed, False
        if spot is None:
            self._settle(None)
        elif self._call is not None:
            has_answered = self._call.is_answer
        if spot is not None and not has_answered and at == spot.at:
            answer = self._answer(spot.known.get(signature, ()), args)
            if answer:
                if self._check is not None:
                    self._compare(answer, func(*args, **kwargs))
                self._call = AttentionCall(
                    *(schema.name, signature, spot.start, at, answer), is_answer=True
                )
                return answer
        before = None if self._now is None else self._now()
        made = func(*args, **kwargs)
        behind = None if self._now is None else self._now()
        if not has_answered:
            results = made if isinstance(made, tuple | list) else (made,)
            start = at - self._num_inputs(args, kwargs)
            self._call = AttentionCall(
                *(schema.name, signature, start, at, tuple(results)),
                *(False, before, behind),
            )
        return made

    def _num_inputs(self, args: Any, kwargs: Any) -> int:
        """How many of the tensors that were saved last are the operator's."""
        given = [*args, *kwargs.values()]
        own = {each.data_ptr() for each in given if is_strided(each)}
        count = 0
        for address in reversed(self._last):
            if address not in own:
                break
            count += 1
        return count

    def _answer(self, results: Sequence[Result], args: Any) -> tuple[Any, ...]:
        """What the operator gives; empty: it must run."""
        answer: list[Any] = []
        for result in results:
            if result.argument is not None:
                answer.append(args[result.argument].shape[LENGTH_DIM])
            elif result.form is None:
                answer.append(None)
            elif result.place < 0:
                shape, dtype, stride, device = result.form
                new = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                answer.append(new.zero_())
            else:
                stored = self._stored.get(result.place)
                if stored is None or not result.form.is_like(Form.of(stored)):
                    return ()
                answer.append(stored)
        return tuple(answer)

    def _compare(self, answer: Sequence[Any], made: Sequence[Any]) -> None:
        for ours, theirs in zip(answer, made, strict=True):
            if isinstance(ours, Tensor) and ours.is_floating_point() and ours.numel():
                if self._check is not None:
                    self._check(ours, theirs)


def _reason(spot: Spot, call: AttentionCall | None, stood: bool) -> str:
    """Why a spot was not answered."""
    if not stood:
        return "another dispatch mode stood around it"
    if call is None:
        return "no attention ran in its place"
    if call.signature is None:
        return "it has dropout, or tensors that are not plain"
    if call.at != spot.at:
        return "another attention ran in its place"
    return "it was called with other arguments, or what is stored is of another kind"


class _Mode(TorchDispatchMode):
    """Shows operators to a `RerunAttention`."""

    supports_higher_order_operators = True

    def __init__(self, watched: RerunAttention) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = watched

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._watched.serve(func, args, kwargs or {})


def _take_off(mode: TorchDispatchMode) -> None:
    """Take our mode from the stack, from below others that stand on it."""
    above = []
    while torch._C._len_torch_dispatch_stack():
        top = torch._C._pop_torch_dispatch_stack(None)
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


def is_strided(value: Any) -> bool:
    """Whether it is a plain tensor with an address."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_nested
    )


def signature_of(schema: Any, args: Any, kwargs: Any) -> Any:
    """What two calls must have in common to give the same; None: it draws random
    numbers, or takes what has no plain form."""
    found: list[Any] = [schema.name, schema.overload_name]
    for at, argument in enumerate(schema.arguments):
        if at < len(args):
            value = args[at]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        if is_strided(value):
            kind = value.dtype, value.device, value.dim(), value._version
            found.append(kind)
        elif isinstance(value, int | float | bool | str | None):
            found.append((type(value), value))
        else:
            return None
        if argument.name == "dropout_p" and value != 0:
            return None
    return tuple(found)
