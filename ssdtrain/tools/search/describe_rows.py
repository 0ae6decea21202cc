"""Descriptions of reductions, norms, softmax, losses and embeddings."""

from collections.abc import Callable, Sequence

from ssdtrain.tools.search.calls import OperatorCall, aten, describes
from ssdtrain.tools.search.interval import Interval
from ssdtrain.tools.search.language import (
    Description,
    Form,
    OperatorResult,
    Reducer,
    Term,
    apply,
    description,
    indices_of,
    opaque,
    reduce_over,
    result,
)

ALL = slice(None)


def positive(dim: int, rank: int) -> int:
    """Return a dimension counted from the first."""
    return dim % rank if rank else 0


def _dims(call: OperatorCall, rank: int) -> list[int]:
    """Return the dimensions that a call names; all, if it names none."""
    given = call.arguments.get("dim")
    if given is None or given == []:
        return list(range(rank))
    each = [given] if isinstance(given, int) else given
    return [positive(dim, rank) for dim in each]


def _reduction(call: OperatorCall, reducer: Reducer, *, is_open: bool) -> Description:
    """Describe a reduction over dimensions; `is_open`: it can be split."""
    [source] = call.tensors
    gone = _dims(call, source.rank)
    names = indices_of(source.rank)
    keep = bool(call.arguments.get("keepdim"))
    term = source[tuple(map(Interval.of, names))] if names else source[()]
    term = reduce_over(reducer, [names[dim] for dim in gone], term)
    term = term if is_open else term.closed()
    dims = tuple(
        ((f"{names[dim]} kept",) if dim in gone else (names[dim],))
        for dim in range(source.rank)
        if keep or dim not in gone
    )
    fixed = term.fixed | {n for dim in dims for n in dim if n.endswith("kept")}
    own = Term(term.reads, term.reduced, fixed)
    return Description((OperatorResult(dims, own),) * len(call.results))


REDUCERS = {
    **dict.fromkeys(("aten::sum", "aten::mean"), Reducer.SUM),
    **dict.fromkeys(("aten::amax", "aten::any"), Reducer.MAX),
    **dict.fromkeys(("aten::amin", "aten::all"), Reducer.MIN),
    "aten::prod": Reducer.PROD,
}


@describes(*REDUCERS)
def _reduced(call: OperatorCall) -> Description:
    return _reduction(call, REDUCERS[call.name], is_open=True)


@describes("aten::max", "aten::min")
def _max(call: OperatorCall) -> Description:
    if len(call.tensors) > 1:
        return elementwise(call)
    reducer = Reducer.MAX if call.name == "aten::max" else Reducer.MIN
    return _reduction(call, reducer, is_open=len(call.results) == 1)


def elementwise(call: OperatorCall) -> Description:
    """Return the description after broadcasting."""

    def body(*i: Interval) -> Term:
        return apply(*(tensor.spread(i) for tensor in call.tensors))

    results = tuple(result(indices_of(rank), body) for rank in call.ranks)
    return Description(results, is_elementwise=True)


STATISTICS = (
    "var std var_mean argmax argmin logsumexp linalg_vector_norm norm median nansum "
    "kthvalue"
)


@describes(*aten(STATISTICS))
def _statistic(call: OperatorCall) -> Description:
    return _reduction(call, Reducer.SUM, is_open=False)


ALONG = (
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum "
    "cumprod cummax cummin logcumsumexp sort topk flip roll"
)


@describes(*aten(ALONG))
def _along(call: OperatorCall) -> Description:
    rank = len(call.results[0])
    given = call.arguments
    dims = given["dims"] if given.get("dims") is not None else given.get("dim", -1)
    whole = {positive(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}
    if call.name == "aten::roll" and not dims:
        whole = set(range(rank))
    return with_whole(call, whole)


def with_whole(call: OperatorCall, whole: set[int]) -> Description:
    """Some dimensions of operands and results as a whole, others by their elements."""

    def body(*i: Interval) -> Term:
        at = tuple(ALL if dim in whole else one for dim, one in enumerate(i))
        used = tuple(i[dim] for dim in whole if dim < len(i))
        return opaque(*(tensor[at] for tensor in call.tensors))[used]

    return Description(tuple(result(indices_of(rank), body) for rank in call.ranks))


def with_own_dims(
    call: OperatorCall, lead: int, body: Callable[..., Term]
) -> Description:
    """Results that share their first `lead` dimensions, and no others."""
    names = (
        [*indices_of(lead), *(f"own{at}.{dim}" for dim in range(rank - lead))]
        for at, rank in enumerate(call.ranks)
    )
    return Description(tuple(result(own, body) for own in names))


def asked_for(call: OperatorCall, *forms: Form) -> tuple[OperatorResult, ...]:
    """Return the results that a backward's `output_mask` asks for."""
    pairs = zip(forms, call["output_mask"], strict=False)
    return tuple(result(*form) for form, is_asked in pairs if is_asked)


@describes("aten::native_layer_norm", "aten::native_group_norm")
def _normed(call: OperatorCall) -> Description:
    """Rows by their elements; what is normalized, and the weights, as a whole."""
    source, others = call["input"], call.tensors[1:]
    lead = 1
    if call.name == "aten::native_layer_norm":
        lead = source.rank - len(call["normalized_shape"])

    def body(*i: Interval) -> Term:
        rows = source.at(*i[:lead], *(ALL,) * (source.rank - lead))
        return opaque(rows, *(one.whole() for one in others))[i[lead:]]

    return with_own_dims(call, lead, body)


@describes("aten::native_layer_norm_backward")
def _layer_norm_backward(call: OperatorCall) -> Description:
    source = call["input"]
    lead = source.rank - len(call["normalized_shape"])
    rows = tuple(map(Interval.of, indices_of(lead)))
    reads = [
        one.at(*rows, *(ALL,) * (one.rank - lead))
        if one.rank == source.rank
        else one.whole()
        for one in call.tensors
    ]

    def by_row(*i: Interval) -> Term:
        return opaque(*reads)[i[lead:]]

    def by_weight(*i: Interval) -> Term:
        return reduce_over(Reducer.SUM, indices_of(lead), opaque(*reads)[i])

    inner = [f"n{dim}" for dim in range(source.rank - lead)]
    rows_form = ([*indices_of(lead), *inner], by_row)
    return Description(asked_for(call, rows_form, *[(inner, by_weight)] * 2))


@describes("aten::native_group_norm_backward")
def _group_norm_backward(call: OperatorCall) -> Description:
    b = Interval.of("b")
    samples = call["input"].shape[0]
    weight = call["weight"]
    reads = [
        one.whole() if one is weight else one.at(b, *(ALL,) * (one.rank - 1))
        for one in call.tensors
    ]
    rank = call["input"].rank
    rest = [f"n{dim}" for dim in range(rank - 1)]

    def by_sample(b: Interval, *i: Interval) -> Term:
        return opaque(*reads)[i]

    def by_channel(c: Interval) -> Term:
        return reduce_over(Reducer.SUM, ["b"], opaque(*reads)[c])

    results = asked_for(call, (["b", *rest], by_sample), *[(["n0"], by_channel)] * 2)
    return Description(results, {"b": samples})


NORMS = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "native_batch_norm_backward"
)


@describes(*aten(NORMS))
def _batch_norm(call: OperatorCall) -> Description:
    """By channels: statistics are of all samples."""
    results = []
    for at, shape in enumerate(call.results):
        names = [f"n{at}.{dim}" for dim in range(len(shape))]
        if len(shape) == 1 and shape[0]:
            names = ["c"]
        elif shape != (0,):
            names[1] = "c"

        def body(*i: Interval, own: Sequence[str] = tuple(names)) -> Term:
            c = Interval.of("c")
            reads = [
                one[c] if one.rank == 1 else one.at(ALL, c, *(ALL,) * (one.rank - 2))
                for one in call.tensors
            ]
            used = [v for v, n in zip(i, own, strict=True) if n != "c"]
            return opaque(*reads)[tuple(used)]

        results.append(result(names, body))
    return Description(tuple(results))


@describes(*aten("mse_loss smooth_l1_loss huber_loss"))
def _loss(call: OperatorCall) -> Description:
    if call["reduction"] == 0:
        return elementwise(call)
    one, two = call.tensors
    names = indices_of(one.rank)
    i = tuple(map(Interval.of, names))
    return Description(
        (OperatorResult((), reduce_over(Reducer.SUM, names, one[i] * two[i])),)
    )


describes(*aten("mse_loss_backward smooth_l1_loss_backward huber_loss_backward"))(
    elementwise
)


@describes("aten::nll_loss_forward")
def _nll_loss(call: OperatorCall) -> Description:
    source, target, weight = call["self"], call["target"], call["weight"]
    rows = Interval.of("n") if source.rank == 2 else None
    whole = [] if weight is None else [weight.whole()]
    at: tuple[Interval | slice, ...] = (ALL,) if rows is None else (rows, ALL)
    labels = target[()] if target.rank == 0 else target[rows if rows else ALL]
    term = opaque(source[at], labels, *whole)
    if call["reduction"] == 0 and rows is not None:
        each = OperatorResult((("n",),), term)
        return Description((each, OperatorResult((), term)))
    found = term if rows is None else reduce_over(Reducer.SUM, ["n"], term)
    return Description((OperatorResult((), found), OperatorResult((), found)))


@describes("aten::nll_loss_backward")
def _nll_loss_backward(call: OperatorCall) -> Description:
    source, target, grad = call["self"], call["target"], call["grad_output"]
    if source.rank == 1:
        return description(lambda c: opaque(*(t.whole() for t in call.tensors))[c])
    weight = [] if call["weight"] is None else [call["weight"].whole()]

    def body(n: Interval, c: Interval) -> Term:
        of_row = grad[n] if grad.rank else grad[()]
        total = call["total_weight"].whole()
        return opaque(of_row, source[n, ALL], target[n], total, *weight)[c]

    return description(body)


@describes("aten::embedding")
def _embedding(call: OperatorCall) -> Description:
    weight, indices = call["weight"], call["indices"]

    def body(*i: Interval) -> Term:
        return opaque(weight[ALL, i[-1]], indices[i[:-1]])

    return Description((result([*indices_of(indices.rank), "h"], body),))


@describes("aten::embedding_dense_backward")
def _embedding_backward(call: OperatorCall) -> Description:
    grad, indices = call["grad_output"], call["indices"]
    names = indices_of(indices.rank)
    i = tuple(map(Interval.of, names))

    def body(v: Interval, h: Interval) -> Term:
        return reduce_over(Reducer.SUM, names, opaque(grad.at(*i, h), indices[i])[v])

    return description(body)


PLANES = (
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest2d upsample_bilinear2d "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d max_pool2d_with_indices_backward "
    "max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward "
    "_adaptive_avg_pool2d_backward upsample_nearest2d_backward "
    "upsample_bilinear2d_backward"
)


@describes(*aten(PLANES))
def _planes(call: OperatorCall) -> Description:
    """Every plane of a sample and a channel on its own."""
    spatial = 2 if "2d" in call.name else 3 if "3d" in call.name else 1
    rank = len(call.results[0])
    return with_whole(call, set(range(rank - spatial, rank)))
