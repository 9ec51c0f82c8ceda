"""A request while it runs: its sequences, their texts and log probabilities as far as they have been read.

Tokens become text as late as possible: when a caller asks for it, or at every step if stop strings have to be found in it.
"""
from collections.abc import Mapping
from typing import Any

from nanopaged import engine
from nanopaged.outputs import CompletionOutput, Logprob, RequestOutput, token_logprobs
from nanopaged.sampling_params import SamplingParams
from nanopaged.text.stop import StopChecker


class Request:
    """A prompt under way, with its n sequences and their texts as far as they have been decoded."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, priority: int,
                 stop_token_ids: frozenset[int], bad_words: list[list[int]], tokenizer: Any):
        self.prompt, self.prompt_token_ids, self.params, self.priority = prompt, prompt_token_ids, params, priority
        self.stop_token_ids, self.bad_words, self.tokenizer = stop_token_ids, bad_words, tokenizer
        self.prompt_logprobs: list = [None] * len(prompt_token_ids) if params.prompt_logprobs is not None else []
        self.new_prompt_logprobs: dict[int, tuple] = {}  # by position, as the runner gave them
        self.request_id = ""  # until it is queued

    def start(self, request_id: str, sequences: list[engine.Sequence], is_reported: bool) -> None:
        """It is queued now. is_reported: LLM.step tells of it."""
        self.request_id, self.sequences, self.is_reported = request_id, sequences, is_reported
        self.samples = [_Sample(j, seq, self.params, self.tokenizer) for j, seq in enumerate(sequences)]
        if self.params.logprobs is not None:
            for seq, sample in zip(sequences, self.samples):
                seq.listener = sample
        self.running = {seq: j for j, seq in enumerate(sequences)}
        self.outputs: list[CompletionOutput | None] = [None] * len(sequences)  # as of the last call of `output`
        self.changed = set(range(len(sequences)))  # samples that have new tokens since then, or an end

    @property
    def finished(self) -> bool:
        return not self.running

    def take(self, seq: engine.Sequence) -> tuple[str, str] | None:
        """A sequence has a new token, or has failed to get one. If its text ends here for a reason that the scheduler does not
        know, returns (finish_reason, stop_reason)."""
        index, reason = self.running.get(seq), None
        if index is None:  # the step was launched before it was known that the sequence is finished
            return None
        self.changed.add(index)
        if self.params.stop and not seq.finish_reason == "error":
            try:
                self.samples[index].read()
            except Exception as error:  # of a tokenizer: the requests of others go on
                self.samples[index].detokenizer = None
                reason = "error", f"the tokenizer failed: {error!r}"
            else:
                if self.samples[index].matched is not None:
                    reason = "stop", self.samples[index].matched
        if reason or seq.finish_reason:
            del self.running[seq]
            seq.listener = None  # its sample: the two of them would keep each other in memory
        return reason

    def end(self) -> None:
        """It was aborted."""
        self.changed.update(self.running.values())
        self.running.clear()

    def read_text(self) -> str:
        """The text of the first sample as it stands now."""
        self.changed.clear()
        self.samples[0].read()
        return self.samples[0].text

    @property
    def num_new_tokens(self) -> int:
        return sum(len(seq.token_ids) - seq.num_prompt_tokens for seq in self.sequences)

    def take_prompt_logprobs(self, position: int, logprobs: list[tuple]) -> None:
        """Those of the prompt tokens from `position` on, as the runner gives them."""
        self.new_prompt_logprobs.update(enumerate(logprobs, position))

    def output(self) -> RequestOutput:
        """As it stands now. What an earlier call has converted is not converted again."""
        for index in self.changed:
            self.outputs[index] = self.samples[index].output()
        self.changed.clear()
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            for position, found in self.new_prompt_logprobs.items():
                self.prompt_logprobs[position] = token_logprobs(self.prompt_token_ids[position], found, self.params.prompt_logprobs,
                                                                self.tokenizer)
            self.new_prompt_logprobs.clear()
            prompt_logprobs = list(self.prompt_logprobs)
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, list(self.outputs), self.finished,
                             self.sequences[0].num_cached_tokens or 0, prompt_logprobs)


class _Sample:
    """One sequence of a request: its tokens as text and its log probabilities, as far as they have been read."""

    def __init__(self, index: int, seq: engine.Sequence, params: SamplingParams, tokenizer: Any):
        self.index, self.seq, self.params, self.tokenizer = index, seq, params, tokenizer
        self.text, self.num_read, self.is_complete = "", 0, False
        self.detokenizer = None
        if tokenizer and params.detokenize:
            self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens, seq.token_ids[:seq.num_prompt_tokens])
        self.stop = StopChecker(params.stop_strings, params.include_stop_str_in_output) if params.stop else None
        self.new_logprobs: list[tuple] = []  # as the runner gave them
        self.logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0

    @property
    def matched(self) -> str | None:
        return self.stop.matched if self.stop else None

    def on_token(self, seq: engine.Sequence, token: int, logprobs: Any) -> list[int]:
        """engine.Listener's, where log probabilities are wanted."""
        if token >= 0:
            self.new_logprobs.append(logprobs)
        return [token]

    def output(self) -> CompletionOutput:
        seq, logprobs, stop_reason = self.seq, self.logprobs, self.seq.stop_reason
        if isinstance(stop_reason, int) and stop_reason not in (self.params.stop_token_ids or ()):
            stop_reason = None  # an end-of-sequence token
        self.read()
        if logprobs is not None:
            new, self.new_logprobs = self.new_logprobs, []
            for token, found in zip(seq.token_ids[seq.num_prompt_tokens + len(logprobs):], new):
                logprobs.append(token_logprobs(token, found, self.params.logprobs, self.tokenizer))
                self.cumulative_logprob += found[0]
        return CompletionOutput(self.index, self.text, seq.token_ids[seq.num_prompt_tokens:], seq.finish_reason, stop_reason,
                                None if logprobs is None else list(logprobs), None if logprobs is None else self.cumulative_logprob)

    def read(self) -> None:
        """Take up what is new of the sequence."""
        seq, start = self.seq, self.num_read
        if self.detokenizer is None or self.is_complete:
            return
        token_ids = seq.token_ids[seq.num_prompt_tokens + start:]
        self.num_read += len(token_ids)
        shows_stop = self.params.include_stop_str_in_output
        if seq.finish_reason == "stop" and token_ids and not isinstance(seq.stop_reason, str) and not shows_stop:
            token_ids.pop()  # the token that ended the text is not part of it
        if self.stop is None:
            self.text += self.detokenizer.add(token_ids)
        else:
            for i, token in enumerate(token_ids, start + 1):
                self.text += self.stop.add(self.detokenizer.add([token]), may_stop=i > self.params.min_tokens)
                if self.stop.matched is not None:
                    self.is_complete = True
                    return
        if seq.finish_reason:
            self.is_complete = True
            rest = self.detokenizer.finish()
            self.text += rest if self.stop is None else self.stop.add(rest) + self.stop.finish()
