"""After a step that failed: it is undone, and a shortage of memory makes the next steps smaller. An addition to
chapter 3.

The pool takes the memory that the largest step leaves (nanopaged/device). Rare requests need more, for log
probabilities of prompts above all, and other programs may take memory of the same card.
"""
import sys
from typing import Any

from nanopaged.scheduling.additions import Engine, Scheduler, SchedulerOutput

STEPS_UNTIL_REGROWTH = 64  # after a step that ran out of memory, until the token budget is doubled again


class Recovery:
    """What an Engine calls when a step fails. It has the scheduler's max_num_batched_tokens, which is halved when a
    step runs out of memory, and doubled every 64 steps later."""

    def __init__(self, scheduler: Scheduler, runner: Any):
        self.scheduler, self.runner = scheduler, runner
        self.full, self.is_reduced, self.num_small_steps = scheduler.max_num_batched_tokens, False, 0

    def recover(self, loop: Engine, step: SchedulerOutput, error: BaseException) -> None:
        """Undo the step, and read those launched before. Raise the error, unless a smaller step may succeed."""
        self._undo(step)
        try:
            while loop.launched:  # an earlier step's tokens are valid: append them before its sequences start over
                loop.update()
        except BaseException as failed:  # with grammars a step is sampled late, at the latest when it is read
            while loop.launched:
                self._undo(loop.launched.popleft()[0])
            if not isinstance(failed, Exception):  # Ctrl-C
                error = failed
        if not self._shrink(error):
            raise error

    def _undo(self, step: SchedulerOutput) -> None:
        self.runner.forget_rows(step.seqs)
        self.scheduler.undo(step)

    def _shrink(self, error: BaseException) -> bool:
        """Whether a smaller step may succeed; the next one is."""
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
