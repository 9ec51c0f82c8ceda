"""Samples, beams, drafts, forced tokens, swapping, windows and several pools at once, at random, on a fake model."""
import random
from collections import Counter
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from engine import BlockManager, Scheduler, Status, cdiv
from nanopaged.api.core import sequence_class
from nanopaged.tests.fake_model import ARRIVALS, FakeModel, sequence
from nanopaged.tests.helpers import check_books


class RandomGroup:
    """Beams that go on at random, in place of a BeamGroup: a search's blocks do not depend on the model."""

    def __init__(self, width, max_tokens, rng):
        self.beam_width, self.max_tokens, self.rng, self.num_tokens = width, max_tokens, rng, 0
        self.num_candidates = 1

    def extend(self, candidates):
        self.num_tokens += 1
        count = self.beam_width if self.num_tokens < self.max_tokens else 0
        return [(self.rng.randrange(len(candidates)), self.rng.randint(0, 2)) for _ in range(count)]


class RandomProposer:
    def __init__(self, rng):
        self.rng = rng

    def propose(self, token_ids, k):
        if self.rng.random() < 0.01:
            raise SystemExit  # in the middle of `schedule`
        return [self.rng.randint(0, 2) for _ in range(self.rng.randint(0, k))]


class RandomGrammar:
    """Forces tokens now and then, as a grammar does. FakeModel looks at `forced` of the sequence."""

    def __init__(self, rng, events):
        self.rng, self.events = rng, events

    def on_token(self, seq, token, may_force):
        forced = [self.rng.randint(0, 2) for _ in range(self.rng.choice([0, 0, 0, 1, 4]))]
        self.events["forced"] += bool(forced)
        seq.forced.update(range(len(seq.token_ids) + 1, len(seq.token_ids) + 1 + len(forced)))
        return [token, *forced]

    def num_fitting(self, drafts):
        return len(drafts)


PARAMS = SimpleNamespace(logprobs=None, edits_logits=False, logits_processors=None)


def random_operations(count, num_pools, rng, events):
    from nanopaged.features.beam import BeamSearch
    from nanopaged.features.drafts import Drafter, Drafting, DraftingScheduler, DraftSequence
    from nanopaged.features.grammar import GrammarSequence
    from nanopaged.features.router import Router
    from nanopaged.features.samples import Samples, SampleSequence
    from nanopaged.features.swapping import Swapping
    block_size, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([20, 40])
    window, num_host_blocks, caching = rng.choice([0, 0, 1, 5, 11]), rng.choice([0, 5, 50]), rng.random() < 0.8
    num_blocks = cdiv(window or max_len, block_size) + 2 + rng.randint(0, 20)
    lookahead, max_num_seqs, budget = rng.choice([0, 1]), rng.choice([1, 3, 8]), rng.choice([1, 5, 30])
    make_scheduler, models = rng.choice([Scheduler, DraftingScheduler]), []
    for _ in range(num_pools):
        manager, most = BlockManager(num_blocks, block_size, caching), budget
        if window or num_host_blocks:
            manager = Swapping(num_blocks, block_size, caching, window, num_host_blocks)
            most = min(budget, manager.most_tokens)
        models.append(FakeModel(make_scheduler(manager, max_num_seqs, most), lookahead))

    def recover(one, error):
        if not isinstance(error, OSError):
            raise error

    whole = models[0].engine if num_pools == 1 else Router([model.engine for model in models], recover, nullcontext)
    scheduler, scheduler_of = models[0].scheduler, lambda seq: models[0].scheduler
    if num_pools > 1:
        scheduler, scheduler_of = whole, whole.of
    texts = [[rng.randint(0, 2) for _ in range(max_len)] for _ in range(3)]
    alive, searches = [], []
    drafting = Drafting({"method": lambda: RandomProposer(rng), "num_speculative_tokens": rng.randint(1, 6)}, 3)
    drafting.pays = rng.choice([0, 1])

    def request():
        priority, new, arrival, n = rng.choice([0, 0, 1]), rng.randint(1, 20), next(ARRIVALS), rng.choice([1, 1, 2, 4])
        prompt, kinds = rng.choice(texts)[:rng.randint(1, max_len - 1)], [SampleSequence] * (n > 1)
        kinds += [DraftSequence] * (make_scheduler is DraftingScheduler and rng.random() < 0.5)
        kinds += [GrammarSequence] * (rng.random() < 0.3)
        params = SimpleNamespace(**vars(PARAMS) | dict(structured_outputs=GrammarSequence in kinds))
        seqs = [sequence(prompt, new, max_len, priority, sequence_class(*kinds), arrival, j,
                         sampling=SimpleNamespace(params=params)) for j in range(n)]
        grammar = RandomGrammar(rng, events)
        for seq in seqs:
            seq.forced, seq.grammar = set(), grammar
            if DraftSequence in kinds:
                seq.drafter = Drafter(drafting)
        if n > 1:
            Samples(seqs, scheduler_of)
        alive.extend(seqs)
        scheduler.add(seqs[0])

    def end(search):  # as Core.abort does
        for beam in [*search.sequences]:
            scheduler.finish(beam, "abort")
            search.take(beam)

    def step():
        try:
            if not whole.step():
                for search in searches:
                    search.give_way()
        except OSError:
            events["failed"] += 1
        except SystemExit:
            events["unplanned"] += 1
        for model in models:
            model.check_texts()
        while whole.updates:  # as Core._take does
            _, sampled, appended = whole.updates.popleft()
            for seq, i in appended:
                search = next((one for one in searches if seq in one.sequences), None)
                if search:
                    before = search.candidates
                    search.hear(seq, sampled.tokens[i], sampled.logprobs[i])
                    search.take(seq)
                    if search.candidates is not before:
                        assert len(search.sequences) + len(search.free_numbers) == search.group.beam_width
                        events["branches"] += not search.finished

    for _ in range(count):
        action = rng.random()
        if action < 0.30 and len(alive) < 20:
            request()
        elif action < 0.33 and len(searches) < 3:
            prompt = rng.choice(texts)[:rng.randint(1, max_len - 1)]
            group = RandomGroup(rng.randint(1, 4), max_len - len(prompt), rng)
            searches.append(BeamSearch(None, prompt, group, next(ARRIVALS), scheduler_of))
            scheduler.add(searches[-1].sequences[0])
        elif action < 0.37 and alive:
            scheduler.finish(rng.choice(alive), "abort")
        elif action < 0.38 and searches:
            end(searches.pop(rng.randrange(len(searches))))
        else:
            for model in models:
                model.fails = rng.random() > 0.97
            step()
        for one in models:
            check_books(one.scheduler)
            one.check_cache()
        events["finished"] += sum(seq.status is Status.FINISHED for seq in alive)
        alive[:] = [seq for seq in alive if seq.status is not Status.FINISHED]
        searches[:] = [search for search in searches if not search.finished]
    for search in searches:
        end(search)
    searches.clear()
    for model in models:
        model.fails = False
    for _ in range(10_000):
        if whole.is_idle:
            break
        with suppress(SystemExit):
            step()
    assert whole.is_idle and all(seq.status is Status.FINISHED for seq in alive)
    scheduler.block_manager.check_idle()
    for one in models:
        events.update(one.events)
    events[f"{len(models)} pools"] += 1


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_promise(seed):
    """On 1 to 3 tiny pools with and without a host pool and a window. Prompts are cut from few texts, so prefixes are
    shared, evicted and generated all the time. FakeModel checks every slot and what is cached, check_books the rest."""
    rng, events = random.Random(seed), Counter()
    for i in range(24):
        random_operations(250, 1 + i % 3, rng, events)
    kinds = ("copies", "swaps_in", "swaps_out", "preempted", "nulls", "finished", "branches", "drafts", "forced",
             "failed", "unplanned", "1 pools", "2 pools", "3 pools")
    assert all(events[kind] > 0 for kind in kinds), events


def test_forced_tokens_are_computed_once():
    """A step is under way when a grammar forces other tokens. It has computed the sampled one, which is right."""
    from nanopaged.features.grammar import GrammarSequence
    model = FakeModel(Scheduler(BlockManager(64, 4), 256, 8192), lookahead=1)
    grammar = SimpleNamespace(on_token=lambda seq, token, _: [token, 1, 2])
    seq = sequence(range(8), max_new=12, kind=GrammarSequence, sampling=SimpleNamespace(params=PARAMS))
    seq.grammar = grammar
    seq.forced = set(range(99))
    model.run(seq)
    assert len(seq.token_ids) == 20 and model.num_computed == 18  # all but the last two, once

