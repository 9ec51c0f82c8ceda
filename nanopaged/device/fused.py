"""Faster modules for the decoder on a GPU, put in place of its own by `fuse`. Read it after model.py.

Four kinds of work get faster:

- **Functions between the products.** Norms and activations only move memory, and in plain torch each of them is several
  launches. kernel.py's last part has one kernel for each.
- **Products of one row.** The library's matrix kernels are made for many rows. A plain sum reads the weights faster.
- **Products of few rows and columns.** They have too few tiles to occupy every multiprocessor. The inner dimension is
  therefore split (split-K), and the norm that follows adds up the partial products.
- **Rows of the last layer** that need no logits are left out (last_layer.py).

`enforce_eager=True` leaves all of this off. The modules keep their names and weights, and get other classes.
"""
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import kernel, model
from nanopaged.device.last_layer import LastLayer, skip_rows_without_logits

# Limits, found by timing products in bfloat16 on an H200.
MAX_SPLIT_ROWS = 256  # more rows or columns have enough tiles without a split
MAX_SPLIT_COLUMNS = 8192
MAX_FOUR_SPLIT_COLUMNS = 2048  # up to here four partial products are faster than two
SPLIT_ALIGNMENT = 64  # the matrix kernels' tiles along the inner dimension; a partial product must begin at one


def fuse(transformer: model.Transformer) -> None:
    """Replace the model's modules by the faster ones."""
    skip_rows_without_logits(transformer)
    for layer in transformer.layers:
        layer.__class__ = FusedLastLayer if isinstance(layer, LastLayer) else FusedLayer
        layer.qkv_proj.__class__ = layer.gate_up_proj.__class__ = FusedLinear
        layer.o_proj.__class__ = layer.down_proj.__class__ = LinearBeforeNorm
    for module in transformer.modules():
        if isinstance(module, model.Norm):
            module.__class__ = FusedNorm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (kernel.one_row_linear if len(x) == 1 else F.linear)(x, weight, bias)


class FusedLinear(model.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class LinearBeforeNorm(model.Linear):
    """Returns [T, out], or partial products [count, T, out], which only `FusedNorm` understands.

    buffer: with several GPUs (parallel.py), where the partial products of all of them are
    """
    buffer: Any = None

    def forward(self, x: Tensor) -> Any:
        weight, bias = self.weight, self.bias
        count = num_partial_products(x, weight) if bias is None else 1
        if self.buffer is not None:
            return self.share(x, count)
        return linear(x, weight, bias) if count == 1 else partial_products(x, weight, count)

    def share(self, x: Tensor, count: int) -> "PeerProducts":
        """Write this GPU's partial products where the others can read them."""
        weight, bias, shape = self.weight, self.bias, (count, len(x), len(self.weight))
        out = self.buffer.own(*shape)
        if len(x) == 1:
            kernel.one_row_linear(x, weight, bias, out[0])
        elif count > 1:
            partial_products(x, weight, count, out)
        elif bias is None:
            torch.mm(x, weight.T, out=out[0])
        else:
            torch.addmm(bias, x, weight.T, out=out[0])
        return PeerProducts(self.buffer.all(*shape))


class FusedNorm(model.Norm):
    def forward(self, x: Any, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not len(residual):  # no row needs logits
            return residual, residual
        return kernel.add_and_norm(x, residual, self.weight, self.bias, self.eps)


class FusedLayer(model.Layer):
    def mlp(self, x: Tensor) -> Tensor:
        c, gate_up = self.config, self.gate_up_proj
        if len(x) == 1:  # both products side by side, and the activation in the same kernel
            x = kernel.one_row_linear(x, gate_up.weight, gate_up.bias, None, c.activation, c.gated_mlp)
            return self.down_proj(x)
        return self.down_proj(kernel.activate(gate_up(x), c.activation, c.gated_mlp))


class FusedLastLayer(FusedLayer, LastLayer):
    pass


class PeerProducts(tuple):
    """The partial products [count, T, D] of all GPUs, in the order of ranks."""

    def index_select(self, dim: int, rows: Tensor) -> "PeerProducts":
        return PeerProducts(part.index_select(dim, rows) for part in self)


# --------------------------------------------------------------------------------------------------
# Few rows: split-K
# --------------------------------------------------------------------------------------------------

def split_counts(config: model.ModelConfig, dtype: torch.dtype) -> set[int]:
    """All results of `num_partial_products` for a model."""
    c, make = config, partial(torch.empty, dtype=dtype, device="meta")
    products = (c.num_heads * c.head_dim, c.o_bias), (c.intermediate_size, c.mlp_bias)
    return {1, *(num_partial_products(make(2, size), make(c.hidden_size, size)) for size, bias in products if not bias)}


def num_partial_products(x: Tensor, weight: Tensor) -> int:
    """The number of partial products in which x [T, in] times weight [out, in] is fastest; 1: do not split it."""
    num_columns, size = weight.shape
    count = 4 if num_columns <= MAX_FOUR_SPLIT_COLUMNS else 2
    is_small = 1 < len(x) <= MAX_SPLIT_ROWS and num_columns <= MAX_SPLIT_COLUMNS
    # In float16 a partial product may overflow where the whole does not.
    can_split = size % (SPLIT_ALIGNMENT * count) == 0 and weight.dtype is not torch.float16
    return count if is_small and can_split else 1


def partial_products(x: Tensor, weight: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] as [count, T, out], whose sum over the first dimension is the product.
    (last_layer.py selects rows by dimension -2, so that it works for both.)

    The library splits small products along the inner dimension as well, and then adds the parts up in a kernel of its
    own. Here the norm that follows adds them up while it reads them, which saves about 2 microseconds for each product
    on an H200. In bfloat16 each partial product is rounded, instead of the whole product once.
    """
    x, weight = x.view(len(x), count, -1), weight.view(len(weight), count, -1)
    return torch.bmm(x.transpose(0, 1), weight.permute(1, 2, 0), out=out)
