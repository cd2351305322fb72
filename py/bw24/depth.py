"""How many tokens to draft: the number that promises most tokens a second, by measured acceptance and measured cost. Owns the estimates and when to
try a depth again; knows no engine and no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

AUTO_K = 8  # most drafts a round where they are not given
PRIOR, WEIGHT = 0.6, 2.0  # acceptance before anything was judged, and how many judgements that counts for
SLOW = 1 / 24  # weight of a judgement once there are many
LASTING = 1 / 128  # of a judgement in what replies leave to the next
TRIED = 1 / 8  # of one that was made to see whether drafts have become better
GAIN = 1.02  # drafting must promise this much more than plain decoding
AGAIN, SELDOM = 32, 512  # rounds without drafts before one is tried: at first, and at most
REGRET = 0.01  # of the time of plain steps that several replies share, what trying drafts may cost them
KEEP = 4  # rounds for which a plan is kept
PLAIN_EVERY = 96  # rounds after which a plain step is measured again
PLAIN_STEPS = 3  # in a row, of which the first finds the caches full of the drafter's weights
COLD = 3  # times that a form may be slow at first: code and pages are touched, on a card its graph is made


class Costs:
    """Seconds of a draft step and of the model's step by its rows, and the share of drafts accepted: running means of one engine, which its
    replies share."""

    def __init__(self) -> None:
        self._draft: dict[int, tuple[float, int]] = {}  # by replies in a round: seconds, rounds that it was measured in
        self.steps: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        self.drafts = 0  # rounds with drafts
        self._drafted = True  # in the round before
        self.kept: list[float] = []  # acceptance by position in the replies so far: what the next one begins with
        self._judged: list[int] = []
        self._asked: dict[int, int] = {}  # replies in a round -> their choices since the last plain steps
        self._spare = 0.0  # seconds that may be lost to a try
        self.plan: tuple[list[Depth], int, list[int], bool] = [], 0, [], False  # of replies in one round: who, its age in rounds, depths, hope

    @property
    def draft(self) -> float | None:
        """Seconds of a draft step of one reply, or of as few as were measured; None before the first."""
        return self.draft_of(1) if self._draft else None

    def draft_of(self, runs: int) -> float:
        """Seconds of a draft step that so many replies share, as measured for the nearest number of them. Something was measured."""
        known = [n for n, (_, count) in self._draft.items() if count >= COLD] or list(self._draft)
        return self._draft[min(known, key=lambda n: (abs(n - runs), n))][0]

    def due(self, runs: int) -> bool:
        """Whether the plain step of so many replies is to be measured, for the first time or again; asked by each of them in each round, so that all
        are plain together."""
        asked = self._asked.get(runs, 0) + 1
        self._asked[runs] = asked if asked < (PLAIN_EVERY + PLAIN_STEPS) * runs else 0
        return asked > PLAIN_EVERY * runs or self.counts.get(runs, 0) < 3

    def tries(self, runs: int) -> int:
        """Where drafts do not pay for replies that share plain steps: rounds until each may make one, in case they have become better."""
        kept, plain = self.kept[0] if self.kept else PRIOR, self.step(runs)
        regret = max(self.draft_of(runs) + self.step(2 * runs) - (1 + kept) * plain, AGAIN * REGRET * plain)
        return math.ceil((regret - self._spare) / (REGRET * plain)) if self._spare < regret else 0

    def measuring(self, runs: int) -> None:
        """All plain steps that are due are made in one call."""
        self._asked[runs] = 0

    def followed(self, runs: int, rounds: int) -> None:
        """So many rounds of so many replies were made after one that was chosen."""
        who, age, plan, hope = self.plan
        self.plan = who, age + rounds, plan, hope
        if (asked := self._asked.get(runs, 0)) < PLAIN_EVERY * runs:
            self._asked[runs] = min(asked + rounds * runs, PLAIN_EVERY * runs)

    def judged(self, at: int, accepted: bool) -> None:
        """Draft `at` of some reply's round was the next token, or not."""
        if at == len(self.kept):
            self.kept.append(self.kept[-1] if self.kept else PRIOR)
            self._judged.append(int(WEIGHT))
        if at < len(self.kept):
            self._judged[at] += 1
            self.kept[at] += max(1 / self._judged[at], LASTING) * (accepted - self.kept[at])

    def timed(self, drafts: int, rows: int, drafting: float, step: float, steps: int = 1, runs: int = 1) -> None:
        """A round of `runs` replies with chains of `drafts` drafts, whose judging step had `rows` rows; or `steps` plain ones of so many."""
        self._spare = 0.0 if drafts else self._spare + REGRET * step * steps
        if drafts:
            self.drafts += 1
            old, count = self._draft.get(runs, (None, 0))
            self._draft[runs] = _mean(old, drafting / drafts, count + 1), count + 1
        if drafts or not self._drafted:  # a plain step after drafts finds its weights gone from the caches
            self.counts[rows] = self.counts.get(rows, 0) + 1
            self.steps[rows] = _mean(self.steps.get(rows), step, self.counts[rows])
        self._drafted = drafts > 0

    def step(self, rows: int) -> float:
        """Seconds of a step: as measured; between two measured widths by their line; beyond the widest by two thirds of the slope to it, so
        that wider steps are tried; below the narrowest as that one. A width that was measured a few times only counts where no other is known.
        Something was measured."""
        known = {w: s for w, s in self.steps.items() if self.counts[w] >= COLD} or self.steps
        if rows in known:
            return known[rows]
        below, above = max((w for w in known if w < rows), default=None), min((w for w in known if w > rows), default=None)
        if below is None:
            return known[above]
        if above is None:
            least = min(known)
            slope = (known[below] - known[least]) / (below - least) if below > least else 0.0
            return known[below] + max(slope, 0.0) * (rows - below) * 2 / 3
        share = (rows - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share


def _mean(old: float | None, new: float, n: int) -> float:
    """The n-th of a row of measurements and what was made of those before it: the least of the first ones, then a running mean that a single
    disturbed one moves little."""
    if old is None:
        return new
    return min(old, new) if n <= COLD else 0.85 * old + 0.15 * min(new, 1.5 * old)


class Depth:
    """The depth of one reply's rounds, at most `top`."""

    def __init__(self, top: int, costs: Costs | None = None):
        self.top, self.costs = top, costs or Costs()
        self._sums: list[float] = self.costs.kept[:top]  # acceptance by position, of positions that were judged
        self._counts: list[float] = [WEIGHT] * len(self._sums)
        self._idle = 0  # rounds without drafts since the last with
        self._wait = AGAIN
        self._trying = self._hope = False
        self._best, self._runs, self._age = 0, 0, KEEP  # the plan in force, and its age in rounds
        self._sure = self._steady = 1

    def kept(self, at: int) -> float:
        """Estimated share of judged drafts at position `at` that are accepted; as the deepest judged one before it where none was judged."""
        if at < len(self._sums):
            return self._sums[at]
        return self._sums[-1] if self._sums else PRIOR

    def choose(self, runs: int = 1) -> int:
        """Drafts for the next round, where `runs` replies share the steps."""
        self._sure = self._steady = 1
        if self.top < 1:
            self._sure = SELDOM
            return 0
        if self.costs.due(runs):
            return 0
        if self.costs.draft is None or self.costs.drafts < COLD:
            return min(2, self.top)
        self._age += 1
        if self._age >= KEEP or runs != self._runs:
            self._age, self._runs, (self._best, self._hope) = 0, runs, self.plan(runs)
        if self._best:
            self._idle = 0
            if self._best <= len(self._sums):
                self._steady = KEEP - self._age
            return min(self._best, len(self._sums) + 1) if self._sums else min(self._best, 2)
        return self._try(self._hope)

    def plain_rounds(self) -> int:
        """After `choose` gave 0: how many rounds from that one on make no drafts, whatever is measured meanwhile."""
        return self._sure

    def steady(self) -> int:
        """After `choose` gave drafts: how many rounds from that one on keep their number, whatever is measured meanwhile."""
        return self._steady

    def followed(self, rounds: int) -> None:
        """So many rounds with drafts ran after the one that was chosen."""
        self._age += rounds
        self.costs.followed(self._runs, rounds)

    def passed(self, rounds: int) -> None:
        """So many rounds without drafts ran after the one that was chosen."""
        self._idle += rounds

    def plan(self, runs: int = 1) -> tuple[int, bool]:
        """The depth that promises most tokens a second, 0 where none promises enough; and whether drafts that are always right would pay."""
        chain = tokens = 1.0
        best, hope, most = 0, False, GAIN / self.costs.step(runs)
        least = most
        for k in range(1, self.top + 1):
            chain *= self.kept(k - 1)
            tokens += chain
            cost = k * self.costs.draft + self.costs.step(runs * (k + 1))
            hope = hope or k + 1 >= least * cost
            if tokens >= most * cost:
                best, most = k, tokens / cost
        return best, hope

    def _try(self, hope: bool) -> int:
        """Where drafts do not pay: one now and then, in case they have become better. hope: whether drafts that are always right would pay."""
        self._idle += 1
        wait = self._wait if hope else SELDOM
        if self._idle < wait:
            self._sure = wait - self._idle
            return 0
        self._idle, self._trying = 0, True
        return 1

    def judged(self, at: int, accepted: bool) -> None:
        """Draft `at` of a round was the next token, or not."""
        self.costs.judged(at, accepted)
        if at == len(self._sums):
            self._sums.append(self.kept(at))
            self._counts.append(WEIGHT)
        if at < len(self._sums):
            self._counts[at] += 1
            least = TRIED if self._trying else SLOW
            self._sums[at] += max(1 / self._counts[at], least) * (accepted - self._sums[at])
        if at == 0 and self._trying:
            self._trying = False
            self._idle = SELDOM if accepted and self._hope else 0  # one that was right is followed by another
            self._wait = self._wait if accepted else min(2 * self._wait, SELDOM)
            self._age = KEEP


def choose_together(depths: Sequence[Depth]) -> list[int]:
    """Drafts of each of several replies for the round that they share: those of most worth, as many as promise most tokens a second of all."""
    n, costs = len(depths), depths[0].costs
    if n == 1:
        return [depths[0].choose()]
    top = min(d.top for d in depths)
    due = [costs.due(n) for _ in depths][-1]
    wide = top > 0 and not due and (costs.draft is None or costs.drafts < COLD)
    if top < 1 or due or wide:
        if due:
            costs.measuring(n)
        return _agreed(depths, [min(2, top) if wide else 0] * n, SELDOM if top < 1 else PLAIN_STEPS)
    who, age, plan, hope = costs.plan
    if age >= KEEP or len(who) != n or any(a is not b for a, b in zip(who, depths, strict=True)):
        age, (plan, hope) = 0, plan_together(depths, top)
    costs.plan = list(depths), age + 1, plan, hope
    if any(plan):
        return _agreed(depths, plan, 1, KEEP - age)
    wait = costs.tries(n) if hope else SELDOM
    if wait:
        return _agreed(depths, plan, wait)
    costs.plan = [], 0, [], False  # what is found out decides at once
    return _agreed(depths, [1] * n, 1)


def kept_together(depths: Sequence[Depth], at: int) -> list[float]:
    """Each reply's acceptance at a position: its own estimate as far as the replies differ by more than what so few judgements vary by, for the rest
    the mean of all. Otherwise the drafts chosen would be those of the luckiest."""
    own = [d.kept(at) for d in depths]
    mean = sum(own) / len(own)
    varies = sum((p - mean) ** 2 for p in own) / len(own)
    judged = sum(min(d._counts[min(at, len(d._counts) - 1)], 2 / SLOW) if d._counts else WEIGHT for d in depths) / len(depths)
    share = max(1 - mean * (1 - mean) / judged / varies, 0.0) if varies > 0 else 0.0
    return [mean + share * (p - mean) for p in own]


def _agreed(depths: Sequence[Depth], drafts: list[int], sure: int, steady: int = 1) -> list[int]:
    for depth in depths:
        depth._sure, depth._steady = sure, steady
    return drafts


def plan_together(depths: Sequence[Depth], top: int) -> tuple[list[int], bool]:
    """The depth of each reply, all 0 where nothing promises enough; and whether drafts that are always right would pay. A round costs by its deepest
    chain and by the rows of all, so of all drafts the likeliest are made."""
    n, costs, worth = len(depths), depths[0].costs, []
    plain, draft = costs.step(n), costs.draft_of(n)
    chains = [1.0] * n
    for k in range(top):
        for i, kept in enumerate(kept_together(depths, k)):
            chains[i] *= kept
            if k <= len(depths[i]._sums):  # no deeper than one beyond what was judged
                worth.append((-chains[i], k, i))
    tokens, best, most, deepest, taken = float(n), 0, GAIN * n / plain, 0, sorted(worth)
    for made, (chain, k, _) in enumerate(taken, 1):
        tokens, deepest = tokens - chain, max(deepest, k + 1)
        cost = deepest * draft + costs.step(n + made)
        if tokens >= most * cost:
            best, most = made, tokens / cost
    drafts = [0] * n
    for _, _, i in taken[:best]:
        drafts[i] += 1
    hope = any(n * (k + 1) >= GAIN * n / plain * (k * draft + costs.step(n * (k + 1))) for k in range(1, top + 1))
    return drafts, hope
