"""From logits to the next token, against the plain definitions in float64."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from phasesplit.engine.sampling import History, Sampling, drawn, nth_largest, sample, scored, uniform

VOCAB = 1000
EMPTY = History([])


def logits_of(seed: int, spread: float = 3.0, vocab: int = VOCAB) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def plain_distribution(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """Return the probabilities that temperature, min-p, top-k and top-p leave, by sorting everything."""
    scaled = logits.astype(np.float64) / sampling.temperature
    chances = np.exp(scaled - scaled.max())
    chances[chances < sampling.min_p] = 0
    if sampling.top_k > 0:
        chances[logits < np.sort(logits)[::-1][min(sampling.top_k, len(logits)) - 1]] = 0
    chances /= chances.sum()
    if sampling.top_p < 1:
        order = np.argsort(-chances, kind="stable")
        count = int(np.argmax(np.cumsum(chances[order]) >= sampling.top_p)) + 1
        chances[order[count:]] = 0
    return chances / chances.sum()


def token_of(logits: NDArray[np.float32], history: History = EMPTY, end_ids: tuple[int, ...] = (), **how: Any) -> int:
    return sample(logits, Sampling(**({"temperature": 0.0} | how)), history, end_ids).token


NARROWED: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 2.0, "top_p": 0.95}, {"top_p": 0.3}, {"top_k": 5}, {"top_k": 1},
    {"top_k": VOCAB + 5}, {"top_k": -1}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7}, {"min_p": 0.02, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("how", NARROWED, ids=str)
def test_draws_follow_the_distribution(how: dict[str, Any]) -> None:
    """Tokens would come that top-k, top-p or min-p exclude, or come too often."""
    logits, sampling, draws = logits_of(1), Sampling(seed=5, **how), 4000
    chances = plain_distribution(logits, sampling)
    history, counts = History([]), np.zeros(VOCAB)
    for _ in range(draws):
        token = sample(logits, sampling, history).token
        counts[token] += 1
        history.add(token)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(chances))
    expected = draws * chances
    likely = expected >= 5
    statistic = float(((counts - expected) ** 2 / np.maximum(expected, 1e-9))[likely].sum())
    freedom = max(1, int(likely.sum()))
    # Six standard deviations of a chi-squared variable above its mean.
    assert statistic <= freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("how", NARROWED, ids=str)
def test_every_chance_falls_where_the_running_sum_says(how: dict[str, Any]) -> None:
    """A draw would pick another token than the one whose share of the distribution holds the number drawn."""
    for seed in range(40):
        logits, sampling = logits_of(seed, vocab=700), Sampling(seed=seed, **how)
        sums = np.cumsum(plain_distribution(logits, sampling))
        token, chance = sample(logits, sampling, EMPTY).token, uniform(seed, 0)
        assert (sums[token - 1] if token else 0) - 1e-5 <= chance <= sums[token] + 1e-5


def test_draw_hangs_on_seed_and_position_alone() -> None:
    """The second machine of a request would draw another token than the first."""
    logits, sampling = logits_of(2), Sampling(seed=9, top_p=0.99)
    grown = History([1, 2, 3])
    for token in range(5):
        grown.add(token)
    assert sample(logits, sampling, grown) == sample(logits.copy(), sampling, History([7], [9] * 5))
    chances = [uniform(seed, position) for seed in (-1, 0, 1, 2**63 - 1, -(2**63)) for position in range(200)]
    assert len(set(chances)) == len(chances)
    assert all(0 <= chance < 1 for chance in chances)
    assert abs(np.mean(chances) - 0.5) < 0.04


def test_uniform_is_splitmix64() -> None:
    """Tokens of a stored seed would change with the code. Source of the values: splitmix64.c, seeds 0 and 1234567."""
    assert int(uniform(0, 0) * 2**53) == 0xE220A8397B1DCDAF >> 11
    assert int(uniform(0, 1) * 2**53) == 0x6E789E6AA1B965F4 >> 11


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Equal logits would be decided by chance."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[900, 40, 41]] = 2
    assert token_of(logits) == 40
    assert token_of(logits, temperature=1e-6) == 40


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"presence_penalty": 0.5}, [1.0, 1.5, 0.5, -1.5, -2.0]),
        ({"frequency_penalty": 0.5}, [1.0, 1.5, 0.0, -1.5, -2.0]),
        ({"repetition_penalty": 2.0}, [0.5, 1.0, 0.5, -2.0, -2.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.5}, [0.5, 0.0, -1.0, -3.0, -2.0]),
    ],
    ids=str,
)
def test_penalties(how: dict[str, float], expected: list[float]) -> None:
    """Tokens would be punished that were not there, or not those that were."""
    logits = np.array([1, 2, 1, -1, -2], dtype=np.float32)
    history = History([0, 0, 1], [1, 2, 2, 3])
    history.penalise(
        logits,
        repetition=how.get("repetition_penalty", 1.0),
        presence=how.get("presence_penalty", 0.0),
        frequency=how.get("frequency_penalty", 0.0),
    )
    assert logits.tolist() == expected


def test_penalties_reach_the_choice() -> None:
    """A penalty would be accepted and not applied."""
    logits = np.array([3, 2.9, 0], dtype=np.float32)
    for name, value in (("presence_penalty", 1.0), ("frequency_penalty", 1.0), ("repetition_penalty", 1.5)):
        assert token_of(logits, History([2], [0]), **{name: value}) == 1
    assert token_of(logits, History([0]), repetition_penalty=1.5) == 1
    assert token_of(logits, History([0]), presence_penalty=1.0) == 0


def test_history_that_grows_counts_as_one_made_at_once() -> None:
    """Penalties would depend on how the sequence came about, or break where the counts need more room."""
    outputs = np.random.default_rng(3).integers(0, 300, 500).tolist()
    grown, found = History(range(50)), []
    for token in outputs:
        grown.add(token)
        grown.penalise(logits_of(4), repetition=1.1, presence=0, frequency=0)
    for history in (grown, History(range(50), outputs)):
        logits = logits_of(4)
        history.penalise(logits, repetition=1.1, presence=0.3, frequency=0.2)
        found.append(logits)
    plain = logits_of(4)
    seen = np.isin(np.arange(VOCAB), [*range(50), *outputs])
    plain = np.where(seen, np.where(plain > 0, plain / np.float32(1.1), plain * np.float32(1.1)), plain)
    counts = np.bincount(outputs, minlength=VOCAB)
    plain = plain - np.float32(0.2) * counts - np.float32(0.3) * (counts > 0)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], plain, atol=1e-4)


def test_bias() -> None:
    """A client could neither force nor forbid a token."""
    logits = logits_of(5)
    best = int(np.argmax(logits))
    assert token_of(logits, logit_bias=((17, 100.0),)) == 17
    assert token_of(logits, logit_bias=((best, -100.0),)) != best


def test_min_tokens_bans_every_end() -> None:
    """A text would end before the fewest tokens that the client asked for, or never."""
    logits = np.array([5, 4, 3, 0], dtype=np.float32)
    how: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (1, 99)}
    assert token_of(logits, History([], [3]), (0,), **how) == 2
    assert token_of(logits, History([], [3, 3]), (0,), **how) == 0
    assert token_of(logits, History([], [3]), (0,), ignore_eos=True, **how) == 2


def test_ends() -> None:
    """A text would go on after its end, or end where the client wanted it to go on."""
    assert Sampling().is_end(2, (2,))
    assert not Sampling(ignore_eos=True).is_end(2, (2,))
    assert Sampling(ignore_eos=True, stop_token_ids=(2,)).is_end(2, (2,))
    assert not Sampling(stop_token_ids=(7,)).is_end(3, (2,))


def test_logprobs_are_the_models_own() -> None:
    """Log-probabilities would change with temperature, penalties or bans."""
    logits = logits_of(6)
    sampling = Sampling(seed=1, temperature=0.3, top_k=40, min_tokens=9, logprobs=5, logit_bias=((4, 100.0),))
    found = sample(logits, sampling, EMPTY, (int(np.argmax(logits)),))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert found.token == 4
    assert found.logprob == pytest.approx(exact[4], abs=1e-5)
    order = np.argsort(-logits, kind="stable")[:5]
    assert [token for token, _ in found.top] == order.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(exact[order], abs=1e-5)
    assert sample(logits, Sampling(logprobs=0), EMPTY).top == ()
    assert sample(logits, Sampling(), EMPTY).logprob is None


def test_likeliest_of_equals_are_the_lowest() -> None:
    """The alternatives would differ from machine to machine."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[500] = 1
    assert [token for token, _ in scored(logits, 0, 4).top] == [500, 0, 1, 2]
    assert len(scored(logits[:3], 0, 20).top) == 3


def test_logprob_is_never_positive() -> None:
    """Rounding would make a certain token more than certain."""
    logits = np.full(300, -60, dtype=np.float32)
    logits[7] = 60
    assert scored(logits, 7, 1).logprob == 0.0


@pytest.mark.parametrize("n", [1, 2, 7, 8, 900, 1000])
def test_nth_largest(n: int) -> None:
    """Top-k would keep another number of tokens."""
    values = np.round(logits_of(n), 1)
    assert nth_largest(values, n) == np.sort(values)[::-1][n - 1]


def test_logits_are_left_as_they_are() -> None:
    """What one request bans would be missing for another that reads the same row."""
    logits = logits_of(8)
    before = logits.copy()
    sampling = Sampling(min_tokens=5, repetition_penalty=2.0, logit_bias=((1, 3.0),), top_p=0.5, top_k=9, logprobs=3)
    sample(logits, sampling, History([1, 2], [3]), (0,))
    np.testing.assert_array_equal(logits, before)


def test_chance_next_to_one_is_the_last_token() -> None:
    """A draw would fall behind the last token, or on one that cannot come."""
    logits = np.full(1000, -np.inf, dtype=np.float32)
    logits[[3, 300, 700]] = [0, 1, -30]
    how: dict[str, Any] = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
    assert drawn(logits, 1 - 2.0**-53, **how) in (300, 700)
    assert drawn(logits, 0.0, **how) == 3
    for chance in np.linspace(0, 1, 1000, endpoint=False):
        assert drawn(logits, float(chance), **how) in (3, 300, 700)
