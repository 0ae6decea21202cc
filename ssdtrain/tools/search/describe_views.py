"""Descriptions of views, joins, slices and gathers."""

from collections.abc import Sequence

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.calls import OperatorCall, aten, describes
from ssdtrain.tools.search.describe_rows import positive, with_own_dims, with_whole
from ssdtrain.tools.search.interval import Interval
from ssdtrain.tools.search.language import (
    Access,
    Description,
    Merged,
    OperatorResult,
    Term,
    indices_of,
    opaque,
    result,
)

ALL = slice(None)


@describes("aten::view", "aten::_unsafe_view", "aten::squeeze", "aten::unsqueeze")
def _view(call: OperatorCall) -> Description:
    [source] = call.tensors
    [shape] = call.results
    old, new, sizes = regroup(source.shape, shape)
    fixed = frozenset(n for n in sizes if n.startswith("mixed"))
    dims = tuple(None if any(n in fixed for n in d) else d for d in old)
    term = Term((Access(0, dims),), fixed=fixed)
    return Description((OperatorResult(new, term),), sizes)


def regroup(
    old: Sequence[int], new: Sequence[int]
) -> tuple[tuple[Merged, ...], tuple[Merged, ...], dict[str, int]]:
    """Return the index variables of both shapes' dimensions, and their sizes. Where
    sizes share no factor, as from (6, 4) to (8, 3), the dimensions are "mixed"."""
    sizes: dict[str, int] = {}
    sides: tuple[list[list[str]], list[list[str]]] = (
        [[] for _ in old],
        [[] for _ in new],
    )
    at, left = [0, 0], [1, 1]

    def refill(side: int, shape: Sequence[int]) -> bool:
        while left[side] == 1 and at[side] < len(shape):
            left[side] = shape[at[side]]
            at[side] += 1
        return left[side] != 1

    while refill(0, old) and refill(1, new):
        if 0 in left:
            raise ConfigError("a view without elements has nothing to split")
        small, large = min(left), max(left)
        factor, kind = (small, "f") if large % small == 0 else (0, "mixed")
        if not factor:  # until both products agree again
            first = [at[0] - 1, at[1] - 1]
            while left[0] != left[1]:
                side = 0 if left[0] < left[1] else 1
                shape = (old, new)[side]
                left[side] *= shape[at[side]]
                at[side] += 1
            for side in (0, 1):
                for dim in range(first[side], at[side]):
                    name = f"{kind}{side}.{dim}"
                    sizes[name] = (old, new)[side][dim]
                    sides[side][dim] = [name]
            left = [1, 1]
            continue
        name = f"{kind}{len(sizes)}"
        sizes[name] = factor
        for side in (0, 1):
            sides[side][at[side] - 1].append(name)
            left[side] //= factor
    named = tuple(tuple(tuple(names) for names in side) for side in sides)
    return named[0], named[1], sizes


@describes("aten::t", "aten::transpose", "aten::permute")
def _permute(call: OperatorCall) -> Description:
    [source] = call.tensors
    order = list(range(source.rank))
    if call.name == "aten::permute":
        order = [positive(dim, source.rank) for dim in call["dims"]]
    elif call.name == "aten::transpose":
        one, two = (positive(call[name], source.rank) for name in ("dim0", "dim1"))
        order[one], order[two] = order[two], order[one]
    else:
        order.reverse()

    def body(*i: Interval) -> Term:
        at = [i[order.index(dim)] for dim in range(source.rank)]
        return source[tuple(at)]

    return Description((result(indices_of(source.rank), body),))


@describes("aten::expand")
def _expand(call: OperatorCall) -> Description:
    source = call.tensors[0]
    [shape] = call.results

    def body(*i: Interval) -> Term:
        at = i[len(i) - source.rank :]
        sizes = zip(at, source.shape, shape[len(i) - source.rank :], strict=True)
        return source[tuple(0 if n == 1 and m != 1 else one for one, n, m in sizes)]

    return Description((result(indices_of(len(shape)), body),))


PIECES = (
    "cat split split_with_sizes unsafe_split slice_backward slice_scatter scatter "
    "scatter_add scatter_reduce"
)


@describes(*aten(PIECES))
def _pieces(call: OperatorCall) -> Description:
    return with_whole(call, {positive(call["dim"], len(call.results[0]))})


@describes("aten::slice")
def _slice(call: OperatorCall) -> Description:
    [source] = call.tensors
    dim = positive(call["dim"], source.rank)
    if call.results == (source.shape,):
        return Description((result(indices_of(source.rank), lambda *i: source[i]),))
    return with_whole(call, {dim})


@describes("aten::select", "aten::unbind")
def _select(call: OperatorCall) -> Description:
    [source] = call.tensors
    dim = positive(call["dim"], source.rank)

    def body(*i: Interval) -> Term:
        return source.at(*i[:dim], ALL, *i[dim:])

    return Description(tuple(result(indices_of(rank), body) for rank in call.ranks))


@describes("aten::select_backward", "aten::stack")
def _onto(call: OperatorCall) -> Description:
    [shape] = call.results
    dim = positive(call["dim"], len(shape))

    def body(*i: Interval) -> Term:
        at = (*i[:dim], *i[dim + 1 :])
        return opaque(*(tensor[at] for tensor in call.tensors))[i[dim]]

    return Description((result(indices_of(len(shape)), body),))


@describes("aten::index_select", "aten::gather")
def _taken(call: OperatorCall) -> Description:
    source, index = call["self"], call["index"]
    dim = positive(call["dim"], source.rank)
    by_element = call.name == "aten::gather"

    def body(*i: Interval) -> Term:
        at = tuple(ALL if d == dim else one for d, one in enumerate(i))
        return opaque(source[at], index[i if by_element else i[dim]])

    return Description((result(indices_of(source.rank), body),))


@describes("aten::constant_pad_nd")
def _pad(call: OperatorCall) -> Description:
    [source] = call.tensors
    last = source.rank - 1
    return with_whole(
        call, {last - at // 2 for at, size in enumerate(call["pad"]) if size}
    )


MATRICES = (
    "tril triu diagonal linalg_cholesky_ex linalg_inv_ex linalg_qr "
    "linalg_solve_triangular linalg_lu_factor_ex"
)


@describes(*aten(MATRICES))
def _matrices(call: OperatorCall) -> Description:
    """Opaque functions of matrices, by batch."""
    lead = call.tensors[0].rank - 2
    if call.name == "aten::diagonal" and lead:
        dims = {positive(call[n], lead + 2) for n in ("dim1", "dim2")}
        if dims != {lead, lead + 1}:
            return _opaque(call)

    def body(*i: Interval) -> Term:
        reads = [one.at(*i[:lead], *(ALL,) * (one.rank - lead)) for one in call.tensors]
        return opaque(*reads)[i[lead:]]

    return with_own_dims(call, lead, body)


WHOLE = (
    "index index_put masked_scatter _unsafe_index _index_put_impl repeat col2im "
    "_fft_r2c _fft_c2r grid_sampler_2d _embedding_bag _pdist_forward select_scatter"
)


@describes(*aten(WHOLE))
def _opaque(call: OperatorCall) -> Description:
    """No dimension may be split: indices that depend on data, or on all elements."""

    def body(*i: Interval) -> Term:
        return opaque(*(tensor.whole() for tensor in call.tensors))[i]

    return with_own_dims(call, 0, body)


MADE = (
    "full zeros ones empty scalar_tensor arange rand randn randperm new_zeros new_ones "
    "new_empty new_full new_empty_strided empty_strided eye"
)


@describes(*aten(MADE))
def _made(call: OperatorCall) -> Description:
    """Made by every worker: nothing is read."""
    names = indices_of(max(call.ranks, default=0))
    term = Term(fixed=frozenset(names))
    return Description(
        tuple(
            OperatorResult(tuple((n,) for n in names[:rank]), term)
            for rank in call.ranks
        )
    )
