r"""Text to token ids and back: byte-level BPE on tiktoken, id for id what Hugging Face `tokenizers` gives.

Byte-level BPE, the tokenizer of GPT-2, OPT, Llama 3, SmolLM2 and Qwen, works in four steps:

    "Hi<|end|> there"   added tokens are cut out first      "Hi"  <|end|>  " there"
    text segments       are normalized (nothing, or NFC)    and cut into pieces by a regex
    a piece             is its UTF-8 bytes, one symbol each; the adjacent pair that comes first in the list of merges
                        becomes one symbol, again and again, until no pair is listed
    a symbol            is a token id

tiktoken does the second half fast, but by a rule of its own: it joins *any* adjacent pair whose bytes are a token,
lowest rank first, where Hugging Face joins *listed* pairs; and a piece that is a token it takes whole. `_tiktoken_ranks`
gives it ranks with which the two rules never differ. For the odd vocabulary that has none, and for bytes that are no
token, `_bpe` applies the list itself, slower. What is not byte-level BPE, or cut in another way (the SentencePiece-like
tokenizers of Llama 2 and Mistral, Unigram, WordPiece), is left to the optional package `tokenizers`. Nothing here knows
about models or touches the network.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from pathlib import Path
from types import NoneType

import regex
import tiktoken

from nanopaged.inputs import read_json

# GPT-2 writes each byte as one printable character: itself where it is printable, else one from U+0100 upwards.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)}
_CHAR_OF = {b: c for c, b in _BYTE_OF.items()}

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-2's split of what lies between digits: it sees each stretch alone, so a digit ends the text for `\s+(?!\S)`.
_DIGITS_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Unicode White_Space. Python's own \s and str.strip() take U+001C..1F too, which no tokenizer's regex does.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_MAX_TIKTOKEN_TEXT = 400_000         # characters: somewhere below a million spaces in a row tiktoken's regex panics
_NO_RANK = 1 << 32


class _NotByteLevel(Exception):
    """Why tiktoken cannot express a tokenizer.json, as the end of a sentence that starts "it has"."""


class _Unreadable(ValueError):
    """A whole sentence. Any other error, while a tokenizer is made, comes of a damaged file."""


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of the checkpoint directory `path`: its tokenizer.json, or GPT-2's pair vocab.json and merges.txt.

    Raises ValueError, in one sentence, where there is none, or a damaged one, or one that needs the package `tokenizers`
    and it is missing.
    """
    path = Path(path)
    try:
        return _load(path)
    except _Unreadable:
        raise
    except Exception as error:  # KeyError, TypeError; and the package `tokenizers` raises a plain Exception
        has_json = (path / "tokenizer.json").exists()
        files = "tokenizer_config.json or tokenizer.json" if has_json else "vocab.json or merges.txt"
        raise ValueError(f"{path} has a {files} that cannot be read ({type(error).__name__}: {error!s:.200}); fetch it again, "
                         "or pass prompts as token ids") from None


def _load(path: Path) -> "Tokenizer":
    config = _read_special_tokens(path / "special_tokens_map.json") | _read_special_tokens(path / "tokenizer_config.json")
    if (path / "tokenizer.json").exists():
        spec = _read_json(path / "tokenizer.json")
        known = {token["content"] for token in spec.get("added_tokens", [])}
        spec["added_tokens"] = spec.get("added_tokens", []) + [
            token for token in _tokens_of_config(config) if token["content"] not in known]
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
        spec = _spec_of_vocab_and_merges(path, config)
    else:
        sentencepiece = (path / "tokenizer.model").exists()
        found = "only a SentencePiece tokenizer.model, which is not read here" if sentencepiece else "none of them"
        raise _Unreadable(f"looked in {path} for tokenizer.json, or vocab.json and merges.txt, and found {found}; add a "
                          "tokenizer.json (save_pretrained of a fast tokenizer writes one) or pass prompts as token ids")
    try:
        return Tokenizer(spec, config)
    except _NotByteLevel as reason:
        return _HuggingFaceTokenizer(path / "tokenizer.json", str(reason), spec, config)


class Tokenizer:
    """Byte-level BPE. `vocab_size`: every id is below it, added tokens included; `bos_token_id`, `eos_token_id`: or None.

    `spec` is the content of a tokenizer.json, `config` that of tokenizer_config.json; use `load_tokenizer`.
    """

    def __init__(self, spec: dict, config: dict):
        self._read_tokens(spec, config)
        _check_byte_level(spec)
        self._nfc = bool(spec.get("normalizer"))
        self._split, self._add_prefix_space = _split_pattern(spec.get("pre_tokenizer"))
        self._before, self._after = _template_ids(spec.get("post_processor"))
        # Two passes: tokens marked normalized are looked for in the normalized text between the others.
        added = spec.get("added_tokens", [])
        self._added_passes = [_AddedTokens({t["content"]: t for t in added if not t["normalized"]}),
                              _AddedTokens({self._normalize(t["content"]): t for t in added if t["normalized"]})]
        self._token_bytes = {i: _bytes_of(token) for token, i in self._tokens.items()}
        self._token_bytes |= {t["id"]: _bytes_of(self._normalize(t["content"])) for t in added if t["normalized"]}
        special = {token["id"] for token in added if token["special"]}
        self._visible_bytes = {i: b"" if i in special else b for i, b in self._token_bytes.items()}
        self._prepare_bpe(spec["model"])

    def _read_tokens(self, spec: dict, config: dict):
        vocab = spec["model"]["vocab"]
        self._tokens: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        self._tokens |= {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
        self.vocab_size = max(self._tokens.values(), default=-1) + 1
        # GPT-2's files name neither token, nor their class: "<|endoftext|>" is the default of that class alone.
        default = "<|endoftext|>" if (config.get("tokenizer_class") or "GPT2Tokenizer") in _GPT2_CLASSES else None
        self.bos_token_id = self._tokens.get(config.get("bos_token", default))
        self.eos_token_id = self._tokens.get(config.get("eos_token", default))

    def _prepare_bpe(self, model: dict):
        self._vocab: dict[str, int] = model["vocab"]
        self._ignore_merges = bool(model.get("ignore_merges"))
        pairs = (tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
        self._merges = {pair: rank for rank, pair in enumerate(pairs)}       # a pair listed twice: the later one counts
        self._missing_bytes = {b for b, char in _CHAR_OF.items() if char not in self._vocab}
        if model.get("unk_token") is not None and not self._missing_bytes <= _NEVER_IN_UTF8:
            raise _NotByteLevel("an unknown token in place of missing bytes")
        self._encoding = None
        if ranks := _tiktoken_ranks(self._vocab, self._merges, self._ignore_merges):
            self._id_of_rank = {rank: self._vocab.get(token) for token, rank in ranks.items()}      # ids are in any order
            ranks = {_bytes_of(token): rank for token, rank in ranks.items()}
            try:
                self._encoding = tiktoken.Encoding("nanopaged", pat_str=self._split, mergeable_ranks=ranks, special_tokens={})
            except ValueError as error:
                raise _NotByteLevel("a split regex that it cannot parse") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, added tokens in it recognised; with the ones the model expects around it (Llama 3's BOS).

        Raises ValueError for a lone surrogate, which is half a character.
        """
        _check_text(text)
        ids = []
        for segment in self._added_passes[0].cut(text):
            if isinstance(segment, int):
                ids.append(segment)
                continue
            for part in self._added_passes[1].cut(self._normalize(segment)):
                ids += [part] if isinstance(part, int) else self._encode_ordinary(part)
        return self._before + ids + self._after if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Bytes that form no character become U+FFFD; ids that name no token become nothing."""
        token_bytes = self._visible_bytes if skip_special_tokens else self._token_bytes
        return b"".join(token_bytes.get(i, b"") for i in ids).decode("utf-8", "replace")

    def detokenizer(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> "Detokenizer":
        """A stream of ids to text, for one sequence: the text that the ids after this prompt add to it."""
        detokenizer = Detokenizer(self._visible_bytes if skip_special_tokens else self._token_bytes)
        # The prompt may end inside a character, at most three bytes into it. The stream then completes the character.
        detokenizer.add(prompt_token_ids[-3:])
        return detokenizer

    def _normalize(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._nfc else text

    def _encode_ordinary(self, text: str) -> list[int]:
        """Ids of a segment that holds no added token."""
        if self._add_prefix_space and not text.startswith(" "):
            text = " " + text
        if self._encoding and len(text) < _MAX_TIKTOKEN_TEXT and self._missing_bytes.isdisjoint(text.encode()):
            return self._ids(self._encoding.encode_ordinary(text))
        # tiktoken does not show its pieces. `regex` cuts alike, but for characters that only its newer Unicode tables know.
        pieces = regex.findall(self._split.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}"), text)
        known = {piece: self._encode_piece(piece) for piece in set(pieces)}
        return [i for piece in pieces for i in known[piece]]

    def _encode_piece(self, piece: str) -> list[int]:
        """Ids of one piece. Bytes that are no token (SmolLM2 lacks some) are left out, and their neighbours may merge."""
        if self._encoding and self._missing_bytes.isdisjoint(piece.encode()):
            return self._ids(self._encoding._encode_single_piece(piece))
        symbols = "".join(_CHAR_OF[b] for b in piece.encode())
        if self._ignore_merges and symbols in self._vocab:
            return [self._vocab[symbols]]
        symbols, _ = _bpe([char for char in symbols if char in self._vocab], self._merges)
        return [self._vocab[symbol] for symbol in symbols]

    def _ids(self, ranks: list[int]) -> list[int]:
        id_of_rank = self._id_of_rank
        return [id_of_rank[rank] for rank in ranks]


class Detokenizer:
    """Ids in, text out, in pieces that join to what `decode` gives after the prompt and never show half a character."""

    def __init__(self, token_bytes: dict[int, bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; bytes that may still become a character wait for the next call."""
        return self._decoder.decode(b"".join(self._token_bytes.get(i, b"") for i in ids))

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character."""
        return self._decoder.decode(b"", final=True)


def _bpe(symbols: list[str], merges: dict[tuple[str, str], int]) -> tuple[list[str], int]:
    """Byte pair encoding by the list (Sennrich et al. 2016): the symbols that are left, and the rank of the last merge."""
    ranks = [merges.get(pair, _NO_RANK) for pair in zip(symbols, symbols[1:])]
    last = _NO_RANK
    while ranks and (lowest := min(ranks)) < _NO_RANK:
        i, last = ranks.index(lowest), lowest
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]
        del ranks[i]
        for j in (i - 1, i):
            if 0 <= j < len(ranks):
                ranks[j] = merges.get((symbols[j], symbols[j + 1]), _NO_RANK)
    return symbols, last


def _tiktoken_ranks(vocab: dict[str, int], merges: dict[tuple[str, str], int], ignore_merges: bool) -> dict[str, int] | None:
    """Ranks with which tiktoken gives what the list of merges gives, for every text; None where there are none.

    Run both rules on a piece, up to the first step at which they differ. All merges so far are the list's, so those
    inside the bytes of any one token t are the first merges of `_bpe(t)` run alone. Say that c and d, adjacent here,
    join to t: `_bpe(t)` alone comes by [c, d] too, and either stops there, c and d being no listed pair, or ends in [t].
    So give ranks only to tokens with `_bpe(t)` = [t], the rank of that run's last merge. Then every adjacent pair that
    tiktoken would join is a listed one, with the same rank, and both rules choose the same pair, leftmost first.

    BPE training lists only pairs that its own run comes to, so it makes no other tokens. Lists made otherwise do.
    Such a token is found by neither rule, except that with `ignore_merges` (Llama 3) a whole piece may be one. tiktoken
    looks for the whole piece first too, so there it gets a rank, unless two symbols are left of it, which tiktoken would
    then join inside longer pieces: the one kind of vocabulary that has no ranks.
    """
    ranks = {char: b for b, char in _CHAR_OF.items()}
    for token in vocab:
        if len(token) < 2 or not all(char in _BYTE_OF and char in vocab for char in token):
            continue
        symbols, last = _bpe(list(token), merges)
        if len(symbols) == 1:
            ranks[token] = 256 + last
        elif ignore_merges and len(symbols) == 2:
            return None
        elif ignore_merges:
            ranks[token] = 256 + len(merges) + vocab[token]
    return ranks


class _AddedTokens:
    """Finds added tokens in text: the leftmost, and of those that start there the longest."""

    def __init__(self, tokens: dict[str, dict]):
        self._tokens = {text: (token["id"], token["lstrip"], token["rstrip"]) for text, token in tokens.items()}
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")       # (?!): matches nothing

    def cut(self, text: str) -> Iterable[str | int]:
        """`text` in order, as ids of added tokens and the text between them."""
        end = 0
        for match in self._pattern.finditer(text):
            token_id, lstrip, rstrip = self._tokens[match[0]]
            between = text[end:match.start()]
            between = between.rstrip(_WHITE_SPACE) if lstrip else between
            if between:
                yield between
            yield token_id
            end = match.end()
            if rstrip:
                end = len(text) - len(text[end:].lstrip(_WHITE_SPACE))
        if end < len(text):
            yield text[end:]


def _check_text(text: str):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text has a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}, half of a "
                         "character; decode its source with errors='replace'") from None


def _bytes_of(token: str) -> bytes:
    """The bytes of a token as tokenizer.json writes it; where it is not written in byte characters, its own UTF-8."""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()


def _check_byte_level(spec: dict):
    model, normalizer, decoder = (spec.get(key) or {} for key in ("model", "normalizer", "decoder"))
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise _NotByteLevel(f"a {model.get('type')} model")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _NotByteLevel(f"a BPE model with {key}")
    if decoder.get("type") != "ByteLevel":
        raise _NotByteLevel(f"a {decoder.get('type')} decoder")
    if normalizer and normalizer["type"] != "NFC":
        raise _NotByteLevel(f"a {normalizer['type']} normalizer")
    if any(token["single_word"] for token in spec.get("added_tokens", [])):
        raise _NotByteLevel("an added token with single_word")


def _split_pattern(pre_tokenizer: dict | None) -> tuple[str, bool]:
    """The regex whose matches are the pieces, and whether a space goes in front of a segment that has none."""
    stages = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    kinds = [stage.get("type") for stage in stages]
    first, last = stages[0], stages[-1]
    prefix, use_regex = last.get("add_prefix_space", False), last.get("use_regex", True)
    if kinds == ["ByteLevel"]:
        return (_GPT2_SPLIT if use_regex else r"[\s\S]+"), prefix
    if kinds == ["Digits", "ByteLevel"] and use_regex and not prefix:
        return _DIGITS_SPLIT.replace("DIGITS", r"\p{N}" if first["individual_digits"] else r"\p{N}+"), False
    if kinds == ["Split", "ByteLevel"] and not use_regex and not prefix:
        if first["behavior"] == "Isolated" and not first.get("invert"):
            pattern = first["pattern"].get("Regex") or re.escape(first["pattern"]["String"])
            return rf"{pattern}|(?:(?!{pattern})[\s\S])+", False        # what lies between two matches is a piece too
    raise _NotByteLevel(f"a pre-tokenizer of another form ({', '.join(map(str, kinds))})")


def _template_ids(post_processor: dict | None) -> tuple[list[int], list[int]]:
    """The ids that go in front of a text and behind it."""
    before, after = [], []
    for stage in (post_processor or {}).get("processors", [post_processor] if post_processor else []):
        if stage["type"] == "TemplateProcessing":
            parts = [part.get("SpecialToken", {}).get("id") for part in stage["single"]]     # the text itself: None
            ids = [None if part is None else stage["special_tokens"][part]["ids"] for part in parts]
            middle = ids.index(None)
            before = sum(ids[:middle], []) + before
            after = after + sum(ids[middle + 1:], [])
        elif stage["type"] != "ByteLevel":           # ByteLevel only moves offsets
            raise _NotByteLevel(f"a {stage['type']} post-processor")
    return before, after


def _read_json(path: Path) -> dict:
    """The JSON object in a file, {} where there is no file."""
    try:
        return read_json(path) if path.exists() else {}
    except ValueError as error:
        raise _Unreadable(f"{error}, or pass prompts as token ids") from None


def _read_special_tokens(path: Path) -> dict:
    """The content of tokenizer_config.json, or of special_tokens_map.json, with every token by its text.

    There it is the text alone or {"content": text, ...}, and null where there is no such token.
    """
    config = _read_json(path)
    tokens = {key: token for key, token in config.items() if key.endswith("_token")}  # and add_bos_token: true
    config |= {key: token["content"] for key, token in tokens.items() if isinstance(token, dict) and "content" in token}
    for key in ("bos_token", "eos_token"):
        if not isinstance(config.get(key), (str, NoneType)):
            raise _Unreadable(f"{path}: {key} is {config[key]!r:.80}, expected a text, null or {{\"content\": a text}}; fetch "
                              "the file again, or pass prompts as token ids")
    return config


def _tokens_of_config(config: dict) -> list[dict]:
    """The added tokens that tokenizer_config.json lists, as tokenizer.json writes them."""
    return [_ADDED_TOKEN | {"special": False} | token | {"id": int(i)}
            for i, token in config.get("added_tokens_decoder", {}).items()]


def _spec_of_vocab_and_merges(path: Path, config: dict) -> dict:
    """GPT-2's two files, and OPT's, in the form of a tokenizer.json."""
    if (kind := config.get("tokenizer_class") or "GPT2Tokenizer") not in _GPT2_CLASSES:
        raise _Unreadable(f"{path} has the vocab.json and merges.txt of a {kind}, and without tokenizer.json only those of a "
                          "GPT2Tokenizer are understood; add tokenizer.json or pass prompts as token ids")
    vocab = _read_json(path / "vocab.json")
    lines = (path / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    special = {token for key, token in config.items() if key.endswith("_token") and isinstance(token, str)} | {"<|endoftext|>"}
    ids = {token: vocab[token] for token in special & vocab.keys()} | _read_json(path / "added_tokens.json")
    added = {token: _ADDED_TOKEN | {"id": i, "content": token, "special": token in special} for token, i in ids.items()}
    added |= {token["content"]: token for token in _tokens_of_config(config)}
    template = None
    if config.get("add_bos_token"):          # OPT
        bos = config.get("bos_token", "<|endoftext|>")
        template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos}}, {"Sequence": {"id": "A"}}],
                    "special_tokens": {bos: {"ids": [added[bos]["id"]]}}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": config.get("add_prefix_space", False)}
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": list(added.values()),
            "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": template}


class _HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that tiktoken cannot express, on the optional package `tokenizers`."""

    def __init__(self, path: Path, reason: str, spec: dict, config: dict):
        try:
            import tokenizers
        except ImportError:
            raise _Unreadable(f"{path} is not a byte-level BPE that tiktoken can run (it has {reason}); `pip install "
                              "tokenizers` to read it, or pass prompts as token ids") from None
        self._read_tokens(spec, config)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        flags = (*_ADDED_TOKEN, "special")
        self._tokenizer.add_tokens([tokenizers.AddedToken(token["content"], **{flag: token[flag] for flag in flags})
                                    for token in spec["added_tokens"] if token["content"] not in known])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _check_text(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> "Detokenizer":
        return _PrefixDetokenizer(self._tokenizer, skip_special_tokens, prompt_token_ids)


class _PrefixDetokenizer(Detokenizer):
    """Detokenizer for decoders whose text depends on what stands before: decodes with the last shown ids in front.

    Llama 2's decoder strips the space at the beginning of a text, so the first generated ids need the prompt's before
    them.
    """

    def __init__(self, tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special and skip_special_tokens}
        self._prefix, self._pending = [], []
        for token_id in reversed(prompt_token_ids):
            if self._is_visible(token_id):
                self._prefix.insert(0, token_id)
                # Three ids may be the beginning of a character, and a run of byte tokens reads right only as a whole.
                if len(self._prefix) > 3 and not self._is_byte(token_id):
                    break

    def add(self, ids: Iterable[int]) -> str:
        self._pending += filter(self._is_visible, ids)
        # A byte token may change what the bytes before it read as, so a run of them waits for its end.
        if self._pending and self._is_byte(self._pending[-1]) or self._decode(self._pending).endswith("\ufffd"):
            return ""
        return self.finish()

    def finish(self) -> str:
        shown, pending = self._decode(self._prefix), self._pending
        text = self._decode(self._prefix + pending)
        text = text[len(commonprefix([shown, text])):]  # not len(shown): the prompt may end inside a character
        # The prefix needs some text of its own: a decoder that strips a leading space would strip it from the next ids.
        self._prefix = pending if self._decode(pending) else self._prefix + pending
        self._pending = []
        return text

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        return re.fullmatch("<0x[0-9A-F]{2}>", self._tokenizer.id_to_token(token_id)) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
