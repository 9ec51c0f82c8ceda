"""The device side of the engine: the model, the pool's tensors, and a step as tensors.

The scheduler thinks in sequences and block ids; the model wants one flat batch. This file makes the one into the
other, runs the forward pass, and samples. It knows how much memory the device has and nothing about scheduling.

What makes it fast on a GPU:

- **Rows.** While a sequence runs it has a row in tensors that stay on the device: its block table, its last token,
  its sampling settings. A step sends its new tokens and where they belong as one message of integers; tables and settings
  only where they have changed.
- **Blocks move in bulk.** Copy-on-write and swapping gather all layers of many blocks at once.
- **The sampled token stays on the device** and is the next step's input there. The host may therefore launch step
  n + 1 before it has read the tokens of step n (`launch` returns a function that reads them).
- **CUDA graphs.** A step launches hundreds of kernels, and a CPU cannot launch them as fast as the GPU ends them. So
  steps of some sizes are recorded once, sampling included, and then replayed whole, with padding: steps of one token
  per sequence, and steps with prompts. What no graph covers is launched kernel by kernel.
"""
import gc
import math
import struct
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial, wraps
from itertools import islice
from typing import Callable, Iterable, Iterator, NamedTuple

import torch
from torch import Tensor

from nanopaged import kernel, model
from nanopaged.arithmetic import cdiv
from nanopaged.device.fused import fuse
from nanopaged.device.garbage import no_garbage_collection
from nanopaged.device.logits import LogitsEditor, Start, top_logprobs
from nanopaged.device.sampler import Sampler, SamplingBatch, mix
from nanopaged.tiles import MANY_CONTEXTS

GIB = 2**30
FP8 = torch.float8_e4m3fn


class Sampled(NamedTuple):
    """What a step computed. Log probabilities of a token: (its own, its rank, ids of the best tokens, theirs)."""
    tokens: list[int]  # of step.sampled
    logprobs: list[tuple | None] | None  # of each of them that wants some
    prompt_logprobs: list[tuple]  # (sequence, position, those of the prompt tokens from there on)


class _Shape(NamedTuple):
    """What a recorded step has room for."""
    num_tokens: int
    num_seqs: int
    num_tiles: int  # entries of the kernel's work list for prompts; 0: one token per sequence, so none

    @property
    def layout(self) -> list[int]:
        """Lengths of the parts of its message: those that `_flatten` returns, and the work list."""
        tokens, seqs, tiles = self
        return [tokens, tokens, tokens, seqs + 1, seqs, seqs, 2 * tiles]


class _Needs:
    """What a batch of sequences wants of the sampler: the most that any of them wants."""

    def __init__(self, seqs=(), editor: LogitsEditor | None = None, greedy: bool = False, filters: bool = False):
        self.greedy = all(seq.params.is_greedy for seq in seqs) if seqs else greedy
        self.filters = any(seq.params.has_filter for seq in seqs) if seqs else filters
        self.edits = bool(seqs) and editor.edits(seq.row for seq in seqs)
        self.processors = [
            (i, seq.params.logits_processors, seq.token_ids[seq.num_prompt_tokens:], partial(setattr, seq, "stop_reason"))
            for i, seq in enumerate(seqs) if seq.params.logits_processors]
        wanted = [seq.num_logprobs for seq in seqs if seq.num_logprobs is not None]
        self.num_logprobs = -1 if -1 in wanted else max(wanted, default=0)


def _on_its_device(method: Callable) -> Callable:
    """Triton launches on the current device, and each thread has its own. Any thread may call an engine, and a thread may call
    engines on several devices, so the current device is set for each call."""
    @wraps(method)
    def call(self, *args, **kwargs):
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return method(self, *args, **kwargs)
    return call


class Runner:
    """A model on a device, with its KV pool."""

    def __init__(self, config: model.ModelConfig, tensors: Iterable | None, *, dtype: str, device: str, attention: str,
                 seed: int, block_size: int | None, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int,
                 kv_cache_dtype: str, enforce_eager: bool):
        self.config, self.max_model_len = config, max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.device = _pick_device(device)
        # No methods: the editor holds one of them, and a reference cycle would keep a deleted engine's memory.
        self._to_device, self._send = partial(_to_device, self.device), partial(_send, self.device)
        # On a GPU a tile of the kernel should lie within one block; a CPU gathers slots, and small blocks share more.
        self.block_size = block_size or (64 if self.device.type == "cuda" else 16)
        self.dtype = _pick_dtype(dtype, config.torch_dtype, self.device)
        self.kv_dtype = self.dtype if kv_cache_dtype == "auto" else FP8
        if self.kv_dtype is FP8 and self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9):
            raise ValueError("kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more (an RTX 4090, L4 or H100); "
                             "use 'auto'")
        self.kernels = _pick_kernels(attention, self.device)
        if self.device.type == "cuda":
            gc.collect()  # an engine that is not used any more may hold most of the card until then
            self.release_memory()
        torch.manual_seed(seed)
        # The torch path asks the device for lengths, which cannot be recorded.
        self.use_graphs = self.device.type == "cuda" and not enforce_eager and self.kernels is kernel.TRITON
        self.kv_cache: list[tuple[Tensor, Tensor, float, float]] = []  # of each layer: K, V and their scales
        # One row for each running sequence, and one that no sequence has, for the padding of a graph's batch. Torch has
        # a faster kernel to gather rows of a multiple of 16 bytes.
        rows, ints = max_num_seqs + 1, dict(dtype=torch.int32, device=self.device)
        try:
            self.block_tables = torch.zeros(rows, 4 * cdiv(max_model_len, 4 * self.block_size), **ints)
        except (RuntimeError, TypeError):
            raise ValueError(f"{self.device} has no memory for the block tables of {max_num_seqs} sequences of {max_model_len} "
                             "tokens; lower max_num_seqs or max_model_len") from None
        self.last_tokens = torch.zeros(rows, **ints)
        self.settings = torch.zeros(rows, SETTINGS_INTS, **ints)  # of sampling, see _settings
        # The sequence whose settings they are, for as long as that is of use to anybody.
        self.owners: list[Callable] = [NOBODY] * rows
        # Triton's kernels are compiled in a thread while weights are loaded and torch's compiler is imported.
        self.compiled = None
        if self.device.type == "cuda" and self.kernels is kernel.TRITON:
            self.compiled = ThreadPoolExecutor(1).submit(self._compile_kernels)
        with no_garbage_collection():
            self.model = model.build_model(config, tensors, self.dtype, self.device, max_model_len)
            self.sampler = Sampler(fused=self.use_graphs)
            self.editor = LogitsEditor(rows, config.vocab_size, self.device, self._send, fused=self.use_graphs)
            if self.use_graphs:
                fuse(self.model)
        self.graphs: dict[_Shape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}  # graph, logits, tokens
        self.query_tile = 1  # tokens of a prefill tile, as the kernel cuts them
        if self.kernels is kernel.TRITON:
            self.query_tile = kernel.tokens_per_tile(config.num_heads // config.num_kv_heads, config.head_dim, self.dtype, self.device)

    # ---- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of block_size tokens in every layer."""
        c = self.config
        return 2 * c.num_layers * self.block_size * c.num_kv_heads * c.head_dim * self.kv_dtype.itemsize

    @_on_its_device
    def allocate_pool(self, num_blocks: int | None, gpu_memory_utilization: float) -> int:
        """Make the pool's tensors and return its number of blocks. ValueError if the memory does not suffice."""
        if self.compiled is not None:
            self._compile()
        blocks_per_seq = cdiv(self.max_model_len, self.block_size)
        if num_blocks is None and self.device.type == "cpu":
            num_blocks = max(1, min(GIB // self.block_bytes, self.max_num_seqs * blocks_per_seq))
        elif num_blocks is None:
            num_blocks = self._profile(gpu_memory_utilization) // self.block_bytes
        c = self.config
        try:
            pool = torch.empty(c.num_layers, 2, num_blocks, self.block_size, c.num_kv_heads, c.head_dim,
                               dtype=self.kv_dtype, device=self.device)
        except (RuntimeError, TypeError):  # torch.OutOfMemoryError is a RuntimeError; 10**20 blocks are a TypeError
            raise self._no_memory(num_blocks) from None
        scales = self._choose_scales() if self.kv_dtype is FP8 else [(1.0, 1.0)] * c.num_layers
        self.kv_cache = [(layer[0], layer[1], *pair) for layer, pair in zip(pool, scales)]
        self.pool = pool.view(torch.uint8)  # the same memory, for moving blocks whatever they hold
        if self.use_graphs:
            self._capture_graphs()
        return num_blocks

    def _one_block(self) -> Tensor:
        """What a block has of one layer's K, or of its V. ValueError if there is no memory for it."""
        c = self.config
        try:
            return torch.zeros(1, self.block_size, c.num_kv_heads, c.head_dim, dtype=self.kv_dtype, device=self.device)
        except (RuntimeError, TypeError):
            raise self._no_memory(1) from None

    def _no_memory(self, num_blocks: int) -> ValueError:
        return ValueError(f"a pool of {num_blocks} blocks needs {num_blocks * self.block_bytes / GIB:.2f} GiB, which "
                          f"{self.device} does not have; lower num_blocks or block_size")

    @torch.inference_mode()
    def _choose_scales(self) -> list[tuple[float, float]]:
        """Scales of K and V for an fp8 cache, a power of two for each layer: such that the largest number that a random
        text brings about is stored as one of at most 64. That leaves a factor of 7 for other texts before 448, where
        numbers are cut off, and 2^12 below it before 2^-6, where they begin to lose digits."""
        c, length = self.config, min(512, self.max_model_len)
        num_blocks = cdiv(length, self.block_size)
        cache = [torch.zeros(2, num_blocks, self.block_size, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)
                 for _ in range(c.num_layers)]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(c.vocab_size, (length,), generator=generator).tolist()
        message = self._send([ids, range(length), range(length), [0, length], [length], [self.max_num_seqs]])
        batch = self._batch(message, torch.zeros(0, dtype=torch.int64, device=self.device), length, length, int(length == 1),
                            self._to_device(self._query_tiles([length], [length])))
        batch.block_tables = torch.arange(num_blocks, dtype=torch.int32, device=self.device)[None]
        self.model(batch, [(*layer, 1.0, 1.0) for layer in cache], self.kernels)
        largest = [[part.abs().max().item() for part in layer] for layer in cache]
        # With broken weights there is no scale; each request will then end with an error.
        return [tuple(2.0 ** math.ceil(math.log2(max(x, 2.0**-20) / 64)) if math.isfinite(x) else 1.0 for x in pair)
                for pair in largest]

    @_on_its_device
    def allocate_host_pool(self, swap_space: float) -> int:
        """Memory on the host for the blocks of preempted sequences, swap_space GiB; its number of blocks. ValueError if
        there is not so much."""
        num_blocks = int(swap_space * GIB) // self.block_bytes
        layers, kinds, _, *block = self.pool.shape
        try:
            self.host_pool = torch.empty(num_blocks, layers, kinds, *block, dtype=torch.uint8,
                                         pin_memory=self.device.type == "cuda" and num_blocks > 0)
        except RuntimeError:
            raise ValueError(f"swap_space of {swap_space} GiB is more host memory than can be had; lower it") from None
        return num_blocks

    @torch.inference_mode()
    def _profile(self, gpu_memory_utilization: float) -> int:
        """Bytes that are left for the pool after the weights and the largest step's activations, on a CUDA device."""
        block = self._one_block()
        self.kv_cache = [(block, block, 1.0, 1.0)] * self.config.num_layers
        needed = max(self._peak_of(step) for step in self._largest_steps())
        needed *= 2 if self.use_graphs else 1  # graphs have memory of their own, shared between them: that of the largest step
        self.release_memory()
        free, total = torch.cuda.mem_get_info(self.device)
        left = int(total * gpu_memory_utilization) - (total - free) - needed
        if left < self.block_bytes:
            raise ValueError(
                f"no memory is left for the KV pool: {gpu_memory_utilization} of the card's {total / GIB:.1f} GiB is "
                f"{(self.block_bytes - left) / GIB:.2f} GiB too little for what is in use ({(total - free) / GIB:.1f} GiB), "
                f"the largest step ({needed / GIB:.1f} GiB) and one block; raise gpu_memory_utilization or lower "
                "max_num_batched_tokens")
        return left

    def _largest_steps(self) -> tuple[list[int], list[int]]:
        """Query lengths of the largest step with prompts, and of the largest decode step."""
        full, rest = divmod(self.max_num_batched_tokens, self.max_model_len)
        prompts = ([self.max_model_len] * full + [rest] * (rest > 0))[:self.max_num_seqs]
        return prompts, [1] * min(self.max_num_seqs, self.max_num_batched_tokens)

    def _peak_of(self, query_lens: list[int]) -> int:
        """Bytes that a step of this shape takes at its peak, as many rows sampled as there can be, plainly, with
        filters and greedily. (Log probabilities and edited logits are not among it: few ask for them.) It writes nothing, and its
        tables point at block 0 throughout."""
        self.release_memory()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        num_seqs, num_tokens = len(query_lens), sum(query_lens)
        zeros, padding = [0] * num_tokens, [self.max_num_seqs] * num_seqs
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        message = self._send([zeros, zeros, [-1] * num_tokens, starts, query_lens, padding])
        sampled = torch.zeros(min(self.max_num_seqs, num_tokens), dtype=torch.int32, device=self.device)
        batch = self._batch(message, sampled, max(query_lens), self.max_model_len, query_lens.count(1),
                            self._to_device(self._query_tiles(query_lens, query_lens)))
        try:
            for needs in (_Needs(), _Needs(filters=True), _Needs(greedy=True)):
                self._sample(self.model(batch, self.kv_cache, self.kernels), sampled + self.max_num_seqs, sampled, needs)
        except torch.OutOfMemoryError:
            raise ValueError(f"a step of {num_tokens} tokens and {len(sampled)} samples does not fit beside the weights; lower "
                             "max_num_batched_tokens or max_num_seqs") from None
        return torch.cuda.max_memory_allocated(self.device) - before

    def release_memory(self) -> None:
        """Give back what torch keeps for later allocations."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- compiling, on a CUDA device

    @no_garbage_collection()
    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile what steps will need: what `fuse` has torch compile, by steps whose attention does nothing; Triton's kernels
        are on their way in a thread."""
        if self.use_graphs:
            self.kernels, self.kv_cache = IDLE, [(None, None, 1.0, 1.0)] * self.config.num_layers
            # The largest first: torch tries a few shapes for a kernel, and keeps what is best at its first call. One
            # row and few rows have kernels of their own.
            for query_lens in (*self._largest_steps(), [1, 1], [1]):
                if len(query_lens) <= self.max_num_seqs:
                    self._peak_of(query_lens)
            self.kernels = kernel.TRITON
        self.compiled.result()

    @_on_its_device
    def _compile_kernels(self) -> None:
        """Call Triton's kernels in each of their forms, with nothing to do."""
        c, most = self.config, min(self.max_num_seqs, 1024)
        rows, make, ints = max(2, most), partial(torch.zeros, device=self.device), dict(dtype=torch.int32, device=self.device)
        cache, lens, starts, tiles = self._one_block(), make(rows, **ints), make(rows + 1, **ints), torch.full((1, 2), -1, **ints)
        norm = make(c.head_dim, dtype=self.dtype) if c.qk_norm else None
        q = kernel.TRITON.rotate_and_store(  # slots of -1: nothing is written
            make(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=self.dtype), c.num_heads,
            None if c.learned_positions else make(rows, c.head_dim), norm, norm, c.norm_eps, cache, cache, lens - 1)
        for window in set(c.sliding_windows or [0]):
            kernel.TRITON.attention(q[:2], cache, cache, self.block_tables[:1], lens[:1], starts[:2], c.head_dim ** -0.5,
                             max_query_len=2, max_seq_len=2, sliding_window=window, num_decodes=0, query_tiles=tiles)
            for longest in (1, self.max_model_len):
                for count in (count for count in {most, *GRAPH_SIZES} if count <= most):
                    kernel.TRITON.attention(q[:count], cache, cache, self.block_tables[:count], lens[:count], starts[:count + 1],
                                     c.head_dim ** -0.5, max_query_len=1, max_seq_len=longest, sliding_window=window)

    # ---- a step

    @_on_its_device
    @torch.inference_mode()
    def launch(self, step) -> Callable[[], "Sampled"]:
        """Start computing an engine.Step; the function returned waits for it and gives what came of it."""
        self._move_blocks(step)
        self._update_rows(step)
        # Sequences with one new token first: the kernel computes those and the others in two launches. Among them the
        # longest first: what takes longest should not start last and run on alone.
        work = sorted(zip(step.seqs, step.num_tokens), key=lambda pair: -pair[0].num_computed_tokens if pair[1] == 1 else 1)
        parts = self._flatten(work)
        prompts = list(_prompt_parts(work, parts[3]))
        sampling = set(step.sampled)
        indices = [i for i, (seq, _) in enumerate(work) if seq in sampling]
        sampled = [work[i][0] for i in indices]
        needs = _Needs(sampled, self.editor)
        query_lens = [num_tokens for _, num_tokens in work]
        shape = None if prompts else self.graph_shape(query_lens, parts[4])
        if shape is not None:
            tokens, logits = self._replay(shape, parts, query_lens, indices, needs)
        else:
            tokens, logits = self._run(parts, query_lens, indices, prompts, needs)
        place = {seq: i for i, seq in enumerate(sampled)}
        order = [place[seq] for seq in step.sampled]
        # Log probabilities, of the rows that want some; mostly there are none.
        rows, of_rows, of_prompts = [i for i in order if sampled[i].num_logprobs is not None], (), ()
        if rows:
            index = self._send([rows])[0]
            of_rows = top_logprobs(logits.index_select(0, index), tokens.index_select(0, index).clamp(min=0), needs.num_logprobs)
        if prompts:
            ids = [token for part in prompts for token in part.seq.token_ids[part.first:part.first + part.count]]
            wanted = [part.seq.params.prompt_logprobs for part in prompts]
            of_prompts = top_logprobs(logits[len(sampled):], self._send([ids])[0], -1 if -1 in wanted else max(wanted))
        read = _reader(tokens, *of_rows, *of_prompts)

        def read_all() -> Sampled:
            tokens, *lists = read()
            logprobs = {i: _only(sampled[i].num_logprobs, *found) for i, found in zip(rows, zip(*lists[:4]))}
            prompt_logprobs = zip(*lists[-4:])
            return Sampled([tokens[i] for i in order], [logprobs.get(i) for i in order] if rows else None,
                           [(part.seq, part.first, [_only(part.seq.params.prompt_logprobs, *found)
                                                    for found in islice(prompt_logprobs, part.count)]) for part in prompts])

        return read_all

    def _move_blocks(self, step) -> None:
        """Blocks to the host, copies within the pool, and blocks from the host, before anything is written. In this order: a
        block may be copied or moved out, be free, and be taken for one that comes in."""
        most = max(1, MOST_BYTES_MOVED // self.block_bytes)  # at once: they are gathered in between
        for start in range(0, len(step.swaps_out), most):
            blocks, host_blocks = map(list, zip(*step.swaps_out[start:start + most]))
            gathered = self.pool.index_select(2, self._send([blocks])[0]).movedim(2, 0).contiguous()
            for i, host, count in _runs(host_blocks):
                self.host_pool[host:host + count].copy_(gathered[i:i + count], non_blocking=True)
        if step.copies:
            sources, copies = self._send(list(map(list, zip(*step.copies))))
            self.pool.index_copy_(2, copies.long(), self.pool.index_select(2, sources))
        for start in range(0, len(step.swaps_in), most):
            host_blocks, blocks = map(list, zip(*step.swaps_in[start:start + most]))
            gathered = torch.empty(len(blocks), *self.host_pool.shape[1:], dtype=torch.uint8, device=self.device)
            for i, host, count in _runs(host_blocks):
                gathered[i:i + count].copy_(self.host_pool[host:host + count], non_blocking=True)
            self.pool.index_copy_(2, self._send([blocks])[0].long(), gathered.movedim(0, 2))

    def _update_rows(self, step) -> None:
        """Tell the device what is new in the rows of this step's sequences: table entries, and settings of new ones."""
        width, cells, blocks, rows, settings, starts = self.block_tables.shape[1], [], [], [], [], []
        for seq in step.seqs:
            if seq.num_sent_blocks < len(seq.block_table):
                if self.owners[seq.row]() is not seq:
                    self.owners[seq.row] = weakref.ref(seq)
                    rows.append(seq.row)
                    settings += _settings(seq)
                    n = seq.num_prompt_tokens
                    starts.append(Start(seq.row, seq.params, seq.token_ids[:n], seq.token_ids[n:], seq.stop_token_ids, seq.bad_words))
                first = seq.row * width
                cells += range(first + seq.num_sent_blocks, first + len(seq.block_table))
                blocks += [max(block, 0) for block in seq.block_table[seq.num_sent_blocks:]]  # a NULL is never read
                seq.num_sent_blocks = len(seq.block_table)
        if starts:  # a sequence that has left its row loses what the editor knows of it
            free_rows = [row for row, owner in enumerate(self.owners) if owner() is None or owner().row != row]
            for row in free_rows:
                self.owners[row] = NOBODY
            self.editor.start(starts, free_rows)
        if cells:
            cells, blocks, rows, settings = self._send([cells, blocks, rows, settings])
            self.block_tables.view(-1)[cells] = blocks
            if len(rows):
                self.settings[rows] = settings.view(-1, SETTINGS_INTS)

    def forget_rows(self, seqs) -> None:
        """A step failed half-way: whatever the rows of its sequences hold now is sent again."""
        for seq in seqs:
            self.owners[seq.row] = NOBODY

    def _flatten(self, work) -> list[list[int]]:
        """The step as lists: input ids, positions and slots of its tokens; starts, lengths and rows of its sequences."""
        input_ids, positions, slots, starts, lens, rows = [], [], [], [0], [], []
        size = self.block_size
        for seq, num_tokens in work:
            end, known = seq.num_computed_tokens, seq.token_ids
            if num_tokens == 1:
                position = end - 1
                # A token that is not known here yet is the last one sampled in the row.
                input_ids.append(known[position] if position < len(known) else -1)
                positions.append(position)
                # In a shared block a token's K and V are there already, and are not written again.
                cached = position < seq.num_held_tokens
                slots.append(-1 if cached else seq.block_table[position // size] * size + position % size)
            else:
                start = end - num_tokens
                input_ids += known[start:end]
                positions += range(start, end)
                for index in range(start // size, cdiv(end, size)):
                    offset = seq.block_table[index] * size - index * size  # from position to slot
                    slots += range(max(start, index * size) + offset, min(end, (index + 1) * size) + offset)
            starts.append(len(input_ids))
            lens.append(end)
            rows.append(seq.row)
        return [input_ids, positions, slots, starts, lens, rows]

    def _run(self, parts: list[list[int]], query_lens: list[int], indices: list[int], prompts: list[tuple],
             needs: "_Needs") -> tuple[Tensor, Tensor]:
        """The step kernel by kernel; the tokens of the sequences at `indices`, [num_samples], and the logits of these and
        of the prompts."""
        rows = [parts[3][i + 1] - 1 for i in indices]
        for part in prompts:
            rows += range(part.row, part.row + part.count)
        *message, at, rows = self._send([*parts, indices, rows])
        batch = self._batch(message, rows, max(query_lens), max(parts[4]), query_lens.count(1),
                            self._to_device(self._query_tiles(query_lens, parts[4])), at)
        logits = self.model(batch, self.kv_cache, self.kernels)
        if not indices:
            return torch.empty(0, dtype=torch.int64, device=self.device), logits
        return self._sample(logits[:len(indices)], message[5].index_select(0, at), batch.seq_lens.index_select(0, at), needs), logits

    def _batch(self, message: list[Tensor], logits_indices: Tensor | None, max_query_len: int, max_seq_len: int,
               num_decodes: int, query_tiles: Tensor | None, sampled: Tensor | None = None) -> model.Batch:
        input_ids, positions, slots, starts, lens, rows = message
        # Only sequences with one new token can have one that is not known on the host, and they come first.
        ones, rest = input_ids[:num_decodes], input_ids[num_decodes:]
        ones = torch.where(ones < 0, self.last_tokens.index_select(0, rows[:num_decodes]), ones)
        input_ids = torch.cat([ones, rest]) if len(rest) else ones
        return model.Batch(input_ids, positions, slots, self.block_tables.index_select(0, rows), lens, starts, logits_indices,
                     max_query_len, max_seq_len, num_decodes, query_tiles, sampled)

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: "_Needs") -> Tensor:
        """One token for each row of logits, kept as its sequence's last one; -1 where there are no numbers to choose from."""
        edits = needs.edits or needs.processors
        if edits:
            logits = self.editor(logits, rows, positions, needs.processors)
        if len(rows) == 1 and self.use_graphs:  # twice: for a single row torch would compile the sampler again, two seconds
            logits, positions = torch.cat([logits, logits]), torch.cat([positions, positions])
        # [R, SETTINGS_INTS], seen as what `_settings` packed
        settings = self.settings.index_select(0, rows.expand(len(logits)))
        floats, longs = settings.view(torch.float32), settings.view(torch.int64)
        tokens = self.sampler(logits, SamplingBatch(
            temperature=floats[:, 0], top_p=floats[:, 1], min_p=floats[:, 2], seed=longs[:, 2], top_k=longs[:, 3],
            position=positions.long(),
            all_greedy=needs.greedy, any_filter=needs.filters))[:len(rows)]
        usable = tokens.clamp(min=0)
        if edits:
            self.editor.add(rows, usable)
        self.last_tokens.index_copy_(0, rows.long(), usable.int())
        return tokens

    def _query_tiles(self, query_lens: list[int], seq_lens: list[int]) -> Tensor:
        """The kernel's work list for prompts, on the host. Torch needs none."""
        if self.kernels is not kernel.TRITON:
            return torch.empty(0, 2, dtype=torch.int32)
        return kernel.make_query_tiles(query_lens, seq_lens, self.query_tile)

    # ---- CUDA graphs

    def graph_shape(self, query_lens: list[int], seq_lens: list[int]) -> _Shape | None:
        """The smallest recorded step with room for one of these lengths; None if it is better launched kernel by kernel."""
        num_tokens, decodes = sum(query_lens), [n for query_len, n in zip(query_lens, seq_lens) if query_len == 1]
        only_decodes = len(decodes) == len(query_lens)
        shape = min((shape for shape in self.graphs if (shape.num_tiles == 0) == only_decodes
                     and shape.num_tokens >= num_tokens and shape.num_seqs >= len(query_lens)), default=None)
        if shape and not only_decodes:
            if PADDED_ANYWAY < num_tokens < shape.num_tokens * 7 / 8:
                return None
            # With room for many sequences it has one program for each context and kv head in decode attention. Long contexts
            # of which there are few take too long so.
            if decodes and max(decodes) > 4096 and len(decodes) < MANY_CONTEXTS / self.config.num_kv_heads <= shape.num_seqs:
                return None
        return shape

    @no_garbage_collection()
    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Record decode steps of up to 1,024 sequences, padded by an eighth at most from 113 on, and steps with prompts."""
        most_tokens, most_seqs = self.max_num_batched_tokens, min(self.max_num_seqs, self.max_num_batched_tokens, 1024)
        decodes = [_Shape(size, size, 0) for size in {most_seqs} | {size for size in GRAPH_SIZES if size < most_seqs}]
        # Where sequences are few, logits are computed, and sampled from, for so many only.
        mixed = [_Shape(size, seqs, size // self.query_tile + seqs)
                 for size in {most_tokens} | {size for size in TOKEN_SIZES if size < most_tokens}
                 for seqs in {min(size, most_seqs, count) for count in (FEW_SEQS, most_seqs)}]
        shapes = sorted(decodes + mixed, reverse=True)  # the largest first: the others fit into its memory
        # Recordings compute nothing: slot -1 writes nothing, and row and query length 0 are nobody's.
        self.graph_input = torch.zeros(max(sum(shape.layout) for shape in shapes), dtype=torch.int32, device=self.device)
        self.graph_logits = torch.empty(most_seqs, self.config.vocab_size, dtype=self.dtype, device=self.device)
        # Without a stream of its own torch.cuda.graph takes one of the first device that it recorded on.
        pool, stream = None, torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        for shape in shapes:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits, tokens = self._static_step(shape)
            pool = pool or graph.pool()
            self.graphs[shape] = graph, logits, tokens

    def _static_step(self, shape: _Shape) -> tuple[Tensor, Tensor]:
        """A step of this shape as the graph input has it, in which every sequence samples after its last token: their
        logits and tokens."""
        *message, tiles = self.graph_input[:sum(shape.layout)].split(shape.layout)
        ends, seqs = None, None
        if shape.num_tiles:
            ends, seqs = (message[3][1:] - 1).clamp(min=0), torch.arange(shape.num_seqs, device=self.device)
        # The longest query is only asked whether it is one token or more; the longest context may be any.
        batch = self._batch(message, ends, 2 if shape.num_tiles else 1, self.max_model_len, shape.num_seqs, tiles.view(-1, 2), seqs)
        logits = self.model(batch, self.kv_cache, self.kernels, out=self.graph_logits[:shape.num_seqs])
        return logits, self._sample(logits, message[5], batch.seq_lens, _Needs())

    def _replay(self, shape: _Shape, parts: list[list[int]], query_lens: list[int], indices: list[int],
                needs: "_Needs") -> tuple[Tensor, Tensor]:
        """`_run` by a graph, padded with tokens of no slot and rows of no sequence: no query, no length."""
        num_seqs = len(query_lens)
        tiles = self._query_tiles(query_lens, parts[4]).flatten().tolist() if shape.num_tiles else []
        for part, length, filler in zip([*parts, tiles], shape.layout, (0, 0, -1, len(parts[0]), 0, self.max_num_seqs, -1)):
            part += [filler] * (length - len(part))
        message = _integers([*parts, tiles])
        self.graph_input[:len(message)].copy_(message.pin_memory() if self.device.type == "cuda" else message, non_blocking=True)
        graph, logits, tokens = self.graphs[shape]
        graph.replay()
        *_, lens, rows, _ = self.graph_input[:len(message)].split(shape.layout)
        if not indices:
            return tokens[:0], logits[:0]
        if len(indices) == num_seqs:
            tokens, logits, lens, rows = (tensor[:num_seqs] for tensor in (tokens, logits, lens, rows))
        else:
            at = self._send([indices])[0]
            tokens, logits, lens, rows = (tensor.index_select(0, at) for tensor in (tokens, logits, lens, rows))
        if needs.filters or needs.edits or needs.processors:  # the graph draws from the plain logits: draw again
            tokens = self._sample(logits, rows, lens, needs)
        return tokens, logits


# In place of kernel.TRITON: attention that does nothing.
IDLE = kernel.Kernels(lambda qkv, num_heads, *_: qkv[:, :num_heads].contiguous(), lambda q, *_, **__: q)
# Recorded sizes: sequences of decode steps, tokens of steps with prompts.
GRAPH_SIZES = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1024, 64)]
TOKEN_SIZES = [64, *(2**i for i in range(8, 31))]
FEW_SEQS = 16  # steps with prompts are recorded for so many sequences, and for as many as there can be
PADDED_ANYWAY = 2048  # to launch a step takes as long as to compute so many tokens of a small model, or longer
SETTINGS_INTS = 8
MOST_BYTES_MOVED = 2**28
NOBODY = lambda: None  # noqa: E731  in place of a weak reference to a sequence
MANY_LOGPROBS = 1024  # of one token: with more they stay in tensors


def _integers(parts: list[list[int]]) -> Tensor:
    """Lists of integers, one after another, as one int32 tensor on the host."""
    return torch.frombuffer(array("i", [value for part in parts for value in part]), dtype=torch.int32)


def _send(device: torch.device, parts: list[list[int]]) -> list[Tensor]:
    """Lists of integers as int32 tensors on the device, in one transfer that the host does not wait for."""
    return list(_to_device(device, _integers(parts)).split([len(part) for part in parts]))


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy from pinned memory waits for nothing: one from ordinary memory would wait for the step under way."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _settings(seq) -> tuple[int, ...]:
    """A sequence's sampling settings as SETTINGS_INTS 32-bit integers: three floats and a gap, two 64-bit integers."""
    p = seq.params
    return struct.unpack("8i", struct.pack("fff4xqq", p.temperature, p.top_p, p.min_p, mix(seq.seed), min(p.top_k, 2**31 - 1)))


class _PromptPart(NamedTuple):
    """Prompt tokens whose log probabilities a step computes."""
    seq: object
    first: int  # position of the first
    count: int
    row: int  # of the step's tokens, the one that predicts the first


def _prompt_parts(work, starts: list[int]) -> Iterator[_PromptPart]:
    """For sequences that want them: the token at each position predicts the next one."""
    for (seq, num_tokens), row in zip(work, starts):
        if seq.wants_prompt_logprobs:
            start = seq.num_computed_tokens - num_tokens
            count = min(seq.num_computed_tokens, seq.num_prompt_tokens - 1) - start
            if count > 0:
                yield _PromptPart(seq, start + 1, count, row)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive numbers: (index, first number, count)."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield start, numbers[start], end - start
            start = end


def _only(count: int, own: float, rank: int, ids, logprobs) -> tuple:
    """A token's log probabilities with those of the `count` best only (-1: all): another sequence of the step may want more."""
    if 0 <= count < len(ids):
        ids, logprobs = ids[:count], logprobs[:count]
        if isinstance(ids, Tensor):  # a list: a tensor would keep the memory of the whole one
            ids, logprobs = ids.tolist(), logprobs.tolist()
    return own, rank, ids, logprobs


def _as_list(tensor: Tensor) -> list:
    """As Python's numbers, row by row; very long rows stay tensors until their numbers are looked at."""
    return list(tensor.clone()) if tensor.dim() == 2 and tensor.shape[1] > MANY_LOGPROBS else tensor.tolist()


def _reader(*tensors: Tensor) -> Callable[[], list[list]]:
    """A function that waits for the tensors and returns them as lists."""
    if tensors[0].device.type != "cuda":
        lists = [_as_list(tensor) for tensor in tensors]
        return lambda: lists
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> list[list]:
        done.synchronize()
        return [_as_list(copy) for copy in copies]

    return read


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
        picked = torch.device("cuda", picked.index if picked.index is not None else torch.cuda.current_device())
    return picked


def _pick_dtype(dtype: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    dtype = str(dtype).removeprefix("torch.")
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if dtype != "auto" and dtype not in names:
        raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, names))}, not {dtype!r}")
    if dtype != "auto":
        return names[dtype]
    if device.type == "cpu":
        return torch.float32
    if checkpoint_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16  # cards before Ampere
    return checkpoint_dtype


def _pick_kernels(attention: str, device: torch.device) -> kernel.Kernels:
    if attention not in ("auto", "triton", "torch"):
        raise ValueError(f"attention must be 'auto', 'triton' or 'torch', not {attention!r}")
    if attention == "auto":
        attention = "triton" if device.type == "cuda" and kernel.triton else "torch"
    if attention == "torch":
        return kernel.TORCH
    kernel.require_triton(device)
    return kernel.TRITON
