"""The device's side of a step: the model, the pool, and the sampler. Read it after chapter 3 (engine.py).

The engine thinks in sequences and block ids. `launch` gets a SchedulerOutput and does, in this order:

    move blocks       copies of blocks (and features/swapping.py's moves), before the forward pass writes
    send rows         new entries of block tables, which stay on the device; sampling settings of new sequences
    forward pass      model.py over one flat batch (step_input.py): each layer writes K and V, then attends
    sample            one token for each sequence that has caught up

and returns a `LaunchedStep` (transfer.py), which the engine calls for the tokens. While a sequence runs it has a
**batch row**, its index in the tensors that stay on the device (rows.py). A step sends new tokens and changed entries.

This file is the plain path: `python engine.py --enforce-eager --attention torch --prompt "ROMEO:"`. Other parts, most
of them in nanopaged/features, replace plain ones. `enforce_eager` keeps the plain part where a * stands:

    plain part                replacement                                         when
    attention in torch        Triton's (kernel.py); with cascade.py, hopper.py    a GPU with Triton; --attention triton
    Runner *                  GraphRunner: recorded steps, and a lookahead of 1   a GPU with Triton (graphs.py)
    `pick` *                  one in two launches (pick.py)                       a GPU with Triton
    modules of model.py *     ones with small kernels (fused.py)                  a GPU with Triton
    the last Layer *          one that skips tokens (last_layer.py)               always
    attention in torch *      one call for each query length (rectangles.py)      attention in torch
    Runner                    one that computes a part of the model               tensor_parallel_size (parallel.py)
    StepInput, Scheduler      ones with drafts (drafts.py)                        speculative_config
    Pool, BlockManager        ones with a host pool, a window (swapping.py)       swap_space; a window in all layers
    Pool, Rows, BlockManager  ones for layers of several kinds (kinds)            windows or states in some layers
    one scheduler and engine  one of each for each GPU (router.py)                data_parallel_size

The pool (pool.py) has the blocks that fit into 90% of the card, less what is in use and the peak of a trial step (twice
with recorded steps, which have memory of their own); on a CPU 1 GiB at most (trial.py). What else requests ask for:
edits.py, grammar.py, logprobs.py.
"""
import gc
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, Callable, ContextManager, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine, kernel, model
from nanopaged.device import choices, transfer
from nanopaged.device.pool import Pool
from nanopaged.device.rows import Rows
from nanopaged.device.sampler import SamplingNeeds, pick, sample
from nanopaged.device.step_input import StepInput
from nanopaged.device.transfer import ForwardPass, LaunchedStep, on_its_device, step_class
from nanopaged.weights.build import build_model


class StepTensors(NamedTuple):
    """StepInput.lists on the device, int32."""
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor
    more: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "StepTensors":
        return cls(*tensors[:6], more=tuple(tensors[6:]))


class Runner:
    """A model on a device, with its KV pool. It is made in steps (api/assemble.py): the constructor checks the options,
    `load` builds the model, `trial.allocate_pool` makes the pool. Raises ValueError for impossible options.

    options: those of LLM; fp8: matrices are in 8 bits; num_more_rows: logit rows besides one for each sequence
    """
    lookahead = 0  # launched steps that may still be unread when the next one is planned
    num_ranks = 1  # GPUs that share the model
    step_input = StepInput
    pick = staticmethod(pick)
    model: model.Transformer
    kv_cache: list[model.LayerCache] = []  # of each layer
    interruptible: Callable[[], ContextManager] = nullcontext  # for sections in which Ctrl-C does no harm

    def __init__(self, config: model.ModelConfig, options: Any, device: torch.device, kernels: kernel.Kernels,
                 modules: model.Modules, fp8: bool = False, num_more_rows: int = 0):
        self.config, self.options, self.device, self.fp8 = config, options, device, fp8
        self.kernels, self.modules = kernels, modules
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        self.max_num_seqs, self.max_num_batched_tokens = options.max_num_seqs, options.max_num_batched_tokens
        self.max_num_samples = min(self.max_num_seqs + num_more_rows,  # logit rows in a step (more: of drafts)
                                   max(self.max_num_seqs, self.max_num_batched_tokens))
        # On a GPU a tile of the kernel should lie within one block; a CPU gathers slots, and small blocks share more.
        self.block_size = options.block_size or (64 if device.type == "cuda" else 16)
        self.dtype = choices.pick_dtype(options.dtype, config.torch_dtype, device)
        self.kv_dtype = choices.pick_kv_dtype(options.kv_cache_dtype, self.dtype, device, kernels)
        if device.type == "cuda":
            gc.collect()  # an engine that is not used any more may hold most of the card until then
            torch.cuda.empty_cache()
        block_shape = self.block_size, config.num_kv_heads, config.head_dim
        self.pool = Pool(config.num_layers, block_shape, self.kv_dtype, device)
        self.rows = self._make_rows()
        self.send = partial(transfer.send, device)
        self.logits_steps: dict[type, Any] = {}  # see logits.py
        self.step_kinds: dict[type[LaunchedStep], None] = {}  # an ordered set, see `extend_steps`
        self.compiling: list[Future] = []  # Triton's kernels (features/warmup.py)

    def _make_rows(self) -> Rows:
        return Rows(self.max_num_seqs, engine.cdiv(self.max_model_len, self.block_size), self.device)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Build the model of a checkpoint's tensors."""
        self.model = build_model(self.config, tensors, self.dtype, self.device, self.max_model_len, self.modules,
                                 utilization=self.options.gpu_memory_utilization)

    def use(self, kind: type) -> Any:
        """The LogitsStep of this class, made when a request first asks for it. Any thread may call this."""
        if kind not in self.logits_steps:
            self.logits_steps.setdefault(kind, kind(self))
        return self.logits_steps[kind]

    def extend_steps(self, kind: type[LaunchedStep]) -> None:
        """From now on launched steps do what this subclass does, too. Any thread may call this."""
        self.step_kinds.setdefault(kind)

    @on_its_device
    @torch.inference_mode()
    def launch(self, step: engine.SchedulerOutput) -> LaunchedStep:
        """Launch a step. Calling the result waits for its tokens. `launch` does not wait for a GPU, unless attention is
        in torch, which reads lengths on the host. On a CPU the step is computed here."""
        launched = step_class(*self.step_kinds)(self)
        self.pool.move(step)
        self.rows.send(step.seqs)
        batch = self.read(step)
        launched.plan(batch)
        launched.start(self._compute(batch, launched.more_tokens, launched.needs))
        return launched

    def read(self, step: engine.SchedulerOutput) -> StepInput:
        return self.step_input.of(step, self.block_size)

    @cached_property
    def tokens_per_tile(self) -> int:
        """Query tokens of a prefill tile. The first read compiles Hopper's kernel, so it comes after the warm-up's."""
        c = self.config
        return self.kernels.tokens_per_tile(c.num_heads // c.num_kv_heads, c.head_dim, self.block_size, self.dtype,
                                            self.kv_dtype, self.device)

    def wait(self, event: torch.cuda.Event) -> None:
        with self.interruptible():
            event.synchronize()

    def _compute(self, batch: StepInput, more_tokens: list[int], needs: SamplingNeeds) -> ForwardPass:
        """Launch the forward pass. Logits are computed of the last token at each sampling place, and of more_tokens.

            sequence             A   C   B
            tokens               0   1   2..5     of the flat batch
            sampling_places      0   1   2        places of the sequences that sample, here all three
            logits_indices       0   1   5        tokens whose logits are computed, a logit row for each
            sent.rows            4   0   7        batch rows: indices into the tensors that stay on the device
        """
        last_tokens = [batch.query_start_loc[place + 1] - 1 for place in batch.sampling_places]
        *lists, places, logits_indices = self.send([*batch.lists, batch.sampling_places, last_tokens + more_tokens])
        sent, metadata = StepTensors.of(lists), self.metadata(batch.num_tokens, batch.seq_lens)
        inputs = self.make_batch(sent, logits_indices, places, metadata)
        with self.interruptible():
            logits = self.model(inputs, self.kv_cache, self.kernels)
        if not batch.sampling_places:  # no tokens
            return ForwardPass(partial(torch.empty, 0, dtype=torch.int64, device=self.device), logits)
        rows, seq_lens = sent.rows.index_select(0, places), sent.seq_lens.index_select(0, places)
        return ForwardPass(partial(self.sample, logits[:len(places)], rows, seq_lens, needs), logits)

    def metadata(self, query_lens: list[int], seq_lens: list[int]) -> model.AttentionMetadata:
        query_tiles = None
        if self.kernels.in_triton:
            work = self.make_query_tiles(query_lens, seq_lens, sum(query_lens), len(query_lens))
            query_tiles = transfer.to_device(self.device, work)
        return model.AttentionMetadata(max(query_lens), max(seq_lens), query_lens.count(1), query_tiles)

    def make_batch(self, sent: StepTensors, logits_indices: Tensor | None, sampling_places: Tensor | None,
                   metadata: model.AttentionMetadata) -> model.Batch:
        """The model's inputs."""
        input_ids = self.rows.with_last_tokens(sent.input_ids, sent.rows[:metadata.num_decodes])
        block_tables = self.rows.block_tables.index_select(0, sent.rows)
        return model.Batch(input_ids, sent.positions, sent.slot_mapping, block_tables, sent.seq_lens,
                           sent.query_start_loc, logits_indices, sampling_places, metadata)

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> Tensor:
        """One token for each logit row, -1 if none can be drawn. The token (0 in place of -1) becomes the last token of
        its sequence. rows: the batch rows of the sequences; positions: their lengths, which are the positions of the
        drawn tokens."""
        for change, plan in needs.plans:
            logits = change(logits, plan, rows, positions)
        tokens = sample(logits, self.rows.settings.index_select(0, rows), positions, needs, self.pick)
        usable = tokens.clamp(min=0)
        self.rows.last_tokens.index_copy_(0, rows.long(), usable.int())
        for change, plan in needs.plans:  # last, so that a step whose sampling failed can be sampled again
            change.drew(usable, plan, rows)
        return tokens

    # ---- for subclasses, which have more to do here

    def num_query_tiles(self, num_tokens: int, num_seqs: int) -> int:
        """The most entries of prefill's work list for a step of this size."""
        return num_tokens // self.tokens_per_tile + num_seqs

    def make_query_tiles(self, query_lens: list[int], seq_lens: list[int], num_tokens: int, num_seqs: int) -> Tensor:
        """The work list of a step, which may be padded to this size."""
        return kernel.make_query_tiles(query_lens, seq_lens, self.tokens_per_tile)

    def attention_shapes(self) -> Iterable[tuple[model.ModelConfig, Tensor]]:
        """A config for each size of heads, and a block of such a layer's K, or V."""
        return [(self.config, self.pool.one_block())]

    def agree(self, numbers: list[float], largest: bool) -> list[float]:
        """The largest or smallest of each number over all GPUs that share the model."""
        return numbers

    def prepare(self) -> None:
        """Do what needs the pool."""

    def trial(self, batch: model.Batch) -> model.Batch:
        """The inputs of a step that is tried before there is a pool (trial.py), with what may take more memory."""
        return batch
