"""200 requests give the texts that they gave before the engine's rooms were rebuilt (2026-11-23). A test until that is
finished; `python -m nanopaged.tests.test_same` writes what it compares with, `nanopaged/golden/same.json`."""
import hashlib
import json
from importlib.util import find_spec

import pytest

from nanopaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanopaged.tests.helpers import GOLDEN

PROMPTS = ["ROMEO:", "JULIET: O", "First Citizen:\nBefore we", "KING", "What light through", "ROMEO: But soft"] * 3
PARAMS = [SamplingParams(**settings) for settings in (
    dict(temperature=0, max_tokens=24), dict(temperature=0.9, max_tokens=20, seed=3, n=3),
    dict(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, max_tokens=20, seed=5),
    dict(temperature=0.8, max_tokens=16, logprobs=3, prompt_logprobs=2, seed=1),
    dict(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=20, seed=2),
    dict(max_tokens=30, stop=["\n", "e"], seed=8), dict(temperature=0, logit_bias={5: 3.0}, max_tokens=10))]
FEW = dict(num_blocks=30, block_size=4, max_model_len=64)
OPTIONS = {
    "as usual": {}, "plain path": dict(enforce_eager=True), "chunks": dict(max_num_batched_tokens=5, max_num_seqs=3),
    "preemption": FEW, "swapping": FEW | dict(swap_space=1), "fp8": dict(kv_cache_dtype="fp8"),
    "small blocks": dict(enable_prefix_caching=False, block_size=1, max_model_len=128, num_blocks=2000),
    "drafts": dict(speculative_config={"num_speculative_tokens": 4}), "two pools": dict(data_parallel_size=2),
    "two ranks": dict(tensor_parallel_size=2),
    "window": dict(num_blocks=60, block_size=4, hf_overrides=dict(
        use_sliding_window=True, sliding_window=24, max_window_layers=0))}
REGEX = "(I|We) am [a-z]{2,9}, and [0-9]+ years"


def hashes(texts) -> list[str]:
    return [hashlib.sha256(repr(text).encode()).hexdigest()[:8] for text in texts]


def outputs_of(name: str) -> list[str]:
    llm = LLM("shakespeare", device="cpu", **OPTIONS.get(name, {}))
    if name == "beams":
        beams = llm.beam_search(PROMPTS[:3], BeamSearchParams(beam_width=3, max_tokens=12))
        return hashes([beam.tokens for beam in output.sequences] for output in beams)
    if name == "grammars":
        params = SamplingParams(seed=4, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=REGEX))
        return hashes(output.outputs[0].token_ids for output in llm.generate(PROMPTS[:4], params))
    outputs = llm.generate(PROMPTS, [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))])
    return hashes([(list(sample.token_ids), sample.text, sample.finish_reason) for sample in output.outputs]
                  for output in outputs)


@pytest.mark.parametrize("name", [*OPTIONS, "beams", "grammars"])
def test_the_same_texts(name):
    if name == "grammars":
        pytest.importorskip("llguidance", reason="structured output needs llguidance")
    assert outputs_of(name) == json.loads((GOLDEN / "same.json").read_text())[name]


if __name__ == "__main__":
    assert find_spec("llguidance")
    text = json.dumps({name: outputs_of(name) for name in (*OPTIONS, "beams", "grammars")}, indent=1)
    (GOLDEN / "same.json").write_text(text + "\n")
