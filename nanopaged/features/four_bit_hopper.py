"""Products of many rows with weights in 4 bits, which only Hopper can run. An addition to four_bit_kernels.py.

From 65 rows of x on, such a product is bound by the tensor cores. Plain Triton makes numbers of a tile of codes, and
then multiplies them, one after the other: the tensor cores wait. Here warps have different tasks, as in hopper.py,
which explains the barriers:

    a copying warp             asks the hardware's copying unit (TMA) for tiles of codes and of x
    two or three warpgroups    each makes numbers of its 64 rows of a tile of codes, in registers, and multiplies them
                               (wgmma) by x, which the tensor cores read from shared memory

    a tile of codes, 128 columns, in time        rows   0..63     numbers wgmma   numbers wgmma
                                                 rows  64..127            numbers wgmma   numbers wgmma

While one warpgroup makes numbers, the tensor cores serve another one. Nothing is stored between codes and sums. Each
multiprocessor has one program, which computes one tile of results (an item) after the other: tiles of codes and of x
for the next one are on their way while results are stored. A row of x is a column of the results, as in fused.py.
"""
from collections import namedtuple
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanopaged import kernel, tiles
from nanopaged.features import fused
from nanopaged.features.four_bit_codes import (
    MINUS_136,
    SUMS,
    TILE,
    arguments,
    enlarged_scale,
    kind_of,
    minus_zero,
    of_scale,
    twice,
)
from nanopaged.features.four_bit_streams import groups_layout, scaled_numbers, spread, words_layout
from nanopaged.optional_gluon import (
    async_load,
    box_of,
    compiles,
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
    problem,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanopaged.optional_triton import launch_options, tl
from nanopaged.tiles import cdiv

FEWEST_ROWS = 65  # of x
MOST_ROWS = 768
Ring = namedtuple("Ring", ["codes", "xs", "full", "empty"])
Matrix = namedtuple("Matrix", ["scale", "zero", "row_scale", "bias", "num_out"])
Work = namedtuple("Work", ["num_rows", "num_items"])
Scales = namedtuple("Scales", ["factor", "other", "less"])  # of pairs 0 and 1, and 2 and 3, of a word; a summand


class KernelForm(NamedTuple):
    """Constants of `many_rows_kernel`, and what they cost."""
    WARPGROUPS: int
    columns: int  # of a program's results, which are rows of x
    STAGES: int  # tiles in shared memory
    REGISTERS: int  # of a thread
    cost: float  # of 64 x 128 results, beside the first form (H200, 8B's products)

    def num_items(self, num_rows: int, num_out: int, count: int) -> int:
        return cdiv(num_rows, self.columns) * cdiv(num_out, 64 * self.WARPGROUPS) * count


FORMS = (KernelForm(2, 128, 5, 240, 1.0), KernelForm(3, 128, 5, 152, 0.95), KernelForm(2, 256, 3, 240, 0.87),
         KernelForm(2, 64, 8, 240, 1.65))


def takes(x: Tensor, weight: Tensor, scale: Tensor, count: int = 1) -> bool:
    """Whether the kernel multiplies x by such a matrix. count: of partial products"""
    size, groups, kind = x.shape[1], scale.shape[-1], kind_of(weight.dtype, scale.dtype)
    group = size // groups
    return (FEWEST_ROWS <= len(x) <= MOST_ROWS and kind != "fp8" and size % 32 == 0
            and (count == 1 or size % (count * TILE) == 0)
            and (groups == 1 or group % TILE == 0 or group in (32, 64) or group == 16 and kind == "nvfp4")
            and count * len(x) * len(scale) < 2**31 and x.dtype is torch.bfloat16 and x.data_ptr() % 16 == 0
            and x.device.type == "cuda" and is_there(x.device))


@lru_cache
def is_there(device: torch.device) -> bool:
    """The first call on a device compiles the kernel in all forms."""
    if not tiles.has_dependent_launch(device) or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    x, codes = (torch.zeros(*shape, dtype=dtype, device=device) for shape, dtype in (
        ((1, 128), torch.bfloat16), ((8, 64), torch.uint8)))

    def run() -> None:
        for form in FORMS:
            linear(x, codes, x.new_zeros(8, 1), form=form)

    return compiles(run, "65 rows and more are multiplied by weights in 4 bits in a kernel of plain Triton, which "
                         "takes 1.2 to 1.8 times as long as the one for Hopper")


def form_of(num_rows: int, num_out: int, count: int, device: torch.device) -> KernelForm:
    """The form that takes the shortest time, if each multiprocessor computes one item after the other. num_out: rows of
    the weight"""
    def time(form: KernelForm) -> float:
        rounds = cdiv(form.num_items(num_rows, num_out, count), tiles.num_multiprocessors(device))
        return rounds * form.WARPGROUPS * form.columns * form.cost
    return min(FORMS, key=time)


def rows_to_compile(num_out: int, count: int, device: torch.device) -> list[int]:
    """For a warm-up: numbers of rows of x that have all forms."""
    forms = {form_of(rows, num_out, count, device): rows for rows in range(MOST_ROWS, FEWEST_ROWS - 1, -1)}
    return list(forms.values())


def linear(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, row_scale: Tensor | None = None,
           bias: Tensor | None = None, activation: str = "", gated: bool = False, count: int = 1,
           height: int = 0, form: KernelForm | None = None) -> Tensor:
    """`four_bit_kernels.linear`. form: None for the fastest one. ImportError: there is no Gluon"""
    if gl is None:
        raise ImportError(problem)
    (num_rows, size), num_out, halves = x.shape, len(scale) // (2 if gated else 1), 2 if gated else 1
    out = x.new_empty(*[count] * (count > 1), num_rows, num_out)
    words = weight.view(torch.int32).view(halves, num_out, -1)  # gate and up
    form = form or form_of(num_rows, height or len(scale), count, x.device)
    boxes = box_of(x, [form.columns, TILE // 2]), box_of(words, [halves, 64 // halves, TILE // 8], 64)
    num_items = form.num_items(num_rows, len(scale), count)
    matrix = arguments(size, weight, scale, zero, row_scale)
    del matrix["weight"]
    many_rows_kernel[(min(num_items, tiles.num_multiprocessors(x.device)),)](
        *boxes, bias=x if bias is None else bias, out=out, num_rows=num_rows, num_out=num_out, num_items=num_items,
        PART=size // count, BIAS=bias is not None, ACTIVATION=activation, WARPGROUPS=form.WARPGROUPS,
        STAGES=form.STAGES, REGISTERS=form.REGISTERS, **matrix, num_warps=4, **launch_options(x.device))
    return out


@gluon_jit
def many_rows_kernel(x_box, codes_box, scale, zero, row_scale, bias, out, num_rows, num_out, num_items,
                     SIZE: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
                     ZEROS: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
                     WARPGROUPS: tl.constexpr, STAGES: tl.constexpr, REGISTERS: tl.constexpr, PDL: tl.constexpr):
    """`few_rows_kernel` of four_bit_kernels.py. Grid (program,); an item is a tile of results, of one part of the inner
    dimension. The lists at the end are of the other warpgroups and of the copying warp: warps, and registers of a
    thread."""
    ring = _ring(x_box, codes_box, WARPGROUPS, STAGES)
    matrix, work = Matrix(scale, zero, row_scale, bias, num_out), Work(num_rows, num_items)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_compute, (out, ring, matrix, work, 0, SIZE, PART, GROUPS, KIND, ZEROS, ROW_SCALE, BIAS, ACTIVATION,
                        WARPGROUPS, PDL)),
            (_compute, (out, ring, matrix, work, 1, SIZE, PART, GROUPS, KIND, ZEROS, ROW_SCALE, BIAS, ACTIVATION,
                        WARPGROUPS, PDL)),
            (_copy, (x_box, codes_box, ring, num_out, work, PART, WARPGROUPS, PDL)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_compute, (out, ring, matrix, work, 0, SIZE, PART, GROUPS, KIND, ZEROS, ROW_SCALE, BIAS, ACTIVATION,
                        WARPGROUPS, PDL)),
            (_compute, (out, ring, matrix, work, 1, SIZE, PART, GROUPS, KIND, ZEROS, ROW_SCALE, BIAS, ACTIVATION,
                        WARPGROUPS, PDL)),
            (_compute, (out, ring, matrix, work, 2, SIZE, PART, GROUPS, KIND, ZEROS, ROW_SCALE, BIAS, ACTIVATION,
                        WARPGROUPS, PDL)),
            (_copy, (x_box, codes_box, ring, num_out, work, PART, WARPGROUPS, PDL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])


@gluon_jit
def _ring(x_box, codes_box, WARPGROUPS: tl.constexpr, STAGES: tl.constexpr):
    """Codes [1 or 2, rows, words] of each warpgroup and x [2, columns, 64] of some tiles, and the barriers of
    hopper.py's `Ring`."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    shape: tl.constexpr = x_box.block_type.shape
    return Ring(gl.allocate_shared_memory(codes_box.dtype, [STAGES * WARPGROUPS] + codes_box.block_type.shape,
                                         codes_box.layout),
                gl.allocate_shared_memory(x_box.dtype, [STAGES, 2 * shape[0], shape[1]], x_box.layout), full, empty)


@gluon_jit
def _place(item, num_rows, num_out, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """The first column and row of an item's results, and its part of the inner dimension. Programs that share codes
    are neighbours."""
    columns, rows = gl.cdiv(num_rows, COLUMNS), gl.cdiv(num_out, HEIGHT)
    return item % columns * COLUMNS, item // columns % rows * HEIGHT, item // columns // rows


@gluon_jit
def _copy(x_box, codes_box, ring, num_out, work, PART: tl.constexpr, WARPGROUPS: tl.constexpr, PDL: tl.constexpr):
    """The copying warp. The first codes come before the wait for the previous kernel, which may make x."""
    STAGES: tl.constexpr = ring.xs.shape[0]
    STEPS: tl.constexpr = (PART + 127) // 128
    FIRST: tl.constexpr = min(STAGES, STEPS)
    HEIGHT: tl.constexpr = codes_box.block_type.shape[1] * WARPGROUPS
    COLUMNS: tl.constexpr = x_box.block_type.shape[0]
    _, first, part = _place(gl.program_id(0), work.num_rows, num_out, HEIGHT, COLUMNS)
    for early in gl.static_range(FIRST):
        _copy_codes(x_box, codes_box, ring, early, first, part * PART + early * 128, WARPGROUPS)
    kernel.wait_for_previous_kernel(PDL)
    n = 0  # tiles so far
    for item in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        column, first, part = _place(item, work.num_rows, num_out, HEIGHT, COLUMNS)
        for i in range(STEPS):
            begin = part * PART + i * 128
            if n >= FIRST:
                mbarrier.wait(ring.empty.index(n % STAGES), (n // STAGES + 1) % 2)
                _copy_codes(x_box, codes_box, ring, n % STAGES, first, begin, WARPGROUPS)
            full, x = ring.full.index(n % STAGES), ring.xs.index(n % STAGES)
            async_load(x_box, [column, begin], full, x.slice(0, COLUMNS))
            async_load(x_box, [column, begin + 64], full, x.slice(COLUMNS, COLUMNS))
            n += 1


@gluon_jit
def _copy_codes(x_box, codes_box, ring, i, row, begin, WARPGROUPS: tl.constexpr):
    """Ask for codes, and tell the barrier how many bytes it waits for, those of x among them."""
    full = ring.full.index(i)
    mbarrier.expect(full, WARPGROUPS * codes_box.block_type.nbytes + 2 * x_box.block_type.nbytes)
    for group in gl.static_range(WARPGROUPS):
        async_load(codes_box, [0, row + group * codes_box.block_type.shape[1], begin // 8], full,
                   ring.codes.index(i * WARPGROUPS + group))


@gluon_jit
def _compute(out, ring, matrix, work, INDEX: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
             GROUPS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALE: tl.constexpr,
             BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WARPGROUPS: tl.constexpr, PDL: tl.constexpr):
    """A warpgroup: 64 rows of each tile of the weight. Of gate and up, 8 rows of gate and the same ones of up take
    turns, so that a thread has both."""
    STAGES: tl.constexpr = ring.xs.shape[0]
    STEPS: tl.constexpr = (PART + 127) // 128
    GATED: tl.constexpr = ring.codes.shape[1] == 2
    HEIGHT: tl.constexpr = ring.codes.shape[2]  # of the results
    COLUMNS: tl.constexpr = ring.xs.shape[1] // 2
    GROUP: tl.constexpr = SIZE // GROUPS if GROUPS > 1 else 2 ** 30
    MMA: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    item = _item(gl.program_id(0), matrix, work, INDEX, PART, GROUP, GROUPS, ZEROS, GATED, HEIGHT, WARPGROUPS, COLUMNS)
    kernel.wait_for_previous_kernel(PDL)
    n = 0
    for i in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        first_column, first, part, row, group, given = item
        sums = gl.zeros([64, COLUMNS], gl.float32, MMA)
        upcoming = _scales(matrix, row, group, part * PART + 128, GROUP, GROUPS, ZEROS)
        words, more = _load_words(ring, n, INDEX, WARPGROUPS)
        scales = _as_words(given, matrix.scale.dtype.element_ty, KIND, ZEROS)
        tile = _numbers(words, scales, 0, KIND, MMA)
        for step in range(STEPS):
            given = upcoming  # two tiles ahead, because loads take long
            upcoming = _scales(matrix, row, group, part * PART + step * 128 + 256, GROUP, GROUPS, ZEROS)
            x = ring.xs.index(n % STAGES)
            sums = warpgroup_mma(tile, x.slice(0, COLUMNS).permute((1, 0)), sums, is_async=True)
            other_tile = _numbers(more, scales, 1, KIND, MMA)
            sums = warpgroup_mma(other_tile, x.slice(COLUMNS, COLUMNS).permute((1, 0)), sums, is_async=True)
            if step + 1 < STEPS:
                words, more = _load_words(ring, n + 1, INDEX, WARPGROUPS)
            scales = _as_words(given, matrix.scale.dtype.element_ty, KIND, ZEROS)
            sums, tile, other_tile = warpgroup_mma_wait(0, deps=[sums, tile, other_tile])
            mbarrier.arrive(ring.empty.index(n % STAGES))
            tile = _numbers(words, scales, 0, KIND, MMA)
            n += 1
        upcoming_item = gl.minimum(i + gl.num_programs(0), work.num_items - 1)  # its loads run while results are stored
        item = _item(upcoming_item, matrix, work, INDEX, PART, GROUP, GROUPS, ZEROS, GATED, HEIGHT, WARPGROUPS, COLUMNS)
        _store(out, sums, matrix, work, first_column, first, part, KIND, GATED, ROW_SCALE, BIAS, ACTIVATION)


@gluon_jit
def _item(i, matrix, work, INDEX: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
          ZEROS: tl.constexpr, GATED: tl.constexpr, HEIGHT: tl.constexpr, WARPGROUPS: tl.constexpr,
          COLUMNS: tl.constexpr):
    """A warpgroup's first column and row of item i, the part of the inner dimension; where rows of scales begin, the
    groups of a tile, and scales of the first tile."""
    SPAN: tl.constexpr = max(GROUP, 32)  # 32 numbers have one scale, or two
    COUNT: tl.constexpr = 128 // SPAN if SPAN < 128 else 1
    OF_GROUP: tl.constexpr = gl.SliceLayout(2, groups_layout(64, 1, 4, COUNT, 16))
    first_column, first, part = _place(i, work.num_rows, matrix.num_out, HEIGHT * WARPGROUPS, COLUMNS)
    first += INDEX * HEIGHT
    row = _rows_of(first, matrix.num_out, GATED, gl.SliceLayout(1, OF_GROUP))[:, None] * GROUPS
    group = gl.arange(0, COUNT, layout=gl.SliceLayout(0, OF_GROUP))[None, :]
    return first_column, first, part, row, group, _scales(matrix, row, group, part * PART, GROUP, GROUPS, ZEROS)


@gluon_jit
def _rows_of(first, num_out, GATED: tl.constexpr, layout: tl.constexpr):
    """For each of a warpgroup's rows its row of the weight. A row behind the end is the last one."""
    i = gl.arange(0, 64, layout=layout)
    if GATED:
        return gl.minimum(first + i // 16 * 8 + i % 8, num_out - 1) + i // 8 % 2 * num_out
    else:
        return gl.minimum(first + i, num_out - 1)


@gluon_jit
def _scales(matrix, row, group, begin, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """Load what belongs to the groups, or pairs of groups of 16, of the tile that begins with column `begin`."""
    EACH: tl.constexpr = 2 if GROUP == 16 else 1
    at = row + gl.minimum((group + begin // (EACH * GROUP)) * EACH, GROUPS - EACH)
    factor = _load(matrix.scale + at)
    other, zero = factor, factor
    if GROUP == 16:
        other = _load(matrix.scale + at + 1)
    if ZEROS:
        zero = _load(matrix.zero + at)
    return Scales(factor, other, zero)


@gluon_jit
def _load(at):
    """As an integer of 32 bits: the loop would have to wait before it moves half a register."""
    x = gl.load(at)
    if x.dtype == gl.float32:
        return x.to(gl.int32, bitcast=True)
    elif x.dtype == gl.uint8:
        return x.to(gl.int32)
    else:
        return x.to(gl.uint16, bitcast=True).to(gl.int32)


@gluon_jit
def _as_words(given, dtype: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """What `_scales` returned as bfloat16, in both halves of a word. dtype: of scales in memory"""
    less = gl.full(given.factor.shape, MINUS_136, gl.int32, given.factor.type.layout)
    if ZEROS:
        less = minus_zero(given.less)
    return Scales(_as_word(given.factor, dtype, KIND), _as_word(given.other, dtype, KIND), less)


@gluon_jit
def _as_word(scale, dtype: tl.constexpr, KIND: tl.constexpr):
    if KIND == "mxfp4":
        return enlarged_scale(scale)
    elif KIND == "nvfp4":
        return twice(of_scale(scale, KIND) * 2.0 ** 62)
    elif dtype == gl.float32:
        return twice(scale.to(gl.float32, bitcast=True))
    else:
        return twice(scale.to(gl.uint16).to(dtype, bitcast=True))


@constexpr_function
def _half_of_codes(gated):
    """A warpgroup's codes, [1 or 2, rows, words], of which each thread gets those of `words_layout(64, 1, 4, 16)`."""
    def of_row(i: int) -> list[int]:
        return [0, i, 0] if not gated else [1, 0, 0] if i == 8 else [0, i if i < 8 else i // 2, 0]
    return gl.DistributedLinearLayout(
        [[0, 0, 4], [0, 0, 8], of_row(8)], [[0, 0, 1], [0, 0, 2], *map(of_row, (1, 2, 4))], [of_row(16), of_row(32)],
        [], [1 + gated, 64 // (1 + gated), 16])


@gluon_jit
def _load_words(ring, n, INDEX: tl.constexpr, WARPGROUPS: tl.constexpr):
    """A warpgroup's codes of tile n as soon as it is there: those of the first and of the last 64 columns."""
    STAGES: tl.constexpr = ring.xs.shape[0]
    GATED: tl.constexpr = ring.codes.shape[1] == 2
    mbarrier.wait(ring.full.index(n % STAGES), n // STAGES % 2)
    words = ring.codes.index(n % STAGES * WARPGROUPS + INDEX).load(_half_of_codes(GATED))
    if GATED:
        words = words.reshape(2, 4, 8, 16).permute(1, 0, 2, 3)
    return gl.split(words.reshape(64, 2, 8).permute(0, 2, 1))


@gluon_jit
def _numbers(words, scales, HALF: tl.constexpr, KIND: tl.constexpr, MMA: tl.constexpr):
    """The numbers of half a tile, [64, 64]."""
    WORDS: tl.constexpr = words_layout(64, 1, 4, 8)
    y = scaled_numbers(gl.convert_layout(words, WORDS, assert_trivial=True), _spread(scales.less, HALF, WORDS),
                       _spread(scales.factor, HALF, WORDS), _spread(scales.other, HALF, WORDS), KIND)
    return gl.convert_layout(y, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon_jit
def _spread(x, HALF: tl.constexpr, WORDS: tl.constexpr):
    """For the words of half a tile, what belongs to their groups."""
    if x.shape[1] > 1:
        x, other = gl.split(x.reshape(64, 2, x.shape[1] // 2).permute(0, 2, 1))
        if HALF:
            x = other
    return spread(x, 8, 1, 4, WORDS)


@gluon_jit
def _store(out, sums, matrix, work, first_column, first, part, KIND: tl.constexpr, GATED: tl.constexpr,
           ROW_SCALE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    COLUMNS: tl.constexpr = sums.shape[1]
    dtype: tl.constexpr = out.dtype.element_ty
    source = _rows_of(first, matrix.num_out, GATED, gl.SliceLayout(1, sums.type.layout))
    if KIND != "int4":
        sums *= SUMS
    if ROW_SCALE:
        sums *= gl.load(matrix.row_scale + source)[:, None]
    if BIAS:
        sums += gl.load(matrix.bias + source).to(gl.float32)[:, None]
    up = sums
    if GATED:
        sums, up = gl.split(sums.reshape(4, 2, 8, COLUMNS).permute(0, 2, 3, 1).reshape(32, COLUMNS, 2))
    y = sums.to(dtype)
    if ACTIVATION != "":
        y = fused.activate_tile(y, up.to(dtype), GATED, ACTIVATION)
    row = first + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout))[:, None]
    column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, y.type.layout))[None, :]
    gl.store(out + (part * work.num_rows + column) * matrix.num_out + row, y,
             mask=(row < matrix.num_out) & (column < work.num_rows))
