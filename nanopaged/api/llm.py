"""LLM: what users call. It makes requests of prompts, computes steps until they are done, and gives texts back."""
import os
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Generator, Iterator

import torch

from nanopaged import engine
from nanopaged.api.core import Core
from nanopaged.api.request import Request
from nanopaged.inputs import as_list, as_python, check_choice, check_kind, wants_bar
from nanopaged.options import OPTIONS, check_options, default_feature, describe, feature
from nanopaged.outputs import RequestError, RequestOutput
from nanopaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanopaged.features.beam import BeamSearchParams


class LLM(Core):
    """A model and its engine. Names and defaults are vLLM's.

    The options stand in nanopaged/options.py, with what each is for; they are listed at the end of this text.

    vllm_options: other options of vLLM, ignored where they have no meaning here (options.VLLM_OPTIONS) or ask for
        nothing; one that asks for a missing feature raises ValueError
    scheduler.waiting, scheduler.running, scheduler.block_manager.num_free_blocks and .num_blocks tell what is under way

    limited_by: what sets max_model_len, the most tokens of a text: "option" (it was given), "model" or "pool"

    Threads may use all methods at the same time: one step is computed at a time, and serves all of them. A forked
    process may not. `with LLM(..) as llm` ends the worker processes and frees the memory at its end.

    Raises, with one sentence: ValueError for anything it cannot use, FileNotFoundError for what is not there, and
    another OSError, ConnectionError above all, for what the Hub does not give.
    """

    def __init__(self, model: str = "shakespeare", *, revision: str | None = None, dtype: str = "auto",
                 device: str = "auto", attention: str = "auto", quantization: str | None = None,
                 load_format: str = "auto", block_size: int | None = None, num_blocks: int | None = None,
                 gpu_memory_utilization: float = 0.9, max_model_len: int | None = None,
                 max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, enable_prefix_caching: bool = True,
                 kv_cache_dtype: str = "auto", swap_space: float = 0, generation_config: str = "auto",
                 scheduling_policy: str = "fcfs", enforce_eager: bool = False, warm_up: bool = False, seed: int = 0,
                 data_parallel_size: int = 1, tensor_parallel_size: int = 1, speculative_config: dict | None = None,
                 tokenizer: str | None = None, tokenizer_revision: str | None = None, skip_tokenizer_init: bool = False,
                 num_gpu_blocks_override: int | None = None, hf_overrides: dict | None = None,
                 hf_token: str | None = None, download_dir: str | None = None,
                 override_generation_config: dict | None = None, max_logprobs: int = 20,
                 disable_cascade_attn: bool | None = None, snapshot_memory: float = 0.1, **vllm_options: Any):
        check_options(given := locals(), vllm_options)
        super().__init__(SimpleNamespace(**{name: given[name] for name in OPTIONS}))
        self.script_tokenizer: Any = None
        self.chat_templates: dict = {}  # those that were used, by their source
        runner, devices = self.runner, " + ".join(str(one.device) for one in self.runners)
        blocks = " + ".join(str(one.scheduler.block_manager.num_blocks) for one in self.engines)
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
            self.abort(*self.requests)
            self.lock.is_closed = True
            self.engines.clear()  # the router has the same list
            self.runners.clear()  # features read this list without the lock
            self.shortages.clear()
            del self.engine, self.runner
            torch.cuda.empty_cache()  # if there is one; torch would keep it for later allocations of this process

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, for scripts: `encode`, `decode`, `apply_chat_template` and the special tokens, as
        in transformers (ScriptTokenizer in features/chat_template.py). ValueError if there is none that can be read."""
        if self.script_tokenizer is None:
            kind = feature("chat_template", "get_tokenizer").ScriptTokenizer
            self.script_tokenizer = kind(self.require_tokenizer(), self.tokenizer_path)
        return self.script_tokenizer

    # ---- requests, step by step

    def add_request(self, prompt: Any, params: SamplingParams | None = None, priority: int = 0) -> str:
        """Queue a prompt (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}) and return its request id.
        A dict may have a "cache_salt": only prompts with the same one share cached blocks.

        params: None: the checkpoint's defaults (get_default_sampling_params)
        priority: smaller is sooner, with scheduling_policy="priority"; otherwise only 0
        Raises ValueError if it can never run: empty, too long, or with ids that the model does not have, and
        EngineDeadError if a worker process has died.
        """
        request = self.read_request(prompt, params, priority)
        request.is_reported = True
        with self.lock:
            self._check_workers()
            self.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return an output for every request of `add_request` that got a token: in this step,
        or in steps that other calls computed meanwhile (`generate`, `stream`). Finished requests are gone
        afterwards."""
        num_steps = self.num_steps
        with self.run_until(lambda: bool(self.unreported) or self.num_steps > num_steps):
            outputs = [request.output() for request in self.unreported.values()]
            if not outputs:
                self._check_workers()
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
        self.lock.change(lambda: self.abort(request_id))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, after a change of the weights for example. False, and nothing done, while a request
        under way holds blocks, in the pool or on the host."""
        with self.lock:
            self._check_workers()
            books = self.scheduler.block_manager
            if books.num_free_blocks < books.num_blocks or any(
                    seq.status is engine.Status.SWAPPED for seq in self.scheduler.waiting):
                return False
            for manager in [one.scheduler.block_manager for one in self.engines]:
                for block in list(manager.key_of_block):
                    manager.evict(block)
            return True

    def _check_workers(self) -> None:
        """Raise EngineDeadError if a worker process has died. (A step does it, too.)"""
        if self.options.tensor_parallel_size > 1:
            self.runner.workers.check()

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
        count = len(prompts)
        settings: Any = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params] * count
        order = [0] * count if priority is None else as_python(priority)
        if len(settings) != count:
            raise ValueError(f"{count} prompts came with {len(settings)} sampling_params; give one, or one for each")
        if not isinstance(order, (list, tuple)) or len(order) != count:
            raise ValueError(f"{count} prompts came with the priority {order!r:.80}; give a list with one for each")
        return self._finish([self.read_request(*given) for given in zip(prompts, settings, order)], use_tqdm)

    def _finish(self, requests: list[Any], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests, each a Request or a BeamSearch, to the end. Ctrl-C comes in a step or after it, and a second
        one after the clean-up."""
        pending = list(requests)
        progress = wants_bar(use_tqdm) and default_feature("progress", "a progress bar, which is not drawn,")

        def is_done() -> bool:
            while pending and pending[-1].finished:
                pending.pop()
            return not pending

        with self.lock.interrupts, self._or_abort(requests):
            with self.lock:
                for request in requests:
                    self.add(request)
            if progress:
                progress.watch(self, requests, is_done)
            with self.run_until(is_done):
                pass
            return [request.output() for request in requests]

    @contextmanager
    def _or_abort(self, requests: list[Any]) -> Iterator[None]:
        """Abort the requests if this section ends with an error, by Ctrl-C, or because the garbage collector closes the
        generator that it is in. The collector may come at any point of the program, so nothing waits here."""
        try:
            yield
        except BaseException:
            self.lock.defer(lambda: self.abort(*(request.request_id for request in requests)))
            raise

    def chat(self, messages: Any, sampling_params: SamplingParams | list[SamplingParams] | None = None,
             use_tqdm: bool = True, lora_request: Any = None, **template: Any) -> list[RequestOutput]:
        """Answer a conversation, or a list of them: messages like {"role": "user", "content": "Hi"}.

        template: chat_template, chat_template_kwargs, tools, add_generation_prompt, continue_final_message,
            chat_template_content_format (see `chat_prompt`)
        """
        if not isinstance(messages, (list, tuple)):
            raise ValueError(f"a conversation is a list of messages, not {messages!r:.80}")
        several = messages and isinstance(messages[0], (list, tuple))
        prompts = [self.chat_prompt(conversation, **template) for conversation in (messages if several else [messages])]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def chat_prompt(self, messages: Any, *, chat_template: str | None = None,
                    chat_template_kwargs: dict | None = None,
                    tools: list[dict] | None = None, add_generation_prompt: bool = True,
                    continue_final_message: bool = False, chat_template_content_format: str = "auto") -> dict:
        """A conversation as a prompt, by the checkpoint's chat template or the one given. ValueError if it has none,
        or for messages that it does not take. features/chat_template.py tells from the template whether it reads
        content as a string or as a list of parts: chat_template_content_format is "auto"."""
        tokenizer = self.require_tokenizer()
        check_choice("chat_template_content_format", chat_template_content_format, ("auto",))
        check_kind("chat_template", chat_template, (str, NoneType), "a Jinja template")
        check_kind("chat_template_kwargs", chat_template_kwargs, (dict, NoneType), "a dict of the template's variables")
        templates = feature("chat_template", "a chat")
        if chat_template not in self.chat_templates:
            self.chat_templates[chat_template] = templates.load_chat_template(self.tokenizer_path, chat_template)
        template = self.chat_templates[chat_template]
        if template is None:
            raise ValueError(templates.NO_CHAT_TEMPLATE)
        text = template.render(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs,
                               is_request=True)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Generator[str, None, RequestOutput]:
        """Run one prompt and yield its text in pieces, as they come; other requests under way go on beside it. The
        generator's return value is the finished RequestOutput.

        Raises ValueError if the prompt can never run, or for n above 1; at the end RequestError, a RuntimeError, if its
        finish_reason is "error".
        """
        request = self.read_request(prompt, params)
        if (n := request.params.n) > 1:
            raise ValueError(f"stream yields one text, and n is {n}; use add_request and step for several")
        return self._pieces(request)

    def _pieces(self, request: Request) -> Generator[str, None, RequestOutput]:
        length = 0
        with self._or_abort([request]):
            with self.lock:
                self.add(request)
            while request.has_news or not request.finished:
                # A second Ctrl-C waits for the abort that the first one causes.
                with self.lock.interrupts, self._or_abort([request]), self.run_until(lambda: request.has_news):
                    text = request.read_text()
                if len(text) > length:
                    yield text[length:]
                length = len(text)
        with self.lock.interrupts:
            output = request.output()
        if output.outputs[0].finish_reason == "error":
            raise RequestError(output)
        return output

    def beam_search(self, prompts: Any, params: "BeamSearchParams", lora_request: Any = None, use_tqdm: bool = False,
                    concurrency_limit: int | None = None) -> list[RequestOutput]:
        """Beam search for prompts, together: for each the beam_width texts of the best scores, best first.
        nanopaged/features/beam.py says what a score is. Beams share the blocks of what they have in common.

        use_tqdm: as for generate
        concurrency_limit: taken for vLLM's sake, without effect
        """
        search = feature("beam", "beam search")
        _refuse_lora(lora_request)
        check_kind("params", params, search.BeamSearchParams, "BeamSearchParams")
        searches = [search.start(self, text, token_ids, replace(params))  # as in read_request
                    for text, token_ids in [self.read_prompt(prompt) for prompt in as_list(prompts)]]
        return self._finish(searches, use_tqdm)

    def encode(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's methods for pooling models: ValueError."""
        raise ValueError("encode, embed, classify, score and reward need a pooling model, and nanopaged cannot run one "
                         "yet; it has generate, chat and beam_search")

    embed = classify = score = reward = encode


LLM.__doc__ = f"{LLM.__doc__}\n    Options:\n{describe(as_flags=False)}"


def _refuse_lora(lora_request: Any) -> None:
    if lora_request is not None:
        raise ValueError("lora_request is given, and nanopaged has no LoRA; merge the adapter into the weights")
