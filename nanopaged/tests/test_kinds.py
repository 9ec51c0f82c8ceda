"""Layers of several kinds: the index and the groups' blocks, on a fake model that checks what each block holds."""
import random
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest

from engine import Scheduler, Status, cdiv
from nanopaged.api.core import sequence_class
from nanopaged.features.beam import BeamSearch
from nanopaged.features.drafts import Drafter, Drafting, DraftingScheduler, DraftSequence
from nanopaged.features.grammar import GrammarSequence
from nanopaged.features.kinds import Kinds
from nanopaged.features.kinds.windows import Group
from nanopaged.features.samples import Samples, SampleSequence
from nanopaged.tests.fake_model import ARRIVALS, FakeModel, sequence
from nanopaged.tests.helpers import NULL, check_books
from nanopaged.tests.test_random_operations import PARAMS, RandomGrammar, RandomGroup, RandomProposer


class KindsFake(FakeModel):
    """A FakeModel whose groups write into their blocks what their K and V depend on, too. What is in a block begins
    with its group's name, so that no two groups share one."""
    read_fails = False

    def step(self, fail=False, read_fail=False):
        """With read_fail the first read fails, and the launched steps are undone, as in features/recovery.py."""
        self.read_fails = read_fail
        step = super().step(fail)
        if read_fail and not self.read_fails:
            while self.engine.launched:
                undone, _ = self.engine.launched.popleft()
                self.scheduler.undo(undone)
                self.slots.update(dict.fromkeys(undone.written))  # it was not computed
                self.events["undone"] += 1
            self.unread.clear()
        self.read_fails = False
        return step

    def launch(self, step):
        read, step.written = super().launch(step), []
        for name, kind in self.scheduler.block_manager.kinds.items():
            self.launch_group(step, name, kind)

        def read_or_fail():
            if self.read_fails:
                self.read_fails = False
                raise OSError
            return read()

        read_or_fail.is_done = lambda: True
        return read_or_fail

    def launch_group(self, step, name, kind):
        size = kind.block_size
        texts = [tuple(self.tokens(seq)) for seq in step.seqs]  # with the step's own sample, where nothing looks
        chunks = [(seq.num_computed_tokens - count, seq.num_computed_tokens)
                  for seq, count in zip(step.seqs, step.num_tokens)]

        def slot(seq, position):
            block = seq.parts[name].block_table[position // size]
            assert block != NULL
            return block * size + position % size

        written = Counter()
        for seq, text, (start, end) in zip(step.seqs, texts, chunks):
            for position in range(max(start, seq.num_hit_tokens), end):
                written[slot(seq, position)] += 1
                self.slots[slot(seq, position)] = name, text[:position + 1]
        assert max(written.values(), default=0) <= 1
        step.written += written
        for seq, text, (start, end) in zip(step.seqs, texts, chunks):
            for position in range(max(0, start - kind.window + 1) if kind.window else 0, end):
                assert self.slots[slot(seq, position)] == (name, text[:position + 1])
        self.events["given back"] += sum(seq.parts[name].num_null_blocks > 0 for seq in step.seqs)

    def check_cache(self):
        """As in FakeModel for the first group, then what is stored under the same keys."""
        manager, size = self.scheduler.block_manager, self.scheduler.block_manager.block_size
        for key, (block, after) in sorted(manager.prefix_cache.items(), key=lambda entry: (entry[1][1], str(entry))):
            if key[1] not in manager.kinds and key[0] in self.texts:
                self.texts[after] = self.texts[key[0]] + key[1]
        for (key, name), (block, after) in manager.prefix_cache.items():
            of_group = name in manager.kinds
            if text := self.texts.get(key if of_group else after):
                for i in range(size):
                    tokens = text[:len(text) - size + i + 1]
                    assert self.slots[block * size + i] == ((name, tokens) if of_group else tokens)


def kinds(num_blocks, block_size, windows, most_tokens, caching=True):
    manager = Kinds(num_blocks, block_size, caching)
    manager.kinds = {f"group {i}": Group(manager, f"group {i}", window, most_tokens)
                     for i, window in enumerate(windows, 1)}
    return manager


def fake(num_blocks=200, block_size=4, windows=(6,), most_tokens=1000, caching=True, lookahead=0, max_num_seqs=8):
    manager = kinds(num_blocks, block_size, windows, most_tokens, caching)
    return KindsFake(Scheduler(manager, max_num_seqs, most_tokens), lookahead)


def run(model, *seqs):
    for seq in seqs:
        model.scheduler.add(seq)
    for _ in range(10_000):
        if model.engine.is_idle:
            return seqs
        model.step()
        check_books(model.scheduler)
        model.check_cache()
    raise AssertionError("the scheduler makes no progress")


# ---- Random operations

def random_operations(count, rng, events):
    size, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([20, 40])
    lookahead, max_num_seqs, budget = rng.choice([0, 1]), rng.choice([1, 3, 8]), rng.choice([1, 5, 30])
    windows = rng.choice([[0], [1], [5], [11], [5, 5, 5], [0, 3], [7, 2]])
    most = sum(min(cdiv(max_len, size), cdiv(window + budget, size) + 1) if window else cdiv(max_len, size)
               for window in windows)
    manager = kinds(cdiv(max_len, size) + most + rng.randint(0, 20), size, windows, budget, rng.random() < 0.9)
    make_scheduler = rng.choice([Scheduler, DraftingScheduler])
    model = KindsFake(make_scheduler(manager, max_num_seqs, budget), lookahead)
    scheduler, alive, searches = model.scheduler, [], []
    texts = [[rng.randint(0, 2) for _ in range(max_len)] for _ in range(3)]
    drafting = Drafting({"method": lambda: RandomProposer(rng), "num_speculative_tokens": rng.randint(1, 6)}, 3)
    drafting.pays = rng.choice([0, 1])

    def request():
        priority, new, arrival, n = rng.choice([0, 0, 1]), rng.randint(1, 20), next(ARRIVALS), rng.choice([1, 1, 2, 4])
        prompt, classes = rng.choice(texts)[:rng.randint(1, max_len - 1)], [SampleSequence] * (n > 1)
        classes += [DraftSequence] * (make_scheduler is DraftingScheduler and rng.random() < 0.5)
        classes += [GrammarSequence] * (rng.random() < 0.3)
        params = SimpleNamespace(**vars(PARAMS) | dict(structured_outputs=GrammarSequence in classes))
        seqs = [sequence(prompt, new, max_len, priority, sequence_class(*classes), arrival, j,
                         sampling=SimpleNamespace(params=params)) for j in range(n)]
        for seq in seqs:
            seq.forced, seq.grammar = set(), RandomGrammar(rng, events)
            if DraftSequence in classes:
                seq.drafter = Drafter(drafting)
        if n > 1:
            Samples(seqs, lambda seq: scheduler)
        alive.extend(seqs)
        scheduler.add(seqs[0])

    def end(search):
        for beam in [*search.sequences]:
            scheduler.finish(beam, "abort")
            search.take(beam)

    def step(fails=False, read_fails=False):
        with suppress(SystemExit):  # a proposer's
            model.step(fails, read_fails)
        if not (scheduler.block_manager.step.seqs or model.engine.launched):
            for search in searches:
                search.give_way()
        while model.engine.updates:
            _, sampled, appended = model.engine.updates.popleft()
            for seq, i in appended:
                for search in [one for one in searches if seq in one.sequences]:
                    search.hear(seq, sampled.tokens[i], sampled.logprobs[i])
                    search.take(seq)
                    events["beams"] += 1

    for _ in range(count):
        action = rng.random()
        if action < 0.30 and len(alive) < 20:
            request()
        elif action < 0.32 and len(searches) < 3:
            prompt = rng.choice(texts)[:rng.randint(1, max_len - 1)]
            group = RandomGroup(rng.randint(1, 4), max_len - len(prompt), rng)
            searches.append(BeamSearch(None, prompt, group, next(ARRIVALS), lambda seq: scheduler))
            scheduler.add(searches[-1].sequences[0])
        elif action < 0.36 and alive:
            scheduler.finish(rng.choice(alive), "abort")
        elif action < 0.37 and searches:
            end(searches.pop(rng.randrange(len(searches))))
        else:
            fails = rng.random() > 0.97
            step(fails, rng.random() > 0.97)
            events["failed"] += fails
        check_books(scheduler)
        model.check_cache()
        events["finished"] += sum(seq.status is Status.FINISHED for seq in alive)
        alive[:] = [seq for seq in alive if seq.status is not Status.FINISHED]
        searches[:] = [search for search in searches if not search.finished]
    for search in searches:
        end(search)
    searches.clear()
    for _ in range(10_000):
        if model.engine.is_idle:
            break
        step()
    assert model.engine.is_idle and not any(seq.status is not Status.FINISHED for seq in alive)
    manager.check_idle()
    events.update(model.events)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_promise(seed):
    """Texts, samples, beams, drafts and forced tokens, with aborts and with steps that fail when they are launched or
    read. Prompts are cut from few texts, so beginnings are shared, given back and found again all the time."""
    rng, events = random.Random(seed), Counter()
    for _ in range(24):
        random_operations(250, rng, events)
    assert all(events[one] > 0 for one in ("copies", "preempted", "finished", "failed", "undone", "given back", "beams",
                                           "drafts", "forced")), events
