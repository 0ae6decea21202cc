"""Calls of ATen operators with random sizes, one maker for each described family."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cases(draw: random.Random) -> Iterator[Made]:
    """One call of every described operator that a CPU runs."""

    def n(most: int = 7) -> int:
        return draw.randint(2, most)

    def call(func: Any, *args: Any, **kwargs: Any) -> Made:
        return func, args, kwargs

    i, j, k, b = (n() for _ in range(4))
    yield call(aten.mm.default, real(i, k), real(k, j))
    yield call(aten.addmm.default, real(j), real(i, k), real(k, j))
    yield call(aten.addmm.default, real(i, j), real(i, k), real(k, j), beta=2.0)
    yield call(aten.bmm.default, real(b, i, k), real(b, k, j))
    yield call(aten.baddbmm.default, real(b, i, j), real(b, i, k), real(b, k, j))
    yield call(aten.mv.default, real(i, k), real(k))
    yield call(aten.addmv.default, real(i), real(i, k), real(k))
    yield call(aten.dot.default, real(k), real(k))
    yield call(aten.vdot.default, real(k), real(k))
    yield call(aten.addr.default, real(i, j), real(i), real(j))
    yield call(aten._cdist_forward.default, real(b, i, k), real(b, j, k), 2.0, None)
    yield from convolutions(draw)
    yield from attention(draw)
    yield from rows(draw)
    yield from losses(draw)
    yield from planes(draw)
    yield from views(draw)
    yield from pointwise(draw)


def convolutions(draw: random.Random) -> Iterator[Made]:
    b, ci, co = (draw.randint(2, 6) for _ in range(3))
    for rank in (1, 2):
        for stride, padding, kernel in ((1, 1, 3), (2, 1, 3), (2, 0, 2), (1, 0, 2)):
            size = [2 * draw.randint(2, 4) for _ in range(rank)]
            data, weight = real(b, ci, *size), real(co, ci, *[kernel] * rank)
            own = [[stride] * rank, [padding] * rank, [1] * rank, False, [0] * rank, 1]
            for bias in (None, real(co)):
                yield aten.convolution.default, (data, weight, bias, *own), {}
            out = aten.convolution.default(data, weight, None, *own)
            grad = torch.randn_like(out)
            args = (grad, data, weight, [co], *own, [True, True, True])
            yield aten.convolution_backward.default, args, {}
        turned = [[2] * rank, [1] * rank, [1] * rank, True, [1] * rank, 1]
        weight = real(ci, co, *[3] * rank)
        yield aten.convolution.default, (data, weight, real(co), *turned), {}
        out = aten.convolution.default(data, weight, None, *turned)
        args = (torch.randn_like(out), data, weight, [co], *turned, [True, True, True])
        yield aten.convolution_backward.default, args, {}
    depth = real(ci, 1, 3)
    own = [[1], [1], [1], False, [0], ci]
    data = real(b, ci, 6)
    yield aten.convolution.default, (data, depth, real(ci), *own), {}
    out = aten.convolution.default(data, depth, None, *own)
    args = (torch.randn_like(out), data, depth, [ci], *own, [True, True, True])
    yield aten.convolution_backward.default, args, {}


def attention(draw: random.Random) -> Iterator[Made]:
    b, h, q, kv, d = (draw.randint(2, 6) for _ in range(5))
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for causal in (False, True):
        kv = q if causal else kv
        query, key, value = real(b, h, q, d), real(b, h, kv, d), real(b, h, kv, d)
        yield forward, (query, key, value, 0.0, causal), {}
        out, lse = forward(query, key, value, 0.0, causal)
        grad = torch.randn_like(out)
        yield backward, (grad, query, key, value, out, lse, 0.0, causal), {}


def rows(draw: random.Random) -> Iterator[Made]:
    i, j, k = (draw.randint(2, 6) for _ in range(3))
    x = real(i, j, k)
    for func in (
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
    ):
        yield func, (x, [1]), {}
        yield func, (x, [0, -1], True), {}
    yield aten.sum.default, (x,), {}
    yield aten.mean.default, (x,), {}
    yield aten.prod.dim_int, (x, 1), {}
    yield aten.any.dim, (x > 1, 1), {}
    yield aten.all.dim, (x > -1, 1), {}
    yield aten.max.dim, (x, 1), {}
    yield aten.min.dim, (x, 2, True), {}
    yield aten.max.default, (x,), {}
    yield aten.var.correction, (x, [1]), {}
    yield aten.var_mean.correction, (x, [2]), {"keepdim": True}
    yield aten.std.correction, (x, [0]), {}
    yield aten.argmax.default, (x, 1), {}
    yield aten.argmin.default, (x, 1), {}
    yield aten.logsumexp.default, (x, [1]), {}
    yield aten.linalg_vector_norm.default, (x, 2, [1]), {}
    yield aten.norm.ScalarOpt_dim, (x, 2, [1]), {}
    yield aten.median.dim, (x, 1), {}
    yield aten.nansum.default, (x, [1]), {}
    yield aten._softmax.default, (x, -1, False), {}
    yield aten._log_softmax.default, (x, 1, False), {}
    soft = torch.softmax(x, 1)
    double = torch.float64
    yield aten._softmax_backward_data.default, (x, soft, 1, double), {}
    yield aten._log_softmax_backward_data.default, (x, soft.log(), 1, double), {}
    for func in (
        aten.cumsum,
        aten.cumprod,
        aten.logcumsumexp,
        aten.cummax,
        aten.cummin,
    ):
        yield func.default, (x, 1), {}
    yield aten.sort.default, (x, 0), {}
    yield aten.topk.default, (x, 2, 1), {}
    yield aten.kthvalue.default, (x, 1, 1), {}
    yield aten.flip.default, (x, [1]), {}
    yield aten.roll.default, (x, [1], [2]), {}
    w = real(k)
    yield aten.native_layer_norm.default, (x, [k], w, real(k), 1e-5), {}
    _, mean, rstd = aten.native_layer_norm.default(x, [k], w, real(k), 1e-5)
    args = (real(i, j, k), x, [k], mean, rstd, w, real(k), [True] * 3)
    yield aten.native_layer_norm_backward.default, args, {}
    x = real(i, 2 * j, k)
    w = real(2 * j)
    sizes = (i, 2 * j, k, 2)
    yield aten.native_group_norm.default, (x, w, real(2 * j), *sizes, 1e-5), {}
    _, mean, rstd = aten.native_group_norm.default(x, w, w, *sizes, 1e-5)
    args = (real(i, 2 * j, k), x, mean, rstd, w, *sizes, [True] * 3)
    yield aten.native_group_norm_backward.default, args, {}
    args = (x, w, real(2 * j), None, None, True, 0.1, 1e-5)
    yield aten.native_batch_norm.default, args, {}
    zero, one = torch.zeros(2 * j).double(), torch.ones(2 * j).double()
    legit = (x, w, real(2 * j), zero, one, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit.default, legit, {}
    legit = (x, w, real(2 * j), zero, one, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_no_training.default, legit, {}
    _, mean, rstd = aten.native_batch_norm.default(*args)
    args = (real(i, 2 * j, k), x, w, None, None, mean, rstd, True, 1e-5, [True] * 3)
    yield aten.native_batch_norm_backward.default, args, {}
    ids = torch.randint(0, 9, (i, j))
    yield aten.embedding.default, (real(9, k), ids), {}
    args = (real(i, j, k), ids, 9, -1, False)
    yield aten.embedding_dense_backward.default, args, {}


def losses(draw: random.Random) -> Iterator[Made]:
    i, j = draw.randint(2, 7), draw.randint(2, 7)
    x, y, one = real(i, j), real(i, j), torch.ones((), dtype=torch.float64)
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss"):
        more = () if name == "mse_loss" else (1.0,)
        func, back = getattr(aten, name), getattr(aten, f"{name}_backward")
        for reduction in (0, 1, 2):
            yield func.default, (x, y, reduction, *more), {}
            grad = real(i, j) if reduction == 0 else one
            yield back.default, (grad, x, y, reduction, *more), {}
    labels = torch.randint(0, j, (i,))
    labels[0], labels[1] = 0, -100
    weight = real(j).abs()
    for reduction in (0, 1, 2):
        for w in (None, weight):
            args = (x, labels, w, reduction, -100)
            yield aten.nll_loss_forward.default, args, {}
            _, total = aten.nll_loss_forward.default(*args)
            grad = real(i) if reduction == 0 else one
            args = (grad, x, labels, w, reduction, -100, total)
            yield aten.nll_loss_backward.default, args, {}


def planes(draw: random.Random) -> Iterator[Made]:
    x = real(draw.randint(2, 5), draw.randint(2, 5), 6, 8)
    args = (x, [2, 2], [2, 2])
    yield aten.max_pool2d_with_indices.default, args, {}
    out, at = aten.max_pool2d_with_indices.default(*args)
    args = (torch.randn_like(out), x, [2, 2], [2, 2], [0, 0], [1, 1], False, at)
    yield aten.max_pool2d_with_indices_backward.default, args, {}
    yield aten.avg_pool2d.default, (x, [2, 2]), {}
    grad = torch.randn_like(out)
    args = (grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    yield aten.avg_pool2d_backward.default, args, {}
    yield aten._adaptive_avg_pool2d.default, (x, [3, 4]), {}
    yield aten._adaptive_avg_pool2d_backward.default, (grad, x), {}
    yield aten.upsample_nearest2d.default, (x, [12, 16]), {}
    yield aten.upsample_bilinear2d.default, (x, [12, 16], False), {}
    args = (real(*x.shape[:2], 12, 16), [12, 16], list(x.shape))
    yield aten.upsample_nearest2d_backward.default, args, {}
    yield aten.upsample_bilinear2d_backward.default, (*args, False), {}
    yield aten.reflection_pad2d.default, (x, [1, 1, 1, 1]), {}
    yield aten.replication_pad2d.default, (x, [1, 1, 1, 1]), {}
    yield aten.constant_pad_nd.default, (x, [1, 2], 0.5), {}
    line = real(draw.randint(2, 5), draw.randint(2, 5), 6)
    yield aten.reflection_pad1d.default, (line, [1, 1]), {}
    yield aten.replication_pad1d.default, (line, [1, 1]), {}
    x = real(draw.randint(2, 5), draw.randint(2, 5), 4, 4, 4)
    yield aten.reflection_pad3d.default, (x, [1] * 6), {}
    yield aten.replication_pad3d.default, (x, [1] * 6), {}
    yield aten._adaptive_avg_pool3d.default, (x, [2, 2, 2]), {}
    yield aten.avg_pool3d.default, (x, [2, 2, 2]), {}
    args = (x, [2, 2, 2], [2, 2, 2])
    yield aten.max_pool3d_with_indices.default, args, {}
    out, at = aten.max_pool3d_with_indices.default(*args)
    args = (torch.randn_like(out), *args, [0] * 3, [1] * 3, False, at)
    yield aten.max_pool3d_with_indices_backward.default, args, {}
    args = (torch.randn_like(out), x, [2] * 3, [2] * 3, [0] * 3, False, True, None)
    yield aten.avg_pool3d_backward.default, args, {}


def views(draw: random.Random) -> Iterator[Made]:
    i, j, k = (draw.choice((2, 3, 4, 6)) for _ in range(3))
    x = real(i, j, k)
    yield aten.view.default, (x, [i * j, k]), {}
    yield aten._unsafe_view.default, (x, [i, 1, j * k]), {}
    yield aten.view.default, (real(6, 4), [8, 3]), {}
    yield aten.view.default, (real(2 * i, 6), [i, 2, 3, 2]), {}
    yield aten.squeeze.dim, (real(i, 1, k), 1), {}
    yield aten.unsqueeze.default, (x, 1), {}
    yield aten.t.default, (real(i, j),), {}
    yield aten.transpose.int, (x, 0, -1), {}
    yield aten.permute.default, (x, [2, 0, 1]), {}
    yield aten.expand.default, (real(i, 1, k), [j, i, 4, k]), {}
    yield aten.cat.default, ([x, real(i, 3, k)], 1), {}
    yield aten.stack.default, ([x, x], 1), {}
    yield aten.split.Tensor, (x, 1, 1), {}
    yield aten.split_with_sizes.default, (x, [1, k - 1], 2), {}
    yield aten.slice.Tensor, (x, 1, 1, j), {}
    yield aten.slice.Tensor, (x, 0, 0, 2**62), {}
    yield aten.slice_backward.default, (real(i, j - 1, k), [i, j, k], 1, 1, j, 1), {}
    yield aten.select.int, (x, 1, 1), {}
    yield aten.select_backward.default, (real(i, k), [i, j, k], 1, 1), {}
    yield aten.unbind.int, (x, 1), {}
    yield aten.slice_scatter.default, (x, real(i, 1, k), 1, 1, 2), {}
    ids = torch.randint(0, j, (5,))
    yield aten.index_select.default, (x, 1, ids), {}
    at = torch.randint(0, j, (i, 4, k))
    yield aten.gather.default, (x, 1, at), {}
    yield aten.scatter_add.default, (x, 1, at, real(i, 4, k)), {}
    yield aten.scatter.src, (x, 1, at, real(i, 4, k)), {}
    yield aten.scatter_reduce.two, (x, 1, at, real(i, 4, k), "amax"), {}
    yield aten.tril.default, (real(i, 4, 4),), {}
    yield aten.triu.default, (real(i, 4, 4),), {}
    yield aten.diagonal.default, (real(i, 4, 4), 0, 1, 2), {}
    yield aten.linalg_qr.default, (real(i, 4, 4),), {}
    yield aten.linalg_lu_factor_ex.default, (real(i, 4, 4),), {}
    args = (real(i, 4, 4).tril() + 4 * torch.eye(4, dtype=x.dtype), real(i, 4, 3))
    yield aten.linalg_solve_triangular.default, args, {"upper": False}
    yield aten.unsafe_split.Tensor, (x, 1, 1), {}
    yield (
        aten.linalg_cholesky_ex.default,
        (torch.eye(4, dtype=x.dtype).repeat(i, 1, 1),),
        {},
    )
    yield aten.linalg_inv_ex.default, (torch.eye(4, dtype=x.dtype).repeat(i, 1, 1),), {}
    yield aten.index.Tensor, (x, [ids[:2] % 2]), {}
    yield aten.repeat.default, (x, [1, 2, 1]), {}


def pointwise(draw: random.Random) -> Iterator[Made]:
    i, j, k = (draw.randint(2, 6) for _ in range(3))
    x, y = real(i, j, k), real(j, 1)
    one: Callable[..., Any]
    for one in (
        aten.relu,
        aten.gelu,
        aten.silu,
        aten.tanh,
        aten.exp,
        aten.neg,
        aten.clone,
    ):
        yield one.default, (x,), {}
    for two in (aten.add, aten.mul, aten.sub, aten.div, aten.pow):
        yield (
            two.Tensor if two is not aten.pow else two.Tensor_Tensor,
            (x.abs(), y.abs()),
            {},
        )
    for back in (
        aten.gelu_backward,
        aten.silu_backward,
        aten.tanh_backward,
        aten.sigmoid_backward,
    ):
        yield back.default, (x, real(i, j, k)), {}
    yield aten.threshold_backward.default, (x, real(i, j, k), 0.0), {}
    yield aten.where.self, (x > 0, x, y), {}
    yield aten.addcmul.default, (x, real(k), y), {}
    yield aten._to_copy.default, (x,), {"dtype": torch.float32}
    yield aten.masked_fill.Scalar, (x, y > 0, 0.0), {}
