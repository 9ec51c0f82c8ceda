"""What the largest step needs of a GPU's memory, and how many blocks of the KV pool the rest has room for."""
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanopaged.device.choices import GIB, no_memory
from nanopaged.device.sampler import SamplingNeeds

if TYPE_CHECKING:
    from nanopaged.device.runner import Runner


def one_block(runner: "Runner") -> Tensor:
    """One layer's K, or V, of one block."""
    c = runner.config
    shape = 1, runner.block_size, c.num_kv_heads, c.head_dim
    try:
        return torch.zeros(shape, dtype=runner.kv_dtype, device=runner.device)
    except (RuntimeError, TypeError):
        raise no_memory(runner, 1) from None


@torch.inference_mode()
def choose_num_blocks(runner: "Runner", gpu_memory_utilization: float) -> int:
    """The blocks that fit into the share of the card that the weights and the largest step's activations leave."""
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
    return left // runner.block_bytes


def largest_steps(runner: "Runner") -> tuple[list[int], list[int]]:
    """Query lengths of the largest step with prompts, and of the largest decode step."""
    full, rest = divmod(runner.max_num_batched_tokens, runner.max_model_len)
    prompts = ([runner.max_model_len] * full + [rest] * (rest > 0))[:runner.max_num_seqs]
    return prompts, [1] * min(runner.max_num_samples, runner.max_num_batched_tokens)


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
    sampled = torch.zeros(min(runner.max_num_samples, num_tokens), dtype=torch.int32, device=runner.device)
    batch = runner._model_batch(sent, sampled, max(query_lens), runner.max_model_len, query_lens.count(1),
                                runner.to_device(runner._query_tiles(query_lens, query_lens)))
    try:
        for needs in (SamplingNeeds(), SamplingNeeds(filters=True), SamplingNeeds(greedy=True)):
            logits = runner.model(batch, runner.kv_cache, runner.kernels)
            runner._sample(logits, sampled + runner.max_num_seqs, sampled, needs)
    except torch.OutOfMemoryError:
        raise ValueError(f"a step of {num_tokens} tokens and {len(sampled)} samples does not fit beside the weights; "
                         "lower max_num_batched_tokens or max_num_seqs") from None
    return torch.cuda.max_memory_allocated(runner.device) - before
