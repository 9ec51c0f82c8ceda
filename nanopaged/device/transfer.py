"""Between the host and the device: `send` takes integers over, and a `LaunchedStep` brings a step's tokens back."""
from array import array
from contextlib import nullcontext
from functools import cache, wraps
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
    """A step from its launch until its tokens are on the host. Calling it waits for the tokens and returns a Sampled;
    `is_done` says whether the call would return at once. Steps are called in the order of their launches.

    batch, needs: the step, and what its sampling needs
    more_tokens: tokens of the flat batch whose logits are wanted besides those of the places that sample
    """
    done: torch.cuda.Event | None = None

    def __init__(self, runner: Any):
        self.runner, self.device = runner, runner.device

    def plan(self, batch: StepInput) -> None:
        """Before the forward pass is launched."""
        self.batch, self.more_tokens = batch, list[int]()
        seqs, lens = ([numbers[place] for place in batch.sampling_places] for numbers in (batch.seqs, batch.seq_lens))
        self.needs = SamplingNeeds.of(seqs, lens, self.runner.logits_steps.values())

    def start(self, forward_pass: ForwardPass) -> None:
        """The forward pass is launched: launch sampling, and the copy of the tokens to the host."""
        self.copy(forward_pass.draw(), forward_pass.logits)

    def copy(self, tokens: Tensor, logits: Tensor) -> None:
        self.on_host = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in self.results(tokens, logits)]
        if self.device.type == "cuda":  # the copies are in pinned memory, so the host goes on before they are complete
            self.done = torch.cuda.Event()
            self.done.record(torch.cuda.current_stream(self.device))

    def results(self, tokens: Tensor, logits: Tensor) -> list[Tensor]:
        """What is copied to the host."""
        return [tokens]

    def is_done(self) -> bool:
        return self.done is None or self.done.query()

    def __call__(self) -> engine.Sampled:
        if self.done is not None:
            self.runner.wait(self.done)
        return engine.Sampled(self.on_host[0][self.batch.sampled_rows].tolist())


@cache
def step_class(*kinds: type[LaunchedStep]) -> type[LaunchedStep]:
    """LaunchedStep itself, or a class that does what all these subclasses do: with log probabilities and a grammar
    `class LaunchedStep(LogprobsStep, LateStep)`."""
    return type("LaunchedStep", kinds, {}) if kinds else LaunchedStep
