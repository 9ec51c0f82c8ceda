"""Log probabilities: every row as the plain loop below computes it, whatever else is in the batch."""
import math

import pytest
import torch

from nanopaged.features.logprobs import top_logprobs

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
VOCAB = 40
INF = math.inf


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def normal(*shape) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3.0


def rank_and_best(logits: list[float], chosen: int, k: int) -> tuple[float, int, list[int], list[float]]:
    peak = max(logits)
    norm = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
    rank = sum(x >= logits[chosen] for x in logits)
    return logits[chosen] - norm, rank, best, [logits[token] - norm for token in best]


@pytest.mark.parametrize("k, num_rows", [(0, 30), (1, 30), (5, 30), (VOCAB, 30), (10**12, 30), (-1, 30), (3, 0)])
def test_logprobs_equal_the_reference(device, k, num_rows):
    chosen = torch.randint(VOCAB, [num_rows], generator=torch.Generator().manual_seed(1))
    logits = normal(num_rows, VOCAB).to(torch.bfloat16 if k == 5 else torch.float32)
    logits[::3] = logits[::3].round()  # equal ones
    logits[::4, ::3] = -INF
    logprobs, ranks, ids, best = (t.tolist() for t in top_logprobs(logits.to(device), chosen.int().to(device), k))
    for row in range(num_rows):
        expected = rank_and_best(logits[row].tolist(), chosen[row].item(), VOCAB if k < 0 else k)
        assert (ranks[row], ids[row]) == expected[1:3]
        assert [logprobs[row], *best[row]] == pytest.approx([expected[0], *expected[3]], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_of_a_row_are_those_of_the_row_alone(device, dtype):
    """The rows have ties among bfloat16 logits, and come in pieces of any size."""
    logits, chosen = normal(40, 3000).to(device, dtype), torch.arange(40, device=device)
    together = top_logprobs(logits, chosen, 20)
    assert torch.equal(together[3], together[3].sort(descending=True).values)
    alone = [top_logprobs(logits[i:i + 1], chosen[i:i + 1], 20) for i in range(40)]
    pieces = top_logprobs(logits, chosen, 20, at_once=7 * 3000 + 5)
    for i in range(40):
        for a, b, c in zip(together, alone[i], pieces):
            assert torch.equal(a[i], b[0]) and torch.equal(a[i], c[i])


def test_logprobs_of_broken_logits_have_ids_of_the_vocabulary(device):
    logits = normal(3, VOCAB)
    logits[0], logits[1, 5], logits[2, 7] = math.nan, INF, -math.nan
    ids = top_logprobs(logits.to(device), torch.zeros(3, dtype=torch.int64, device=device), VOCAB)[2]
    assert ids.sort().values.tolist() == [list(range(VOCAB))] * 3
