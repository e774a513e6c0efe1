"""Signed tokens: real keys, and a small provider on a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from app.core.errors import Outcome, Rejected
from app.core.record import Tenant
from app.http.tokens import MIN_GAP_S, REFRESH_S, STALE_S, KeySet, TokenVerifier
from app.tenants import TenantBook

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ISSUER, AUDIENCE = "https://issuer.example", "fairgate"
BOOK = TenantBook({"acme": Tenant("acme")})
RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def jwk(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, kid: str) -> dict[str, Any]:
    if isinstance(key, rsa.RSAPrivateKey):
        told = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        told = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**told, "kid": kid}


def signed(
    key: Any = RSA_KEY, *, kid: str | None = "r1", algorithm: str = "RS256", without: str = "", **claims: Any
) -> str:
    content = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "tenant": "acme", **claims}
    content.pop(without, None)
    return jwt.encode(content, key, algorithm, headers={"kid": kid} if kid else None)


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Provider:
    """An identity provider's JWKS address."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys = list(keys)
        self.fetches = 0
        self.status = 200
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[Provider]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.fetches += 1
                self.send_response(provider.status)
                self.end_headers()
                self.wfile.write(json.dumps({"keys": provider.keys}).encode())

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}/jwks"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def verifier(source: str, clock: Clock | None = None) -> TokenVerifier:
    keys = KeySet(source, monotonic=clock or Clock())
    return TokenVerifier(issuer=ISSUER, audience=AUDIENCE, tenant_claim="tenant", keys=keys)


@pytest.fixture
def jwks_file(tmp_path: Path) -> str:
    """A JWKS with one RSA and one EC key, and entries that may not count."""
    path = tmp_path / "jwks.json"
    secret = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I", "kid": "s1"}
    encrypting = {**jwk(OTHER_RSA_KEY, "enc"), "use": "enc"}
    keys = [jwk(RSA_KEY, "r1"), jwk(EC_KEY, "e1"), encrypting, secret, {"kty": "new"}, {"kty": "RSA"}, 7]
    path.write_text(json.dumps({"keys": keys}))
    return str(path)


@pytest.mark.parametrize(
    "token", [signed(), signed(algorithm="PS512"), signed(EC_KEY, kid="e1", algorithm="ES256")]
)
async def test_good_token_is_its_tenants(jwks_file: str, token: str) -> None:
    """RSA and elliptic curves; the subject is not in the key's id, which is logged."""
    principal = await verifier(jwks_file).verify(token, BOOK)
    assert principal is not None
    assert principal.tenant is BOOK.by_id("acme")
    assert principal.key.id == "jwt"
    assert not principal.is_operator


@pytest.mark.parametrize(
    "token",
    [
        signed(exp=time.time() - 3600),
        signed(nbf=time.time() + 3600),
        signed(iss="https://evil.example"),
        signed(aud="another service"),
        signed(without="exp"),
        signed(without="iss"),
        signed(without="aud"),
        signed(OTHER_RSA_KEY),
        signed(OTHER_RSA_KEY, kid="enc"),
        signed(kid="unknown"),
        signed(kid=None),
        signed(kid="e1"),
        signed(kid="s1"),
        signed(EC_KEY, kid="r1", algorithm="ES256"),
        signed("secret-secret-secret-secret-secr", kid="s1", algorithm="HS256"),
        signed("an RSA key's public text would do", algorithm="HS256"),
        signed(None, algorithm="none"),
        signed()[:-4] + "AAAA",
        "a.b.c",
        "..",
    ],
)
async def test_bad_token_is_nobodys(jwks_file: str, token: str) -> None:
    """Expired, of or for somebody else, unsigned, signed by another key or with another kind of key."""
    assert await verifier(jwks_file).verify(token, BOOK) is None


@pytest.mark.parametrize("claims", [{"tenant": "globex"}, {"tenant": ["acme"]}, {"without": "tenant"}])
async def test_token_of_no_tenant_is_forbidden(jwks_file: str, claims: dict[str, Any]) -> None:
    """The token is good, so it is no 401; the message names the claim to set."""
    with pytest.raises(Rejected, match="claim 'tenant'") as raised:
        await verifier(jwks_file).verify(signed(**claims), BOOK)
    assert raised.value.outcome is Outcome.FORBIDDEN


async def test_only_the_algorithms_of_the_settings_are_accepted(jwks_file: str) -> None:
    """They narrow; one with a shared secret cannot come in by them."""
    narrow = TokenVerifier(
        issuer=ISSUER,
        audience=AUDIENCE,
        tenant_claim="tenant",
        keys=KeySet(jwks_file),
        algorithms=["ES256", "HS256", "none"],
    )
    assert await narrow.verify(signed(EC_KEY, kid="e1", algorithm="ES256"), BOOK) is not None
    assert await narrow.verify(signed(), BOOK) is None
    secret = signed("secret-secret-secret-secret-secr", kid="s1", algorithm="HS256")
    assert await narrow.verify(secret, BOOK) is None


async def test_single_key_needs_no_id() -> None:
    """Small providers leave the id out."""
    with Provider(jwk(RSA_KEY, "r1")).serving() as provider:
        assert await verifier(provider.url).verify(signed(kid=None), BOOK) is not None


async def test_new_key_is_fetched_when_a_token_names_it_and_not_more_often_than_allowed() -> None:
    """The provider rotates its keys; made-up key ids cannot make us hammer it."""
    clock = Clock()
    with Provider(jwk(RSA_KEY, "r1")).serving() as provider:
        tokens = verifier(provider.url, clock)
        assert await tokens.verify(signed(), BOOK) is not None
        provider.keys = [jwk(OTHER_RSA_KEY, "r2")]
        rotated = signed(OTHER_RSA_KEY, kid="r2")
        assert await tokens.verify(rotated, BOOK) is None
        assert provider.fetches == 1
        clock.now_s += MIN_GAP_S
        assert await tokens.verify(rotated, BOOK) is not None
        assert await tokens.verify(signed(kid="made up"), BOOK) is None
        assert provider.fetches == 2


async def test_token_with_a_forbidden_algorithm_fetches_nothing() -> None:
    """What cannot be good costs no request to the provider."""
    with Provider().serving() as provider:
        assert await verifier(provider.url).verify(signed(None, algorithm="none"), BOOK) is None
        assert provider.fetches == 0


async def test_withdrawn_key_is_dropped_after_the_refresh() -> None:
    """Also if nobody asks for a new one."""
    clock = Clock()
    with Provider(jwk(RSA_KEY, "r1")).serving() as provider:
        tokens = verifier(provider.url, clock)
        assert await tokens.verify(signed(), BOOK) is not None
        provider.keys = []
        clock.now_s += REFRESH_S + 1
        assert await tokens.verify(signed(), BOOK) is None


async def test_unreachable_provider_is_a_503_only_when_no_young_key_is_left() -> None:
    """A 401 would tell the client to throw away a good token."""
    clock = Clock()
    with Provider(jwk(RSA_KEY, "r1")).serving() as provider:
        tokens = verifier(provider.url, clock)
        assert await tokens.verify(signed(), BOOK) is not None
        provider.status = 500
        clock.now_s += REFRESH_S + 1
        assert await tokens.verify(signed(), BOOK) is not None
        clock.now_s += STALE_S
        with pytest.raises(Rejected) as raised:
            await tokens.verify(signed(), BOOK)
        assert (raised.value.status, raised.value.retry_after_s) == (503, MIN_GAP_S)
        provider.status = 200
        clock.now_s += MIN_GAP_S
        assert await tokens.verify(signed(), BOOK) is not None


async def test_first_tokens_at_once_share_one_fetch() -> None:
    """A restart under load asks the provider once."""
    with Provider(jwk(RSA_KEY, "r1")).serving() as provider:
        tokens = verifier(provider.url)
        found = await asyncio.gather(*(tokens.verify(signed(), BOOK) for _ in range(20)))
        assert all(found)
        assert provider.fetches == 1
