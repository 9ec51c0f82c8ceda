"""The log probabilities of a step, which few requests want: of sampled tokens, and of tokens of a prompt."""
import sys
from itertools import islice
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.step_input import StepInput
from nanopaged.device.transfer import LaunchedStep
from nanopaged.sampling_params import SamplingParams

PROMPT_CHUNK = 512  # at most this many tokens of a prompt with prompt_logprobs in a step
LOGPROBS_AT_ONCE = 2**23  # logits that top_logprobs converts at once: 32 MiB of float32


class PromptSequence(engine.Sequence):
    """A text whose prompt's log probabilities are wanted. They come from logits, which a block of the prefix cache does
    not have, and take memory: a step computes at most max_chunk tokens of the prompt."""
    max_chunk = sys.maxsize

    @property
    def num_new_tokens(self) -> int:
        return min(super().num_new_tokens, self.max_chunk)


SEQUENCE = PromptSequence


def extend_steps(core: Any) -> None:
    """Have steps compute log probabilities from now on."""
    for runner in core.runners:
        runner.extend_steps(LogprobsStep)


def start(core: Any, params: SamplingParams, sequences: list[Any]) -> None:
    """Prepare a request whose first sample computes the log probabilities of the prompt."""
    extend_steps(core)
    first, count = sequences[0], params.prompt_logprobs or 0
    num_values = max(1, count) if count >= 0 else core.config.vocab_size
    first.finds_prefix = False
    first.max_chunk = min(PROMPT_CHUNK, max(1, core.prompt_logprobs_values // num_values))


class PromptPart(NamedTuple):
    """Prompt tokens whose log probabilities a step computes."""
    seq: engine.Sequence
    first: int  # position of the first
    predictors: range  # tokens of the flat batch: those that predict them


def prompt_parts(batch: StepInput) -> list[PromptPart]:
    """For sequences that want log probabilities of their prompts: the token at each position predicts the next one."""
    parts = []
    for seq, num_tokens, index in zip(batch.seqs, batch.num_tokens, batch.query_start_loc):
        if seq.sampling.num_prompt_logprobs is not None:
            start = seq.num_computed_tokens - num_tokens
            count = min(seq.num_computed_tokens, seq.num_prompt_tokens - 1) - start
            if count > 0:
                parts.append(PromptPart(seq, start + 1, range(index, index + count)))
    return parts


class LogprobsStep(LaunchedStep):
    """A step with the log probabilities that its sequences want, if any does."""

    def plan(self, batch: StepInput) -> None:
        super().plan(batch)
        self.parts = prompt_parts(batch)
        self.more_tokens += [token for part in self.parts for token in part.predictors]
        self.wanted = {logit_row: count for logit_row, place in enumerate(batch.sampling_places)  # -> of best tokens
                       if (count := batch.seqs[place].sampling.num_logprobs) is not None}
        if self.parts or self.wanted:
            self.needs = self.needs._replace(keeps_logits=True)

    def results(self, tokens: Tensor, logits: Tensor) -> list[Tensor]:
        return [*super().results(tokens, logits), *self.tensors(self.runner.send, tokens, logits)]

    def __call__(self) -> engine.Sampled:
        sampled = super().__call__()
        return self.sampled(sampled.tokens, self.on_host[1:]) if self.parts or self.wanted else sampled

    def tensors(self, send: Callable, tokens: Tensor, logits: Tensor) -> list[Tensor]:
        """What `top_logprobs` returns for the sampled tokens whose sequences want it, and then for prompt parts.
        logits: those of the sampled tokens, then those of more_tokens"""
        tensors: list[Tensor] = []
        if self.wanted:
            at = send([[*self.wanted]])[0]
            chosen, counts = tokens.index_select(0, at).clamp(min=0), self.wanted.values()
            tensors += top_logprobs(logits.index_select(0, at), chosen, -1 if -1 in counts else max(counts))
        if self.parts:
            ids = [token for part in self.parts
                   for token in part.seq.token_ids[part.first:part.first + len(part.predictors)]]
            wanted = [part.seq.sampling.num_prompt_logprobs for part in self.parts]
            tensors += top_logprobs(logits[len(tokens):], send([ids])[0], -1 if -1 in wanted else max(wanted))
        return tensors

    def sampled(self, tokens: list[int], tensors: list[Tensor]) -> engine.Sampled:
        """The step's tokens and their log probabilities, from the `tensors`: (own, rank, ids of the best tokens,
        theirs) for each token."""
        logprobs = dict(zip(self.wanted, as_lists(tensors[:4], [*self.wanted.values()])))
        counts = [part.seq.sampling.num_prompt_logprobs for part in self.parts for _ in part.predictors]
        of_prompts = iter(as_lists(tensors[-4:], counts))
        prompts = [(part.seq, part.first, list(islice(of_prompts, len(part.predictors)))) for part in self.parts]
        of_tokens = [logprobs.get(row) for row in self.batch.sampled_rows] if logprobs else None
        return engine.Sampled(tokens, of_tokens, prompts)


def top_logprobs(logits: Tensor, chosen: Tensor, k: int,
                 at_once: int = LOGPROBS_AT_ONCE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities of the chosen tokens and of the k likeliest: logits [R, vocab_size], chosen [R].

    The logits are the model's, unedited, as in vLLM's default (logprobs_mode="raw_logprobs"). If k is -1 or larger than
    the vocabulary, all tokens are returned.

    Returns the chosen token's log probability [R] and its rank [R], the number of tokens that are at least as likely;
    then the likeliest tokens [R, k] and their log probabilities [R, k]. Among equals the lower id comes first.
    """
    vocab_size = logits.shape[1]
    k = min(k, vocab_size) if k >= 0 else vocab_size
    num_rows = max(1, at_once // vocab_size)  # R may be the tokens of a prompt: a few rows at a time
    parts = []
    for some_logits, tokens in zip(logits.split(num_rows), chosen.long()[:, None].split(num_rows)):
        logprobs = some_logits.float().log_softmax(-1)
        of_chosen = logprobs.gather(1, tokens)
        ids = best_tokens(logprobs, k)
        parts.append((of_chosen[:, 0], (logprobs >= of_chosen).sum(-1), ids, logprobs.gather(1, ids)))
    chosen_logprobs, ranks, best, best_logprobs = map(torch.cat, zip(*parts))
    return chosen_logprobs, ranks, best, best_logprobs


def best_tokens(logprobs: Tensor, k: int) -> Tensor:
    """The k likeliest tokens of each row, [R, k]. Among equal numbers torch.topk picks any, and the pick may depend on
    the batch. The keys are therefore unique: the float's bits, as an integer of the same order, followed by the id."""
    bits = logprobs.view(torch.int32)
    order = (bits ^ ((bits >> 31) & (2**31 - 1))).long()
    keys = order * 2**32 - torch.arange(logprobs.shape[1], device=logprobs.device)
    return -keys.topk(k).values % 2**32


def as_lists(tensors: list[Tensor], counts: list[int]) -> list[tuple]:
    """(own, rank, ids of the best tokens, theirs) for each row, with the i-th row's counts[i] best tokens (-1: all).
    Rows of one count are converted together. No row is converted further than it wants, because beside one that wants
    the whole vocabulary that would take a hundred times longer."""
    found: list[tuple] = [()] * len(counts)
    for count in set(counts):
        rows = [row for row, wanted in enumerate(counts) if wanted == count]
        lists = [tensor[rows, :count if count >= 0 else None] for tensor in tensors[2:]]
        for row, *values in zip(rows, *(tensor.tolist() for tensor in (tensors[0][rows], tensors[1][rows], *lists))):
            found[row] = tuple(values)
    return found
