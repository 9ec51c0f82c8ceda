"""Faster modules for the decoder on a GPU, put in place of its own by `fuse`. Read it after model.py.

Four kinds of work get faster:

- **Functions between the products.** Norms and activations only move memory, and in plain torch each of them is
  several kernels. torch.compile makes one kernel of each.
- **Products of one row.** The library's matrix kernels are made for many rows. A plain sum reads the weights faster.
- **Products of few rows and columns.** They have too few tiles to occupy every multiprocessor. The inner dimension is
  therefore split (split-K), and the norm that follows adds up the partial products.
- **Rows of the last layer** that need no logits are left out (last_layer.py).

`enforce_eager=True` leaves all of this off. The modules keep their names and weights, and get other classes.
"""
from itertools import chain
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import model
from nanopaged.device.last_layer import LastLayer, skip_rows_without_logits
from nanopaged.tiles import cdiv

# Limits, found by timing products in bfloat16 on an H200.
MAX_ONE_ROW_WEIGHTS = 2**26  # for more weights the library reads a one-row product's weights at full rate as well
MAX_SUMMANDS = 1024  # a compiled sum over more numbers is a loop that waits for each of its loads
MAX_SPLIT_ROWS = 256  # more rows or columns have enough tiles without a split
MAX_SPLIT_COLUMNS = 8192
MAX_FOUR_SPLIT_COLUMNS = 2048  # up to here four partial products are faster than two
SPLIT_ALIGNMENT = 64  # the matrix kernels' tiles along the inner dimension; a partial product must begin at one
MAX_COMPILATIONS = 64  # of one function; see `raise_compilation_limit`
# For torch.compile. With dynamic=False sizes and numbers such as eps stay constants for the second model of a process;
# otherwise torch would make variables of those that differ from the first model's. One thread compiles: torch's
# parallel compiler processes take so long to start that one thread has compiled nearly everything by then.
COMPILER: dict[str, Any] = dict(dynamic=False, options={"compile_threads": 1})


def fuse(transformer: model.Transformer) -> None:
    """Replace the model's modules by the faster ones, which compile their functions when they first run."""
    raise_compilation_limit()
    skip_rows_without_logits(transformer)
    compiled = Compiled()
    for layer in transformer.layers:
        layer.__class__ = FusedLastLayer if isinstance(layer, LastLayer) else FusedLayer
        layer.qkv_proj.__class__ = layer.gate_up_proj.__class__ = FusedLinear
        layer.o_proj.__class__ = layer.down_proj.__class__ = LinearBeforeNorm
    for module in transformer.modules():
        if isinstance(module, model.Norm):
            module.__class__ = FusedNorm
        module.compiled = compiled  # type: ignore[assignment]


class Compiled:
    """The compiled functions of one model."""

    def __init__(self) -> None:
        self.norm, self.activate = compile_rows(add_partials_and_norm, 2), compile_rows(model.activate, 1)
        self.row: Any = torch.compile(one_row_linear, **COMPILER)
        self.row_into: Any = torch.compile(one_row_linear_into, **COMPILER)
        self.row_gate_up: Any = torch.compile(one_row_gate_up, **COMPILER)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return (self.row if is_one_row_product(x, weight) else F.linear)(x, weight, bias)


class FusedLinear(model.Linear):
    compiled: Compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled.linear(x, self.weight, self.bias)


class LinearBeforeNorm(model.Linear):
    """Returns [T, out], or partial products [count, T, out], which only `FusedNorm` understands.

    buffer: with several GPUs (parallel.py), where the partial products of all of them are
    """
    compiled: Compiled
    buffer: Any = None

    def forward(self, x: Tensor) -> Any:
        weight, bias = self.weight, self.bias
        count = num_partial_products(x, weight) if bias is None else 1
        if self.buffer is not None:
            return self.share(x, count)
        return self.compiled.linear(x, weight, bias) if count == 1 else partial_products(x, weight, count)

    def share(self, x: Tensor, count: int) -> "PeerProducts":
        """Write this GPU's partial products where the others can read them."""
        weight, bias, shape = self.weight, self.bias, (count, len(x), len(self.weight))
        out = self.buffer.own(*shape)
        if is_one_row_product(x, weight):
            self.compiled.row_into(x, weight, bias, out[0])
        elif count > 1:
            partial_products(x, weight, count, out)
        elif bias is None:
            torch.mm(x, weight.T, out=out[0])
        else:
            torch.addmm(bias, x, weight.T, out=out[0])
        return PeerProducts(self.buffer.all(*shape))


class FusedNorm(model.Norm):
    compiled: Compiled

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not len(residual):  # no row needs logits, and torch would compile the function again for no rows
            return residual, residual
        x = tuple(x) if isinstance(x, PeerProducts) else x
        return self.compiled.norm(x, residual, self.weight, self.bias, self.eps)


class FusedLayer(model.Layer):
    compiled: Compiled

    def mlp(self, x: Tensor) -> Tensor:
        c, gate_up = self.config, self.gate_up_proj
        if is_one_row_product(x, gate_up.weight):
            x = self.compiled.row_gate_up(x, gate_up.weight, gate_up.bias, c.activation, c.gated_mlp)
            return self.down_proj(x)
        return self.down_proj(self.compiled.activate(gate_up(x), c.activation, c.gated_mlp))


class FusedLastLayer(FusedLayer, LastLayer):
    pass


def raise_compilation_limit() -> None:
    """Each shape of a one-row product is compiled separately. Beyond its limit torch silently stops compiling."""
    settings: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    setattr(settings, name, MAX_COMPILATIONS)


def compile_rows(function: Callable[..., Any], num_tensors: int) -> Callable[..., Any]:
    """torch.compile for any number of rows: the last dimension but one (or the only one) of the first num_tensors
    arguments may change. An argument may be a tuple of tensors.

    All other sizes become constants of the generated kernel, which moves memory about twice as fast as a kernel that
    takes them as arguments (on an H200).
    """
    compiled = torch.compile(function, **COMPILER)

    def call(*arguments: Any) -> Any:
        for tensor in chain(*(a if isinstance(a, tuple) else (a,) for a in arguments[:num_tensors])):
            torch._dynamo.maybe_mark_dynamic(tensor, max(0, tensor.dim() - 2))
        return compiled(*arguments)

    return call


class PeerProducts(tuple):
    """The partial products [count, T, D] of all GPUs, in the order of ranks."""

    def index_select(self, dim: int, rows: Tensor) -> "PeerProducts":
        return PeerProducts(part.index_select(dim, rows) for part in self)


def add_partials_and_norm(x: Tensor | tuple[Tensor, ...], residual: Tensor, weight: Tensor, bias: Tensor | None,
                          eps: float) -> tuple[Tensor, Tensor]:
    """`Norm.forward` for x [T, D], or for partial products of it, [count, T, D], of one GPU or of several."""
    for part in (x if isinstance(x, tuple) else (x,)):
        for partial in (part if part.dim() == 3 else [part]):  # one by one: these additions fuse with the norm
            residual = partial + residual  # and .sum(0) does not
    return model.normalize(residual, weight, bias, eps), residual


# --------------------------------------------------------------------------------------------------
# One row
# --------------------------------------------------------------------------------------------------

def is_one_row_product(x: Tensor, weight: Tensor) -> bool:
    """Whether `one_row_linear` is faster than the library for this product."""
    return len(x) == 1 and weight.numel() <= MAX_ONE_ROW_WEIGHTS


def one_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for x [1, in]: a sum over `in`, taken as several sums of at most MAX_SUMMANDS, side by side."""
    size = weight.shape[1]
    count = next(n for n in range(cdiv(size, MAX_SUMMANDS), size + 1) if size % n == 0)
    x, parts = x.float().view(count, -1), weight.view(len(weight), count, -1)  # [count, in / count], [out, count, ...]
    sums: Any = sum([parts[:, i].float() * x[i] for i in range(count)])  # [out, in / count]
    row = sums.sum(-1)  # [out]
    return (row if bias is None else row + bias.float()).to(weight.dtype)[None]


def one_row_linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(one_row_linear(x, weight, bias))


def one_row_gate_up(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    """gate_up_proj and `activate` for one row: both products side by side, and the activation in the same kernel."""
    count = 2 if gated else 1
    biases = [None] * count if bias is None else bias.chunk(count)
    rows = [one_row_linear(x, *half) for half in zip(weight.chunk(count), biases)]
    return model.ACTIVATIONS[activation](rows[0]) * rows[1] if gated else model.ACTIVATIONS[activation](rows[0])


# --------------------------------------------------------------------------------------------------
# Few rows: split-K
# --------------------------------------------------------------------------------------------------

def num_partial_products(x: Tensor, weight: Tensor) -> int:
    """The number of partial products in which x [T, in] times weight [out, in] is fastest; 1: do not split it."""
    num_columns, size = weight.shape
    count = 4 if num_columns <= MAX_FOUR_SPLIT_COLUMNS else 2
    is_small = len(x) <= MAX_SPLIT_ROWS and num_columns <= MAX_SPLIT_COLUMNS
    # In float16 a partial product may overflow where the whole does not.
    can_split = size % (SPLIT_ALIGNMENT * count) == 0 and weight.dtype is not torch.float16
    return count if is_small and can_split and not is_one_row_product(x, weight) else 1


def partial_products(x: Tensor, weight: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] as [count, T, out], whose sum over the first dimension is the product.
    (last_layer.py selects rows by dimension -2, so that it works for both.)

    The library splits small products along the inner dimension as well, and then adds the parts up in a kernel of its
    own. Here the norm that follows adds them up while it reads them, which saves about 2 microseconds for each product
    on an H200. In bfloat16 each partial product is rounded, instead of the whole product once.
    """
    x, weight = x.view(len(x), count, -1), weight.view(len(weight), count, -1)
    return torch.bmm(x.transpose(0, 1), weight.permute(1, 2, 0), out=out)
