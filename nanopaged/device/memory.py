"""The KV pool's size and its tensors, and the scales of an fp8 cache. See runner.py for the bytes of a token."""
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.sampler import SamplingNeeds

if TYPE_CHECKING:
    from nanopaged.device.runner import Runner

GIB = 2**30
DEFAULT_CPU_POOL = GIB  # bytes
# For `choose_scales`. An fp8 cache stores numbers up to 448; below 2^-6 they lose precision.
LARGEST_STORED = 64  # the largest K or V of the calibration text is stored as a number up to this one
SMALLEST_SCALED = 2.0**-20  # smaller maxima count as this one: a layer of zeros has a scale, too
CALIBRATION_TOKENS = 512


def allocate(runner: "Runner", num_blocks: int) -> Tensor:
    """The pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]. ValueError: too little memory."""
    c = runner.config
    try:
        return torch.empty(c.num_layers, 2, num_blocks, runner.block_size, c.num_kv_heads, c.head_dim,
                           dtype=runner.kv_dtype, device=runner.device)
    except (RuntimeError, TypeError):  # torch.OutOfMemoryError is a RuntimeError; 10**20 blocks raise a TypeError
        raise no_memory(runner, num_blocks) from None


def allocate_on_host(runner: "Runner", swap_space: float) -> Tensor:
    """The host pool, block by block, as bytes: [num_host_blocks, num_layers, 2, block_size, num_kv_heads, bytes of a
    head]. ValueError: too little memory."""
    num_blocks = int(swap_space * GIB) // runner.block_bytes
    layers, kinds, _, *block = runner.pool.shape
    try:
        return torch.empty(num_blocks, layers, kinds, *block, dtype=torch.uint8,
                           pin_memory=runner.device.type == "cuda" and num_blocks > 0)
    except RuntimeError:
        raise ValueError(f"swap_space of {swap_space} GiB is more memory than the host has; lower swap_space") from None


def one_block(runner: "Runner") -> Tensor:
    """One layer's K, or V, of one block."""
    c = runner.config
    shape = 1, runner.block_size, c.num_kv_heads, c.head_dim
    try:
        return torch.zeros(shape, dtype=runner.kv_dtype, device=runner.device)
    except (RuntimeError, TypeError):
        raise no_memory(runner, 1) from None


def no_memory(runner: "Runner", num_blocks: int) -> ValueError:
    return ValueError(f"a pool of {num_blocks} blocks needs {num_blocks * runner.block_bytes / GIB:.2f} GiB, which "
                      f"{runner.device} does not have; lower num_blocks or block_size")


def choose_num_blocks(runner: "Runner", gpu_memory_utilization: float) -> int:
    """On a CPU 1 GiB or max_num_seqs full sequences, whichever is less; on a GPU the memory that `profile` finds."""
    if runner.device.type == "cpu":
        blocks_per_seq = engine.cdiv(runner.max_model_len, runner.block_size)
        return max(1, min(DEFAULT_CPU_POOL // runner.block_bytes, runner.max_num_seqs * blocks_per_seq))
    return profile(runner, gpu_memory_utilization) // runner.block_bytes


@torch.inference_mode()
def profile(runner: "Runner", gpu_memory_utilization: float) -> int:
    """On a CUDA device: the bytes that the weights and the largest step's activations leave for the pool."""
    block = one_block(runner)
    runner.kv_cache = [(block, block, 1.0, 1.0)] * runner.config.num_layers
    needed = max(peak_of(runner, query_lens) for query_lens in largest_steps(runner))
    needed *= 2 if runner.fused else 1  # CUDA graphs share a memory pool of their own, as large as the largest step
    runner.release_memory()
    free, total = torch.cuda.mem_get_info(runner.device)
    left = int(total * gpu_memory_utilization) - (total - free) - needed
    if left < runner.block_bytes:
        raise ValueError(
            f"no memory is left for the KV pool: {gpu_memory_utilization} of the card's {total / GIB:.1f} GiB is "
            f"{(runner.block_bytes - left) / GIB:.2f} GiB too little for the memory in use ({(total - free) / GIB:.1f} "
            f"GiB), the largest step ({needed / GIB:.1f} GiB) and one block; raise gpu_memory_utilization or lower "
            "max_num_batched_tokens")
    return left


def largest_steps(runner: "Runner") -> tuple[list[int], list[int]]:
    """Query lengths of the largest step with prompts, and of the largest decode step."""
    full, rest = divmod(runner.max_num_batched_tokens, runner.max_model_len)
    prompts = ([runner.max_model_len] * full + [rest] * (rest > 0))[:runner.max_num_seqs]
    return prompts, [1] * min(runner.max_num_seqs, runner.max_num_batched_tokens)


def peak_of(runner: "Runner", query_lens: list[int]) -> int:
    """The peak memory of a step of this shape, in bytes. The step samples as many rows as possible, once plainly, once
    with filters and once greedily. (It has no log probabilities and no edited logits, which few requests want.) The
    step writes no K and V, and its block tables contain only block 0."""
    runner.release_memory()
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    zeros, padding = [0] * num_tokens, [runner.max_num_seqs] * num_seqs
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    sent = runner.send_step([zeros, zeros, [-1] * num_tokens, starts, query_lens, padding])
    sampled = torch.zeros(min(runner.max_num_seqs, num_tokens), dtype=torch.int32, device=runner.device)
    batch = runner._model_batch(sent, sampled, max(query_lens), runner.max_model_len, query_lens.count(1),
                                runner._to_device(runner._query_tiles(query_lens, query_lens)))
    try:
        for needs in (SamplingNeeds(), SamplingNeeds(filters=True), SamplingNeeds(greedy=True)):
            logits = runner.model(batch, runner.kv_cache, runner.kernels)
            runner._sample(logits, sampled + runner.max_num_seqs, sampled, needs)
    except torch.OutOfMemoryError:
        raise ValueError(f"a step of {num_tokens} tokens and {len(sampled)} samples does not fit beside the weights; "
                         "lower max_num_batched_tokens or max_num_seqs") from None
    return torch.cuda.max_memory_allocated(runner.device) - before


@torch.inference_mode()
def choose_scales(runner: "Runner") -> list[tuple[float, float]]:
    """The scales of K and V of each layer for an fp8 cache, powers of two, from the K and V of a random text.

    The text's largest number is stored as at most LARGEST_STORED. Other texts then have a factor of 7 up to 448, where
    numbers are clipped, and 2^12 down to 2^-6, where they lose precision.
    """
    c, length, device = runner.config, min(CALIBRATION_TOKENS, runner.max_model_len), runner.device
    num_blocks = engine.cdiv(length, runner.block_size)
    shape = 2, num_blocks, runner.block_size, c.num_kv_heads, c.head_dim
    cache = [torch.zeros(shape, dtype=runner.dtype, device=device) for _ in range(c.num_layers)]
    ids = torch.randint(c.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    positions = list(range(length))
    sent = runner.send_step([ids, positions, positions, [0, length], [length], [runner.max_num_seqs]])
    no_logits = torch.zeros(0, dtype=torch.int64, device=device)
    batch = runner._model_batch(sent, no_logits, length, length, int(length == 1),
                                runner._to_device(runner._query_tiles([length], [length])))
    batch.block_tables = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    runner.model(batch, [(layer[0], layer[1], 1.0, 1.0) for layer in cache], runner.kernels)
    return [(power_of_two_scale(layer[0]), power_of_two_scale(layer[1])) for layer in cache]


def power_of_two_scale(values: Tensor) -> float:
    """The smallest power of two that divides all values to at most LARGEST_STORED. With broken weights, which give
    values that are not finite, it is 1; every request then ends with an error."""
    largest = values.abs().max().item()
    if not math.isfinite(largest):
        return 1.0
    return 2.0 ** math.ceil(math.log2(max(largest, SMALLEST_SCALED) / LARGEST_STORED))
