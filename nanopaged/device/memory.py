"""How many blocks the pool has. On a GPU that follows from what the largest step needs of the memory."""
from collections.abc import Callable

import torch

from nanopaged.device.pool import GIB

DEFAULT_CPU_POOL = GIB  # bytes


def blocks_on_a_cpu(block_bytes: int, blocks_per_seq: int, max_num_seqs: int) -> int:
    """1 GiB or max_num_seqs full sequences, whichever is less."""
    return max(1, min(DEFAULT_CPU_POOL // block_bytes, max_num_seqs * blocks_per_seq))


def blocks_beside(needed: int, block_bytes: int, gpu_memory_utilization: float, device: torch.device) -> int:
    """The blocks that fit into the share of the card that the weights and `needed` bytes leave."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * gpu_memory_utilization) - (total - free) - needed
    if left < block_bytes:
        raise ValueError(
            f"no memory is left for the KV pool: {gpu_memory_utilization} of the card's {total / GIB:.1f} GiB is "
            f"{(block_bytes - left) / GIB:.2f} GiB too little for the memory in use ({(total - free) / GIB:.1f} "
            f"GiB), the largest step ({needed / GIB:.1f} GiB) and one block; raise gpu_memory_utilization or lower "
            "max_num_batched_tokens")
    return left // block_bytes


def largest_steps(max_num_batched_tokens: int, max_model_len: int, max_num_seqs: int,
                  max_num_samples: int) -> tuple[list[int], list[int]]:
    """Query lengths of the largest step with prompts, and of the largest decode step."""
    full, rest = divmod(max_num_batched_tokens, max_model_len)
    prompts = ([max_model_len] * full + [rest] * (rest > 0))[:max_num_seqs]
    return prompts, [1] * min(max_num_samples, max_num_batched_tokens)


@torch.inference_mode()
def peak_of(compute: Callable[[list[int]], object], query_lens: list[int], device: torch.device) -> int:
    """The peak memory of compute(query_lens), in bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        compute(query_lens)
    except torch.OutOfMemoryError:
        raise ValueError(f"a step of {sum(query_lens)} tokens does not fit beside the weights; lower "
                         "max_num_batched_tokens or max_num_seqs") from None
    return torch.cuda.max_memory_allocated(device) - before
