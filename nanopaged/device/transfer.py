"""Between the host and the device: `send` takes integers over, and a `LaunchedStep` brings a step's tokens back."""
from array import array
from contextlib import nullcontext
from functools import wraps
from itertools import chain
from typing import Any, Callable, ContextManager, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.device.step_input import StepInput


def on_its_device(method: Callable) -> Callable:
    """Triton launches on the current device, and each thread has its own. Any thread may call an engine, and a thread
    may call engines on several devices, so the current device is set for each call."""
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with as_current(self.device):
            return method(self, *args, **kwargs)
    return call


def as_current(device: torch.device) -> ContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def integers(lists: list[list[int]]) -> Tensor:
    """Lists of integers, one after another, as one int32 tensor on the host."""
    return torch.frombuffer(array("i", chain.from_iterable(lists)), dtype=torch.int32)


def send(device: torch.device, lists: list[list[int]]) -> list[Tensor]:
    """Lists of integers as int32 tensors on the device, in one transfer that the host does not wait for."""
    return list(to_device(device, integers(lists)).split([*map(len, lists)]))


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on the device. The host does not wait for a copy from pinned memory. For a copy from ordinary
    memory it would wait until the step under way ends."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class ForwardPass(NamedTuple):
    """A forward pass that is launched."""
    draw: Callable[[], Tensor]  # launches sampling; returns a token for each place that samples
    logits: Tensor  # [R, vocab_size]: a logit row for each place that samples, then one for each of more_tokens


class LaunchedStep:
    """A launched step. Calling it waits for the step's tokens and returns a Sampled; `is_done` says whether the call
    would return at once. Steps are called in the order of their launches.

    `Runner.launch` calls `start`, and `start` calls `sample`, which launches sampling and the copy of the tokens to the
    host. A late step needs the tokens of the step before, which the host has not read then. The next launch samples
    it, or `is_done` or the call does:  launch 1 | sample 1, launch 2 | read 1 | sample 2, launch 3 | read 2

    places, seqs: places in the batch whose sequences sample, and these sequences
    more_tokens: tokens of the flat batch whose logits are wanted, too
    needs: the sampling features that seqs use
    """

    def __init__(self, runner: Any, step: engine.SchedulerOutput, batch: StepInput):
        self.runner, self.sampled, self.device, samples = runner, step.sampled, runner.device, set(step.sampled)
        self.places = [place for place, seq in enumerate(batch.seqs) if seq in samples]
        self.seqs = [batch.seqs[place] for place in self.places]
        self.logprobs: Any = None
        if any([seq.sampling.wants_logprobs for seq in batch.seqs]):
            from nanopaged.features.logprobs import StepLogprobs
            self.logprobs = StepLogprobs(batch, self.seqs)
        self.more_tokens: list[int] = self.logprobs.more_tokens if self.logprobs else []
        self.needs = SamplingNeeds.of(self.seqs, [batch.seq_lens[place] for place in self.places],
                                      runner.logits_steps.values(), bool(self.logprobs))
        self.forward_pass: ForwardPass | None = None  # launched and not sampled
        self.on_host: list[Tensor] = []
        self.done: torch.cuda.Event | None = None

    def start(self, forward_pass: ForwardPass) -> None:
        """The forward pass is launched."""
        self.forward_pass = forward_pass
        if self.needs.is_late:
            self.runner.unsampled.add(self)
        else:
            self.sample()

    @on_its_device
    @torch.inference_mode()
    def sample(self) -> None:
        """Launch sampling, and the copy of the tokens to the host, with log probabilities if they are wanted. Nothing
        happens if that has been done."""
        if self.forward_pass is None:
            return
        logits, tokens = self.forward_pass.logits, self.forward_pass.draw()
        self.forward_pass = ForwardPass(lambda: tokens, logits)  # if a line below fails, a retry must not draw again
        tensors = [tokens]
        if self.logprobs:
            tensors += self.logprobs.tensors(self.runner.send, tokens, logits)
        self.on_host = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]  # from a GPU: pinned
        if self.device.type == "cuda":
            self.done = torch.cuda.Event()
            self.done.record(torch.cuda.current_stream(self.device))
        self.forward_pass = None  # frees the logits

    def is_done(self) -> bool:
        self.sample()
        return self.done is None or self.done.query()

    def __call__(self) -> engine.Sampled:
        self.sample()
        if self.done is not None:
            self.runner.wait(self.done)
        # The batch has another order than the scheduler. A sequence with drafts is in both several times.
        logit_rows: dict[engine.Sequence, list[int]] = {}
        for logit_row, seq in enumerate(self.seqs):
            logit_rows.setdefault(seq, []).append(logit_row)
        order = [logit_rows[seq].pop(0) for seq in self.sampled]
        tokens, *more = self.on_host
        ids = tokens[order].tolist()
        return self.logprobs.sampled(ids, more, order) if self.logprobs else engine.Sampled(ids)
