"""Stop strings: found at the earliest place, however the text is cut into pieces, and never shown in part.

The reference looks at the whole text, character by character.
"""
import importlib.util
import itertools
import json
import random
from pathlib import Path

import pytest

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.text.stop import StopChecker
from nanopaged.text.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"


def reference(text: str, stop: list[str], include: bool, num_safe: int = 0) -> tuple[str, str | None]:
    """The text up to the stop string that ends it, and that stop string, which ends behind the first num_safe
    characters."""
    for end in range(num_safe + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return text[:end if include else end - len(string)], string
    return text, None


def may_be_shown(text: str, stop: list[str]) -> str:
    """The part of a text that may be shown while the text goes on: all but the longest end that a stop string begins
    with."""
    for start in range(len(text)):
        if any(len(string) > len(text) - start and string.startswith(text[start:]) for string in stop):
            return text[:start]
    return text


def feed(pieces, stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """The text shown after each piece and at the end, and the stop string that matched."""
    checker = StopChecker(stop, include)
    return [*map(checker.add, pieces), checker.finish()], checker.matched


def cut(text: str, rng: random.Random) -> list[str]:
    """A text in pieces, some of them empty."""
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(2 + len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]


CASES = [  # text, stop strings, what is left, what matched
    ("Hello world", ["wor"], "Hello ", "wor"),
    ("Hello world", ["word"], "Hello world", None),
    ("Hello wor", ["world"], "Hello wor", None),
    ("world", ["world"], "", "world"),
    ("", ["x"], "", None),
    ("abc", [], "abc", None),
    ("aab", ["ab"], "a", "ab"),  # a failed beginning contains the real one
    ("aaab", ["aab"], "a", "aab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("aaaa", ["aaa"], "", "aaa"),
    ("one two three", ["three", "two"], "one ", "two"),  # the first in the text, not in the list
    ("abcd", ["bcd", "c"], "ab", "c"),  # complete first, though it begins later
    ("abcd", ["abcd", "bcd"], "", "abcd"),  # at the same character: the first in the list
    ("abcd", ["bcd", "abcd"], "a", "bcd"),
    ("x\n\nUser: hi", ["\n\nUser:", "\n\nAssistant:"], "x", "\n\nUser:"),
    ("日本語のテキスト", ["のテ"], "日本語", "のテ"),
    ("a👩‍👩‍👧b", ["‍👧"], "a👩‍👩", "‍👧"),  # joined emoji are several characters
    ("e\u0301x", ["\u00e9"], "e\u0301x", None),  # characters count as they are, not as they look
]


@pytest.mark.parametrize("text, stop, rest, matched", CASES)
def test_every_way_to_cut_the_text_gives_the_same(text, stop, rest, matched):
    assert reference(text, stop, False) == (rest, matched)
    whole = reference(text, stop, True)
    for count in range(3):
        for places in itertools.combinations(range(1, max(1, len(text))), count):
            pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
            shown, found = feed(pieces, stop)
            assert ("".join(shown), found) == (rest, matched)
            shown, found = feed(pieces, stop, include=True)
            assert ("".join(shown), found) == whole


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("alphabet", ["ab", "abc", "é世👧"])
def test_random_texts(alphabet, include):
    rng = random.Random(alphabet)
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(15)))
        stop = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randrange(4))]
        pieces = cut(text, rng)
        shown, matched = feed(pieces, stop, include)
        assert ("".join(shown), matched) == reference(text, stop, include)


def test_what_is_shown_is_all_that_is_certain():
    rng = random.Random(1)
    for _ in range(1000):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randrange(4))]
        checker, text, shown = StopChecker(stop), "", ""
        for piece in cut("".join(rng.choices("abc", k=20)), rng):
            text += piece
            shown += checker.add(piece)
            if checker.matched is not None:
                assert shown == reference(text, stop, False)[0]
                break
            assert shown == may_be_shown(text, stop)


def test_nothing_is_held_back_where_the_stop_string_is_shown():
    rng = random.Random(2)
    for _ in range(300):
        stop, pieces = ["aab", "bbb"], cut("".join(rng.choices("ab", k=12)), rng)
        checker = StopChecker(stop, include=True)
        for i, piece in enumerate(pieces):
            shown = checker.add(piece)
            if checker.matched is not None:
                break
            assert shown == piece


def test_pieces_after_the_end_are_dropped():
    assert feed(["a", "b", "c", "b", "d"], ["b"]) == (["a", "", "", "", "", ""], "b")
    assert feed(["axbxc"], ["x"], include=True) == (["ax", ""], "x")
    checker = StopChecker(["x"])
    assert checker.add("ax") == "a" and checker.finish() == "" == checker.add("more") == checker.finish()


def test_the_end_shows_what_was_held_back_once():
    checker = StopChecker(["abcd"])
    assert (checker.add("xab"), checker.add("c"), checker.finish(), checker.finish()) == ("x", "", "abc", "")


@pytest.mark.parametrize("include", [False, True])
def test_min_tokens(include):
    """A stop string that ends in the first pieces does not count; one that begins there and ends later does."""
    assert reference("axbxc", ["x"], False, num_safe=2) == ("axb", "x")
    rng = random.Random(3)
    for _ in range(1500):
        text = "".join(rng.choices("ab", k=rng.randrange(14)))
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randrange(4))]
        pieces, checker, shown = cut(text, rng), StopChecker(stop, include), ""
        safe = rng.randrange(len(pieces) + 1)
        for i, piece in enumerate(pieces):
            shown += checker.add(piece, may_stop=i >= safe)
        shown += checker.finish()
        assert (shown, checker.matched) == reference(text, stop, include, len("".join(pieces[:safe])))


def test_a_long_text_is_not_kept():
    checker = StopChecker(["a" * 10, "b"])
    shown = "".join(checker.add("xyzaaaaaaa") for _ in range(1000)) + checker.finish()
    assert shown == "xyzaaaaaaa" * 1000 and checker.matched is None
    checker.add("xyz" * 1000)
    assert len(checker._last) < 10


# In the engine: the text of generated tokens is what they add to the prompt's

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    """An engine with random weights and Llama 2's kind of tokenizer, whose decoder strips a text's first space."""
    if importlib.util.find_spec("tokenizers") is None:
        pytest.skip("needs the package `tokenizers`")
    path, tokenizer = tmp_path_factory.mktemp("llama2"), load_tokenizer(GOLDEN / "tokenizers" / "llama2")
    config = json.loads((GOLDEN / "llama2" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.vocab_size}))
    llm = LLM(str(path), load_format="dummy", num_blocks=64, device="cpu")
    llm.tokenizer = tokenizer
    return llm


def params_of_words(llm, *words: str, **options) -> SamplingParams:
    """Settings that generate these words, each of one token, again and again."""
    token_ids = [llm.tokenizer.encode(word, add_special_tokens=False) for word in words]
    assert all(len(ids) == 1 for ids in token_ids)
    return SamplingParams(temperature=0, allowed_token_ids=[ids[0] for ids in token_ids], **options)


def test_the_first_generated_space_is_text(llama2):
    params = params_of_words(llama2, "the", max_tokens=3)
    assert llama2.generate(PROMPT, params)[0].outputs[0].text == " the the the"
    assert "".join(llama2.stream(PROMPT, params)) == " the the the"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_begins_with_the_first_generated_space(llama2, include):
    params = params_of_words(llama2, "the", max_tokens=9, stop=[" the"], include_stop_str_in_output=include)
    sample = llama2.generate(PROMPT, params)[0].outputs[0]
    assert (sample.text, sample.stop_reason, len(sample.token_ids)) == (" the" if include else "", " the", 1)


def test_beams_go_on_after_the_prompt(llama2):
    output, = llama2.beam_search(PROMPT, BeamSearchParams(beam_width=32, max_tokens=1))
    for sample, sequence in zip(output.outputs, output.sequences):
        assert sequence.text == llama2.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert PROMPT + sample.text == sequence.text
    assert any(sample.text.startswith(" ") for sample in output.outputs)
