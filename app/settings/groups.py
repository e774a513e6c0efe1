"""The gateway's own settings: server, auth, metrics, log.

Each group is a frozen model; ``schema.py`` puts them together. Every field says its unit in its
description, from which README's table and ``fairgate check`` are made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    SecretStr,
    field_validator,
    model_validator,
)

from .findings import Judged
from .values import Bytes, Count, File, Form, Names, Port, Seconds, Text

_STORES = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")


def _is_store(address: SecretStr) -> SecretStr:
    text = address.get_secret_value()
    if not text.startswith(_STORES):
        raise Judged(f"must begin with one of {', '.join(_STORES)}")
    return address


StoreAddress = Annotated[
    SecretStr,
    AfterValidator(_is_store),
    Form("an address such as redis://host:6379/0", "redis://127.0.0.1:6379/0"),
]
HttpAddress = Annotated[
    HttpUrl, Form("an http or https address", "https://login.example.com/.well-known/jwks.json")
]

_ASYMMETRIC = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)


class ServerSettings(BaseModel):
    """The listening socket and what is said over it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Text = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every one.")
    port: Port = Field(8000, description="Port to listen on.")
    root_path: str = Field("", description="Path under which a proxy publishes the gateway.")
    proxy_headers: bool = Field(False, description="Believe X-Forwarded-For and X-Forwarded-Proto.")
    forwarded_allow_ips: Names = Field(
        ("127.0.0.1",), description="Proxies whose X-Forwarded headers are believed: addresses or networks."
    )
    ssl_certfile: File | None = Field(None, description="TLS certificate, a PEM file; unset serves http.")
    ssl_keyfile: File | None = Field(None, description="Private key of the certificate, a PEM file.")
    ssl_keyfile_password: SecretStr | None = Field(None, description="Password of the private key.")
    ssl_ca_certs: File | None = Field(None, description="Certificates of authorities, a PEM file.")
    cors_allow_origins: Names = Field(
        (), description="Origins of web pages that may call the API; empty is none, * is every one."
    )
    cors_allow_origin_regex: Text | None = Field(None, description="The same, as a regular expression.")
    cors_allow_headers: Names = Field(
        ("authorization", "content-type", "x-api-key"),
        description="Request headers that such a page may send.",
    )
    drain_timeout_s: Seconds = Field(30, description="Seconds that running requests get at shutdown.")
    docs: bool = Field(True, description="Serve /docs and the OpenAPI schema.")
    timeout_keep_alive_s: Annotated[int, Field(ge=1), Form("whole seconds, 1 or more", "5")] = Field(
        5, description="Seconds that an idle connection is kept open."
    )
    max_body_bytes: Bytes = Field(16 * 2**20, description="Largest request body, bytes (16 MiB).")
    client_stall_s: Seconds = Field(
        30, description="Seconds for which a client may leave its answer unread before it is cut off."
    )

    @model_validator(mode="after")
    def _has_both_tls_files(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("FAIRGATE_SERVER__SSL_KEYFILE needs FAIRGATE_SERVER__SSL_CERTFILE")
        return self


class AuthSettings(BaseModel):
    """Who may ask. The tenants themselves stand in their own file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disabled: bool = Field(False, description="Let everyone in without a key, as one tenant.")
    tenants_file: Path = Field(Path("config/tenants.yaml"), description="Tenants, their keys and limits.")
    cache_salt_secret: SecretStr | None = Field(
        None,
        description="Secret that keeps tenants' prefix-cache entries apart; unset makes one at each start.",
    )
    jwt_issuer: Text | None = Field(
        None, description="Issuer whose tokens (JWT) are accepted; unset is none."
    )
    jwt_audience: Text | None = Field(None, description="Audience that a token must name.")
    jwt_jwks_url: HttpAddress | None = Field(None, description="Address of the issuer's keys.")
    jwt_jwks_file: File | None = Field(None, description="File with the issuer's keys, instead.")
    jwt_tenant_claim: Text = Field("tenant", description="Claim of a token that names the tenant.")
    jwt_algorithms: Names = Field(
        ("RS256", "ES256"), description="Signature algorithms accepted; only such with a public key."
    )

    @field_validator("jwt_algorithms")
    @classmethod
    def _are_asymmetric(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        # With HS256 the issuer's public key, which anyone can fetch, would sign tokens.
        wrong = [name for name in names if name not in _ASYMMETRIC]
        if wrong or not names:
            raise Judged(f"must be some of {', '.join(sorted(_ASYMMETRIC))}")
        return names

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.jwt_issuer is None:
            lone = [
                n for n in ("jwt_audience", "jwt_jwks_url", "jwt_jwks_file") if getattr(self, n) is not None
            ]
            if lone:
                raise ValueError(f"FAIRGATE_AUTH__{lone[0].upper()} needs FAIRGATE_AUTH__JWT_ISSUER")
            return self
        if (self.jwt_jwks_url is None) == (self.jwt_jwks_file is None):
            raise ValueError(
                "FAIRGATE_AUTH__JWT_ISSUER needs one of FAIRGATE_AUTH__JWT_JWKS_URL and "
                "FAIRGATE_AUTH__JWT_JWKS_FILE"
            )
        if self.jwt_audience is None:
            # Without it, a token that the issuer made for another service would open this one.
            raise ValueError("FAIRGATE_AUTH__JWT_ISSUER needs FAIRGATE_AUTH__JWT_AUDIENCE")
        return self


class MetricsSettings(BaseModel):
    """Where metrics are read without a key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Port | None = Field(
        None, description="Port for metrics without a key; unset leaves /metrics, with an operator's key."
    )
    host: Text = Field("127.0.0.1", description="Address that this port listens on.")


class AdmissionSettings(BaseModel):
    """How requests are let in: where limits are counted, and how long anyone waits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreAddress | None = Field(
        None, description="Address of a Redis or Valkey that replicas share; unset counts in this process."
    )
    store_lost: Literal["fail_open", "fail_closed"] = Field(
        "fail_open",
        description="Without the store: fail_open counts in this process, fail_closed answers 503.",
    )
    store_timeout_s: Seconds = Field(0.25, description="Seconds that an answer of the store may take.")
    replicas: Count = Field(
        1, description="Gateways that share out the limits among them, where each counts in memory."
    )
    max_queued: Count = Field(
        1000, description="Requests of a tenant that may wait, where it has no bound of its own."
    )
    queue_timeout_s: Seconds | None = Field(
        None, description="Seconds that a request may wait for its turn; unset is no bound."
    )
    keep_alive_s: Count | None = Field(
        None,
        description="Seconds between comments to a waiting stream, whose status they fix to 200.",
    )


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class LogSettings(BaseModel):
    """What is written to standard error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)] = (
        Field("info", description="Least level that is written: debug, info, warning, error, critical.")
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto", description="json, console, or auto: console on a terminal."
    )
    prompts: bool = Field(False, description="Write prompts and answers to the log.")
