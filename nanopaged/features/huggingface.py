"""Tokenizers that tiktoken cannot express, on the optional package `tokenizers`.

These are the SentencePiece-like tokenizers of Llama 2 and Mistral, Unigram and WordPiece. Their decoders work on whole
texts, so streaming needs a detokenizer of its own.
"""
import re
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from nanopaged.text.byte_level import ADDED_TOKEN, Detokenizer, Tokenizer, check_text, rust_errors


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json at `path`. Raises ImportError if the package `tokenizers` is missing."""

    def __init__(self, path: Path, spec: dict[str, Any], config: dict[str, Any]):
        import tokenizers

        self._read_tokens(spec, config)
        # A merge without the prefix ends the process: the package cuts the prefix off without looking.
        prefix = spec["model"].get("continuing_subword_prefix") or ""
        for pair in spec["model"].get("merges", []) if prefix else []:
            second = pair.rpartition(" ")[2] if isinstance(pair, str) else pair[-1]
            if not second.startswith(prefix):
                raise ValueError(f"the merge {pair!r:.80} lacks the continuing_subword_prefix {prefix!r:.80}")
        with rust_errors("the package tokenizers cannot read it"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self._tokenizer.add_tokens([
            tokenizers.AddedToken(token["content"], **{flag: token[flag] for flag in ADDED_TOKEN})
            for token in spec["added_tokens"] if token["content"] not in known])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        with rust_errors("the package tokenizers cannot encode this text"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        with rust_errors("the package tokenizers cannot decode these ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self) -> list[bytes]:
        tokens = [b""] * self.vocab_size
        for name, token in self.tokens.items():  # SentencePiece writes a space as U+2581, and a byte as <0x0A>
            tokens[token] = _byte_of(name) or name.replace("\u2581", " ").encode()
        return tokens

    def special_token_ids(self) -> set[int]:
        return {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}

    def detokenizer(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        skipped = self.special_token_ids() if skip_special_tokens else set()
        return _PrefixDetokenizer(self.decode, self._tokenizer.id_to_token, skipped, prompt_token_ids)


class _PrefixDetokenizer(Detokenizer):
    """A Detokenizer for decoders whose text depends on earlier ids: it decodes new ids behind a prefix of old ones.

    Llama 2's decoder, for example, strips the space at the beginning of a text. So the first generated ids are decoded
    behind the last ids of the prompt, and later ids behind the ids shown last.
    """

    def __init__(self, decode: Callable[[list[int]], str], id_to_token: Callable[[int], str | None],
                 skipped: set[int], prompt_token_ids: Sequence[int]):
        self._decode, self._id_to_token, self._skipped = decode, id_to_token, skipped
        self._prefix: list[int] = []
        self._pending: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._is_visible(token_id):
                self._prefix.insert(0, token_id)
                # Three ids may be the beginning of a character, and a run of byte tokens decodes only as a whole.
                if len(self._prefix) > 3 and not self._is_byte(token_id):
                    break

    def add(self, ids: Iterable[int]) -> str:
        self._pending += filter(self._is_visible, ids)
        # A byte token may change the text of the bytes before it, so a run of byte tokens waits for its end.
        if self._pending and self._is_byte(self._pending[-1]) or self._decode(self._pending).endswith("\ufffd"):
            return ""
        return self.finish()

    def finish(self) -> str:
        pending, self._pending = self._pending, []
        shown, text = self._decode(self._prefix), self._decode(self._prefix + pending)
        # The prefix must have some text: otherwise a decoder that strips a leading space strips it from the next ids.
        self._prefix = pending if self._decode(pending) else self._prefix + pending
        return text[len(commonprefix([shown, text])):]  # not len(shown): the prompt may end inside a character

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._id_to_token(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        return _byte_of(self._id_to_token(token_id) or "") is not None


def _byte_of(token: str) -> bytes | None:
    """The byte of a token such as <0x0A>."""
    match = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return match and bytes.fromhex(match[1])
