"""After a step that failed: steps launched before it are read, and a shortage of memory makes the next steps smaller.

The pool takes the memory that the largest step leaves (nanopaged/device). Rare requests need more, for log
probabilities of prompts above all, and other programs may take memory of the same card. `Engine.launch` has undone the
failed step before this file gets the error, so its sequences start over.
"""
import sys

import torch

from nanopaged import engine

STEPS_UNTIL_REGROWTH = 64  # after a step that ran out of memory, until the token budget is doubled again
Shortages = dict[engine.Engine, list[int]]  # engine -> its full token budget, and the steps since memory ran out


def recover(one: engine.Engine, error: BaseException, shortages: Shortages) -> None:
    """Read the steps that the engine has launched. Raise the error, unless it is a shortage of memory: then the
    engine's max_num_batched_tokens is halved, and noted in `shortages`."""
    if isinstance(error, Exception):  # after Ctrl-C the next call reads them
        try:
            while one.launched:
                one.update()
        except BaseException as failed:  # with grammars a step is sampled late, at the latest when it is read
            while one.launched:
                one.scheduler.undo(one.launched.popleft()[0])
            if not isinstance(failed, Exception):  # Ctrl-C
                error = failed
    budget = one.scheduler.max_num_batched_tokens // 2
    if budget == 0 or not isinstance(error, torch.OutOfMemoryError):
        raise error
    torch.cuda.empty_cache()
    print(f"out of memory: steps compute at most {budget} tokens for a while; start with a lower "
          "gpu_memory_utilization to leave room for more", file=sys.stderr)
    full, _ = shortages.get(one, (one.scheduler.max_num_batched_tokens, 0))
    one.scheduler.max_num_batched_tokens, shortages[one] = budget, [full, 0]


def regrow(shortages: Shortages) -> None:
    """Another step has succeeded. After STEPS_UNTIL_REGROWTH steps the sequence that took the memory may have ended,
    and the budget is doubled."""
    for one, (full, num_steps) in [*shortages.items()]:
        shortages[one] = [full, num_steps + 1]
        if (num_steps + 1) % STEPS_UNTIL_REGROWTH == 0:
            one.scheduler.max_num_batched_tokens = min(2 * one.scheduler.max_num_batched_tokens, full)
            if one.scheduler.max_num_batched_tokens == full:
                del shortages[one]
