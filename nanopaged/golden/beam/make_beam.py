"""What transformers' beam search makes of the golden checkpoints and of the bundled model, in float32.

    python nanopaged/golden/beam/make_beam.py        (three minutes)

Needs the package `transformers` (written with 5.23). expected.json gets the `cases`, each with the `model`
("shakespeare" or a directory of nanopaged/golden), `prompt_token_ids`, the `eos_token_ids` that generate() was called
with in place of the checkpoint's, the settings, and `expected`: the hypotheses in the order returned, each with its
`token_ids` (what was generated, the EOS token that ended it included), `score` (transformers' sequences_scores),
`cumulative_logprob` (the sum of its compute_transition_scores, so that the two together say what length a score is
divided by) and `finish_reason`.

A problem (model, beam width, max_tokens, length penalty) is run with all three kinds of early stopping, and comes with
EOS tokens that turn up and a prompt such that the three do not all end in the same results, and that a little noise on
the log probabilities changes no token: the seed goes up until that is so. With a beam width of 1 generate() is greedy
and gives no score; it is worked out here.
"""
import itertools
import json
import random
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
NOISE, NOISY_RUNS = 1e-3, 4  # rounding errors are a hundred times smaller
TEXTS = ("ROMEO:\n", "First Citizen:\nBefore we", "O, that this", "KING RICHARD III:\nA horse!", "To be, or not",
         "What is", "Come, ", "JULIET:\nMy lord", "The ", "DUKE OF YORK:\nWhy", "I will not", "And so", "Good night",
         "Go, ", "Where is")
# model, beam_width, max_tokens, length_penalty, number of EOS tokens
PROBLEMS = [
    ("gpt2", 2, 12, 0.0, 1), ("opt", 2, 12, 1.0, 2), ("llama2", 2, 12, 2.0, 1), ("qwen2", 2, 12, -1.0, 1),
    ("llama3", 4, 12, 0.0, 3), ("mistral", 4, 16, 1.0, 1), ("qwen3", 4, 12, 2.0, 2), ("gpt2-bare", 4, 12, -1.0, 2),
    ("smollm2", 5, 12, 0.0, 2), ("qwen2-window", 5, 12, 1.0, 3), ("llama-linear-bias", 5, 12, 2.0, 1),
    ("llama3", 5, 12, -1.0, 1), ("shakespeare", 4, 20, 1.0, 1), ("shakespeare", 5, 12, 2.0, 2),
    ("shakespeare", 2, 16, 0.0, 1), ("shakespeare", 4, 12, -1.0, 3),
    # Where early stopping decides nothing, one kind of it is enough: greedy, one token, no EOS token.
    ("qwen3", 1, 12, 1.0, 1), ("llama2", 1, 6, 2.0, 0), ("shakespeare", 1, 16, 0.0, 1), ("gpt2", 4, 1, 1.0, 2),
    ("opt", 4, 10, 1.0, 0), ("mistral", 5, 10, -1.0, 0), ("shakespeare", 4, 24, 1.0, 0),
]


class Noise(transformers.LogitsProcessor):
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + NOISE * torch.randn(scores.shape, generator=self.generator)


def load(name: str):
    directory = HERE.parents[1] / "shakespeare" if name == "shakespeare" else HERE.parent / name
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory) if name == "shakespeare" else None
    return model, tokenizer


@torch.inference_mode()
def hypotheses(model, case: dict, noise: int | None = None) -> list[dict]:
    prompt, width = case["prompt_token_ids"], case["beam_width"]
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        num_beams=width, num_return_sequences=width, max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"], early_stopping=case["early_stopping"],
        eos_token_id=case["eos_token_ids"] or None, pad_token_id=0,
        logits_processor=[] if noise is None else [Noise(noise)], return_dict_in_generate=True, output_scores=True)
    indices = out.beam_indices if width > 1 else None
    logprobs = model.compute_transition_scores(out.sequences, out.scores, indices, normalize_logits=width == 1)
    found = []
    for i, sequence in enumerate(out.sequences):
        length = len(out.scores) if indices is None else int((indices[i] >= 0).sum())
        token_ids = sequence[len(prompt):len(prompt) + length].tolist()
        cumulative = logprobs[i, :length].sum().item()
        score = cumulative / length ** case["length_penalty"] if indices is None else out.sequences_scores[i].item()
        found.append({"token_ids": token_ids, "score": round(score, 6), "cumulative_logprob": round(cumulative, 6),
                      "finish_reason": "stop" if token_ids[-1] in case["eos_token_ids"] else "length"})
    return found


def tokens(expected: list[dict]) -> list[list[int]]:
    return [hypothesis["token_ids"] for hypothesis in expected]


def prompt_of(tokenizer, rng: random.Random) -> list[int]:
    if tokenizer:
        return tokenizer.encode(rng.choice(TEXTS))
    return [rng.randrange(8, 190) for _ in range(rng.randint(3, 12))]


def attempt(model, tokenizer, problem: tuple, seed: int) -> list[dict] | None:
    """The problem's cases with the prompt and the EOS tokens of this seed, or None if they do not show enough."""
    name, width, max_tokens, length_penalty, num_eos = problem
    rng = random.Random(f"{problem} {seed}")
    case = {"model": name, "prompt_token_ids": prompt_of(tokenizer, rng), "eos_token_ids": [], "beam_width": width,
            "max_tokens": max_tokens, "length_penalty": length_penalty, "early_stopping": False}
    seen = sorted(set(sum(tokens(hypotheses(model, case)), [])))
    if len(seen) < num_eos:
        return None
    case["eos_token_ids"] = sorted(rng.sample(seen, num_eos))
    stopping_decides = width > 1 and max_tokens > 1 and num_eos > 0
    cases = [case | {"early_stopping": kind} for kind in ((False, True, "never") if stopping_decides else (False,))]
    for case in cases:
        case["expected"] = hypotheses(model, case)
        if num_eos and all(hypothesis["finish_reason"] == "length" for hypothesis in case["expected"]):
            return None
    # Where longer texts are not favoured, False and "never" are the same rule.
    distinct = {json.dumps(tokens(case["expected"])) for case in cases}
    if stopping_decides and len(distinct) < (3 if length_penalty > 0 else 2):
        return None
    for case, noise in itertools.product(cases, range(NOISY_RUNS)):
        if tokens(hypotheses(model, case, noise)) != tokens(case["expected"]):
            return None
    return cases


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cases = []
    for problem in PROBLEMS:
        model, tokenizer = load(problem[0])
        seed = next(seed for seed in itertools.count() if attempt(model, tokenizer, problem, seed))
        print(*problem, "seed", seed)
        cases += attempt(model, tokenizer, problem, seed)
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / "expected.json").write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
