"""Chapter 3: the engine. It decides what the next step computes, and where the results live.

This chapter serves many texts at once. Each step computes tokens of many sequences, and sequences join and leave the
batch at every step (continuous batching; Yu et al. 2022, Orca).

Chapter 1 explains the pool of **blocks** with `block_size` token slots, and a sequence's **block table** (paging; Kwon
et al. 2023). Here blocks are only numbers, and this chapter does the bookkeeping. Texts of 1,000, 30 and 500 tokens
hold 63, 2 and 32 blocks of 16. The second text's 31st token takes no block, its 33rd takes one, and no block moves.

**No phases.** A sequence has `num_tokens`, prompt and generated. K and V of the first `num_computed_tokens` are in the
KV cache, or will be after the scheduled steps. A whole prompt, a part of a prompt, one decoded token, the tail that a
prefix-cache hit left over, and the recompute after a preemption are all the same case: `num_computed_tokens` catches
up with `num_tokens`. When it has, the step samples the next token.

    add(Sequence)                                                          vLLM's names
      Scheduler            waiting and running: who computes how much      Scheduler, SchedulerOutput
        BlockManager       free, held and cached blocks: dicts and lists   KVCacheManager, BlockPool
      runner               the model, the pool's tensors, the sampler      GPUModelRunner
      Scheduler.update     appends the sampled tokens, ends sequences      Scheduler.update_from_output

`Engine` has this loop. With recorded steps, the default on a GPU, it plans the next step before it reads the tokens of
this one (**lookahead**; such tokens are **pending**). The file is plain Python without torch: the runner, in
nanopaged/device/runner.py, computes the steps. LLM, which users call, runs these very classes. A rare request has a
subclass of Sequence, and a rare option replaces the BlockManager or the Scheduler.
"""
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

Status = Enum("Status", "WAITING RUNNING SWAPPED FINISHED")
ROOT = 0  # the prefix key of no tokens
NO_TOKEN = "the model's output is infinite or not a number, or no token is allowed"  # goes with finish_reason "error"
by_order = attrgetter("order")  # what queues are sorted by


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Order(NamedTuple):
    """A sequence's place in all queues: unique, and smaller is served first. Queues find a sequence by its order, so a
    queued or running sequence keeps it. (For another policy, as shortest job first, set it before `Scheduler.add`.)"""
    priority: int
    arrival: int  # of its request
    number: int  # in its request
    delay: int = 0  # arrival contains it: a server adds it to put the later samples of a call behind other requests


@dataclass(eq=False)
class Sequence:
    """One text: a prompt and the tokens generated after it.

        WAITING -> RUNNING     admitted: it gets a batch row and the blocks that it can share; others come later
        RUNNING -> WAITING     preempted: its blocks are freed (with swapping: SWAPPED, its blocks move to the host)
        SWAPPED -> RUNNING     admitted: its blocks come back
        any     -> FINISHED    a stop token, max_len, a stop string, abort, error

    **Cursors** count tokens (num_keyed_blocks: blocks) from the text's beginning, so each is the index of the next one.
    `schedule` advances num_computed_tokens, and counts the token that the step samples as pending; `update` appends it.
    A prompt of tokens 0 to 9 in blocks of 4, whose first block the prefix cache has:

        | 0  1  2  3 | 4  5  6  7 | 8  9  10 ..    num_computed_tokens   num_tokens (pending)   num_keyed_blocks
        admitted                                   4                     10 (0)                 1
        4 to 9 are scheduled                       10                    11 (1)                 2
        token 10 is appended                       10                    11 (0)                 2
        token 10 is scheduled                      11                    12 (1)                 2

    num_found_tokens stays 4: the K and V of these tokens were found, and are not written again.
    """
    token_ids: list[int]  # prompt and generated tokens
    order: Order
    max_len: int  # the sequence ends when it has this many tokens, prompt included
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    request_id: str = ""
    sampling: Any = None  # what the runner wants to know about sampling (SequenceSampling); opaque here
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it, or what went wrong
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found at its first admission, for the caller; None: none yet
    # The scheduler's; the BlockManager sets num_computed_tokens at admission, and when it frees:
    num_pending_tokens: int = 0  # tokens that scheduled steps sample, not known yet
    num_computed_tokens: int = 0  # whose K and V are in the KV cache (while SWAPPED: on the host) after these steps
    # For the BlockManager, which alone changes these. The runner reads the first two:
    block_table: list[int] = field(default_factory=list)
    num_found_tokens: int = 0  # at its last admission: their K and V were there
    num_keyed_blocks: int = 0  # leading blocks that were looked up in the prefix cache, or offered to it
    prefix_key: int | str = ROOT  # stands for the tokens in those blocks
    root: int | str = ROOT  # the key of no tokens; with a cache_salt another one, which requests with that salt share
    # The runner's; the BlockManager lowers num_sent_blocks:
    row: int = -1  # its batch row in the runner's tensors while it runs
    num_sent_blocks: int = -1  # leading entries of its block table that the runner has; -1: the sequence is new there
    finds_prefix: ClassVar[bool] = True  # False: the logits of all prompt tokens are wanted (logprobs.py)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that could be computed now. Nothing follows the last possible token, so it is never computed."""
        return min(self.num_tokens, self.max_len - 1) - self.num_computed_tokens

    def is_pending(self, position: int) -> bool:
        """Whether a sample for this position continues the text. False: nothing is pending any more (the sequence has
        ended, or a draft was wrong), or the text has a token there already (a grammar has forced some)."""
        return self.num_pending_tokens > 0 and position >= len(self.token_ids)

    def append(self, token: int) -> None:
        """Append a sampled token, and finish if it is a stop token or the last possible one. -1: no token could be
        sampled, which finishes with an error."""
        if token < 0:
            return self.finish("error", self.stop_reason or NO_TOKEN)
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            self.finish("stop", token)
        elif len(self.token_ids) >= self.max_len:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason
        self.num_pending_tokens = 0


@dataclass(eq=False)
class SchedulerOutput:
    """What one step computes: how many tokens of each scheduled sequence, and which of these sample a token."""
    budget: int = 0  # tokens that may still be scheduled
    seqs: list = field(default_factory=list)  # Sequence
    num_tokens: list[int] = field(default_factory=list)
    sampled: list = field(default_factory=list)  # Sequence
    positions: list[int] = field(default_factory=list)  # of the tokens that `sampled` samples, in their sequences
    preempted: list = field(default_factory=list)  # Sequence
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, its copy), made before the forward pass
    cached: list[int] = field(default_factory=list)  # blocks that the step offered to the prefix cache
    num_held_blocks: int = 0  # of the pool, once the step is planned
    may_plan_ahead: bool = True  # False: the next step can only be planned when this one is read (drafts)


class Sampled(NamedTuple):
    """What a step sampled."""
    tokens: list[int]  # of SchedulerOutput.sampled, in that order; -1: no usable logits, see NO_TOKEN
    logprobs: list | None = None  # of these tokens
    prompt_logprobs: list[tuple] = []  # (sequence, position, log probabilities of its prompt tokens from there on)


class PrefixHit(NamedTuple):
    """The leading tokens of a sequence whose K and V the pool has, or will have before the sequence attends."""
    blocks: list[int]
    num_tokens: int
    prefix_key: int | str  # of the first num_keyed_blocks of these blocks
    num_keyed_blocks: int


class BlockManager:
    """The pool of KV blocks: a reference count for each, a queue of the free ones, and the prefix cache.

        block          0    1    2    3    4    5           block_size 4: B found A's first block in the prefix cache
        tokens       abcd efg. .... efxy z... ....
        ref_count      2    1    0    1    1    0           free queue: 2, 5
        A's table    [ 0 ,  1 ]                             A: abcdefg      num_computed_tokens 7
        B's table    [ 0 ,            3 ,  4 ]              B: abcdefxyz    num_computed_tokens 9, num_found_tokens 4

    After every step each block is free (ref_count 0, once in the queue) or held (ref_count = number of block tables
    that list it). Attention reads seq_len positions, each written before or found, so no old K and V of a new block.

    **Prefix caching.** A full block can serve every sequence that begins with the same tokens up to the block's end.
    The prefix cache finds it by the exact pair (prefix key of the tokens before the block, the block's tokens), so two
    texts cannot collide. A prefix key is a number. Each new pair gets the next one, which stands for all tokens up to
    the block's end:

        (0, abcd) -> block 0, prefix key 1      (1, efxy) -> block 3, prefix key 2

    (A request's cache_salt takes the place of the 0.) A cached block that is freed stays in the prefix cache until it
    is reused. The block that was freed longest ago is reused first (LRU). A sequence frees its last block first, so its
    end is reused before its beginning: an end cannot be found without its beginning.

    **Copy-on-write.** Samples of one prompt and beams (nanopaged/features/samples.py, beam.py) also share a block that
    is not full. A sequence that writes into a block that others hold gets a copy. The last holder keeps the original:

        A's table [ 0 , 1 ]   B's [ 0 , 1 ]       A writes:   [ 0 , 7 ]   [ 0 , 1 ]       B writes into block 1

    A sample that starts late may share a block that another one has filled. With the prompt abcdef:

        A fills block 1 with efgh     A's table [ 0 , 1 ]                     the prefix cache finds it by (1, efgh)
        B starts, and shares ef       A's table [ 0 , 1 ]   B's [ 0 , 1 ]     B's text is abcdef
        A ends, B goes on with xy                           B's [ 0 , 1 ]     block 1: efxy, so (1, efgh) is evicted
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.watermark = num_blocks // 50  # blocks; see `admit`
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self.prefix_cache: dict[tuple, tuple[int, int]] = {}  # (prefix key before, tokens) -> (block, prefix key)
        self.key_of_block: dict[int, tuple] = {}  # block -> its key in `prefix_cache`
        self.prefix_keys = itertools.count(ROOT + 1)
        self.step = SchedulerOutput()  # the step that is being scheduled

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def begin_step(self) -> SchedulerOutput:
        self.step = SchedulerOutput()
        return self.step

    def check_idle(self) -> None:
        """With no request under way every block must be free. RuntimeError otherwise: a mistake in nanopaged."""
        self.begin_step()  # the last step's sequences are forgotten
        if num_held := self.num_blocks - self.num_free_blocks:
            raise RuntimeError(f"the engine is idle, yet {num_held} blocks are held: please report this")

    # ---- while a sequence runs

    def allocate(self, seq: Sequence, end: int) -> bool:
        """Extend the block table to cover the text's first `end` tokens. If the first block to be written is an old one
        that others hold, a copy replaces it. False, and nothing done, if too few blocks are free."""
        table, size = seq.block_table, self.block_size
        start = max(seq.num_computed_tokens, seq.num_found_tokens)  # of the tokens to write: found ones have K and V
        index = start // size
        writes_in_old_block = start < end and index < len(table)
        must_copy = writes_in_old_block and self.ref_counts[table[index]] > 1
        num_new = max(0, cdiv(end, size) - len(table))
        if num_new + must_copy > len(self.free_queue):
            return False
        if writes_in_old_block:
            self._make_own(seq, index)
        if num_new:
            table += [self._pop_free_block() for _ in range(num_new)]
        return True

    extend = allocate  # for drafts: this very function, also where a subclass's `allocate` gives blocks back first

    def _make_own(self, seq: Sequence, index: int) -> None:
        """Let nobody else read what the sequence will write into this block of its table."""
        block = seq.block_table[index]
        if self.ref_counts[block] > 1:  # others hold it
            seq.block_table[index] = copy = self._pop_free_block()
            self.step.copies.append((block, copy))
            self._decref(block)
            seq.num_sent_blocks = min(seq.num_sent_blocks, index)  # the runner is sent the table from here on again
        else:  # alone; but a sample that has gone may have offered it with other tokens (drawn above)
            self.evict(block)

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Offer for sharing the blocks that the scheduled step fills. Their K and V are not computed yet. But a layer
        stores the K and V of all sequences before it attends, so a sequence of the same step may share them, too."""
        if not self.enable_prefix_caching:
            return
        # With a lookahead the last computed token may be pending. It has no id, so the block that it fills waits.
        size, num_known = self.block_size, min(seq.num_computed_tokens, len(seq.token_ids))
        for index in range(seq.num_keyed_blocks, num_known // size):
            key = (seq.prefix_key, tuple(seq.token_ids[index * size:(index + 1) * size]))
            if key not in self.prefix_cache:  # else a block has these tokens: if it is another one, only that is found
                self._offer(seq.block_table[index], key)
            seq.prefix_key = self.prefix_cache[key][1]
            seq.num_keyed_blocks = index + 1

    def _offer(self, block: int, key: tuple) -> None:
        """Let the prefix cache find the block by this key. A block has one key at most."""
        self.evict(block)  # of samples: its old key begins with one that was evicted, so nothing finds it (samples.py)
        self.prefix_cache[key], self.key_of_block[block] = (block, next(self.prefix_keys)), key
        self.step.cached.append(block)

    def free(self, seq: Sequence) -> None:
        """Free the blocks, the last one first."""
        for block in reversed(seq.block_table):
            self._decref(block)
        seq.block_table, seq.prefix_key = [], seq.root  # a new list: edits.py and cascade.py compare its identity
        seq.num_computed_tokens, seq.num_keyed_blocks, seq.num_sent_blocks = 0, 0, -1

    def take_back(self, step: SchedulerOutput) -> None:
        """The step is not computed. Nothing was written into the blocks that it offered: the cache forgets them."""
        for block in step.cached:
            self.evict(block)

    def preempt(self, seq: Sequence) -> Status:
        """Take the sequence's blocks; its new status. Tokens that are not cached are computed again (recompute)."""
        self.free(seq)
        return Status.WAITING

    # ---- admission: what a sequence can share, and whether the rest fits

    def admit(self, seq: Sequence, is_last: bool = False) -> bool:
        """Give a waiting sequence the blocks that it can share. False, taking none, if too few blocks are free for the
        rest of its tokens. The rest comes from `allocate`, chunk by chunk. Nothing is reserved: other sequences may
        take the free blocks first, and then the last running sequence is preempted. is_last: the sequence comes after
        all running ones, and there are some. Then 2% of the blocks (the watermark) must stay free beside its tokens, or
        it would soon be preempted, and computed again."""
        hit = self.find_prefix(seq)
        if self.num_blocks_needed(seq, hit) + self.watermark * is_last > self.num_free_blocks:
            return False
        self.start(seq, hit)
        return True

    def num_blocks_needed(self, seq: Sequence, hit: PrefixHit) -> int:
        # A found block that is free leaves the free queue, so it counts. 10 tokens (3 blocks of 4), found: 0, which A
        # holds, and 7, which is free and still cached. Needed: 7 and a new one.
        return cdiv(seq.num_tokens, self.block_size) - sum(self.ref_counts[block] > 0 for block in hit.blocks)

    def start(self, seq: Sequence, hit: PrefixHit) -> None:
        for block in hit.blocks:
            self._incref(block)
        # Even if every token is cached, the last one is computed again for its logits. Its K and V are not written.
        seq.num_found_tokens, seq.num_computed_tokens = hit.num_tokens, min(hit.num_tokens, seq.num_tokens - 1)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(hit.num_tokens, seq.num_prompt_tokens)
        seq.block_table, seq.num_keyed_blocks, seq.prefix_key = [*hit.blocks], hit.num_keyed_blocks, hit.prefix_key

    def find_prefix(self, seq: Sequence) -> PrefixHit:
        """The longest beginning that the prefix cache has."""
        blocks: list[int] = []
        prefix_key, size = seq.root, self.block_size
        if self.enable_prefix_caching and seq.finds_prefix:
            for end in range(size, len(seq.token_ids) + 1, size):
                found = self.prefix_cache.get((prefix_key, tuple(seq.token_ids[end - size:end])))
                if found is None:
                    break
                block, prefix_key = found
                blocks.append(block)
        return PrefixHit(blocks, len(blocks) * size, prefix_key, len(blocks))

    def fork(self, parent: Sequence, child: Sequence, hit: PrefixHit) -> bool:
        """Start a sequence with blocks that another one holds (samples.py). False: the child must be queued."""
        self.start(child, hit)
        return True

    # ---- single blocks

    def _pop_free_block(self) -> int:
        """The least recently used free block. Its old contents cannot be found any more."""
        block, _ = self.free_queue.popitem(last=False)
        self.evict(block)
        self.ref_counts[block] = 1
        return block

    def evict(self, block: int) -> None:
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


class Scheduler:
    """Decides what each step computes.

    **One order rules**: priority, then arrival. `running` and `waiting` are kept in it. A token budget bounds a step's
    memory and its time: all texts of a step wait for its end. The budget is given out from the front of the order. When
    the pool runs dry, the last running sequences lose their blocks (preemption), and keep their place in the order.
    Equal priorities are first come, first served: no step leaves a decoding text out for a newer prompt, but an older
    long prompt takes the whole budget before a newer one gets any. With priorities decoding waits for urgent prompts.

    Every accepted sequence can run alone: LLM refuses a prompt that fills the pool, and limits max_len to the pool's
    tokens. So the first sequence in the order always fits, at the latest after all others are preempted. With equal
    priorities each sequence is the first in the end. A steady stream of urgent texts may keep others waiting for ever.

    A and B decode, and C comes with a prompt of 32 tokens: `num_tokens` is [1, 1, 32], all three sample, and the next
    step is [1, 1, 1]. With max_num_batched_tokens 16, C's prompt is cut into chunks instead: [1, 1, 14], [1, 1, 14],
    [1, 1, 4]. Only the last of them samples a token of C (chunked prefill).
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list = []  # Sequence, WAITING or SWAPPED
        self.running: list = []  # Sequence
        self.free_rows = list(range(max_num_seqs))

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=by_order)

    def schedule(self) -> SchedulerOutput:
        """Walk `running` and `waiting` as one list, merged by order, and give out the token budget. In the order A B C
        D E, where C is more urgent than D and needs D's blocks:

            turn                            running    waiting   num_served
            A and B get their tokens        A B D      C E       2            C comes before running[2]
            D is preempted, C is admitted   A B C      D E       2            nobody served is ever preempted
            C gets its tokens               A B C      D E       3            D waits, and the step admits no more

        If C did not fit without D either, D would stay preempted. A sequence without new tokens counts as served."""
        step = self.block_manager.begin_step()
        step.budget = self.max_num_batched_tokens
        num_served, may_admit = 0, True
        while step.budget > 0:
            seq = None if num_served == len(self.running) else self.running[num_served]
            if may_admit and self.waiting and (seq is None or self.waiting[0].order < seq.order):
                may_admit = self._admit(num_served, step)  # then the admitted sequence is running[num_served]
            elif seq is not None and self._serve(seq, step):
                num_served += 1
            else:
                break  # all are served, and none may join; or seq was preempted for lack of blocks
        step.num_held_blocks = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        return step

    def _admit(self, num_served: int, step: SchedulerOutput) -> bool:
        """Admit the first waiting sequence, preempting later ones if it needs a batch row or blocks. False: it must
        wait: it was preempted in this step, it has pending tokens, or running[:num_served] leave too little."""
        seq = self.waiting[0]
        # Preempted in this step: a sequence before it has just got what it gave up.
        # Preempted before: computing it again needs the ids of its pending tokens (see Engine, lookahead).
        if seq in step.preempted or seq.num_pending_tokens:
            return False
        is_last = 0 < num_served == len(self.running)
        while len(self.running) >= self.max_num_seqs or not self.block_manager.admit(seq, is_last):
            if len(self.running) == num_served:
                return False
            self._preempt(step)
        del self.waiting[0]
        self.run(seq)
        return True

    def run(self, seq: Sequence) -> None:
        """Give the sequence, which has its blocks, a batch row."""
        seq.status, seq.row = Status.RUNNING, self.free_rows.pop()
        insort(self.running, seq, key=by_order)

    def _serve(self, seq: Sequence, step: SchedulerOutput) -> bool:
        """Let the step compute the sequence's next tokens, within its budget, and preempt later ones for their blocks.
        False: these were too few. The sequence itself was preempted, and no waiting one may overtake it."""
        num_tokens = min(seq.num_new_tokens, step.budget)
        if num_tokens > 0:
            while not self.block_manager.allocate(seq, seq.num_computed_tokens + num_tokens):
                if self._preempt(step) is seq:
                    return False
            self._compute(seq, num_tokens, step)
        return True

    def _preempt(self, step: SchedulerOutput) -> Sequence:
        """Take the blocks and the row of the last running sequence, whose text is kept. It has no tokens in this step:
        `_admit` spares running[:num_served], and `_serve` stops when it has preempted the one that lacks room."""
        seq = self.running[-1]
        seq.status = self.block_manager.preempt(seq)
        self._remove(seq)
        self.add(seq)
        step.preempted.append(seq)
        return seq

    def _compute(self, seq: Sequence, num_tokens: int, step: SchedulerOutput) -> None:
        """Let the step compute the sequence's next num_tokens tokens, whose blocks it has."""
        step.seqs.append(seq)
        step.num_tokens.append(num_tokens)
        step.budget -= num_tokens
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens == seq.num_tokens:  # caught up: the step samples the next token
            step.sampled.append(seq)
            step.positions.append(seq.num_computed_tokens)
            seq.num_pending_tokens += 1
        self.block_manager.cache_full_blocks(seq)

    def update(self, step: SchedulerOutput, sampled: Sampled) -> list[tuple[Sequence, int]]:
        """Append the tokens that a step sampled, and release the sequences that end with them. Returns the sequences
        that got a token, with its index in `sampled`."""
        appended = []
        for i, (seq, position, token) in enumerate(zip(step.sampled, step.positions, sampled.tokens, strict=True)):
            if seq.is_pending(position):
                seq.num_pending_tokens -= 1
                seq.append(token)
                appended.append((seq, i))
                if seq.status is Status.FINISHED:
                    self.release(seq)
        return appended

    def undo(self, step: SchedulerOutput) -> None:
        """Take back a step that is not computed. Its sequences and those that it preempted start over."""
        self.block_manager.take_back(step)
        for seq, position in zip(step.sampled, step.positions):
            seq.num_pending_tokens -= seq.is_pending(position)
        for seq in reversed(step.seqs + step.preempted):  # reversed: later ones' blocks are reused first
            if seq.status is not Status.FINISHED:
                self.release(seq)
                seq.status = Status.WAITING
                self.add(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence wherever it is: "stop" by a stop string, "abort", "error". Its blocks are released. A launched
        step may still sample for it, and `update` skips that token."""
        if seq.status is not Status.FINISHED:
            self.release(seq)
        seq.finish(reason, stop_reason)

    def release(self, seq: Sequence) -> None:
        """Remove a sequence from its queue and free its blocks."""
        self.block_manager.free(seq)
        self._remove(seq)

    def _remove(self, seq: Sequence) -> None:
        for queue in (self.running, self.waiting):
            index = bisect_left(queue, seq.order, key=by_order)
            if index < len(queue) and queue[index] is seq:
                del queue[index]
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1


class Engine:
    """The step loop. Without a lookahead a call of `step` does this (`launch` the first half, `update` the second):

        step = scheduler.schedule()                 plan
        read = runner.launch(step)                  the device begins
        sampled = read()                            wait for the device
        appended = scheduler.update(step, sampled)  append the tokens
        updates.append((step, sampled, appended))   tell the caller

    **Lookahead.** A GPU is idle while the host plans, unless the next step is launched before the tokens of this one
    are read. With a lookahead of 1 (vLLM: async scheduling; SGLang: overlap scheduling):

        host      plan 1, launch 1 | plan 2, launch 2 | read 1 | plan 3, launch 3 | read 2 | ...
        device              step 1 ................... step 2 ................... step 3

    When step 2 is planned, the tokens that step 1 samples are pending: counted, but not known on the host. They stay on
    the device, where step 2 finds them. For a sequence that turns out to be finished, one token was computed in vain.
    Its blocks and its batch row are free at once, although a launched step still writes there. (The same holds after a
    preemption or an abort.) That is safe: a device runs steps in the order of their launches (one CUDA stream). With
    drafts the next step is planned when this one is read (may_plan_ahead). With a grammar only its sampling waits."""

    def __init__(self, scheduler: Scheduler, runner: Any, lookahead: int = 0):
        self.scheduler, self.runner, self.lookahead = scheduler, runner, lookahead
        self.launched: deque[tuple[SchedulerOutput, Callable[[], Sampled]]] = deque()  # not read yet, the oldest first
        self.updates: deque[tuple] = deque()  # for the caller: (step, Sampled, the result of Scheduler.update)

    def step(self) -> bool:
        """Launch a step, and read those that must be read before the next one. If none can be launched, read one
        instead. False: there was nothing to launch, and nothing to read."""
        has_read = self.must_read
        while self.must_read:  # the last call ended before it had read them: Ctrl-C, or an error
            self.update()
        if not self.launch():
            if not self.launched:
                return has_read
            self.update()  # its tokens may let sequences go on
        while self.must_read:
            self.update()
        return True

    def launch(self) -> bool:
        """Plan a step and launch it. If the launch fails, the plan is undone. A plan without tokens is undone, too (all
        it can have done is preempt); then the result is False."""
        step, is_launched = self.scheduler.schedule(), False
        try:
            if step.seqs:
                self.launched.append((step, self.runner.launch(step)))
                is_launched = True
        finally:
            if not is_launched:
                self.scheduler.undo(step)
        return is_launched

    @property
    def must_read(self) -> bool:
        """Whether a launched step must be read before the next one is planned."""
        return len(self.launched) > self.lookahead or bool(self.launched) and not self.launched[-1][0].may_plan_ahead

    def update(self) -> None:
        """Read the oldest launched step and append its tokens. If reading fails, the step stays the oldest one."""
        step, read = self.launched[0]
        sampled = read()  # waits for the device
        self.launched.popleft()
        self.updates.append((step, sampled, self.scheduler.update(step, sampled)))

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting or self.launched)


if __name__ == "__main__":
    from nanopaged.__main__ import run
    run()
