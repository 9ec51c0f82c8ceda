"""CUDA graphs: steps that are recorded once, sampling included, and then replayed as a whole.

A step launches hundreds of kernels, and the GPU finishes them faster than the CPU can launch them. One call replays a
recorded step. A recorded step has fixed sizes and reads its integers from one tensor. A smaller step is therefore
padded with tokens of slot -1, whose K and V are not written, and with sequences of no new and no cached token. A step
that is too large to record, that would be padded too much, or that wants log probabilities of prompts is launched
kernel by kernel (runner.py).

The largest sizes are recorded at the start, and the others when a step first needs them, which takes some 30 ms. With
`warm_up` all are recorded at the start.
"""
import warnings
from contextlib import suppress
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from nanopaged import model
from nanopaged.device.runner import Runner, StepTensors
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.device.step_input import StepInput
from nanopaged.device.transfer import ForwardPass, integers
from nanopaged.tiles import DECODE_SIZES, FEW_SEQS, MANY_CONTEXTS, MAX_DECODE_SIZE, PADDED_ANYWAY, TOKEN_SIZES

MIN_FILLED = 7 / 8  # of a recorded step, by a step of more than PADDED_ANYWAY tokens
LONG_CONTEXT = 4096  # tokens; see `graph_shape`
SHORT_CHUNK = 16  # tokens that a grammar forced; see `one_token_places`


class Shape(NamedTuple):
    """The size of a recorded step."""
    num_tokens: int
    num_seqs: int
    num_tiles: int  # entries of the kernel's work list for prompts; 0: one token per sequence, so none
    num_entries: int = 0  # of a cascade (features/cascade.py)
    cascade_columns: int = 0

    @property
    def layout(self) -> list[int]:
        """The lengths of the parts of its input: those of StepInput.lists, and the work list."""
        tokens, seqs, tiles, entries, _ = self
        more = [seqs, 4 * entries] if entries else []
        return [tokens, tokens, tokens, seqs + 1, seqs, seqs, *more, 2 * tiles]


class GraphRunner(Runner):
    """A Runner on CUDA with recorded steps and a lookahead of one step."""
    lookahead = 1
    cascade: Any = None  # see cascade.py
    splits_chunks = True  # with recurrent states (features/kinds) a chunk's tokens cannot be places of their own

    def __init__(self, *args: Any, **options: Any) -> None:
        # The recorded steps: graph, logits, tokens. None: not recorded yet; False: that failed.
        self.graphs: dict[Shape, Any] = {}
        super().__init__(*args, **options)

    def _compute(self, batch: StepInput, more_tokens: list[int], needs: SamplingNeeds) -> ForwardPass:
        is_short = 1 < max(batch.num_tokens) <= SHORT_CHUNK and len(batch.seqs) < self.max_num_samples
        if needs.is_late and is_short and self.splits_chunks:
            split = one_token_places(batch)
            batch = split if len(split.seqs) <= self.max_num_samples else batch
        shape = None if more_tokens else self.graph_shape(batch.num_tokens, batch.seq_lens)
        if shape and batch.more:
            room = next(room for room in self.cascade.rooms if 4 * room >= len(batch.more[1]))
            shape = shape._replace(num_entries=room, cascade_columns=self.columns)
        if shape is None or not self.record(shape):
            return super()._compute(batch, more_tokens, needs)
        return self._replay(shape, batch, needs)

    def graph_shape(self, query_lens: list[int], seq_lens: list[int]) -> Shape | None:
        """The smallest size with room for a step of these lengths; None: launch the step kernel by kernel."""
        num_tokens = sum(query_lens)
        decodes = [seq_len for query_len, seq_len in zip(query_lens, seq_lens) if query_len == 1]
        only_decodes = len(decodes) == len(query_lens)
        shape = min((shape for shape in self.graphs if (shape.num_tiles == 0) == only_decodes and not shape.num_entries
                     and shape.num_tokens >= num_tokens and shape.num_seqs >= len(query_lens)), default=None)
        if shape and not only_decodes:
            if PADDED_ANYWAY < num_tokens < shape.num_tokens * MIN_FILLED:
                return None
            # A recorded launch counts shape.num_seqs contexts, padding included. If these are many, each has a program
            # per kv head. If few sequences decode, and one is long, its programs would run alone for too long.
            many_seqs = MANY_CONTEXTS / self.config.num_kv_heads
            if decodes and max(decodes) > LONG_CONTEXT and len(decodes) < many_seqs <= shape.num_seqs:
                return None
        return shape

    def shapes(self) -> list[Shape]:
        """The sizes of recorded steps, the largest first."""
        most_tokens = self.max_num_batched_tokens
        most_seqs = min(self.max_num_samples, most_tokens, MAX_DECODE_SIZE)
        decodes = [Shape(size, size, 0) for size in {most_seqs} | {size for size in DECODE_SIZES if size < most_seqs}]
        # A step with room for few sequences computes logits, and samples, for few rows.
        mixed = [Shape(size, seqs, self.num_query_tiles(size, seqs))
                 for size in {most_tokens} | {size for size in TOKEN_SIZES if size < most_tokens}
                 for seqs in {min(size, most_seqs, count) for count in (FEW_SEQS, most_seqs)}]
        return sorted(decodes + mixed, reverse=True)

    def prepare(self) -> None:
        """Make the tensors that all recorded steps share, and record the largest steps: the others fit into the memory
        that these take, which trial.py has left free."""
        shapes = self.shapes()
        self.graphs = dict.fromkeys(shapes)
        most_seqs = max(shape.num_seqs for shape in shapes)
        most = max(shape for shape in shapes if not shape.num_tiles)
        largest = {min(shapes), max(shapes), most}
        most_entries = self.cascade.rooms[-1] if self.cascade else 0
        if self.cascade:  # its sums of splits take memory, too
            largest.add(most._replace(num_entries=most_entries, cascade_columns=self.cascade.widest))
        most_ints = max(sum(shape._replace(num_entries=most_entries).layout) for shape in shapes)
        self.graph_input = torch.zeros(most_ints, dtype=torch.int32, device=self.device)
        self.graph_logits = torch.empty(most_seqs, self.config.vocab_size, dtype=self.dtype, device=self.device)
        self.graph_memory: Any = None  # of all recordings
        # The default stream cannot record. One stream of this device serves all recordings.
        self.graph_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        for shape in sorted(largest.union(shapes if self.options.warm_up else ()), reverse=True):
            self.record(shape)

    def record(self, shape: Shape) -> bool:
        """Record the step of this size, if that was not tried before. False: the recording failed."""
        if self.graphs.get(shape) is None:
            reason = "another GPU failed"
            try:
                self.graphs[shape] = self._record(self._static_step, shape)
            # An AcceleratorError: another thread waited for the whole device, which ends a recording.
            except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
                reason = str(error).partition("\n")[0]
            if not self.all_recorded(shape):
                self.graphs[shape] = False
                warnings.warn(f"a step of {shape.num_tokens} tokens could not be recorded ({reason}). Such steps are "
                              "launched kernel by kernel, which is slower. For memory, lower gpu_memory_utilization; "
                              "with warm_up=True all steps are recorded at the start")
        return bool(self.graphs[shape])

    def all_recorded(self, shape: Shape) -> bool:
        """Whether all GPUs of the model have recorded it."""
        return bool(self.graphs.get(shape))

    def _record(self, step: Callable[[Any], tuple[Tensor, Tensor]],
                size: Any) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """A graph of step(size), and the tensors that the step returns; each replay writes them again. A recording only
        notes the launches, and no kernel runs. (The context manager torch.cuda.graph would also wait for the device,
        collect garbage and give cached memory back, which a request would wait for.)"""
        graph = torch.cuda.CUDAGraph()
        if self.graph_stream:
            torch.cuda.current_blas_handle()  # each thread has one, and making it during a recording fails
        with torch.cuda.stream(self.graph_stream):
            graph.capture_begin(self.graph_memory, capture_error_mode="thread_local")
            try:
                outputs = step(size)
            except BaseException:
                with suppress(RuntimeError):  # the recording is not valid
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graph_memory = self.graph_memory or graph.pool()
        return graph, *outputs

    def _static_step(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """A step of this shape that reads the graph input and samples a token for every sequence: (logits, tokens). It
        does so for padding and for unfinished chunks, too. Nobody reads these tokens: the padding's row is no
        sequence's, and the host knows the ids of the next chunk."""
        *parts, tiles = self.graph_input[:sum(shape.layout)].split(shape.layout)
        sent, logits_indices, places = StepTensors.of(parts), None, None
        self.columns = shape.cascade_columns
        if shape.num_tiles:
            logits_indices = (sent.query_start_loc[1:] - 1).clamp(min=0)
            places = torch.arange(shape.num_seqs, device=self.device)
        # Of max_query_len the model only asks whether it is 1; max_seq_len must hold for every context.
        metadata = model.AttentionMetadata(2 if shape.num_tiles else 1, self.max_model_len, shape.num_seqs,
                                           tiles.view(-1, 2))
        batch = self.make_batch(sent, logits_indices, places, metadata)
        logits = self.model(batch, self.kv_cache, self.kernels, out=self.graph_logits[:shape.num_seqs])
        return logits, self.sample(logits, sent.rows, sent.seq_lens, SamplingNeeds())

    def _replay(self, shape: Shape, batch: StepInput, needs: SamplingNeeds) -> ForwardPass:
        """`Runner._compute` by a recorded step: pad the lists, copy them into the graph input, replay."""
        num_seqs, sampling_places = len(batch.seqs), batch.sampling_places
        tiles = []
        if shape.num_tiles:
            tiles = self.make_query_tiles(batch.num_tokens, batch.seq_lens, *shape[:2]).flatten().tolist()
        # In the order of `Shape.layout`. Padding has slot -1, sequences without tokens, and a batch row of its own.
        fillers = [0, 0, -1, len(batch.input_ids), 0, self.max_num_seqs, *[0] * len(batch.more), -1]
        message = integers([part + [filler] * (length - len(part))
                            for part, length, filler in zip([*batch.lists, tiles], shape.layout, fillers)])
        if self.device.type == "cuda":
            message = message.pin_memory()
        self.graph_input[:len(message)].copy_(message, non_blocking=True)
        graph, logits, tokens = self.graphs[shape]
        self._run(graph)
        _, _, _, _, lens, rows, *_ = self.graph_input[:len(message)].split(shape.layout)
        if not sampling_places:
            return ForwardPass(partial(tokens.narrow, 0, 0, 0), logits[:0])
        if needs.is_late and len(needs.plans) == 1 and not (needs.filters or needs.keeps_logits):
            change, plan = needs.plans[0]
            return ForwardPass(partial(change.redraw, self, batch, tokens, plan), logits)
        if len(sampling_places) == num_seqs:
            tokens, logits, lens, rows = (tensor[:num_seqs] for tensor in (tokens, logits, lens, rows))
        else:
            at = self.send([sampling_places])[0]
            tokens, logits, lens, rows = (tensor.index_select(0, at) for tensor in (tokens, logits, lens, rows))
        if needs.filters or needs.plans:  # the graph drew from the plain logits
            return ForwardPass(partial(self.sample, logits, rows, lens, needs), logits)
        return ForwardPass(lambda: tokens, logits)

    def _run(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()


def one_token_places(batch: StepInput) -> StepInput:
    """The same step as a decode step with a place for each token.

    A few forced tokens are a chunk, and beside decoding sequences a chunk needs a step with room for prompts, which
    takes longer. The places of one sequence have the same block table, and each attends up to its own token. That is
    right because every layer writes all K and V before it attends:

        a chunk of 3 tokens after 4 cached ones            places with seq_lens 5, 6, 7
    """
    split = StepInput([], [], batch.input_ids, batch.positions, batch.slot_mapping, sampled_rows=batch.sampled_rows)
    for seq, num_tokens, seq_len, row in zip(batch.seqs, batch.num_tokens, batch.seq_lens, batch.rows):
        split.seqs += [seq] * num_tokens
        split.num_tokens += [1] * num_tokens
        split.seq_lens += range(seq_len - num_tokens + 1, seq_len + 1)
        split.rows += [row] * num_tokens
    split.query_start_loc = list(range(len(split.seqs) + 1))
    split.sampling_places = [batch.query_start_loc[place + 1] - 1 for place in batch.sampling_places]
    if batch.more:  # of a cascade: a chunk has nothing in common
        num_common_tokens, entries = batch.more
        split.more = [num_common_tokens + [0] * (len(split.seqs) - len(num_common_tokens)), entries]
    return split
