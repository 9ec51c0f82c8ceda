"""The results of a step, read without keeping the device waiting: its tokens, and log probabilities where they are
wanted."""
from itertools import islice
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.sampler import SamplingNeeds

MANY_LOGPROBS = 1024  # of one token: with more they stay in tensors


class PromptPart(NamedTuple):
    """Prompt tokens whose log probabilities a step computes."""
    seq: engine.Sequence
    first: int  # position of the first
    num_tokens: int
    start: int  # in the flat batch, of the token that predicts the first


def prompt_parts(batch: engine.StepInput) -> Iterator[PromptPart]:
    """For sequences that want log probabilities of their prompts: the token at each position predicts the next one."""
    for seq, num_tokens, index in zip(batch.seqs, batch.num_tokens, batch.query_start_loc):
        if seq.sampling.num_prompt_logprobs is not None:
            start = seq.num_computed_tokens - num_tokens
            count = min(seq.num_computed_tokens, seq.num_prompt_tokens - 1) - start
            if count > 0:
                yield PromptPart(seq, start + 1, count, index)


def logprob_tensors(send: Callable, seqs: list[engine.Sequence], parts: list[PromptPart], tokens: Tensor,
                    logits: Tensor, needs: SamplingNeeds) -> list[Tensor]:
    """What `top_logprobs` returns for the sampled tokens of the sequences that want it, and then for prompt parts. Most
    steps want neither. logits: those of the sampled tokens, then those of the parts."""
    wanting = [i for i, seq in enumerate(seqs) if seq.sampling.num_logprobs is not None]
    if not (wanting or parts):
        return []
    from nanopaged.device.logits import top_logprobs
    tensors: list[Tensor] = []
    if wanting:
        at = send([wanting])[0]
        chosen = tokens.index_select(0, at).clamp(min=0)
        tensors += top_logprobs(logits.index_select(0, at), chosen, needs.num_logprobs)
    if parts:
        ids = [token for part in parts for token in part.seq.token_ids[part.first:part.first + part.num_tokens]]
        wanted = [part.seq.sampling.num_prompt_logprobs for part in parts]
        tensors += top_logprobs(logits[len(seqs):], send([ids])[0], -1 if -1 in wanted else max(wanted))
    return tensors


def read_later(tensors: list[Tensor]) -> Callable[[], list[list]]:
    """A function that waits for the tensors and returns them as lists."""
    if tensors[0].device.type != "cuda":
        lists = [as_list(tensor) for tensor in tensors]
        return lambda: lists
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> list[list]:
        done.synchronize()
        return [as_list(copy) for copy in copies]

    return read


def as_list(tensor: Tensor) -> list:
    """As Python's numbers, row by row; very long rows stay tensors until their numbers are looked at."""
    return list(tensor.clone()) if tensor.dim() == 2 and tensor.shape[1] > MANY_LOGPROBS else tensor.tolist()


def read_sampled(read: Callable[[], list[list]], seqs: list[engine.Sequence], sampled: list[engine.Sequence],
                 parts: list[PromptPart]) -> engine.Sampled:
    """Wait for a step's tensors. seqs: the sequences that sampled, in the batch's order; sampled: in the scheduler's.
    Log probabilities are (own, rank, ids of the best tokens, theirs) for each token."""
    tokens, *lists = read()
    wanting = [seq for seq in seqs if seq.sampling.num_logprobs is not None]
    logprobs = {seq: only(seq.sampling.num_logprobs, *found) for seq, found in zip(wanting, zip(*lists[:4]))}
    of_prompts, prompts = zip(*lists[-4:]), []
    for part in parts:
        count = part.seq.sampling.num_prompt_logprobs
        prompts.append((part.seq, part.first, [only(count, *found) for found in islice(of_prompts, part.num_tokens)]))
    token_of = dict(zip(seqs, tokens))
    return engine.Sampled([token_of[seq] for seq in sampled],
                          [logprobs.get(seq) for seq in sampled] if wanting else None, prompts)


def only(count: int, own: float, rank: int, ids: Any, logprobs: Any) -> tuple:
    """A token's log probabilities with those of the `count` best only (-1: all): another sequence of the step may
    want more."""
    if 0 <= count < len(ids):
        ids, logprobs = ids[:count], logprobs[:count]
        if isinstance(ids, Tensor):  # as lists, because a slice would keep the whole tensor in memory
            ids, logprobs = ids.tolist(), logprobs.tolist()
    return own, rank, ids, logprobs
