"""The device's side of a step: the model, the pool's tensors, and the sampler. Read it after chapter 3 (engine.py).

The engine thinks in sequences and block ids. `launch` gets a SchedulerOutput and does, in this order:

    move blocks       preempted ones to the host, copy-on-write copies, swapped ones back: before anything is written
    send rows         new entries of block tables, sampling settings of new sequences
    forward pass      model.py over one flat batch (step_input.py): each layer writes K and V, then attends
    sample            one token for each sequence that has caught up

and returns a `LaunchedStep` (transfer.py), which the engine calls for the tokens. (With grammars a step is sampled
when the next one is launched: transfer.py says why.)

**Rows.** While a sequence runs it has a batch row in tensors that stay on the device: its block table, its last token,
its sampling settings. A step sends the changed entries of its rows as one message of integers, and its new tokens as
another. (For prompts Triton's kernel gets a work list in addition.) The sampled tokens stay on the device, too. With a
lookahead (graphs.py) the next step reads them there, so it can be launched before the host knows them.

**The pool** is one tensor [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]. A token takes 2 *
num_layers * num_kv_heads * head_dim numbers. In Llama-2-7B these are 2 * 32 * 32 * 128, in 16 bits 512 KiB, so 4,096
tokens take 2 GiB. In Llama-3.1-8B, where four query heads share a kv head, a token takes 128 KiB.

This file is the plain path. What takes the place of its parts, as a rule unless `enforce_eager=True`:

    part                      in its place                                        where that is chosen
    Runner                    GraphRunner: recorded steps, and a lookahead of 1   a GPU with Triton
    Runner                    one that computes a part of the model (parallel.py) tensor_parallel_size
    modules of model.py       ones with small kernels (fused.py)                   GraphRunner
    the last Layer            one that skips rows (last_layer.py)                 everywhere but with enforce_eager
    attention in torch        one call for all sequences (rectangles.py)          everywhere but with enforce_eager
    additions.BlockManager    Swapping, which is a SlidingWindow, too             swap_space; a model with a window
    one scheduler and engine  one of each for each GPU (data_parallel.py)         data_parallel_size

warmup.py compiles ahead. choices.py decides types and kernels, and memory.py how large a GPU's pool can be. Rare
features: swapping.py, logits.py (edited logits), logprobs.py, masks.py (grammars).
"""
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, ContextManager, Iterable, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine, kernel, model
from nanopaged.device import choices, masks, memory, swapping, transfer, warmup
from nanopaged.device.logits import LogitsEditor, start_editing
from nanopaged.device.sampler import SETTINGS_INTS, SamplingBatch, SamplingNeeds, pack_settings, pick, sample
from nanopaged.device.step_input import StepInput
from nanopaged.device.transfer import LaunchedStep, on_its_device
from nanopaged.scheduling.additions import SchedulerOutput, Sequence

NOBODY = lambda: None  # noqa: E731  the owner of a free row, called like a weak reference to a sequence


class StepTensors(NamedTuple):
    """A StepInput on the device, int32."""
    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    query_start_loc: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    rows: Tensor  # [N]


class Runner:
    """A model on a device, with its KV pool. ValueError for options that cannot be."""
    lookahead = 0  # steps that may be launched before the previous step's tokens are read
    fused = False  # with the small kernels of kernel.py's last part
    modules = model.PLAIN
    num_ranks = 1  # GPUs that share the model
    pick = staticmethod(pick)
    interruptible: Callable[[], ContextManager] = nullcontext  # for sections in which Ctrl-C does no harm

    def __init__(self, config: model.ModelConfig, tensors: Iterable | model.Transformer | None, *, dtype: str,
                 device: torch.device, kernels: kernel.Kernels, seed: int, block_size: int | None, max_model_len: int,
                 max_num_seqs: int, max_num_batched_tokens: int, kv_cache_dtype: str, warm_up: bool = False,
                 max_num_drafts: int = 0, modules: model.Modules | None = None):
        self.config, self.device, self.kernels, self.max_model_len = config, device, kernels, max_model_len
        self.modules = modules or self.modules
        self.warm_up = warm_up  # record all steps before the first request (graphs.py)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        # Rows of logits in a step: one for each sequence, and one more for each of its drafts.
        self.max_num_samples = min(max_num_seqs + max_num_drafts, max(max_num_seqs, max_num_batched_tokens))
        # Plain functions: the logits editor keeps one, and a bound method would keep this runner and its memory alive.
        self.to_device, self.send = partial(transfer.to_device, device), partial(transfer.send, device)
        # On a GPU a tile of the kernel should lie within one block; a CPU gathers slots, and small blocks share more.
        self.block_size = block_size or (64 if device.type == "cuda" else 16)
        self.dtype = choices.pick_dtype(dtype, config.torch_dtype, device)
        self.kv_dtype = choices.pick_kv_dtype(kv_cache_dtype, self.dtype, device, kernels)
        if device.type == "cuda":
            gc.collect()  # an engine that is not used any more may hold most of the card until then
            self.release_memory()
        self.kv_cache: list[tuple[Tensor, Tensor, float, float]] = []  # of each layer: K, V and their scales
        self._make_rows()
        # Triton's kernels are compiled while the weights are loaded.
        compiles = device.type == "cuda" and kernels is kernel.TRITON
        self.compiled = warmup.compile_kernels(self) if compiles else []
        self._make_model(seed if tensors is None else tensors)
        self.tokens_per_tile = 1  # of queries in prefill, as the kernel cuts them
        if kernels is kernel.TRITON:
            group = config.num_heads // config.num_kv_heads
            self.tokens_per_tile = kernel.tokens_per_tile(group, config.head_dim, self.dtype, device)

    def _make_rows(self) -> None:
        """A row for each running sequence, and one that no sequence has, for padding (CUDA graphs, trial steps)."""
        num_rows = self.max_num_seqs + 1
        ints: dict[str, Any] = dict(dtype=torch.int32, device=self.device)
        # torch gathers rows of a multiple of 16 bytes faster
        width = 4 * engine.cdiv(self.max_model_len, 4 * self.block_size)
        try:
            self.block_tables = torch.zeros(num_rows, width, **ints)
        except (RuntimeError, TypeError):
            raise ValueError(f"{self.device} has no memory for the block tables of {self.max_num_seqs} sequences of "
                             f"{self.max_model_len} tokens; lower max_num_seqs or max_model_len") from None
        self.last_tokens = torch.zeros(num_rows, **ints)
        self.settings = torch.zeros(num_rows, SETTINGS_INTS, **ints)
        self.owners: list[Callable] = [NOBODY] * num_rows  # weakly, the sequence whose settings these are

    def _make_model(self, tensors: Iterable | model.Transformer | int) -> None:
        self.model = self._build_model(tensors)
        self.editor: LogitsEditor | None = None  # until a sequence edits its logits
        self.masker: masks.Masker | None = None  # until a sequence has a grammar
        # The last step, if it has grammars and is not sampled yet: weakly, because a step has the runner.
        self.unsampled: weakref.WeakSet[LaunchedStep] = weakref.WeakSet()

    def _build_model(self, tensors: Iterable | model.Transformer | int) -> model.Transformer:
        return model.build_model(self.config, tensors, self.dtype, self.device, self.max_model_len, self.modules)

    # ---- memory

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of block_size tokens in every layer."""
        c = self.config
        return 2 * c.num_layers * self.block_size * c.num_kv_heads * c.head_dim * self.kv_dtype.itemsize

    @on_its_device
    def allocate_pool(self, num_blocks: int | None, gpu_memory_utilization: float) -> int:
        """Make the pool's tensors and return its number of blocks. ValueError if the memory does not suffice."""
        while self.compiled:
            self.compiled.pop().result()
        num_blocks = num_blocks or self._choose_num_blocks(gpu_memory_utilization)
        pool = choices.allocate(self, num_blocks)
        self.kv_cache = [(layer[0], layer[1], *scales) for layer, scales in zip(pool, self._choose_scales())]
        self.pool = pool.view(torch.uint8)  # the same memory, for moving blocks of any type
        return num_blocks

    def _choose_num_blocks(self, gpu_memory_utilization: float) -> int:
        if self.device.type == "cuda":
            return memory.choose_num_blocks(self, gpu_memory_utilization)
        return choices.choose_num_blocks(self)

    def _choose_scales(self) -> list[tuple[float, float]]:
        return choices.choose_scales(self)

    @on_its_device
    def allocate_host_pool(self, swap_space: float) -> int:
        """Memory on the host for the blocks of preempted sequences, swap_space GiB; its number of blocks."""
        if not swap_space:
            return 0
        self.host_pool = swapping.allocate_on_host(self, swap_space)
        return len(self.host_pool)

    def release_memory(self) -> None:
        """Give back what torch keeps for later allocations."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether a smaller step may succeed. If so, memory is released."""
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        self.release_memory()
        return True

    # ---- a step

    @on_its_device
    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Start a step; calling what is returned waits for its tokens. `_compute` launches the forward pass and gives
        `start` a function that samples. The host waits for the device in neither, unless attention is in torch."""
        while self.unsampled:
            self.unsampled.pop().sample()
        self._move_blocks(step)
        self._send_rows(step.seqs)
        batch = StepInput.of(step, self.block_size)
        launched = LaunchedStep(self, step, batch)
        launched.start(*self._compute(batch, launched.indices, launched.more_rows, launched.needs))
        return launched

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def _move_blocks(self, step: SchedulerOutput) -> None:
        """Moves to the host, then copies, then moves from the host: a block that a move or a copy has read may be the
        target of a later one."""
        if step.swaps_out:
            swapping.move_out(self, step.swaps_out)
        if step.copies:
            sources, copies = self.send([list(blocks) for blocks in zip(*step.copies)])
            self.pool.index_copy_(2, copies.long(), self.pool.index_select(2, sources))
        if step.swaps_in:
            swapping.move_in(self, step.swaps_in)

    def _send_rows(self, seqs: list[Sequence]) -> tuple[list[int], list[int]]:
        """Tell the device what is new in the rows of this step's sequences: entries of block tables, and the sampling
        settings of sequences that are new in their row. Returns where in block_tables.view(-1) entries are new, and
        these entries, for parallel.py."""
        width = self.block_tables.shape[1]
        cells: list[int] = []
        blocks: list[int] = []
        new: list[Sequence] = []
        for seq in seqs:
            # A sequence that is new in its row has sent no block (`BlockManager.free` sets num_sent_blocks to 0). One
            # that grew or copied a block comes through here, too, but its settings are there already.
            if seq.num_sent_blocks < len(seq.block_table):
                if self.owners[seq.row]() is not seq:
                    self.owners[seq.row] = weakref.ref(seq)
                    new.append(seq)
                first = seq.row * width
                cells += range(first + seq.num_sent_blocks, first + len(seq.block_table))
                blocks += [max(block, 0) for block in seq.block_table[seq.num_sent_blocks:]]  # NULL: masked
                seq.num_sent_blocks = len(seq.block_table)
        if new and (self.editor is not None or any(seq.sampling.params.edits_logits
                                                   or seq.sampling.params.logits_processors for seq in new)):
            start_editing(self, new)
        if cells:
            settings = [number for seq in new for number in pack_settings(seq.sampling.params, seq.sampling.seed)]
            sent = self.send([cells, blocks, [seq.row for seq in new], settings])
            self.block_tables.view(-1)[sent[0]] = sent[1]
            if new:
                self.settings[sent[2]] = sent[3].view(-1, SETTINGS_INTS)
        return cells, blocks

    def forget_free_rows(self) -> list[int]:
        """Rows that their sequence has left (for logits.py). If it comes back, its settings are sent again."""
        owners = [owner() for owner in self.owners]
        free_rows = [row for row, seq in enumerate(owners) if seq is None or seq.row != row]
        for row in free_rows:
            self.owners[row] = NOBODY
        return free_rows

    def forget_rows(self, seqs: list[Sequence]) -> None:
        """A step failed half-way: the settings of these rows are sent again. (Their block tables are anyway.)"""
        for seq in seqs:
            self.owners[seq.row] = NOBODY

    def _compute(self, batch: StepInput, sampling_indices: list[int], more_rows: list[int],
                 needs: SamplingNeeds) -> tuple[Callable[[], Tensor], Tensor]:
        """The forward pass. Returns two things: a function that samples the tokens [num_samples], and the logits
        [num_samples + ..., vocab_size] of their rows and then of more rows of the flat batch.

            sequence             A   C   B
            flat rows            0   1   2..5     a row for each token
            sampling_indices     0   1   2        sequences that sample, here all three (LaunchedStep.indices)
            last_rows            0   1   5        their last tokens; with more_rows behind them: logits_indices
            batch rows           4   0   7        their places in the tensors that stay on the device
        """
        last_rows = [batch.query_start_loc[i + 1] - 1 for i in sampling_indices]  # of the flat batch
        *lists, sampling, logits_indices = self.send([*batch.lists, sampling_indices, last_rows + more_rows])
        sent = StepTensors(*lists)
        tiles = self.to_device(self._query_tiles(batch.num_tokens, batch.seq_lens))
        inputs = self._model_batch(sent, logits_indices, max(batch.num_tokens), max(batch.seq_lens),
                                   batch.num_tokens.count(1), tiles, sampling)
        with self.interruptible():
            logits = self.model(inputs, self.kv_cache, self.kernels)
        if not sampling_indices:
            return partial(torch.empty, 0, dtype=torch.int64, device=self.device), logits
        rows, seq_lens = sent.rows.index_select(0, sampling), sent.seq_lens.index_select(0, sampling)
        return partial(self._sample, logits[:len(sampling)], rows, seq_lens, needs), logits

    def _model_batch(self, sent: StepTensors, logits_indices: Tensor | None, max_query_len: int, max_seq_len: int,
                     num_decodes: int, query_tiles: Tensor | None, sampling: Tensor | None = None) -> model.Batch:
        # -1: the token is known on the device alone. This comes with lookahead (graphs.py), not on the plain path. Only
        # sequences with one new token can have such an id, and they come first.
        ones, rest = sent.input_ids[:num_decodes], sent.input_ids[num_decodes:]
        ones = torch.where(ones < 0, self.last_tokens.index_select(0, sent.rows[:num_decodes]), ones)
        input_ids = torch.cat([ones, rest]) if len(rest) else ones
        block_tables = self.block_tables.index_select(0, sent.rows)
        return model.Batch(input_ids, sent.positions, sent.slot_mapping, block_tables, sent.seq_lens,
                           sent.query_start_loc, logits_indices, max_query_len, max_seq_len, num_decodes, query_tiles,
                           sampling)

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> Tensor:
        """One token for each row of logits, -1 if the row is unusable. The token (0 in place of -1) becomes the last
        token of its sequence. positions: the lengths so far."""
        editor = self.editor if needs.edits or needs.processors else None
        if editor is not None:
            logits = editor(logits, rows, positions, needs.processors)
        if needs.grammars:
            logits = masks.apply_grammars(self, logits, needs.grammars)
        tokens = self._draw(logits, rows, positions, needs)
        usable = tokens.clamp(min=0)
        if editor is not None:
            editor.add(rows, usable)
        # A sequence with drafts has its row several times, and any of its tokens may end up here. No step reads it: the
        # next one is planned after the drafts are decided (additions.Engine), and then the host knows the token.
        self.last_tokens.index_copy_(0, rows.long(), usable.int())
        return tokens

    def _draw(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> Tensor:
        return sample(logits, SamplingBatch.of(self.settings.index_select(0, rows), positions, needs), self.pick)

    def send_step(self, lists: list[list[int]]) -> StepTensors:
        """A StepInput's lists on the device, for trial steps (memory.py, choices.py)."""
        return StepTensors(*self.send(lists))

    def _query_tiles(self, query_lens: list[int], seq_lens: list[int]) -> Tensor:
        """The kernel's work list for prompts, on the host. Torch needs none."""
        if self.kernels is not kernel.TRITON:
            return torch.empty(0, 2, dtype=torch.int32)
        return kernel.make_query_tiles(query_lens, seq_lens, self.tokens_per_tile)
