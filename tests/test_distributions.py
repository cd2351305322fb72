"""Both sampling modes against the exact distribution: 200 000 draws of each case, total variation within what chance allows; the acceptance rate
of rejection sampling against its exact value. Libraries that are wrong on purpose are told apart."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from bw24 import abi
from bw24.errors import Bw24Error
from bw24.sampling import SamplingParams, judge, propose, sample
from test_faults import build
from test_sampling import adjusted, mask_of, survivors, weights

DRAWS = 200_000
VOCAB, ROWS = 40, 28  # of the target; of the draft's cut head
RISK = 1e-7  # chance that a right sampler fails one comparison

CASES = {
    "temperature": (SamplingParams(temperature=0.8, seed=5), False),
    "top-k": (SamplingParams(temperature=1.3, top_k=9, seed=6), False),
    "top-p": (SamplingParams(temperature=1.1, top_p=0.8, seed=7), False),
    "min-p": (SamplingParams(temperature=1.6, min_p=0.12, seed=8), False),
    "penalties": (SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5,
                                 logit_bias={4: 2.0, 33: -1.0}, seed=9), False),
    "all": (SamplingParams(temperature=1.0, top_k=20, top_p=0.95, min_p=0.02, repetition_penalty=1.1, frequency_penalty=0.2, seed=1), True),
}
ALLOWED = [i for i in range(VOCAB) if i % 5 != 2]  # what a grammar leaves in the case of all settings

_rng = np.random.default_rng(50)
TARGET = (_rng.normal(size=VOCAB) * 1.6).astype(np.float32)
IDS = _rng.permutation(VOCAB)[:ROWS].astype(np.int32)  # row r of the draft's head proposes token IDS[r]
HISTORY = [int(i) for i in np.argsort(-TARGET)[[0, 0, 0, 1, 3, 3, 6, 9, 20]]]
DRAFT = (TARGET[IDS] + _rng.normal(size=ROWS) * 0.9).astype(np.float32)


def distribution(logits: np.ndarray, ids: np.ndarray, p: SamplingParams, masked: bool) -> dict[int, Fraction]:
    """Exact probabilities by the sampler's definition: token -> share of the survivors' mass. logits: [len(ids)], of tokens `ids`."""
    full = [-1e30] * VOCAB  # no mass, whatever the penalties
    for row, token in enumerate(ids):
        full[token] = float(logits[row])
    allowed = sorted(set(ids.tolist()) & set(ALLOWED if masked else range(VOCAB)))
    l = adjusted(full, p, HISTORY)  # noqa: E741
    w = weights(l, allowed, p.temperature)
    kept = survivors(w, l, p)
    total = sum(w[i] for i in kept)
    return {i: Fraction(w[i], total) for i in kept}


def exact_of(name: str) -> tuple[dict[int, Fraction], dict[int, Fraction]]:
    """(target's, draft's) distribution of a case."""
    p, masked = CASES[name]
    return distribution(TARGET, np.arange(VOCAB), p, masked), distribution(DRAFT, IDS, p, masked)


class Draws:
    """Draws of one case through a library, at positions 0, 1, ...: `counts` [VOCAB], `accepted` drafts."""

    def __init__(self, library, name: str, mode: str, n: int = DRAWS):
        p, masked = CASES[name]
        ffi = abi.ffi
        c = abi.new("bw24_sampler")
        for field in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
            setattr(c, field, getattr(p, field))
        bias = ffi.new("int32_t[]", list(p.logit_bias)), ffi.new("float[]", list(p.logit_bias.values()))
        c.n_bias, c.bias_ids, c.bias_values = len(p.logit_bias), *bias
        self._bits = mask_of(ALLOWED, VOCAB)
        target, draft = (ffi.cast("float *", ffi.from_buffer(a)) for a in (TARGET, DRAFT))
        ids, past = ffi.cast("int32_t *", ffi.from_buffer(IDS)), ffi.new("int32_t[]", HISTORY)
        mask = ffi.cast("uint32_t *", ffi.from_buffer(self._bits)) if masked else ffi.NULL
        shared = (c, past, len(HISTORY))
        one, two = ffi.new("int32_t *"), ffi.new("int32_t *")
        out, self.accepted = [0] * VOCAB, 0
        status = 0
        for at in range(n):
            if mode == "race":
                status |= library.bw24_sample(target, VOCAB, *shared, at, mask, two, ffi.NULL)
            else:
                status |= library.bw24_sample_draft(draft, ROWS, ids, VOCAB, *shared, at, mask, one)
                status |= library.bw24_sample_reject(target, VOCAB, draft, ROWS, ids, *shared, at, mask, one[0], two)
                self.accepted += one[0] == two[0]
            out[two[0]] += 1
        assert status == 0
        self.counts, self.n = np.array(out), n

    def too_far(self, exact: dict[int, Fraction]) -> str | None:
        """What is wrong with the counts: a token that cannot come, or a total variation beyond chance; else None.

        The variation of right draws has a mean of at most sum sqrt(p (1 - p) / n) / 2, and each draw moves it by at most 1 / n, so it exceeds
        mean + sqrt(ln(1 / RISK) / (2 n)) with a probability below RISK (McDiarmid).
        """
        p = np.array([float(exact.get(i, 0)) for i in range(VOCAB)])
        if strangers := np.flatnonzero((p == 0) & (self.counts > 0)).tolist():
            return f"tokens {strangers} have no mass"
        found = float(np.abs(self.counts / self.n - p).sum() / 2)
        bound = float(np.sqrt(p * (1 - p) / self.n).sum() / 2) + math.sqrt(math.log(1 / RISK) / (2 * self.n))
        return None if found <= bound else f"total variation {found:.4f}, chance allows {bound:.4f}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["race", "reject"])
def test_draws_have_the_exact_distribution(mode: str, name: str):
    target, draft = exact_of(name)
    found = Draws(abi.lib(), name, mode)
    assert found.too_far(target) is None
    if mode == "reject":
        rate = float(sum(min(share, draft.get(i, 0)) for i, share in target.items()))  # sum of min(p, q)
        assert 0.3 < rate < 0.95  # both outcomes are seen
        assert abs(found.accepted / found.n - rate) < math.sqrt(math.log(2 / RISK) / (2 * found.n))


def test_the_modes_differ_in_draws_not_in_distribution():
    """What makes the first mode exact for every K makes it accept less: drafts are the target's own picks or nothing."""
    p, _ = CASES["temperature"]
    race = [(sample(TARGET, p, HISTORY, at), sample(DRAFT, p, HISTORY, at, ids=IDS, n_vocab=VOCAB)) for at in range(4000)]
    drafts = [propose(DRAFT, p, HISTORY, at, ids=IDS, n_vocab=VOCAB) for at in range(4000)]
    judged = [judge(TARGET, DRAFT, x, p, HISTORY, at, ids=IDS) for at, x in enumerate(drafts)]
    both = [np.mean([a == b for a, b in pairs]) for pairs in (race, list(zip(judged, drafts, strict=True)))]
    assert 0.3 < both[0] < both[1]


FAULTS = {30: ("top-k", "reject"), 31: ("top-p", "reject"), 32: ("penalties", "reject"), 33: ("min-p", "reject"), 34: ("top-k", "race")}


@pytest.mark.parametrize("number", FAULTS)
def test_broken_samplers_are_told_apart(number: int):
    """Acceptance without the sums; one variate for acceptance and residual; penalties the draft was not drawn with; a residual that forgets q; a
    race without its last runner."""
    library = abi.ffi.dlopen(str(build(number)))
    name, mode = FAULTS[number]
    assert Draws(library, name, mode, DRAWS * 2 // 5).too_far(exact_of(name)[0]) is not None


# ---- whole rounds

STATES, K, LENGTH = 5, 2, 3
CHAIN = (_rng.normal(size=(STATES, STATES)) * 1.2).astype(np.float32)  # row a: logits of the token after a
GUESS = (CHAIN + _rng.normal(size=(STATES, STATES)) * 0.8).astype(np.float32)


def rounds(library, draws: int) -> np.ndarray:
    """How often each reply of LENGTH tokens came, [STATES] * LENGTH, one reply a seed, in rounds of K drafts from the chain GUESS."""
    ffi, c, one = abi.ffi, abi.new("bw24_sampler"), abi.ffi.new("int32_t *")
    c.temperature, c.repetition_penalty, c.top_p, c.min_p = 0.9, 1.0, 1.0, 0.05
    target, draft = ([ffi.cast("float *", ffi.from_buffer(row)) for row in table] for table in (CHAIN, GUESS))
    null, out = ffi.NULL, np.zeros((STATES,) * LENGTH, np.int64)
    for seed in range(draws):
        c.seed, tokens = seed, [0]
        while len(tokens) <= LENGTH:
            at, drafts = len(tokens), [tokens[-1]]
            for i in range(K):
                library.bw24_sample_draft(draft[drafts[-1]], STATES, null, STATES, c, null, 0, at + i, null, one)
                drafts.append(one[0])
            for i in range(K):
                before, mine = target[drafts[i]], draft[drafts[i]]
                library.bw24_sample_reject(before, STATES, mine, STATES, null, c, null, 0, at + i, null, drafts[i + 1], one)
                tokens.append(one[0])
                if one[0] != drafts[i + 1]:
                    break
            else:
                library.bw24_sample(target[tokens[-1]], STATES, c, null, 0, at + K, null, one, null)
                tokens.append(one[0])
        out[tuple(tokens[1 : LENGTH + 1])] += 1
    return out


def joint_excess(library, n: int = 100_000) -> float:
    """Total variation of n replies from the exact joint distribution, less what chance allows."""
    p = SamplingParams(temperature=0.9, min_p=0.05)
    step = np.zeros((STATES, STATES))
    for before, row in enumerate(CHAIN):
        logits = [float(x) for x in row]
        w = weights(logits, list(range(STATES)), p.temperature)
        kept = survivors(w, logits, p)
        for i in kept:
            step[before, i] = w[i] / sum(w[j] for j in kept)
    exact = step[0][:, None, None] * step[:, :, None] * step[None, :, :]
    bound = float(np.sqrt(exact * (1 - exact) / n).sum() / 2) + math.sqrt(math.log(1 / RISK) / (2 * n))
    assert bound < 0.03
    return float(np.abs(rounds(library, n) / n - exact).sum() / 2) - bound


def test_rounds_have_the_exact_joint_distribution():
    """Rejected rounds leave positions whose drafts were drawn and thrown away; the tokens that come there later must not know of them."""
    assert joint_excess(abi.lib()) <= 0


def test_broken_rounds_are_told_apart():
    assert joint_excess(abi.ffi.dlopen(str(build(31)))) > 0


# ---- single judgements


def test_greedy_judgements():
    """At temperature 0 a draft is accepted where it is the target's first choice, and the token is that choice in any case."""
    best = int(TARGET.argmax())
    p = SamplingParams()
    assert propose(DRAFT, p, [], 3, ids=IDS, n_vocab=VOCAB) == IDS[DRAFT.argmax()]
    assert judge(TARGET, TARGET, best, p, [], 3) == best
    other = np.roll(TARGET, 1)
    assert judge(TARGET, other, int(other.argmax()), p, [], 3) == best


def test_equal_distributions_accept_every_draft():
    p = CASES["all"][0]
    for at in range(2000):
        draft = propose(TARGET, p, HISTORY, at)
        assert judge(TARGET, TARGET, draft, p, HISTORY, at) == draft


def test_judgements_repeat_and_take_any_row_order():
    p = CASES["penalties"][0]
    order = np.random.default_rng(1).permutation(ROWS)
    for at in range(300):
        draft = propose(DRAFT, p, HISTORY, at, ids=IDS, n_vocab=VOCAB)
        assert draft == propose(DRAFT[order], p, HISTORY, at, ids=IDS[order], n_vocab=VOCAB)
        first = judge(TARGET, DRAFT, draft, p, HISTORY, at, ids=IDS)
        assert first == judge(TARGET, DRAFT[order], draft, p, HISTORY, at, ids=IDS[order])


def test_rows_without_a_token():
    """Spare rows of a head, id -1, never come, whatever their logits."""
    p = CASES["all"][0]
    spare = np.concatenate([IDS, np.full(3, -1, np.int32)]), np.concatenate([DRAFT, np.array([9, np.inf, np.nan], np.float32)])
    for at in range(200):
        one = propose(DRAFT, p, HISTORY, at, ids=IDS, n_vocab=VOCAB)
        assert one == propose(spare[1], p, HISTORY, at, ids=spare[0], n_vocab=VOCAB)
        assert judge(TARGET, DRAFT, one, p, HISTORY, at, ids=IDS) == judge(TARGET, spare[1], one, p, HISTORY, at, ids=spare[0])
        assert sample(DRAFT, p, HISTORY, at, ids=IDS, n_vocab=VOCAB) == sample(spare[1], p, HISTORY, at, ids=spare[0], n_vocab=VOCAB)
    with pytest.raises(Bw24Error, match="no logit stands for a token"):
        sample(DRAFT, p, [], 0, ids=np.full(ROWS, -1, np.int32), n_vocab=VOCAB)


def test_what_is_refused():
    p = SamplingParams(temperature=1.0)
    absent = next(i for i in range(VOCAB) if i not in IDS)
    with pytest.raises(Bw24Error, match=f"draft token {absent} has no mass"):
        judge(TARGET, DRAFT, absent, p, [], 0, ids=IDS)
    with pytest.raises(Bw24Error, match="row 0 stands for token 40, outside 0..39"):
        propose(DRAFT, p, [], 0, ids=np.full(ROWS, VOCAB, np.int32), n_vocab=VOCAB)
    with pytest.raises(Bw24Error, match="28 logits of 40 tokens without their ids"):
        judge(TARGET, DRAFT, 1, p, [], 0)
    with pytest.raises(Bw24Error, match="ids: expected 28, found 27"):
        propose(DRAFT, p, [], 0, ids=IDS[1:], n_vocab=VOCAB)
    with pytest.raises(Bw24Error, match="Inf or NaN"):
        judge(TARGET, DRAFT * np.float32(np.nan), 1, p, [], 0, ids=IDS)
    with pytest.raises(Bw24Error, match="allows no token"):
        propose(DRAFT, p, [], 0, np.zeros(2, np.uint32), ids=IDS, n_vocab=VOCAB)
