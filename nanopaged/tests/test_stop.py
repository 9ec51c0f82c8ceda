"""Stop strings: found at the earliest place, however the text is cut into pieces, and never shown in part.

The reference looks at the whole text, character by character.
"""
import random
from dataclasses import replace

import pytest

import nanopaged
from nanopaged import LLM, SamplingParams
from nanopaged.features.stop import StopChecker
from nanopaged.tests.helpers import GOLDEN
from nanopaged.text.tokenizer import load_tokenizer


def reference(text: str, stop: list[str], include: bool, num_safe: int = 0) -> tuple[str, str | None]:
    """The text up to the stop string that ends it, behind the first num_safe characters, and that stop string."""
    for end in range(num_safe + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return text[:end if include else end - len(string)], string
    return text, None


def may_be_shown(text: str, stop: list[str]) -> str:
    """The part of a text that goes on which may be shown: all but the longest end that a stop string begins with."""
    for start in range(len(text)):
        if any(len(string) > len(text) - start and string.startswith(text[start:]) for string in stop):
            return text[:start]
    return text


def cut(text: str, rng: random.Random) -> list[str]:
    """A text in pieces, some of them empty."""
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(2 + len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("alphabet", ["ab", "abc", "e\u0301é世👧"])  # characters count as they are, not as they look
def test_random_texts_in_random_pieces(alphabet, include):
    """All that is certain is shown at once. A stop string that ends in the first `safe` pieces does not count
    (min_tokens); one that begins there and ends later does. Pieces after the end are dropped."""
    rng = random.Random(alphabet)
    for _ in range(2000):
        stop = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randrange(4))]
        pieces = cut("".join(rng.choices(alphabet, k=rng.randrange(20))), rng)
        checker, shown = StopChecker(stop, include), ""
        safe = rng.choice((0, rng.randrange(len(pieces) + 1)))
        for i, piece in enumerate(pieces):
            shown += checker.add(piece, may_stop=i >= safe)
            text = "".join(pieces[:i + 1])
            if checker.matched is None:
                assert shown == (text if include else may_be_shown(text, stop))
            else:
                assert shown == reference(text, stop, include, len("".join(pieces[:safe])))[0]
        shown += checker.finish() + checker.finish()
        assert (shown, checker.matched) == reference("".join(pieces), stop, include, len("".join(pieces[:safe])))


# In the engine: the text of generated tokens is what they add to the prompt's

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llama2():
    """An engine with random weights and Llama 2's kind of tokenizer, whose decoder strips a text's first space."""
    pytest.importorskip("tokenizers")
    folder = GOLDEN / "tokenizers" / "llama2"
    return LLM(str(GOLDEN / "llama2"), tokenizer=str(folder), load_format="dummy", num_blocks=64, device="cpu",
               hf_overrides={"vocab_size": load_tokenizer(folder).vocab_size})


def test_the_first_generated_space_is_text(llama2):
    (token_id,) = llama2.tokenizer.encode("the", add_special_tokens=False)
    params = SamplingParams(temperature=0, allowed_token_ids=[token_id], max_tokens=3)  # the word again and again
    assert llama2.generate(PROMPT, params)[0].outputs[0].text == " the the the"
    assert "".join(llama2.stream(PROMPT, params)) == " the the the"
    for include, text in ((False, ""), (True, " the")):
        params = replace(params, stop=[" the"], include_stop_str_in_output=include)
        sample = llama2.generate(PROMPT, params)[0].outputs[0]
        assert (sample.text, sample.stop_reason, len(sample.token_ids)) == (text, " the", 1)


def test_beams_go_on_after_the_prompt(llama2):
    output, = llama2.beam_search(PROMPT, nanopaged.BeamSearchParams(beam_width=32, max_tokens=1))
    for sample, sequence in zip(output.outputs, output.sequences):
        assert sequence.text == llama2.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert PROMPT + sample.text == sequence.text
    assert any(sample.text.startswith(" ") for sample in output.outputs)
