"""The command of scenarios.py, in small: one run of each scenario, and faults that it must find."""
from importlib import import_module

import pytest

from engine import BlockManager, Scheduler
from nanopaged.tests.helpers import is_there, needs

FEATURES = "beam", "drafts", "recovery", "router", "samples", "swapping"
pytestmark = needs(*FEATURES)
scenarios = import_module("nanopaged.tests.scenarios") if all(map(is_there, FEATURES)) else None
NAMES = [*scenarios.SCENARIOS] if scenarios else ["none"]


@pytest.mark.parametrize("name", NAMES)
def test_every_request_gets_its_text_and_nothing_is_held(name):
    found, events = scenarios.run(NAMES.index(name))
    assert found == name and events["steps"] > 40


def undo_without_eviction(self, step, undo=Scheduler.undo):
    step.cached.clear()
    undo(self, step)


@pytest.mark.parametrize("place, name, wrong, first", [
    (Scheduler, "undo", undo_without_eviction, 4),
    (BlockManager, "evict", lambda self, block: None, 1),
    (Scheduler, "add", lambda self, seq: self.waiting.append(seq), 10),
    ("DraftSequence", "append", lambda self, token: super(scenarios.DraftSequence, self).append(token), 9),
    ("Swapping", "num_blocks_before_window", lambda self, position: position // self.block_size, 6)],
    ids=["undo", "evict", "order", "drafts", "window"])
def test_it_finds_a_planted_fault_and_says_how_to_see_it_again(monkeypatch, capsys, place, name, wrong, first):
    monkeypatch.setattr(getattr(scenarios, place) if isinstance(place, str) else place, name, wrong)
    several = 4 * len(NAMES) * scenarios.REQUESTS
    assert scenarios.main([str(several), "--first", str(first)]) == 1
    out = capsys.readouterr().out
    seed = int(out.split("--seed ")[1])
    assert f"seed {seed}, {NAMES[seed % len(NAMES)]}, failed: AssertionError" in out
    with pytest.raises(AssertionError):
        scenarios.run(seed)
