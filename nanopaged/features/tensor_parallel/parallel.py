"""One model on several GPUs: tensor parallelism (Shoeybi et al. 2019, Megatron-LM). Read it after runner.py.

N processes, the **ranks**, have a GPU each. **Rank 0** is the process of the engine, with the scheduler, the block
manager and the sampler. The others are **workers** (workers.py). Each rank has a part of each matrix and of the pool:

    embed_tokens, lm_head    split by rows: a range of the vocabulary
    qkv_proj                 split by rows: a range of the heads. With fewer kv heads than ranks, several have the same
    gate_up_proj             split by rows: a range of the intermediate size
    o_proj, down_proj        split by columns, those for these ranges: the results are **partial products**

All compute a step at the same time. At each === the ranks meet, and then read what the others have written (peers.py):

    rank 0                                    a worker
    plans the step, sends its integers        reads them
    === the last tokens of all sequences, in the memory of rank 0 ===========================
    embed_tokens: 0 for another rank's rows   the same
    === each adds up the outputs ============================================================
    qkv_proj, attention, o_proj               the same for its heads, whose K and V it has    }
    === each adds up the partial products, with fused.py in the norm that follows ===========  } in each layer
    gate_up_proj, down_proj                   the same for its part of the intermediate size  }
    === each adds up the partial products ===================================================
    lm_head                                   lm_head
    === rank 0 puts the logits together =====================================================
    samples, writes the last tokens           says that it has launched the step

Norms and the residual stream are the same on all ranks, bit by bit, because each adds up in the order of ranks. Two
buffers, a and b, take turns: write a, meet, read a, write b, meet, .. A rank that writes a again has met the others for
b, where each of them came only after it had read a.
"""
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import engine, model
from nanopaged.device.rows import Rows
from nanopaged.device.runner import Runner
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.device.transfer import on_its_device
from nanopaged.features.tensor_parallel.peers import Peers, SharedBuffer
from nanopaged.features.tensor_parallel.split import find_cuts, padded_part, split_config
from nanopaged.weights.build import build_model

LOGITS_ROWS = 256  # rows of logits that are put together at once
FEWEST_ROWS = 1024  # of the buffers: fp8 calibration, warm-up and fused.py's split products take up to so many


class RowParallel(model.Linear):
    """For a class of linear layers: a rank's columns of the matrix. (fused.py's SplitLinear has a buffer, too.)"""
    buffer: SharedBuffer

    def forward(self, x: Tensor) -> Tensor:
        own = self.buffer.own(len(x), len(self.weight))
        own.copy_(super().forward(x))
        return self.buffer.sum(*own.shape)


class VocabParallelEmbedding(model.Embedding):
    """A rank's rows of the table."""
    buffer: SharedBuffer

    def forward(self, ids: Tensor) -> Tensor:
        size, own = len(self.weight), self.buffer.own(len(ids), self.weight.shape[1])
        local = ids - self.buffer.peers.rank * size
        nearest = local.clamp(0, size - 1)
        own.copy_(torch.where((nearest == local)[:, None], F.embedding(nearest, self.weight), 0))
        return self.buffer.sum(*own.shape)


def join_logits(buffer: SharedBuffer, vocab_size: int, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`model.compute_logits` with a rank's rows of the weight: [R, D] -> [R, vocab_size], which only rank 0 fills."""
    rank, size = buffer.peers.rank, len(weight)
    out = x.new_empty(len(x), vocab_size) if out is None else out
    for start in range(0, len(x), LOGITS_ROWS):
        rows = x[start:start + LOGITS_ROWS]
        if start:
            buffer.all(1)  # rank 0 has read the rows before
        torch.matmul(rows, weight.T, out=buffer.own(len(rows), size))
        parts = buffer.all(len(rows), size)
        if rank == 0:
            torch.cat([part[:, :max(0, vocab_size - size * i)] for i, part in enumerate(parts)], 1,
                      out=out[start:start + len(rows)])
    return out


class SentRows(Rows):
    """Rows that remember what they have written last, for the workers."""
    sent: tuple[list[int], list[int]]

    def write(self, cells: list[int], blocks: list[int], new: list[engine.Sequence] = []) -> None:
        self.sent = cells, blocks
        super().write(cells, blocks, new)


def row_parallel(linear: Any) -> Any:
    """The class of linear layers, or a `partial` of it, with sums over all ranks."""
    if isinstance(linear, partial):
        return partial(row_parallel(linear.func), **linear.keywords)
    return linear if hasattr(linear, "buffer") else type("RowParallelLinear", (RowParallel, linear), {})


class ParallelRunner(Runner):
    """What the runners of all ranks have in common."""

    def __init__(self, config: model.ModelConfig, *args: Any, peers: Peers):
        self.whole, self.peers, self.num_ranks = config, peers, peers.size
        super().__init__(split_config(config, peers.size), *args)

    def _make_rows(self) -> Any:
        made: Any = super()._make_rows()
        made.__class__ = type("SentRows", (SentRows, type(made)), {})
        rows = max(self.max_num_batched_tokens, self.max_num_samples, FEWEST_ROWS)
        width = padded_part(self.whole.vocab_size, self.peers.size)
        self.sums = [SharedBuffer(self.peers, rows * self.config.hidden_size, self.dtype) for _ in range(2)]
        self.logits_buffer = SharedBuffer(self.peers, LOGITS_ROWS * width, self.dtype)
        self.tokens = SharedBuffer(self.peers, self.max_num_seqs + 1, torch.int32)
        made.last_tokens = self.tokens.own(self.max_num_seqs + 1).zero_()
        return made

    def load(self, tensors: Iterable) -> None:
        whole, size = self.whole, self.peers.size
        config = replace(self.config, vocab_size=padded_part(whole.vocab_size, size))
        modules = self.modules._replace(
            embedding=VocabParallelEmbedding, residual_linear=row_parallel(self.modules.residual_linear),
            compute_logits=partial(join_logits, self.logits_buffer, whole.vocab_size))
        built: Any = build_model(config, tensors, self.dtype, self.device, self.max_model_len, modules,
                                 find_cuts(whole, self.peers.rank, size, modules))
        for layer in built.layers:
            layer.o_proj.buffer, layer.mlp.down_proj.buffer = self.sums
        built.embed_tokens.buffer = self.sums[1]
        self.model = built

    def agree(self, numbers: list[float], largest: bool) -> list[float]:
        return [(max if largest else min)(each) for each in zip(*self.peers.exchange(numbers))]

    def make_batch(self, *args: Any) -> model.Batch:
        tokens = self.tokens.all(self.max_num_seqs + 1)[0]
        if self.peers.rank:
            self.rows.last_tokens = tokens
        return super().make_batch(*args)

    def all_recorded(self, shape: Any) -> bool:
        return bool(self.agree([super().all_recorded(shape)], largest=False)[0])  # type: ignore[misc]


class Driver(ParallelRunner):
    """The runner of rank 0."""
    workers: Any  # the processes of the other ranks (Workers)

    def prepare(self) -> None:
        super().prepare()
        self.workers.hear()

    def launch(self, step: engine.SchedulerOutput) -> Any:
        self.moves = replace(step, seqs=[], sampled=[], preempted=[])
        return super().launch(step)

    def _compute(self, batch: Any, more_tokens: list[int], needs: SamplingNeeds) -> Any:
        nobody: list[Any] = [None] * len(batch.seqs)
        self.workers.send((self.moves, self.rows.sent, replace(batch, seqs=nobody), more_tokens,
                           SamplingNeeds(is_late=needs.is_late)))
        try:
            return super()._compute(batch, more_tokens, needs)
        except Exception as error:
            self.workers.give_up(error)

    def wait(self, event: torch.cuda.Event) -> None:
        """A worker that has died never joins a barrier, so nothing waits for the device without looking after it."""
        while not event.query():
            self.workers.hear()
            time.sleep(20e-6)
        self.workers.check()


class Follower(ParallelRunner):
    """The runner of a worker."""

    @on_its_device
    @torch.inference_mode()
    def follow(self, message: tuple) -> None:
        """Launch the step that `Driver._compute` has sent."""
        moves, rows, *step = message
        self.pool.move(moves)
        self.rows.write(*rows)
        self._compute(*step)

    def sample(self, logits: Tensor, rows: Tensor, *_: Any) -> Tensor:
        return rows.new_zeros(len(rows))  # rank 0 samples


def on_top_of(base: type[Runner], kind: type[ParallelRunner], peers: Peers, *args: Any) -> Any:
    """A runner of this kind that does the rest as `base`, without recorded steps where the ranks cannot have them."""
    bases = [base] if peers.can_record else [each for each in base.__mro__ if getattr(each, "lookahead", 1) == 0]
    return type(kind.__name__, (kind, *bases), {})(*args, peers=peers)
