"""Memory keys in two forms, with hand-written gradients: whole, and compressed without loss.

Shapes: N = B Hkv heads of memory, H query heads of the batch (B H), C tokens, M rows, Dk channels,
r of them rotary; R numbers of a stored key, P of a normalised one. Tensors are fp32 or better.
Each form says

- how a token's key is stored, (N, C, Dk) -> (N, C, R); rows are sums of stored keys;
- how rows are normalised, (N, M, R) -> (N, M, P);
- what meets them: `reader` maps queries and `tokens` maps stored keys, to (N, ..., P).

`x_backward` returns the gradient of what x was given, and adds up those of the parameters, which
`parameter_gradients` returns in the end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meanbank.core.precision import accumulator_dtype
from meanbank.ops.kvm.common import NORM_EPSILON, position_free
from meanbank.ops.kvm.options import KVMOptions

ROUNDING = 64  # times the precision: what sums may be off, of their norm
NO_AFFINE = [True, False, False]  # gradients that a layer norm without parameters has


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the precision of `total`."""
    if total.dtype == left.dtype:
        torch.baddbmm(total, left, right, out=total)
    else:
        total += torch.bmm(left, right)


class ScaledQueries:
    """Queries (h, n, Dk) of `heads`, some of all H, times a factor of their head (H, 1, 1)."""

    def __init__(self, scale: Tensor) -> None:
        self.scale, self.scale_gradient = scale, torch.zeros_like(scale)

    def __call__(self, query: Tensor, heads: slice) -> Tensor:
        return (query * self.scale[heads]).to(query.dtype)

    def backward(self, query: Tensor, grad: Tensor, heads: slice) -> Tensor:
        precise = grad.to(self.scale.dtype)
        self.scale_gradient[heads] += (precise * query).sum(dim=(1, 2), keepdim=True)
        return precise.mul(self.scale[heads])


class MappedQueries:
    """The same, mapped by a matrix (Dk, P) as well."""

    def __init__(self, scale: Tensor, matrix: Tensor, dtype: torch.dtype) -> None:
        self.scale, self.matrix = scale, matrix
        self.scaled = (matrix * scale).to(dtype)
        self.gradient = torch.zeros_like(self.scaled, dtype=scale.dtype)

    def __call__(self, query: Tensor, heads: slice) -> Tensor:
        return torch.bmm(query, self.scaled[heads])

    def backward(self, query: Tensor, grad: Tensor, heads: slice) -> Tensor:
        accumulate(self.gradient[heads], query.mT, grad)
        return torch.bmm(grad, self.scaled[heads].mT)

    @property
    def scale_gradient(self) -> Tensor:
        return (self.gradient * self.matrix).sum(dim=(1, 2), keepdim=True)

    @property
    def matrix_gradient(self) -> Tensor:
        return (self.gradient * self.scale).sum(dim=0)


Reader = ScaledQueries | MappedQueries


class WholeKeys:
    """Rows are sums of whole keys, and are met through LN_s of them."""

    def __init__(self, weight: Tensor, bias: Tensor, options: KVMOptions) -> None:
        self.weight, self.bias, self.options = weight, bias, options
        self.width = self.normalised_width = len(weight)
        self.weight_gradient, self.bias_gradient = torch.zeros_like(weight), torch.zeros_like(bias)

    def stored(self, key: Tensor) -> Tensor:
        stored, *_ = self._layer_norm(self._before_norm(key))
        if self.options.stored_rotary == "zeroed_again":
            stored[..., : self.options.rotary_dim] = 0
        return stored

    def stored_backward(self, key: Tensor, grad: Tensor) -> Tensor:
        rotary = slice(0, self.options.rotary_dim)
        if self.options.stored_rotary == "zeroed_again":
            grad = position_free(grad, self.options.rotary_dim)
        grad = self._layer_norm_backward(self._before_norm(key), grad)
        if self.options.stored_rotary != "kept":
            grad[..., rotary] = 0
        return grad

    def lengths(self, stored: Tensor) -> Tensor:
        """Norms (N, C) of stored keys."""
        return torch.linalg.vector_norm(stored, dim=-1)

    def tokens(self, stored: Tensor) -> Tensor:
        return stored

    def reader(self, scale: Tensor, dtype: torch.dtype) -> Reader:
        return ScaledQueries(scale)

    def normalised(self, rows: Tensor) -> Tensor:
        keys, *_ = self._layer_norm(rows)
        return keys

    def normalised_lengths(self, keys: Tensor) -> Tensor:
        """Norms (N, M) of normalised keys (N, M, P)."""
        return torch.linalg.vector_norm(keys, dim=-1)

    def normalised_backward(self, rows: Tensor, grad: Tensor) -> Tensor:
        return self._layer_norm_backward(rows, grad)

    def whole(self, rows: Tensor) -> Tensor:
        """Rows (N, M, R) as sums of whole keys (N, M, Dk), in storage of their own."""
        return rows.clone()

    def whole_backward(self, rows: Tensor, grad: Tensor) -> Tensor:
        return grad

    def parameter_gradients(self, reader: Reader) -> tuple[Tensor, Tensor]:
        return self.weight_gradient, self.bias_gradient

    def _before_norm(self, key: Tensor) -> Tensor:
        if self.options.stored_rotary == "kept":
            return key
        return position_free(key, self.options.rotary_dim)

    def _layer_norm(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = x.shape[-1:]
        return torch.native_layer_norm(x, shape, self.weight, self.bias, NORM_EPSILON)

    def _layer_norm_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        _, mean, rstd = self._layer_norm(x)
        grad, weight_gradient, bias_gradient = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean, rstd, self.weight, self.bias, [True, True, True]
        )
        self.weight_gradient += weight_gradient
        self.bias_gradient += bias_gradient
        return grad


class KeyMaps(NamedTuple):
    """Small functions of the parameters of LN_s, see `CompressedKeys`.

    basis: (k, r) what the rotary channels of a stored key are made of.
    mean: (k,) over channels of the basis.
    gram: (k, k) products of the basis without its mean.
    queries: (Dk, P) what maps queries.
    """

    basis: Tensor
    mean: Tensor
    gram: Tensor
    queries: Tensor


def key_maps(weight: Tensor, bias: Tensor, options: KVMOptions) -> KeyMaps:
    rotary, zeros = options.rotary_dim, weight.new_zeros
    free = len(weight) - rotary
    basis = torch.stack([weight[:rotary], bias[:rotary]])
    if options.stored_rotary == "zeroed_again":
        basis = basis[:0]
    mean = basis.mean(dim=1)
    centred = basis - mean[:, None]
    gram = (centred[:, None] * centred).sum(dim=-1)
    rotary_columns = torch.cat([centred, torch.ones_like(weight[None, :rotary])]) * weight[:rotary]
    rows = [
        torch.cat([zeros(free, rotary), weight[rotary:].diag()], dim=1),
        torch.cat([rotary_columns, zeros(len(rotary_columns), free)], dim=1),
        bias[None],
    ]
    return KeyMaps(basis, mean, gram, torch.cat(rows).mT)


class CompressedKeys:
    """The same keys in fewer numbers, exactly.

    A key is stored without its rotary channels, then LN_s with weight w and bias b, so that on
    those channels it is `c_1 w + c_2 b` (nothing at all if they are zeroed again), and so is every
    sum of stored keys. A row is [its other channels s; c]. With its mean m over all Dk channels,
    standard deviation d and the mean e of `c_1 w + c_2 b` over the rotary channels, its LN_s is

        w (s - m) / d + b    and on rotary channels    w (c' (basis - its mean) + e - m) / d + b.

    It is linear in the normalised row [(s - m) / d; c / d; (e - m) / d; 1], and what meets it is
    mapped by the transpose of that, `KeyMaps.queries`: P = Dk - r + 4 channels instead of Dk.
    """

    def __init__(self, weight: Tensor, bias: Tensor, options: KVMOptions) -> None:
        self.options = options
        self.weight, self.bias = weight, bias
        self.maps = key_maps(weight, bias, options)
        self.free = len(weight) - options.rotary_dim  # channels without rotary positions
        self.width = self.free + len(self.maps.basis)
        self.normalised_width = self.width + 2
        rotary, free = options.rotary_dim, self.free
        through_basis = torch.einsum("kr,rp->kp", self.maps.basis, self.maps.queries[:rotary])
        self.token_map = torch.cat([self.maps.queries[rotary:], through_basis])
        affine = self.maps.queries[:rotary, free:]
        self.rotary_gram = (affine.mT[:, None] * affine.mT).sum(dim=-1)
        self.basis_gram = (self.maps.basis[:, None] * self.maps.basis).sum(dim=-1)
        self.gradients = KeyMaps._make(torch.zeros_like(x) for x in self.maps)
        self.weight_gradient, self.bias_gradient = torch.zeros_like(weight), torch.zeros_like(bias)

    def stored(self, key: Tensor) -> Tensor:
        rotary, channels = self.options.rotary_dim, len(self.weight)
        stored = key.new_empty(*key.shape[:-1], self.width)
        mean = key[..., rotary:].sum(dim=-1, keepdim=True) / channels
        centred = key[..., rotary:] - mean
        square = centred.square().sum(dim=-1, keepdim=True) + rotary * mean.square()
        rstd = torch.rsqrt(square / channels + NORM_EPSILON)
        free = torch.mul(centred, rstd, out=centred)
        weight, bias = self.weight[rotary:], self.bias[rotary:]
        torch.addcmul(bias, free, weight, out=stored[..., : self.free])
        if self.width > self.free:  # zeros are all normalised to the same number
            torch.mul(mean, -rstd, out=stored[..., self.free : self.free + 1])
            stored[..., self.free + 1] = 1
        return stored

    def stored_backward(self, key: Tensor, grad: Tensor) -> Tensor:
        rotary = self.options.rotary_dim
        key = position_free(key, rotary)
        normed, mean, rstd = torch.native_layer_norm(key, key.shape[-1:], None, None, NORM_EPSILON)
        free_grad = grad[..., : self.free]
        self.weight_gradient[rotary:] += (free_grad * normed[..., rotary:]).sum(dim=(0, 1))
        self.bias_gradient[rotary:] += free_grad.sum(dim=(0, 1))
        normed_grad = torch.zeros_like(key)
        torch.mul(free_grad, self.weight[rotary:], out=normed_grad[..., rotary:])
        if self.width > self.free:
            normed_grad[..., 0] = grad[..., self.free]
        grad, *_ = torch.ops.aten.native_layer_norm_backward(
            normed_grad, key, key.shape[-1:], mean, rstd, None, None, NO_AFFINE
        )
        grad[..., :rotary] = 0
        return grad

    def lengths(self, stored: Tensor) -> Tensor:
        """Norms (N, C) of the whole stored keys."""
        free, rest = stored.tensor_split([self.free], dim=-1)
        square = free.square().sum(dim=-1) + _form(rest, self.basis_gram)
        return square.sqrt()

    def packed(self, rows: Tensor) -> Tensor | None:
        """Sums (N, M, Dk) of whole keys as rows (N, M, R); None if they are other sums.

        They are others where their rotary channels are no multiples of the basis but for rounding:
        after other weights, for example.
        """
        rotary, free = rows.tensor_split([self.options.rotary_dim], dim=-1)
        rest = rotary @ torch.linalg.pinv(self.maps.basis)
        packed = torch.cat([free, rest], dim=-1)
        if rows.is_meta:
            return packed  # shapes stand for rows of the model's own
        off = torch.baddbmm(rotary, rest, self.maps.basis.expand(len(rows), -1, -1), beta=-1)
        noise = ROUNDING * torch.finfo(rows.dtype).eps * torch.linalg.vector_norm(rows, dim=-1)
        # NaN does not differ: one sequence's leaves the others as they are
        differ = torch.linalg.vector_norm(off, dim=-1) > noise
        return None if bool(differ.any()) else packed

    def tokens(self, stored: Tensor) -> Tensor:
        return stored @ self.token_map[None]

    def reader(self, scale: Tensor, dtype: torch.dtype) -> Reader:
        return MappedQueries(scale, self.maps.queries, dtype)

    def normalised(self, rows: Tensor) -> Tensor:
        keys, rstd = self._centred(rows)
        keys[..., :-1] *= rstd
        return keys

    def normalised_lengths(self, keys: Tensor) -> Tensor:
        """Norms (N, M) of the whole keys that normalised ones (N, M, P) stand for."""
        rotary = self.options.rotary_dim
        free = torch.addcmul(self.bias[rotary:], keys[..., : self.free], self.weight[rotary:])
        square = free.square().sum(dim=-1) + _form(keys[..., self.free :], self.rotary_gram)
        return square.clamp_min(0).sqrt()

    def normalised_backward(self, rows: Tensor, grad: Tensor) -> Tensor:
        keys, rstd = self._centred(rows)
        centred, grad = keys[..., :-1], grad[..., :-1]
        channels = len(self.weight)
        variance_grad = -0.5 / channels * rstd**3 * (centred * grad).sum(dim=-1, keepdim=True)
        grad = torch.addcmul(grad * rstd, centred, 2 * variance_grad)
        width, rotary = self.width, self.options.rotary_dim
        rest = rows[..., self.free :]
        # the squares of c and of e - m weigh the gram matrix and the number of rotary channels
        offset_grad = grad[..., width:] + 2 * (rotary - 1) * variance_grad * centred[..., width:]
        mean_grad = (grad[..., : self.free].sum(dim=-1, keepdim=True) + offset_grad) / -channels
        rest_grad = (
            grad[..., self.free : width]
            + 2 * variance_grad * (rest @ self.maps.gram[None] - rest)
            + (offset_grad + rotary * mean_grad) * self.maps.mean
        )
        self.gradients.gram.add_(((rest * variance_grad).mT @ rest).sum(dim=0))
        self.gradients.mean.add_(((offset_grad + rotary * mean_grad) * rest).sum(dim=(0, 1)))
        return torch.cat([grad[..., : self.free] + mean_grad, rest_grad], dim=-1)

    def whole(self, rows: Tensor) -> Tensor:
        """Rows (N, M, R) as sums of whole keys (N, M, Dk), in storage of their own."""
        free, rest = rows.tensor_split([self.free], dim=-1)
        return torch.cat([rest @ self.maps.basis[None], free], dim=-1)

    def whole_backward(self, rows: Tensor, grad: Tensor) -> Tensor:
        rotary_grad, free_grad = grad.tensor_split([self.options.rotary_dim], dim=-1)
        self.gradients.basis.add_((rows[..., self.free :].mT @ rotary_grad).sum(dim=0))
        return torch.cat([free_grad, rotary_grad @ self.maps.basis.mT[None]], dim=-1)

    def parameter_gradients(self, reader: Reader) -> tuple[Tensor, Tensor]:
        """The small maps are differentiated by autograd."""
        assert isinstance(reader, MappedQueries)
        weight, bias = (x.detach().requires_grad_() for x in (self.weight, self.bias))
        with torch.enable_grad():
            maps = key_maps(weight, bias, self.options)
        gradients = self.gradients._replace(queries=reader.matrix_gradient)
        weight_gradient, bias_gradient = torch.autograd.grad(maps, (weight, bias), gradients)
        return self.weight_gradient + weight_gradient, self.bias_gradient + bias_gradient

    def _centred(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[s - m; c; e - m; 1] (N, M, P) and 1 / d (N, M, 1)."""
        channels, rotary = len(self.weight), self.options.rotary_dim
        free, rest = rows.tensor_split([self.free], dim=-1)
        rotary_mean = (rest * self.maps.mean).sum(dim=-1, keepdim=True)
        mean = (free.sum(dim=-1, keepdim=True) + rotary * rotary_mean) / channels
        keys = rows.new_empty(*rows.shape[:-1], self.normalised_width)
        torch.sub(free, mean, out=keys[..., : self.free])
        keys[..., self.free : self.width] = rest
        offset = torch.sub(rotary_mean, mean, out=keys[..., self.width : self.width + 1])
        keys[..., -1] = 1
        square = keys[..., : self.free].square().sum(dim=-1) + _form(rest, self.maps.gram)
        variance = (square[..., None] + rotary * offset.square()) / channels
        return keys, torch.rsqrt(variance + NORM_EPSILON)


def _form(x: Tensor, matrix: Tensor) -> Tensor:
    """The quadratic form x' A x of (N, n, k) with a symmetric (k, k)."""
    return ((x @ matrix[None]) * x).sum(dim=-1)


Keys = WholeKeys | CompressedKeys


def make_keys(
    weight: Tensor,
    bias: Tensor,
    options: KVMOptions,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    *,
    compressed: bool = True,
) -> tuple[Keys, Tensor | None]:
    """The form of memory keys for a call that reads in `dtype`, and its rows in that form.

    rows: sums (N, M, Dk) of whole keys that are carried in, if any.

    Compressed where that is exact and saves something, unless it is not wanted: keys are stored
    without their rotary channels, which are more than the numbers that stand for them; queries meet
    rows normalised, and in a dtype with the range of fp32, since the squares of weights occur; and
    rows that are carried in are sums of such keys, see `CompressedKeys.packed`.
    """
    precise = accumulator_dtype(dtype)
    weight, bias = weight.to(precise), bias.to(precise)
    extra = {"zeroed": 4, "zeroed_again": 2}.get(options.stored_rotary)
    saves = extra is not None and options.rotary_dim > extra and options.read_key == "normalized"
    if compressed and saves and dtype != torch.float16:
        keys = CompressedKeys(weight, bias, options)
        packed = None if rows is None else keys.packed(rows)
        if rows is None or packed is not None:
            return keys, packed
    return WholeKeys(weight, bias, options), rows
