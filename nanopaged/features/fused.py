"""Faster modules for the decoder on a GPU, unless `enforce_eager=True`. Read it after model.py.

Four kinds of work get faster:

- **Functions between the products.** Norms and activations are bound by memory. kernel.py's last part has one launch
  for each. The addition to the residual stream waits for the next norm, which adds and normalises in one pass (`Sum`).
- **Products of one row, and of up to 16 on an H200, or 64 in FP8.** cuBLAS's kernels are made for many rows.
- **Products of few rows and columns.** They have too few tiles to occupy every multiprocessor. The inner dimension is
  therefore split (split-K), and the norm that follows adds up the partial products.
- **Rows of the last layer** that need no logits are left out (last_layer.py).
"""
from functools import partial
from typing import Any, Callable, NamedTuple, cast

import torch
from torch import Tensor, nn

from nanopaged import kernel, model
from nanopaged.device.pool import FP8
from nanopaged.features.last_layer import ShortLastLayer, select_rows

# Limits in bfloat16 on an H200. More rows or columns have enough tiles without a split.
MAX_SPLIT_ROWS = 256
MAX_SPLIT_COLUMNS = 8192
MAX_FOUR_SPLIT_COLUMNS = 2048  # up to here four partial products are faster than two
SPLIT_ALIGNMENT = 64  # the matrix kernels' tiles along the inner dimension; a partial product must begin at one
FAST_ACCUM = True  # sums of 8-bit products in the tensor cores' own precision: their error is far below FP8's


class Sum(NamedTuple):
    """x + residual, not added yet: the next norm does that."""
    x: Tensor | tuple[Tensor, ...]  # [T, D], or partial products of it [count, T, D]; a tuple: those of several GPUs
    residual: Tensor  # [T, D]


def add_and_norm(norm: nn.Module, stream: Any) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum), each [T, D], of a Sum, or of what a Sum has as x."""
    if not isinstance(stream, Sum):
        part = stream[0] if isinstance(stream, tuple) else stream
        stream = Sum(stream, part.new_zeros(part.shape[-2:]))
    if not isinstance(norm, model.Norm):  # OLMo has no norm in front of a sublayer, and one behind that adds the parts
        total = stream.x + stream.residual
        return total, total
    return kernel.add_and_norm(stream.x, stream.residual, norm.weight, norm.bias, norm.eps)


class FusedNorm(model.Norm):
    def forward(self, stream: Any) -> Tensor:
        return add_and_norm(self, stream)[0]


class FusedLayer(model.Layer):
    keep: Callable[..., Tensor] = staticmethod(lambda residual, batch: residual)  # the rows that the layer returns

    def forward(self, stream: Any, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                kernels: kernel.Kernels) -> Any:
        x, residual = add_and_norm(self.input_layernorm, stream)
        x = self.attention(x, rope, batch, cache, kernels)
        x, residual = add_and_norm(self.post_attention_layernorm, Sum(x, self.keep(residual, batch)))
        return Sum(self.mlp_post_norm(self.mlp(x)), residual)


class FusedMLP(model.MLP):
    def forward(self, x: Tensor) -> Tensor:
        c, gate_up = self.config, cast(FusedLinear, self.gate_up_proj)
        if kernel.has_few_rows(x, gate_up.weight):  # both products side by side, and the activation in the same kernel
            x = kernel.few_rows_linear(x, gate_up.weight, gate_up.bias, None, c.activation, c.gated_mlp,
                                       scale=gate_up.scale)
        else:
            x = kernel.activate(gate_up(x), c.activation, c.gated_mlp)
        return self.down_proj(x)


class FusedLastLayer(FusedLayer, ShortLastLayer):
    keep = staticmethod(select_rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None,
           scale: Tensor | None = None) -> Tensor:
    """F.linear, in `out` if given. scale: of a weight in FP8"""
    if kernel.has_few_rows(x, weight):
        return kernel.few_rows_linear(x, weight, bias, out, scale=scale)
    if scale is None:
        return torch.matmul(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
    rows, row_scale = kernel.quantize_rows(x)
    y = torch._scaled_mm(rows, weight.T, row_scale, scale.T, out_dtype=torch.bfloat16, use_fast_accum=FAST_ACCUM)
    y = y.to(x.dtype) if bias is None else y.to(x.dtype) + bias
    return y if out is None else out.copy_(y)


class FusedLinear(model.Linear):
    def __init__(self, size_in: int, size_out: int, bias: bool, fp8: bool = False) -> None:
        """fp8: the weight is in FP8, with a scale for each of its rows."""
        super().__init__(size_in, size_out, bias)
        self.scale = None
        if fp8:
            self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=FP8))
            self.scale = nn.Parameter(torch.empty(size_out, 1))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, None, self.scale)


class SplitLinear(FusedLinear):
    """Returns [T, out], or partial products of it, as `Sum` has them."""
    buffer: Any = None  # with several GPUs (parallel.py): where the partial products of all are

    def forward(self, x: Tensor) -> Any:
        weight, bias = self.weight, self.bias
        count = num_partial_products(x, weight) if bias is None else 1
        shape = count, len(x), len(weight)
        out = self.buffer and self.buffer.own(*shape)
        if count > 1:
            y = (kernel.few_rows_linear(x, weight, None, out, count=count, scale=self.scale)
                 if kernel.has_few_rows(x, weight, count) else partial_products(x, weight, count, out))
        else:
            y = linear(x, weight, bias, None if out is None else out[0], self.scale)
        return y if out is None else tuple(self.buffer.all(*shape))


MODULES = model.Modules(layer=FusedLayer, last_layer=FusedLastLayer, mlp=FusedMLP, norm=FusedNorm,
                        linear=FusedLinear, residual_linear=SplitLinear,
                        compute_logits=lambda x, weight, out=None: linear(x, weight, None, out))


def with_fp8(modules: model.Modules) -> model.Modules:
    """The modules with matrices in FP8, also with enforce_eager."""
    residual = SplitLinear if modules.residual_linear is SplitLinear else FusedLinear
    return modules._replace(linear=partial(FusedLinear, fp8=True), residual_linear=partial(residual, fp8=True))


# --------------------------------------------------------------------------------------------------
# Few rows: split-K
# --------------------------------------------------------------------------------------------------

def residual_products(config: model.ModelConfig, dtype: torch.dtype) -> list[tuple[int, bool, int]]:
    """o_proj and down_proj: (inner size, whether there is a bias, number of partial products of a few rows). dtype: of
    weights"""
    c, make = config, partial(torch.empty, dtype=dtype, device="meta")
    products = (c.num_heads * c.head_dim, c.o_bias), (c.intermediate_size, c.mlp_bias)
    return [(size, bias, 1 if bias else num_partial_products(make(2, size), make(c.hidden_size, size)))
            for size, bias in products]


def num_partial_products(x: Tensor, weight: Tensor) -> int:
    """The number of partial products in which x [T, in] times weight [out, in] is fastest; 1: do not split it."""
    num_columns, size = weight.shape
    is_fp8 = weight.dtype is FP8
    count = 4 if is_fp8 or num_columns <= MAX_FOUR_SPLIT_COLUMNS else 2
    is_small = 1 < len(x) <= MAX_SPLIT_ROWS and num_columns <= MAX_SPLIT_COLUMNS
    if is_fp8:  # the library has no partial products of these
        is_small &= kernel.takes_rows(len(x), x.dtype, x.device, True)
    # A tile of FP8 has twice the numbers. In float16 a partial product may overflow where the whole does not.
    can_split = size % (SPLIT_ALIGNMENT * (2 if is_fp8 else 1) * count) == 0 and x.dtype is not torch.float16
    return count if is_small and can_split else 1


def partial_products(x: Tensor, weight: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] as [count, T, out], whose sum over the first dimension is the product.

    The library splits small products, too, and adds the parts up in a kernel of its own. Here the norm that follows
    adds them up, which saves about 2 microseconds on an H200. In bfloat16 each part is rounded, not the whole once.
    """
    x, weight = x.view(len(x), count, -1), weight.view(len(weight), count, -1)
    return torch.bmm(x.transpose(0, 1), weight.permute(1, 2, 0), out=out)
