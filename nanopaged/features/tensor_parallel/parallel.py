"""One model on several GPUs: tensor parallelism (Shoeybi et al. 2019, Megatron-LM). Read it after runner.py.

N processes, the **ranks**, have a GPU each, and each has a part of every layer and of the pool. All ranks compute the
same step at the same time:

                     each rank has                      and then
    embed_tokens     a range of the vocabulary          the ranks' outputs are added up: other ranks' tokens give 0
    qkv_proj         a range of the heads               (a kv head is repeated where there are fewer than ranks)
    attention        these heads, and their K and V
    o_proj           the columns for these heads        the ranks' outputs, **partial products**, are added up
    gate_up_proj     a range of the intermediate size
    down_proj        the columns for this range         the ranks' outputs are added up
    lm_head          a range of the vocabulary          rank 0 puts the logits together

Norms and the residual stream are the same on all ranks. **Rank 0** is the process of the engine. It has the scheduler,
the block manager and the sampler. The other ranks are **workers** (workers.py): they get each step as integers through
a pipe, and read the sampled tokens, which are inputs of the next step, in the memory of rank 0.

**Adding up.** Each rank writes its partial product into a buffer that the others can read (peers.py). After a barrier
each rank adds the partial products in the order of ranks, so all have the same bits. With fused.py the norm that
follows adds them while it reads them. Two buffers, a and b, take turns: write a, barrier, read a, write b, barrier, ..
A rank that writes a again has passed b's barrier, and each rank joined that barrier only after it had read a.
"""
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import engine, model
from nanopaged.device.rows import Rows
from nanopaged.device.runner import Runner
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.device.step_input import StepInput
from nanopaged.device.transfer import ForwardPass, on_its_device
from nanopaged.features.fused import FusedLayer, FusedLinear, SplitLinear, linear
from nanopaged.features.tensor_parallel.peers import Peers, SharedBuffer
from nanopaged.features.tensor_parallel.split import find_cuts, padded_part, split_config
from nanopaged.outputs import EngineDeadError
from nanopaged.tiles import cdiv
from nanopaged.weights.build import build_model

if TYPE_CHECKING:
    from nanopaged.features.tensor_parallel.workers import Workers

LOGITS_ROWS = 256  # rows of logits that are put together at once
FEWEST_ROWS = 1024  # of the buffers: fp8 calibration, warm-up and fused.py's split products take up to so many
POLL_SECONDS = 20e-6


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------

class RowParallelLinear(FusedLinear):
    """A rank's columns of the matrix. fused.py has its own form."""
    buffer: SharedBuffer

    def forward(self, x: Tensor) -> Tensor:
        shape = len(x), len(self.weight)
        own = self.buffer.own(*shape)
        own = (torch.matmul(x, self.weight.T, out=own) if self.scale is None else
               linear(x, self.weight, None, own, self.scale))
        if self.bias is not None:
            own += self.bias
        return self.buffer.sum(*shape)


class VocabParallelEmbedding(model.Embedding):
    """A rank's rows of the table."""
    buffer: SharedBuffer

    def forward(self, ids: Tensor) -> Tensor:
        size, shape = len(self.weight), (len(ids), self.weight.shape[1])
        local = ids - self.buffer.peers.rank * size
        is_elsewhere = (local < 0) | (local >= size)
        found = F.embedding(local.clamp(0, size - 1), self.weight)
        self.buffer.own(*shape).copy_(found.masked_fill_(is_elsewhere[:, None], 0))
        return self.buffer.sum(*shape)


def gather_logits(buffer: SharedBuffer, vocab_size: int, x: Tensor, weight: Tensor,
                  out: Tensor | None = None) -> Tensor:
    """`model.compute_logits` with a rank's rows of the weight: [R, D] -> [R, vocab_size] on rank 0, and no columns on
    the others."""
    rank, size = buffer.peers.rank, len(weight)
    if rank:
        out = x.new_empty(len(x), 0)
    elif out is None:
        out = x.new_empty(len(x), vocab_size)
    for start in range(0, len(x), LOGITS_ROWS):
        rows = x[start:start + LOGITS_ROWS]
        if start:
            buffer.all(1)  # rank 0 has read the rows before
        torch.matmul(rows, weight.T, out=buffer.own(len(rows), size))
        parts = buffer.all(len(rows), size)
        if rank == 0:
            ends = [min(vocab_size, size * (rank + 1)) - size * rank for rank in range(buffer.peers.size)]
            torch.cat([part[:, :max(0, end)] for part, end in zip(parts, ends)], 1, out=out[start:start + len(rows)])
    return out


# --------------------------------------------------------------------------------------------------
# The runner
# --------------------------------------------------------------------------------------------------

class ParallelRunner(Runner):
    """What the runners of all ranks have in common, to be put before Runner or GraphRunner (workers.py)."""

    def __init__(self, config: model.ModelConfig, *args: Any, peers: Peers):
        self.whole, self.peers, self.num_ranks = config, peers, peers.size
        super().__init__(split_config(config, peers.size), *args)

    def _make_rows(self) -> Rows:
        made = super()._make_rows()
        rows = max(self.max_num_batched_tokens, self.max_num_samples, FEWEST_ROWS)
        width = padded_part(self.whole.vocab_size, self.peers.size)
        self.sums = [self.peers.share(rows * self.config.hidden_size, self.dtype) for _ in range(2)]
        self.logits_buffer = self.peers.share(LOGITS_ROWS * width, self.dtype)
        self.tokens = self.peers.share(self.max_num_seqs + 1, torch.int32)
        made.last_tokens = self.tokens.own(self.max_num_seqs + 1).zero_()
        return made

    def load(self, tensors: Iterable) -> None:
        whole, rank, size = self.whole, self.peers.rank, self.peers.size
        config = replace(self.config, vocab_size=padded_part(whole.vocab_size, size))
        modules = self.modules._replace(
            embedding=VocabParallelEmbedding,
            residual_linear=partial(SplitLinear if issubclass(self.modules.layer, FusedLayer) else RowParallelLinear,
                                    fp8=self.fp8),
            compute_logits=partial(gather_logits, self.logits_buffer, whole.vocab_size))
        part = find_cuts(whole, config, rank, size, modules)
        built: Any = build_model(config, tensors, self.dtype, self.device, self.max_model_len, modules, part)
        for layer in built.layers:
            layer.o_proj.buffer, layer.mlp.down_proj.buffer = self.sums
        built.embed_tokens.buffer = self.sums[1]
        self.model = built

    def agree(self, numbers: list[float], largest: bool) -> list[float]:
        return self.peers.agree(numbers, largest)

    @contextmanager
    def starting(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.peers.catch_up()
            raise

    def make_batch(self, sent: Any, logits_indices: Tensor | None, *args: Any) -> model.Batch:
        num_logits = len(sent.input_ids if logits_indices is None else logits_indices)
        # For the sampled tokens, the embedding, twice in each layer, and for the logits
        self.peers.barriers_left = 2 + 2 * self.config.num_layers + max(0, 2 * cdiv(num_logits, LOGITS_ROWS) - 1)
        tokens = self.tokens.all(self.max_num_seqs + 1)[0]
        if self.peers.rank:
            self.rows.last_tokens = tokens
        return super().make_batch(sent, logits_indices, *args)

    def _record(self, *step: Any) -> Any:
        recorded = super()._record(*step)  # type: ignore[misc]  # GraphRunner's
        self.peers.note_graph(recorded[0])
        return recorded

    def all_recorded(self, shape: Any) -> bool:
        return bool(self.agree([super().all_recorded(shape)], largest=False)[0])  # type: ignore[misc]

    def _run(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
        self.peers.barriers_left = 0


class Driver(ParallelRunner):
    """The runner of rank 0. workers: the processes of the other ranks."""

    def __init__(self, *args: Any, workers: "Workers", peers: Peers):
        self.workers = workers
        super().__init__(*args, peers=peers)

    @contextmanager
    def starting(self) -> Iterator[None]:
        with self.workers.explained():
            with super().starting():
                yield
            self.workers.wait_until_ready()

    def launch(self, step: engine.SchedulerOutput) -> Any:
        self.moves = replace(step, seqs=[], sampled=[], preempted=[])
        with self.workers.explained():
            return super().launch(step)

    def _compute(self, batch: StepInput, sampling_places: list[int], more_tokens: list[int],
                 needs: SamplingNeeds) -> ForwardPass:
        nobody: list[Any] = [None] * len(batch.seqs)
        self.workers.send((self.moves, self.rows.sent, replace(batch, seqs=nobody), sampling_places, more_tokens,
                           SamplingNeeds(is_late=needs.is_late)))
        self.peers.barriers_left = None
        try:
            computed = super()._compute(batch, sampling_places, more_tokens, needs)
        except Exception as error:
            if not self.peers.catch_up():
                sentence = f"rank 0 failed in the middle of a step ({error!r:.300}); make a new LLM"
                self.workers.fail(error=EngineDeadError(sentence))
            raise
        finally:
            self.workers.wait()
        return computed

    def wait(self, event: torch.cuda.Event) -> None:
        """A peer that has died never joins a barrier, so nothing waits for the device without looking after it."""
        with self.interruptible(), self.workers.waiting():
            while not event.query():
                self.workers.check()
                time.sleep(POLL_SECONDS)
        self.workers.check()


class Follower(ParallelRunner):
    """The runner of a worker."""

    @on_its_device
    @torch.inference_mode()
    def follow(self, message: tuple) -> None:
        """Launch the step that `Driver._compute` has sent."""
        self.peers.barriers_left = None
        moves, rows, *step = message
        self.pool.move(moves)
        self.rows.write(*rows)
        self._compute(*step)

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> Tensor:
        return rows.new_zeros(len(rows))  # rank 0 samples
