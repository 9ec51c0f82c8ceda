"""How codes of 4 or 8 bits become numbers in registers, and the product with these. Goes together with four_bits.py.

**The order of codes.** A tensor core takes 16 consecutive numbers of a row from four threads. Thread t (0 to 3) holds
the columns 2t, 2t + 1, 2t + 8 and 2t + 9 in two registers, and the two columns of a register are a pair. The codes of
32 consecutive numbers fill four words of 32 bits. Word t holds the four pairs of thread t, so no number moves to
another thread (integers; e2m1 has another order of bits, below):

    bits of word t    28-31  24-27  20-23  16-19  |  12-15   8-11    4-7    0-3
    column            2t+25  2t+17   2t+9   2t+1  |  2t+24  2t+16   2t+8     2t
    pair                  3      2      1      0  |      3      2      1      0

**Numbers.** Memory limits a product with few rows of x, and soon the instructions that make numbers do. In bfloat16
each instruction therefore makes both numbers of a pair, one in each half of a register. The bits below are one half's:

    integers    The code c, shifted down and masked, replaces the last bits of the bfloat16 128: 128 + c. An FMA
                subtracts 128 and the zero (8, or the group's). Up to 3 instructions a pair; a scale takes one more.
    e2m1        The code s e e m is to become s 0 0 0 0 0 0 e e m 0 0 0 0 0 0. As a bfloat16 this is the number times
                2^-126. Scales, cut at 2^64 (`kept`), are multiplied by 2^62, and the final sums by 2^64, so no step
                overflows.
                The bits of a word have another order, from which a shift and a mask make a pair (below). 13
                instructions for four pairs, with a scale.
    e4m3        Four words have 16 neighbours: pair 0 in the low bytes of the halves, pair 1 in the high ones. A pair's
                bytes become s 0 0 0 0 e e e e m m m 0 0 0 0. As a bfloat16, also of a denormal number, this is the
                number times 2^-120. An FMA multiplies it by 2^120. 9 instructions for two pairs, without a scale.

**The order of e2m1's bits.** In a half of a word, the four bits of pair 0 lie where the number needs them. Pair 2's
lie 6 bits too low: a shift left. Pair 1's lie 4 bits too high: a rotation right, which brings s from the other half.
Pair 3 has the bits that remain: s, the lower e and m lie 2 bits too low, and the upper e, which lies 6 bits too high,
is shifted by itself.

    bit     15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    pair     0   3   3   1   1   1   2   0   0   0   3   3   1   2   2   2
    it is    s   e   s   e   e   m   s   e   e   m   e   m   s   e   e   m

**Scales.** The scale multiplies the sums of a tile of 128 columns if each row has one there: e4m3; integers in groups
of 128 or more, if a program has at most MOST_SCALED_SUMS columns of x. This costs a multiplication for each sum and
tile, so it pays for few sums. Otherwise the scale multiplies the numbers, two in one instruction.
"""
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import kernel
from nanopaged.device.pool import FP8
from nanopaged.optional_triton import HAS_PTX, jit, launch_options, tl
from nanopaged.tiles import cdiv

TILE = 128  # columns, which are those of a block of e4m3
SUMS = tl.constexpr(2.0 ** 64)
MINUS_136 = tl.constexpr(-0x3CF73CF8)  # as bfloat16 in both halves of a word: what is added to 128 + 8 + an integer
MOST_EXPONENT = 127 + 64  # of MXFP4's scales, as it is stored
MOST_SCALED_SUMS = tl.constexpr(32)  # columns of x in a program whose sums are multiplied by scales


def kept(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix and its scales, as a GPU keeps them."""
    return order_codes(weight, scale), scale.clamp(max=MOST_EXPONENT) if scale.dtype is torch.uint8 else scale


def order_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """Words of codes, from bytes of two neighbours, [.., in / 2], or e4m3, [.., in]. Zeros fill the last four words.
    scale: its type tells whether codes are e2m1 or integers"""
    if weight.dtype is FP8:
        return F.pad(weight.view(torch.uint8), (0, -weight.shape[-1] % 16)).unflatten(-1, (-1, 2, 4, 2)).movedim(
            -3, -1).flatten(-4).view(FP8)  # block, t, number, i
    weight = F.pad(weight, (0, -weight.shape[-1] % 16)).unflatten(-1, (-1, 4, 4))  # block, i, t
    low, high = ((weight >> shift & 15).transpose(-1, -2) for shift in (0, 4))  # block, t, i
    if scale.itemsize == 1:  # e2m1
        halves = [_order_bits(*part.unbind(-1), other[..., 1]) for part, other in ((low, high), (high, low))]
    else:
        halves = [part[..., ::2] | part[..., 1::2] << 4 for part in (low, high)]
    return torch.cat(halves, -1).flatten(-3)


def _order_bits(a: Tensor, b: Tensor, c: Tensor, d: Tensor, other_b: Tensor) -> Tensor:
    """The two bytes of a half, of its codes of pairs 0 to 3, and of the other half's code of pair 1."""
    return torch.stack([(a & 3) << 6 | (d & 3) << 4 | other_b & 8 | c & 7,
                        (a & 8) << 4 | (d & 4) << 4 | (d & 8 | b & 7) << 2 | (c & 8 | a & 4) >> 2], -1)


def _instructions(kind: str) -> str:
    """PTX that makes 8 numbers of a word of 4-bit codes, pair i in the outputs 2 i and 2 i + 1. Inputs after the word:
    of integers the summand and, unless `kind` is "int4", the scale; of e2m1 the scales of pairs 0 and 1, and of pairs 2
    and 3. A word of e4m3 makes 4 numbers, and has no other input."""
    times = "0x7b807b80" if kind == "e4m3" else "0x3f803f80"  # 2^120; 1
    lines = [f".reg .b32 word, pair, times, none; mov.b32 times, {times}; mov.b32 none, 0x80008000;"]  # -0
    if kind == "e4m3":
        return "{" + " ".join(lines + [
            f"{move}; shr.b32 pair, word, 4; and.b32 pair, pair, 0x07f007f0; lop3.b32 pair, word, 0x80008000, pair, "
            f"0xea; fma.rn.bf16x2 pair, pair, times, none; mov.b32 {{${2 * i}, ${2 * i + 1}}}, pair;"
            for i, move in enumerate(("shl.b32 word, $4, 8", "mov.b32 word, $4"))]) + "}"
    for i in range(4):
        if kind == "e2m1":
            lines += [("mov.b32 word, $8;", "shf.r.wrap.b32 word, $8, $8, 4;", "shl.b32 word, $8, 6;",
                       "shl.b32 word, $8, 2;")[i], f"and.b32 pair, word, {'0x80c080c0' if i == 3 else '0x81c081c0'};"]
            lines += ["shr.b32 word, $8, 6; lop3.b32 pair, word, 0x01000100, pair, 0xea;"] * (i == 3)  # its upper e
            lines.append(f"fma.rn.bf16x2 pair, pair, ${9 + i // 2}, none;")
        else:
            lines.append(f"shr.b32 word, $8, {i * 4}; lop3.b32 pair, word, 0x000f000f, 0x43004300, 0xea;"
                         "fma.rn.bf16x2 pair, pair, times, $9;")
            lines += ["fma.rn.bf16x2 pair, pair, $10, none;"] * (kind == "scaled int4")
        lines.append(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, pair;")
    return "{" + " ".join(lines) + "}"


INT4, SCALED_INT4, E2M1, E4M3 = (tl.constexpr(_instructions(kind)) for kind in ("int4", "scaled int4", "e2m1", "e4m3"))
ONE, TWO = (tl.constexpr(",".join(["=h"] * 8 + ["r"] * count)) for count in (2, 3))  # parameters, beside the word


class Form(NamedTuple):
    """How a matrix [out, in] is kept. See four_bits.py."""
    scale: torch.dtype
    num_groups: int
    has_zeros: bool = False
    has_row_scale: bool = False
    codes: torch.dtype = torch.uint8  # or FP8
    order: Tensor | None = None

    def num_bytes(self, size: int) -> int:
        """Of a row of `size` columns, as `order_codes` returns it."""
        return cdiv(size, 16) * 16 if self.codes is FP8 else cdiv(size, 32) * 16


def kind_of(codes: torch.dtype, scale: torch.dtype) -> str:
    """What codes and scales mean. A scale of 8 bits goes with e2m1."""
    return "fp8" if codes is FP8 else {torch.uint8: "mxfp4", torch.float8_e4m3fn: "nvfp4"}.get(scale, "int4")


@jit
def products(x, exists, weight, scale, zero, row, first, PART: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
             KIND: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
             PDL: tl.constexpr):
    """PART consecutive numbers of rows of a weight times those of rows of x, in float32: [ROWS, COLUMNS]. x, exists
    [1, COLUMNS]: the address of each row's first neighbour, and whether the row exists. row, first [ROWS, 1]: a row of
    the weight, and its first column. Scales are too narrow for the loop's pipeline: they come UNROLL tiles ahead."""
    GROUP: tl.constexpr = TILE if KIND == "fp8" else SIZE // GROUPS if GROUPS > 1 else 2 ** 30
    IN_SUMS: tl.constexpr = KIND == "fp8" or KIND == "int4" and GROUP >= TILE and x.shape[1] <= MOST_SCALED_SUMS
    # A tile with one scale loads it twice: beside a single one the compiler would move codes through shared memory.
    COUNT: tl.constexpr = 2 if GROUP >= TILE else TILE // GROUP
    CODES: tl.constexpr = 4 if KIND == "fp8" else 8  # of a word
    WORDS: tl.constexpr = (SIZE + 4 * CODES - 1) // (4 * CODES) * 4  # of a row
    word, i = tl.arange(0, TILE // CODES)[None, :], tl.arange(0, TILE)[:, None]
    row, group = row.to(tl.int64), first // GROUP
    at = weight.to(tl.pointer_type(tl.int32)) + row * WORDS + first // CODES + word
    scale, zero, x = scale + row * GROUPS, zero + row * GROUPS, x + i
    sums = tl.zeros([row.shape[0], x.shape[1]], tl.float32)
    factor = _load(scale, group, 0, GROUP, GROUPS, 1 if IN_SUMS else COUNT, TILE)
    next_factor = _load(scale, group, TILE, GROUP, GROUPS, 1 if IN_SUMS else COUNT, TILE)
    shift, next_shift = factor, next_factor
    if ZEROS:
        shift = _load(zero, group, 0, GROUP, GROUPS, COUNT, TILE)
        next_shift = _load(zero, group, TILE, GROUP, GROUPS, COUNT, TILE)
    kernel.wait_for_previous_kernel(PDL)  # no weight depends on it
    for k in tl.range(0, PART, TILE, num_stages=STAGES, loop_unroll_factor=UNROLL):
        if PART % TILE == 0:
            words, columns = tl.load(at + k // CODES), tl.load(x + k, mask=exists, other=0.0)
        else:
            words = tl.load(at + k // CODES, mask=k // CODES + word < WORDS, other=0)
            columns = tl.load(x + k, mask=exists & (k + i < PART), other=0.0)
        later = _load(scale, group, k + UNROLL * TILE, GROUP, GROUPS, 1 if IN_SUMS else COUNT, TILE)
        if IN_SUMS:
            tile = _numbers(words, None, shift, GROUP, KIND, ZEROS, TILE, columns.dtype)
            sums += tl.dot(tile, columns, input_precision="ieee") * factor.to(tl.float32)
        else:
            tile = _numbers(words, factor, shift, GROUP, KIND, ZEROS, TILE, columns.dtype)
            sums = tl.dot(tile, columns, sums, input_precision="ieee")
        factor, next_factor = (next_factor, later) if UNROLL == 2 else (later, later)
        if ZEROS:
            later = _load(zero, group, k + UNROLL * TILE, GROUP, GROUPS, COUNT, TILE)
            shift, next_shift = (next_shift, later) if UNROLL == 2 else (later, later)
    if HAS_PTX and x.dtype.element_ty == tl.bfloat16 and (KIND == "mxfp4" or KIND == "nvfp4"):
        sums *= SUMS
    return sums


@jit
def _load(at, group, k, GROUP: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Scales or zeros of the tile that begins k columns behind `group` [ROWS, 1]: [ROWS, COUNT]. Behind the last group:
    the last one's."""
    group += k // GROUP + (tl.arange(0, COUNT) * (TILE // COUNT) // GROUP)[None, :]
    return tl.load(at + tl.minimum(group, GROUPS - 1))


@jit
def _numbers(words, factor, shift, GROUP: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr,
             dtype: tl.constexpr):
    """A tile [ROWS, TILE] of numbers, times their scales if there is a factor; with PTX, e2m1 also divided by SUMS.
    factor: scales [ROWS, COUNT], or None; shift: zeros [ROWS, COUNT]"""
    if not HAS_PTX or dtype != tl.bfloat16 or KIND == "int4" and GROUP < 32:  # a word of integers has one scale
        return numbers(words, factor, shift, KIND, ZEROS, TILE).to(dtype)
    elif KIND == "fp8":
        return bytes_in_order(tl.inline_asm_elementwise(E4M3, "=h,=h,=h,=h,r", [words], dtype=(tl.bfloat16,) * 4,
                                                         is_pure=True, pack=1))
    elif KIND == "int4":
        minus = tl.full(words.shape, MINUS_136, tl.int32)
        if ZEROS:
            minus = _spread(minus_zero(shift), TILE // 8)
        if factor is None:
            return in_order(tl.inline_asm_elementwise(INT4, ONE, [words, minus], dtype=(tl.bfloat16,) * 8,
                                                       is_pure=True, pack=1))
        else:
            factor = _spread(twice(factor.to(tl.float32)), TILE // 8)
            return in_order(tl.inline_asm_elementwise(SCALED_INT4, TWO, [words, minus, factor],
                                                       dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1))
    else:
        factor = twice(of_scale(factor, KIND) * 2.0 ** 62)
        first, second = factor, factor
        if GROUP == 16:  # pairs 0 and 1, 2 and 3
            first, second = tl.split(factor.reshape(factor.shape[0], factor.shape[1] // 2, 2))
        return in_order(tl.inline_asm_elementwise(
            E2M1, TWO, [words, _spread(first, TILE // 8), _spread(second, TILE // 8)], dtype=(tl.bfloat16,) * 8,
            is_pure=True, pack=1))


@jit
def numbers(words, factor, shift, KIND: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr):
    """`_numbers` in float32, for every type and device. No number is divided by SUMS."""
    if KIND == "fp8":
        code = bytes_in_order((words & 255, words >> 16 & 255, words >> 8 & 255, words >> 24 & 255))
        y = tl.where(code > 127, -of_scale(code, "nvfp4"), of_scale(code, "nvfp4"))
    elif KIND == "int4":
        y = in_order((words & 15, words >> 16 & 15, words >> 4 & 15, words >> 20 & 15, words >> 8 & 15,
                       words >> 24 & 15, words >> 12 & 15, words >> 28 & 15)).to(tl.float32)
        y -= _spread(shift.to(tl.float32), TILE) if ZEROS else 8.0
    else:
        b, d = words >> 4 & 0x0FFFFFFF | words << 28, words << 2 & ~0x01000100 | words >> 6 & 0x01000100
        c = words << 6
        y = in_order((_e2m1(words << 16), _e2m1(words), _e2m1(b << 16), _e2m1(b), _e2m1(c << 16), _e2m1(c),
                       _e2m1(d << 16), _e2m1(d)))
    return y if factor is None else y * _spread(of_scale(factor, KIND), TILE)


@jit
def _e2m1(pair):
    """The number in the upper half."""
    return (pair & -0x7E400000).to(tl.float32, bitcast=True) * 2.0 ** 126  # 0x81C00000


@jit
def in_order(pairs):
    """[ROWS, TILE] of the first and second numbers of pairs 0 to 3 of each word."""
    a, b, c, d, e, f, g, h = pairs
    x = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    ROWS: tl.constexpr = a.shape[0]
    BLOCKS: tl.constexpr = a.shape[1] // 4
    return x.reshape(ROWS, BLOCKS, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, BLOCKS * 32)  # block, t, i, number


@jit
def bytes_in_order(pairs):
    """The same of pairs 0 and 1 of words of four codes."""
    a, b, c, d = pairs
    x = tl.join(tl.join(a, c), tl.join(b, d))
    ROWS: tl.constexpr = a.shape[0]
    BLOCKS: tl.constexpr = a.shape[1] // 4
    return x.reshape(ROWS, BLOCKS, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, BLOCKS * 16)


@jit
def of_scale(scale, KIND: tl.constexpr):
    """In float32. Not every GPU has a type for scales of 8 bits: they are bytes."""
    if KIND == "mxfp4":  # an exponent + 127
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif KIND == "nvfp4":  # e4m3
        return ((scale.to(tl.int32) & 127) << 20).to(tl.float32, bitcast=True) * 2.0 ** 60 * 2.0 ** 60
    else:
        return scale.to(tl.float32)


@jit
def twice(x):
    """x as bfloat16, in both halves of a word."""
    return (x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@jit
def minus_zero(zero):
    """-(128 + zero) as bfloat16, in both halves of a word."""
    return (zero.to(tl.int32) | 0xC300) * 0x10001


@jit
def enlarged_scale(scale):
    """Of MXFP4: the scale, a power of two, times 2^62, as bfloat16 in both halves of a word."""
    return (scale.to(tl.int32) + 62) * 0x800080


@jit
def _spread(x, COLUMNS: tl.constexpr):
    """A number of each group, for all columns of the group."""
    ROWS: tl.constexpr = x.shape[0]
    COUNT: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, :, None], [ROWS, COUNT, COLUMNS // COUNT]).reshape(ROWS, COLUMNS)


@jit
def gate_and_up(x):
    """The two halves of the rows [2 * ROWS, COLUMNS]."""
    return tl.split(x.reshape(2, x.shape[0] // 2, x.shape[1]).permute(1, 2, 0))


def widen(size: int, dtype: torch.dtype, weight: Tensor, scale: Tensor, zero: Tensor | None = None,
          row_scale: Tensor | None = None) -> Tensor:
    """The numbers [.., size] in one launch. All matrices of a step take turns in the same memory."""
    num_out, rows = scale.numel() // max(1, scale.shape[-1]), 32
    out = weight.new_empty(*weight.shape[:-1], size, dtype=dtype)
    widen_kernel[(cdiv(num_out, rows), cdiv(size, TILE))](
        out=out, num_out=num_out, ROWS=rows, TILE=TILE, **arguments(size, weight, scale, zero, row_scale),
        **launch_options(weight.device))
    return out


def empty_matrix(size: int, form: Form, device: torch.device, num_out: int = 0) -> list[Tensor | None]:
    """For a warm-up: a weight of so many rows with `size` columns, and what is kept beside it."""
    return [torch.empty(num_out, columns, dtype=kind, device=device) if kind else None for columns, kind in (
        (form.num_bytes(size), form.codes), (form.num_groups, form.scale),
        (form.num_groups, form.has_zeros and torch.uint8), (1, form.has_row_scale and torch.float32))]


def arguments(size: int, weight: Tensor, scale: Tensor, zero: Tensor | None,
              row_scale: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel that describe a matrix. Its codes and scales of 8 bits become bytes."""
    codes = weight.view(torch.uint8)  # also for what is not there: not every GPU has a type of 8 bits
    return dict(weight=codes, scale=scale.view(torch.uint8) if scale.itemsize == 1 else scale,
                zero=codes if zero is None else zero, row_scale=codes if row_scale is None else row_scale,
                SIZE=size, GROUPS=scale.shape[-1], KIND=kind_of(weight.dtype, scale.dtype),
                ZEROS=zero is not None, ROW_SCALE=row_scale is not None)


@jit
def widen_kernel(weight, scale, zero, row_scale, out, num_out, SIZE: tl.constexpr, GROUPS: tl.constexpr,
                 KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALE: tl.constexpr, ROWS: tl.constexpr,
                 TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (ROWS rows, TILE columns). Waits before it writes: the previous product may still read `out`."""
    GROUP: tl.constexpr = TILE if KIND == "fp8" else SIZE // GROUPS if GROUPS > 1 else 2 ** 30
    COUNT: tl.constexpr = 1 if GROUP >= TILE else TILE // GROUP
    CODES: tl.constexpr = 4 if KIND == "fp8" else 8  # of a word
    WORDS: tl.constexpr = (SIZE + 4 * CODES - 1) // (4 * CODES) * 4  # of a row
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * TILE + tl.arange(0, TILE)
    source, word = tl.minimum(row, num_out - 1).to(tl.int64)[:, None], tl.program_id(1) * (TILE // CODES)
    word += tl.arange(0, TILE // CODES)[None, :]
    words = tl.load(weight.to(tl.pointer_type(tl.int32)) + source * WORDS + word, mask=word < WORDS, other=0)
    group = tl.full([1, 1], tl.program_id(1) * TILE // GROUP, tl.int32)
    factor = _load(scale + source * GROUPS, group, 0, GROUP, GROUPS, COUNT, TILE)
    shift = _load(zero + source * GROUPS, group, 0, GROUP, GROUPS, COUNT, TILE) if ZEROS else factor
    y = numbers(words, factor, shift, KIND, ZEROS, TILE)
    if ROW_SCALE:
        y *= tl.load(row_scale + source)
    kernel.wait_for_previous_kernel(PDL)
    tl.store(out + row.to(tl.int64)[:, None] * SIZE + column[None, :], y.to(out.dtype.element_ty),
             mask=(row < num_out)[:, None] & (column < SIZE)[None, :])
