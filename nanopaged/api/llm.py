"""What users call: whole runs, conversations, streams, beams. All of it is made of what engine.py's LLM has: requests are
added, steps are computed until they are done, and whatever happens they are gone afterwards.
"""
from types import NoneType
from typing import Iterator

from nanopaged.api.beam import BeamGroup
from nanopaged.text.chat import NO_CHAT_TEMPLATE, load_chat_template
from nanopaged.inputs import as_list, as_python, check_choice, check_kind, read_prompt
from nanopaged.outputs import RequestOutput, beam_output
from nanopaged.sampling_params import BeamSearchParams, SamplingParams
from nanopaged.progress import ProgressBar


class Frontend:
    """The part of LLM that knows nothing about blocks."""

    def get_default_sampling_params(self, **given) -> SamplingParams:
        """The settings of a request without any: those of the checkpoint's generation_config.json, unless the LLM was
        made with generation_config="vllm". `given` settings go before them."""
        return SamplingParams.from_generation_config(self.default_params, **given)

    def get_tokenizer(self):
        """The checkpoint's tokenizer. ValueError if it has none that can be read."""
        if self.tokenizer is None:
            raise self.tokenizer_error or ValueError("with load_format='dummy' or skip_tokenizer_init there is no tokenizer; "
                                                     "give prompts as token ids")
        return self.tokenizer

    def generate(self, prompts, sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
                 priority: list[int] | None = None, use_tqdm: bool = True, lora_request=None) -> list[RequestOutput]:
        """Run prompts to the end, together; outputs in their order.

        prompts: one prompt or a list of them, each a text, a list of token ids, or a dict (see add_request)
        sampling_params: one for all, or one for each. ValueError, before anything runs, if a prompt can never run.
        priority: one for each prompt, with scheduling_policy="priority"
        use_tqdm: draw a progress bar on stderr, if that is a terminal
        """
        _refuse_lora(lora_request)
        prompts, priority = as_list(prompts), as_python(priority)
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(sampling_params)} sampling_params; give one, or one for each")
        if priority is not None and (not isinstance(priority, (list, tuple)) or len(priority) != len(prompts)):
            raise ValueError(f"{len(prompts)} prompts came with the priority {priority!r:.80}; give a list with one for each")
        requests = [self._read_request(*given) for given in zip(prompts, sampling_params, priority or [0] * len(prompts))]
        pending, bar = [], ProgressBar(len(prompts), use_tqdm)

        def is_done() -> bool:
            while pending and pending[-1].request_id not in self.requests:
                pending.pop()
            return not pending

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
            return [request.output() for request in requests]
        finally:  # an error, or Ctrl-C
            bar.clear()
            if pending:
                self.lock.change(lambda: [self._abort(request.request_id) for request in pending])

    def chat(self, messages, sampling_params: SamplingParams | list[SamplingParams] | None = None,
             use_tqdm: bool = True, lora_request=None, **template) -> list[RequestOutput]:
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

    def chat_prompt(self, messages: list[dict], *, chat_template: str | None = None, chat_template_kwargs: dict | None = None,
                    tools: list[dict] | None = None, add_generation_prompt: bool = True,
                    continue_final_message: bool = False, chat_template_content_format: str = "auto") -> dict:
        """A conversation as a prompt, by the checkpoint's chat template or the one given. ValueError if it has none, or for
        messages that it does not take. See nanopaged/text/chat.py, which tells from the template whether it reads content as
        a string or as a list of parts: chat_template_content_format is "auto"."""
        tokenizer = self.get_tokenizer()
        check_choice("chat_template_content_format", chat_template_content_format, ("auto",))
        check_kind("chat_template", chat_template, (str, NoneType), "a Jinja template")
        check_kind("chat_template_kwargs", chat_template_kwargs, (dict, NoneType), "a dict of the template's variables")
        if chat_template not in self.chat_templates:
            self.chat_templates[chat_template] = load_chat_template(self.tokenizer_path, chat_template)
        template = self.chat_templates[chat_template]
        if template is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        text = template.render(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Run one prompt and yield its text in pieces, as they come; other requests under way go on beside it.

        With the first piece: ValueError if it can never run, or for n above 1. At the end: RuntimeError if its finish_reason
        is "error".
        """
        if params is not None and getattr(params, "n", 1) > 1:
            raise ValueError(f"stream yields one text, and n is {params.n}; use add_request and step for several")
        request, length = self._read_request(prompt, params), 0
        try:
            with self.lock:
                self._add(request)
            while request.changed or not request.finished:
                with self._steps_until(lambda: bool(request.changed)):
                    text = request.read_text()
                if len(text) > length:
                    yield text[length:]
                length = len(text)
        finally:  # also when the garbage collector closes this generator, at any point of the program: so nothing may wait here
            self.lock.defer(lambda: self._abort(request.request_id))
        if request.sequences[0].finish_reason == "error":
            raise RuntimeError(request.sequences[0].stop_reason)

    def beam_search(self, prompts, params: BeamSearchParams, lora_request=None, use_tqdm: bool = False,
                    concurrency_limit: int | None = None) -> list[RequestOutput]:
        """Beam search for prompts, together: for each the beam_width texts of the best scores, best first. nanopaged/api/beam.py
        says what a score is. Beams share the blocks of what they have in common.

        use_tqdm: as for generate
        concurrency_limit: taken for vLLM's sake, without effect
        """
        _refuse_lora(lora_request)
        check_kind("params", params, BeamSearchParams, "BeamSearchParams")
        prompts = as_list(prompts)
        searches, bar = [], ProgressBar(len(prompts), use_tqdm)

        def can_branch(beams: list) -> bool:
            return bool(beams) and all(beam.candidates for beam in beams)

        try:
            for prompt in prompts:
                text, token_ids = read_prompt(prompt, self.get_tokenizer, self.config.vocab_size, self.max_model_len)
                group = BeamGroup(params, self.eos_token_ids, min(params.max_tokens, self.max_model_len - len(token_ids)))
                beams, spares = self._add_beams(token_ids, params.beam_width, group)
                searches.append((text, token_ids, group, beams, spares))
            while not all(group.done for _, _, group, _, _ in searches):
                with self._steps_until(lambda: any(can_branch(beams) for *_, beams, _ in searches)):
                    for _, _, group, beams, spares in searches:
                        if can_branch(beams):
                            beams[:] = self.scheduler.branch(beams, spares, group.extend([beam.candidates for beam in beams]))
                if bar.due:
                    groups = [group for _, _, group, _, _ in searches]
                    bar.update(sum(group.done for group in groups), sum(group.num_new_tokens for group in groups))
        finally:
            bar.clear()
            with self.lock:
                for beam in [beam for *_, beams, _ in searches for beam in beams]:
                    self.scheduler.retire(beam)
                self._check_if_idle()
        return [beam_output(text, token_ids, group, self.tokenizer) for text, token_ids, group, _, _ in searches]

    def encode(self, *args, **kwargs):
        """vLLM's methods for pooling models: ValueError."""
        raise ValueError("encode, embed, classify, score and reward need a pooling model, and nanopaged cannot run one "
                         "yet; it has generate, chat and beam_search")

    embed = classify = score = reward = encode


def _refuse_lora(lora_request) -> None:
    if lora_request is not None:
        raise ValueError("lora_request is given, and nanopaged has no LoRA; merge the adapter into the weights")
