"""The engine's core. LLM (llm.py) is its face for a caller, AsyncLLM (features/server/async_llm.py) for a server.

LLM has no thread of its own: a caller that waits for a result computes the steps, and these serve all requests
(lock.py). If a step fails, its sequences start over, and that caller gets the error. `generate` and `stream` then abort
their own requests; others are computed by the next caller. (A server has a thread, and ends all of its requests.)

    Core(options)    a checkpoint is read, and runners and engines are made of it (assemble.py)
    read_request     a prompt and its settings become a Request: checked, tokenised, a sequence for each sample
    add, abort       the scheduler gets its sequences, or loses them       } while the caller
    advance          one step; requests get what was read                } holds `lock`
    run_until        the one loop: steps until something is done, possibly by steps of other threads
"""
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanopaged import engine
from nanopaged.api.assemble import find_checkpoint, make_engines, make_runners
from nanopaged.api.lock import StepLock
from nanopaged.api.request import Counts, Request
from nanopaged.inputs import as_python, check_kind, check_number, read_cache_salt, read_prompt
from nanopaged.options import default_feature, feature
from nanopaged.sampling_params import SamplingParams, SequenceSampling, read_override, wrap_int64
from nanopaged.text.tokenizer import load_tokenizer
from nanopaged.weights.checkpoint import eos_token_ids, read_config, recommended_settings
from nanopaged.weights.families import read_model_config, untie

# What a request may ask for: features, and what asks for each. A feature has a subclass of Sequence, SEQUENCE, and a
# function start(core, params, sequences), which prepares the samples of a request.
REQUESTS: dict[str, Callable[["Core", SamplingParams], object]] = {
    "samples": lambda core, p: p.n > 1,
    "drafts": lambda core, p: core.drafting and core.drafting.suits(p),
    "grammar": lambda core, p: p.structured_outputs,
    "edits": lambda core, p: p.edits_logits or p.logits_processors,
    "logprobs": lambda core, p: p.logprobs is not None or p.prompt_logprobs is not None}


class Core:
    """Reads requests, adds and aborts them, and computes steps."""
    prompt_logprobs_values = 2**23  # log probabilities that a step computes at most for a prompt
    metrics_of: Callable[[list], Any] | None = None  # its sequences -> a request's RequestOutput.metrics

    def __init__(self, options: SimpleNamespace) -> None:
        """options: those of LLM, checked"""
        self.options, override = options, read_override(options.override_generation_config)
        self._read_checkpoint(options)
        is_default = options.generation_config != "vllm"
        self.default_params = (recommended_settings(self.path) if is_default else {}) | override
        self.drafting, self.num_more_rows = None, 0  # of logits in a step, besides one for each sequence
        if options.speculative_config is not None:
            feature("drafts", "speculative_config").start_engine(self, options)
        self.lock = StepLock()  # held while a step is computed, and by callers that change what the step looks at
        self.requests: dict[str, Any] = {}  # those under way: Request or BeamSearch
        self.unreported: dict[str, Request] = {}  # those that LLM.step is to tell of
        self.num_steps, self.counts = 0, Counts()
        self.shortages: dict[Any, Any] = {}  # engines that have run out of memory (features/recovery.py)
        self.arrivals, self.seeds = itertools.count(), random.Random(options.seed)
        self._make_engines(options)

    def _make_engines(self, options: SimpleNamespace) -> None:
        given, limit = options.max_model_len, self.config.max_position_embeddings
        if given is not None and given > limit:
            raise ValueError(f"max_model_len {given} is more than the {limit} positions that the model was made for")
        self.runners, pools = make_runners(options, self.config, self.path, self.num_more_rows)  # one for each pool
        self.runner = self.runners[0]
        self.engines, self.max_model_len = make_engines(options, self.runners, pools)
        self.limited_by = "option" if given else "model" if self.max_model_len == limit else "pool"
        # With several processes a step that stops half-way would leave the others waiting.
        if options.tensor_parallel_size == 1:
            for runner in self.runners:
                runner.interruptible = self.lock.interrupts.let_through
        self.engine: Any = self.engines[0]  # the step loop of all pools
        self.scheduler: Any = self.engine.scheduler  # of all pools
        self.scheduler_of: Callable[[engine.Sequence], Any] = lambda seq, one=self.scheduler: one  # of its pool
        if len(self.engines) > 1:
            router = feature("router", "data_parallel_size")
            self.engine = self.scheduler = router.Router(self.engines, partial(_recover, shortages=self.shortages),
                                                         self.lock.interrupts.let_through)
            self.scheduler_of = self.engine.of

    def _read_checkpoint(self, options: SimpleNamespace) -> None:
        """Find a checkpoint, and read all of it but the weights. A model that cannot be run is refused before these are
        downloaded."""
        def read(path: Path) -> Any:
            return read_model_config(read_config(path) | (options.hf_overrides or {}))

        find = partial(find_checkpoint, token=options.hf_token, cache=options.download_dir)
        is_dummy = options.load_format == "dummy"
        self.path = self.tokenizer_path = find(options.model, options.revision, read, is_dummy)
        self.config = read(self.path)
        if not is_dummy:
            untie(self.config, self.path)
        self.tokenizer, self.tokenizer_error = None, None  # none is wanted, or it cannot be read
        name, revision = options.tokenizer, options.tokenizer_revision
        if name not in (None, options.model) or revision is not None:
            is_directory = revision is None and os.path.isdir(name)  # which needs no config.json beside it
            self.tokenizer_path = Path(name) if is_directory else find(name or options.model, revision,
                                                                       without_weights=True)
        if not options.skip_tokenizer_init:
            try:
                self.tokenizer = load_tokenizer(self.tokenizer_path)
            except ValueError as error:  # prompts of token ids work all the same
                self.tokenizer_error = ValueError(str(error))  # the frames of `error` would keep this LLM in memory
        self.eos_token_ids = frozenset(eos_token_ids(self.path))
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            self.eos_token_ids |= {self.tokenizer.eos_token_id}  # some fine-tunes change it there alone

    # ---- without the lock

    def read_request(self, prompt: Any, params: SamplingParams | None, priority: int = 0) -> Request:
        """A request that is checked and tokenised, and not queued yet. ValueError if it can never run."""
        if params is None:
            params = self.get_default_sampling_params()
        check_kind("sampling_params", params, SamplingParams, "SamplingParams")
        params = replace(params)  # checked once more: it may have been changed, or be changed later
        is_ordered = self.options.scheduling_policy == "priority"
        check_number("priority", priority := as_python(priority), int, lambda x: is_ordered or x == 0,
                     "an integer" if is_ordered else "0, unless scheduling_policy is 'priority'")
        text, token_ids = self.read_prompt(prompt)
        params.check_vocabulary(self.config.vocab_size)
        params.check_logprobs(self.options.max_logprobs)
        if params.stop:
            self.require_tokenizer()  # without one there is no text to find them in
        sequences = self._make_sequences(token_ids, priority, params, read_cache_salt(prompt))
        return Request(text, sequences, self.scheduler, self.tokenizer, self.counts, self.metrics_of)

    def read_prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        return read_prompt(prompt, self.require_tokenizer, self.config.vocab_size, self.max_model_len)

    def _make_sequences(self, token_ids: list[int], priority: int, params: SamplingParams,
                        cache_salt: str | None) -> list[engine.Sequence]:
        """A sequence for each sample of a request."""
        arrival, seed = next(self.arrivals), self.seeds.getrandbits(63) if params.seed is None else params.seed
        ends = not params.ignore_eos or params.structured_outputs is not None
        stop = frozenset(params.stop_token_ids or ()) | (self.eos_token_ids if ends else frozenset())
        max_len = min(len(token_ids) + (params.max_tokens or self.max_model_len), self.max_model_len)
        features = [feature(name, f"a request that asks for {name}") for name, asks in REQUESTS.items()
                    if asks(self, params)]
        make, sequences = sequence_class(*(one.SEQUENCE for one in features)), []
        for j in range(params.n):
            sampling = SequenceSampling(params, wrap_int64(seed + j), params.logprobs,
                                        None if j else params.prompt_logprobs)
            sequences.append(make(list(token_ids), engine.Order(priority, arrival, j), max_len, stop, str(arrival),
                                  sampling, root=cache_salt or engine.ROOT))
        for one in features:
            one.start(self, params, sequences)
        return sequences

    def get_default_sampling_params(self, **given: Any) -> SamplingParams:
        """The settings of a request without any: those of the checkpoint's generation_config.json, unless the LLM was
        made with generation_config="vllm". `given` settings take precedence."""
        return SamplingParams.from_generation_config(self.default_params, **given)

    def require_tokenizer(self) -> Any:
        """The checkpoint's tokenizer. ValueError if there is none."""
        if self.tokenizer is None:
            raise self.tokenizer_error or ValueError("with skip_tokenizer_init there is no tokenizer; give prompts as "
                                                     "token ids")
        return self.tokenizer

    @contextmanager
    def run_until(self, is_done: Callable[[], bool]) -> Iterator[None]:
        """Compute steps until is_done(), which the steps of other threads may make true. Then the caller has the lock.
        Between two steps Ctrl-C is delivered, and threads that need no step have their turn."""
        while True:
            self.lock.acquire(is_done)
            try:
                while not is_done():
                    self.advance()
                    self.lock.interrupts.deliver()
                    if self.lock.is_wanted:
                        break
                else:
                    yield
                    return
            finally:
                self.lock.release()

    # ---- with the lock

    def add(self, request: Any) -> None:
        """Queue a Request or BeamSearch: its first sequence, from which the others fork."""
        self.requests[request.request_id] = request
        self.scheduler.add(request.sequences[0])

    def abort(self, *request_ids: str, reason: str = "abort", sentence: str | None = None) -> None:
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            self.unreported.pop(request_id, None)
            if request:
                for seq in [*request.sequences]:
                    if seq.status is not engine.Status.FINISHED:
                        self.scheduler.finish(seq, reason, sentence)
                    request.take(seq)
                self._check_if_idle()

    def advance(self) -> None:
        """Compute a step, and tell the requests what came of the steps that are done."""
        try:
            if not self.engine.step():  # paused beams hold all blocks
                for request in self.requests.values():
                    request.give_way()
            self.num_steps += 1
            if self.shortages:
                feature("recovery", "a shortage of memory").regrow(self.shortages)
        except BaseException as error:
            if self.engine is not self.engines[0]:  # the router has called `recover` for the engine that failed
                raise
            _recover(self.engine, error, self.shortages)
        finally:
            self._take_updates()

    def _take_updates(self) -> None:
        """Tell the requests what the engine has read: as a rule one step; with a lookahead none after the first launch;
        several after Ctrl-C or an error. A sequence that ends in the last of these is marked finished already, and
        `take` forgets it. So all log probabilities are told first."""
        updates = [*self.engine.updates]
        self.engine.updates.clear()
        for step, sampled, appended in updates:
            self.counts.num_preemptions += len(step.preempted)
            self.counts.most_blocks_held = max(self.counts.most_blocks_held, step.num_held_blocks)
            for seq, position, logprobs in sampled.prompt_logprobs:
                if seq.request_id in self.requests:
                    self.requests[seq.request_id].new_prompt_logprobs.update(enumerate(logprobs, position))
            for seq, i in appended if sampled.logprobs else ():
                if seq.request_id in self.requests:
                    self.requests[seq.request_id].hear(seq, sampled.tokens[i], sampled.logprobs[i])
        for seq, _ in [pair for _, _, appended in updates for pair in appended]:
            request = self.requests.get(seq.request_id)
            if request is None:
                continue
            request.take(seq)
            if request.finished:
                del self.requests[request.request_id]
            if request.is_reported:
                self.unreported[request.request_id] = request
        if updates:
            self._check_if_idle()

    def _check_if_idle(self) -> None:
        """With nothing under way the books must balance."""
        if self.engine.is_idle:
            self.scheduler.block_manager.check_idle()


def _recover(one: engine.Engine, error: BaseException, shortages: dict[Any, Any]) -> None:
    """Raise the error of an engine's step, unless a smaller one may succeed."""
    recovery = default_feature("recovery", "a failed step, which ends the call that computed it,")
    if recovery is None:
        raise error
    recovery.recover(one, error, shortages)


@cache
def sequence_class(*kinds: type[engine.Sequence]) -> type[engine.Sequence]:
    """Sequence itself for a plain request, or a class that does what all these subclasses do."""
    return type("Sequence", kinds, {}) if len(kinds) > 1 else kinds[0] if kinds else engine.Sequence
