"""Products with weights of 4 bits, or of 8 in blocks. Goes together with four_bits.py, which reads and describes them.

Few rows of x are bound by memory: one kernel reads codes and scales, and turns a tile of them into numbers in registers
in front of the tensor cores (four_bit_codes.py). For up to 16 rows most GPUs have a faster one (four_bit_streams.py),
and for 65 rows and more Hopper has one (four_bit_hopper.py). Many rows are bound by the tensor cores: in each step a
kernel turns the whole matrix into x's type, and the library multiplies. x in float32 always takes this way.
"""
from functools import partial
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn

from nanopaged import model, tiles
from nanopaged.features import four_bit_hopper, four_bit_streams, fused
from nanopaged.features.four_bit_codes import TILE, Form, arguments, empty_matrix, gate_and_up, products, widen
from nanopaged.features.four_bit_experts import PRODUCTS
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.tiles import cdiv

FEWEST_COLUMNS = 2048  # of a part of the inner dimension
MOST_ROWS = 256  # of x that the kernel of this file multiplies; with more, most steps turn the matrix into 16 bits
MOST_COLUMNS = 128  # of x in a program
MOST_SLICED = 8  # rows of x; with more, a program has no slices of the inner dimension side by side


class Linear4(model.Linear):
    """A matrix product [T, in] -> [T, out]."""
    count = 1  # partial products of a few rows

    def __init__(self, size_in: int, size_out: int, bias: bool, form: Form) -> None:
        super().__init__(size_in, size_out, bias)
        self.form = form

        def parameter(columns: int, kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(size_out, columns, dtype=kind), requires_grad=False)

        self.weight, self.scale = parameter(form.num_bytes(size_in), form.codes), parameter(form.num_groups, form.scale)
        self.zero = parameter(form.num_groups, torch.uint8) if form.has_zeros else None
        self.row_scale = parameter(1, torch.float32) if form.has_row_scale else None

    def forward(self, x: Tensor, *act: Any) -> Tensor:
        """act: for few rows an activation, and whether it is gated, as in `fused.few_rows_linear`"""
        x = x if self.form.order is None else x.index_select(1, self.form.order)
        is_split = x.dtype is not torch.float16 and has_few_rows(x, self.weight, self.scale)  # as in fused.py
        return linear(x, self.weight, self.scale, self.zero, self.row_scale, self.bias, *act,
                      count=self.count if is_split else 1)


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
        if has_few_rows(x, gate_up.weight, gate_up.scale):
            return self.down_proj(gate_up(x, c.activation, c.gated_mlp))
        return self.down_proj(fused.activate(gate_up(x), c.activation, c.gated_mlp))


class ExpertsMLP4(MLP4):
    """Also an expert."""
    four_bits = PRODUCTS


def has_few_rows(x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Whether a kernel multiplies them. In float32 it would take long to compile."""
    return len(x) <= MOST_ROWS and x.itemsize == 2 or four_bit_hopper.takes(x, weight, scale)


def num_parts(size_in: int, size_out: int, form: Form) -> int:
    """Of the inner dimension, so that few rows of the weight have enough programs."""
    multiple = max(size_in // form.num_groups, TILE)
    can_split = size_out <= fused.MAX_SPLIT_COLUMNS and form.num_groups > 1
    return next((count for count in (4, 2) if can_split and size_in % (count * multiple) == 0
                 and size_in // count >= FEWEST_COLUMNS), 1)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py. Weights have two rows, of gate and up if there are these."""
    c, make = r.config, partial(torch.empty, dtype=r.dtype, device=r.device)
    for size_out, size, bias, form, is_residual, is_first in r.modules.linear.plan.shapes():
        kept = empty_matrix(size, form, r.device, 2)
        is_split = is_residual and r.modules.residual_linear.kept is SplitLinear4 and r.dtype is not torch.float16
        count = num_parts(size, size_out, form) if is_split and not bias else 1
        act = (c.activation, c.gated_mlp) if is_first and issubclass(r.modules.mlp, MLP4) else ()
        for rows in {1, 9, 17, 33, 65, *four_bit_hopper.rows_to_compile(size_out, count, r.device)}:  # of all forms
            yield partial(linear, make(rows, size), *kept, make(2) if bias else None, *act, count=count,
                          height=size_out)
        yield partial(widen, size, r.dtype, *kept)


# --------------------------------------------------------------------------------------------------
# The kernels
# --------------------------------------------------------------------------------------------------

def linear(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, row_scale: Tensor | None,
           bias: Tensor | None = None, activation: str = "", gated: bool = False, count: int = 1,
           height: int = 0) -> Tensor:
    """F.linear for x [T, in] and a matrix in 4 bits. activation, gated, count: as in `fused.few_rows_linear`, for few
    rows; height: the number of rows for which the kernel is compiled, if the matrix stands for a larger one"""
    num_rows, size = x.shape
    if not has_few_rows(x, weight, scale):
        wide = widen(size, x.dtype, weight, scale, zero, row_scale)
        return torch.matmul(x, wide.T) if bias is None else torch.addmm(bias, x, wide.T)
    num_out = len(scale) // (2 if gated else 1)
    out = x.new_empty(*[count] * (count > 1), num_rows, num_out)
    if not num_rows:
        return out
    part, group = size // count, size // scale.shape[1] if scale.shape[1] > 1 else 1
    num_tiles, multiprocessors = cdiv(height or len(scale), 32) * count, tiles.num_multiprocessors(x.device)
    if num_rows <= four_bit_streams.MOST_ROWS and four_bit_streams.takes(x):
        form = four_bit_streams.form_of(num_rows, num_tiles, multiprocessors)
        if four_bit_streams.fits(form, scale, zero, weight.dtype, size, part):
            return four_bit_streams.linear(x, weight, scale, zero, row_scale, bias, activation, gated, count, form=form)
    if four_bit_hopper.takes(x, weight, scale, count):
        return four_bit_hopper.linear(x, weight, scale, zero, row_scale, bias, activation, gated, count, height)
    density = cdiv(height or len(scale), 64) * count / multiprocessors
    form = few_rows_form(num_rows, gated, density, lambda slices: part % (slices * max(group, TILE)) == 0,
                         tiles.shared_memory(x.device))
    few_rows_kernel[(cdiv(num_out, form["ROWS"]), count, cdiv(num_rows, form["COLUMNS"]))](
        x, bias=x if bias is None else bias, out=out, num_rows=num_rows, num_out=num_out, PART=part,
        BIAS=bias is not None, GATED=gated, ACTIVATION=activation, **form,
        **arguments(size, weight, scale, zero, row_scale), **launch_options(x.device))
    return out


def few_rows_form(num_rows: int, gated: bool, density: float, can_slice: Callable[[int], bool],
                  shared_memory: int) -> dict[str, int]:
    """Of `few_rows_kernel`: a program's rows of the weight, its columns, the slices of the inner dimension that it
    multiplies side by side, and the tiles in the loop's pipeline. density: tiles of 64 rows of the weight, counted for
    each partial product, per multiprocessor. (H200, 8B's products)"""
    columns, slices = min(MOST_COLUMNS, max(16, tiles.next_power_of_2(num_rows))), 1
    if num_rows <= MOST_SLICED:  # a small matrix gets enough programs
        slices = next((n for n in (1, 2, 4) if n * density >= 1.5 and can_slice(n)), 1)
        columns = max(MOST_SLICED, 16 // slices)
    height, unroll = 64 if columns <= 64 else 128, 2 if columns <= 32 or columns == 64 and density <= 2 else 1
    stages = 4 if columns * slices == 16 else 3
    return dict(ROWS=height // slices // (2 if gated else 1), COLUMNS=columns, SLICES=slices, TILE=TILE, UNROLL=unroll,
                STAGES=stages if shared_memory > tiles.LARGE_SHARED_MEMORY else 2, num_warps=height // 16)


@jit
def few_rows_kernel(x, weight, scale, zero, row_scale, bias, out, num_rows, num_out, SIZE: tl.constexpr,
                    PART: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
                    ROW_SCALE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
                    TILE: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, BIAS: tl.constexpr,
                    GATED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows of the weight, part of the inner dimension, COLUMNS rows of x, which are columns as in fused.py).
    SLICES split the inner dimension inside a program, so that a small matrix has enough programs. One product, which
    has 64 rows and 16 columns or more, multiplies the rows of all slices (of each ROWS of the gate and ROWS of up) by
    the columns of all slices. Only its blocks on the diagonal, of a slice with itself, are added up. Rows of the weight
    that do not exist load the last one's numbers, and are not stored."""
    HEIGHT: tl.constexpr = 2 * ROWS if GATED else ROWS
    SLICE: tl.constexpr = PART // SLICES
    all_rows, all_columns = tl.arange(0, SLICES * HEIGHT)[:, None], tl.arange(0, SLICES * COLUMNS)[None, :]
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * PART
    source = tl.minimum(tl.program_id(0) * ROWS + all_rows % ROWS, num_out - 1) + all_rows % HEIGHT // ROWS * num_out
    x_row = tl.program_id(2) * COLUMNS + all_columns % COLUMNS
    x_at = x + x_row.to(tl.int64) * SIZE + begin + all_columns // COLUMNS * SLICE
    first = begin + all_rows // HEIGHT * SLICE
    sums = products(x_at, x_row < num_rows, weight, scale, zero, source, first, SLICE, SIZE, GROUPS, KIND, ZEROS, TILE,
                    STAGES, UNROLL, PDL)
    if ROW_SCALE:
        sums *= tl.load(row_scale + source)
    if SLICES > 1:
        sums = tl.where(all_rows // HEIGHT == all_columns // COLUMNS, sums, 0.0)
        sums = tl.sum(tl.sum(sums.reshape(SLICES, HEIGHT, SLICES, COLUMNS), 2), 0)
    up_sums = sums
    if GATED:
        sums, up_sums = gate_and_up(sums)
    row_exists = row < num_out
    if BIAS:
        sums += tl.load(bias + row, mask=row_exists, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(bias + num_out + row, mask=row_exists, other=0.0).to(tl.float32)[:, None]
    y = sums.to(out.dtype.element_ty)
    if ACTIVATION != "":
        y = fused.activate_tile(y, up_sums.to(out.dtype.element_ty), GATED, ACTIVATION)
    at_out = out + (tl.program_id(1) * num_rows + column)[None, :].to(tl.int64) * num_out
    tl.store(at_out + row[:, None], y, mask=row_exists[:, None] & (column < num_rows)[None, :])
