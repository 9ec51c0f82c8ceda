"""`pick` of nanopaged/device/sampler.py in two launches, where plain torch passes over all logits ten times."""
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanopaged import kernel, tiles
from nanopaged.device.runner import Runner
from nanopaged.optional_triton import HAS_PTX, fast_logf, jit, launch_options, tl
from nanopaged.sampling_params import HASH, SMALLEST_TEMPERATURE
from nanopaged.tiles import cdiv

GOLDEN, MIX_1, MIX_2, LOW_1, LOW_2 = (tl.constexpr(number) for number in HASH)
COLDEST, LARGEST = tl.constexpr(SMALLEST_TEMPERATURE), tl.constexpr(3e38)


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """sampler.pick: the best token of each tile, then the best of these."""
    num_rows, size = logits.shape
    tile = min(2048, tiles.next_power_of_2(size))
    num_tiles = cdiv(size, tile)
    best = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    at, out = torch.empty_like(best, dtype=torch.int32), torch.empty_like(position)
    pick_kernel[(num_rows, num_tiles)](
        logits, temperature, seed, position, best, at, logits.stride(0), temperature.stride(0), seed.stride(0), size,
        TILE=tile, **launch_options(logits.device))
    best_of_tiles_kernel[(num_rows,)](best, at, out, num_tiles, TILES=tiles.next_power_of_2(num_tiles), num_warps=1,
                                      **launch_options(logits.device))
    return out


class PickRunner(Runner):
    """A Runner that draws with these kernels."""
    pick = staticmethod(pick)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py."""
    make = partial(torch.empty, device=r.device)
    temperature, seed = make(0, 2, dtype=torch.float32)[:, 0], make(0, 2, dtype=torch.int64)[:, 0]
    yield partial(pick, make(0, r.config.vocab_size, dtype=r.dtype), temperature, seed, make(0, dtype=torch.int64))


@jit
def pick_kernel(logits, temperature, seed, position, best, at, logits_row, temperature_row, seed_row, size,
                TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (logit row, tile of the vocabulary)."""
    kernel.wait_for_previous_kernel(PDL)
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * logits_row + token, mask=token < size, other=-float("inf")).to(tl.float32)
    heat = tl.load(temperature + row * temperature_row)
    key = tl.load(seed + row * seed_row) + tl.load(position + row) * GOLDEN
    key = (key ^ _shift(key, 30)) * MIX_1
    key = (key ^ _shift(key, 27)) * MIX_2
    noise = _gumbel(key ^ _shift(key, 31), token)
    score = tl.where(heat < COLDEST, x, x * (1.0 / tl.maximum(heat, COLDEST)) + noise)
    score = tl.minimum(score, LARGEST)  # finite, so that infinity can say: a logit is NaN or infinite, so no token
    score = tl.where((x == x) & (x < float("inf")), score, float("inf"))
    largest, index = tl.max(score, 0, return_indices=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + out, largest)
    tl.store(at + out, tl.program_id(1) * TILE + index)


@jit
def best_of_tiles_kernel(best, at, out, num_tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    """Grid (logit row,). -1: the largest logit is not finite."""
    kernel.wait_for_previous_kernel(PDL)
    row, i = tl.program_id(0), tl.arange(0, TILES)
    largest, tile = tl.max(tl.load(best + row * num_tiles + i, mask=i < num_tiles, other=-float("inf")), 0,
                           return_indices=True)
    token = tl.load(at + row * num_tiles + tile)
    tl.store(out + row, tl.where(tl.abs(largest) < float("inf"), token, -1).to(tl.int64))


@jit
def _shift(x, BITS: tl.constexpr):
    """A shift to the right that does not copy the sign."""
    return (x.to(tl.uint64) >> BITS).to(tl.int64)


@jit
def _gumbel(key, token):
    """sampler.gumbel of nanopaged/device."""
    x = token.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * LOW_1
    x = (x ^ (x >> 15) ^ (key.to(tl.uint64) >> 32).to(tl.uint32)) * LOW_2
    v = ((x ^ (x >> 16)).to(tl.float32) + 0.5) * 2.0 ** -32
    # -log(1 - v). A small v takes its series, because 1 - v would lose v's digits; the largest v is rounded to 1.
    series = v * (1.0 + v * (0.5 + v * (1 / 3 + v * (0.25 + v * 0.2))))
    return -_log(tl.where(v < 2.0 ** -4, series, -_log(tl.maximum(1.0 - v, 2.0 ** -25))))


@jit
def _log(x):
    """In two instructions; `tl.log` takes twenty. The error is 2^-23 near 1, where the logarithm is small."""
    return fast_logf(x) if HAS_PTX else tl.log(x)
