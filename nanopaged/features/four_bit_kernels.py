"""Products with weights of 4 bits. Goes together with four_bits.py, which reads such weights and describes them.

Few rows of x are bound by memory: one kernel reads codes and scales, and turns a tile of them into numbers in registers
in front of the tensor cores. Many rows are bound by the tensor cores: a kernel turns the matrix into 16 bits once, and
the library multiplies. Both round a weight once, to the type of x.

A byte has the codes of two neighbours. A tile therefore becomes two factors, the even columns and the odd ones, and so
does the tile of x: no number changes its place.
"""
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import Tensor, nn

from nanopaged import kernel, model, tiles
from nanopaged.features import fused
from nanopaged.features.four_bit_experts import PRODUCTS
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.tiles import cdiv

FEWEST_COLUMNS = 2048  # of a part of the inner dimension
MOST_ROWS = 64  # of x that the kernel multiplies; with more, the matrix is turned into 16 bits (not measured)
MOST_PADDED = 64  # rows of x in a program
TILE = 128  # columns of a tile: some groups, or a part of one; integers in groups of 64 have tiles of 64
LEAST_GROUP = tl.constexpr(16)  # columns
E2M1_FACTOR = tl.constexpr(2.0 ** 14)  # a code of e2m1 as bits of a float16, whose exponent has another offset
E4M3_FACTOR = tl.constexpr(2.0 ** 22)  # this, and the same for a scale's bits


class Form(NamedTuple):
    """How a matrix [out, in] is kept. See four_bits.py."""
    scale: torch.dtype
    num_groups: int
    has_zeros: bool = False
    has_row_scale: bool = False
    order: Tensor | None = None

    @property
    def kind(self) -> str:
        """What codes and scales mean. A scale of 8 bits goes with e2m1."""
        return {torch.uint8: "mxfp4", torch.float8_e4m3fn: "nvfp4"}.get(self.scale, "int4")


class Linear4(model.Linear):
    """A matrix product [T, in] -> [T, out]."""
    count = 1  # partial products of a few rows

    def __init__(self, size_in: int, size_out: int, bias: bool, form: Form) -> None:
        super().__init__(size_in, size_out, bias)
        self.form = form

        def parameter(columns: int, kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(size_out, columns, dtype=kind), requires_grad=False)

        self.weight, self.scale = parameter(size_in // 2, torch.uint8), parameter(form.num_groups, form.scale)
        self.zero = parameter(form.num_groups, torch.uint8) if form.has_zeros else None
        self.row_scale = parameter(1, torch.float32) if form.has_row_scale else None

    def forward(self, x: Tensor, *act: Any) -> Tensor:
        """act: for few rows an activation, and whether it is gated, as in `fused.few_rows_linear`"""
        x = x if self.form.order is None else x.index_select(1, self.form.order)
        count = self.count if has_few_rows(x) and x.dtype is not torch.float16 else 1  # as in fused.py
        return linear(x, self.weight, self.scale, self.zero, self.row_scale, self.bias, *act, count=count)


class SplitLinear4(Linear4):
    """Returns [T, out], or partial products of it, as fused.py's `Sum` has them."""

    def __init__(self, size_in: int, size_out: int, bias: bool, form: Form) -> None:
        super().__init__(size_in, size_out, bias, form)
        self.count = 1 if bias else num_parts(size_in, size_out, form)


class MLP4(fused.FusedMLP):
    """Gate and up side by side, and the activation in the same kernel."""

    def forward(self, x: Tensor) -> Tensor:
        c, gate_up = self.config, self.gate_up_proj
        if not isinstance(gate_up, Linear4):
            return super().forward(x)
        if has_few_rows(x):
            return self.down_proj(gate_up(x, c.activation, c.gated_mlp))
        return self.down_proj(fused.activate(gate_up(x), c.activation, c.gated_mlp))


class ExpertsMLP4(MLP4):
    """Also an expert in MXFP4."""
    four_bits = PRODUCTS


def has_few_rows(x: Tensor) -> bool:
    """Whether the kernel multiplies them. In float32 it would take long to compile."""
    return len(x) <= MOST_ROWS and x.itemsize == 2


def num_parts(size_in: int, size_out: int, form: Form) -> int:
    """Of the inner dimension, so that few rows of the weight have enough programs."""
    multiple = max(size_in // form.num_groups, TILE)
    can_split = size_out <= fused.MAX_SPLIT_COLUMNS and form.num_groups > 1
    return next((count for count in (4, 2) if can_split and size_in % (count * multiple) == 0
                 and size_in // count >= FEWEST_COLUMNS), 1)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py. Weights have no rows, so none are read."""
    c, make = r.config, partial(torch.empty, dtype=r.dtype, device=r.device)
    for size_out, size, bias, form, is_residual, is_first in r.modules.linear.plan.shapes():
        kept = [make(0, columns, dtype=kind) if kind else None for columns, kind in (
            (size // 2, torch.uint8), (form.num_groups, form.scale), (form.num_groups, form.has_zeros and torch.uint8),
            (1, form.has_row_scale and torch.float32))]
        is_split = is_residual and r.modules.residual_linear.kept is SplitLinear4 and r.dtype is not torch.float16
        count = num_parts(size, size_out, form) if is_split and not bias else 1
        act = (c.activation, c.gated_mlp) if is_first and issubclass(r.modules.mlp, MLP4) else ()
        for rows in (1, 9, 17, 33):  # up to 8, 16, 32, 64
            yield partial(linear, make(rows, size), *kept, make(1) if bias else None, *act, count=count)
        yield partial(widen_on_gpu, *kept, r.dtype)


# --------------------------------------------------------------------------------------------------
# The kernels
# --------------------------------------------------------------------------------------------------

def linear(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, row_scale: Tensor | None,
           bias: Tensor | None = None, activation: str = "", gated: bool = False, count: int = 1) -> Tensor:
    """F.linear for x [T, in] and a matrix in 4 bits. activation, gated, count: as in `fused.few_rows_linear`, for few
    rows"""
    num_rows, size = x.shape
    if not has_few_rows(x):
        wide = widen_on_gpu(weight, scale, zero, row_scale, x.dtype)
        return torch.matmul(x, wide.T) if bias is None else torch.addmm(bias, x, wide.T)
    num_out = len(weight) // (2 if gated else 1)
    out = x.new_empty(*[count] * (count > 1), num_rows, num_out)
    if not num_rows:
        return out
    padded = min(MOST_PADDED, max(8, tiles.next_power_of_2(num_rows)))
    form = few_rows_form(size // scale.shape[1], padded, gated, x.itemsize, tiles.shared_memory(x.device))
    few_rows_kernel[(cdiv(num_out, form["ROWS"]), count, cdiv(num_rows, padded))](
        x, bias=weight if bias is None else bias, out=out, num_rows=num_rows, num_out=num_out, PART=size // count,
        PADDED=padded, BIAS=bias is not None, GATED=gated, ACTIVATION=activation, **form,
        **arguments(weight, scale, zero, row_scale), **launch_options(x.device))
    return out


def widen_on_gpu(weight: Tensor, scale: Tensor, zero: Tensor | None, row_scale: Tensor | None,
                 dtype: torch.dtype) -> Tensor:
    """`four_bits.widen` in one launch. All matrices of a step take turns in the same memory."""
    num_out, size = len(weight), 2 * weight.shape[1]
    out = weight.new_empty(num_out, size, dtype=dtype)
    widen_kernel[(cdiv(num_out, 32), cdiv(size, TILE))](
        out=out, num_out=num_out, ROWS=32, TILE=TILE, **arguments(weight, scale, zero, row_scale),
        **launch_options(weight.device))
    return out


def arguments(weight: Tensor, scale: Tensor, zero: Tensor | None, row_scale: Tensor | None) -> dict[str, Any]:
    """Of both kernels. Not every GPU has a type for scales of 8 bits: they are bytes."""
    return dict(weight=weight, scale=scale.view(torch.uint8) if scale.itemsize == 1 else scale,
                zero=weight if zero is None else zero, row_scale=weight if row_scale is None else row_scale,
                SIZE=2 * weight.shape[1], GROUPS=scale.shape[1], KIND=Form(scale.dtype, 1).kind,
                ZEROS=zero is not None, ROW_SCALE=row_scale is not None)


def few_rows_form(group: int, padded: int, gated: bool, itemsize: int, shared_memory: int) -> dict[str, int]:
    """Of `few_rows_kernel`: rows of the weight in a program, columns of a tile, and tiles that the loop's pipeline
    holds. A warp has 16 rows: more warps would turn the same codes into numbers. (From the compiled code; not
    measured.)"""
    is_wide = padded > 16  # the tiles of x, which each program reads, are larger than those of the weight
    rows, tile = 64 if is_wide else 32, 64 if group == 64 else TILE
    tile_bytes = rows * tile // 2 * (2 if gated else 1) + padded * tile * itemsize
    stages = min(12, shared_memory // (2 if is_wide else 4) // tile_bytes)
    return dict(ROWS=rows, TILE=tile, STAGES=max(2, stages), num_warps=rows // 16)


@jit
def few_rows_kernel(x, weight, scale, zero, row_scale, bias, out, num_rows, num_out, SIZE: tl.constexpr,
                    PART: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
                    ROW_SCALE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                    STAGES: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
                    PDL: tl.constexpr):
    """Grid (ROWS rows of the weight, part of the inner dimension, PADDED rows of x, which are columns as in fused.py).
    Rows and columns that do not exist load others', and are not stored: without a mask the loop's pipeline can load
    them. Scales are too narrow for it, so they are loaded a tile ahead; before the wait, too, as no weight depends on
    the previous kernel."""
    row, byte = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE // 2)
    column = tl.program_id(2) * PADDED + tl.arange(0, PADDED)
    first, row_exists = tl.program_id(1) * (PART // 2), row < num_out
    source, x_row = tl.minimum(row, num_out - 1), tl.minimum(column, num_rows - 1)
    at, up_source = weight + source.to(tl.int64)[:, None] * (SIZE // 2) + byte[None, :], source + num_out
    up_at = at + num_out.to(tl.int64) * (SIZE // 2)
    i = tl.arange(0, TILE)
    x_at = x + x_row[:, None] * SIZE + i[None, :]
    sums, up_sums = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    factor, offset = load_scales(scale, zero, source, first, SIZE, GROUPS, KIND, ZEROS, TILE)
    up_factor, up_offset = factor, offset
    if GATED:
        up_factor, up_offset = load_scales(scale, zero, up_source, first, SIZE, GROUPS, KIND, ZEROS, TILE)
    kernel.wait_for_previous_kernel(PDL)
    for k in tl.range(first, first + PART // 2, TILE // 2, num_stages=STAGES):  # bytes
        even, odd = tl.split(load_tile(x_at + 2 * k, 2 * k + i, SIZE, PART, TILE).reshape(PADDED, TILE // 2, 2))
        codes = load_tile(at + k, k + byte, SIZE // 2, PART, TILE)
        more = load_scales(scale, zero, source, k + TILE // 2, SIZE, GROUPS, KIND, ZEROS, TILE)
        sums = add_product(sums, codes, even.trans(1, 0), odd.trans(1, 0), factor, offset, KIND, ZEROS)
        factor, offset = more
        if GATED:
            codes = load_tile(up_at + k, k + byte, SIZE // 2, PART, TILE)
            more = load_scales(scale, zero, up_source, k + TILE // 2, SIZE, GROUPS, KIND, ZEROS, TILE)
            up_sums = add_product(up_sums, codes, even.trans(1, 0), odd.trans(1, 0), up_factor, up_offset, KIND, ZEROS)
            up_factor, up_offset = more
    up_row = row + num_out
    if ROW_SCALE:
        sums *= tl.load(row_scale + row, mask=row_exists, other=0.0)[:, None]
        if GATED:
            up_sums *= tl.load(row_scale + up_row, mask=row_exists, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + row, mask=row_exists, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(bias + up_row, mask=row_exists, other=0.0).to(tl.float32)[:, None]
    y = sums.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = fused.activate_tile(y, up_sums.to(out.dtype.element_ty), GATED, ACTIVATION)
    at_out = out + (tl.program_id(1) * num_rows + column)[None, :].to(tl.int64) * num_out
    tl.store(at_out + row[:, None], y, mask=row_exists[:, None] & (column < num_rows)[None, :])


@jit
def widen_kernel(weight, scale, zero, row_scale, out, num_out, SIZE: tl.constexpr, GROUPS: tl.constexpr,
                 KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALE: tl.constexpr, ROWS: tl.constexpr,
                 TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows, TILE columns). Waits before it writes: the previous product may still read `out`."""
    row, first, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * (TILE // 2), tl.arange(0, TILE)
    source, byte, i = tl.minimum(row, num_out - 1), first + tl.arange(0, TILE // 2), 2 * first + i
    at = weight + source.to(tl.int64)[:, None] * (SIZE // 2) + byte[None, :]
    codes = load_tile(at, byte, SIZE // 2, SIZE, TILE)
    factor, offset = load_scales(scale, zero, source, first, SIZE, GROUPS, KIND, ZEROS, TILE)
    low, high = numbers(codes, KIND)
    if KIND == "int4":
        offset = spread(offset, codes)
        low, high = low - offset, high - offset
    factor = spread(factor, codes)
    y = tl.join(low * factor, high * factor).reshape(ROWS, TILE)
    if ROW_SCALE:
        y *= tl.load(row_scale + source)[:, None]
    kernel.wait_for_previous_kernel(PDL)
    tl.store(out + row.to(tl.int64)[:, None] * SIZE + i[None, :], y.to(out.dtype.element_ty),
             mask=(row < num_out)[:, None] & (i < SIZE)[None, :])


@jit
def load_tile(at, i, END: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr):
    """The last tile of a row may be longer than that."""
    return tl.load(at) if PART % TILE == 0 else tl.load(at, mask=(i < END)[None, :], other=0)


@jit
def load_scales(scale, zero, row, byte, SIZE: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
                ZEROS: tl.constexpr, TILE: tl.constexpr):
    """What the codes' numbers in a tile from this byte on are multiplied by, and what is subtracted from them before,
    minus 8, in float32. [ROWS, 1] each for a tile in one group, else [ROWS, 8] for 16 columns each: with fewer ones the
    compiler does not keep the codes in their layout. Behind the last group: of the last one."""
    GROUP: tl.constexpr = SIZE // GROUPS
    COUNT: tl.constexpr = TILE // GROUP if GROUPS > 1 and TILE > GROUP else 1
    group = tl.minimum(2 * byte // GROUP + tl.arange(0, COUNT), GROUPS - 1)
    at = row.to(tl.int64)[:, None] * GROUPS + group[None, :]
    factor = tl.load(scale + at)
    if KIND == "mxfp4":  # an exponent + 127
        factor = (factor.to(tl.int32) << 23).to(tl.float32, bitcast=True) * E2M1_FACTOR
    elif KIND == "nvfp4":  # 4 bits of exponent, 3 of mantissa
        factor = (factor.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * E4M3_FACTOR
    else:
        factor = factor.to(tl.float32)
    offset = tl.zeros(factor.shape, tl.float32)
    if ZEROS:
        offset = tl.load(zero + at).to(tl.float32) - 8
    return factor, offset


@jit
def add_product(sums, codes, even, odd, factor, offset, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """sums + the product of a tile of the weight with x. Integers that have one scale in a row of the tile are
    multiplied by it, and freed of their zero, in the sums; others before the product, which rounds them."""
    low, high = numbers(codes, KIND)
    if KIND == "int4" and factor.shape[1] == 1:
        part = tl.dot(low.to(even.dtype), even, tl.zeros_like(sums), input_precision="ieee")
        part = tl.dot(high.to(even.dtype), odd, part, input_precision="ieee")
        if ZEROS:
            ones = tl.full(codes.shape, 1.0, even.dtype)
            total = tl.dot(ones, even, tl.zeros_like(sums), input_precision="ieee")
            part -= offset * tl.dot(ones, odd, total, input_precision="ieee")
        return sums + factor * part
    if ZEROS:
        offset = spread(offset, codes)
        low, high = low - offset, high - offset
    factor = spread(factor, codes)
    sums = tl.dot((low * factor).to(even.dtype), even, sums, input_precision="ieee")
    return tl.dot((high * factor).to(even.dtype), odd, sums, input_precision="ieee")


@jit
def numbers(codes, KIND: tl.constexpr):
    """The numbers of even columns and of odd ones, in float32: integers minus 8, or e2m1 divided by E2M1_FACTOR, whose
    bits are those of a float16."""
    if KIND == "int4":
        low, high = codes & 15, codes >> 4
        # 2 ** 23 and the code, without a conversion.
        low = (low.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        high = (high.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    else:
        bits = codes.to(tl.int16)
        low = ((bits & 7) << 9 | (bits & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32)
        high = ((bits & 0x70) << 5 | (bits & 0x80) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@jit
def spread(x, codes):
    """A number of each group, for all bytes of the group."""
    if x.shape[1] > 1:
        count: tl.constexpr = codes.shape[1] // x.shape[1]
        x = x[:, :, None].broadcast_to(x.shape[0], x.shape[1], count).reshape(codes.shape[0], codes.shape[1])
    return x
