"""The device side of the engine: the model, the pool's tensors, and a step as tensors.

The scheduler thinks in sequences and block ids; the model wants one flat batch. This file makes the one into the
other, runs the forward pass, and samples. It knows how much memory the device has and nothing about scheduling.
"""
import gc
from typing import Iterable

import torch
from torch import Tensor

from kernel import cdiv, make_query_tiles, paged_attention, paged_attention_reference, tile_config, triton
from model import Batch, ModelConfig, build_model
from nanopaged.sampler import SamplingBatch, sample

GIB = 2**30


class Runner:
    """A model on a device, with its KV pool."""

    def __init__(self, config: ModelConfig, tensors: Iterable | None, *, dtype: str, device: str, attention: str,
                 seed: int, block_size: int, max_model_len: int):
        self.config, self.block_size, self.max_model_len = config, block_size, max_model_len
        self.device = _pick_device(device)
        self.dtype = _pick_dtype(dtype, config.torch_dtype, self.device)
        self.attention = _pick_attention(attention, self.device)
        torch.manual_seed(seed)
        self.model = build_model(config, tensors, self.dtype, self.device, max_model_len)
        gc.collect()  # torch's device context leaves reference cycles, which would keep this runner's pool alive after use
        self.kv_cache: list[tuple[Tensor, Tensor]] = []
        self.query_tile = 1  # tokens of a prefill tile, as the kernel cuts them
        if self.attention is paged_attention:
            group = config.num_heads // config.num_kv_heads
            self.query_tile = tile_config("prefill", group, config.head_dim, self.dtype.itemsize)["TILE_M"] // group

    # ---- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of block_size tokens in every layer."""
        c = self.config
        return 2 * c.num_layers * self.block_size * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    def allocate_pool(self, num_blocks: int | None, gpu_memory_utilization: float, max_num_seqs: int,
                      max_num_batched_tokens: int) -> int:
        """Make the pool's tensors and return its number of blocks. ValueError if the memory does not suffice."""
        blocks_per_seq = cdiv(self.max_model_len, self.block_size)
        if num_blocks is None and self.device.type == "cpu":
            num_blocks = max(1, min(GIB // self.block_bytes, max_num_seqs * blocks_per_seq))
        elif num_blocks is None:
            num_blocks = self._profile(gpu_memory_utilization, max_num_seqs, max_num_batched_tokens) // self.block_bytes
        c = self.config
        try:
            pool = torch.empty(c.num_layers, 2, num_blocks, self.block_size, c.num_kv_heads, c.head_dim,
                               dtype=self.dtype, device=self.device)
        except RuntimeError:  # torch.OutOfMemoryError is one
            raise ValueError(f"a pool of {num_blocks} blocks needs {num_blocks * self.block_bytes / GIB:.2f} GiB, which "
                             f"{self.device} does not have; lower num_blocks") from None
        self.kv_cache = [(layer[0], layer[1]) for layer in pool]
        return num_blocks

    def _profile(self, gpu_memory_utilization: float, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Bytes that are left for the pool after the weights and the largest step's activations, on a CUDA device."""
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {gpu_memory_utilization!r}")
        self.kv_cache = [(torch.zeros(1, self.block_size, self.config.num_kv_heads, self.config.head_dim,
                                      dtype=self.dtype, device=self.device),) * 2] * self.config.num_layers
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            self._dummy_step([1] * max_num_seqs, max_num_seqs)
            full, rest = divmod(max_num_batched_tokens, self.max_model_len)
            lengths = ([self.max_model_len] * full + [rest] * (rest > 0))[:max_num_seqs]
            self._dummy_step(lengths, len(lengths))
        except torch.OutOfMemoryError:
            raise ValueError(f"a step of {max_num_batched_tokens} tokens does not fit beside the weights; "
                             "lower max_num_batched_tokens or max_num_seqs") from None
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        left = int(total * gpu_memory_utilization) - (total - free) - peak
        if left < self.block_bytes:
            raise ValueError(
                f"no memory is left for the KV pool: {gpu_memory_utilization} of the card's {total / GIB:.1f} GiB is "
                f"{(self.block_bytes - left) / GIB:.2f} GiB too little for what is in use ({(total - free) / GIB:.1f} GiB), "
                f"the largest step ({peak / GIB:.1f} GiB) and one block; raise gpu_memory_utilization or lower "
                "max_num_batched_tokens")
        return left

    @torch.inference_mode()
    def _dummy_step(self, query_lens: list[int], num_samples: int) -> None:
        """A step of the given shape that writes nothing and reads block 0, however long its context."""
        num_tokens, ints = sum(query_lens), dict(dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, *query_lens], **ints).cumsum(0, dtype=torch.int32)
        batch = Batch(
            input_ids=torch.zeros(num_tokens, **ints), positions=torch.zeros(num_tokens, **ints),
            slot_mapping=torch.full((num_tokens,), -1, **ints),
            block_tables=torch.zeros(len(query_lens), cdiv(self.max_model_len, self.block_size), **ints),
            seq_lens=torch.tensor(query_lens, **ints), query_start_loc=starts,
            logits_indices=torch.arange(num_samples, device=self.device), max_query_len=max(query_lens),
            max_seq_len=self.max_model_len, num_decodes=query_lens.count(1), query_tiles=self._query_tiles(query_lens))
        ones = torch.ones(num_samples, device=self.device)
        settings = SamplingBatch(ones, ones.long(), ones, ones, ones.long(), ones.long(), False, True)
        sample(self.model(batch, self.kv_cache, self.attention), settings)

    # ---- a step

    @torch.inference_mode()
    def launch(self, step) -> Tensor:
        """Compute an engine.Step: the sampled token of each of step.sampled, [num_samples] int64 on the device."""
        batch = self._batch(step)
        if not step.sampled:  # only chunks of prompts: their K and V are all that is wanted
            self.model(batch, self.kv_cache, self.attention)
            return torch.empty(0, dtype=torch.int64)
        return sample(self.model(batch, self.kv_cache, self.attention), self._sampling(step.sampled))

    def _batch(self, step) -> Batch:
        # Sequences with one new token first: the kernel computes those and the others in two launches.
        work = sorted(zip(step.seqs, step.num_tokens), key=lambda pair: pair[1] > 1)
        input_ids, positions, slots, starts, last_row = [], [], [], [0], {}
        for seq, num_tokens in work:
            end = seq.num_computed_tokens
            input_ids += seq.token_ids[end - num_tokens:end]
            for position in range(end - num_tokens, end):
                block = seq.block_table[position // self.block_size]
                cached = position < seq.num_cached_tokens  # in a shared block, and there already
                slots.append(-1 if cached else block * self.block_size + position % self.block_size)
                positions.append(position)
            starts.append(len(input_ids))
            last_row[seq] = len(input_ids) - 1
        width = max(len(seq.block_table) for seq, _ in work)
        query_lens = [num_tokens for _, num_tokens in work]
        return Batch(
            input_ids=self._ints(input_ids), positions=self._ints(positions),
            slot_mapping=self._ints(slots, torch.int64),
            block_tables=self._ints([seq.block_table + [0] * (width - len(seq.block_table)) for seq, _ in work]),
            seq_lens=self._ints([seq.num_computed_tokens for seq, _ in work]), query_start_loc=self._ints(starts),
            logits_indices=self._ints([last_row[seq] for seq in step.sampled]),
            max_query_len=max(query_lens), max_seq_len=max(seq.num_computed_tokens for seq, _ in work),
            num_decodes=query_lens.count(1), query_tiles=self._query_tiles(query_lens))

    def _query_tiles(self, query_lens: list[int]) -> Tensor | None:
        if self.attention is not paged_attention:
            return None
        return make_query_tiles(query_lens, self.query_tile).to(self.device)

    def _sampling(self, seqs) -> SamplingBatch:
        params = [seq.params for seq in seqs]
        floats = {name: torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=self.device)
                  for name in ("temperature", "top_p", "min_p")}
        return SamplingBatch(
            **floats, top_k=self._ints([p.top_k for p in params], torch.int64),
            seed=self._ints([seq.seed for seq in seqs], torch.int64),
            position=self._ints([seq.num_computed_tokens for seq in seqs], torch.int64),
            all_greedy=all(p.temperature == 0 for p in params),
            any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params))

    def _ints(self, values: list, dtype=torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        picked = torch.device("meta")
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    if picked.type == "cuda":
        if not torch.cuda.is_available() or (picked.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA device(s)")
        torch.cuda.set_device(picked.index or 0)  # Triton launches on the current device
    return picked


def _pick_dtype(dtype: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype != "auto" and dtype not in names:
        raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, names))}, not {dtype!r}")
    if dtype != "auto":
        return names[dtype]
    if device.type == "cpu":
        return torch.float32
    if checkpoint_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16  # cards before Ampere
    return checkpoint_dtype


def _pick_attention(attention: str, device: torch.device):
    if attention not in ("auto", "triton", "torch"):
        raise ValueError(f"attention must be 'auto', 'triton' or 'torch', not {attention!r}")
    if attention == "auto":
        attention = "triton" if device.type == "cuda" and triton else "torch"
    return paged_attention if attention == "triton" else paged_attention_reference
