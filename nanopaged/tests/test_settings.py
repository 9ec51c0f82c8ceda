"""Settings of a request, through the whole engine: edits of logits, log probabilities, stop strings."""
from functools import lru_cache

import pytest
import torch

from nanopaged import SamplingParams
from nanopaged.tests.helpers import BUNDLED, PROMPT, load, prompt_logits, shared


def forbid_repeating(token_ids, logits):
    last = torch.tensor(token_ids[-1:], dtype=torch.long, device=logits.device)
    return logits.index_fill(0, last, -1e9)


MANY_SETTINGS = [
    dict(), dict(temperature=0), dict(repetition_penalty=1.5),
    dict(frequency_penalty=1.0, presence_penalty=0.5, temperature=0), dict(logit_bias={5: 4.0, 7: -50.0}),
    dict(allowed_token_ids=[1, 2, 3, 9]), dict(min_tokens=10, stop_token_ids=list(range(0, 900))),
    dict(bad_words=[" the", "and", "I am"]), dict(top_k=5), dict(top_p=0.8, repetition_penalty=1.2), dict(min_p=0.2),
    dict(logits_processors=[forbid_repeating]),
    dict(logprobs=3), dict(temperature=0, logprobs=0), dict(stop=["e", "th"])]


@lru_cache
def each_alone():
    """One request with each of these settings, and what each request gives alone."""
    params = [SamplingParams(**dict(max_tokens=12, seed=i, ignore_eos=True) | settings)
              for i, settings in enumerate(MANY_SETTINGS)]
    return params, [shared().generate(PROMPT, p)[0].outputs[0] for p in params]


@pytest.mark.parametrize("options", [
    dict(graphs=True), dict(lookahead=0), dict(num_blocks=16, block_size=4),
    dict(max_num_batched_tokens=7, enable_prefix_caching=False)], ids=str)
def test_settings_mean_the_same_in_any_batch(options):
    """All the requests together, with preemptions and lookahead, give what each request gives alone."""
    params, alone = each_alone()
    llm = load(**dict(lookahead=1) | options)
    together = [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params)]
    for one, other in zip(together, alone):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(one, name) == getattr(other, name)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_settings_do_what_they_say():
    from nanopaged.features.edits import encode_bad_words
    llm = load()

    def run(**settings):
        params = SamplingParams(**dict(max_tokens=24, seed=1, ignore_eos=True) | settings)
        return llm.generate(PROMPT, params)[0].outputs[0]

    assert set(run(allowed_token_ids=[3, 4]).token_ids) <= {3, 4}
    assert run(logit_bias={7: 100.0}, temperature=0).token_ids == [7] * 24
    assert len(set(run(presence_penalty=2.0, temperature=0).token_ids)) > len(set(run(temperature=0).token_ids))
    plain = run()
    assert len(run(stop_token_ids=list(range(1000)), min_tokens=9).token_ids) == 10
    assert run(stop_token_ids=list(range(1000))).token_ids == plain.token_ids[:1]
    word = plain.text[10:14]
    stopped = run(stop=[word])
    assert stopped.text == plain.text[:plain.text.index(word)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert run(stop=word, include_stop_str_in_output=True).text == plain.text[:plain.text.index(word) + len(word)]
    words = {token: [llm.get_tokenizer().decode([token])] for token in plain.token_ids}
    token = next(token for token in words if [token] in encode_bad_words(words[token], llm.get_tokenizer()))
    assert token not in run(bad_words=words[token]).token_ids
    short = load(max_model_len=40).generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 40 - len(PROMPT)


def test_log_probabilities_equal_a_plain_log_softmax():
    """The log probabilities of the prompt and of the generated tokens, in chunks too, equal those of one forward pass
    over the whole text."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for options in (dict(), dict(max_num_batched_tokens=4), dict(num_blocks=8, block_size=8)):
        llm = load(**options)
        output = llm.generate([PROMPT, PROMPT], params)[1]
        generated = output.outputs[0]
        text = PROMPT + generated.token_ids
        logprobs = torch.log_softmax(prompt_logits(shared(enable_prefix_caching=False), text).float(), -1)
        assert output.prompt_logprobs[0] is None
        entries = list(enumerate(output.prompt_logprobs))[1:]
        entries += enumerate(generated.logprobs, len(PROMPT))
        for position, entry in entries:
            row, token = logprobs[position - 1], text[position]
            best = row.topk(3 if position >= len(PROMPT) else 2).indices.tolist()
            assert list(entry) == [token] + [i for i in best if i != token]
            for i, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[i].item(), abs=1e-3)
                assert logprob.rank == (row >= row[i]).sum()
                assert logprob.decoded_token == llm.get_tokenizer().decode([i], skip_special_tokens=False)
        total = sum(entry[token].logprob for entry, token in zip(generated.logprobs, generated.token_ids))
        assert generated.cumulative_logprob == pytest.approx(total)


def test_an_fp8_cache_changes_the_loss_by_less_than_a_percent():
    """The model is the bundled one, and the text a piece of tinyshakespeare's last tenth, which is no part of the
    training text."""
    held_out = shared().get_tokenizer().encode((BUNDLED / "held_out.txt").read_text())
    prompts, losses = [held_out[start:start + 400] for start in range(0, 2400, 400)], []
    for dtype in ("auto", "fp8"):
        llm = load("shakespeare", kv_cache_dtype=dtype)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        tokens = [list(entry.values())[0].logprob for output in outputs for entry in output.prompt_logprobs[1:]]
        losses.append(-sum(tokens) / len(tokens))
    assert 2.6 < losses[0] < 3.3  # nats per token; training.json says 3.20 of the whole tenth
    assert losses[1] == pytest.approx(losses[0], rel=0.01) and losses[1] != losses[0]
    in_float32 = shared("shakespeare").runner.pool.block_bytes
    assert llm.runner.pool.block_bytes * 4 == in_float32  # half of bfloat16
    assert all(k_scale > 0 and v_scale > 0 for _, _, k_scale, v_scale in llm.runner.kv_cache)
