"""What the command line says on stderr about a run: the status line at its end. (features/progress.py shows more.)"""
import sys
import textwrap
import time
from typing import Any

from nanopaged.outputs import RequestMetrics, RequestOutput


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fold(line: str) -> str:
    return textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def counted(count: int, noun: str) -> str:
    """1 block, or 2 blocks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Progress:
    """Counts what the engine does from now on."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.pool = llm.scheduler.block_manager
        self.num_finished = self.num_new = 0  # requests that have ended, and their new tokens
        self.num_cut = 0  # texts that max_model_len ended
        self.started = time.perf_counter()
        self.first: float | None = None  # the time of the first output
        self.before = self._counts()
        llm.counts.most_blocks_held = self.pool.num_blocks - self.pool.num_free_blocks
        self.metrics = llm.drafting and RequestMetrics()

    def note_text(self) -> None:
        self.first = self.first or time.perf_counter()

    def note_end(self, output: RequestOutput) -> None:
        self.num_finished += 1
        for sample in output.outputs:
            self.num_new += len(sample.token_ids)
            self.num_cut += (sample.finish_reason == "length" and
                             len(output.prompt_token_ids) + len(sample.token_ids) == self.llm.max_model_len)
        if output.metrics:
            self.metrics += output.metrics

    def _counts(self) -> tuple[int, int, int]:
        counts = self.llm.counts
        return counts.num_prompt_tokens, counts.num_cached_tokens, counts.num_generated_tokens

    def report(self, start: str = "", after_first: bool = False, end: str = "") -> str:
        """The status line, of at most 100 columns. A longer one goes on in a second line.

        after_first: the speed leaves out the first token, whose time is that of the prompt
        """
        num_prompt, num_cached, _ = (now - before for now, before in zip(self._counts(), self.before))
        since = self.first if after_first and self.first else self.started
        rate = max(0, self.num_new - after_first) / max(time.perf_counter() - since, 1e-9)
        parts = [start, f"{counted(num_prompt, 'token' if start else 'prompt token')} ({num_cached} cached)",
                 f"first token {self.first - self.started:.2f} s" if self.first else "",
                 f"{self.num_new} new at {rate:.0f}/s",
                 f"{self.metrics.mean_acceptance_length:.2f} tokens per step with drafts" if self.metrics else "",
                 f"{most}/{self.pool.num_blocks} blocks" if (most := self.llm.counts.most_blocks_held) else "",
                 end]
        return fold(", ".join(filter(None, parts))) + (f"\n{fold(self._limit())}" if self.num_cut else "")

    def _limit(self) -> str:
        """What ended texts before their time."""
        texts = "the text" if self.num_cut == self.num_finished == 1 else f"{self.num_cut} texts"
        most = self.llm.max_model_len
        if most == self.llm.config.max_position_embeddings:
            return f"the model's limit of {most} tokens ended {texts}"
        if self.llm.limited_by == "option":
            return f"max_model_len {most} ended {texts}; raise --max-model-len"
        num_blocks = most // self.pool.block_size  # of the smallest pool
        pool = f"the pool of {counted(num_blocks, 'block')}"
        return f"{pool} ended {texts}; raise --num-blocks or --gpu-memory-utilization"
