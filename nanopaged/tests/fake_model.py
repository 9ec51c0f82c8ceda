"""A model of integers in place of a runner, for tests of the scheduler and the block manager."""
from collections import Counter
from contextlib import suppress
from itertools import count

import engine
from engine import BlockManager, Engine, Order, Sampled, Scheduler, Sequence
from nanopaged.tests.helpers import NULL, check_books

ARRIVALS = count()


def sequence(token_ids, max_new=10, max_model_len=10**6, priority=0, kind=Sequence, arrival=None, number=0, **fields):
    order = Order(priority, next(ARRIVALS) if arrival is None else arrival, number)
    return kind(list(token_ids), order, min(len(token_ids) + max_new, max_model_len), **fields)


class FakeModel:
    """A model that writes into each slot what a real model's K and V would depend on: all tokens up to there. So the
    contents of every block can be checked, and a block that is overwritten, shared wrongly or found by mistake
    shows. It is the runner of an Engine."""

    def __init__(self, scheduler, lookahead=0):
        self.scheduler, self.slots, self.host, self.num_computed = scheduler, {}, {}, 0
        self.engine, self.fails, self.events = Engine(scheduler, self, lookahead), False, Counter()
        self.unread = {}  # sequence -> positions and tokens that were sampled and not told to the scheduler yet
        self.num_known = {}  # sequence -> the tokens that it had before steps were read
        self.texts = {engine.ROOT: ()}  # prefix key -> the tokens that it stands for

    def places(self, block_table, start, end):
        """(position, its slot) for these positions, whose blocks must be there."""
        if start >= end:
            return []
        size = self.scheduler.block_manager.block_size
        first = start // size
        blocks = block_table[first:(end - 1) // size + 1]
        assert NULL not in blocks
        slots = [block * size + i for block in blocks for i in range(size)]
        return [*enumerate(slots, first * size)][start - first * size:end - first * size]

    def move_blocks(self, step):
        """Move blocks out to the host, copy blocks, and move blocks in from the host, in the order of the runner."""
        size = self.scheduler.block_manager.block_size
        out, back = (getattr(step, name, []) for name in ("swaps_out", "swaps_in"))
        for source, target, moves in ((self.slots, self.host, out), (self.slots, self.slots, step.copies),
                                      (self.host, self.slots, back)):
            contents = [[source.get(block * size + i) for i in range(size)] for block, _ in moves]
            for (_, block), content in zip(moves, contents):
                target.update((block * size + i, value) for i, value in enumerate(content))
        moved = [block for _, block in back + step.copies]
        assert len(set(moved)) == len(moved)  # a GPU would write them in any order
        self.events.update(copies=len(step.copies), swaps_in=len(back), swaps_out=len(out))

    def tokens(self, seq, num_drafts=None):
        """The text, and what follows it on the device: drafts, or else the samples that are not read yet. (One that the
        text has passed, because tokens were forced, is dropped when it is read.)"""
        unread = [token for i, token in self.unread.get(seq, ()) if i >= len(seq.token_ids)]
        drafts = getattr(seq, "drafts", None)
        return seq.token_ids + (list(drafts[:num_drafts]) if drafts else unread)

    def sample_of(self, seq, tokens):
        """A small vocabulary, so that different sequences often generate the same text. Not all samples of a prompt
        do."""
        return (sum(tokens) + (seq.order.arrival + seq.order.number) % 2) * 31 % 3

    def step(self, fail=False):
        """The step that was planned."""
        self.fails = fail
        with suppress(OSError):
            self.engine.step()
        self.check_texts()
        return self.scheduler.block_manager.step

    def launch(self, step):
        if self.fails:
            raise OSError
        assert sum(step.num_tokens) <= self.scheduler.max_num_batched_tokens
        assert all(seq.order < last.order for seq in step.seqs for last in step.preempted)
        self.num_computed += sum(step.num_tokens)
        manager = self.scheduler.block_manager
        self.events.update(preempted=len(step.preempted), nulls=sum(NULL in seq.block_table for seq in step.seqs))
        self.move_blocks(step)
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            assert num_tokens > 0
            tokens, end = tuple(self.tokens(seq)), seq.num_computed_tokens
            for position, slot in self.places(seq.block_table, max(end - num_tokens, seq.num_found_tokens), end):
                block = seq.block_table[position // manager.block_size]
                # Other sequences may list the block already if they were admitted in this step: they want these very
                # tokens.
                assert manager.ref_counts[block] == 1 or any(
                    block in other.block_table and other in step.seqs
                    for other in self.scheduler.running if other is not seq)
                self.slots[slot] = tokens[:position + 1]
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            window = getattr(manager, "window", 0)
            oldest = max(0, seq.num_computed_tokens - num_tokens - window + 1) if window else 0
            tokens = tuple(self.tokens(seq))
            for position, slot in self.places(seq.block_table, oldest, seq.num_computed_tokens):
                assert self.slots[slot] == tokens[:position + 1]
        num_rows, sampled = Counter(), []
        for seq in step.sampled:
            sampled.append(self.sample_of(seq, self.tokens(seq, num_rows[seq])))
            num_rows[seq] += 1
        self.events["drafts"] += len(step.sampled) - len(num_rows)
        for seq, *unread in zip(step.sampled, step.positions, sampled):
            self.unread.setdefault(seq, []).append(unread)

        def read():
            for seq in step.sampled:
                self.unread[seq].pop(0)
                self.num_known.setdefault(seq, len(seq.token_ids))
            return Sampled(sampled, [(0.0, 1, [token], [0.0]) for token in sampled])

        read.is_done = lambda: True
        return read

    def check_texts(self):
        """A text goes on as the model says, whatever was guessed, forced, lost or planned ahead."""
        for seq, start in self.num_known.items():
            for i in set(range(start, len(seq.token_ids))) - getattr(seq, "forced", set()):
                assert seq.token_ids[i] == self.sample_of(seq, seq.token_ids[:i])
        self.num_known = {}

    def check_cache(self):
        """What the prefix cache offers is what its key says, whoever holds it."""
        size = self.scheduler.block_manager.block_size
        # In the order of their numbers: the key of the tokens before is smaller.
        for (before, tokens), (block, key) in sorted(self.scheduler.block_manager.prefix_cache.items(),
                                                     key=lambda entry: entry[1][1]):
            if before in self.texts:  # else its block was offered and replaced in one step, so nothing finds this one
                text = self.texts[key] = self.texts[before] + tokens
                for i in range(size):
                    assert self.slots[block * size + i] == text[:len(text) - size + i + 1]

    def run(self, *seqs, limit=10_000):
        for seq in seqs:
            self.scheduler.add(seq)
        for _ in range(limit):
            if self.engine.is_idle:
                return
            self.step()
            check_books(self.scheduler)
            self.check_cache()
        raise AssertionError("the scheduler makes no progress")


def fake(num_blocks=64, block_size=4, max_num_seqs=256, max_num_batched_tokens=8192, caching=True, lookahead=0,
         manager=None):
    """A FakeModel with a pool. manager: another BlockManager than that of these numbers"""
    manager = manager or BlockManager(num_blocks, block_size, caching)
    return FakeModel(Scheduler(manager, max_num_seqs, max_num_batched_tokens), lookahead)
