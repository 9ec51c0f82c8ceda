"""After a step that failed: it is undone, and a shortage of memory makes the next steps smaller. An addition to
chapter 3.

The pool takes the memory that the largest step leaves (nanopaged/device). Rare requests need more, for log
probabilities of prompts above all, and other programs may take memory of the same card.
"""
import sys
from typing import Any

import torch

from nanopaged.scheduling.additions import Engine, Scheduler, SchedulerOutput

STEPS_UNTIL_REGROWTH = 64  # after a step that ran out of memory, until the token budget is doubled again


class RecoveringEngine(Engine):
    """An Engine that goes on after a step whose launch failed. The scheduler's max_num_batched_tokens is halved when a
    step runs out of memory, and doubled every 64 steps later."""

    def __init__(self, scheduler: Scheduler, runner: Any, lookahead: int = 0):
        super().__init__(scheduler, runner, lookahead)
        self.full_budget, self.num_steps = scheduler.max_num_batched_tokens, 0  # since one ran out of memory

    def launch(self, step: SchedulerOutput) -> None:
        try:
            super().launch(step)
        except BaseException as error:
            self.failed(step, error)
        else:
            self.num_steps += 1
            if self.num_steps % STEPS_UNTIL_REGROWTH == 0:  # the sequence that took the memory may have ended
                budget = min(2 * self.scheduler.max_num_batched_tokens, self.full_budget)
                self.scheduler.max_num_batched_tokens = budget

    def failed(self, step: SchedulerOutput, error: BaseException) -> None:
        """Undo the step, and read those launched before. Raise the error, unless a smaller step may succeed."""
        self.scheduler.undo(step)
        try:
            while self.launched:  # an earlier step's tokens are valid: append them before its sequences start over
                self.update()
        except BaseException as failed:  # with grammars a step is sampled late, at the latest when it is read
            while self.launched:
                self.scheduler.undo(self.launched.popleft()[0])
            if not isinstance(failed, Exception):  # Ctrl-C
                error = failed
        budget = self.scheduler.max_num_batched_tokens // 2
        if budget == 0 or not isinstance(error, torch.OutOfMemoryError):
            raise error
        torch.cuda.empty_cache()
        print(f"out of memory: steps compute at most {budget} tokens for a while; start with a lower "
              "gpu_memory_utilization to leave room for more", file=sys.stderr)
        self.scheduler.max_num_batched_tokens, self.num_steps = budget, 0
