"""The tokenizer that `LLM.get_tokenizer` gives to scripts, with methods of a tokenizer of `transformers` 5.

`encode`, `decode`, `apply_chat_template` and the special tokens need the checkpoint's files only. What goes beyond
them, such as a call that pads, is handed to transformers' own tokenizer of the checkpoint.
"""
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from nanopaged.inputs import as_python
from nanopaged.text.byte_level import Tokenizer
from nanopaged.text.chat import NO_CHAT_TEMPLATE, load_chat_template
from nanopaged.text.tokenizer import read_tokenizer_config, special_tokens

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
PADDING = {"padding", "truncation", "max_length", "return_tensors"}  # options of transformers


def _token_id(name: str) -> Any:
    """The id of the special token in the attribute `name`. Setting the id sets the token."""
    return property(lambda tokenizer: tokenizer.get_vocab().get(getattr(tokenizer, name)),
                    lambda tokenizer, token_id: setattr(tokenizer, name, tokenizer._token(token_id)))


class ScriptTokenizer:
    """The tokenizer of a checkpoint, for scripts, which may set the special tokens and chat_template.

    path: the checkpoint's directory, for its chat template and the names of its special tokens
    """
    bos_token_id, eos_token_id, unk_token_id, pad_token_id = map(_token_id, SPECIAL_TOKENS)

    def __init__(self, tokenizer: Tokenizer, path: Path):
        self.tokenizer, self._path = tokenizer, path
        special = special_tokens(read_tokenizer_config(path))
        self.bos_token = self._token(tokenizer.bos_token_id)  # GPT-2's has a default
        self.eos_token = self._token(tokenizer.eos_token_id)
        self.unk_token, self.pad_token = special.get("unk_token"), special.get("pad_token")

    def _token(self, token_id: int | None) -> str | None:
        return next((token for token, i in self.get_vocab().items() if i == token_id), None)

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.tokens

    def __len__(self) -> int:
        return len(self.get_vocab())

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of a token, or of each in a list; that of unk_token, or None, for text that is no token."""
        if isinstance(tokens, str):
            return self.get_vocab().get(tokens, self.unk_token_id)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        """The ids of a text."""
        if options or not isinstance(text, str):
            return self._beyond().encode(text, add_special_tokens=add_special_tokens, **options)
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> Any:
        """The text of ids, also of a single one, of an array or a tensor; of several rows of ids a text each."""
        ids = as_python(ids)
        ids = [as_python(token_id) for token_id in ids] if isinstance(ids, Iterable) else [ids]
        if ids and isinstance(ids[0], (list, tuple)):
            return [self.tokenizer.decode(row, skip_special_tokens) for row in ids]
        return self.tokenizer.decode(ids, skip_special_tokens)

    @cached_property
    def chat_template(self) -> Any:
        """The checkpoint's chat template in Jinja, or a dict of several by name; None without one."""
        template = load_chat_template(self._path)
        templates = template.templates if template else {"default": None}
        return templates if len(templates) > 1 else next(iter(templates.values()))

    def apply_chat_template(self, conversation: list, tools: list[dict] | None = None, *,
                            chat_template: str | None = None, add_generation_prompt: bool = False,
                            continue_final_message: bool = False, tokenize: bool = True, return_dict: bool = True,
                            **variables: Any) -> Any:
        """The prompt for a conversation, or for each in a list of them, as {"input_ids": .., "attention_mask": ..},
        with return_dict=False as ids, with tokenize=False as text.

        variables: further variables of the template (enable_thinking), and the options in PADDING
        """
        options = {name: variables.pop(name) for name in PADDING & variables.keys()}
        source = self.chat_template if chat_template is None else chat_template
        if source is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        template: Any = load_chat_template(self._path, source)
        is_batch = bool(conversation) and isinstance(conversation[0], (list, tuple))
        texts = [template.render(messages, tools, add_generation_prompt, continue_final_message, variables)
                 for messages in (conversation if is_batch else [conversation])]
        given = texts if is_batch else texts[0]
        if not tokenize:
            return given
        if options:
            encoding = self(given, add_special_tokens=False, **options)
        else:
            rows = [self.encode(text, add_special_tokens=False) for text in texts]
            encoding = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
            encoding = encoding if is_batch else {name: values[0] for name, values in encoding.items()}
        return encoding if return_dict else encoding["input_ids"]

    # ---- what is transformers'

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._beyond()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        """What is not here is that of the engine's tokenizer (`detokenizer`), else that of transformers'."""
        if name == "tokenizer" or name.startswith("_"):  # while this object is copied, and what Python looks up
            raise AttributeError(name)
        try:
            return getattr(self.tokenizer if hasattr(self.tokenizer, name) else self._beyond(), name)
        except ValueError as error:
            raise AttributeError(f"{name}: {error}") from None

    def _beyond(self) -> Any:
        """transformers' tokenizer of the checkpoint, with what the script has set (pad_token, padding_side)."""
        theirs = self._transformers
        for name, value in vars(self).items():
            if name not in ("tokenizer", "_path", "_transformers") and value is not None:
                setattr(theirs, name, value)
        return theirs

    @cached_property
    def _transformers(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ValueError("what a tokenizer does beyond encode, decode and apply_chat_template needs the package "
                             "transformers: pip install transformers") from None
        return AutoTokenizer.from_pretrained(self._path)
