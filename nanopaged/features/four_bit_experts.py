"""Products of experts that keep 4 bits (MXFP4). Goes together with four_bits.py, which reads and describes them.

**Few tokens for each expert** are bound by memory, and soon by the instructions that turn codes into numbers. So the
loop of experts_kernel does this for two codes at once, in 5 instructions. 64 neighbours of a row are 8 words of 32 bits
(`order_codes`): word j has the columns j, 8 + j, .. 56 + j, the first in its lowest bits. Two words side by side then
have two neighbours at the same place, which is what a tensor core takes in one register:

    two words          .. c1 c0 and .. d1 d0
    their first bytes  0 0 0 0 0 0 d1 d0  0 0 0 0 0 0 c1 c0     half a byte each
    bits of c0         s e e m, times 2^12 + 2^6, masked: s 0 0 0 0 0 0 e e m 0 0 0 0 0 0

This is a bfloat16, namely the code's number times 2^-126, and the same for d0. A group's factor has 2^62 in it, and the
sums are multiplied by 2^64, so that no number on the way is too large.

**Many tokens** are bound by the tensor cores, and each weight would be converted for many tiles of them. So a kernel
turns the matrices into 16 bits in front of the product (`widen`). Last bits may differ between the two ways.
"""
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import kernel, tiles
from nanopaged.features.fused_experts import load_part
from nanopaged.optional_triton import INTERPRETED, jit, launch_options, tl
from nanopaged.tiles import cdiv

COMPILED = tl.constexpr(not INTERPRETED)
TILE = 128  # columns; always as many, so that products are added up in the same order
WIDEN_FROM = 128  # tokens of an expert, on average
SUMS = tl.constexpr(2.0 ** 64)


def _instructions() -> str:
    """From two words and the factors of their two groups: 8 pairs of numbers."""
    lines = [".reg .b32 bytes, pair, none; mov.b32 none, 0x80008000;"]  # -0, to be added
    for i in range(8):
        mask, factor = ("0x00f000f0", "0x104") if i % 2 else ("0x000f000f", "0x1040")
        lines += [f"prmt.b32 bytes, $8, $9, 0x0{i // 2 + 4}0{i // 2};"] * (i % 2 == 0) + [
            f"and.b32 pair, bytes, {mask}; mul.lo.u32 pair, pair, {factor}; and.b32 pair, pair, 0x81c081c0;"
            f"fma.rn.bf16x2 ${i}, pair, ${10 + i // 4}, none;"]
    return "{" + " ".join(lines) + "}"


INSTRUCTIONS = tl.constexpr(_instructions())
REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 4))


def as_words(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of two neighbours, [.., in / 2], as words, and scales [.., in / 32]; zeros make a row whole blocks."""
    padding = -weight.shape[-1] % 32
    return order_codes(F.pad(weight, (0, padding))), F.pad(scale, (0, padding // 16))


def order_codes(weight: Tensor) -> Tensor:
    """From bytes of two neighbours to words, and back."""
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).unflatten(-1, (-1, 8, 8)).transpose(-1, -2)
    return (codes[..., ::2] | codes[..., 1::2] << 4).flatten(-3)


def experts_form(num_rows: int, top_k: int, count: int, shared_memory: int) -> dict[str, Any]:
    """`fused_experts.experts_form` for weights in 4 bits. (H200, gpt-oss-20b's shape)"""
    columns = 8 if num_rows <= 8 else 16 if num_rows * top_k <= 8 * count else 32
    is_large, warps = shared_memory > tiles.LARGE_SHARED_MEMORY, {8: 2, 16: 4, 32: 8}[columns]
    return dict(ROWS=128 if is_large and columns > 8 else 64, COLUMNS=columns, TILE=TILE, STAGES=3, num_warps=warps,
                PRODUCTS=products)


def are_many(num_rows: int, top_k: int, count: int) -> bool:
    """Whether so many tokens want matrices in 16 bits."""
    return num_rows * top_k >= WIDEN_FROM * count


def widen(weight: Tensor, scale: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The numbers [.., size], in one launch."""
    out, num_blocks = weight.new_empty(*weight.shape[:-1], 2 * weight.shape[-1], dtype=dtype), weight.numel() // 32
    widen_kernel[(cdiv(num_blocks, 32),)](weight, scale, out, num_blocks, BLOCKS=32, **launch_options(weight.device))
    return out[..., :size].contiguous()


@jit
def widen_kernel(weight, scale, out, num_blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Grid (BLOCKS blocks of 64 columns,). Waits before it writes: the previous product may still read `out`."""
    block, column = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, 64)[None, :]
    block, exists = block[:, None], (block < num_blocks)[:, None]
    words = tl.load(weight.to(tl.pointer_type(tl.int32)) + block * 8 + column % 8, mask=exists, other=0)
    numbers = _number(words >> column // 8 * 4, tl.load(scale + block * 2 + column // 32, mask=exists, other=0))
    kernel.wait_for_previous_kernel(PDL)
    tl.store(out + block * 64 + column, numbers.to(out.dtype.element_ty), mask=exists)


@jit
def _number(code, scale):
    """Of the lowest 4 bits of `code`, in float32."""
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0 ** 126
    return tl.where((code & 8) != 0, -size, size) * (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@jit
def products(sums, up_sums, x_at, weight, scale, row, OUT: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
             STAGES: tl.constexpr, FIRST: tl.constexpr):
    """The loop of experts_kernel: `sums` and `up_sums` [ROWS, COLUMNS] of rows of a weight. Scales are loaded one tile
    ahead: they are too narrow for the loop's pipeline. The gate's products come before up's numbers are made: with the
    numbers of both a thread takes nearly twice the registers."""
    IN_PAIRS: tl.constexpr = COMPILED and x_at.dtype.element_ty == tl.bfloat16
    BLOCKS: tl.constexpr = (SIZE + 63) // 64  # of a row
    word = tl.arange(0, TILE // 8)
    column = word // 8 * 64 + word % 8
    x_at = x_at + column[:, None]
    at = weight.to(tl.pointer_type(tl.int32)) + row[:, None] * (BLOCKS * 8) + word[None, :]
    scale = scale + row[:, None] * (BLOCKS * 2)
    up_at, up_scale = at + OUT * (BLOCKS * 8), scale + OUT * (BLOCKS * 2)
    low, high = _load_scales(scale, 0, BLOCKS, TILE)
    up_low, up_high = low, high
    if FIRST:
        up_low, up_high = _load_scales(up_scale, 0, BLOCKS, TILE)
    for k in tl.range(0, SIZE, TILE, num_stages=STAGES):
        words = load_part(at + k // 8, k // 8 + word[None, :], BLOCKS * 8, TILE // 8)
        next_low, next_high = _load_scales(scale, k + TILE, BLOCKS, TILE)
        gate = _numbers(words, low, high, IN_PAIRS, TILE)
        low, high = next_low, next_high
        for i in tl.static_range(8):
            factors = load_part(x_at + k + 8 * i, k + 8 * i + column[:, None], SIZE, TILE)
            sums = tl.dot(gate[i].to(factors.dtype), factors, sums, input_precision="ieee")
        if FIRST:
            words = load_part(up_at + k // 8, k // 8 + word[None, :], BLOCKS * 8, TILE // 8)
            next_low, next_high = _load_scales(up_scale, k + TILE, BLOCKS, TILE)
            up = _numbers(words, up_low, up_high, IN_PAIRS, TILE)
            up_low, up_high = next_low, next_high
            for i in tl.static_range(8):
                factors = load_part(x_at + k + 8 * i, k + 8 * i + column[:, None], SIZE, TILE)
                up_sums = tl.dot(up[i].to(factors.dtype), factors, up_sums, input_precision="ieee")
    if IN_PAIRS:
        sums, up_sums = sums * SUMS, up_sums * SUMS
    return sums, up_sums


@jit
def _load_scales(scale, k, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Those of the first and of the second 32 columns of each 64 of a tile: [ROWS, TILE / 64]."""
    block = k // 64 + tl.arange(0, TILE // 64)
    at, exists = scale + 2 * block[None, :], (block < BLOCKS)[None, :]
    return tl.load(at, mask=exists, other=0), tl.load(at + 1, mask=exists, other=0)


@jit
def _numbers(words, low, high, IN_PAIRS: tl.constexpr, TILE: tl.constexpr):
    """The words' first numbers, their second ones, and so on: 8 times [ROWS, TILE / 8]."""
    ROWS: tl.constexpr = words.shape[0]
    low, high = _spread(low, ROWS, TILE), _spread(high, ROWS, TILE)
    if IN_PAIRS:
        return tl.inline_asm_elementwise(INSTRUCTIONS, REGISTERS, [words, _factor(low), _factor(high)],
                                         dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    else:
        return (_number(words, low), _number(words >> 4, low), _number(words >> 8, low), _number(words >> 12, low),
                _number(words >> 16, high), _number(words >> 20, high), _number(words >> 24, high),
                _number(words >> 28, high))


@jit
def _spread(scale, ROWS: tl.constexpr, TILE: tl.constexpr):
    """To the 8 words of its columns."""
    return tl.broadcast_to(scale[:, :, None], [ROWS, TILE // 64, 8]).reshape([ROWS, TILE // 8])


@jit
def _factor(scale):
    """A scale times 2^62, in bfloat16; the largest ones are cut."""
    return (tl.minimum(scale.to(tl.int32) + 62, 254) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


PRODUCTS = SimpleNamespace(experts_form=experts_form, are_many=are_many, widen=widen)  # what fused_experts.py calls
