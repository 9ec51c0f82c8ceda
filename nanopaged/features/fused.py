"""Faster modules for the decoder on a GPU, unless `enforce_eager=True`. Read it after model.py.

Four kinds of work get faster:

- **Functions between the products.** Norms and activations are bound by memory. Each is one launch. The addition to the
  residual stream waits for the next norm, which adds and normalises in one pass (`Sum`).
- **Products of one row, and of up to 64 on an H200 unless the weight is large.** cuBLAS's kernels are made for many
  rows.
- **Products of few rows and columns.** They have too few tiles to occupy every multiprocessor. The inner dimension is
  therefore split (split-K), and the norm that follows adds up the partial products.
- **Rows of the last layer** that need no logits are left out (last_layer.py).

The modules come first, then the kernels that they launch.
"""
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, cast

import torch
from torch import Tensor, nn

from nanopaged import kernel, model, tiles
from nanopaged.device.pool import FP8
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.options import default_feature
from nanopaged.tiles import cdiv

# Limits in bfloat16 on an H200. More rows or columns have enough tiles without a split.
MAX_SPLIT_ROWS = 256
MAX_SPLIT_COLUMNS = 8192
MAX_FOUR_SPLIT_COLUMNS = 2048  # up to here four partial products are faster than two
SPLIT_ALIGNMENT = 64  # the matrix kernels' tiles along the inner dimension; a partial product must begin at one
ALL_ROWS = "the last layer, which computes all rows,"  # without last_layer.py
FAST_ACCUM = True  # sums of 8-bit products in the tensor cores' own precision: their error is far below FP8's
# Of `few_rows_linear`, for 2 rows and more. Within these limits the products of Qwen3, 0.6B to 8B, Qwen3.5-35B-A3B and
# gpt-oss-20b are faster than the library's on an H200.
MOST_FEW_ROWS, FEWEST_PROGRAMS = 64, 64
MOST_ROWS_OF_LARGE, LARGE = 16, 2**27  # rows of x beside a weight of more than LARGE bytes
SMALL_INNER_SIZE = 1024  # up to here, and up to 16 rows of x, a program has fewer rows of the weight: more programs
MOST_16_BIT_ROWS = 8  # of x, with weights in FP8; with more, turning the weights into 16 bits takes the longest


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
    return fused_add_norm(stream.x, stream.residual, norm.weight, norm.bias, norm.eps)


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
        if has_few_rows(x, gate_up.weight):  # both products side by side, and the activation in the same kernel
            x = few_rows_linear(x, gate_up.weight, gate_up.bias, None, c.activation, c.gated_mlp,
                                scale=gate_up.scale)
        else:
            x = activate(gate_up(x), c.activation, c.gated_mlp)
        return self.down_proj(x)


class FusedLastLayer(FusedLayer):
    """Returns the rows whose logits are read."""
    keep = staticmethod(model.select_rows)

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        last_layer = default_feature("last_layer", ALL_ROWS)
        attention = partial(last_layer.attend_for_tokens if last_layer else attend_and_select, kernels.attention, batch)
        return super().attention(x, rope, batch, cache, kernels._replace(attention=attention))


def attend_and_select(attention: Callable[..., Tensor], batch: model.Batch, *args: Any, **options: Any) -> Tensor:
    return model.select_rows(attention(*args, **options), batch)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    from nanopaged.features import fp8  # which a weight in FP8 has brought
    return fp8.quantize_rows(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None,
           scale: Tensor | None = None) -> Tensor:
    """F.linear, in `out` if given. scale: of a weight in FP8"""
    if has_few_rows(x, weight):
        return few_rows_linear(x, weight, bias, out, scale=scale)
    if scale is None:
        return torch.matmul(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
    rows, row_scale = quantize_rows(x)
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
        count, are_few = split_of(x, weight, bias is not None)
        shape = count, len(x), len(weight)
        out = self.buffer and self.buffer.own(*shape)
        if count > 1:
            y = (few_rows_linear(x, weight, bias, out, count=count, scale=self.scale) if are_few else
                 partial_products(x, weight, count, out))
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

def residual_products(r: Any, num_rows: int) -> list[tuple[int, bool, int]]:
    """o_proj and down_proj: (inner size, whether there is a bias, number of partial products of so many rows)."""
    c, make = r.config, partial(torch.empty, device="meta", dtype=FP8 if r.fp8 else r.dtype)
    products = (c.num_heads * c.head_dim, c.o_bias), (c.intermediate_size, c.mlp_bias)
    return [(size, bias, split_of(torch.empty(num_rows, size, dtype=r.dtype, device=r.device),
                                  make(c.hidden_size, size), bias)[0]) for size, bias in products]


def partial_counts(r: Any) -> set[int]:
    """Numbers of partial products that the norm behind a sublayer may get."""
    kept = getattr(r.modules.residual_linear, "counts", set)()  # of matrices in 4 bits
    return {1, *(count for rows in (2, MOST_FEW_ROWS + 1) for _, _, count in residual_products(r, rows)), *kept}


def sum_shapes(r: Any) -> list[tuple[int, ...]]:
    """For a warm-up: shapes, without D, of a `Sum`'s x for which the norm behind has forms of its own."""
    return [(1, MOST_FEW_ROWS + 1), *((count, 1) for count in partial_counts(r))]


def split_of(x: Tensor, weight: Tensor, has_bias: bool) -> tuple[int, bool]:
    """The number of partial products in which x [T, in] times weight [out, in] is computed, and whether
    `few_rows_linear` does that, which alone can add a bias."""
    count = num_partial_products(x, weight)
    are_few = has_few_rows(x, weight, count)
    return count if are_few or not has_bias else 1, are_few


def num_partial_products(x: Tensor, weight: Tensor) -> int:
    """The number of partial products in which x [T, in] times weight [out, in] is fastest; 1: do not split it."""
    num_columns, size = weight.shape
    is_fp8 = weight.dtype is FP8
    count = 4 if is_fp8 or num_columns <= MAX_FOUR_SPLIT_COLUMNS else 2
    is_small = 1 < len(x) <= MAX_SPLIT_ROWS and num_columns <= MAX_SPLIT_COLUMNS
    if is_fp8:  # the library has no partial products of these
        is_small &= takes_rows(len(x), x.dtype, x.device)
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


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py."""
    c, dtype, device, act = r.config, r.dtype, r.device, (r.config.activation, r.config.gated_mlp)
    make, forms = partial(torch.empty, dtype=dtype, device=device), set[tuple[Any, ...]]()
    for rows in (1, 2, 9, 17, 33):  # one, up to 8, 16, 32, 64
        products = [(c.vocab_size, c.hidden_size, False, 1, False, ()),
                    ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size, c.qkv_bias, 1, r.fp8, ()),
                    *((c.hidden_size, *product, r.fp8, ()) for product in residual_products(r, rows)),
                    (c.intermediate_size * (1 + c.gated_mlp), c.hidden_size, c.mlp_bias, 1, r.fp8, act)]
        for size_out, size, bias, count, fp8, of_form in products:
            weight = torch.empty(size_out, size, dtype=FP8 if fp8 else dtype, device="meta")
            if has_few_rows(make(rows, size), weight, count):
                forms.add((rows, size, bias, count, fp8, of_form))
    for rows, size, bias, count, fp8, of_form in forms:
        weight, scale = make(0, size, dtype=FP8 if fp8 else dtype), make(0, 1, dtype=torch.float32) if fp8 else None
        yield partial(few_rows_linear, make(rows, size), weight, make(1) if bias else None, None, *of_form, count=count,
                      scale=scale)
    yield partial(activate, make(0, c.intermediate_size * (2 if c.gated_mlp else 1)), *act)
    weight = make(c.hidden_size, dtype=torch.float32 if c.float32_norms else dtype)
    for shape in sum_shapes(r):
        yield partial(fused_add_norm, (make(*shape, c.hidden_size),) * r.num_ranks, make(shape[-1], c.hidden_size),
                      weight, weight if c.norm == "layer" else None, c.norm_eps)


# --------------------------------------------------------------------------------------------------
# The kernels
#
# Each computes in one launch where plain torch needs several, or a product of few rows, and names the plain form that
# it replaces. What does not depend on the previous kernel, above all weights, is loaded before a program waits for that
# kernel. A row is one of a matrix here: x has one for each token, and in front of the logits one for each logit row.
# --------------------------------------------------------------------------------------------------

def is_in_chain(x: Tensor) -> bool:
    """Whether a kernel of ours probably precedes or follows a norm of x. Partial products come mostly from experts and
    from weights in 4 bits."""
    return x.dim() == 3 and len(x) > 1 or takes_rows(x.shape[-2], x.dtype, x.device)


def fused_add_norm(x: Tensor | tuple[Tensor, ...], residual: Tensor, weight: Tensor, bias: Tensor | None,
                   eps: float) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) of x and residual, with `model.Norm`. x [T, D], or partial products of it [count, T, D]; a
    tuple: those of several GPUs. The sum is taken in float32 and rounded once."""
    parts = tuple(x) if isinstance(x, tuple) else (x,)
    (num_rows, size), (out, total) = residual.shape, (torch.empty_like(residual), torch.empty_like(residual))
    padded, in_chain = tiles.next_power_of_2(size), is_in_chain(parts[0])
    fused_add_norm_kernel[(num_rows,)](
        parts, residual, weight, weight if bias is None else bias, out, total, eps, num_rows,
        COUNT=len(parts[0]) if parts[0].dim() == 3 else 1, SIZE=size, PADDED=padded, CENTER=bias is not None,
        num_warps=min(16, max(4, padded // 128)), **launch_options(residual.device, in_chain=in_chain))
    return out, total


@jit
def fused_add_norm_kernel(parts, residual, weight, bias, out, total, eps, num_rows, COUNT: tl.constexpr,
                        SIZE: tl.constexpr, PADDED: tl.constexpr, CENTER: tl.constexpr, PDL: tl.constexpr):
    """Grid (token,). CENTER: layer norm, else RMS norm."""
    i = tl.arange(0, PADDED)
    inside, row = i < SIZE, tl.program_id(0).to(tl.int64)
    factor = tl.load(weight + i, mask=inside, other=0.0)
    kernel.wait_for_previous_kernel(PDL)
    x = tl.load(residual + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    for gpu in tl.static_range(len(parts)):
        for n in tl.static_range(COUNT):
            x += tl.load(parts[gpu] + (n * num_rows + row) * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + i, rounded, mask=inside)
    x = rounded.to(tl.float32)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    if CENTER:
        x = x * factor.to(tl.float32) + tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    else:
        x = x.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * SIZE + i, x.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """`model.activate`."""
    out = x.new_empty(len(x), x.shape[1] // (2 if gated else 1))
    tile = min(1024, tiles.next_power_of_2(out.shape[1]))
    activate_kernel[(len(x), cdiv(out.shape[1], tile))](
        x, out, out.shape[1], TILE=tile, GATED=gated, ACTIVATION=activation, **launch_options(x.device, in_chain=False))
    return out


@jit
def activate_kernel(x, out, size, TILE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
                    PDL: tl.constexpr):
    """Grid (token, tile of the result's columns)."""
    kernel.wait_for_previous_kernel(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = x + row * size * (2 if GATED else 1) + i
    gate = tl.load(at, mask=i < size, other=0.0)
    up = gate
    if GATED:
        up = tl.load(at + size, mask=i < size, other=0.0)
    tl.store(out + row * size + i, activate_tile(gate, up, GATED, ACTIVATION), mask=i < size)


@jit
def activate_tile(gate, up, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """Rounded as in plain torch: after the activation, and after the product."""
    x = gate.to(tl.float32)
    if ACTIVATION == "swigluoai":  # gpt-oss
        x, up = tl.minimum(x, 7.0), tl.minimum(tl.maximum(up.to(tl.float32), -7.0), 7.0) + 1.0
        y = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu" or ACTIVATION == "swish":
        y = x * tl.sigmoid(x)
    else:  # tanh(z) is 2 * sigmoid(2 * z) - 1
        tl.static_assert(ACTIVATION == "gelu_new" or ACTIVATION == "gelu_pytorch_tanh", "unknown activation")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    y = y.to(gate.dtype)
    if GATED:
        y = (y.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    return y


def takes_rows(num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `few_rows_linear` is to compute products of so many rows. For several rows it needs Hopper's shared
    memory, and 16-bit numbers: tensor cores are slow in float32."""
    is_able = dtype.itemsize == 2 and tiles.shared_memory(device) > tiles.LARGE_SHARED_MEMORY
    return num_rows <= 1 or is_able and num_rows <= MOST_FEW_ROWS


def has_few_rows(x: Tensor, weight: Tensor, count: int = 1) -> bool:
    """Whether `few_rows_linear` is to compute this product, or `count` partial products of it."""
    is_fp8, num_rows = weight.itemsize == 1, len(x)
    rows = few_rows_form(x.shape[1] // count, tiles.next_power_of_2(num_rows), False, False, x.itemsize)["ROWS"]
    is_fast = (cdiv(len(weight), rows) * count >= FEWEST_PROGRAMS
               and (num_rows <= MOST_ROWS_OF_LARGE or weight.nbytes <= LARGE))
    return (num_rows <= 1 or is_fp8 or is_fast) and takes_rows(num_rows, x.dtype, x.device)


def few_rows_form(size: int, padded: int, gated: bool, is_fp8: bool, itemsize: int) -> dict[str, int]:
    """Of `few_rows_kernel`: rows of the weight in a program, numbers of a row in a tile, and tiles that the loop's
    pipeline holds. size: of the inner dimension. Of a large product a multiprocessor has one program, and many small
    tiles are on their way, unless it is gated and has few columns. (The fastest of 8 to 20 forms for the products of
    Qwen3-0.6B, of 8B in the whole model, of 8B in FP8, of Qwen3.5-35B-A3B and of gpt-oss-20b, on an H200.)"""
    if is_fp8 or size <= SMALL_INNER_SIZE and padded <= 16:
        tile = 256 if is_fp8 or gated and padded == 8 else 128
        return dict(ROWS=64 if is_fp8 else 32, TILE=tile, STAGES=3 if tile == 256 and padded != 16 else 4)
    # 8 stages of 32 columns, not gated: there is room for two programs.
    tile, stages = (128, 3) if gated and padded <= 16 else (64, 8 if padded == 32 else 14)
    tile_bytes = (64 * (2 if gated else 1) + padded) * tile * itemsize
    return dict(ROWS=64, TILE=tile, STAGES=min(stages, tiles.LARGE_SHARED_MEMORY // tile_bytes))


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, activation: str = "",
                    gated: bool = False, count: int = 1, scale: Tensor | None = None,
                    form: dict[str, int] | None = None) -> Tensor:
    """F.linear for x [T, in], T up to 64, and weight [out, in]; with an activation, `model.activate` of it (gated: the
    first half of the weight's rows is the gate). The library's kernels are made for many rows, and are not in the chain
    of dependent launches. count above 1: partial products [count, T, out], each of a part of the inner dimension; the
    bias is in the first one. scale: of a weight in FP8, [out, 1]; from 9 rows on x is quantised, too. form: for 2
    rows and more, another one than `few_rows_form` returns"""
    num_rows, size = x.shape
    num_out = len(weight) // (2 if gated else 1)
    out = x.new_empty(*[count] * (count > 1), num_rows, num_out) if out is None else out
    if not num_rows:  # of logits, in a step that samples nothing
        return out
    options = dict(BIAS=bias is not None, GATED=gated, ACTIVATION=activation, **launch_options(x.device))
    is_fp8, bias, scale = scale is not None, weight if bias is None else bias, weight if scale is None else scale
    if num_rows > 1:
        x, x_scale = quantize_rows(x) if is_fp8 and num_rows > MOST_16_BIT_ROWS else (x, x)
        padded = max(8, tiles.next_power_of_2(num_rows))
        form = form or few_rows_form(size // count, padded, gated, is_fp8, x.itemsize)
        few_rows_kernel[(cdiv(num_out, form["ROWS"]), count)](
            x, x_scale, weight, scale, bias, out, num_rows, num_out, SIZE=size, PART=size // count, PADDED=padded,
            **form, **options)
        return out
    # The fastest of 27 forms for ten products on an H200; with FP8 of eleven for Qwen3-8B's. A thread loads 8 numbers.
    tile = tiles.next_power_of_2(size)
    tile = min(4096 if size <= 4096 else 2048, tile) if is_fp8 else min(2048, max(8, tile // 2))
    rows = 2 if is_fp8 else max(2, 2048 // tile)
    one_row_kernel[(cdiv(num_out, rows),)](x, weight, scale, bias, out, num_out, SIZE=size, ROWS=rows, TILE=tile,
                                           **options)
    return out


@jit
def one_row_kernel(x, weight, scale, bias, out, num_out, SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                   BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows of the weight,). A program adds up ROWS x TILE products side by side, and sums them at the end.
    The loop loads a tile of weights before it needs it, the first one before the program waits. A thread loads 8
    numbers at a time, of x and of the weight: of FP8 it could load 16, but x would go through shared memory then."""
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.max_contiguous(tl.arange(0, TILE), 8)
    at, exists = weight + row.to(tl.int64)[:, None] * SIZE + i[None, :], (row < num_out)[:, None]
    up_at = at + num_out.to(tl.int64) * SIZE
    gate = _load_weights(at, exists, i, SIZE)
    up = gate
    sums, up_sums = tl.zeros([ROWS, TILE], tl.float32), tl.zeros([ROWS, TILE], tl.float32)
    if GATED:
        up = _load_weights(up_at, exists, i, SIZE)
    kernel.wait_for_previous_kernel(PDL)
    for start in range(0, SIZE, TILE):
        factor = tl.load(x + start + i, mask=start + i < SIZE, other=0.0).to(tl.float32)[None, :]
        sums += gate.to(tl.float32) * factor
        gate = _load_weights(at + start + TILE, exists, start + TILE + i, SIZE)  # after the last tile: none
        if GATED:
            up_sums += up.to(tl.float32) * factor
            up = _load_weights(up_at + start + TILE, exists, start + TILE + i, SIZE)
    y, up_y = tl.sum(sums, 1), tl.sum(up_sums, 1)
    if weight.dtype.element_ty == tl.float8e4nv:
        y *= tl.load(scale + row, mask=row < num_out, other=0.0)
        if GATED:
            up_y *= tl.load(scale + num_out + row, mask=row < num_out, other=0.0)
    if BIAS:
        y += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
        if GATED:
            up_y += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = activate_tile(y, up_y.to(out.dtype.element_ty), GATED, ACTIVATION)
    tl.store(out + row, y, mask=row < num_out)


@jit
def few_rows_kernel(x, x_scale, weight, scale, bias, out, num_rows, num_out, SIZE: tl.constexpr, PART: tl.constexpr,
                    PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                    BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows of the weight, part of the inner dimension). The rows of x are columns, as queries are in decode:
    tensor cores multiply 16 rows of the weight by 8 columns at least, and x is padded to PADDED columns. The loop's
    pipeline loads the weights after the wait: loading a tile before was slower, but for the smallest product.

    The hardware turns FP8 into float16 in one instruction, and into bfloat16 in several. Beside weights in FP8 a
    bfloat16 x therefore becomes float16, times 2 ** -4: numbers up to 2 ** 20 stay finite, from 2 ** -10 on exact."""
    row, column, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, TILE)
    start, row_exists, column_exists = tl.program_id(1) * PART, (row < num_out)[:, None], (column < num_rows)[None, :]
    at = weight + row.to(tl.int64)[:, None] * SIZE + start + i[None, :]
    up_at, x_at = at + num_out.to(tl.int64) * SIZE, x + column[None, :] * SIZE + start + i[:, None]
    sums, up_sums = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    IS_FP8: tl.constexpr = weight.dtype.element_ty == tl.float8e4nv
    QUANTIZED: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    FACTOR: tl.constexpr = 2.0 ** -4 if IS_FP8 and x.dtype.element_ty == tl.bfloat16 else 1.0
    kernel.wait_for_previous_kernel(PDL)
    for k in tl.range(0, PART, TILE, num_stages=STAGES):
        inside = k + i < PART
        factors = tl.load(x_at + k, mask=inside[:, None] & column_exists, other=0.0)
        if FACTOR != 1.0:
            # A product would be computed in float16: the compiler narrows it, although bfloat16 has larger numbers.
            factors = tl.fma(factors.to(tl.float32), FACTOR, 0.0).to(tl.float16)
        gate = tl.load(at + k, mask=row_exists & inside[None, :], other=0.0)
        sums = tl.dot(gate.to(factors.dtype), factors, sums, input_precision="ieee")
        if GATED:
            up = tl.load(up_at + k, mask=row_exists & inside[None, :], other=0.0)
            up_sums = tl.dot(up.to(factors.dtype), factors, up_sums, input_precision="ieee")
    if QUANTIZED:
        of_column = tl.load(x_scale + column, mask=column < num_rows, other=0.0)[None, :]
        sums, up_sums = sums * of_column, up_sums * of_column
    if FACTOR != 1.0:
        sums, up_sums = sums / FACTOR, up_sums / FACTOR
    if IS_FP8:
        sums *= tl.load(scale + row, mask=row < num_out, other=0.0)[:, None]
        if GATED:
            up_sums *= tl.load(scale + num_out + row, mask=row < num_out, other=0.0)[:, None]
    if BIAS:
        has_bias = row < tl.where(tl.program_id(1) == 0, num_out, 0)
        sums += tl.load(bias + row, mask=has_bias, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(bias + num_out + row, mask=has_bias, other=0.0).to(tl.float32)[:, None]
    y = sums.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = activate_tile(y, up_sums.to(out.dtype.element_ty), GATED, ACTIVATION)
    at_out = out + (tl.program_id(1) * num_rows + column)[None, :].to(tl.int64) * num_out
    tl.store(at_out + row[:, None], y, mask=row_exists & column_exists)


@jit
def _load_weights(at, exists, column, SIZE: tl.constexpr):
    """.cg keeps weights, which are read once, out of the L1 cache."""
    return tl.load(at, mask=exists & (column < SIZE)[None, :], other=0.0, cache_modifier=".cg")
