"""Whether this checkout generates what another one does: `python -m nanopaged.tests.same_texts /path/to/the/other`.

The bundled model runs prompts with many settings on many kinds of engines, in both checkouts, on a CPU. The names of
runs that differ are printed; log probabilities count up to their fourth digit. Takes some minutes for each.
"""
import json
import os
import subprocess
import sys

PROMPTS = ["ROMEO:", "KING HENRY: Once more", "First Citizen: We are", "ROMEO: But soft what light", "ROMEO: But soft",
           "GLOUCESTER: Now is the winter of our discontent made glorious summer"]
SETTINGS = dict(
    greedy=dict(temperature=0), sampled=dict(seed=7), filters=dict(top_k=20, top_p=0.9, min_p=0.02, seed=3),
    samples=dict(seed=5, n=3),
    penalties=dict(seed=1, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.3),
    bias=dict(seed=2, logit_bias={30: 5.0, 31: -5.0}, min_tokens=8), stop=dict(seed=4, stop=["\n", "the"]),
    words=dict(seed=2, bad_words=["the", "thou", "love"]), logprobs=dict(seed=6, logprobs=3, prompt_logprobs=2),
    regex=dict(seed=8, max_tokens=40, structured_outputs=dict(regex="(I|We) am [a-z]{2,5}, and [0-9] years old")))
ENGINES = dict(
    default={}, eager=dict(enforce_eager=True), lookahead=dict(lookahead=1), chunks=dict(max_num_batched_tokens=7),
    small=dict(num_blocks=40, block_size=4, max_num_seqs=8), fp8=dict(kv_cache_dtype="fp8"),
    swap=dict(num_blocks=40, block_size=4, swap_space=0.01, max_num_seqs=8), pools=dict(data_parallel_size=2),
    drafts=dict(speculative_config={"num_speculative_tokens": 4}), ranks=dict(tensor_parallel_size=2))


def generate() -> dict:
    """Name of a run -> its outputs."""
    from nanopaged import LLM, BeamSearchParams, SamplingParams

    def shown(output):
        samples = [[one.text, one.token_ids, one.finish_reason, str(one.stop_reason), one.logprobs and [
            {i: round(entry.logprob, 3) for i, entry in found.items()} for found in one.logprobs]]
            for one in output.outputs]
        return samples, [beam.tokens for beam in output.sequences or ()]

    found = {}
    for name, options in ENGINES.items():
        lookahead = options.pop("lookahead", None)
        llm = LLM(device="cpu", **dict(num_blocks=400) | options)
        llm.engine.lookahead = llm.engines[0].lookahead if lookahead is None else lookahead
        params = {kind: SamplingParams(**dict(max_tokens=24, temperature=0.9) | one) for kind, one in SETTINGS.items()}
        for kind, one in params.items():
            found[f"{name}, {kind}"] = [*map(shown, llm.generate(PROMPTS, one, use_tqdm=False))]
        together = llm.generate(PROMPTS * len(params), [*params.values()] * len(PROMPTS), use_tqdm=False)
        found[f"{name}, together"] = [*map(shown, together)]
        found[f"{name}, beams"] = [*map(shown, llm.beam_search(PROMPTS[:3], BeamSearchParams(3, 12)))]
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        runs = [json.loads(subprocess.run([sys.executable, os.path.abspath(__file__)], cwd=folder, check=True, env=(
            os.environ | dict(PYTHONPATH=folder)), stdout=subprocess.PIPE).stdout) for folder in (sys.argv[1], ".")]
        print(f"{sum(map(len, runs[1].values()))} outputs; different:",
              ", ".join(name for name in runs[1] if runs[1][name] != runs[0].get(name)) or "none")
    else:
        json.dump(generate(), sys.stdout)
