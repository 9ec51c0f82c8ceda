"""Chapter 3: the engine. Who computes what next, and where the results live.

A request becomes a **Sequence**: its tokens, its **block table**, and one number that carries the whole design,
`num_computed_tokens`: of how many of its tokens K and V are in the cache. There are **no phases**. A step
gives each scheduled sequence some more tokens to compute, and a whole prompt, a piece of one (chunked prefill),
one decoded token, the tail that a prefix-cache hit left over, and the recompute after a preemption are all
the same case: `num_computed_tokens` catching up with `num_tokens`.

    BlockManager   the pool: which blocks are free, who holds the others, which of them can be shared
    Scheduler      the step: who gets how many tokens, within the token budget and the pool
    LLM            requests in, schedule -> launch -> update until they are done, texts out

**One order rules**: (priority, arrival). Work is given out from the front of that order and, when the pool
runs dry, taken back from its end (preemption). So older sequences are served first, and decoding never
stalls behind a newer prompt.

The pool, with block_size 4, while B runs with A's first block shared (the same first four tokens):

    block          0    1    2    3    4    5
    tokens       abcd efg. .... efxy z... ....
    ref_count      2    1    0    1    1    0          free queue: 2, 5
    A's table    [ 0 ,  1 ]                            A: abcdefg      num_computed_tokens 7
    B's table    [ 0 ,            3 ,  4 ]             B: abcdefxyz    num_computed_tokens 9, of which 4 cached

Chapter 1 (kernel.py) attends over such tables, chapter 2 (model.py) is the forward pass; `nanopaged/runner.py`
turns a step into tensors. The ideas are those of Kwon et al. 2023 (PagedAttention, vLLM) and of Orca
(Yu et al. 2022: scheduling by iteration).
"""
import itertools
import random
import sys
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, Iterator

from kernel import cdiv
from model import ModelConfig
from nanopaged.checkpoint import eos_token_ids, find_checkpoint, read_config, read_tensors
from nanopaged.inputs import as_list, check_choice, check_number, check_sizes, read_prompt, wrap_int64
from nanopaged.outputs import Request, RequestOutput
from nanopaged.params import SamplingParams
from nanopaged.runner import Runner
from nanopaged.tokenizer import load_tokenizer

Status = Enum("Status", "WAITING RUNNING FINISHED")
ROOT = 0  # the identity of the empty prefix


# --------------------------------------------------------------------------------------------------
# Sequence
# --------------------------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Sequence:
    """One text under way: a prompt and what has been generated after it."""
    token_ids: list[int]  # prompt and generated tokens
    params: SamplingParams
    order: tuple  # (priority, arrival, sample): who is served first
    max_tokens: int  # the sequence ends when it has so many, prompt included
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    seed: int = 0
    request_id: str = ""
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache, or will be when the launched steps are done
    num_cached_tokens: int = 0  # those of them that were found there when it was admitted
    num_pending: int = 0  # tokens that a launched step samples and that are not known here yet
    block_table: list[int] = field(default_factory=list)
    row: int = -1  # its place in the runner's tensors while it runs
    num_sent_blocks: int = 0  # leading entries of the table that the runner has
    num_registered_blocks: int = 0  # leading blocks of the table that have been offered for sharing
    identity: int = ROOT  # of the tokens in those blocks
    min_free_blocks: int = 0  # it was not admitted because fewer were free
    finish_reason: str | None = None
    stop_reason: int | None = None

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    def append(self, token: int) -> None:
        """Take a sampled token, and finish if it is the last one."""
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            self.finish("stop", token if token in (self.params.stop_token_ids or ()) else None)
        elif len(self.token_ids) >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | None = None) -> None:
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason


# --------------------------------------------------------------------------------------------------
# BlockManager
# --------------------------------------------------------------------------------------------------

class BlockManager:
    """The pool of KV blocks: a reference count for each, a queue of the free ones, and which tokens the full ones hold.

    After every step each block is free (ref_count 0, in the queue once) or held (ref_count = number of block tables
    that list it), and a block that others hold is never written. Every operation is O(1) per block.

    **Prefix caching.** A full block can serve every sequence that begins with the same tokens up to its end. Its
    identity is the exact pair (identity of the block before it, its tokens), numbered as pairs come up, so there is
    no hash that could collide. A freed block keeps its identity until it is reused for something else.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self.cached: dict[tuple, tuple[int, int]] = {}  # (identity before, tokens) -> (block, identity)
        self.keys: dict[int, tuple] = {}  # block -> its key in `cached`
        self.identities = itertools.count(ROOT + 1)
        self.registered_this_step: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for its first num_tokens tokens. False, and nothing done, if too few are free."""
        missing = cdiv(num_tokens, self.block_size) - len(seq.block_table)
        if missing > len(self.free_queue):
            return False
        for _ in range(missing):
            seq.block_table.append(self._take())
        return True

    def _take(self) -> int:
        """The block that has been free for longest. Whatever it held is forgotten."""
        block, _ = self.free_queue.popitem(last=False)
        self._forget(block)
        self.ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        # Blocks that continue this one are not found any more either, because they are found through it:
        # its identity's number is not given out again.
        key = self.keys.pop(block, None)
        if key is not None:
            del self.cached[key]

    def free(self, seq: Sequence) -> None:
        """Take the sequence's blocks back: its tail becomes reusable before its head, which others more likely share."""
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None
        seq.block_table = []
        seq.num_computed_tokens = seq.num_registered_blocks = seq.num_sent_blocks = 0
        seq.identity = ROOT

    def find_prefix(self, seq: Sequence) -> tuple[list[int], int]:
        """The longest run of cached full blocks that the sequence begins with, and the identity of its tokens."""
        blocks, identity = [], ROOT
        if self.enable_prefix_caching:
            for end in range(self.block_size, len(seq.token_ids) + 1, self.block_size):
                found = self.cached.get((identity, tuple(seq.token_ids[end - self.block_size:end])))
                if found is None:
                    break
                block, identity = found
                blocks.append(block)
        return blocks, identity

    def admit(self, seq: Sequence) -> bool:
        """Start the sequence's table with the cached blocks it can share. False, and nothing done, if the pool has too
        few free blocks for the rest of its tokens."""
        if self.num_free_blocks < seq.min_free_blocks:  # as last time: do not look its prompt up again
            return False
        blocks, identity = self.find_prefix(seq)
        # A shared block that nobody holds at the moment lies in the free queue and has to leave it too.
        needed = cdiv(seq.num_tokens, self.block_size) - sum(self.ref_counts[block] > 0 for block in blocks)
        if needed > self.num_free_blocks:
            seq.min_free_blocks = needed
            return False
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1
        seq.min_free_blocks = 0
        seq.block_table, seq.num_registered_blocks, seq.identity = blocks, len(blocks), identity
        seq.num_cached_tokens = len(blocks) * self.block_size
        # If everything is cached, the last token is still computed, for its logits; its K and V are not written again.
        seq.num_computed_tokens = min(seq.num_cached_tokens, seq.num_tokens - 1)
        return True

    def register(self, seq: Sequence) -> None:
        """Offer the sequence's newly filled blocks for sharing. This happens when a step is scheduled, before K and V
        are computed: whoever shares them attends after they are written, in the same forward pass or a later one."""
        if not self.enable_prefix_caching:
            return
        size, known = self.block_size, min(seq.num_computed_tokens, len(seq.token_ids))
        for index in range(seq.num_registered_blocks, known // size):
            key = (seq.identity, tuple(seq.token_ids[index * size:(index + 1) * size]))
            if key not in self.cached:  # else another block holds the same tokens already, and ours stays private
                block = seq.block_table[index]
                self.cached[key] = block, next(self.identities)
                self.keys[block] = key
                self.registered_this_step.append(block)
            seq.identity = self.cached[key][1]
            seq.num_registered_blocks = index + 1

    def undo_registration(self) -> None:
        """The step failed: what it was to write was not written."""
        for block in self.registered_this_step:
            self._forget(block)


# --------------------------------------------------------------------------------------------------
# Scheduler
# --------------------------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Step:
    """What one step computes: for each scheduled sequence, how many tokens; and which of them sample a token."""
    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


def by_order(seq: Sequence) -> tuple:
    return seq.order


class Scheduler:
    """Decides what each step computes. `running` and `waiting` are kept in the one order, first served first."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_num_seqs))

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=by_order)

    def schedule(self) -> Step:
        """Give out the step's token budget from the front of the order."""
        step, budget = Step(), self.max_num_batched_tokens
        self.block_manager.registered_this_step = []
        turn, may_admit = 0, True  # running[:turn] have had their turn
        while budget > 0:
            if may_admit and self.waiting and (turn == len(self.running)
                                               or self.waiting[0].order < self.running[turn].order):
                may_admit = self._admit(turn, step)
                continue
            if turn == len(self.running):
                break
            seq = self.running[turn]
            # Nothing follows a sequence's last possible token, so its K and V are never needed.
            num_tokens = min(seq.num_tokens, seq.max_tokens - 1) - seq.num_computed_tokens
            num_tokens = min(num_tokens, budget)
            if num_tokens > 0:
                if not self._make_room(seq, num_tokens, step):
                    break
                self._compute(seq, num_tokens, step)
                budget -= num_tokens
            turn += 1
        return step

    def _admit(self, turn: int, step: Step) -> bool:
        """Let the first waiting sequence run, if there is a seat and the blocks: who comes after it in the order gives way."""
        seq = self.waiting[0]
        while len(self.running) >= self.max_num_seqs or not self.block_manager.admit(seq):
            if len(self.running) == turn:
                return False
            self._preempt(step)
        del self.waiting[0]
        seq.status, seq.row = Status.RUNNING, self.free_rows.pop()
        self.running.insert(turn, seq)
        return True

    def _make_room(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Blocks for the sequence's next tokens, taken from the end of the order if need be; itself, when it is last."""
        while not self.block_manager.grow(seq, seq.num_computed_tokens + num_tokens):
            if self._preempt(step) is seq:
                return False
        return True

    def _preempt(self, step: Step) -> Sequence:
        """Preemption by recompute: the last running sequence gives its blocks back and waits to start over. Its tokens
        are kept, and often its blocks are still in the prefix cache when it comes back."""
        seq = self.running[-1]
        self._remove(seq)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=by_order)
        step.preempted.append(seq)
        return seq

    def _compute(self, seq: Sequence, num_tokens: int, step: Step) -> None:
        step.seqs.append(seq)
        step.num_tokens.append(num_tokens)
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens == seq.num_tokens:  # caught up: the step samples its next token
            seq.num_pending += 1
            step.sampled.append(seq)
        self.block_manager.register(seq)

    def update(self, step: Step, tokens: list[int]) -> None:
        """Take the tokens that a launched step sampled, in the order of step.sampled."""
        for seq, token in zip(step.sampled, tokens, strict=True):
            seq.num_pending -= 1
            if seq.status is not Status.FINISHED:  # it may have been aborted meanwhile
                seq.append(token)
                if seq.status is Status.FINISHED:
                    self._remove(seq)

    def abort(self, seq: Sequence) -> None:
        """Stop a sequence wherever it is; its blocks are free at once."""
        if seq.status is not Status.FINISHED:
            seq.finish("abort")
            self._remove(seq)

    def undo(self, step: Step) -> None:
        """The step failed: forget what it promised, and let its sequences start over."""
        self.block_manager.undo_registration()
        for seq in step.sampled:
            seq.num_pending -= 1
        for seq in reversed(step.seqs):
            self._remove(seq)
            seq.status = Status.WAITING
            self.add(seq)

    def _remove(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        for queue in (self.running, self.waiting):
            index = bisect_left(queue, seq.order, key=by_order)
            if index < len(queue) and queue[index] is seq:
                del queue[index]
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1


# --------------------------------------------------------------------------------------------------
# LLM
# --------------------------------------------------------------------------------------------------

class LLM:
    """A model and its engine. Names and defaults are vLLM's.

    model: "shakespeare" (bundled) or a checkpoint directory in Hugging Face layout
    dtype: "auto" (the checkpoint's on CUDA, float32 on a CPU), "float32", "float16" or "bfloat16"
    device: "auto", "cuda", "cuda:1", "cpu"; attention: "auto", "triton" (kernel.py's kernel) or "torch"
    load_format: "auto", or "dummy": random weights from config.json alone, no tokenizer needed
    block_size: token slots per block (default: 64 on CUDA, 16 on a CPU)
    num_blocks: size of the pool (default: what fits in gpu_memory_utilization of the card; on a CPU 1 GiB or
        max_num_seqs full sequences, whichever is less)
    max_model_len: longest sequence, prompt included (default: the model's limit, or the pool's if that is less)
    max_num_seqs, max_num_batched_tokens: sequences, and tokens, that one step computes at most
    enable_prefix_caching: let sequences share the blocks of a common beginning
    scheduling_policy: "fcfs", or "priority": add_request's priority goes before arrival, smaller is sooner
    enforce_eager: the plain path, one step after the other: no CUDA graphs, no compiled functions, no lookahead
    seed: of the model's dummy weights and of the requests that bring none of their own

    Raises ValueError or FileNotFoundError, one sentence, for anything it cannot use.
    """

    def __init__(self, model: str = "shakespeare", *, dtype: str = "auto", device: str = "auto",
                 attention: str = "auto", load_format: str = "auto", block_size: int | None = None,
                 num_blocks: int | None = None, gpu_memory_utilization: float = 0.9, max_model_len: int | None = None,
                 max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, enable_prefix_caching: bool = True,
                 scheduling_policy: str = "fcfs", enforce_eager: bool = False, seed: int = 0):
        check_choice("load_format", load_format, ("auto", "dummy"))
        check_choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
        check_sizes(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens)
        check_number("gpu_memory_utilization", gpu_memory_utilization, (int, float), lambda x: 0 < x <= 1,
                     "a number above 0 and at most 1")
        check_number("seed", seed, int, lambda x: -2**63 <= x < 2**63, "an integer of at most 64 bits")
        path = find_checkpoint(model)
        self.config = ModelConfig.from_hf(read_config(path))
        limit = self.config.max_position_embeddings
        if max_model_len is not None and max_model_len > limit:
            raise ValueError(f"max_model_len {max_model_len} is more than the {limit} positions that the model was made for")
        self.path, self.tokenizer, self.tokenizer_error = path, None, None
        if load_format != "dummy":
            try:
                self.tokenizer = load_tokenizer(path)
            except ValueError as error:  # prompts of token ids work all the same
                self.tokenizer_error = error
        self.runner = Runner(
            self.config, None if load_format == "dummy" else read_tensors(path), dtype=dtype, device=device,
            attention=attention, seed=seed, block_size=block_size, max_model_len=max_model_len or limit,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, enforce_eager=enforce_eager)
        num_blocks, block_size = self.runner.allocate_pool(num_blocks, gpu_memory_utilization), self.runner.block_size
        if max_model_len is not None and num_blocks * block_size < max_model_len:
            raise ValueError(f"max_model_len {max_model_len} needs {cdiv(max_model_len, block_size)} blocks of {block_size} "
                             f"tokens, and the pool has {num_blocks}; lower it or give the pool more memory")
        self.max_model_len = max_model_len or min(limit, num_blocks * block_size)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size, enable_prefix_caching),
                                   max_num_seqs, max_num_batched_tokens)
        self.use_priority = scheduling_policy == "priority"
        self.eos_token_ids = eos_token_ids(path)
        self.requests: dict[str, Request] = {}  # those under way
        # Steps whose tokens have not been read yet. With lookahead, step n + 1 is planned and launched while the GPU
        # computes step n; a sequence that turns out finished has then wasted one token.
        self.launched: deque[tuple[Step, Callable[[], list[int]]]] = deque()
        self.lookahead = 1 if self.runner.use_graphs else 0
        self.arrivals = itertools.count()
        self.seeds = random.Random(seed)

    # ---- requests in

    def add_request(self, prompt, params: SamplingParams | None = None, priority: int = 0) -> str:
        """Queue a prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}) and return its request id.

        Raises ValueError if it can never run: empty, too long, or with ids that the model does not have.
        """
        params = params or SamplingParams()
        text, token_ids = read_prompt(prompt, self.get_tokenizer, self.config.vocab_size, self.max_model_len)
        arrival = next(self.arrivals)
        seed = params.seed if params.seed is not None else self.seeds.getrandbits(63)
        stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        sequences = [
            Sequence(list(token_ids), params, (priority if self.use_priority else 0, arrival, j),
                     min(len(token_ids) + params.max_tokens, self.max_model_len), stop, wrap_int64(seed + j), str(arrival))
            for j in range(params.n)]
        request = Request(str(arrival), text, token_ids, sequences, self.tokenizer)
        self.requests[request.request_id] = request
        for seq in sequences:
            self.scheduler.add(seq)
        return request.request_id

    def abort_request(self, request_id: str) -> None:
        """Stop a request; its blocks are free at once. A finished or unknown id is ignored."""
        request = self.requests.pop(request_id, None)
        for seq in request.sequences if request else ():
            self.scheduler.abort(seq)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_tokenizer(self):
        """The checkpoint's tokenizer. ValueError if it has none that can be read."""
        if self.tokenizer is None:
            raise self.tokenizer_error or ValueError("with load_format='dummy' there is no tokenizer; give prompts as token ids")
        return self.tokenizer

    # ---- the step

    def step(self) -> list[RequestOutput]:
        """Compute one step; what came of it for every request that got a token. Finished requests are gone afterwards."""
        return [request.output() for request in self._step()]

    def _step(self) -> list[Request]:
        step = self.scheduler.schedule()
        if step.seqs:
            try:
                self.launched.append((step, self.runner.launch(step)))
            except BaseException:
                self.scheduler.undo(step)
                while self.launched:
                    self._update()
                raise
        if len(self.launched) > self.lookahead or not step.seqs:
            return self._update()
        return []

    def _update(self) -> list[Request]:
        """Read the tokens of the oldest launched step; the requests that got one."""
        if not self.launched:
            return []
        step, read_tokens = self.launched[0]
        tokens = read_tokens()  # waits for the GPU; who is interrupted here can come back
        self.launched.popleft()
        self.scheduler.update(step, tokens)
        touched = dict.fromkeys(seq.request_id for seq in step.sampled)
        requests = [self.requests[request_id] for request_id in touched if request_id in self.requests]
        for request in requests:
            if request.finished:
                del self.requests[request.request_id]
        return requests

    # ---- conveniences

    def generate(self, prompts, sampling_params: SamplingParams | list[SamplingParams] | None = None) -> list[RequestOutput]:
        """Run prompts to the end, together; outputs in their order.

        prompts: one prompt or a list of them, each a text, a list of token ids, or a dict (see add_request)
        sampling_params: one for all, or one for each. ValueError, before anything runs, if a prompt can never run.
        """
        prompts = as_list(prompts)
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(sampling_params)} sampling_params; give one, or one for each")
        requests = []
        try:
            for prompt, params in zip(prompts, sampling_params):
                requests.append(self.requests[self.add_request(prompt, params)])
            while any(request.request_id in self.requests for request in reversed(requests)):
                self._step()
        finally:  # an error, or Ctrl-C
            for request in requests:
                self.abort_request(request.request_id)
        return [request.output() for request in requests]

    def stream(self, prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Run one prompt and yield its text in pieces, as they come; other requests under way go on beside it."""
        request_id, length = self.add_request(prompt, params), 0
        try:
            while request_id in self.requests:
                for output in self.step():
                    if output.request_id == request_id:
                        text = output.outputs[0].text
                        yield text[length:]
                        length = len(text)
        finally:
            self.abort_request(request_id)


if __name__ == "__main__":
    from nanopaged.cli import main
    sys.exit(main(LLM))
