"""Descriptions of matrix products, convolutions and attention."""

from collections.abc import Callable, Mapping
from typing import Any

from ssdtrain.tools.search.calls import OperatorCall, describes
from ssdtrain.tools.search.describe_rows import asked_for
from ssdtrain.tools.search.interval import Interval
from ssdtrain.tools.search.language import (
    Description,
    OperatorResult,
    Reducer,
    Sum,
    Term,
    apply,
    description,
    indices_of,
    opaque,
    reduce_over,
    result,
)

ALL = slice(None)


PRODUCTS: Mapping[str, Callable[..., Callable[..., Term]]] = {
    "aten::mm": lambda a, b: lambda i, j: Sum(lambda k: a[i, k] * b[k, j]),
    "aten::addmm": lambda c, a, b: (
        lambda i, j: Sum(lambda k: a[i, k] * b[k, j]) + c.spread((i, j))
    ),
    "aten::bmm": lambda a, b: lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j]),
    "aten::baddbmm": lambda c, a, b: (
        lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j]) + c.spread((n, i, j))
    ),
    "aten::mv": lambda a, b: lambda i: Sum(lambda k: a[i, k] * b[k]),
    "aten::addmv": lambda c, a, b: (
        lambda i: Sum(lambda k: a[i, k] * b[k]) + c.spread((i,))
    ),
    **dict.fromkeys(
        ("aten::dot", "aten::vdot"), lambda a, b: lambda: Sum(lambda k: a[k] * b[k])
    ),
    "aten::addr": lambda c, a, b: lambda i, j: apply(a[i], b[j], c.spread((i, j))),
}
"""By operator, a function of its operands that gives one of its result's indices."""


@describes(*PRODUCTS)
def _product(call: OperatorCall) -> Description:
    return description(PRODUCTS[call.name](*call.tensors))


@describes("aten::_cdist_forward")
def _cdist(call: OperatorCall) -> Description:
    a, b = call.tensors
    lead = indices_of(a.rank - 2)

    def body(*i: Interval) -> Term:
        return opaque(a.at(*i[:-1], ALL), b.at(*i[:-2], i[-1], ALL))

    return Description((result([*lead, "m", "n"], body),))


def _positions(call: OperatorCall, name: str) -> list[Any]:
    """Return an argument of a convolution, once for each spatial dimension."""
    rank = call["weight"].rank - 2
    values = list(call[name])
    return values * rank if len(values) == 1 else values


@describes("aten::convolution")
def _convolution(call: OperatorCall) -> Description:
    data, weight, bias = call["input"], call["weight"], call["bias"]
    rank = weight.rank - 2
    steps = [_positions(call, name) for name in ("stride", "padding", "dilation")]
    windows = [f"d{dim}" for dim in range(rank)]
    each = [Interval.of(name) for name in windows]
    ci = Interval.of("ci")

    def plain(b: Interval, co: Interval, *x: Interval) -> Term:
        at = [
            stride * one + dilation * inner - padding
            for one, inner, stride, padding, dilation in zip(
                x, each, *steps, strict=True
            )
        ]
        product = data.at(b, ci, *at) * weight.at(co, ci, *each)
        # A part of a window is not the same operator: windows stay whole.
        return reduce_over(Reducer.SUM, windows, product).closed()

    def transposed(b: Interval, co: Interval, *x: Interval) -> Term:
        rest = (ALL,) * rank
        return opaque(data.at(b, ci, *rest), weight.at(ci, co, *rest))[x]

    def body(b: Interval, co: Interval, *x: Interval) -> Term:
        if call["groups"] != 1:
            rest = (ALL,) * (rank + 1)
            found = opaque(data.at(b, *rest), weight.whole()).at(co, *x)
            return found if bias is None else apply(found, bias[ALL])
        inner = transposed(b, co, *x) if call["transposed"] else plain(b, co, *x)
        found = reduce_over(Reducer.SUM, ["ci"], inner)
        return found if bias is None else found + bias[co]

    is_plain = call["groups"] == 1 and not call["transposed"]
    sizes = dict(zip(windows, weight.shape[2:], strict=True)) if is_plain else {}
    names = ["b", "co", *(f"x{dim}" for dim in range(rank))]
    return Description((result(names, body),), sizes)


@describes("aten::convolution_backward")
def _convolution_backward(call: OperatorCall) -> Description:
    grad, data, weight = call["grad_output"], call["input"], call["weight"]
    rank = weight.rank - 2
    rest = (ALL,) * rank
    b, co, ci = map(Interval.of, ("b", "co", "ci"))
    is_plain = call["groups"] == 1
    kernel = ["ci", "co"] if call["transposed"] else ["co", "ci"]
    two = tuple(map(Interval.of, kernel))

    def by_input(b: Interval, ci: Interval, *x: Interval) -> Term:
        if not is_plain:
            return opaque(grad.at(b, ALL, *rest), weight.whole()).at(ci, *x)
        found = opaque(grad.at(b, co, *rest), weight.at(*two, *rest))[x]
        return reduce_over(Reducer.SUM, ["co"], found)

    def by_weight(*k: Interval) -> Term:
        if is_plain:
            found = opaque(grad.at(b, co, *rest), data.at(b, ci, *rest))[k[2:]]
        else:
            found = opaque(grad.at(b, ALL, *rest), data.at(b, ALL, *rest))[k]
        return reduce_over(Reducer.SUM, ["b"], found)

    def by_bias(co: Interval) -> Term:
        found = opaque(grad.at(b, co, *rest))
        return reduce_over(Reducer.SUM, ["b"], found if is_plain else found[co])

    places = [f"x{dim}" for dim in range(rank)]
    inner = [f"k{dim}" for dim in range(rank)]
    results = asked_for(
        call,
        (["b", "ci", *places], by_input),
        ([*kernel, *inner], by_weight),
        (["co"], by_bias),
    )
    sizes = {"b": data.shape[0], "co": grad.shape[1], "ci": data.shape[1]}
    return Description(results, sizes)


def _attention(call: OperatorCall) -> tuple[bool, bool]:
    """Return whether queries, and whether heads, are independent of one another."""
    query, key = call["query"], call["key"]
    free = not call["is_causal"] and call.arguments.get("attn_mask") is None
    free = free and call.arguments.get("attn_bias") is None
    return free, query.shape[1] == key.shape[1]


FORWARD = [
    f"aten::_scaled_dot_product_{kind}"
    for kind in (
        *("flash_attention_for_cpu", "flash_attention"),
        *("efficient_attention", "cudnn_attention"),
    )
]
BACKWARD = tuple(f"{name}_backward" for name in FORWARD)


@describes(*FORWARD)
def _attend(call: OperatorCall) -> Description:
    query, key, value = call["query"], call["key"], call["value"]
    others = [t for t in call.tensors if t not in (query, key, value)]
    free, by_head = _attention(call)

    def body(b: Interval, h: Interval, q: Interval, *d: Interval) -> Term:
        heads = h if by_head else ALL
        rest = (ALL, ALL)
        slices = (
            query[b, heads, q if free else ALL, ALL],
            *(one.at(b, heads, *rest) for one in (key, value)),
        )
        used = d if free else (q, *d)
        used = used if by_head else (h, *used)
        return opaque(*slices, *(one.whole() for one in others))[used]

    return Description(
        tuple(
            result(["b", "h", "q", "d"][:rank], body)
            if rank in (3, 4)
            else OperatorResult((("state",),) * rank, Term(fixed=frozenset({"state"})))
            for rank in call.ranks
        )
    )


@describes(*BACKWARD)
def _attend_backward(call: OperatorCall) -> Description:
    b, h = Interval.of("b"), Interval.of("h")
    tensors = call.tensors
    by_head = len({t.shape[1] for t in tensors if t.rank >= 3}) == 1
    reads = [
        one.at(b, h if by_head else ALL, *(ALL,) * (one.rank - 2))
        if one.rank >= 3
        else one.whole()
        for one in tensors
    ]

    def body(b: Interval, h: Interval, *rest: Interval) -> Term:
        return opaque(*reads)[rest if by_head else (h, *rest)]

    names = (["b", "h", "q", "d"], ["b", "h", "k", "e"], ["b", "h", "k", "f"])
    results = [result(own, body) for own in names[: len(call.results)]]
    return Description(tuple(results))
