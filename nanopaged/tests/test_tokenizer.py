"""Tokenizers give, id for id and character for character, what Hugging Face `tokenizers` gives.

golden/tokenizers holds a small tokenizer of each family with what `tokenizers` made of hard texts (made by
golden/make_tokenizers.py). NANOPAGED_GPT2, a directory with GPT-2's vocab.json and merges.txt, adds the real
vocabulary.
"""

import importlib.util
import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import regex

from nanopaged import LLM, SamplingParams
from nanopaged.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "tokenizers"
BYTE_LEVEL = ["gpt2", "opt", "llama3", "smollm2", "qwen", "flags"]
HAS_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None
needs_tokenizers = pytest.mark.skipif(
    not HAS_TOKENIZERS,
    reason="what tiktoken cannot express is read with the package `tokenizers`, which is not installed")
FAMILIES = [*BYTE_LEVEL, pytest.param("llama2", marks=needs_tokenizers)]


def expected(name: str) -> dict:
    return json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8"))


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool, rng: random.Random | None = None,
           prompt: list[int] = ()) -> list[str]:
    """What a detokenizer shows after the prompt, one id at a time or in random chunks (empty ones too)."""
    detokenizer, shown = tokenizer.detokenizer(skip_special_tokens, prompt), []
    while ids:
        n = rng.randrange(5) if rng else 1
        shown.append(detokenizer.add(ids[:n]))
        ids = ids[n:]
    return [*shown, detokenizer.finish()]


def one_sentence(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message and ". " not in message
    return message


@pytest.mark.parametrize("name", FAMILIES)
def test_encode_and_decode_like_hugging_face(name):
    tokenizer = load_tokenizer(GOLDEN / name)
    for text, ids, plain, decoded, with_special in expected(name)["texts"]:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == plain, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == decoded
        assert tokenizer.decode(ids) == with_special
        assert max(ids, default=0) < tokenizer.vocab_size


@pytest.mark.parametrize("name", FAMILIES)
def test_decode_any_ids_like_hugging_face(name):
    """The ids are random: they have broken UTF-8, special tokens inside characters, and ids that are no token."""
    tokenizer = load_tokenizer(GOLDEN / name)
    for ids, decoded, with_special in expected(name)["random"]:
        assert tokenizer.decode(ids, skip_special_tokens=True) == decoded
        assert tokenizer.decode(ids) == with_special
    assert tokenizer.decode([]) == tokenizer.decode([10**9]) == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_pieces_join_to_decode(name):
    tokenizer, rng = load_tokenizer(GOLDEN / name), random.Random(0)
    golden = expected(name)
    for ids in [row[1] for row in golden["texts"]] + [row[0] for row in golden["random"]]:
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip)
            assert "".join(pieces(tokenizer, ids, skip)) == whole
            assert "".join(pieces(tokenizer, ids, skip, rng)) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_stream_never_shows_half_a_character(name):
    tokenizer = load_tokenizer(GOLDEN / name)
    text = "ñ 你好 👩‍👩‍👧‍👦 שלום"
    shown = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False), True)
    if name != "smollm2":                # some bytes are no token of it: they vanish, and the rest is broken
        assert "".join(shown).strip() == text
        assert not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_after_a_prompt_adds_what_decode_adds(name):
    """This holds wherever a text is cut into a prompt and a generated part. Llama 2's first generated space is text."""
    tokenizer, rng, num_cuts = load_tokenizer(GOLDEN / name), random.Random(0), 0
    golden = expected(name)
    for ids in [row[1] for row in golden["texts"]] + [row[0] for row in golden["random"]]:
        for cut in rng.sample(range(len(ids) + 1), k=min(len(ids), 9)):
            for skip in (True, False):
                whole, shown = tokenizer.decode(ids, skip), tokenizer.decode(ids[:cut], skip)
                if shown.endswith("\ufffd") or not whole.startswith(shown):  # the cut is inside a character
                    continue
                assert shown + "".join(pieces(tokenizer, ids[cut:], skip, prompt=ids[:cut])) == whole
                assert shown + "".join(pieces(tokenizer, ids[cut:], skip, rng, ids[:cut])) == whole
                num_cuts += 1
    assert num_cuts > 700


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", pytest.param("llama2", marks=needs_tokenizers)])
def test_a_stream_completes_the_character_that_the_prompt_began(name):
    tokenizer = load_tokenizer(GOLDEN / name)
    ids = tokenizer.encode("<s>x\U00010348 y")         # a character of four bytes, which no merge joins
    first = max(cut for cut in range(len(ids)) if tokenizer.decode(ids[:cut]).endswith("x"))
    for cut in range(first, first + 4):
        assert "".join(pieces(tokenizer, ids[cut:], True, prompt=ids[:cut])) == "\U00010348 y"
    assert "".join(pieces(tokenizer, ids[first + 4:], True, prompt=ids[:first + 4])) == " y"


@needs_tokenizers
def test_only_the_end_of_a_prompt_is_decoded(monkeypatch):
    """A detokenizer costs the same after a long prompt."""
    tokenizer, lengths = load_tokenizer(GOLDEN / "llama2"), []
    ids = tokenizer.encode("Once upon a time " * 500)
    detokenizer = tokenizer.detokenizer(True, ids)
    decode = detokenizer._decode
    monkeypatch.setattr(detokenizer, "_decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    assert detokenizer.add(tokenizer.encode("there", add_special_tokens=False)) == " there"
    assert max(lengths) < 20


def test_stream_ends_with_what_never_became_a_character():
    tokenizer = load_tokenizer(GOLDEN / "gpt2")
    detokenizer = tokenizer.detokenizer()
    half = tokenizer.encode("\U000e0001")[:3]                # the first three of four bytes
    assert detokenizer.add(half) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("name, bos, eos, added", [
    ("gpt2", "<|endoftext|>", "<|endoftext|>", []), ("opt", "</s>", "</s>", [2]),
    ("llama3", "<|begin_of_text|>", "<|eot_id|>", None),
    ("smollm2", "<|im_start|>", "<|im_end|>", []), ("qwen", None, "<|im_end|>", [])])
def test_special_tokens(name, bos, eos, added):
    tokenizer = load_tokenizer(GOLDEN / name)
    for token, token_id in ((bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)):
        assert [token_id] == (tokenizer.encode(token, add_special_tokens=False) if token else [None])
    assert tokenizer.encode("") == ([tokenizer.bos_token_id] if added is None else added)


def test_think_is_a_token_but_shown():
    tokenizer = load_tokenizer(GOLDEN / "qwen")
    ids = tokenizer.encode("<|im_start|><think>a</think><|im_end|>")
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_vocab_and_merges_equal_tokenizer_json(tmp_path):
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "gpt2" / file, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 640
    assert all(tokenizer.encode(row[0]) == row[1] for row in expected("gpt2")["texts"])


def test_special_tokens_named_beside_vocab_and_merges(tmp_path):
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "gpt2" / file, tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<x>": 641}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<x>"}, "bos_token": "<x>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (641, 641, 642)
    assert tokenizer.decode(tokenizer.encode("a<x>b"), skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("config, has_default", [
    ({"model_max_length": 1024}, True), ({"tokenizer_class": "GPT2Tokenizer"}, True),
    ({"tokenizer_class": "GPT2TokenizerFast"}, True), ({"tokenizer_class": "Qwen2Tokenizer"}, False),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, False)])
def test_only_the_class_of_gpt2_has_default_tokens(tmp_path, config, has_default):
    """In other classes <|endoftext|> may be a token that ends no text."""
    shutil.copy(GOLDEN / "qwen" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    default = tokenizer.encode("<|endoftext|>")[0] if has_default else None
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == default
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|im_end|>", "bos_token": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.eos_token_id] == tokenizer.encode("<|im_end|>") and tokenizer.bos_token_id is None


@pytest.mark.parametrize("name", ["qwen", pytest.param("llama2", marks=needs_tokenizers)])
def test_tokens_that_only_tokenizer_config_lists(tmp_path, name):
    shutil.copy(GOLDEN / name / "tokenizer.json", tmp_path)
    first = load_tokenizer(tmp_path).vocab_size
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = {first: flags | {"content": "<|new|>", "special": True},
              first + 1: flags | {"content": "<call>", "special": False}}
    config = {"added_tokens_decoder": tokens, "eos_token": "<|new|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a<|new|>b<call>", add_special_tokens=False)
    assert [i for i in ids if i >= first] == [first, first + 1]
    assert tokenizer.decode(ids).replace(" ", "") == "a<|new|>b<call>"
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "ab<call>"
    assert "".join(pieces(tokenizer, ids, True)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (first, first + 2)


@pytest.mark.parametrize("tokens", ['["x"]', '{"x": {"content": "x"}}', '{"5": "x"}', '{"5": {}}'])
def test_damaged_list_of_tokens(tmp_path, tokens):
    shutil.copy(GOLDEN / "qwen" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"added_tokens_decoder": {tokens}}}')
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer_config.json" in one_sentence(error)


def test_the_end_token_of_the_tokenizer_ends_texts_too(tmp_path):
    """Some fine-tunes change it in tokenizer_config.json and leave the model's config.json as it was."""
    shutil.copy(GOLDEN / "gpt2" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "A"}')
    llm = LLM(str(GOLDEN.parent / "llama2"), tokenizer=str(tmp_path), num_blocks=16, device="cpu")
    end = llm.get_tokenizer().eos_token_id
    assert llm.eos_token_ids == {2, end}
    params = SamplingParams(allowed_token_ids=[end], max_tokens=5)
    sample = llm.generate([[5, 6]], params)[0].outputs[0]
    assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == ([end], "", "stop", None)
    assert llm.generate([[5, 6]], SamplingParams(**vars(params) | {"ignore_eos": True}))[0].outputs[0].text == "AAAAA"


def made_by_hand(merges: list[str], ignore_merges: bool) -> Tokenizer:
    spec = json.loads((GOLDEN / "llama3" / "tokenizer.json").read_text(encoding="utf-8"))
    characters = [token for token in spec["model"]["vocab"] if len(token) == 1]
    vocab = {token: i for i, token in enumerate([*characters, *(merge.replace(" ", "") for merge in merges)])}
    spec["model"] |= {"vocab": vocab, "merges": merges, "ignore_merges": ignore_merges}
    return Tokenizer(spec | {"added_tokens": [], "post_processor": None}, {})


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_only_listed_pairs_merge(ignore_merges):
    """The merge of b and c comes first, so no merge makes abc: `a` and `bc` are no listed pair, though tiktoken would
    join them."""
    tokenizer = made_by_hand(["b c", "a b", "ab c"], ignore_merges)
    texts = {"xabc": ["x", "a", "bc"], "abcabc": ["a", "bc", "a", "bc"], "abb": ["ab", "b"],
             "abc": ["abc"] if ignore_merges else ["a", "bc"]}
    for text, tokens in texts.items():
        assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == tokens


def test_bytes_that_are_no_token_vanish_and_their_neighbours_merge():
    tokenizer = load_tokenizer(GOLDEN / "smollm2")
    assert tokenizer.encode("thɐe") == tokenizer.encode("the")


def test_long_and_monotonous_prompts():
    """tiktoken alone panics on a million spaces."""
    for name in ("gpt2", "llama3", "smollm2", "qwen"):
        tokenizer = load_tokenizer(GOLDEN / name)
        for text in ("x" + " " * 1_000_000 + "x", "a" * 100_000, "hear me speak.\n" * 30_000):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_lone_surrogate_is_refused():
    with pytest.raises(ValueError) as error:
        load_tokenizer(GOLDEN / "gpt2").encode("ab\ud83dc")
    assert "U+D83D" in one_sentence(error) and "position 2" in str(error.value)


def test_no_tokenizer_files(tmp_path):
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in one_sentence(error) and "token ids" in str(error.value)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert "only a SentencePiece tokenizer.model" in one_sentence(error)


def test_broken_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer.json is not valid JSON" in one_sentence(error)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="tokenizer.json is a git-lfs pointer"):
        load_tokenizer(tmp_path)


def damaged(part: tuple[str, ...]) -> str:
    """The content of a tokenizer.json that lacks one part."""
    holder = spec = json.loads((GOLDEN / "llama3" / "tokenizer.json").read_text(encoding="utf-8"))
    for key in part[:-1]:
        holder = holder[key]
    del holder[part[-1]]
    return json.dumps(spec)


NO_OBJECTS = ["[]", "null", '"x"', "[" * 100_000]
ADDED_TOKEN = ["id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"]


@pytest.mark.parametrize("name, text", [
    *((name, text) for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
      for text in NO_OBJECTS),
    *(("tokenizer.json", f'{{"model": {model}}}') for model in ("null", "[]", "{}", '{"vocab": 5}')),
    ("tokenizer.json", "{}"),
    *(("tokenizer.json", damaged(part)) for part in (("model",), ("model", "vocab"))),
    pytest.param("tokenizer.json", damaged(("model", "merges")), marks=needs_tokenizers),
    *(("tokenizer.json", damaged(("added_tokens", 0, key))) for key in ADDED_TOKEN),
    *(("tokenizer_config.json", f'{{"eos_token": {token}}}') for token in ("{}", "[]", "5", '{"content": []}')),
    ("special_tokens_map.json", '{"bos_token": {}}')], ids=lambda value: None if len(value) < 60 else "long")
def test_damaged_files(tmp_path, name, text):
    """Whatever is wrong with the files, the error is a ValueError, with which the engine starts without a tokenizer."""
    shutil.copy(GOLDEN / "llama3" / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in one_sentence(error) and name in str(error.value) and "token ids" in str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("name, content", [
    ("vocab.json", b"[]"), ("vocab.json", b'{"a": "b"}'), ("merges.txt", b"\xff"),
    ("added_tokens.json", b'{"<x>": null}')])
def test_damaged_vocab_and_merges(tmp_path, name, content):
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "gpt2" / file, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="vocab.json") as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in one_sentence(error) and "token ids" in str(error.value)


def test_vocab_and_merges_of_another_class(tmp_path):
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "gpt2" / file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert "RobertaTokenizer" in one_sentence(error)


def test_without_the_package_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError) as error:
        load_tokenizer(GOLDEN / "llama2")
    message = one_sentence(error)
    assert all(part in message for part in ("llama2", "byte_fallback", "pip install tokenizers", "token ids"))


@needs_tokenizers
@pytest.mark.parametrize("change", [
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]}},
    {"decoder": {"type": "Sequence", "decoders": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]}},
    {"normalizer": {"type": "NFKC"}}])
def test_byte_level_that_tiktoken_cannot_express(tmp_path, change):
    """The package `tokenizers` encodes (Falcon cuts text in such a way), and the stream still holds half characters
    back."""
    from tokenizers import Tokenizer as Reference
    spec = json.loads((GOLDEN / "qwen" / "tokenizer.json").read_text(encoding="utf-8")) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer, reference = load_tokenizer(tmp_path), Reference.from_str(json.dumps(spec))
    for text, *_ in expected("qwen")["texts"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        shown = pieces(tokenizer, ids, True)
        assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)
    for ids, *_ in expected("qwen")["random"]:
        assert "".join(pieces(tokenizer, ids, True)) == reference.decode(ids)


def changed(folder: Path, name: str, change) -> Path:
    """A copy of a tokenizer.json, changed."""
    spec = json.loads((GOLDEN / name / "tokenizer.json").read_text(encoding="utf-8"))
    change(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def set_split(pattern: str):
    return lambda spec: spec["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": pattern})


@pytest.mark.parametrize("wrong", [10**9, -1, 2**70, 1.5, None, "5"])
@pytest.mark.parametrize("kind", ["vocab", "added"])
def test_ids_that_no_token_has(tmp_path, wrong, kind):
    def change(spec):
        if kind == "vocab":
            spec["model"]["vocab"]["a"] = wrong
        else:
            spec["added_tokens"][0]["id"] = wrong

    with pytest.raises(ValueError, match="a token has the id") as error:
        load_tokenizer(changed(tmp_path, "llama3", change))
    assert f"{wrong!r}, and ids are integers from 0 to 16777215" in one_sentence(error)


@pytest.mark.parametrize("pattern", ["(?R)", "(a|(?R))", "(?1)(a)", r"(?<x>a\g<x>)", "("])
def test_split_regexes_that_cannot_be_run(tmp_path, monkeypatch, pattern):
    changed(tmp_path, "llama3", set_split(pattern))
    if HAS_TOKENIZERS:
        with pytest.raises(ValueError, match="tokenizer.json that cannot be read .*Oniguruma error") as error:
            load_tokenizer(tmp_path)
        one_sentence(error)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="a split regex that (calls itself, with|it cannot parse)") as error:
        load_tokenizer(tmp_path)
    assert "pip install tokenizers" in one_sentence(error)


@pytest.mark.parametrize("change", [{}, pytest.param({"normalizer": {"type": "NFKC"}}, marks=needs_tokenizers)])
def test_a_split_regex_that_tries_too_many_ways(tmp_path, change, capfd):
    """On this text, that is; others go on. The Rust packages have limits of their own, and panic there."""
    def edit(spec):
        set_split("(a|a)+(?!a)c|x")(spec)
        spec.update(change)

    tokenizer = load_tokenizer(changed(tmp_path, "llama3", edit))
    with pytest.raises(ValueError, match="cannot (cut|encode) this text"):
        tokenizer.encode("a" * 40)
    assert tokenizer.decode(tokenizer.encode("xx", add_special_tokens=False)) == "xx"


def test_a_split_regex_that_tries_too_many_ways_for_a_missing_byte(tmp_path, monkeypatch):
    """Bytes outside of the vocabulary are cut by the package regex."""
    def edit(spec):
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(a|a)+c"}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}
        del spec["model"]["vocab"]["!"]

    tokenizer = load_tokenizer(changed(tmp_path, "gpt2", edit))
    findall = regex.findall
    monkeypatch.setattr(regex, "findall", lambda *given, timeout, **more: findall(*given, timeout=0.1, **more))
    with pytest.raises(ValueError, match="the tokenizer's split regex cannot cut this text"):
        tokenizer.encode("!" + "a" * 40 + "b")


@needs_tokenizers
@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_a_subword_prefix_that_merges_lack(tmp_path, name):
    """With that of Llama 2 the package `tokenizers` would end the process."""
    def edit(spec):
        spec["model"]["continuing_subword_prefix"] = "##"

    with pytest.raises(ValueError, match="the merge .* lacks the continuing_subword_prefix '##'") as error:
        load_tokenizer(changed(tmp_path, name, edit))
    one_sentence(error)


@needs_tokenizers
def test_a_panic_of_tokenizers_is_a_sentence(tmp_path, capfd):
    def edit(spec):
        spec["post_processor"]["processors"][1]["special_tokens"] = {}
        spec["normalizer"] = {"type": "NFKC"}

    with pytest.raises(ValueError, match="the package tokenizers cannot (read it|encode)") as error:
        load_tokenizer(changed(tmp_path, "llama3", edit)).encode("a")
    one_sentence(error)


@needs_tokenizers
def test_an_error_of_tokenizers_in_a_text_is_a_sentence(tmp_path, capfd):
    def edit(spec):
        spec["decoder"]["decoders"][3]["stop"] = 10**9  # characters to strip from the end

    tokenizer = load_tokenizer(changed(tmp_path, "llama2", edit))
    for decode in (tokenizer.decode, tokenizer.detokenizer().add):
        with pytest.raises(ValueError, match="the package tokenizers cannot decode these ids"):
            decode([])  # an empty text has no end


@pytest.mark.parametrize("wrong", [[1], "5", -1, 10**9])
def test_ids_of_a_template_that_no_token_has(tmp_path, wrong):
    def edit(spec):
        spec["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = [wrong]

    with pytest.raises(ValueError, match="a token has the id"):
        load_tokenizer(changed(tmp_path, "llama3", edit))


def random_text(rng: random.Random) -> str:
    scripts = [(32, 127), (9, 33), (0, 0x250), (0x300, 0xE00), (0x2000, 0x2070), (0x3040, 0x9FFF), (0xE000, 0x11000),
               (0x1F300, 0x1FAFF)]
    words = ["the", " and", " don't", "I'LL", "\n\n", "   ", "<|endoftext|>", "12345", " ", "\u200d", "\u00a0"]

    def part() -> str:
        first, end = rng.choice(scripts)
        if rng.random() < 0.4:
            return rng.choice(words)
        return "".join(chr(rng.randrange(first, end)) for _ in range(rng.randrange(1, 7)))
    return "".join(part() for _ in range(rng.randrange(1, 12)))


@pytest.mark.skipif("NANOPAGED_GPT2" not in os.environ,
                    reason="set NANOPAGED_GPT2 to a directory with GPT-2's vocab.json and merges.txt")
def test_real_gpt2_vocabulary():
    folder, rng = Path(os.environ["NANOPAGED_GPT2"]), random.Random(0)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (50257, 50256)
    reference = hugging_face_gpt2(folder) if HAS_TOKENIZERS else None
    for text in (random_text(rng) for _ in range(5000)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        if reference:
            assert ids == reference.encode(text).ids, text
            ids = [rng.randrange(50257) for _ in range(8)]
            decoded = reference.decode(ids, skip_special_tokens=False)
            assert "".join(pieces(tokenizer, ids, False)) == tokenizer.decode(ids) == decoded


def hugging_face_gpt2(folder: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    reference = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens(["<|endoftext|>"])
    return reference
