"""Smaller steps after one that ran out of memory. An addition to chapter 3.

The pool takes the memory that the largest step leaves (nanopaged/device). Rare requests need more, for log
probabilities of prompts above all, and other programs may take memory of the same card.
"""
import sys
from typing import Any

from nanopaged import engine

STEPS_UNTIL_REGROWTH = 64  # after a step that ran out of memory, until the token budget is doubled again


class TokenBudget:
    """The scheduler's max_num_batched_tokens: halved when a step runs out of memory, doubled every 64 steps later."""

    def __init__(self, scheduler: engine.Scheduler, runner: Any):
        self.scheduler, self.runner = scheduler, runner
        self.full, self.is_reduced, self.num_small_steps = scheduler.max_num_batched_tokens, False, 0

    def shrink(self, error: BaseException) -> bool:
        """A step has failed. Whether a smaller one may succeed."""
        budget = self.scheduler.max_num_batched_tokens // 2
        if budget == 0 or not self.runner.is_out_of_memory(error):
            return False
        print(f"out of memory: steps compute at most {budget} tokens for a while; start with a lower "
              "gpu_memory_utilization to leave room for more", file=sys.stderr)
        self.scheduler.max_num_batched_tokens, self.is_reduced, self.num_small_steps = budget, True, 0
        return True

    def regrow(self) -> None:
        """A step with a reduced budget was computed. The sequence that took the memory may have ended."""
        self.num_small_steps += 1
        if self.num_small_steps % STEPS_UNTIL_REGROWTH == 0:
            self.scheduler.max_num_batched_tokens = min(2 * self.scheduler.max_num_batched_tokens, self.full)
            self.is_reduced = self.scheduler.max_num_batched_tokens < self.full
