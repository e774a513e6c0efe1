"""Signed tokens (JWT) of an identity provider, as a second kind of key. Optional.

Owns `TokenVerifier`, asked by ``auth.py`` for credentials of three dot-separated parts that are no key,
and `KeySet`, the provider's public keys.

Decided here:

- Asymmetric signatures only. A JWKS is public: with HS256 anyone could sign, so secret-key algorithms
  and ``none`` are not even looked at.
- Issuer, audience and expiry are always checked; the tenant is a claim's value.
- The provider's keys are fetched off the loop, kept, and renewed when they are old or when a token names
  an unknown one, at most once in `MIN_GAP_S`: made-up key ids cannot make us hammer the provider.
- While the provider cannot be reached the keys we have go on working for `STALE_S`. Without any, we cannot
  know whether a token is good: the answer is 503 with ``Retry-After``, since a 401 would tell the client
  to throw away a good token.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jwt

from ..core.errors import Outcome, Rejected
from ..core.record import Key, Principal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ..tenants import TenantBook

ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
"""Signatures that a key of each type can make. The type is the provider's word; a token's is not taken."""
ASYMMETRIC = frozenset(chain.from_iterable(ALGORITHMS.values()))
REFRESH_S = 300.0
"""Seconds until the keys are asked for again: how long a withdrawn one may still be trusted."""
STALE_S = 3600.0
"""Seconds for which old keys serve while the provider cannot be reached."""
MIN_GAP_S = 10.0
"""Seconds between two fetches, whatever happens."""
FETCH_TIMEOUT_S = 5.0
LEEWAY_S = 30.0
"""Seconds that the provider's clock and ours may differ."""
LARGEST_JWKS = 1 << 20
"""Bytes."""


class KeySetUnavailable(Exception):
    """The provider's keys cannot be had now."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("the keys of the token issuer cannot be fetched")
        self.retry_after_s = retry_after_s


class KeySet:
    """The public keys of a provider (JWKS), from an address or a file."""

    def __init__(self, source: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._monotonic = monotonic
        # The mutable state, changed only under the lock.
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._fetched_s = -math.inf
        self._tried_s = -math.inf
        self._one_at_a_time = asyncio.Lock()

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """The key of that id; without an id, the only key there is. ``None`` if there is none.

        Raises:
            KeySetUnavailable: No keys young enough, and the provider does not answer.
        """
        if self._age_s() > REFRESH_S or self._pick(key_id) is None:
            async with self._one_at_a_time:
                await self._refresh()  # nothing, if whoever held the lock before has just done it
        if self._age_s() > STALE_S:
            gap_s = self._tried_s + MIN_GAP_S - self._monotonic()
            raise KeySetUnavailable(max(1, math.ceil(gap_s)))
        return self._pick(key_id)

    def _age_s(self) -> float:
        return self._monotonic() - self._fetched_s

    def _pick(self, key_id: str | None) -> jwt.PyJWK | None:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    async def _refresh(self) -> None:
        if self._monotonic() - self._tried_s < MIN_GAP_S:
            return
        self._tried_s = self._monotonic()
        try:
            self._keys = await asyncio.to_thread(_fetch, self._source)
        except (OSError, ValueError, HTTPException):
            return  # the old ones serve on, until they are stale
        self._fetched_s = self._monotonic()


class TokenVerifier:
    """Turns a provider's token into a principal."""

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        tenant_claim: str,
        keys: KeySet,
        algorithms: Collection[str] = ASYMMETRIC,
    ) -> None:
        """Accept tokens of one issuer for one audience; of `algorithms`, those in `ASYMMETRIC`."""
        self._issuer = issuer
        self._audience = audience
        self._tenant_claim = tenant_claim
        self._keys = keys
        self._algorithms = ASYMMETRIC.intersection(algorithms)

    async def verify(self, token: str, book: TenantBook) -> Principal | None:
        """Whose token this is; ``None`` if it is not a good one.

        Raises:
            Rejected: 403, it names no tenant of ours; 503, it cannot be checked now.
        """
        claims = await self._claims(token)
        if claims is None:
            return None
        name = claims.get(self._tenant_claim)
        tenant = book.by_id(name) if isinstance(name, str) else None
        if tenant is None:
            raise Rejected(
                Outcome.FORBIDDEN,
                f"The token's claim {self._tenant_claim!r} does not name a tenant of this service.",
                code="unknown_tenant",
            )
        # Its subject is often a person's address: not for logs, so all tokens share one key id.
        return Principal(Key("jwt"), tenant)

    async def _claims(self, token: str) -> Mapping[str, Any] | None:
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in self._algorithms:
                return None  # before a key is looked for: nothing is fetched for it
            key = await self._keys.find(header.get("kid"))
            if key is None:
                return None
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=ALGORITHMS[key.key_type or ""],
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except KeySetUnavailable as error:
            raise Rejected(
                Outcome.UNAUTHENTICATED,
                "The token cannot be checked now: its issuer's keys are not available. Try again.",
                code="token_issuer_unavailable",
                status=503,
                retry_after_s=error.retry_after_s,
            ) from None
        except jwt.PyJWTError:
            return None
        return claims


def _fetch(source: str) -> Mapping[str | None, jwt.PyJWK]:
    """Read a JWKS. Runs in a thread. Raises OSError, ValueError or HTTPException."""
    if source.startswith(("https://", "http://")):
        with urllib.request.urlopen(source, timeout=FETCH_TIMEOUT_S) as response:
            raw = response.read(LARGEST_JWKS)
    else:
        raw = Path(source).read_bytes()
    document = json.loads(raw)
    if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
        raise ValueError("not a JWKS")
    return {key.key_id: key for key in _usable(document["keys"])}


def _usable(entries: list[Any]) -> Iterator[jwt.PyJWK]:
    """The keys that can check a signature. A provider may list others, or withdraw all it has."""
    for entry in entries:
        try:
            key = jwt.PyJWK.from_dict(entry)
        except (jwt.PyJWTError, ValueError, TypeError, AttributeError):
            continue  # of a kind that PyJWT does not know, or not a key at all
        # "oct" keys are secrets, which have no place in a JWKS; "enc" ones do not sign.
        if key.key_type in ALGORITHMS and key.public_key_use != "enc":
            yield key
