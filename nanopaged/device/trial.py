"""Before the first step: the pool's size. On a GPU the pool takes what the weights and the largest step leave of the
memory, which follows from steps that are tried.
"""
from itertools import accumulate

import torch
from torch import Tensor

from nanopaged import engine, model
from nanopaged.device.pool import FP8, GIB
from nanopaged.device.runner import Runner, StepTensors
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.device.transfer import as_current
from nanopaged.options import feature
from nanopaged.weights.build import memory_for

DEFAULT_CPU_POOL = GIB  # bytes


@torch.inference_mode()
def allocate_pool(runner: Runner, num_blocks: int | None, gpu_memory_utilization: float) -> int:
    """Make the runner's pool and return its number of blocks. ValueError if the memory does not suffice."""
    with as_current(runner.device):
        while runner.compiling:
            runner.compiling.pop().result()
        if not num_blocks:
            num_blocks = int(runner.agree([choose_num_blocks(runner, gpu_memory_utilization)], largest=False)[0])
        pool = runner.pool.allocate(num_blocks)
        scales = [(1.0, 1.0)] * len(pool)
        if runner.kv_dtype is FP8:
            scales = feature("fp8_cache", "kv_cache_dtype").choose_scales(runner)
        runner.kv_cache = [(layer[0], layer[1], *pair) for layer, pair in zip(pool, scales)]
        runner.prepare()
    return num_blocks


def trial_batch(runner: Runner, query_lens: list[int], logits_indices: Tensor, max_seq_len: int,
                ids: list[int] | None = None) -> model.Batch:
    """A step of new sequences of these lengths, in the padding's row. It writes no K and V. With the ids of one text it
    writes them, from slot 0 on."""
    num_tokens = sum(query_lens)
    positions = list(range(num_tokens)) if ids else [0] * num_tokens
    sent = StepTensors.of(runner.send([
        ids or positions, positions, positions if ids else [-1] * num_tokens, [0, *accumulate(query_lens)],
        query_lens, [runner.max_num_seqs] * len(query_lens)]))
    metadata = runner.metadata(query_lens, query_lens)._replace(max_seq_len=max_seq_len)
    return runner.make_batch(sent, logits_indices, None, metadata)


def choose_num_blocks(runner: Runner, gpu_memory_utilization: float) -> int:
    """On a GPU, what gpu_memory_utilization of the card leaves beside the memory in use (weights) and the largest
    step's activations. On a CPU 1 GiB or max_num_seqs full sequences, whichever is less."""
    block_bytes = runner.pool.block_bytes
    if runner.device.type == "cpu":
        blocks_per_seq = engine.cdiv(runner.max_model_len, runner.block_size)
        return max(1, min(runner.pool.num_blocks_in(DEFAULT_CPU_POOL), runner.max_num_seqs * blocks_per_seq))
    blocks = map(runner.pool.one_block, range(runner.config.num_layers))
    runner.kv_cache = [(block, block, 1.0, 1.0) for block in blocks]
    needed = max(peak_of(runner, query_lens) for query_lens in largest_steps(runner))
    needed *= 2 if runner.lookahead else 1  # CUDA graphs have memory of their own, as much as the largest step
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    left = int(total * gpu_memory_utilization) - (total - free) - needed
    if left < block_bytes:
        raise ValueError(
            f"no memory is left for the KV pool: {gpu_memory_utilization} of the card's {total / GIB:.1f} GiB is "
            f"{(block_bytes - left) / GIB:.2f} GiB too little for the memory in use ({(total - free) / GIB:.1f} "
            f"GiB), the largest step ({needed / GIB:.1f} GiB) and one block; raise gpu_memory_utilization or lower "
            "max_num_batched_tokens")
    return runner.pool.num_blocks_in(left)


def largest_steps(runner: Runner) -> tuple[list[int], list[int]]:
    """Query lengths of the largest step with prompts, and of the largest decode step."""
    full, rest = divmod(runner.max_num_batched_tokens, runner.max_model_len)
    prompts = ([runner.max_model_len] * full + [rest] * (rest > 0))[:runner.max_num_seqs]
    return prompts, [1] * min(runner.max_num_samples, runner.max_num_batched_tokens)


def peak_of(runner: Runner, query_lens: list[int]) -> int:
    """The peak memory of a step of this shape, in bytes. It samples for as many sequences as possible, once plainly,
    once with filters and once greedily. (It has no log probabilities and no edited logits, which few requests want.)
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    count = min(runner.max_num_samples, sum(query_lens))
    sampled = torch.zeros(count, dtype=torch.int32, device=runner.device)
    batch = runner.trial(trial_batch(runner, query_lens, sampled, runner.max_model_len))
    with memory_for(f"a step of {sum(query_lens)} tokens and {count} samples does not fit beside the weights; lower "
                    "max_num_batched_tokens or max_num_seqs"):
        for needs in (SamplingNeeds(), SamplingNeeds(filters=True), SamplingNeeds(greedy=True)):
            logits = runner.model(batch, runner.kv_cache, runner.kernels)
            runner.sample(logits, sampled + runner.max_num_seqs, sampled, needs)
    return torch.cuda.max_memory_allocated(runner.device) - before
