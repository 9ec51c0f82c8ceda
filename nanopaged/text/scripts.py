"""The tokenizer that `LLM.get_tokenizer` gives to scripts, with the methods of a tokenizer of `transformers` 5.

The engine itself needs `encode`, `decode` and a detokenizer (nanopaged/text/byte_level.py). Scripts for Hugging Face
models also call the tokenizer, apply its chat template, and look up tokens by id and special tokens by name.
"""
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from nanopaged.inputs import as_python, check_choice
from nanopaged.text.byte_level import Tokenizer
from nanopaged.text.chat import NO_CHAT_TEMPLATE, load_chat_template, read_special_tokens


class Encoding(dict[str, Any]):
    """What a call of the tokenizer returns: input_ids and attention_mask, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the encoding has {', '.join(self)}, and no {name!r}")
        return self[name]

    def to(self, device: Any) -> "Encoding":
        return Encoding((name, tensor.to(device)) for name, tensor in self.items())


def _token_id(name: str) -> Any:
    """The id of the special token in the attribute `name`. Setting the id sets the token."""
    def get(tokenizer: "ScriptTokenizer") -> int | None:
        return tokenizer.get_vocab().get(getattr(tokenizer, name))

    def put(tokenizer: "ScriptTokenizer", token_id: int | None) -> None:
        setattr(tokenizer, name, None if token_id is None else tokenizer.convert_ids_to_tokens(token_id))

    return property(get, put)


class ScriptTokenizer:
    """The tokenizer of a checkpoint, for scripts. What is not here, `detokenizer` for example, is that of `tokenizer`.

    path: the checkpoint's directory, for its chat template and the names of its special tokens
    """
    bos_token_id, eos_token_id, unk_token_id, pad_token_id = map(
        _token_id, ("bos_token", "eos_token", "unk_token", "pad_token"))

    def __init__(self, tokenizer: Tokenizer, path: Path):
        self.tokenizer = tokenizer
        self._path = path
        special = read_special_tokens(path)
        self.bos_token: str | None = self._name(tokenizer.bos_token_id)  # GPT-2's has a default
        self.eos_token: str | None = self._name(tokenizer.eos_token_id)
        self.unk_token: str | None = special.get("unk_token")
        self.pad_token: str | None = special.get("pad_token")

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # while this object is copied
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.get_vocab())

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.tokens

    # ---- text to ids

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, padding: bool | str = False,
                 truncation: bool = False, max_length: int | None = None,
                 return_tensors: str | None = None) -> Encoding:
        """The ids of a text, or of each text in a list.

        padding: True or "longest" fills up to the longest text, "max_length" to max_length
        truncation: cut after max_length ids
        return_tensors: "pt" returns torch's tensors, also for a single text
        """
        check_choice("return_tensors", return_tensors, (None, "pt"))
        check_choice("padding", padding, (False, True, "longest", "max_length"))
        if max_length is None and (truncation or padding == "max_length"):
            raise ValueError("truncation and padding='max_length' need a length; give max_length, a number of tokens")
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
            raise ValueError(f"text must be a string or a list of strings, not {text!r:.80}")
        rows = [self.tokenizer.encode(text, add_special_tokens)[:max_length if truncation else None] for text in texts]
        masks = [[1] * len(row) for row in rows]
        if padding:
            length = max_length if padding == "max_length" else max(map(len, rows), default=0)
            rows, masks = self._pad(rows, length or 0), self._pad(masks, length or 0, 0)
        columns: dict[str, Any] = {"input_ids": rows, "attention_mask": masks}
        if return_tensors:
            if len(set(map(len, rows))) > 1:
                raise ValueError("the texts have different numbers of tokens, which no tensor has; give padding=True")
            import torch
            return Encoding((name, torch.tensor(values)) for name, values in columns.items())
        return Encoding(columns if texts is text else {name: values[0] for name, values in columns.items()})

    def _pad(self, rows: list[list[int]], length: int, filler: int | None = None) -> list[list[int]]:
        filler = self.pad_token_id if filler is None else filler
        if filler is None:
            raise ValueError("padding needs a token to fill with, and the tokenizer has no pad_token; set pad_token = "
                             "eos_token")
        return [row + [filler] * (length - len(row)) for row in rows]

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        """The ids of a text. options: of __call__"""
        if not options:
            return self.tokenizer.encode(text, add_special_tokens)
        return self(text, add_special_tokens, **options)["input_ids"]

    def apply_chat_template(self, conversation: list, tools: list[dict] | None = None, *,
                            chat_template: str | None = None, add_generation_prompt: bool = False,
                            continue_final_message: bool = False, tokenize: bool = True, return_dict: bool = True,
                            padding: bool | str = False, truncation: bool = False, max_length: int | None = None,
                            return_tensors: str | None = None, **variables: Any) -> Any:
        """The prompt for a conversation, or for each in a list of them: an Encoding, with return_dict=False its ids,
        with tokenize=False text. variables: further variables of the template (enable_thinking)"""
        source = self.chat_template if chat_template is None else chat_template
        template = None if source is None else load_chat_template(self._path, source)
        if template is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        is_batch = bool(conversation) and isinstance(conversation[0], (list, tuple))
        texts = [template.render(messages, tools, add_generation_prompt, continue_final_message, variables)
                 for messages in (conversation if is_batch else [conversation])]
        if not tokenize:
            return texts if is_batch else texts[0]
        encoding = self(texts if is_batch else texts[0], False, padding, truncation, max_length, return_tensors)
        return encoding if return_dict else encoding["input_ids"]

    @cached_property
    def chat_template(self) -> Any:
        """The checkpoint's chat template in Jinja, or a dict of several by name; None without one. May be set."""
        template = load_chat_template(self._path)
        if template is None:
            return None
        return template.templates if len(template.templates) > 1 else next(iter(template.templates.values()))

    # ---- ids to text

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> Any:
        """The text of ids, also of a single one, of an array or a tensor; of several rows of ids a text each."""
        ids = as_python(ids)
        if isinstance(ids, Iterable):
            ids = [as_python(token_id) for token_id in ids]
            if ids and isinstance(ids[0], (list, tuple)):
                return [self.tokenizer.decode(row, skip_special_tokens) for row in ids]
        return self.tokenizer.decode(ids if isinstance(ids, list) else [ids], skip_special_tokens)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False, **_: Any) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in as_python(rows)]

    # ---- tokens by id

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of a token, or of each in a list; that of unk_token, or None, for text that is no token."""
        if isinstance(tokens, str):
            return self.get_vocab().get(tokens, self.unk_token_id)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        ids = as_python(ids)
        if isinstance(ids, int):
            return self._name(ids)
        skipped = self.tokenizer.special_token_ids() if skip_special_tokens else set()
        return [self._name(token_id) for token_id in map(as_python, ids) if token_id not in skipped]

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self.get_vocab().items()}

    def _name(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._names.get(token_id)
