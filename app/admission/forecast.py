"""What a request will probably cost, and whether there is room for it: lengths, KV peak, first token.

Owns three estimates, each fed by facts and each bounded in memory:

* `Lengths`: how many tokens a tenant's answers have. Charged before they are known, since a charge
  that comes late is the main source of unfairness: on VTC's own traces (Sheng et al., OSDI '24) an exact
  expected cost narrows the gap between two backlogged clients 21-fold, one that is off by half still 4-fold.
* `KvForecast`: the most KV tokens that the running set will hold at once, if each ends as expected. The
  rule of Past-Future scheduling (Gong et al., arXiv:2507.10150): a request is not sent if the set would
  outgrow the cache, because what the engine then throws away it must compute again.
* `FirstToken`: seconds until a first token, from measured rates, scaled so that nine of ten
  predictions hold (conformal scaling; the coverage is itself measured).

Called by ``admission.py`` at arrival, dispatch and release, and once per engine step. No await, no clock.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .costs import INPUT_COST, cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..core.facts import EngineSignals
    from ..core.record import PriorityClass

_PRIOR_TOKENS = 256
"""Expected output of a class that nobody has used yet, if the request allows so much."""
_HISTORY = 64
"""Answers remembered per tenant and size of request."""
_TENANTS = 20_000
"""Histories kept; the one unused for longest goes first."""


class Lengths:
    """Expected output tokens by tenant and by the size that the request allows."""

    def __init__(self) -> None:
        # All mutable state
        self._histories: OrderedDict[tuple[str, int], _History] = OrderedDict()
        self._priors: dict[PriorityClass, _History] = {}

    def __repr__(self) -> str:
        return f"<Lengths of {len(self._histories)} kinds of request>"

    def expected(self, tenant_id: str, priority_class: PriorityClass, max_new_tokens: int) -> int:
        """Tokens that one sequence will probably have; never above what it may have.

        A request without a limit of its own is thereby charged what such requests came to, not the
        context window.
        """
        history = self._histories.get((tenant_id, _bucket(max_new_tokens))) or self._priors.get(
            priority_class
        )
        return min(max_new_tokens, history.mean if history else _PRIOR_TOKENS)

    def learn(self, tenant_id: str, priority_class: PriorityClass, max_new_tokens: int, tokens: int) -> None:
        """An answer that ended by itself had so many tokens."""
        key = (tenant_id, _bucket(max_new_tokens))
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History()
            if len(self._histories) > _TENANTS:
                self._histories.popitem(last=False)
        else:
            self._histories.move_to_end(key)
        history.add(tokens)
        self._priors.setdefault(priority_class, _History()).add(tokens)


class _History:
    """The last answers' lengths, and their mean."""

    __slots__ = ("_sum", "_tokens", "mean")

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()
        self._sum = 0
        self.mean = 1

    def add(self, tokens: int) -> None:
        self._tokens.append(tokens)
        self._sum += tokens
        if len(self._tokens) > _HISTORY:
            self._sum -= self._tokens.popleft()
        self.mean = max(1, math.ceil(self._sum / len(self._tokens)))


def _bucket(max_new_tokens: int) -> int:
    """Requests that allow about the same: one bucket per power of two."""
    return max_new_tokens.bit_length()


@dataclass(slots=True, eq=False)
class Growth:
    """One running request as its KV cache sees it. A sequence makes a token a step."""

    prompt_tokens: int
    sequences: int
    expected_tokens: int
    """Output per sequence, as forecast."""
    max_new_tokens: int
    started_step: int

    def made(self, step: int) -> int:
        """Output tokens per sequence by now, at most: a request that waits inside the engine makes none."""
        return min(step - self.started_step, self.max_new_tokens)

    def used(self, step: int) -> int:
        """KV tokens held by now, at most."""
        return self.prompt_tokens + self.sequences * self.made(step)

    def remaining(self, step: int) -> int:
        """Output tokens per sequence still to come, probably.

        A request that has outlived its forecast is expected to go on for a quarter of its age: lengths
        are heavy-tailed, so that what has lived long lives longer (a point guess would say 0).
        """
        made = self.made(step)
        return min(self.max_new_tokens - made, max(self.expected_tokens - made, made // 4, 1))

    @property
    def most(self) -> int:
        """KV tokens that it can ever hold."""
        return self.prompt_tokens + self.sequences * self.max_new_tokens


class KvForecast:
    """The KV peak of one rank's running set.

    Args:
        kv_tokens: Tokens that the rank's cache holds; 0 where there is none to fill.
        spare: Share of it that is left free.
    """

    def __init__(self, kv_tokens: int, *, spare: float = 0.02) -> None:
        self._room = int(kv_tokens * (1 - spare)) if kv_tokens else sys.maxsize
        # All mutable state: the set, its worst case, its expected peak as of the last step
        self._running: set[Growth] = set()
        self._most = 0
        self._peak = 0
        self.step = 0
        """Engine steps so far."""

    def __len__(self) -> int:
        return len(self._running)

    def __repr__(self) -> str:
        return f"<KvForecast {self._peak} of {self._room} tokens, {len(self._running)} running>"

    @property
    def peak_tokens(self) -> int:
        """Expected peak, tokens."""
        return self._peak

    def fits(self, prompt_tokens: int, sequences: int, expected_tokens: int, max_new_tokens: int) -> bool:
        """Whether one more request leaves the peak within the cache. An empty engine takes anything."""
        if not self._running or self._most + prompt_tokens + sequences * max_new_tokens <= self._room:
            return True
        return self._peak + prompt_tokens + sequences * expected_tokens <= self._room

    def add(self, prompt_tokens: int, sequences: int, expected_tokens: int, max_new_tokens: int) -> Growth:
        """The request is sent. Until the next step its whole expected size counts on top of the peak."""
        growth = Growth(prompt_tokens, sequences, expected_tokens, max_new_tokens, self.step)
        self._running.add(growth)
        self._most += growth.most
        self._peak += prompt_tokens + sequences * expected_tokens
        return growth

    def remove(self, growth: Growth) -> None:
        """The request has ended. The peak is worked out anew at the next step."""
        self._running.remove(growth)
        self._most -= growth.most
        self._peak = min(self._peak, self._most)

    def on_step(self) -> None:
        """One engine step has passed."""
        self.step += 1
        # Where even the worst case fits, nobody asks for the peak.
        self._peak = self._most if self._most <= self._room else peak(self._running, self.step)


def peak(running: Iterable[Growth], step: int) -> int:
    """The most KV tokens held at once, if each request ends as forecast.

    With the requests in falling order of what remains, ``peak = max_k(rem_k * seqs_1..k + used_1..k)``: at
    the moment when the k-th ends, those after it are gone and those before it have grown as much as it has.
    """
    ordered = sorted(((g.remaining(step), g.sequences, g.used(step)) for g in running), reverse=True)
    highest = sequences = used = 0
    for remaining, n, held in ordered:
        sequences += n
        used += held
        highest = max(highest, remaining * sequences + used)
    return highest


class FirstToken:
    """Seconds until a request's first token.

    Work ahead over the measured rate, plus its own prefill, times a factor that is raised when
    predictions were too short and lowered when they were too long, until nine of ten hold.
    """

    COVERAGE = 0.9
    _RATE_S = 5.0  # time constant of the measured rate
    _WINDOW = 256

    def __init__(self, *, ranks: int = 1) -> None:
        self._ranks = ranks
        # All mutable state: cost per second of one busy rank, the factor, which predictions held
        self._rate = 0.0
        self._factor = 1.0
        self._held: deque[bool] = deque(maxlen=self._WINDOW)
        self._last_s: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<FirstToken {self.units_per_s:.0f} units/s, {self.coverage:.0%} of predictions held>"

    @property
    def units_per_s(self) -> float:
        """Cost that all ranks compute per second while they are busy; 0 before anything is known."""
        return self._rate * self._ranks

    @property
    def coverage(self) -> float:
        """Share of the last predictions that held."""
        return sum(self._held) / len(self._held) if self._held else 1.0

    def on_step(self, signals: EngineSignals) -> None:
        """Measure the rate over the gap between two busy steps."""
        last_s = self._last_s.get(signals.rank)
        if signals.running == 0:
            self._last_s.pop(signals.rank, None)  # an idle gap says nothing about speed
            return
        self._last_s[signals.rank] = signals.at_s
        if last_s is None or signals.at_s <= last_s:
            return
        gap_s = signals.at_s - last_s
        units = cost(signals.prefill_tokens, signals.decode_tokens)
        weight = 1 - math.exp(-gap_s / self._RATE_S)
        rate = units / gap_s
        self._rate = rate if self._rate == 0 else self._rate + weight * (rate - self._rate)

    def predict_s(self, work_ahead: int, prompt_tokens: int) -> float | None:
        """Seconds; ``None`` while no rate is known.

        Args:
            work_ahead: Cost that comes before it in fair order.
            prompt_tokens: Its own.
        """
        if self._rate == 0:
            return None
        # Others' work is shared out among the ranks; its own prompt is one rank's.
        return self._factor * (work_ahead / self._ranks + INPUT_COST * prompt_tokens) / self._rate

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """What became of a prediction. One step of online quantile tracking (Gibbs & Candès, 2021)."""
        held = actual_s <= predicted_s
        self._held.append(held)
        step = 0.05
        self._factor *= 1 - step * (1 - self.COVERAGE) if held else 1 + step * self.COVERAGE
        self._factor = min(max(self._factor, 0.1), 100.0)
