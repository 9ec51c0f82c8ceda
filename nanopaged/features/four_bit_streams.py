"""Products with weights in 4 bits, or in FP8 blocks, of up to 16 rows, or of experts with up to 12 tokens on average.
An addition to four_bit_kernels.py and four_bit_experts.py, for GPUs of compute capability 8.0 and more.

Memory should limit such a product. A multiprocessor of an H200 reads 18 bytes per cycle: 34 codes and their scales,
which must become numbers in that cycle. In plain Triton the compiler picks the layouts. It moves codes between threads
before they become numbers, and all warps of a program share columns, so each warp loads all of x. In **Gluon**
(optional_gluon.py) the program picks the layouts. Here with 32 ROWS, 4 PARTS and 4 warps:

    columns of the weight   0..127   128..255   256..383   384..511 | 512..639   640..767  ..
    warp                      0         1          2          3     |    0          1      ..

A tile is ROWS rows of the weight and PARTS * 128 columns. All warps copy its codes to shared memory, and the same
columns of x; up to STAGES - 1 tiles are on their way while one is multiplied. Then each warp reads the codes of its 128
columns in the tensor core's order (four_bit_codes.py), makes numbers of them in registers, and multiplies. No codes
move between threads. After the last tile the sums of the warps are added up. If there are more warps than PARTS,
several of them share 128 columns, and each has an equal share of the rows.

The scales of one tile are too few for efficient copies. A program loads all its scales before the loop, and keeps them
in shared memory.
"""
import math
from collections import namedtuple
from functools import lru_cache, partial

import torch
from torch import Tensor

from nanopaged import kernel, tiles
from nanopaged.features import fused
from nanopaged.features.four_bit_codes import (
    E2M1,
    E4M3,
    INT4,
    MINUS_136,
    ONE,
    SCALED_INT4,
    SUMS,
    TILE,
    TWO,
    arguments,
    bytes_in_order,
    enlarged_scale,
    in_order,
    kind_of,
    minus_zero,
    of_scale,
    twice,
)
from nanopaged.optional_gluon import compiles, constexpr_function, gl, gluon_jit, problem
from nanopaged.optional_triton import launch_options, tl
from nanopaged.tiles import cdiv

try:
    if gl is None:
        raise ImportError
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    async_load = async_copy.async_load if "async_load" in async_copy.__all__ else async_copy.async_copy_global_to_shared
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
except (ImportError, AttributeError):  # no Gluon; see optional_gluon.py
    async_copy = async_load = barrier = mma_v2 = None
RENAMED = tl.constexpr(not hasattr(getattr(gl, "shared_memory_descriptor", None), "_reinterpret"))

MOST_ROWS = 16  # of x
MOST_TOKENS = 12  # of an expert, on average
MOST_REGISTERS = 150  # of a thread, for all scales and zeros of a program
LONG_ROW = 2048  # columns of a weight from which a row is long


def takes(x: Tensor) -> bool:
    """Whether the kernels run on this x and its device. The first call on a device compiles some."""
    is_aligned = x.dtype is torch.bfloat16 and x.data_ptr() % 16 == 0  # asynchronous copies need 4 bytes at least
    return is_aligned and x.device.type == "cuda" and is_there(x.device)


@lru_cache
def is_there(device: torch.device) -> bool:
    if not torch.version.cuda or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    make = partial(torch.empty, device=device)
    x, codes, scores, counts = (make(*shape, dtype=dtype) for shape, dtype in (
        ((1, 512), torch.bfloat16), ((0, 256), torch.uint8), ((1, 1), torch.float32), ((1,), torch.int32)))

    def run() -> None:  # without rows of a weight, and without pairs of an expert
        linear(x, codes, x.new_empty(0, 4), form=form_of(1, 32, 4))
        experts_product(x, codes, make(0, 32, dtype=torch.float8_e4m3fn), None, None, scores, counts.zero_(), counts,
                        x.new_empty(1, 256), "silu", None, experts_form(1, 1, 1, True, 512))

    return compiles(run, "few rows are multiplied by weights in 4 bits in a kernel of plain Triton, which takes 1.1 to "
                         "2 times as long as the one in Gluon")


def fits(form: dict[str, int], scale: Tensor, zero: Tensor | None, codes: torch.dtype, size: int, part: int) -> bool:
    """Whether the kernels handle groups and parts of this size, the ring of tiles and all scales of a program fit into
    shared memory, and the scales, which are loaded at once, into registers. size: columns of the weight; part: of these
    in a program"""
    kind, groups, step = kind_of(codes, scale.dtype), scale.shape[-1], 128 * form["PARTS"]
    group = size // groups if groups > 1 and kind != "fp8" else TILE
    scales = tiles.next_power_of_2(cdiv(part, step)) * step // min(group, TILE) * form["ROWS"]
    tile_bytes = step * (form["ROWS"] // (1 if kind == "fp8" else 2) + 2 * form["COLUMNS"])
    bytes_of_scale = 1 if kind == "mxfp4" else 2 if group < TILE else 4
    of_thread, has_zeros = cdiv(scales, 32 * form["num_warps"]), zero is not None
    registers = of_thread * scale.itemsize // math.gcd(groups * scale.itemsize, 4)  # as wide as loads are
    registers += has_zeros * of_thread // math.gcd(groups, 4)
    shared = form["STAGES"] * tile_bytes + scales * (bytes_of_scale + 4 * has_zeros) + 1024
    return ((group % TILE == 0 or group in (32, 64) or group == 16 and kind == "nvfp4")
            and size % 32 == 0 and (part == size or part % TILE == 0)
            and shared <= tiles.shared_memory(scale.device) and registers <= MOST_REGISTERS)


def form_of(num_rows: int, num_tiles: int, multiprocessors: int) -> dict[str, int]:
    """Constants of `linear_kernel`: ROWS of the weight and COLUMNS, which are rows of x, in a program; PARTS of 128
    columns in a tile; STAGES, tiles in the ring; and warps. num_tiles: of 32 rows of the weight, times the number of
    partial products. With 8 columns all programs of one of 8B's products run at once. (H200)"""
    density, columns = num_tiles / multiprocessors, 8 if num_rows <= 8 else 16
    if columns == 16:
        rows, parts, stages = (64, 2, 4) if density > 3 else (32, 4, 4)
    else:
        rows, parts, stages = ((16, 4, 4) if density <= 1.75 else (32, 4, 4) if density <= 3 else
                               (32, 4, 3) if density <= 4 else (32, 2, 4))
    return dict(ROWS=rows, COLUMNS=columns, PARTS=parts, STAGES=stages, num_warps=parts * max(1, rows // 32))


def experts_form(num_rows: int, top_k: int, count: int, gated: bool, size: int) -> dict[str, int]:
    """`form_of` for num_rows tokens that choose top_k of `count` experts each. Empty: too many tokens. size: of the
    inner dimension. (H200, the shapes of gpt-oss-20b and Qwen3-30B-A3B)"""
    columns, is_long = 8 if num_rows <= 8 or num_rows * top_k <= 4 * count else 16, size >= LONG_ROW
    if num_rows * top_k > MOST_TOKENS * count:
        return {}
    if num_rows == 1:
        rows, parts, stages, warps = 32, 4 if is_long or gated else 2, 2, 4
    elif columns == 8:
        rows, parts, stages, warps = 64, 4 if is_long else 2, 2, 4
    elif not is_long:
        rows, parts, stages, warps = 64, 1, 2, 2
    else:  # fewer rows are faster where the last tile is not whole
        rows, parts, stages, warps = (128, 2, 2, 4) if gated and size % 256 == 0 else (64, 2, 3, 4)
    return dict(ROWS=rows, COLUMNS=columns, PARTS=parts, STAGES=stages, num_warps=warps)


def linear(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, row_scale: Tensor | None = None,
           bias: Tensor | None = None, activation: str = "", gated: bool = False, count: int = 1, *,
           form: dict[str, int]) -> Tensor:
    """`four_bit_kernels.linear` for up to MOST_ROWS rows. form: what `form_of` returned. ImportError: there is no
    Gluon"""
    if gl is None:
        raise ImportError(problem)
    num_rows, size = x.shape
    num_out = len(scale) // (2 if gated else 1)
    out = x.new_empty(*[count] * (count > 1), num_rows, num_out)
    linear_kernel[(cdiv(num_out, form["ROWS"] // (2 if gated else 1)), count)](
        x, bias=x if bias is None else bias, out=out, num_rows=num_rows, num_out=num_out, PART=size // count,
        BIAS=bias is not None, GATED=gated, ACTIVATION=activation, **form,
        **arguments(size, weight, scale, zero, row_scale), **launch_options(x.device))
    return out


def experts_product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, row_scale: Tensor | None,
                    scores: Tensor, counts: Tensor, pairs: Tensor, out: Tensor, activation: str,
                    bias: Tensor | None, form: dict[str, int]) -> None:
    """`fused_experts.experts_product` for experts of few tokens. form: what `experts_form` returned"""
    (top_k, num_rows), height = scores.shape, form["ROWS"] // (2 if activation else 1)
    num_tiles = min(top_k * num_rows, len(counts)) + (
        num_rows > form["COLUMNS"]) * top_k * num_rows // form["COLUMNS"]
    experts_kernel[(cdiv(out.shape[-1], height), num_tiles)](
        x, bias=x if bias is None else bias, scores=scores, out=out, counts=counts, pairs=pairs,
        num_rows=num_rows, OUT=out.shape[-1], EXPERTS=len(counts), PADDED=max(32, tiles.next_power_of_2(len(counts))),
        BIAS=bias is not None, ACTIVATION=activation, **form,
        **arguments(x.shape[1], weight, scale, zero, row_scale), **launch_options(x.device))


# --------------------------------------------------------------------------------------------------
# Layouts
# --------------------------------------------------------------------------------------------------

# A linear layout gives for each bit of a register's, a lane's and a warp's number the offset that this bit adds in each
# dimension of the tensor. Lane 4 g + t has row g, and of four words or pairs of columns the t-th, as a tensor core
# wants.

_next_power_of_2 = constexpr_function(tiles.next_power_of_2)


@constexpr_function
def _steps(first: int, end: int, dim: int, rank: int) -> list[list[int]]:
    """The offsets first, 2 * first, .. below `end` in dimension `dim`."""
    return [[2**i * (d == dim) for d in range(rank)] for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@constexpr_function
def _rows(rows, row_warps, rank):
    """Rows of a weight, the first dimension, in a thread's registers and in warps."""
    return _steps(8, 16, 0, rank) + _steps(16 * row_warps, rows, 0, rank), _steps(16, 16 * row_warps, 0, rank)


@constexpr_function
def words_layout(rows, parts, row_warps, count):
    """Of a tile of codes, [rows, parts * count]; 128 columns are `count` words."""
    in_registers, in_warps = _rows(rows, row_warps, 2)
    return gl.DistributedLinearLayout(
        _steps(4, count, 1, 2) + in_registers, _steps(1, 4, 1, 2) + _steps(1, 8, 0, 2),
        in_warps + _steps(count, count * parts, 1, 2), [], [rows, count * parts])


@constexpr_function
def groups_layout(rows, parts, row_warps, count, words):
    """`words_layout` with the words of a group as a third dimension. count, words: groups and words in 128 columns"""
    def of_word(step: int) -> list[int]:
        return [0, step // (words // count), step % (words // count)]
    in_registers, in_warps = _rows(rows, row_warps, 3)
    return gl.DistributedLinearLayout(
        [of_word(step) for [_, step] in _steps(4, words, 1, 2)] + in_registers,
        [of_word(1), of_word(2), *_steps(1, 8, 0, 3)], in_warps + _steps(count, count * parts, 1, 3), [],
        [rows, count * parts, words // count])


@constexpr_function
def _columns(rows, parts, row_warps):
    """Of a tile of x, [rows, parts * 128], which becomes the second factor."""
    return gl.DistributedLinearLayout(
        [[0, 1], *_steps(8, 128, 1, 2), *_steps(8, rows, 0, 2)], _steps(2, 8, 1, 2) + _steps(1, 8, 0, 2),
        [[0, 0]] * (row_warps.bit_length() - 1) + _steps(128, 128 * parts, 1, 2), [], [rows, parts * 128])


@constexpr_function
def _shares(parts, count, height, columns, warps):
    """Of sums [parts, count, height, columns]: a thread has all of the first two dimensions, and lanes go along rows of
    the weight first, whose results are neighbours in memory."""
    lanes = min(32, height)
    along = min(warps, columns * lanes // 32)
    return gl.BlockedLayout([parts, count, 1, 1], [1, 1, lanes, 32 // lanes], [1, 1, warps // along, along],
                            [2, 3, 1, 0])


@constexpr_function
def _copies(rows, width, vector, warps):
    """[rows, width]: a lane has `vector` neighbours of a row, and lanes go along the row first."""
    lanes = min(32, width // vector)
    along = min(warps, width // vector // lanes)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps // along, along], [1, 0])


# --------------------------------------------------------------------------------------------------
# The kernels
# --------------------------------------------------------------------------------------------------

Matrix = namedtuple("Matrix", ["weight", "scale", "zero"])
# base: an expert's first row; first: a program's; num_out: the number of rows, half of them if there are gate and up
Rows = namedtuple("Rows", ["base", "first", "num_out"])


@gluon_jit
def _rows_of(rows, ROWS: tl.constexpr, HEIGHT: tl.constexpr, layout: tl.constexpr):
    """For each of a program's ROWS its row of the weight: HEIGHT rows, and behind those of gate the same ones of up. A
    row behind the end is the last one."""
    i = gl.arange(0, ROWS, layout=layout)
    row = gl.minimum(rows.first + i % HEIGHT, rows.num_out - 1) + i // HEIGHT * rows.num_out
    return rows.base + row.to(gl.int64)


@gluon_jit
def _sums(x, exists, matrix, rows, begin, PART: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
          KIND: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr,
          COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):
    """PART numbers, from `begin` on, of rows of a weight times those of rows of x, in float32: [PARTS, ROWS, COLUMNS],
    to be added up. x, exists [COLUMNS, 1]: where rows of x begin, and whether they exist"""
    WARPS: tl.constexpr = gl.num_warps()
    STEP: tl.constexpr = PARTS * 128
    STEPS: tl.constexpr = (PART + STEP - 1) // STEP
    TILES: tl.constexpr = _next_power_of_2(STEPS)
    GROUP: tl.constexpr = 128 if KIND == "fp8" else SIZE // GROUPS if GROUPS > 1 else 2 ** 30
    CODES: tl.constexpr = 4 if KIND == "fp8" else 8  # of a word
    WORDS: tl.constexpr = (SIZE + 4 * CODES - 1) // (4 * CODES) * 4  # of a row
    WIDTH: tl.constexpr = 128 // CODES  # words of a warp, in a row
    COPY_CODES: tl.constexpr = _copies(ROWS, PARTS * WIDTH, 4, WARPS)
    COPY_X: tl.constexpr = _copies(COLUMNS, STEP, 8, WARPS)
    MMA: tl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, WARPS // PARTS, 1], [1, 16, 8])
    dtype: tl.constexpr = x.dtype.element_ty
    # Units of 16 bytes change places within 8 rows, so that the lanes of a warp read from different banks.
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, PARTS * WIDTH], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    xs = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, STEP], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    word = gl.arange(0, PARTS * WIDTH, layout=gl.SliceLayout(0, COPY_CODES))[None, :]
    row = _rows_of(rows, ROWS, HEIGHT, gl.SliceLayout(1, COPY_CODES))[:, None]
    at = matrix.weight.to(gl.pointer_type(gl.int32), bitcast=True) + row * WORDS + begin // CODES + word
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY_X))[None, :]
    x += begin + k
    WHOLE: tl.constexpr = PART % STEP == 0
    for i in gl.static_range(min(STAGES - 1, STEPS)):  # before the wait for the previous kernel
        _copy_codes(codes, at, begin // CODES + word, i, WORDS, WHOLE)
    given, zeros = _load_scales(matrix, rows, begin, STEPS, GROUP, GROUPS, ZEROS, ROWS, HEIGHT, PARTS)
    kernel.wait_for_previous_kernel(PDL)  # what is loaded so far does not depend on it
    factors, more_factors, minus = _keep_scales(given, zeros, given.shape[1] // TILES, KIND, GROUP, ZEROS)
    for i in gl.static_range(STAGES - 1):
        if i < STEPS:
            _copy_x(xs, x, exists, k, i, PART, WHOLE)
        async_copy.commit_group()
    nothing = gl.zeros([PARTS, ROWS, COLUMNS], gl.float32, MMA)
    sums = nothing
    for i in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        barrier()
        if STEPS >= STAGES:  # Triton 3.6 fails to compile a branch that is never taken
            if i + STAGES - 1 < STEPS:
                _copy_codes(codes, at, begin // CODES + word, i + STAGES - 1, WORDS, WHOLE)
                _copy_x(xs, x, exists, k, i + STAGES - 1, PART, WHOLE)
        async_copy.commit_group()
        words = codes.index(i % STAGES).load(words_layout(ROWS, PARTS, WARPS // PARTS, WIDTH))
        tile = gl.convert_layout(_numbers(words, factors, more_factors, minus, i, GROUP, KIND, ZEROS, PARTS),
                                 gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        columns = xs.index(i % STAGES).load(_columns(COLUMNS, PARTS, WARPS // PARTS))
        columns = gl.convert_layout(columns.reshape(COLUMNS, PARTS, 128).permute(1, 2, 0),
                                    gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
        if factors.dtype == gl.float32:
            factor = factors.index(i).permute((1, 0)).load(gl.SliceLayout(2, MMA))
            sums += mma_v2(tile, columns, nothing) * factor[:, :, None]
        else:
            sums = mma_v2(tile, columns, sums)
    if KIND == "mxfp4" or KIND == "nvfp4":
        sums *= SUMS
    return sums


@gluon_jit
def _copy_codes(codes, at, word, i, WORDS: tl.constexpr, WHOLE: tl.constexpr):
    """Begin to copy tile i of the codes. Words behind the end of a row become 0."""
    buffer, skipped = codes.index(i % codes.shape[0]), i * codes.shape[2]
    if WHOLE:
        async_load(buffer, at + skipped)
    else:
        async_load(buffer, at + skipped, mask=word + skipped < WORDS)


@gluon_jit
def _copy_x(xs, x, exists, k, i, PART: tl.constexpr, WHOLE: tl.constexpr):
    """Begin to copy tile i of x. Rows and columns that do not exist become 0."""
    buffer, skipped = xs.index(i % xs.shape[0]), i * xs.shape[2]
    if WHOLE:
        async_load(buffer, x + skipped, mask=exists & (k >= 0))  # in the shape of the tile
    else:
        async_load(buffer, x + skipped, mask=exists & (k + skipped < PART))


@gluon_jit
def _load_scales(matrix, rows, begin, STEPS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
                 ZEROS: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr, PARTS: tl.constexpr):
    """Scales of all tiles, [ROWS, tiles * groups of a tile], and zeros of integers that have them. The number of tiles
    is rounded up to a power of two."""
    WIDTH: tl.constexpr = PARTS * (128 // GROUP if GROUP < 128 else 1)
    PADDED: tl.constexpr = _next_power_of_2(STEPS) * WIDTH
    LAYOUT: tl.constexpr = _copies(ROWS, PADDED, min(PADDED, 8), gl.num_warps())
    row = _rows_of(rows, ROWS, HEIGHT, gl.SliceLayout(1, LAYOUT))[:, None] * GROUPS
    column = gl.arange(0, PADDED, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    group = begin // GROUP + column if GROUP <= 128 else (begin + column * 128) // GROUP
    exists = (column < STEPS * WIDTH) & (group < GROUPS)
    given = gl.load(matrix.scale + row + group, mask=exists, other=0)
    zeros = given
    if ZEROS:
        zeros = gl.load(matrix.zero + row + group, mask=exists, other=0)
    return given, zeros


@gluon_jit
def _keep_scales(given, zeros, WIDTH: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """What `_load_scales` returned, in shared memory: [tiles, rows, WIDTH groups of a tile]. Scales are float32 if they
    multiply the sums of 128 columns, else bfloat16 or MXFP4's bytes. With groups of 16 the first result has the scales
    of pairs 0 and 1 of each word, and the second one those of pairs 2 and 3. The third one is the summand of integers,
    -(128 + zero), twice."""
    IN_SUMS: tl.constexpr = KIND == "fp8" or KIND == "int4" and GROUP >= 128
    factors, minus = given, given
    if KIND == "nvfp4":
        factors = of_scale(given, KIND) * 2.0 ** 62
    if KIND != "mxfp4":
        factors = factors.to(gl.float32 if IN_SUMS else gl.bfloat16)
    if ZEROS:
        minus = _keep(minus_zero(zeros), WIDTH)
    if GROUP == 16:
        factors, more_factors = gl.split(factors.reshape(factors.shape[0], factors.shape[1] // 2, 2))
        factors, more_factors = _keep(factors, WIDTH // 2), _keep(more_factors, WIDTH // 2)
    else:
        factors = _keep(factors, WIDTH)
        more_factors = factors
    return factors, more_factors, minus


@gluon_jit
def _keep(numbers, WIDTH: tl.constexpr):
    """[rows, tiles * WIDTH] in shared memory as [tiles, rows, WIDTH]."""
    ROWS: tl.constexpr = numbers.shape[0]
    TILES: tl.constexpr = numbers.shape[1] // WIDTH
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(numbers.dtype, [TILES * ROWS, WIDTH], PLAIN)
    kept.store(numbers.reshape(ROWS, TILES, WIDTH).permute(1, 0, 2).reshape(TILES * ROWS, WIDTH))
    if RENAMED:
        return kept.reinterpret(numbers.dtype, [TILES, ROWS, WIDTH], PLAIN)
    else:
        return kept._reinterpret(numbers.dtype, [TILES, ROWS, WIDTH], PLAIN)


@gluon_jit
def _numbers(words, factors, more_factors, minus, i, GROUP: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
             PARTS: tl.constexpr):
    """The numbers of tile i, [PARTS, ROWS, 128]: without scales where these multiply sums; e2m1 divided by SUMS."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1] // PARTS
    LAYOUT: tl.constexpr = words.type.layout
    if KIND == "fp8":
        y = bytes_in_order(gl.inline_asm_elementwise(E4M3, "=h,=h,=h,=h,r", [words], dtype=(gl.bfloat16,) * 4,
                                                      is_pure=True, pack=1))
    else:
        less = words
        if ZEROS:
            less = _for_words(minus.index(i), WORDS, PARTS, LAYOUT)
        elif KIND == "int4":
            less = gl.full(words.shape, MINUS_136, gl.int32, LAYOUT)
        if factors.dtype == gl.float32:
            y = in_order(gl.inline_asm_elementwise(INT4, ONE, [words, less], dtype=(gl.bfloat16,) * 8, is_pure=True,
                                                   pack=1))
        else:
            factor = _for_words(factors.index(i), WORDS, PARTS, LAYOUT)
            other = factor
            if GROUP == 16:
                other = _for_words(more_factors.index(i), WORDS, PARTS, LAYOUT)
            y = scaled_numbers(words, less, factor, other, KIND)
    return y.reshape(ROWS, PARTS, 128).permute(1, 0, 2)


@gluon_jit
def scaled_numbers(words, less, factor, other, KIND: tl.constexpr):
    """The numbers of words [rows, words] times scales, those of pairs 0 and 1 and of pairs 2 and 3; of e2m1 divided by
    SUMS. less: what is added to integers"""
    if KIND == "int4":
        pairs = gl.inline_asm_elementwise(SCALED_INT4, TWO, [words, less, factor], dtype=(gl.bfloat16,) * 8,
                                          is_pure=True, pack=1)
    else:
        pairs = gl.inline_asm_elementwise(E2M1, TWO, [words, factor, other], dtype=(gl.bfloat16,) * 8, is_pure=True,
                                          pack=1)
    return in_order(pairs)


@gluon_jit
def _for_words(groups, WORDS: tl.constexpr, PARTS: tl.constexpr, layout: tl.constexpr):
    """A number of each group, [ROWS, groups] in shared memory, for all words of the group."""
    ROW_WARPS: tl.constexpr = gl.num_warps() // PARTS
    COUNT: tl.constexpr = groups.shape[1] // PARTS
    x = groups.load(gl.SliceLayout(2, groups_layout(groups.shape[0], PARTS, ROW_WARPS, COUNT, WORDS)))
    if groups.dtype == gl.bfloat16:
        x = twice(x)
    elif groups.dtype == gl.uint8:
        x = enlarged_scale(x)
    return spread(x, WORDS, PARTS, ROW_WARPS, layout)


@gluon_jit
def spread(x, WORDS: tl.constexpr, PARTS: tl.constexpr, ROW_WARPS: tl.constexpr, layout: tl.constexpr):
    """A word of each group, [rows, groups], for all words of the group. WORDS: in 128 columns, or in less"""
    ROWS: tl.constexpr = x.shape[0]
    COUNT: tl.constexpr = x.shape[1] // PARTS
    ALL: tl.constexpr = groups_layout(ROWS, PARTS, ROW_WARPS, COUNT, WORDS)
    x = gl.convert_layout(x, gl.SliceLayout(2, ALL), assert_trivial=True)
    x, _ = gl.broadcast(x[:, :, None], gl.zeros([ROWS, PARTS * COUNT, WORDS // COUNT], gl.int32, ALL))
    return gl.convert_layout(x.reshape(ROWS, PARTS * WORDS), layout, assert_trivial=True)


@gluon_jit
def linear_kernel(x, weight, scale, zero, row_scale, bias, out, num_rows, num_out, SIZE: tl.constexpr,
                  PART: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
                  ROW_SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
                  STAGES: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
                  PDL: tl.constexpr):
    """Grid (HEIGHT rows of the weight, part of the inner dimension). `few_rows_kernel` of four_bit_kernels.py"""
    HEIGHT: tl.constexpr = ROWS // 2 if GATED else ROWS
    first, begin = gl.program_id(0) * HEIGHT, gl.program_id(1) * PART
    x_row = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, _copies(COLUMNS, 128 * PARTS, 8, gl.num_warps())))
    x_row = x_row[:, None]
    rows = Rows(0, first, num_out)
    sums = _sums(x + x_row.to(gl.int64) * SIZE, x_row < num_rows, Matrix(weight, scale, zero), rows, begin, PART, SIZE,
                 GROUPS, KIND, ZEROS, ROWS, HEIGHT, COLUMNS, PARTS, STAGES, PDL)
    y = _activated(_totals(sums, row_scale, bias, rows, GATED, ROW_SCALE, BIAS), out.dtype.element_ty, ACTIVATION)
    row = first + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, y.type.layout))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, y.type.layout))[None, :]
    gl.store(out + (gl.program_id(1) * num_rows + column).to(gl.int64) * num_out + row, y,
             mask=(row < num_out) & (column < num_rows))


@gluon_jit
def _totals(sums, row_scale, bias, rows, GATED: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr):
    """The total of each row and column, with what is kept of the row: [1, HEIGHT, COLUMNS], or [2, HEIGHT, COLUMNS] of
    gate and up. All threads have equal shares, of gate and up the same."""
    PARTS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[2]
    COUNT: tl.constexpr = 2 if GATED else 1
    HEIGHT: tl.constexpr = sums.shape[1] // COUNT
    SHARES: tl.constexpr = _shares(PARTS, COUNT, HEIGHT, COLUMNS, gl.num_warps())
    y = gl.sum(gl.convert_layout(sums.reshape(PARTS, COUNT, HEIGHT, COLUMNS), SHARES), 0)
    OF_ROW: tl.constexpr = gl.SliceLayout(2, y.type.layout)
    row = gl.minimum(rows.first + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, OF_ROW))[None, :], rows.num_out - 1)
    row = rows.base + row + gl.arange(0, COUNT, layout=gl.SliceLayout(1, OF_ROW))[:, None] * rows.num_out
    if ROW_SCALE:
        y *= gl.load(row_scale + row)[:, :, None]
    if BIAS:
        y += gl.load(bias + row).to(gl.float32)[:, :, None]
    return y


@gluon_jit
def _activated(y, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """[HEIGHT, COLUMNS] of what `_totals` returned."""
    GATED: tl.constexpr = y.shape[0] == 2
    if GATED:
        y, up = gl.split(y.permute(1, 2, 0))
    else:
        y = y.reshape(y.shape[1], y.shape[2])
        up = y
    y = y.to(dtype)
    if ACTIVATION != "":
        y = fused.activate_tile(y, up.to(dtype), GATED, ACTIVATION)
    return y


@gluon_jit
def experts_kernel(x, weight, scale, zero, row_scale, bias, scores, out, counts, pairs, num_rows, OUT: tl.constexpr,
                   SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
                   KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALE: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
                   ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Grid (HEIGHT rows of a weight, COLUMNS pairs of one expert). `experts_kernel` of fused_experts.py. A program of
    up to 8 pairs multiplies 8 columns"""
    HEIGHT: tl.constexpr = ROWS // 2 if ACTIVATION != "" else ROWS
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WAITS: tl.constexpr = PDL and ACTIVATION != ""  # see fused_experts.py
    expert, tile = gl.arange(0, PADDED, layout=LINE), gl.program_id(1)
    kernel.wait_for_previous_kernel(WAITS)
    count = gl.load(counts + expert, mask=expert < EXPERTS, other=0, cache_modifier=".cg")
    end_tile = gl.associative_scan(gl.cdiv(count, COLUMNS), 0, _add)
    at = gl.sum((end_tile <= tile).to(gl.int32), 0)  # the expert of this tile
    if at >= EXPERTS:
        kernel.wait_for_previous_kernel(PDL and not WAITS)
        return
    count = gl.sum(gl.where(expert == at, count, 0), 0)
    tile = tile - gl.sum(gl.where(expert == at, end_tile, 0), 0) + gl.cdiv(count, COLUMNS)
    rows = Rows(at.to(gl.int64) * (OUT if ACTIVATION == "" else 2 * OUT), gl.program_id(0) * HEIGHT, OUT)
    matrix, pairs, count = Matrix(weight, scale, zero), pairs + at * num_rows + tile * COLUMNS, count - tile * COLUMNS
    if COLUMNS > 8 and count <= 8:  # half of the products. A choice within one loop would take too many registers
        _experts_tile(x, matrix, row_scale, bias, scores, out, pairs, count, num_rows, rows, SIZE, GROUPS, KIND, ZEROS,
                      ROW_SCALE, ROWS, 8, PARTS, STAGES, BIAS, ACTIVATION, PDL and not WAITS)
    else:
        _experts_tile(x, matrix, row_scale, bias, scores, out, pairs, count, num_rows, rows, SIZE, GROUPS, KIND, ZEROS,
                      ROW_SCALE, ROWS, COLUMNS, PARTS, STAGES, BIAS, ACTIVATION, PDL and not WAITS)


@gluon_jit
def _experts_tile(x, matrix, row_scale, bias, scores, out, pairs, count, num_rows, rows, SIZE: tl.constexpr,
                  GROUPS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALE: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
                  BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """The results of a program of `experts_kernel`. pairs: the address of the first of `count` pairs, of which COLUMNS
    are this program's"""
    FIRST: tl.constexpr = ACTIVATION != ""
    HEIGHT: tl.constexpr = ROWS // 2 if FIRST else ROWS
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, _copies(COLUMNS, 128 * PARTS, 8, gl.num_warps())))
    exists = column < count
    source = gl.load(pairs + column, mask=exists, other=0, cache_modifier=".cg")
    if FIRST:
        source = source % num_rows
    sums = _sums(x + source.to(gl.int64)[:, None] * SIZE, exists[:, None], matrix, rows, 0, SIZE, SIZE, GROUPS,
                 KIND, ZEROS, ROWS, HEIGHT, COLUMNS, PARTS, STAGES, PDL)
    y = _totals(sums, row_scale, bias, rows, FIRST, ROW_SCALE, BIAS)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, y.type.layout)))
    exists = column < count
    pair = gl.load(pairs + column, mask=exists, other=0)
    if not FIRST:
        y *= gl.load(scores + pair)[None, :][None, :, :]
    y = _activated(y, out.dtype.element_ty, ACTIVATION)
    row = rows.first + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, y.type.layout))[:, None]
    OF_COLUMN: tl.constexpr = gl.SliceLayout(0, y.type.layout)
    pair, exists = gl.convert_layout(pair, OF_COLUMN), gl.convert_layout(exists, OF_COLUMN)
    gl.store(out + pair.to(gl.int64)[None, :] * rows.num_out + row, y, mask=(row < rows.num_out) & exists[None, :])


@gluon_jit
def _add(a, b):
    return a + b
