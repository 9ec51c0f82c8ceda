"""LLM: what users call. It makes requests of prompts, computes steps until they are done, and gives texts back."""
import itertools
import os
import random
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Callable, Generator, Iterator

import torch

from nanopaged import engine, kernel, model
from nanopaged.api.beam import BeamGroup, BeamSearch, beam_output
from nanopaged.api.lock import StepLock
from nanopaged.api.request import Request
from nanopaged.device.choices import pick_devices, pick_kernels
from nanopaged.device.runner import Runner
from nanopaged.inputs import (
    as_list,
    as_python,
    check_choice,
    check_kind,
    check_number,
    check_options,
    read_cache_salt,
    read_prompt,
)
from nanopaged.outputs import RequestError, RequestOutput
from nanopaged.progress import ProgressBar
from nanopaged.sampling_params import (
    BeamSearchParams,
    SamplingParams,
    SequenceSampling,
    read_override,
    wrap_int64,
)
from nanopaged.scheduling import additions
from nanopaged.scheduling.recovery import Recovery
from nanopaged.scheduling.swapping import Swapping
from nanopaged.text.tokenizer import load_tokenizer
from nanopaged.weights.checkpoint import (
    eos_token_ids,
    find_on_disk,
    read_config,
    read_generation_config,
    read_tensors,
)
from nanopaged.weights.families import read_model_config, untie

PROMPT_LOGPROBS_CHUNK = 512  # most prompt tokens per step of a sequence with prompt_logprobs
PROMPT_LOGPROBS_VALUES = 2**23  # most log probabilities of such a step


class LLM:
    """A model and its engine. Names and defaults are vLLM's.

    model: "shakespeare" (bundled), a checkpoint directory in Hugging Face layout, or a name on the Hub, "org/name"
    revision: branch, tag or commit of a model on the Hub (default: main, or what the cache has of it)
    dtype: "auto" (the checkpoint's on CUDA, float16 for bfloat16 on cards before Ampere; float32 on a CPU), "float32",
        "float16" ("half") or "bfloat16"
    device: "auto", "cuda", "cuda:1", "cpu"; attention: "auto", "triton" (kernel.py's kernel) or "torch"
    load_format: "auto", or "dummy": random weights from config.json alone; a tokenizer is read where there is one
    block_size: token slots per block (default: 64 on CUDA, 16 on a CPU)
    num_blocks (or num_gpu_blocks_override): size of the pool (default: what fits in gpu_memory_utilization of the card;
        on a CPU 1 GiB or max_num_seqs full sequences, whichever is less)
    max_model_len: longest sequence, prompt included (default: the model's limit, or the pool's if that is less)
    max_num_seqs, max_num_batched_tokens: sequences, and tokens, that one step computes at most
    enable_prefix_caching: let sequences share the blocks of a common beginning
    kv_cache_dtype: "auto" (as dtype), or "fp8" ("fp8_e4m3"): a byte per number, so twice the tokens of 16 bits
    swap_space: GiB of host memory for the blocks of preempted sequences; 0: these are computed again
    generation_config: "auto": requests without settings follow the checkpoint's generation_config.json; "vllm": not
    max_logprobs: the most log probabilities of a token that a request may ask for; -1: any number. All
        tokens (logprobs=-1) are always possible
    override_generation_config: a dict of what goes before entries of that file, {"temperature": 0.6} for example
    hf_overrides: a dict of what replaces entries of config.json, {"sliding_window": 24} for example
    tokenizer, tokenizer_revision, skip_tokenizer_init: the directory or name of another tokenizer; its revision on the
        Hub; none at all
    hf_token, download_dir: the token for the Hub, and the cache for its files (default: those of Hugging Face's tools)
    scheduling_policy: "fcfs", or "priority": add_request's priority goes before arrival, smaller is sooner
    data_parallel_size: GPUs, each with the weights and a pool; num_blocks, max_num_seqs, max_num_batched_tokens and
        swap_space are per GPU (nanopaged/scheduling/data_parallel.py)
    tensor_parallel_size: GPUs that share one model: each has a part of the weights and of the pool
        (nanopaged/device/parallel.py)
    speculative_config: drafts, {"num_speculative_tokens": 5} for example; None: none (nanopaged/scheduling/drafts.py)
    enforce_eager: the plain path, one step after the other: no CUDA graphs, no compiled functions, no lookahead; in
        torch attention computes one sequence after the other
    seed: of the model's dummy weights and of the requests that bring none of their own
    vllm_options: other options of vLLM (inputs.VLLM_OPTIONS). An option without a meaning here is ignored; one that
        asks for a missing feature raises ValueError
    scheduler.waiting, scheduler.running, scheduler.block_manager.num_free_blocks and .num_blocks tell what is under way

    limited_by: what sets max_model_len, the most tokens of a text: "option" (it was given), "model" or "pool"

    Threads may use all methods at the same time: one step is computed at a time, and serves all of them. A forked
    process may not. `with LLM(..) as llm` ends the worker processes and frees the memory at its end.

    Raises, with one sentence: ValueError for anything it cannot use, FileNotFoundError for what is not there, and
    another OSError, ConnectionError above all, for what the Hub does not give.
    """

    def __init__(self, model: str = "shakespeare", *, revision: str | None = None, dtype: str = "auto",
                 device: str = "auto", attention: str = "auto", load_format: str = "auto",
                 block_size: int | None = None, num_blocks: int | None = None, gpu_memory_utilization: float = 0.9,
                 max_model_len: int | None = None,
                 max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, enable_prefix_caching: bool = True,
                 kv_cache_dtype: str = "auto", swap_space: float = 0, generation_config: str = "auto",
                 scheduling_policy: str = "fcfs", enforce_eager: bool = False, seed: int = 0,
                 data_parallel_size: int = 1, tensor_parallel_size: int = 1, speculative_config: dict | None = None,
                 tokenizer: str | None = None, tokenizer_revision: str | None = None, skip_tokenizer_init: bool = False,
                 num_gpu_blocks_override: int | None = None, hf_overrides: dict | None = None,
                 hf_token: str | None = None, download_dir: str | None = None,
                 override_generation_config: dict | None = None, max_logprobs: int = 20, **vllm_options: Any):
        check_options(locals(), vllm_options)
        override = read_override(override_generation_config)
        find = partial(find_checkpoint, token=hf_token, cache=download_dir)
        self._read_checkpoint(find, (model, revision), (tokenizer, tokenizer_revision), load_format == "dummy",
                              skip_tokenizer_init, hf_overrides or {})
        self.drafting = _make_drafting(speculative_config, self.config.vocab_size)
        limit = self.config.max_position_embeddings
        if max_model_len is not None and max_model_len > limit:
            raise ValueError(f"max_model_len {max_model_len} is more than the {limit} positions that the model was "
                             "made for")
        tensors = None if load_format == "dummy" else read_tensors(self.path)
        num_blocks = num_blocks if num_gpu_blocks_override is None else num_gpu_blocks_override
        self.tensor_parallel_size = tensor_parallel_size
        make: Callable[..., list[Runner]] = _make_runners
        if tensor_parallel_size > 1:
            pool = num_blocks, gpu_memory_utilization
            make = partial(_split_model, tensor_parallel_size, self.path, pool, swap_space)
        self.runners = make(
            device, data_parallel_size, attention, enforce_eager, self.config, tensors, dtype=dtype, seed=seed,
            block_size=block_size, max_model_len=max_model_len or limit, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype,
            max_num_drafts=self.drafting.most_in_step(max_num_seqs) if self.drafting else 0)
        pools = [runner.allocate_pool(num_blocks, gpu_memory_utilization) for runner in self.runners]
        window, self.max_model_len = self._pick_window(min(pools), self.runners[0].block_size, max_model_len)
        self.limited_by = "option" if max_model_len else "model" if self.max_model_len == limit else "pool"
        self.lock = StepLock()  # held while a step is computed, and by callers that change what the step looks at
        managers = [_make_block_manager(runner, size, enable_prefix_caching, window, swap_space)
                    for runner, size in zip(self.runners, pools)]
        self._make_engine(managers, max_num_seqs, max_num_batched_tokens)
        self.use_priority, self.max_logprobs = scheduling_policy == "priority", max_logprobs
        self.default_params = ({} if generation_config == "vllm" else read_generation_config(self.path)) | override
        self.requests: dict[str, Request] = {}  # those under way
        self.unreported: dict[str, Request] = {}  # those that `step` is to tell of
        self.grammars: Any = None  # a GrammarCompiler, from the first request with a grammar on
        self.chat_templates: dict = {}  # those that were used, by their source
        self.arrivals = itertools.count()
        self.seeds = random.Random(seed)
        runner = self.runner
        devices, blocks = (" + ".join(map(str, parts)) for parts in ([runner.device for runner in self.runners], pools))
        self.summary = (f"LLM({str(model)!r}: {str(runner.dtype).removeprefix('torch.')} on {devices}, {blocks} blocks "
                        f"of {runner.block_size} tokens, max_model_len {self.max_model_len}, max_num_seqs "
                        f"{max_num_seqs}, max_num_batched_tokens {max_num_batched_tokens})")

    def __repr__(self) -> str:
        return self.summary

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        """Abort what is under way, end the worker processes, and free the memory of the weights and the pool. Later
        calls raise RuntimeError."""
        if self.lock.process != os.getpid():  # a forked process leaves the block; the engine is its parent's
            return
        with self.lock:
            self._abort(*self.requests)
            self.lock.is_closed, is_cuda = True, self.runner.device.type == "cuda"
            del self.engine, self.recoveries, self.runner, self.runners
            if is_cuda:
                torch.cuda.empty_cache()  # torch would keep it for later allocations of this process

    def _read_checkpoint(self, find: Callable[..., Path], model: tuple, tokenizer: tuple, is_dummy: bool,
                         skip_tokenizer: bool, overrides: dict) -> None:
        """Find a checkpoint, and read all of it but the weights. A model that cannot be run is refused before these are
        downloaded. model, tokenizer: (name, revision)"""
        self.path = find(*model, lambda path: read_model_config(read_config(path) | overrides), is_dummy)
        self.config = read_model_config(read_config(self.path) | overrides)
        if not is_dummy:
            untie(self.config, self.path)
        self.tokenizer_path, self.tokenizer, self.tokenizer_error = self.path, None, None
        self.script_tokenizer: Any = None
        name, revision = tokenizer
        if name not in (None, model[0]) or revision is not None:
            is_directory = revision is None and os.path.isdir(name)  # which needs no config.json beside it
            self.tokenizer_path = Path(name) if is_directory else find(name or model[0], revision, without_weights=True)
        if not skip_tokenizer:
            try:
                self.tokenizer = load_tokenizer(self.tokenizer_path)
            except ValueError as error:  # prompts of token ids work all the same
                self.tokenizer_error = error.with_traceback(None)  # its frames would keep this LLM in memory
        self.eos_token_ids = frozenset(eos_token_ids(self.path))
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            self.eos_token_ids |= {self.tokenizer.eos_token_id}  # some fine-tunes change it there alone

    def _pick_window(self, num_blocks: int, block_size: int, max_model_len: int | None) -> tuple[int, int]:
        """The sliding window, or 0, and the most tokens of a text."""
        limit, size = self.config.max_position_embeddings, num_blocks * block_size
        # Blocks that leave the window are freed only if the pool holds more than a window and a block; else texts
        # must fit.
        window = self.config.window if self.config.window < size - block_size else 0
        if max_model_len is not None and size < max_model_len and not window:
            raise ValueError(f"max_model_len {max_model_len} needs {engine.cdiv(max_model_len, block_size)} blocks of "
                             f"{block_size} tokens, and the pool has {num_blocks}; lower it or give the pool more "
                             "memory")
        return window, max_model_len or (limit if window else min(limit, size))

    def _make_engine(self, managers: list[additions.BlockManager], *limits: int) -> None:
        """The scheduler and the step loop; with several GPUs, one of each for each of them."""
        schedulers: list[Any] = [additions.Scheduler(managers[0], *limits)]
        if len(managers) > 1:
            from nanopaged.scheduling import data_parallel
            # Schedulers refer to each other, and what they refer to lives until the garbage collector comes by.
            runners = [weakref.proxy(runner) for runner in self.runners]
            schedulers = data_parallel.make_schedulers(managers, runners, *limits)
        self.recoveries = [Recovery(*pair) for pair in zip(schedulers, self.runners)]
        # With several processes a step that stops half-way would leave the others waiting.
        if self.tensor_parallel_size == 1:
            for runner in self.runners:
                runner.interruptible = self.lock.interrupts.let_through
        engines = [additions.Engine(scheduler, runner, runner.lookahead, recovery.recover)
                   for scheduler, runner, recovery in zip(schedulers, self.runners, self.recoveries)]
        self.runner: Runner = self.runners[0]
        self.scheduler: Any = schedulers[0]
        self.engine: Any = engines[0]
        if len(managers) > 1:
            self.scheduler = data_parallel.Pools(schedulers)
            self.engine = data_parallel.Engines(engines, self.lock.interrupts.let_through)

    def get_default_sampling_params(self, **given: Any) -> SamplingParams:
        """The settings of a request without any: those of the checkpoint's generation_config.json, unless the LLM was
        made with generation_config="vllm". `given` settings go before them."""
        return SamplingParams.from_generation_config(self.default_params, **given)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, for scripts, with the calls of one of transformers (nanopaged/text/scripts.py).
        ValueError if the checkpoint has none that can be read."""
        if self.script_tokenizer is None:
            from nanopaged.text.scripts import ScriptTokenizer
            self.script_tokenizer = ScriptTokenizer(self._check_tokenizer(), self.tokenizer_path)
        return self.script_tokenizer

    def _check_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise self.tokenizer_error or ValueError("with skip_tokenizer_init there is no tokenizer; give prompts as "
                                                     "token ids")
        return self.tokenizer

    # ---- requests, step by step

    def add_request(self, prompt: Any, params: SamplingParams | None = None, priority: int = 0) -> str:
        """Queue a prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}) and return its request id.
        A dict may have a "cache_salt": only prompts with the same one share cached blocks.

        params: None: the checkpoint's defaults (get_default_sampling_params)
        priority: smaller is sooner, with scheduling_policy="priority"; otherwise only 0
        Raises ValueError if it can never run: empty, too long, or with ids that the model does not have.
        """
        request = self._read_request(prompt, params, priority)
        with self.lock:
            self._add(request, is_reported=True)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return an output for every request of `add_request` that got a token: in this step,
        or in steps that other calls computed meanwhile (`generate`, `stream`). Finished requests are gone
        afterwards."""
        with self.lock.turn(self._has_reports):
            if not self.unreported:
                self._step()
            outputs = [self._read(request, request.output) for request in self.unreported.values()]
            self.lock.interrupts.deliver()  # before they are taken: the next call returns them then
            self.unreported = {}
            return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        return bool(self.requests or self.unreported)

    def abort_request(self, request_id: str) -> None:
        """Stop a request; its blocks are free at once (from within a step, as by a logits processor: when the step is
        done). A finished or unknown id is ignored."""
        check_kind("request_id", request_id, str, "what add_request returned")
        self.lock.change(lambda: self._abort(request_id))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, after a change of the weights for example. False, and nothing done, while a request
        under way holds blocks, in the pool or on the host."""
        with self.lock:
            books = self.scheduler.block_manager
            if books.num_free_blocks < books.num_blocks or any(seq.host_table for seq in self.scheduler.waiting):
                return False
            for manager in getattr(books, "managers", [books]):
                manager.uncache(list(manager.key_of_block))
            return True

    def _has_reports(self) -> bool:
        return bool(self.unreported)

    def _read_request(self, prompt: Any, params: SamplingParams | None, priority: int = 0) -> Request:
        """A request that is checked and tokenised, and not queued yet."""
        if params is None:
            params = self.get_default_sampling_params()
        check_kind("sampling_params", params, SamplingParams, "SamplingParams")
        params = replace(params)  # checked once more: it may have been changed, or be changed later
        check_number("priority", priority := as_python(priority), int, lambda x: self.use_priority or x == 0,
                     "an integer" if self.use_priority else "0, unless scheduling_policy is 'priority'")
        text, token_ids = read_prompt(prompt, self._check_tokenizer, self.config.vocab_size, self.max_model_len)
        params.check_vocabulary(self.config.vocab_size)
        params.check_logprobs(self.max_logprobs)
        bad_words = []
        if params.bad_words:
            from nanopaged.device.logits import encode_bad_words
            bad_words = encode_bad_words(params.bad_words, self._check_tokenizer())
        if params.stop:
            self._check_tokenizer()  # without one there is no text to find them in
        structured = params.structured_outputs
        with self.lock.interrupts.held():  # llguidance calls the tokenizer, and would panic at a KeyboardInterrupt
            grammar = self._grammar_compiler().compile(structured) if structured else None
        ends = not params.ignore_eos or grammar is not None
        stop = frozenset(params.stop_token_ids or ()) | (self.eos_token_ids if ends else frozenset())
        return Request(text, token_ids, params, priority if self.use_priority else 0, stop, bad_words, self.tokenizer,
                       grammar, read_cache_salt(prompt))

    def _grammar_compiler(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("structured outputs need the checkpoint's tokenizer, and this engine has none")
        if self.grammars is None:
            from nanopaged.text.grammar import GrammarCompiler
            self.grammars = GrammarCompiler(self.tokenizer, self.eos_token_ids, self.config.vocab_size)
        return self.grammars

    def _add(self, request: Request, is_reported: bool = False) -> None:
        """Queue a request; the caller has the lock."""
        params, token_ids, arrival = request.params, request.prompt_token_ids, next(self.arrivals)
        seed = params.seed if params.seed is not None else self.seeds.getrandbits(63)
        max_len = min(len(token_ids) + (params.max_tokens or self.max_model_len), self.max_model_len)
        sequences = [
            additions.Sequence(list(token_ids), (request.priority, arrival, j), max_len, request.stop_token_ids,
                            str(arrival),
                            SequenceSampling(params, wrap_int64(seed + j), request.bad_words, params.logprobs,
                                             grammar=request.grammar and request.grammar.copy()),
                            may_look_ahead=not params.logits_processors, root=request.cache_salt or engine.ROOT,
                            drafter=self.drafting and self.drafting.drafter(params))
            for j in range(params.n)]
        if params.prompt_logprobs is not None:
            self._compute_whole_prompt(sequences[0], params.prompt_logprobs)
        request.start(str(arrival), sequences, is_reported)
        self.requests[request.request_id] = request
        if params.n > 1:
            from nanopaged.scheduling.samples import Samples
            samples = Samples(sequences)
            for seq in sequences:
                seq.samples = samples
        for seq in sequences:
            self.scheduler.add(seq)

    def _compute_whole_prompt(self, seq: additions.Sequence, count: int) -> None:
        """Log probabilities of prompt tokens come from logits, which a block of the prefix cache does not have, and
        take memory."""
        num_values = self.config.vocab_size if count < 0 else min(count, self.config.vocab_size)
        seq.sampling = seq.sampling._replace(num_prompt_logprobs=count)
        seq.reads_prefix_cache = False
        seq.max_chunk = min(PROMPT_LOGPROBS_CHUNK, max(1, PROMPT_LOGPROBS_VALUES // max(1, num_values)))

    def _abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            self.unreported.pop(request_id, None)
            if request:
                for seq in request.sequences:
                    if seq.status is not engine.Status.FINISHED:
                        self.scheduler.finish(seq, "abort")
                request.end()
                self._check_if_idle()

    def _check_if_idle(self) -> None:
        """With nothing under way the books must balance. (A beam search may stop when the engine is gone.)"""
        if not self.lock.is_closed and self.engine.is_idle:
            self.scheduler.block_manager.check_idle()

    def _step(self) -> None:
        """Compute a step, and tell the requests what came of the steps that are done; the caller has the lock."""
        try:
            self.engine.step()
            for recovery in self.recoveries:
                if recovery.is_reduced:
                    recovery.regrow()
        finally:
            while self.engine.updates:
                self._take(*self.engine.updates.popleft())

    def _take(self, seqs: list[additions.Sequence], sampled: engine.Sampled) -> None:
        for seq, position, logprobs in sampled.prompt_logprobs:
            if seq.request_id in self.requests:
                self.requests[seq.request_id].take_prompt_logprobs(position, logprobs)
        for seq in seqs:
            request = self.requests.get(seq.request_id)
            if request is None:
                continue
            if (end := request.take(seq)) is not None:
                self.scheduler.finish(seq, *end)
            if request.finished:
                del self.requests[request.request_id]
            if request.is_reported:
                self.unreported[request.request_id] = request
        self._check_if_idle()

    def _read(self, request: Request, read: Callable[[], Any]) -> Any:
        """What `read`, a method of the request, returns. A tokenizer that fails ends this request and no other; the
        caller holds Ctrl-C back."""
        try:
            return read()
        except BaseException as error:
            end = request.fail(error)
            for seq in request.sequences:
                self.scheduler.finish(seq, *end)
            request.end()
            if self.requests.pop(request.request_id, None):
                self._check_if_idle()  # only here: without the lock (`generate` reads finished requests) steps go on
            return read()

    @contextmanager
    def _steps_until(self, is_done: Callable[[], bool]) -> Iterator[None]:
        """Compute steps until is_done(); the steps of other threads may make it true. Then the caller has the lock."""
        with self.lock.turn(is_done):
            while not is_done():
                self._step()
                self.lock.pass_on(is_done)
            yield

    # ---- whole runs

    def generate(self, prompts: Any, sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
                 priority: list[int] | None = None, use_tqdm: bool = True,
                 lora_request: Any = None) -> list[RequestOutput]:
        """Run prompts to the end, together; outputs in their order.

        prompts: one prompt or a list of them, each a text, a list of token ids, or a dict (see add_request)
        sampling_params: one for all, or one for each. ValueError, before anything runs, if a prompt can never run.
        priority: one for each prompt, with scheduling_policy="priority"
        use_tqdm: draw a progress bar on stderr, if that is a terminal or a notebook's cell
        """
        _refuse_lora(lora_request)
        prompts = as_list(prompts)
        requests = [self._read_request(*given) for given in _one_for_each(prompts, sampling_params, priority)]
        pending: list[Request] = []
        bar = ProgressBar(len(prompts), use_tqdm)

        def is_done() -> bool:
            while pending and pending[-1].request_id not in self.requests:
                pending.pop()
            return not pending

        with self.lock.interrupts.held():  # Ctrl-C comes in a step or after it, and a second one after the clean-up
            try:
                with self.lock:
                    for request in requests:
                        self._add(request)
                        pending.append(request)
                while not is_done():
                    with self._steps_until(lambda: bar.due or is_done()):
                        if bar.due:
                            bar.update(sum(request.finished for request in requests),
                                       sum(request.num_new_tokens for request in requests))
                return [self._read(request, request.output) for request in requests]
            finally:  # an error, or Ctrl-C
                if pending:
                    self.lock.defer(lambda: self._abort(*(request.request_id for request in pending)))
                bar.clear()

    def chat(self, messages: Any, sampling_params: SamplingParams | list[SamplingParams] | None = None,
             use_tqdm: bool = True, lora_request: Any = None, **template: Any) -> list[RequestOutput]:
        """Answer a conversation, or a list of them: messages like {"role": "user", "content": "Hi"}.

        template: chat_template, chat_template_kwargs, tools, add_generation_prompt, continue_final_message,
            chat_template_content_format (see `chat_prompt`)
        """
        _refuse_lora(lora_request)
        if not isinstance(messages, (list, tuple)):
            raise ValueError(f"a conversation is a list of messages, not {messages!r:.80}")
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations = messages if several else [messages]
        prompts = [self.chat_prompt(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Any, *, chat_template: str | None = None,
                    chat_template_kwargs: dict | None = None,
                    tools: list[dict] | None = None, add_generation_prompt: bool = True,
                    continue_final_message: bool = False, chat_template_content_format: str = "auto") -> dict:
        """A conversation as a prompt, by the checkpoint's chat template or the one given. ValueError if it has none,
        or for messages that it does not take. nanopaged/text/chat.py tells from the template whether it reads content
        as a string or as a list of parts: chat_template_content_format is "auto"."""
        tokenizer = self._check_tokenizer()
        check_choice("chat_template_content_format", chat_template_content_format, ("auto",))
        check_kind("chat_template", chat_template, (str, NoneType), "a Jinja template")
        check_kind("chat_template_kwargs", chat_template_kwargs, (dict, NoneType), "a dict of the template's variables")
        from nanopaged.text.chat import NO_CHAT_TEMPLATE, load_chat_template
        if chat_template not in self.chat_templates:
            self.chat_templates[chat_template] = load_chat_template(self.tokenizer_path, chat_template)
        template = self.chat_templates[chat_template]
        if template is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        text = template.render(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Generator[str, None, RequestOutput]:
        """Run one prompt and yield its text in pieces, as they come; other requests under way go on beside it. The
        generator's return value is the finished RequestOutput.

        Raises ValueError if the prompt can never run, or for n above 1; at the end RequestError, a RuntimeError, if its
        finish_reason is "error".
        """
        if params is not None and getattr(params, "n", 1) > 1:
            raise ValueError(f"stream yields one text, and n is {params.n}; use add_request and step for several")
        return self._pieces(self._read_request(prompt, params))

    def _pieces(self, request: Request) -> Generator[str, None, RequestOutput]:
        length = 0
        try:
            with self.lock:
                self._add(request)
            while request.has_news or not request.finished:
                text = self._next_text(request)
                if len(text) > length:
                    yield text[length:]
                length = len(text)
        finally:  # The garbage collector may close this generator at any point of the program, so nothing waits here.
            self.lock.defer(lambda: self._abort(request.request_id))
        output = request.output()
        if output.outputs[0].finish_reason == "error":
            raise RequestError(output)
        return output

    def _next_text(self, request: Request) -> str:
        with self.lock.interrupts.held():  # a second Ctrl-C waits for the abort that the first one causes
            try:
                with self._steps_until(lambda: request.has_news):
                    return self._read(request, request.read_text)
            except BaseException:
                self.lock.defer(lambda: self._abort(request.request_id))
                raise

    def beam_search(self, prompts: Any, params: BeamSearchParams, lora_request: Any = None, use_tqdm: bool = False,
                    concurrency_limit: int | None = None) -> list[RequestOutput]:
        """Beam search for prompts, together: for each the beam_width texts of the best scores, best first.
        nanopaged/api/beam.py says what a score is. Beams share the blocks of what they have in common.

        use_tqdm: as for generate
        concurrency_limit: taken for vLLM's sake, without effect
        """
        _refuse_lora(lora_request)
        check_kind("params", params, BeamSearchParams, "BeamSearchParams")
        params = replace(params)  # as in _read_request
        prompts = [read_prompt(prompt, self._check_tokenizer, self.config.vocab_size, self.max_model_len)
                   for prompt in as_list(prompts)]
        searches: list[BeamSearch] = []
        bar = ProgressBar(len(prompts), use_tqdm)
        with self.lock.interrupts.held():  # as in `generate`
            try:
                for text, token_ids in prompts:
                    max_tokens = min(params.max_tokens, self.max_model_len - len(token_ids))
                    group = BeamGroup(params, self.eos_token_ids, max_tokens)
                    with self.lock:
                        searches.append(BeamSearch(text, token_ids, group, next(self.arrivals),
                                                   min(group.num_candidates, self.config.vocab_size), self.scheduler))
                while not all(search.group.done for search in searches):
                    with self._steps_until(lambda: any(search.can_branch for search in searches)):
                        for search in searches:
                            if search.can_branch:
                                self._branch(search)
                    if bar.due:
                        groups = [search.group for search in searches]
                        bar.update(sum(group.done for group in groups), sum(group.num_new_tokens for group in groups))
            finally:
                self.lock.defer(lambda: self._stop(searches))
                bar.clear()
        return [beam_output(search.prompt, search.prompt_token_ids, search.group, self.tokenizer)
                for search in searches]

    def _stop(self, searches: list[BeamSearch]) -> None:
        for search in searches:
            search.stop()
        self._check_if_idle()

    def _branch(self, search: BeamSearch) -> list[tuple]:
        return search.branch()

    def encode(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's methods for pooling models: ValueError."""
        raise ValueError("encode, embed, classify, score and reward need a pooling model, and nanopaged cannot run one "
                         "yet; it has generate, chat and beam_search")

    embed = classify = score = reward = encode


def find_checkpoint(model: str | Path, revision: str | None = None, check: Callable[[Path], object] | None = None,
                    without_weights: bool = False, token: str | None = None,
                    cache: str | Path | None = None) -> Path:
    """The directory of a checkpoint: a bundled name, a path, or a name on the Hub ("Qwen/Qwen3-0.6B").

    A name on the Hub is looked up in the cache of the Hugging Face tools, and otherwise downloaded into that cache, at
    `revision` (a branch, tag or commit). nanopaged/weights/hub.py describes the download, its errors, and the other
    arguments. `find_on_disk` describes the errors of other models.
    """
    path = find_on_disk(model, revision)
    if path is None:
        from nanopaged.weights.hub import download
        path = download(str(model), revision, check, without_weights, token, cache)
    return path


def _make_runners(device: str, count: int, attention: str, enforce_eager: bool, config: model.ModelConfig, tensors: Any,
                  **options: Any) -> list[Runner]:
    """The plain runner, or on CUDA the one with recorded steps. (Attention in torch asks the device for lengths, which
    cannot be recorded.) With a count above 1, one on each of the first GPUs, with the weights of the first runner."""
    runners: list[Runner] = []
    for picked in pick_devices(device, count):
        runner_class, kernels = _pick_runner(attention, picked, enforce_eager)
        weights = runners[0].model if runners else tensors
        runner = runner_class(config, weights, device=picked, kernels=kernels, **options)
        if not (enforce_eager or runner.fused):  # on a CPU
            from nanopaged.device.last_layer import skip_rows_without_logits
            skip_rows_without_logits(runner.model)
        runners.append(runner)
    return runners


def _split_model(size: int, path: Path, pool: tuple, swap_space: float, device: str, _: int, attention: str,
                 enforce_eager: bool, config: model.ModelConfig, tensors: Any, **options: Any) -> list[Runner]:
    """The runner of the first GPU, with a worker process for each other one. pool: the arguments of allocate_pool."""
    from nanopaged.device.workers import make_driver
    picked = pick_devices(device, size, "tensor_parallel_size")[0]
    runner, kernels = _pick_runner(attention, picked, enforce_eager)
    return [make_driver(runner, size, config, tensors, path, pool, swap_space, device=picked, kernels=kernels,
                        **options)]


def _pick_runner(attention: str, device: Any, enforce_eager: bool) -> tuple[type[Runner], kernel.Kernels]:
    kernels, runner = pick_kernels(attention, device), Runner
    if kernels is kernel.TORCH and not enforce_eager:
        from nanopaged.device.rectangles import KERNELS as kernels
    if device.type == "cuda" and not enforce_eager and kernels is kernel.TRITON:
        from nanopaged.device.graphs import GraphRunner as runner
    return runner, kernels


def _make_drafting(speculative_config: Any, vocab_size: int) -> Any:
    if speculative_config is None:
        return None
    from nanopaged.scheduling.drafts import Drafting
    return Drafting(speculative_config, vocab_size)


def _make_block_manager(runner: Runner, num_blocks: int, enable_prefix_caching: bool, window: int,
                        swap_space: float) -> additions.BlockManager:
    num_host_blocks = runner.allocate_host_pool(swap_space)
    if window or num_host_blocks:
        return Swapping(num_blocks, runner.block_size, enable_prefix_caching, window, num_host_blocks)
    return additions.BlockManager(num_blocks, runner.block_size, enable_prefix_caching)


def _one_for_each(prompts: list, settings: Any, priority: Any) -> Iterator[tuple]:
    """(prompt, sampling parameters, priority) for each prompt."""
    priority = as_python(priority)
    if not isinstance(settings, (list, tuple)):
        settings = [settings] * len(prompts)
    if len(settings) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(settings)} sampling_params; give one, or one for each")
    if priority is not None and (not isinstance(priority, (list, tuple)) or len(priority) != len(prompts)):
        raise ValueError(f"{len(prompts)} prompts came with the priority {priority!r:.80}; give a list with one for "
                         "each")
    return zip(prompts, settings, priority or [0] * len(prompts))


def _refuse_lora(lora_request: Any) -> None:
    if lora_request is not None:
        raise ValueError("lora_request is given, and nanopaged has no LoRA; merge the adapter into the weights")
