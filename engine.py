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

Chapter 1 (kernel.py) attends over such tables, chapter 2 (model.py) is the forward pass; `nanopaged/device/runner.py`
turns a step into tensors. The ideas are those of Kwon et al. 2023 (PagedAttention, vLLM) and of Orca
(Yu et al. 2022: scheduling by iteration).
"""
import itertools
import random
import sys
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Callable, Iterator

from nanopaged.arithmetic import cdiv, wrap_int64
from nanopaged.weights.checkpoint import eos_token_ids, find_checkpoint, read_config, read_generation_config, read_tensors
from nanopaged.api.llm import Frontend
from nanopaged.inputs import as_python, check_kind, check_number, check_options, read_prompt
from nanopaged.api.lock import StepLock
from nanopaged.device.logits import encode_bad_words
from nanopaged.outputs import NO_TOKEN, Request, RequestOutput
from nanopaged.sampling_params import SamplingParams
from nanopaged.device.runner import Runner, Sampled
from nanopaged.text.tokenizer import load_tokenizer
from nanopaged.weights.families import read_model_config
from torch import OutOfMemoryError

Status = Enum("Status", "WAITING RUNNING SWAPPED FINISHED")
ROOT = 0  # the identity of the empty prefix
NULL = -1  # in a block table: that block fell out of the sliding window and is somebody else's now
PROMPT_LOGPROBS_CHUNK = 512  # prompt tokens that a step computes of a sequence that wants the logits of all of them,
PROMPT_LOGPROBS_VALUES = 2**23  # and how many log probabilities these may be
STEPS_UNTIL_MORE = 64  # after a step that ran out of memory: so many steps later the token budget is doubled again


# --------------------------------------------------------------------------------------------------
# Sequence
# --------------------------------------------------------------------------------------------------

@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One text under way: a prompt and what has been generated after it."""
    token_ids: list[int]  # prompt and generated tokens
    params: SamplingParams
    order: tuple  # (priority, arrival, number in its request): who is served first
    max_len: int  # the sequence ends when it has so many tokens, prompt included
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    seed: int = 0
    request_id: str = ""
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    siblings: "dict[Sequence, None]" = field(default_factory=dict)  # of the same prompt, those that run: they share its blocks
    waits_for_token: bool = False  # nothing more is computed of it before the host has seen the token it sampled last
    num_logprobs: int | None = None  # give the log probability of each sampled token and of so many of the best; -1: all
    candidates: list | None = None  # a beam's best next tokens, (token, log probability); beam search takes its pick
    logprobs: list[tuple] = field(default_factory=list)  # of the generated tokens, as the runner gives them
    wants_prompt_logprobs: bool = False
    max_chunk: int | None = None  # tokens that one step computes of it at most; None: as many as the budget allows
    bad_words: list[list[int]] = ()
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache, or will be when the launched steps are done
    num_held_tokens: int = 0  # those of them that were there when it was admitted: never written by this sequence
    num_cached_tokens: int | None = None  # prompt tokens that were there when it was admitted first
    num_pending: int = 0  # tokens that a launched step samples and that are not known here yet
    block_table: list[int] = field(default_factory=list)
    row: int = -1  # its place in the runner's tensors while it runs
    num_sent_blocks: int = 0  # leading entries of the table that the runner has
    num_registered_blocks: int = 0  # leading blocks of the table that have been offered for sharing
    identity: int = ROOT  # of the tokens in those blocks
    num_null_blocks: int = 0  # leading entries of the table that are NULL
    host_table: list[int] = field(default_factory=list)  # where its blocks are on the host, while it is SWAPPED
    min_free_blocks: int = 0  # it was not admitted because fewer were free
    found: tuple = (None, None)  # what it could share then: key of the first block that was not cached, sibling
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; the message, if a logits processor failed

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    def append(self, token: int) -> None:
        """Take a sampled token, and finish if it is the last one."""
        if token < 0:
            return self.finish("error", self.stop_reason or NO_TOKEN)
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            self.finish("stop", token if token in (self.params.stop_token_ids or ()) else None)
        elif len(self.token_ids) >= self.max_len:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason


# --------------------------------------------------------------------------------------------------
# BlockManager
# --------------------------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Step:
    """What one step computes: for each scheduled sequence, how many tokens; and which of them sample a token. Before that,
    blocks are moved: out to the host, copied, and in from the host, in this order."""
    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, its copy)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    registered: list[int] = field(default_factory=list)  # blocks that this step offers for sharing


class BlockManager:
    """The pool of KV blocks: a reference count for each, a queue of the free ones, and which tokens the full ones hold.

    After every step each block is free (ref_count 0, in the queue once) or held (ref_count = number of block tables
    that list it), and a block that others hold is never written. Every operation is O(1) per block.

    **Prefix caching.** A full block can serve every sequence that begins with the same tokens up to its end. Its
    identity is the exact pair (identity of the block before it, its tokens), numbered as pairs come up, so there is
    no hash that could collide. A freed block keeps its identity until it is reused for something else.

    **Copy-on-write.** Samples of one prompt and beams also share a block that is not full. Whoever is to write into it
    while others hold it, gets a copy; the last one writes into the original.

    **Swapping.** A preempted sequence's blocks may wait on the host, in a second, smaller pool.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0,
                 num_host_blocks: int = 0):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.window = window  # tokens that the next one sees, itself included, in any layer; 0: all
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self.num_host_blocks, self.free_host_blocks = num_host_blocks, list(range(num_host_blocks))[::-1]
        self.cached: dict[tuple, tuple[int, int]] = {}  # (identity before, tokens) -> (block, identity)
        self.keys: dict[int, tuple] = {}  # block -> its key in `cached`
        self.identities = itertools.count(ROOT + 1)
        self.step = Step()  # the one that is being scheduled
        self.most_blocks = num_blocks  # that one sequence can hold
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of all sequences admitted so far; of these, found in the cache
        self.num_saved_blocks = 0  # of the prompts: found in the cache, so that none had to be taken

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def begin_step(self) -> Step:
        # Host blocks that a step reads are not free before the next: it writes others to the host first.
        if self.step.swaps_in:
            self.free_host_blocks += [host_block for host_block, _ in self.step.swaps_in]
            self.free_host_blocks.sort(reverse=True)  # neighbours are moved at once
        self.step = Step()
        return self.step

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for its first num_tokens tokens, those that will be written its own. False, and
        nothing done, if too few are free."""
        table, position = seq.block_table, max(seq.num_computed_tokens, seq.num_held_tokens)  # of the first token to write
        first = position // self.block_size
        is_shared = position < num_tokens and first < len(table) and self.ref_counts[table[first]] > 1
        missing = cdiv(num_tokens, self.block_size) - len(table)
        if not (missing or is_shared):
            return True
        if missing + is_shared > len(self.free_queue):
            return False
        if is_shared:  # copy-on-write
            copy = self._take()
            self.step.copies.append((table[first], copy))
            self.ref_counts[table[first]] -= 1
            table[first] = copy
            seq.num_sent_blocks = min(seq.num_sent_blocks, first)
        for _ in range(missing):
            table.append(self._take())
        return True

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that have fallen out of the sliding window of the sequence's next token."""
        for i in range(seq.num_null_blocks, self._num_unseen(seq.num_computed_tokens)):
            self._release(seq.block_table[i])
            seq.block_table[i] = NULL
            seq.num_null_blocks = i + 1

    def _num_unseen(self, position: int) -> int:
        """How many leading blocks lie before the window of the token at this position."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

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

    def _hold(self, block: int) -> None:
        if block != NULL:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def _release(self, block: int) -> None:
        if block != NULL:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None

    def free(self, seq: Sequence) -> None:
        """Take the sequence's blocks back: its tail becomes reusable before its head, which others more likely share."""
        for block in reversed(seq.block_table):
            self._release(block)
        self.free_host_blocks += [block for block in reversed(seq.host_table) if block != NULL]
        seq.block_table, seq.host_table = [], []
        seq.num_computed_tokens = seq.num_registered_blocks = seq.num_sent_blocks = seq.num_null_blocks = 0
        seq.identity = ROOT

    def swap_out(self, seq: Sequence) -> bool:
        """Move the sequence's blocks to the host. False, and nothing done, if there is not enough room for them."""
        computed, table = seq.num_computed_tokens, seq.block_table
        if not computed or len(table) - seq.num_null_blocks > len(self.free_host_blocks):
            return False
        host_table = [NULL if block == NULL else self.free_host_blocks.pop() for block in table]
        self.step.swaps_out += [pair for pair in zip(table, host_table) if pair[0] != NULL]
        self.free(seq)
        seq.host_table, seq.num_computed_tokens = host_table, computed
        return True

    def find_prefix(self, seq: Sequence) -> tuple[list[int], int, int]:
        """Blocks that hold the sequence's first tokens already, how many tokens these are, and the identity of the last full
        block; ROOT for a sibling's blocks, which `register` looks up one by one."""
        blocks, identity, size, missing_key = [], ROOT, self.block_size, None
        if self.enable_prefix_caching and not seq.wants_prompt_logprobs:  # what is not computed has none
            for end in range(size, len(seq.token_ids) + 1, size):
                key = (identity, tuple(seq.token_ids[end - size:end]))
                if key not in self.cached:
                    missing_key = key
                    break
                block, identity = self.cached[key]
                blocks.append(block)
        num_tokens, sibling = self._num_shareable(seq), self._find_sibling(seq)
        seq.found = missing_key, sibling
        if sibling and len(blocks) * size < num_tokens:
            return sibling.block_table[:cdiv(num_tokens, size)], num_tokens, ROOT
        return blocks, len(blocks) * size, identity

    def _num_shareable(self, seq: Sequence) -> int:
        """Tokens of its prompt that a sequence can share with a sibling, which has the same prompt: all of them, though the
        last block is not full. Only whole blocks once it has generated tokens: it would have to copy the last one before
        this step, which may only now compute it."""
        size = self.block_size
        return seq.num_prompt_tokens if seq.num_tokens == seq.num_prompt_tokens else seq.num_prompt_tokens // size * size

    def _find_sibling(self, seq: Sequence) -> Sequence | None:
        """A running sequence of the same prompt that has these tokens in its blocks."""
        num_tokens = self._num_shareable(seq)
        for other in seq.siblings:
            if num_tokens <= other.num_computed_tokens and other.num_null_blocks <= self._num_unseen(num_tokens - 1):
                return other
        return None

    def _is_still_blocked(self, seq: Sequence) -> bool:
        """Whether the pool has too few free blocks, as it had last time, and the sequence can share no more than it could then.
        Its prompt need not be looked up again."""
        missing_key, sibling = seq.found
        return (self.num_free_blocks < seq.min_free_blocks and missing_key not in self.cached
                and self._find_sibling(seq) is sibling)

    def admit(self, seq: Sequence) -> bool:
        """Start the sequence's table with the blocks it can share and those that wait for it on the host. False, and
        nothing done, if the pool has too few free blocks for the rest of its tokens."""
        if self._is_still_blocked(seq):
            return False
        blocks, num_tokens, identity = self.find_prefix(seq)
        num_held_tokens = max(num_tokens, seq.num_computed_tokens)  # it has computed some if it was swapped
        # If everything is cached, the last token is still computed, for its logits; its K and V are not written again.
        num_computed_tokens = min(num_held_tokens, seq.num_tokens - 1)
        num_found, unseen = len(blocks), self._num_unseen(num_computed_tokens)
        blocks[:unseen] = [NULL] * min(unseen, max(num_found, len(seq.host_table)))  # no block for what it sees no more
        swapped, not_needed = seq.host_table[len(blocks):], seq.host_table[:len(blocks)]
        # A shared block that nobody holds at the moment lies in the free queue and has to leave it too.
        needed = cdiv(seq.num_tokens, self.block_size) - sum(block == NULL or self.ref_counts[block] > 0 for block in blocks)
        needed -= swapped.count(NULL)
        needed = min(needed, self.most_blocks)  # with a window, a text longer than the pool slides through it
        if needed > self.num_free_blocks:
            seq.min_free_blocks = needed
            return False
        for block in blocks:
            self._hold(block)
        seq.min_free_blocks, seq.found = 0, (None, None)
        seq.num_held_tokens, seq.num_computed_tokens = num_held_tokens, num_computed_tokens
        seq.block_table, seq.identity = blocks, identity
        seq.num_registered_blocks = num_found if identity != ROOT else 0
        for host_block in swapped:
            seq.block_table.append(NULL if host_block == NULL else self._take())
            if host_block != NULL:
                self.step.swaps_in.append((host_block, seq.block_table[-1]))
        self.free_host_blocks += [block for block in not_needed if block != NULL]
        seq.host_table, seq.num_null_blocks = [], 0
        while seq.num_null_blocks < len(seq.block_table) and seq.block_table[seq.num_null_blocks] == NULL:
            seq.num_null_blocks += 1
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(num_tokens, seq.num_prompt_tokens)
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.num_cached_tokens
            self.num_saved_blocks += num_found
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child go on where the parent is, with the same blocks; who writes first will copy."""
        for block in parent.block_table:
            self._hold(block)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = child.num_held_tokens = parent.num_computed_tokens
        child.num_registered_blocks, child.identity = parent.num_registered_blocks, parent.identity
        child.num_null_blocks, child.num_cached_tokens = parent.num_null_blocks, parent.num_cached_tokens

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
                if block == NULL:  # gone, and what follows it can only be found through it
                    return
                self._forget(block)  # by an identity whose predecessor has left the window
                self.cached[key] = block, next(self.identities)
                self.keys[block] = key
                self.step.registered.append(block)
            seq.identity = self.cached[key][1]
            seq.num_registered_blocks = index + 1

    def undo_registration(self, step: Step) -> None:
        """The step failed: what it was to write was not written."""
        for block in step.registered:
            self._forget(block)

    def check_idle(self) -> None:
        """With no request under way every block must be free. RuntimeError otherwise: a mistake in this file."""
        self.begin_step()
        held, held_on_host = self.num_blocks - len(self.free_queue), self.num_host_blocks - len(self.free_host_blocks)
        if held or held_on_host or any(self.ref_counts):
            raise RuntimeError(f"the engine is idle, yet {held} blocks and {held_on_host} host blocks are held: please report this")


# --------------------------------------------------------------------------------------------------
# Scheduler
# --------------------------------------------------------------------------------------------------

def by_order(seq: Sequence) -> tuple:
    return seq.order


class Scheduler:
    """Decides what each step computes. `running` and `waiting` are kept in the one order, first served first."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_chunk = max_num_batched_tokens  # tokens that one step computes of one sequence at most
        if block_manager.window:  # window and chunk have to fit the pool, and may begin within a block
            size, window = block_manager.block_size, block_manager.window
            self.max_chunk = min(self.max_chunk, (block_manager.num_blocks - 1) * size - window)
            block_manager.most_blocks = cdiv(window + self.max_chunk, size) + 1
        self.waiting: list[Sequence] = []  # WAITING or SWAPPED
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_num_seqs))

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=by_order)

    def schedule(self) -> Step:
        """Give out the step's token budget from the front of the order."""
        step, budget = self.block_manager.begin_step(), self.max_num_batched_tokens
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
            known = len(seq.token_ids) if seq.waits_for_token else seq.num_tokens
            num_tokens = min(known, seq.max_len - 1) - seq.num_computed_tokens
            num_tokens = min(num_tokens, budget, seq.max_chunk or self.max_chunk, self.max_chunk)
            if num_tokens > 0:
                if self.block_manager.window:
                    self.block_manager.slide(seq)
                if not self._make_room(seq, num_tokens, step):
                    break
                self._compute(seq, num_tokens, step)
                budget -= num_tokens
            turn += 1
        return step

    def _admit(self, turn: int, step: Step) -> bool:
        """Let the first waiting sequence run, if there is a seat and the blocks: who comes after it in the order gives way."""
        seq = self.waiting[0]
        if seq in step.preempted:  # not before the next step: the token it sampled last may not be known here yet
            return False
        while len(self.running) >= self.max_num_seqs or not self.block_manager.admit(seq):
            if len(self.running) == turn:
                return False
            self._preempt(step)
        del self.waiting[0]
        self._seat(seq)
        return True

    def _seat(self, seq: Sequence) -> None:
        seq.status, seq.row = Status.RUNNING, self.free_rows.pop()
        seq.siblings[seq] = None
        insort(self.running, seq, key=by_order)

    def _make_room(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Blocks for the sequence's next tokens, taken from the end of the order if need be; itself, when it is last."""
        while not self.block_manager.grow(seq, seq.num_computed_tokens + num_tokens):
            if self._preempt(step) is seq:
                return False
        return True

    def _preempt(self, step: Step) -> Sequence:
        """The last running sequence gives its blocks back. They are moved to the host, if there is room, and otherwise
        computed again when it returns (preemption by swapping, by recompute); its tokens are kept.

        Which is cheaper? On an H200 with Qwen3-0.6B moving took 5.2 us a token, there and back, and computing again 2.4 ms
        for 256 tokens, 5.2 for 1,024, 14.8 for 4,096 and 95 for 16,384: swapping was cheaper up to some 1,000 tokens, and
        again for very long texts, where attention counts. `bench.py --only swapping` measures it where you are.
        """
        seq = self.running[-1]
        is_swapped = self.block_manager.swap_out(seq)
        self._unseat(seq)
        if not is_swapped:
            self.block_manager.free(seq)
        seq.status = Status.SWAPPED if is_swapped else Status.WAITING
        self.add(seq)
        step.preempted.append(seq)
        return seq

    def _compute(self, seq: Sequence, num_tokens: int, step: Step) -> None:
        step.seqs.append(seq)
        step.num_tokens.append(num_tokens)
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens == seq.num_tokens:  # caught up: the step samples its next token
            seq.num_pending += 1
            step.sampled.append(seq)
            seq.candidates = None if seq.candidates is None else []
        self.block_manager.register(seq)

    def update(self, step: Step, tokens: list[int], logprobs: list[tuple | None] | None = None) -> None:
        """Take the tokens that a launched step sampled, in the order of step.sampled, with log probabilities (see
        runner.Sampled) where they are wanted."""
        for i, (seq, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            seq.num_pending -= 1
            if seq.status is Status.FINISHED:  # it was aborted meanwhile
                continue
            if seq.candidates is not None:  # a beam waits for the others
                seq.candidates = list(zip(*logprobs[i][2:]))
                continue
            if seq.num_logprobs is not None and token >= 0:
                seq.logprobs.append(logprobs[i])
            seq.append(token)
            if seq.status is Status.FINISHED:
                self._remove(seq)

    def branch(self, beams: list[Sequence], spares: list[Sequence], origins: list[tuple[int, int]]) -> list[Sequence]:
        """A step of beam search: for each (index of a beam, token) a sequence that continues this beam with this token. A
        beam's first continuation is itself, others fork; beams without one die and are spares for the next time."""
        parents = [beams[index] for index, _ in origins]
        for beam in beams:
            if beam not in parents:
                self.retire(beam)
                spares.append(beam)
        children = [spares.pop() if parent in parents[:i] else parent for i, parent in enumerate(parents)]
        for parent, child in zip(parents, children):
            if child is not parent:
                child.token_ids, child.status = list(parent.token_ids), Status.WAITING
                if parent.status is Status.RUNNING and len(self.running) < self.max_num_seqs:
                    self.block_manager.fork(parent, child)
                    self._seat(child)
                else:  # its tokens are computed again, as after a preemption
                    self.add(child)
        for child, (_, token) in zip(children, origins):
            child.token_ids.append(token)
            child.candidates = []
            if child.status is Status.FINISHED:  # it had been retired
                child.status = Status.WAITING
                self.add(child)
        return children

    def retire(self, seq: Sequence) -> None:
        """Take a sequence out, for now or for good; its blocks are free at once."""
        self._remove(seq)
        seq.status = Status.FINISHED

    def abort(self, seq: Sequence) -> None:
        """Stop a sequence wherever it is; its blocks are free at once."""
        if seq.status is not Status.FINISHED:
            seq.finish("abort")
            self._remove(seq)

    def undo(self, step: Step) -> None:
        """The step failed: forget what it promised, and let its sequences start over."""
        self.block_manager.undo_registration(step)
        for seq in step.sampled:
            seq.num_pending -= 1
        for seq in step.preempted[::-1] + step.seqs[::-1]:  # what was to be swapped out has not been, either
            self._remove(seq)
            seq.status = Status.WAITING
            self.add(seq)

    def _remove(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        self._unseat(seq)

    def _unseat(self, seq: Sequence) -> None:
        for queue in (self.running, self.waiting):
            index = bisect_left(queue, seq.order, key=by_order)
            if index < len(queue) and queue[index] is seq:
                del queue[index]
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1
            del seq.siblings[seq]


# --------------------------------------------------------------------------------------------------
# LLM
# --------------------------------------------------------------------------------------------------

class LLM(Frontend):
    """A model and its engine. Names and defaults are vLLM's. `generate`, `chat`, `stream` and `beam_search` are in
    nanopaged/api/llm.py; what they are made of is here: `add_request`, `step`, `abort_request`.

    model: "shakespeare" (bundled), a checkpoint directory in Hugging Face layout, or a name on the Hub, "org/name"
    revision: branch, tag or commit of a model on the Hub (default: main, or what the cache has of it)
    dtype: "auto" (the checkpoint's on CUDA, float16 for bfloat16 on cards before Ampere; float32 on a CPU), "float32" ("float"),
        "float16" ("half") or "bfloat16"
    device: "auto", "cuda", "cuda:1", "cpu"; attention: "auto", "triton" (kernel.py's kernel) or "torch"
    load_format: "auto", or "dummy": random weights from config.json alone, no tokenizer needed
    block_size: token slots per block (default: 64 on CUDA, 16 on a CPU)
    num_blocks (or num_gpu_blocks_override): size of the pool (default: what fits in gpu_memory_utilization of the card; on a
        CPU 1 GiB or max_num_seqs full sequences, whichever is less)
    max_model_len: longest sequence, prompt included (default: the model's limit, or the pool's if that is less)
    max_num_seqs, max_num_batched_tokens: sequences, and tokens, that one step computes at most
    enable_prefix_caching: let sequences share the blocks of a common beginning
    kv_cache_dtype: "auto" (as dtype), or "fp8" ("fp8_e4m3"): a byte per number, so twice the tokens of 16 bits
    swap_space: GiB of host memory for the blocks of preempted sequences; 0: these are computed again
    generation_config: "auto": requests without settings follow the checkpoint's generation_config.json; "vllm": not
    tokenizer, skip_tokenizer_init: the directory or name of another tokenizer; none at all
    scheduling_policy: "fcfs", or "priority": add_request's priority goes before arrival, smaller is sooner
    enforce_eager: the plain path, one step after the other: no CUDA graphs, no compiled functions, no lookahead
    seed: of the model's dummy weights and of the requests that bring none of their own
    vllm_options: others of vLLM's (inputs.VLLM_OPTIONS): those without a meaning here are ignored, and others refused where
        they ask for something
    scheduler.waiting, scheduler.running, scheduler.block_manager.num_free_blocks and .num_blocks tell what is under way

    Threads may use all methods at the same time: one step is computed at a time, and serves all of them.

    Raises, with one sentence: ValueError for anything it cannot use, FileNotFoundError for what is not there, and another
    OSError, ConnectionError above all, for what the Hub does not give.
    """

    def __init__(self, model: str = "shakespeare", *, revision: str | None = None, dtype: str = "auto", device: str = "auto",
                 attention: str = "auto", load_format: str = "auto", block_size: int | None = None,
                 num_blocks: int | None = None, gpu_memory_utilization: float = 0.9, max_model_len: int | None = None,
                 max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, enable_prefix_caching: bool = True,
                 kv_cache_dtype: str = "auto", swap_space: float = 0, generation_config: str = "auto",
                 scheduling_policy: str = "fcfs", enforce_eager: bool = False, seed: int = 0,
                 tokenizer: str | None = None, skip_tokenizer_init: bool = False, num_gpu_blocks_override: int | None = None,
                 **vllm_options):
        check_options(
            vllm_options, model=model, tokenizer=tokenizer, load_format=load_format, generation_config=generation_config,
            kv_cache_dtype=kv_cache_dtype, scheduling_policy=scheduling_policy, enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager, skip_tokenizer_init=skip_tokenizer_init, block_size=block_size, num_blocks=num_blocks,
            num_gpu_blocks_override=num_gpu_blocks_override, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, gpu_memory_utilization=gpu_memory_utilization, swap_space=swap_space,
            seed=seed)
        num_blocks = num_blocks if num_gpu_blocks_override is None else num_gpu_blocks_override
        # A model that cannot be run is refused before its weights are downloaded.
        path = find_checkpoint(model, revision, check=lambda path: read_model_config(read_config(path)),
                               config_only=load_format == "dummy")
        self.config = read_model_config(read_config(path))
        limit = self.config.max_position_embeddings
        if max_model_len is not None and max_model_len > limit:
            raise ValueError(f"max_model_len {max_model_len} is more than the {limit} positions that the model was made for")
        self.path, self.tokenizer, self.tokenizer_error = path, None, None
        self.tokenizer_path = path
        if tokenizer not in (None, model) and load_format != "dummy":  # a directory needs no config.json beside it
            self.tokenizer_path = Path(tokenizer) if Path(tokenizer).is_dir() else find_checkpoint(tokenizer)
        if load_format != "dummy" and not skip_tokenizer_init:
            try:
                self.tokenizer = load_tokenizer(self.tokenizer_path)
            except ValueError as error:  # prompts of token ids work all the same
                self.tokenizer_error = error
        self.runner = Runner(
            self.config, None if load_format == "dummy" else read_tensors(path), dtype=dtype, device=device,
            attention=attention, seed=seed, block_size=block_size, max_model_len=max_model_len or limit,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype,
            enforce_eager=enforce_eager)
        num_blocks, block_size = self.runner.allocate_pool(num_blocks, gpu_memory_utilization), self.runner.block_size
        window = self.config.window if self.config.window < (num_blocks - 1) * block_size else 0  # else of no use
        if max_model_len is not None and num_blocks * block_size < max_model_len and not window:
            raise ValueError(f"max_model_len {max_model_len} needs {cdiv(max_model_len, block_size)} blocks of {block_size} "
                             f"tokens, and the pool has {num_blocks}; lower it or give the pool more memory")
        self.max_model_len = max_model_len or (limit if window else min(limit, num_blocks * block_size))
        num_host_blocks = self.runner.allocate_host_pool(swap_space)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size, enable_prefix_caching, window, num_host_blocks),
                                   max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens, self.num_small_steps = max_num_batched_tokens, 0
        self.use_priority = scheduling_policy == "priority"
        self.eos_token_ids = eos_token_ids(path)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            self.eos_token_ids.add(self.tokenizer.eos_token_id)  # some fine-tunes change it there alone
        self.default_params = {} if generation_config == "vllm" else read_generation_config(path)
        self.requests: dict[str, Request] = {}  # those under way
        self.unreported: dict[str, Request] = {}  # those that `step` is to tell of
        self.chat_templates: dict = {}  # those that were used, by their source
        self.lock = StepLock()  # held while a step is computed, and by callers that change what it looks at
        # Steps whose tokens have not been read yet. With lookahead, step n + 1 is planned and launched while the GPU
        # computes step n; a sequence that turns out finished has then wasted one token.
        self.launched: deque[tuple[Step, Callable[[], Sampled]]] = deque()
        self.lookahead = 1 if self.runner.use_graphs else 0
        self.arrivals = itertools.count()
        self.seeds = random.Random(seed)

    # ---- requests in

    def add_request(self, prompt, params: SamplingParams | None = None, priority: int = 0) -> str:
        """Queue a prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}) and return its request id.

        params: None: the checkpoint's defaults (get_default_sampling_params)
        priority: smaller is sooner, with scheduling_policy="priority"; otherwise only 0
        Raises ValueError if it can never run: empty, too long, or with ids that the model does not have.
        """
        request = self._read_request(prompt, params, priority)
        with self.lock:
            self._add(request, is_reported=True)
        return request.request_id

    def _read_request(self, prompt, params: SamplingParams | None, priority: int = 0) -> Request:
        """A request that is checked and tokenised, and not added yet."""
        if params is None:
            params = self.get_default_sampling_params()
        check_kind("sampling_params", params, SamplingParams, "SamplingParams")
        check_number("priority", priority := as_python(priority), int, lambda x: self.use_priority or x == 0,
                     "an integer" if self.use_priority else "0, unless scheduling_policy is 'priority'")
        text, token_ids = read_prompt(prompt, self.get_tokenizer, self.config.vocab_size, self.max_model_len)
        params.check_vocabulary(self.config.vocab_size)
        bad_words = encode_bad_words(params.bad_words, self.get_tokenizer()) if params.bad_words else []
        if params.stop:
            self.get_tokenizer()  # without one there is no text to find them in
        stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        return Request(text, token_ids, params, priority if self.use_priority else 0, stop, bad_words, self.tokenizer)

    def _add(self, request: Request, is_reported: bool = False) -> None:
        """Queue a request; the caller has the lock."""
        params, token_ids = request.params, request.prompt_token_ids
        arrival = next(self.arrivals)
        seed = int(params.seed) if params.seed is not None else self.seeds.getrandbits(63)
        max_len = min(len(token_ids) + (params.max_tokens or self.max_model_len), self.max_model_len)
        count, chunk = params.prompt_logprobs, None
        if count is not None:
            values = self.config.vocab_size if count < 0 else min(count, self.config.vocab_size)
            chunk = min(PROMPT_LOGPROBS_CHUNK, max(1, PROMPT_LOGPROBS_VALUES // max(1, values)))
        sequences = [
            Sequence(list(token_ids), params, (request.priority, arrival, j), max_len, request.stop_token_ids,
                     wrap_int64(seed + j), str(arrival), num_logprobs=params.logprobs, bad_words=request.bad_words,
                     wants_prompt_logprobs=count is not None and j == 0, max_chunk=chunk if j == 0 else None,
                     waits_for_token=bool(params.logits_processors))
            for j in range(params.n)]
        request.start(str(arrival), sequences, is_reported)
        self.requests[request.request_id] = request
        for seq in sequences:
            seq.siblings = sequences[0].siblings
            self.scheduler.add(seq)

    def _add_beams(self, token_ids: list[int], width: int, group) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences for a beam search: the one that begins, and those that it will branch into."""
        max_len, num_candidates = len(token_ids) + group.max_tokens, min(group.num_candidates, self.config.vocab_size)
        with self.lock:
            arrival = next(self.arrivals)
            first, *spares = [
                Sequence(list(token_ids), SamplingParams(temperature=0), (0, arrival, j), max_len, request_id=f"beam {arrival}",
                         waits_for_token=True, num_logprobs=num_candidates, candidates=[]) for j in range(width)]
            self.scheduler.add(first)
        return [first], spares

    def abort_request(self, request_id: str) -> None:
        """Stop a request; its blocks are free at once (from within a step, as by a logits processor: when the step is done). A
        finished or unknown id is ignored."""
        check_kind("request_id", request_id, str, "what add_request returned")
        self.lock.change(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        self.unreported.pop(request_id, None)
        if request:
            for seq in request.sequences:
                self.scheduler.abort(seq)
            request.end()
            self._check_if_idle()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        return bool(self.requests or self.unreported)

    def _check_if_idle(self) -> None:
        """With nothing under way the books must balance."""
        if not (self.launched or self.scheduler.running or self.scheduler.waiting):
            self.scheduler.block_manager.check_idle()

    # ---- the step

    def step(self) -> list[RequestOutput]:
        """Compute one step; what came of it for every request of `add_request` that got a token, and of such requests in
        steps that others made meanwhile (`generate`, `stream`). Finished requests are gone afterwards."""
        with self.lock.turn(self._has_reports):
            if not self.unreported:
                self._step()
            reports, self.unreported = self.unreported, {}
            return [request.output() for request in reports.values()]

    def _has_reports(self) -> bool:
        return bool(self.unreported)

    @contextmanager
    def _steps_until(self, is_done: Callable[[], bool]) -> Iterator[None]:
        """Compute steps until is_done(), which those of other threads may bring about; then the caller has the lock."""
        with self.lock.turn(is_done):
            while not is_done():
                self._step()
                self.lock.pass_on(is_done)
            yield

    def _step(self) -> None:
        """The step itself; the caller has the lock."""
        step = self.scheduler.schedule()
        if step.seqs:
            try:
                with self.lock.interrupts.let_through():
                    read = self.runner.launch(step)
            except BaseException as error:
                self.runner.forget_rows(step.seqs)
                self.scheduler.undo(step)
                while self.launched:
                    self._update()
                if not self._can_do_with_less_memory(error):
                    raise
            else:
                self.launched.append((step, read))
                self._ask_for_more_again()
        else:
            self.scheduler.undo(step)  # blocks that it took back it will not move out
            if not self.launched:  # nobody can go on: beams that wait for other beams hold what those need
                for seq in [seq for seq in self.scheduler.running if seq.candidates]:
                    self.scheduler.retire(seq)
        if len(self.launched) > self.lookahead or not step.seqs:
            self._update()

    def _can_do_with_less_memory(self, error: BaseException) -> bool:
        """After a step that ran out of the device's memory: go on with half the token budget for a while, and say so."""
        budget = self.scheduler.max_num_batched_tokens // 2
        if not isinstance(error, OutOfMemoryError) or budget == 0:
            return False
        print(f"out of memory: steps compute at most {budget} tokens for a while; start with a lower "
              "gpu_memory_utilization to leave room for more", file=sys.stderr)
        self.scheduler.max_num_batched_tokens, self.num_small_steps = budget, 0
        self.runner.release_memory()
        return True

    def _ask_for_more_again(self) -> None:
        """What took the memory may be gone: let a budget that was halved grow back."""
        if self.scheduler.max_num_batched_tokens < self.max_num_batched_tokens:
            self.num_small_steps += 1
            if self.num_small_steps == STEPS_UNTIL_MORE:
                self.num_small_steps = 0
                self.scheduler.max_num_batched_tokens = min(2 * self.scheduler.max_num_batched_tokens, self.max_num_batched_tokens)

    def _update(self) -> None:
        """Read the tokens of the oldest launched step, and tell their requests."""
        if not self.launched:
            return
        step, read = self.launched[0]
        with self.lock.interrupts.let_through():
            sampled = read()  # waits for the GPU; who is interrupted here can come back
        self.launched.popleft()
        self.scheduler.update(step, sampled.tokens, sampled.logprobs)
        for seq, position, logprobs in sampled.prompt_logprobs:
            if seq.request_id in self.requests:
                self.requests[seq.request_id].take_prompt_logprobs(position, logprobs)
        for seq in step.sampled:
            request = self.requests.get(seq.request_id)
            if request is None:
                continue
            reason = request.take(seq)
            if reason is not None:
                seq.finish(*reason)
                self.scheduler.retire(seq)
            if request.finished:
                del self.requests[request.request_id]
            if request.is_reported:
                self.unreported[request.request_id] = request
        self._check_if_idle()


if __name__ == "__main__":
    from nanopaged.cli.main import main
    sys.exit(main(LLM))
