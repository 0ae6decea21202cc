"""One attention call of a re-run: learnt, answered, or computed."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.regions import attention


def inputs(length: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]


def saving(watched: attention.RerunAttention, forward: Callable[[], Tensor]) -> Tensor:
    """Run a forward whose saved tensors a `RerunAttention` hears of."""
    count = [0]

    def pack(tensor: Tensor) -> Tensor:
        if watched.hears is not None:
            watched.placed(count[0], tensor)
        count[0] += 1
        return tensor.detach()

    with watched.standing(), torch.autograd.graph.saved_tensors_hooks(pack, detached):
        return forward()


def detached(tensor: Tensor) -> Tensor:
    return tensor


def learnt(forward: Callable[[], Tensor], output: int) -> attention.Spot:
    watched = attention.RerunAttention(attention.windows_around([output], 9), {})
    saving(watched, forward)
    (found,) = watched.learnt
    return found.spot


def like(spot: attention.Spot, number: int) -> Tensor:
    """Zeros in the form of a result."""
    (results,) = spot.known.values()
    form = results[number].form
    assert form is not None
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype).zero_()


def test_what_is_stored_must_have_its_form() -> None:
    q, k, v = inputs()

    def forward() -> Tensor:
        found: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found

    spot = learnt(forward, 4)
    assert (spot.start, spot.at, spot.places) == (0, 3, (3, 4))
    plain = forward().detach()
    for stored in (plain * 2, plain.double()):
        results = {3: like(spot, 1), 4: stored}
        watched = attention.RerunAttention(attention.windows_of([spot]), results)
        found = saving(watched, forward)
        fits = stored.dtype is plain.dtype
        assert torch.equal(found, stored if fits else plain)
        assert len(watched.reasons) == (not fits)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_dropout_is_never_answered() -> None:
    schema = torch.ops.aten._scaled_dot_product_flash_attention.default._schema
    given = inputs()
    assert attention.signature_of(schema, given, {}) is not None
    assert attention.signature_of(schema, [*given, 0.0, True], {}) is not None
    assert attention.signature_of(schema, [*given, 0.1, True], {}) is None
    assert attention.signature_of(schema, given, {"dropout_p": 0.1}) is None
    sparse = given[0].detach().to_sparse()
    assert attention.signature_of(schema, [sparse, *given[1:]], {}) is None
    first, second = (
        attention.signature_of(schema, given, {"scale": scale}) for scale in (0.5, 0.25)
    )
    assert first != second
    before = attention.signature_of(schema, given, {})
    with torch.no_grad():
        given[0].mul_(2.0)
    assert attention.signature_of(schema, given, {}) != before


def test_an_answer_that_is_saved_elsewhere_is_no_answer() -> None:
    """The same call in its place, but what it gives is not what forward saved."""
    q, k, v = inputs()
    keeps = [True]

    def forward() -> Tensor:
        if keeps[0]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # Three tensors are saved before, and the call itself saves none.
        first = q.sin() + k.sin() + v.sin()
        with torch.no_grad():
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return first * found * found

    spot = learnt(forward, 4)
    stored = {3: like(spot, 1), 4: like(spot, 0)}
    keeps[0] = False
    watched = attention.RerunAttention(attention.windows_of([spot]), stored)
    saving(watched, forward)
    assert watched.is_wrong and watched.reasons
