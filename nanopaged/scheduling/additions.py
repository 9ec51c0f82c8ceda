"""The classes of chapter 3 as LLM runs them: planning ahead of the GPU, and what the rarer features need. (recovery.py
and data_parallel.py build on them.)

**Lookahead.** A GPU is idle while the host plans, unless the next step is launched before the tokens of this one are
known. With a lookahead of 1:

    host      plan 1, launch 1 | plan 2, launch 2 | read 1 | plan 3, launch 3 | read 2 | ...
    device              step 1 ................... step 2 ................... step 3

When step 2 is planned, the tokens that step 1 samples are pending: counted, but not known on the host. They stay on the
device, where step 2 finds them. For a sequence that turns out to be finished, one token was computed in vain. Its
blocks are freed at once although a launched step still writes into one of them. That is safe: a step that reuses the
block is launched later, and the device runs steps in order. With a lookahead of 0 each step is read before the next one
is planned. A lookahead of 2 would not keep the device busier, and is not supported. The counters of a prompt with the
tokens 0 to 7:

                          admitted   0 to 7 scheduled   8 scheduled   8 read      9 scheduled
    num_computed_tokens   0          8                  9             9           10
    num_pending_tokens    0          1                  2             1           2
    num_tokens            8          9                  10            10          11
"""
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanopaged import engine

NULL = -1  # in a block table: a block that left the sliding window and was freed (window.py)


class Listener(Protocol):
    """A hook into the tokens of a sequence, for log probabilities, beam search and grammars. See nanopaged/api/."""

    def on_token(self, seq: "Sequence", token: int, logprobs: Any) -> list[int]:
        """The step has sampled `token`. Returns the tokens to append. An empty list pauses the sequence until tokens
        are appended from outside. Then `Scheduler.resume` queues it again, if its blocks were taken meanwhile."""


@dataclass(eq=False, slots=True)
class Sequence(engine.Sequence):
    """A text, and what the additions know of it. num_tokens is len(token_ids) + num_pending_tokens."""
    num_pending_tokens: int = 0  # tokens that scheduled steps sample and that are not known on the host yet
    listener: Listener | None = None
    max_chunk: int = sys.maxsize  # the most tokens of it that a step may compute
    may_look_ahead: bool = True  # its next step may be planned before its last token is known on the host
    reads_prefix_cache: bool = True  # False: log probabilities of the prompt are wanted, so all of it is computed
    samples: Any = None  # all samples of its prompt, if n > 1 (samples.py)
    drafter: Any = None  # guesses its next tokens (drafts.py)
    drafts: list[int] = field(default_factory=list)  # guesses in a scheduled step, not checked yet
    pool: "BlockManager | None" = None  # the manager of its blocks; None: it has had none yet
    host_table: list[int] = field(default_factory=list)  # its blocks on the host, while it is SWAPPED (swapping.py)
    num_cached_tokens: int | None = None  # prompt tokens found at its first admission; None: never admitted
    is_new: bool = True  # in its batch row: the device has other settings there (nanopaged/device/rows.py)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_new_tokens(self) -> int:
        """With drafts under way the next input, the token after the last right draft, is not known yet."""
        num_known, start = len(self.token_ids), self.num_computed_tokens
        if self.may_look_ahead and not self.drafts:
            num_known += self.num_pending_tokens
        return min(num_known - start, self.max_len - 1 - start, self.max_chunk)

    @property
    def num_null_blocks(self) -> int:
        """Leading entries of the block table that are NULL (window.py)."""
        return bisect_left(self.block_table, True, key=lambda block: block != NULL)

    def is_pending(self, position: int) -> bool:
        """Whether a sample under way for this position may become a token of the text. False if the text has passed the
        position, because a grammar has forced tokens, and after a wrong draft."""
        return self.num_pending_tokens > 0 and position >= len(self.token_ids)

    def truncate(self, num_tokens: int) -> None:
        """Drop the tokens behind a stop string."""
        del self.token_ids[num_tokens:]

    def rewind(self, end: int) -> None:
        """A grammar has forced tokens, or a draft was wrong: samples under way continue another text, and K and V from
        position `end` on belong to that text."""
        self.num_computed_tokens = min(self.num_computed_tokens, end)
        self.num_pending_tokens, self.drafts = 0, []


@dataclass(eq=False, slots=True)
class SchedulerOutput(engine.SchedulerOutput):
    """Before the copies the runner moves blocks to the host, and after them blocks from the host."""
    positions: list[int] = field(default_factory=list)  # of the tokens that `sampled` samples, in their sequences
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block): swapping.py
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    num_drafts: int = 0  # guessed tokens among num_tokens: drafts.py


class BlockManager(engine.BlockManager):
    """Samples of one prompt share its blocks, beams fork, and the totals of all first admissions are counted."""
    step: SchedulerOutput
    window = num_host_blocks = 0  # window.py, swapping.py
    max_chunk = sys.maxsize  # the most tokens of one sequence that a step may compute; a Scheduler lowers it

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.step = SchedulerOutput()
        # Sums over first admissions: tokens of prompts, those that were found. The most blocks held after any step was
        # scheduled
        self.num_prompt_tokens = self.num_cached_tokens = self.most_blocks_held = 0

    def begin_step(self) -> SchedulerOutput:
        self.step = SchedulerOutput()
        return self.step

    def num_blocks_before_window(self, position: int) -> int:
        """Leading blocks that the token at this position does not attend to."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def find_prefix(self, seq: Any) -> engine.PrefixHit:
        """The longest beginning that the prefix cache has, or what another sample of the same prompt can give."""
        hit = super().find_prefix(seq) if seq.reads_prefix_cache else engine.PrefixHit([], 0, seq.root, 0)
        return hit if seq.samples is None else seq.samples.find(self, seq, hit)

    def start(self, seq: Any, hit: engine.PrefixHit) -> None:
        super().start(seq, hit)
        seq.pool = self
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(hit.num_tokens, seq.num_prompt_tokens)
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.num_cached_tokens

    def uncache(self, blocks: list[int]) -> None:
        for block in blocks:
            self._evict(block)

    def check_idle(self) -> None:
        """With no request under way every block must be free. RuntimeError otherwise: a mistake in nanopaged."""
        self.begin_step()  # with swapping, host blocks that the last step read are free from here on
        num_held = self.num_blocks - len(self.free_queue)
        if num_held or any(self.ref_counts[:self.num_blocks]):
            raise RuntimeError(f"the engine is idle, yet {num_held} blocks are held: please report this")


class Scheduler(engine.Scheduler):
    """Sequences may pause, fork, draft, and take several tokens of one step, and a planned step can be undone."""
    block_manager: BlockManager

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(block_manager, max_num_seqs, max_num_batched_tokens)
        block_manager.max_chunk = min(block_manager.max_chunk, max_num_batched_tokens)
        self.num_generated_tokens = self.num_preemptions = 0  # of all sequences so far
        self.observers: list[Callable[[str, Any], object]] = []  # told of each change (nanopaged/cli/frames.py)

    def tell(self, change: str, of: Any = None) -> None:
        """The method of this name has changed a step or a sequence. "begin": a step is going to be scheduled;
        "release": a sequence gave up its blocks."""
        for observe in self.observers:
            observe(change, of)

    def schedule(self) -> SchedulerOutput:
        self.tell("begin")
        step: Any = super().schedule()
        self.num_preemptions += len(step.preempted)
        step.positions = [seq.num_computed_tokens for seq in step.sampled]
        for seq in step.sampled:
            seq.num_pending_tokens += 1
        for seq in step.seqs:
            if seq.drafter is not None:
                seq.drafter.extend(seq, step, self)
        manager = self.block_manager
        manager.most_blocks_held = max(manager.most_blocks_held, manager.num_blocks - manager.num_free_blocks)
        self.tell("schedule", step)
        return step

    def _admit(self, turn: int, step: Any) -> bool:
        """Not while a token of the sequence is pending: to compute its tokens again, all of them have to be known."""
        return not self.waiting[0].num_pending_tokens and super()._admit(turn, step)

    def _run(self, seq: Any) -> None:
        super()._run(seq)
        seq.max_chunk, seq.is_new = min(seq.max_chunk, self.block_manager.max_chunk), True

    def update(self, step: Any, sampled: engine.Sampled) -> None:
        """What a sample for position p does:

            no addition, right draft    the sample is appended
            a grammar forces tokens     they are appended, too; rewind to p + 1, whose K and V may be computed already
            wrong draft                 the sample is appended; rewind to p, where K and V are the draft's

        For a stop string and an abort the caller calls `finish`."""
        for i, (seq, position, sample) in enumerate(zip(step.sampled, step.positions, sampled.tokens, strict=True)):
            if seq.status is engine.Status.FINISHED or not seq.is_pending(position):
                continue
            seq.num_pending_tokens -= 1
            is_right = not seq.drafts or seq.drafter.decide(seq, sample)
            new = [sample]
            if seq.listener is not None:
                new = seq.listener.on_token(seq, sample, sampled.logprobs and sampled.logprobs[i])
            for token in new:
                if seq.status is not engine.Status.FINISHED:
                    seq.append(token)
                    self.num_generated_tokens += token >= 0
            if len(new) > 1 or not is_right:
                seq.rewind(position + 1 if is_right else position)
            if seq.status is engine.Status.FINISHED:
                self.release(seq)
        self.tell("update", step)

    def finish(self, seq: Any, reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(seq, reason, stop_reason)
        self.tell("finish", seq)

    def retire(self, seq: Sequence) -> None:
        """Take the blocks of a sequence that goes on later, from its first token."""
        self.release(seq)
        seq.status = engine.Status.WAITING

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child the parent's tokens. If the parent is running and a batch row is free, the child goes on where
        the parent is, with the same blocks (copy-on-write). Otherwise its tokens are computed again. (Samples of one
        prompt need no fork, see samples.py.)"""
        child.token_ids = list(parent.token_ids)
        if parent.status is engine.Status.RUNNING and len(self.running) < self.max_num_seqs:
            found = parent.block_table, parent.num_computed_tokens, parent.prefix_key, parent.num_cached_blocks
            child.num_cached_tokens = parent.num_cached_tokens  # it counts as no first admission
            self.block_manager.start(child, engine.PrefixHit(*found))
            child.num_computed_tokens = parent.num_computed_tokens  # the last token, too: its logits are there
            self._run(child)
        else:
            self.add(child)

    def resume(self, seq: Sequence) -> None:
        """A paused sequence has got a token: queue it again if its blocks were taken meanwhile."""
        if seq.status is engine.Status.WAITING and seq not in self.waiting:
            self.add(seq)

    def undo(self, step: SchedulerOutput) -> None:
        """Take back a step that was planned and not computed. The blocks that it offered hold nothing and leave the
        prefix cache. The tokens that it would have sampled are not pending any more. Its sequences are queued again and
        start over. So do those that it preempted, because their planned moves to the host never happen."""
        self.block_manager.uncache(step.cached)
        for seq, position in zip(step.sampled, step.positions):
            seq.num_pending_tokens -= seq.is_pending(position)
        for seq in reversed(step.seqs + step.preempted):  # reversed: later ones' blocks are reused first
            if seq.status is not engine.Status.FINISHED and seq.pool is self.block_manager:  # else it went elsewhere
                self.retire(seq)
                self.add(seq)
        self.tell("undo", step)


class Engine(engine.Engine):
    """The step loop with a lookahead of 0 or 1.

    updates: SchedulerOutput.sampled and the Sampled of each step that was read, for the caller to take
    """
    scheduler: Scheduler

    def __init__(self, scheduler: Scheduler, runner: Any, lookahead: int = 0):
        super().__init__(scheduler, runner)
        self.lookahead = lookahead
        self.updates: deque[tuple[list[Sequence], engine.Sampled]] = deque()
        self.launched: deque[tuple[SchedulerOutput, Callable[[], engine.Sampled]]] = deque()

    def step(self) -> None:
        """Plan and launch a step, then read until the next may be planned. After an empty step only reading a launched
        one helps, or taking the blocks of paused sequences."""
        while not self.has_room:  # the last call ended while it read: Ctrl-C, or an error
            self.update()
        if not self.launch_next():
            self.unblock()
            self.update()
        while not self.has_room:
            self.update()

    def launch_next(self) -> bool:
        """Plan a step and launch it. False: it computes nothing, and is undone, so that what it preempted is not moved
        to the host."""
        step = self.scheduler.schedule()
        if step.seqs:
            self.launch(step)
        else:
            self.scheduler.undo(step)
        return bool(step.seqs)

    @property
    def has_room(self) -> bool:
        """Whether the next step may be planned before another is read: at most `lookahead` steps are launched, and none
        has drafts. (A sequence with undecided drafts has no next input, so a step planned now would leave it out, and
        it would stay out of phase. A step of half the sequences takes hardly less time.)"""
        return len(self.launched) <= self.lookahead and not any(step.num_drafts for step, _ in self.launched)

    def launch(self, step: SchedulerOutput) -> None:
        self.launched.append((step, self.runner.launch(step)))

    def update(self) -> None:
        """Read the oldest launched step. If reading fails, the step stays the oldest one, to be read again."""
        if self.launched:
            step, read = self.launched[0]
            sampled = read()  # waits for the GPU
            self.launched.popleft()
            self.scheduler.update(step, sampled)
            self.updates.append((step.sampled, sampled))

    def unblock(self) -> None:
        """Nothing can be computed. If a launched step is unread, its tokens let sequences go on. Else all that run are
        paused (beams that wait for other beams), and their blocks keep out the first waiting sequence, which fits into
        an empty pool. So all that run give up their blocks, and `resume` queues each one again when it has got its
        token."""
        if not self.launched:
            for seq in list(self.scheduler.running):
                self.scheduler.retire(seq)
                self.scheduler.tell("release", seq)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self.launched
