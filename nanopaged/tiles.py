"""The constants of kernel launches: tiles, pipeline stages, splits, and the device queries behind them.

Chapter 1 (kernel.py) computes correct attention with any of these numbers; they decide how fast. Autotuning would time
candidates at every start, so small rules stand here instead. Their constants were measured on an H200 (132
multiprocessors, 227 KiB of shared memory for a program, Triton 3.6) with head_dim 128 in bfloat16. Other devices get
tiles that fit their shared memory; `python -m nanopaged.tests.compile_kernels` checks that without having the device.
"""
from functools import lru_cache
from typing import Any

import torch

# The length of a split, see `split_length` in kernel.py: a sixteenth of the context, but MIN_SPLIT to MID_SPLIT tokens,
# and longer where MAX_SPLITS splits of MID_SPLIT would not suffice. Shorter splits cost more in merging than they gain.
# With tiles of 64 tokens:
#
#     context    100    129   2,048   4,096   8,192   16,384   65,536
#     split      128    128     128     256     512      512    2,048
#     splits       1      2      16      16      16       32       32
MIN_SPLIT, MID_SPLIT = 128, 512
MAX_SPLITS = 32

# Programs that share the splits of one context (H200).
MANY_CONTEXTS = 160  # this many (sequence, kv head) pairs fill the device with one program each
WANTED_PROGRAMS = 1024  # with fewer pairs, aim for this many programs in all,
MIN_SHARING = 4  # and for at least this many per pair

# Rows of a prefill tile: (query token, query head) pairs.
LARGE_TILE_M = 256  # Hopper: two warpgroups, each with 64 rows of either half (H200)
TILE_M = 64  # elsewhere
WIDE_TILE_M = 32  # for heads of more than WIDE_ROW bytes
WIDE_ROW = 256  # bytes of one head of one token: head_dim 128 in 16 bits
LARGE_SHARED_MEMORY = 200 * 1024  # bytes; a device with more is a Hopper or later
MIN_DECODE_COLUMNS = 8  # what a tensor core multiplies at once, see `_decode_tile` in kernel.py
# The numbers of sequences for which graphs.py records decode steps, beside the largest number. From 113 sequences on,
# at most an eighth of a recorded step is padding.
DECODE_SIZES = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1024, 64)]
MAX_DECODE_SIZE = 1024  # decode steps of more sequences are not recorded
TOKEN_SIZES = [64, *(2**i for i in range(8, 31))]  # tokens of recorded steps with prompts
FEW_SEQS = 16  # steps with prompts are recorded for this many sequences, and for the largest number of sequences
# On an H200 launching a step of a small model, kernel by kernel, takes at least as long as computing this many tokens.
# A step with prompts is therefore padded in any case if it has no more.
PADDED_ANYWAY = 2048
MIN_DIM = 16  # the shortest inner dimension that tl.dot accepts


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


# --------------------------------------------------------------------------------------------------
# The device
# --------------------------------------------------------------------------------------------------

@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have. The interpreter has no limit; 1 MiB stands for that."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has; on a CPU 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device can start a kernel before the previous one ends: Nvidia's do, from Hopper on.

    AMD's device type is "cuda", too, but torch.version.cuda is None there.
    """
    return device.type == "cuda" and bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (9, 0)


# --------------------------------------------------------------------------------------------------
# Tiles
# --------------------------------------------------------------------------------------------------

@lru_cache
def kernel_constants(num_kv_heads: int, group: int, head_dim: int, block_size: int, sliding_window: int,
                     dtype: torch.dtype, k_strides: tuple, v_strides: tuple) -> dict[str, int | str]:
    """What a model's shape fixes when paged_attention_kernel is compiled.

    The strides of the cache are among these constants, because the kernel computes many addresses.
    """
    return dict(KC_BLOCK=k_strides[0], KC_SLOT=k_strides[1], KC_HEAD=k_strides[2],
                VC_BLOCK=v_strides[0], VC_SLOT=v_strides[1], VC_HEAD=v_strides[2],
                KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=sliding_window,
                DIM_PADDED=max(MIN_DIM, next_power_of_2(head_dim)),
                PRECISION="ieee" if dtype == torch.float32 else "tf32")


@lru_cache
def tile_config(phase: str, group: int, head_dim: int, element_size: int, shared_memory: int,
                cache_element_size: int = 0, max_stages: int = 3) -> dict[str, int]:
    """Tile sizes, warps and pipeline stages of a launch; phase is "decode" or "prefill".

    Shared memory (bytes) holds the queries and, for each stage, a tile of K and a tile of V. If that does not fit,
    stages are given up first, then tile width. TILE_N also decides the order of additions, so it must not depend on
    max_stages: a device always uses the same TILE_N for a model.

    Heads of 512 numbers (Gemma 4) fit in 16 bits: prefill takes 192 KiB on a Hopper, and 96 of the 99 KiB that a block
    has on Ampere and Ada at least. Turing has 64 KiB, which are too few.
    """
    heads, dims = next_power_of_2(group), max(MIN_DIM, next_power_of_2(head_dim))
    num_warps = 4
    if phase == "decode":
        tile_m = max(MIN_DECODE_COLUMNS, heads)
        row = dims * (cache_element_size or element_size)  # bytes of one head of one token
    else:
        row = dims * element_size
        tile_m = max(TILE_M if row <= WIDE_ROW else WIDE_TILE_M, heads)
        if row <= WIDE_ROW and shared_memory > LARGE_SHARED_MEMORY:
            tile_m, num_warps = max(LARGE_TILE_M, heads), 8
        elif dims > 256 and element_size == 2:  # one accumulator; on Hopper two warpgroups share it
            tile_m, num_warps = max(TILE_M if shared_memory > LARGE_SHARED_MEMORY else WIDE_TILE_M, heads), 8
    for tile_n, stages in ((64, max_stages), (64, 3), (64, 2), (32, 2), (32, 1), (16, 1)):
        if row > WIDE_ROW and tile_n * stages > 64:  # the accumulators need the registers, above all in prefill
            continue
        if tile_m * dims * element_size + 2 * tile_n * stages * row <= shared_memory:
            break
    return dict(TILE_M=tile_m, TILE_N=tile_n, num_warps=num_warps, num_stages=stages)


def decode_stages(num_contexts: int, sharing: int, row: int, device: torch.device) -> int:
    """Pipeline stages of decode with `sharing` programs per context; row is the bytes of one head of one token.

    With rows of 256 bytes, three stages leave room for three programs on each multiprocessor (H200, Triton 3.6). If
    there are a few more programs than that, the rest would run alone in a second round. With four stages there is
    room for two programs, each reads further ahead, and two rounds come out nearly even.
    """
    per_multiprocessor = num_contexts / num_multiprocessors(device)
    return 4 if sharing == 1 and row == WIDE_ROW and 3 < per_multiprocessor < 4 else 3


def prefill_config(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """`tile_config` of a prefill launch."""
    return tile_config("prefill", group, head_dim, dtype.itemsize, shared_memory(device))


def tokens_per_tile(group: int, head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype,
                    device: torch.device) -> int:
    """Query tokens in a tile of prefill, as `make_query_tiles` needs it."""
    return prefill_config(group, head_dim, dtype, device)["TILE_M"] // group


def decode_config(num_contexts: int, sharing: int, group: int, head_dim: int, dtype: torch.dtype,
                  cache_dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """`tile_config` of a decode launch with `sharing` programs per context."""
    stages = decode_stages(num_contexts, sharing, head_dim * cache_dtype.itemsize, device)
    return tile_config("decode", group, head_dim, dtype.itemsize, shared_memory(device), cache_dtype.itemsize, stages)


@lru_cache
def store_constants(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """What a model's shape fixes when rotate_and_store_kernel is compiled, and its warps: a program holds a token's q,
    or its k and v (H200)."""
    return dict(BLOCK_SIZE=block_size, HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=head_dim // 2,
                HEADS_PADDED=next_power_of_2(num_heads), KV_PADDED=next_power_of_2(num_kv_heads),
                HALF_PADDED=next_power_of_2(head_dim // 2), num_warps=4 if num_heads * head_dim <= 4096 else 8)


# --------------------------------------------------------------------------------------------------
# Work lists
# --------------------------------------------------------------------------------------------------

@lru_cache(1 << 16)
def split_length(seq_len: int, tile_n: int) -> int:
    """kernel.split_length in Python."""
    sixteenth, least = (cdiv(seq_len, count * tile_n) * tile_n for count in (16, MAX_SPLITS))
    return max(min(max(sixteenth, MIN_SPLIT), MID_SPLIT), least)


def split_bound(max_seq_len: int) -> int:
    """How many splits a context of up to max_seq_len tokens can have."""
    return min(MAX_SPLITS, cdiv(max_seq_len, MIN_SPLIT))


def programs_per_context(num_contexts: int, num_splits: int) -> int:
    """How many programs share the splits of a (sequence, kv head) pair.

    Many pairs fill the device by themselves. Then one program takes all splits of its context, and there is nothing to
    merge afterwards. The result has the same bits either way.
    """
    if num_contexts >= MANY_CONTEXTS:
        return 1
    return min(num_splits, max(MIN_SHARING, cdiv(WANTED_PROGRAMS, num_contexts)))


def make_query_tiles(query_lens: list[int], seq_lens: list[int], tokens_per_tile: int) -> torch.Tensor:
    """Prefill's work list, [n, 2] int32 on the CPU: (sequence, tile of its queries), longest context first.

    A tile takes as long as its context is. Started first, the longest does not run alone at the end. Of contexts that
    differ by less than an eighth or so, those of one sequence stand together, because the L2 cache has no room for the
    K and V of several long sequences. Sequences with one new token belong to the decode launch.
    """
    def rank(entry: tuple[int, int]) -> tuple[int, int, int]:
        seq, tile = entry
        context = seq_lens[seq] - query_lens[seq] + (tile + 1) * tokens_per_tile
        digits = max(0, context.bit_length() - 4)  # all binary digits but the first four
        return -(8 * digits + (context >> digits)), seq, -tile

    tiles = [(seq, tile) for seq, n in enumerate(query_lens) if n > 1 for tile in range(cdiv(n, tokens_per_tile))]
    return torch.tensor(sorted(tiles, key=rank), dtype=torch.int32).view(-1, 2)


def widest_window(config: Any) -> int:
    """The tokens that one token attends to, itself included, at most. 0: some layer has no sliding window."""
    windows = config.sliding_windows
    return max(windows) if windows and all(windows) else 0
