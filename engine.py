"""Chapter 3: the engine. It decides what the next step computes, and where the results live.

Generating text is a loop: the model reads the tokens so far, and the next token is sampled. All earlier keys and
values (K and V) are in the KV cache, so the sampled token is the only new input of the next step. The steps that read
the prompt are called prefill, the later ones decode. This chapter serves many texts at once, and sequences join and
leave the batch at every step (continuous batching; Yu et al. 2022, Orca).

Chapter 1 explains why the cache is a pool of **blocks** with `block_size` token slots, and why a sequence has a
**block table** (paging; Kwon et al. 2023). Here blocks are only numbers, and this chapter does the bookkeeping. Texts
of 1,000, 30 and 500 tokens hold 63, 2 and 32 blocks of 16. The second text's 31st token takes no block, its 33rd takes
one, and nothing is ever moved.

**No phases.** A sequence has `num_tokens`, prompt and generated. K and V of the first `num_computed_tokens` are in the
KV cache, or will be after the steps scheduled so far. A whole prompt, a chunk of one, one decoded token, the tail that
a prefix-cache hit left over, and the recompute after a preemption are all the same case: `num_computed_tokens` catches
up with `num_tokens`. When it has, the step samples the next token.

    add(Sequence)                                                          vLLM's names
      Scheduler            waiting and running: who computes how much      Scheduler, SchedulerOutput
        BlockManager       free, held and cached blocks: dicts and lists   KVCacheManager, BlockPool
      StepInput            the step as lists of integers                   InputBatch, AttentionMetadata
      runner               the model, the pool's tensors, the sampler      GPUModelRunner
      Scheduler.update     appends the sampled tokens, ends sequences      Scheduler.update_from_output

`Engine` runs this loop. The file is plain Python without torch: nanopaged/device/runner.py makes tensors of a
StepInput, and nanopaged/api/llm.py has what users call.
"""
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Callable, NamedTuple, Protocol

Status = Enum("Status", "WAITING RUNNING SWAPPED FINISHED")
ROOT = 0  # the prefix key of no tokens
NULL = -1  # in a block table: a block that left the sliding window and was freed (scheduling/window.py)
NO_TOKEN = "the model's output is infinite or not a number, or no token is allowed"  # goes with finish_reason "error"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


# --------------------------------------------------------------------------------------------------
# Sequence, and what a step computes
# --------------------------------------------------------------------------------------------------

class Listener(Protocol):
    """A hook into the tokens of a sequence, for log probabilities, beam search and grammars. See nanopaged/api/."""

    def on_token(self, seq: "Sequence", token: int, logprobs: Any) -> list[int]:
        """The step has sampled `token`. Returns the tokens to append. An empty list pauses the sequence until tokens
        are appended from outside."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One text: a prompt and the tokens generated after it.

        WAITING -> RUNNING     admitted: it gets a batch row, and blocks as its tokens are computed
        RUNNING -> WAITING     preempted, paused while no step is under way, or its step failed: its blocks are freed
        RUNNING -> SWAPPED     preempted: its blocks move to the host (with swapping)
        SWAPPED -> RUNNING     admitted: its blocks come back
        SWAPPED -> WAITING     the step that preempted it is undone
        any     -> FINISHED    a stop token, max_len, a stop string, abort, error

    num_tokens is len(token_ids) + num_pending_tokens. A prompt of 8 tokens, 0 to 7:

                              admitted   0 to 7 scheduled   8 known   8 scheduled
        num_computed_tokens   0          8                  8         9
        num_pending_tokens    0          1                  0         1
        num_tokens            8          9                  9         10

    A listener may pause a sequence: no step computes it until a token is appended from outside. Then `resume` queues it
    again, if its blocks were taken meanwhile.
    """
    token_ids: list[int]  # prompt and generated tokens
    order: tuple  # (priority, arrival, number in its request): unique, smaller is served first
    max_len: int  # the sequence ends when it has this many tokens, prompt included
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    request_id: str = ""
    sampling: Any = None  # what the runner wants to know about sampling (nanopaged/device); opaque here
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it, or what went wrong
    num_prompt_tokens: int = 0
    # Tokens whose K and V are in the KV cache (while SWAPPED: on the host), or will be after the scheduled steps
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0  # tokens that scheduled steps sample and that are not known on the host yet
    num_hit_tokens: int = 0  # leading tokens whose K and V it was given (prefix hit, fork, swap): it never writes them
    block_table: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0  # leading blocks whose tokens the prefix cache has, or had when they were looked up
    prefix_key: int | str = ROOT  # of the tokens in those blocks
    row: int = -1  # its batch row in the runner's tensors while it runs
    num_sent_blocks: int = 0  # leading entries of its table that the runner has; a copy-on-write lowers it

    # For additions to this chapter
    listener: Listener | None = None
    max_chunk: int | None = None  # the most tokens of it that a step may compute; None: the token budget
    may_look_ahead: bool = True  # its next step may be planned before its last token is known on the host
    reads_prefix_cache: bool = True  # False: log probabilities of the prompt are wanted, so all of it is computed
    root: int | str = ROOT  # its prefix key of no tokens: only sequences with the same root share cached blocks
    samples: Any = None  # all samples of its prompt, if n > 1 (nanopaged/scheduling/samples.py)
    drafter: Any = None  # guesses its next tokens (nanopaged/scheduling/drafts.py)
    drafts: list[int] = field(default_factory=list)  # guesses in a scheduled step, not checked yet
    pool: "BlockManager | None" = None  # the manager of its blocks; None: it has had none yet
    num_null_blocks: int = 0  # leading entries of the block table that are NULL
    host_table: list[int] = field(default_factory=list)  # its blocks on the host, while it is SWAPPED
    num_cached_tokens: int | None = None  # statistics: prompt tokens found at its first admission; None: never admitted

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that could be computed now. The last possible token is never an input, so it needs no K and V. With
        drafts under way the next input, the token after the last right draft, is not known yet."""
        known = self.num_tokens if self.may_look_ahead and not self.drafts else len(self.token_ids)
        return min(known, self.max_len - 1) - self.num_computed_tokens

    def is_pending(self, position: int) -> bool:
        """Whether a sample under way for this position may become a token of the text. Samples are read in the order of
        their positions, so this one's is the next, or the text has passed it: a grammar has forced tokens. (After a
        wrong draft no sample is pending.)"""
        return self.num_pending_tokens > 0 and position >= len(self.token_ids)

    def rewind(self, end: int) -> None:
        """A grammar has forced more tokens, or a draft was wrong. The samples under way continue another text, and the
        K and V from position `end` on are not those of this one."""
        self.num_computed_tokens = min(self.num_computed_tokens, end)
        self.num_pending_tokens, self.drafts = 0, []

    def append(self, token: int) -> None:
        """Take a sampled token, and finish if it is a stop token or the last possible one."""
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            self.finish("stop", token)
        elif len(self.token_ids) >= self.max_len:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason


@dataclass(eq=False, slots=True)
class SchedulerOutput:
    """What one step computes: how many tokens of each scheduled sequence, and for each sampled token its sequence and
    its position there. Before that the runner moves blocks: out to the host, copies, and in from the host, in this
    order."""
    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, its copy)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    cached: list[int] = field(default_factory=list)  # blocks that this step offers to the prefix cache
    num_drafts: int = 0  # of all sequences


# --------------------------------------------------------------------------------------------------
# BlockManager
# --------------------------------------------------------------------------------------------------

class PrefixHit(NamedTuple):
    """The beginning of a sequence whose K and V are in the pool, or will be before the sequence attends."""
    blocks: list[int]
    num_tokens: int
    prefix_key: int | str  # of the first num_cached_blocks of these blocks
    num_cached_blocks: int


class BlockManager:
    """The pool of KV blocks: a reference count for each, a queue of the free ones, and the prefix cache.

        block          0    1    2    3    4    5           block_size 4: B found A's first block in the prefix cache
        tokens       abcd efg. .... efxy z... ....
        ref_count      2    1    0    1    1    0           free queue: 2, 5
        A's table    [ 0 ,  1 ]                             A: abcdefg      num_computed_tokens 7
        B's table    [ 0 ,            3 ,  4 ]              B: abcdefxyz    num_computed_tokens 9, num_cached_tokens 4

    After every step each block is free (ref_count 0, once in the queue) or held (ref_count = number of block tables
    that list it). A sequence copies a block that others hold before it writes new tokens there.

    **Prefix caching.** A full block can serve every sequence that begins with the same tokens up to the block's end.
    The prefix cache finds it by the exact pair (prefix key of the tokens before the block, the block's tokens), so two
    texts cannot collide. A prefix key is a number: each new pair gets the next one, which stands for all tokens up to
    the block's end. (The key of no tokens is 0, or a request's cache_salt.) A freed block stays in the prefix cache
    until it is reused. The block that was freed longest ago is reused first (LRU). A sequence frees its last block
    first, because a block cannot be found without those before it.

    **Copy-on-write.** Samples of one prompt and beams also share a block that is not full. A sequence that is about to
    write into it while others hold it gets a copy. The last holder writes into the original, which leaves the prefix
    cache before.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self.prefix_cache: dict[tuple, tuple[int, int]] = {}  # (prefix key before, tokens) -> (block, prefix key)
        self.key_of_block: dict[int, tuple] = {}  # block -> its key in `prefix_cache`
        self.prefix_keys = itertools.count(ROOT + 1)
        self.step = SchedulerOutput()  # the step that is being scheduled
        # Of all first admissions so far: tokens of prompts, those that were found, and the blocks that have them
        self.num_prompt_tokens = self.num_cached_tokens = self.num_saved_blocks = 0
        self.most_blocks_held = 0  # after `schedule`, of all steps so far

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def largest_chunk(self, max_num_batched_tokens: int) -> int:
        """The most tokens of one sequence that a step may compute. (A sliding window may lower it.)"""
        return max_num_batched_tokens

    def begin_step(self) -> SchedulerOutput:
        self.step = SchedulerOutput()
        return self.step

    # ---- while a sequence runs

    def allocate(self, seq: Sequence, end: int) -> bool:
        """Extend the block table to cover the text's first `end` tokens; False if the pool has too few free blocks. A
        block that others hold is copied before it is written. Only the block of the first token to write can need this:
        earlier blocks are not written, and later ones are not shared, because what a hit or a fork gave ends there.
        (block_size 4, 6 tokens found: token 5 is computed again and needs no copy. Token 6 is written, into a copy of
        block 1 if others hold block 1.)"""
        # Of a prompt that was found whole the last token is computed again, and not written.
        table, first_to_write = seq.block_table, max(seq.num_computed_tokens, seq.num_hit_tokens)
        first = first_to_write // self.block_size
        writes_first = first_to_write < end and first < len(table)
        must_copy = writes_first and self.ref_counts[table[first]] > 1
        num_missing = max(0, cdiv(end, self.block_size) - len(table))  # wrong drafts may have left more
        if writes_first and not must_copy and table[first] in self.key_of_block:
            self._evict(table[first])  # a sample of the same prompt, now gone, may have filled and offered the block
        if not (num_missing or must_copy):
            return True
        if num_missing + must_copy > len(self.free_queue):
            return False
        if must_copy:
            copy = self._pop_free_block()
            self.step.copies.append((table[first], copy))
            self._decref(table[first])
            table[first] = copy
            seq.num_sent_blocks = min(seq.num_sent_blocks, first)
        for _ in range(num_missing):
            table.append(self._pop_free_block())
        return True

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Offer for sharing the blocks that the scheduled step fills. Their K and V are not computed yet, but a
        sequence that shares them attends after they are written, in the same forward pass or a later one."""
        if not self.enable_prefix_caching:
            return
        # A token that is not known on the host yet cannot be part of a key. Its block is offered one step later.
        size, num_known = self.block_size, min(seq.num_computed_tokens, len(seq.token_ids))
        for index in range(seq.num_cached_blocks, num_known // size):
            key = (seq.prefix_key, tuple(seq.token_ids[index * size:(index + 1) * size]))
            if key not in self.prefix_cache:
                block = seq.block_table[index]
                if block == NULL:  # it left the sliding window, and later blocks could be found only through it
                    return
                # The block may have a key that nothing finds any more. Say the cache had the tokens P in another block,
                # and X after P in this one. The other block was evicted, and P was cached again, with a new number.
                # This block still has the key (old number of P, X).
                self._evict(block)
                self.prefix_cache[key] = block, next(self.prefix_keys)
                self.key_of_block[block] = key
                self.step.cached.append(block)
            # else: the cache has these tokens already. If it has them in another block, this one stays private
            seq.prefix_key = self.prefix_cache[key][1]
            seq.num_cached_blocks = index + 1

    def uncache(self, blocks: list[int]) -> None:
        for block in blocks:
            self._evict(block)

    def free(self, seq: Sequence) -> None:
        """Free the blocks, the last one first."""
        for block in reversed(seq.block_table):
            self._decref(block)
        seq.block_table, seq.prefix_key = [], seq.root
        seq.num_computed_tokens = seq.num_cached_blocks = seq.num_sent_blocks = 0

    def preempt(self, seq: Sequence) -> Status:
        """Take the sequence's blocks. Its tokens are computed again when it returns (recompute), unless swapping keeps
        the blocks on the host (nanopaged/scheduling/swapping.py)."""
        self.free(seq)
        return Status.WAITING

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child go on where the parent is, with the same blocks (copy-on-write)."""
        for block in parent.block_table:
            self._incref(block)
        child.block_table, child.pool = list(parent.block_table), self
        child.num_computed_tokens = child.num_hit_tokens = parent.num_computed_tokens
        child.num_cached_blocks, child.prefix_key = parent.num_cached_blocks, parent.prefix_key
        child.num_cached_tokens = parent.num_cached_tokens

    # ---- admission: what a sequence can share, and whether the rest fits

    def admit(self, seq: Sequence) -> bool:
        """Start the block table of a waiting sequence with the blocks that it can share; `allocate` adds the rest when
        a step computes their tokens. False, taking none, if too few are free for all its tokens so far. The rest is not
        reserved: if it is gone when a later chunk needs it, sequences are preempted."""
        hit = self.plan(seq)
        if hit is not None:
            self.start(seq, hit)
        return hit is not None

    def plan(self, seq: Sequence) -> PrefixHit | None:
        """The blocks that the sequence can share; None if too few are free for the rest of its tokens."""
        hit = self.find_prefix(seq)
        return hit if self.num_blocks_needed(seq, hit) <= self.num_free_blocks else None

    def num_blocks_needed(self, seq: Sequence, hit: PrefixHit) -> int:
        # A hit block with ref_count 0 is still in the free queue, so it counts as needed.
        return cdiv(seq.num_tokens, self.block_size) - sum(self.ref_counts[block] > 0 for block in hit.blocks)

    def start(self, seq: Sequence, hit: PrefixHit) -> None:
        for block in hit.blocks:
            self._incref(block)
        # Even if every token is cached, the last one is computed again for its logits. Its K and V are not written.
        seq.num_hit_tokens, seq.num_computed_tokens = hit.num_tokens, min(hit.num_tokens, seq.num_tokens - 1)
        seq.pool, seq.block_table = self, list(hit.blocks)
        seq.num_cached_blocks, seq.prefix_key = hit.num_cached_blocks, hit.prefix_key
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(hit.num_tokens, seq.num_prompt_tokens)
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.num_cached_tokens
            self.num_saved_blocks += len(hit.blocks)

    def find_prefix(self, seq: Sequence) -> PrefixHit:
        """The longest beginning that the prefix cache has, or what another sample of the same prompt can give."""
        hit = self._find_in_cache(seq)
        return hit if seq.samples is None else seq.samples.find(self, seq, hit)

    def _find_in_cache(self, seq: Sequence) -> PrefixHit:
        blocks: list[int] = []
        prefix_key, size = seq.root, self.block_size
        if self.enable_prefix_caching and seq.reads_prefix_cache:
            for end in range(size, len(seq.token_ids) + 1, size):
                found = self.prefix_cache.get((prefix_key, tuple(seq.token_ids[end - size:end])))
                if found is None:
                    break
                block, prefix_key = found
                blocks.append(block)
        return PrefixHit(blocks, len(blocks) * size, prefix_key, len(blocks))

    # ---- single blocks

    def _pop_free_block(self) -> int:
        """The least recently used free block. Its old contents cannot be found any more."""
        block, _ = self.free_queue.popitem(last=False)
        self._evict(block)
        self.ref_counts[block] = 1
        return block

    def _evict(self, block: int) -> None:
        """Take a block out of the prefix cache. Blocks after it are not found any more either: their keys contain its
        prefix key, and that number is not given out again."""
        key = self.key_of_block.pop(block, None)
        if key is not None:
            del self.prefix_cache[key]

    def _incref(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            del self.free_queue[block]
        self.ref_counts[block] += 1

    def _decref(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_queue[block] = None

    def check_idle(self) -> None:
        """With no request under way every block must be free. RuntimeError otherwise: a mistake in this file."""
        self.begin_step()  # with swapping, host blocks that the last step read are free from here on
        num_held = self.num_blocks - len(self.free_queue)
        if num_held or any(self.ref_counts):
            raise RuntimeError(f"the engine is idle, yet {num_held} blocks are held: please report this")


# --------------------------------------------------------------------------------------------------
# Scheduler
# --------------------------------------------------------------------------------------------------

def by_order(seq: Sequence) -> tuple:
    return seq.order


def discard(queue: list[Sequence], seq: Sequence) -> None:
    index = bisect_left(queue, seq.order, key=by_order)
    if index < len(queue) and queue[index] is seq:
        del queue[index]


class Scheduler:
    """Decides what each step computes.

    **One order rules**: priority, then arrival. `running` and `waiting` are kept in it. The token budget is given out
    from the front of the order. When the pool runs dry, the last sequences in the order lose their blocks (preemption).
    They keep their place in the order. Equal priorities are first come, first served: no step leaves a decoding text
    out for a newer prompt, but an older long prompt takes the whole budget before a newer one gets any. With priorities
    a decoding text also waits for more urgent prompts. If the budget is smaller than the number of decoding texts, the
    later ones wait until earlier ones end.

    Every accepted sequence can run alone: LLM limits max_len to the tokens of the whole pool, unless the pool is larger
    than a sliding window and a block. So the first sequence in the order always fits, at the latest after all others
    are preempted. With equal priorities every other one becomes the first in the end.

    A and B decode, and C comes with a prompt of 32 tokens: `num_tokens` is [1, 1, 32], all three sample, and the next
    step is [1, 1, 1]. With max_num_batched_tokens 16, C's prompt is cut into chunks instead: [1, 1, 14], [1, 1, 14],
    [1, 1, 4]. Only the last of them samples a token of C (chunked prefill).
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_chunk = block_manager.largest_chunk(max_num_batched_tokens)
        self.waiting: list[Sequence] = []  # WAITING or SWAPPED
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_num_seqs))
        self.num_generated_tokens = self.num_preemptions = 0  # of all sequences so far
        self.observers: list[Callable[[str, Any], object]] = []  # told of each change (nanopaged/cli/frames.py)

    def tell(self, change: str, of: Any = None) -> None:
        """The method of this name has changed a step or a sequence. "begin": a step is going to be scheduled."""
        for observe in self.observers:
            observe(change, of)

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=by_order)

    def schedule(self) -> SchedulerOutput:
        """Walk `waiting` and `running` as one list, merged by order, and give out the token budget. A waiting sequence
        is admitted when its turn comes. If it does not fit, this step admits no other, so that none overtakes it."""
        self.tell("begin")
        step, budget = self.block_manager.begin_step(), self.max_num_batched_tokens
        turn, may_admit = 0, True  # running[:turn] have had their turn
        while budget > 0:
            if may_admit and self.waiting and (turn == len(self.running)
                                               or self.waiting[0].order < self.running[turn].order):
                may_admit = self._admit(turn, step)  # then the admitted sequence is running[turn]
                continue
            if turn == len(self.running):
                break
            seq = self.running[turn]
            num_tokens = min(seq.num_new_tokens, budget, self.max_chunk, seq.max_chunk or budget)
            if num_tokens > 0:
                if not self._make_room(seq, num_tokens, step):
                    break  # the sequence was the last of all, and was preempted; no waiting one may overtake it
                if seq.drafter is None:
                    self.compute(seq, num_tokens, step)
                else:  # the last token and some guesses
                    num_tokens = seq.drafter.compute(seq, num_tokens, step, self, min(budget, self.max_chunk))
                budget -= num_tokens
            turn += 1
        manager = self.block_manager
        manager.most_blocks_held = max(manager.most_blocks_held, manager.num_blocks - manager.num_free_blocks)
        self.tell("schedule", step)
        return step

    def _admit(self, turn: int, step: SchedulerOutput) -> bool:
        """Admit the first waiting sequence, preempting later ones if it needs a batch row or blocks."""
        seq = self.waiting[0]
        # A sequence is not admitted in the step that preempts it, nor while a sample of it is under way: to compute its
        # tokens again, the host needs the ids of all of them. `update` appends the last one while the sequence waits.
        if seq in step.preempted or seq.num_pending_tokens:
            return False
        while len(self.running) >= self.max_num_seqs or not self.block_manager.admit(seq):
            if len(self.running) == turn:
                return False
            self._preempt(step)
        del self.waiting[0]
        self._run(seq)
        return True

    def _run(self, seq: Sequence) -> None:
        seq.status, seq.row = Status.RUNNING, self.free_rows.pop()
        insort(self.running, seq, key=by_order)

    def _make_room(self, seq: Sequence, num_tokens: int, step: SchedulerOutput) -> bool:
        """Allocate blocks for a sequence's next tokens, preempting later sequences. False if all later ones were not
        enough, so that the sequence itself was preempted."""
        while not self.block_manager.allocate(seq, seq.num_computed_tokens + num_tokens):
            if self._preempt(step) is seq:
                return False
        return True

    def _preempt(self, step: SchedulerOutput) -> Sequence:
        """Take the blocks of the last running sequence. Its tokens are kept."""
        seq = self.running[-1]  # never one that already got tokens in this step: those are before `turn`
        seq.status = self.block_manager.preempt(seq)
        self._remove(seq)
        self.add(seq)
        step.preempted.append(seq)
        self.num_preemptions += 1
        return seq

    def compute(self, seq: Sequence, num_tokens: int, step: SchedulerOutput) -> None:
        """Let the step compute the sequence's next num_tokens tokens, whose blocks it has."""
        step.seqs.append(seq)
        step.num_tokens.append(num_tokens)
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens == seq.num_tokens:  # caught up: the step samples the next token
            step.sampled.append(seq)
            step.positions.append(seq.num_computed_tokens)
            seq.num_pending_tokens += 1
        self.block_manager.cache_full_blocks(seq)

    def update(self, step: SchedulerOutput, sampled: "Sampled") -> None:
        """Take the tokens that a launched step sampled. A stop token, max_len, or an output that is not a number ends a
        sequence here. For a stop string, an abort or another error the caller calls `finish`. (Without additions each
        sample is pending, is_right holds, and `new` is the sample.)"""
        for i, (seq, position, sample) in enumerate(zip(step.sampled, step.positions, sampled.tokens, strict=True)):
            if seq.status is Status.FINISHED or not seq.is_pending(position):
                continue
            seq.num_pending_tokens -= 1
            is_right = not seq.drafts or seq.drafter.decide(seq, sample)
            new = [sample]
            if seq.listener is not None:
                new = seq.listener.on_token(seq, sample, sampled.logprobs and sampled.logprobs[i])
            for token in new:
                if token < 0:
                    seq.finish("error", seq.stop_reason or NO_TOKEN)
                elif seq.status is not Status.FINISHED:
                    seq.append(token)
                    self.num_generated_tokens += 1
            if len(new) > 1 or not is_right:
                # The sample's own K and V may be computed already. They hold, unless a wrong draft was in its place.
                seq.rewind(position + 1 if is_right else position)
            if seq.status is Status.FINISHED:
                self.release(seq)
        self.tell("update", step)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence wherever it is: "stop" by a stop string, "abort", "error". Its blocks are free at once."""
        if seq.status is not Status.FINISHED:
            self.release(seq)
        seq.finish(reason, stop_reason)
        self.tell("finish", seq)

    def release(self, seq: Sequence) -> None:
        """Remove a sequence from its queue and free its blocks. `add` queues it again, from its first token."""
        self.block_manager.free(seq)
        self._remove(seq)
        seq.status = Status.WAITING if seq.finish_reason is None else Status.FINISHED

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child the parent's tokens. It shares the parent's blocks if the parent is running and a batch row is
        free. Otherwise its tokens are computed again. (Samples of one prompt need no fork, see
        scheduling/samples.py.)"""
        child.token_ids = list(parent.token_ids)
        if parent.status is Status.RUNNING and len(self.running) < self.max_num_seqs:
            self.block_manager.fork(parent, child)
            self._run(child)
        else:
            self.add(child)

    def resume(self, seq: Sequence) -> None:
        """A paused sequence has got a token: queue it again if its blocks were taken meanwhile."""
        if seq.status is Status.WAITING and seq not in self.waiting:
            self.add(seq)

    def undo(self, step: SchedulerOutput) -> None:
        """Take back a step that was planned and not computed. The blocks that it offered hold nothing and leave the
        prefix cache. The tokens that it would have sampled are not pending any more. Its sequences are queued again and
        start over. So do those that it preempted, because their planned moves to the host never happen."""
        self.block_manager.uncache(step.cached)
        for seq, position in zip(step.sampled, step.positions):
            seq.num_pending_tokens -= seq.is_pending(position)
        for seq in reversed(step.seqs + step.preempted):  # reversed: later ones' blocks are reused first
            if seq.status is not Status.FINISHED:
                self.release(seq)
                self.add(seq)
        self.tell("undo", step)

    def _remove(self, seq: Sequence) -> None:
        discard(self.running, seq)
        discard(self.waiting, seq)
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1


# --------------------------------------------------------------------------------------------------
# The step
# --------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class StepInput:
    """A step as lists of integers, all sequences one after the other in one flat batch; T tokens of N sequences. (A
    sequence with drafts counts several times: it has an entry for its last token and one for each draft.)

    Sequences with one new token come first, the longest context at the front: attention has one kernel launch for
    these and one for the others, and the longest work should not start last. With block_size 4, A (table [0, 1]) and C
    (table [2, 6]) decode and the prompt of B (table [5]) comes in:

        seqs              A     C     B
        input_ids         a6    c4    b0  b1  b2  b3        [T]      -1: known only on the device, see Engine
        positions         6     4     0   1   2   3         [T]
        slot_mapping      6     24    20  21  22  23        [T]      block_table[position // 4] * 4 + position % 4
        query_start_loc   0     1     2              6      [N + 1]
        seq_lens          7     5     4                     [N]      tokens in the cache after this step
    """
    seqs: list[Sequence]
    num_tokens: list[int]  # [N]
    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)  # -1: K and V are in the cache already
    query_start_loc: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # [N] batch rows

    @property
    def lists(self) -> list[list[int]]:
        return [self.input_ids, self.positions, self.slot_mapping, self.query_start_loc, self.seq_lens, self.rows]

    @classmethod
    def of(cls, step: SchedulerOutput, block_size: int) -> "StepInput":
        def longest_decode_first(pair: tuple[Sequence, int]) -> int:
            return -pair[0].num_computed_tokens if pair[1] == 1 or pair[0].drafts else 1  # a draft is a row of its own

        batch = cls([], [])
        for seq, num_tokens in sorted(zip(step.seqs, step.num_tokens), key=longest_decode_first):
            end = seq.num_computed_tokens  # the scheduler has counted this step's tokens
            if not seq.drafts:
                batch._add(seq, num_tokens, end, block_size)
            else:  # its last token and each draft: a row of one token each
                for row_end in range(end - num_tokens + 1, end + 1):
                    batch._add(seq, 1, row_end, block_size)
        return batch

    def _add(self, seq: Sequence, num_tokens: int, end: int, size: int) -> None:
        self.seqs.append(seq)
        self.num_tokens.append(num_tokens)
        token_ids, table, start = seq.token_ids, seq.block_table, end - num_tokens
        if num_tokens == 1:
            if start < len(token_ids):
                self.input_ids.append(token_ids[start])
            else:  # a draft, or a token that is known only on the device
                self.input_ids.append(seq.drafts[start - len(token_ids)] if seq.drafts else -1)
            self.positions.append(start)
            self.slot_mapping.append(-1 if start < seq.num_hit_tokens else table[start // size] * size + start % size)
        else:  # a chunk: its ids are known, and none is a hit (a recomputed hit token is always alone)
            self.input_ids += token_ids[start:end]
            self.positions += range(start, end)
            for index in range(start // size, cdiv(end, size)):  # as above, for all tokens of a block at once
                offset = (table[index] - index) * size  # from position to slot
                self.slot_mapping += range(max(start, index * size) + offset, min(end, (index + 1) * size) + offset)
        self.query_start_loc.append(len(self.input_ids))
        self.seq_lens.append(end)
        self.rows.append(seq.row)


class Sampled(NamedTuple):
    """What a step computed."""
    tokens: list[int]  # of SchedulerOutput.sampled, in that order; -1: no usable logits, see NO_TOKEN
    logprobs: list | None = None  # of these tokens, for their listeners
    prompt_logprobs: list[tuple] = []  # (sequence, position, log probabilities of its prompt tokens from there on)


def give_up(engine: "Engine", step: SchedulerOutput, error: BaseException) -> None:
    """No recovery from a failed step."""
    raise error


class Engine:
    """The step loop: schedule, launch, update.

    **Lookahead.** A GPU is idle while the host plans, unless the next step is launched before the tokens of this one
    are known. With a lookahead of 1:

        host      plan 1, launch 1 | plan 2, launch 2 | read 1 | plan 3, launch 3 | read 2 | ...
        device              step 1 ................... step 2 ................... step 3

    When step 2 is planned, the tokens that step 1 samples are counted (`num_pending_tokens`) but not known on the
    host. They stay on the device, where step 2 finds them. A sequence that turns out to be finished has wasted one
    token. Its blocks are freed at once although a launched step still writes into one of them. That is safe: a step
    that reuses the block is launched later, and the device runs steps in order. With a lookahead of 0 each step is
    read before the next one is planned. More than 1 would keep the device no busier, and is not supported. The counters
    of a prompt of 8 tokens, 0 to 7:

                              admitted   0 to 7 scheduled   8 scheduled   8 known   9 scheduled
        num_computed_tokens   0          8                  9             9         10
        num_pending_tokens    0          1                  2             1         2
        num_tokens            8          9                  10            10        11

    runner: runner.launch(step) starts a step and returns a function, which waits for the step and gives a Sampled
    updates: SchedulerOutput.sampled and the Sampled of each step that was read, for the caller to take
    recover: called with the engine, a step whose launch failed, and the error (nanopaged/scheduling/recovery.py)
    """

    def __init__(self, scheduler: Scheduler, runner: Any, lookahead: int = 0, recover: Callable = give_up):
        self.scheduler, self.runner, self.lookahead, self.recover = scheduler, runner, lookahead, recover
        self.updates: deque[tuple[list[Sequence], Sampled]] = deque()
        self.launched: deque[tuple[SchedulerOutput, Callable[[], Sampled]]] = deque()

    def step(self) -> None:
        """Plan and launch a step, then read until the next may be planned. After an empty step only reading a launched
        one helps, or taking the blocks of paused sequences."""
        while not self.has_room:  # the last call ended while it read: Ctrl-C, or an error
            self.update()
        step = self.scheduler.schedule()
        if step.seqs:
            self.launch(step)
        else:
            self.unblock(step)
            self.update()
        while not self.has_room:
            self.update()

    @property
    def has_room(self) -> bool:
        """Whether the next step may be planned before another is read: at most `lookahead` steps are launched, and none
        of them has drafts. (A sequence whose drafts are undecided would sit the next step out. Then half of the
        sequences would compute in even steps and half in odd ones, and a step of half the sequences takes hardly less
        time.)"""
        return len(self.launched) <= self.lookahead and not any(step.num_drafts for step, _ in self.launched)

    def launch(self, step: SchedulerOutput) -> None:
        try:
            read = self.runner.launch(step)
        except BaseException as error:
            self.recover(self, step, error)
        else:
            self.launched.append((step, read))

    def update(self) -> None:
        """Read the oldest launched step. If reading fails, the step stays the oldest one, to be read again."""
        if self.launched:
            step, read = self.launched[0]
            sampled = read()  # waits for the GPU
            self.launched.popleft()
            self.scheduler.update(step, sampled)
            self.updates.append((step.sampled, sampled))

    def unblock(self, step: SchedulerOutput) -> None:
        """The step computes nothing. (With a lookahead this is so when all that is left waits for the launched step, on
        the plain path only when there is no request.) It is undone: sequences that it preempted are not moved to the
        host after all. If no step is launched either, the first sequence in the order, which always fits, waits for a
        token from outside: it is paused (a beam that waits for others), and so are all that run. They give up their
        blocks, and `resume` queues them again."""
        self.scheduler.undo(step)
        if not self.launched:
            for seq in list(self.scheduler.running):
                self.scheduler.release(seq)
                self.scheduler.tell("release", seq)

    @property
    def is_idle(self) -> bool:
        return not (self.launched or self.scheduler.running or self.scheduler.waiting)


if __name__ == "__main__":
    from nanopaged.__main__ import run
    run()
