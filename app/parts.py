"""The parts that settings choose: tenants, store, token verifier, policy.

Plain functions from settings to objects. Called by ``server.py``, which puts the parts together.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from .admission.policy import Policy
from .admission.store import MemoryStore
from .http.tokens import KeySet, TokenVerifier
from .tenants import TenantBook, Tenants

if TYPE_CHECKING:
    from collections.abc import Callable

    from .admission.store import Store
    from .settings import AdmissionSettings, Settings
    from .tenants import ReloadObserver

log = logging.getLogger(__name__)


def open_tenants(settings: Settings, on_reload: ReloadObserver) -> Tenants:
    """The tenants file, or everyone as one tenant where auth is disabled."""
    auth = settings.auth
    if auth.disabled:
        log.warning("authentication is disabled: everyone may ask, and see the metrics")
        return Tenants(None, TenantBook.open_to_all(), on_reload=on_reload)
    return Tenants.open(auth.tenants_file, on_reload=on_reload, need_key=auth.jwt_issuer is None)


def open_store(settings: AdmissionSettings, on_health: Callable[[bool], None]) -> Store:
    """Where rates are counted: in this process, or in a Redis that replicas share."""
    memory = MemoryStore(_clock_us, _utc_us, replicas=settings.replicas)
    if settings.store is None:
        log.info("limits are counted per replica", extra={"replicas": settings.replicas})
        on_health(True)
        return memory
    from .admission.redis_store import RedisStore

    on_health(True)

    def told(problem: str | None) -> None:
        on_health(problem is None)
        if problem is None:
            log.info("the store is back")
        else:
            log.error("the store is lost", extra={"problem": problem, "then": settings.store_lost})

    return RedisStore(
        settings.store.get_secret_value(),
        _clock_us,
        fallback=memory if settings.store_lost == "fail_open" else None,
        timeout_s=settings.store_timeout_s,
        on_health=told,
    )


def policy_of(settings: AdmissionSettings) -> Policy:
    """Admission's own words for the settings."""
    return Policy(
        max_queued=settings.max_queued,
        queue_timeout_s=settings.queue_timeout_s,
        fixes_status=settings.keep_alive_s is not None,
    )


def _clock_us() -> int:
    return time.monotonic_ns() // 1000


def _utc_us() -> int:
    return time.time_ns() // 1000


def token_verifier(settings: Settings) -> TokenVerifier | None:
    """The verifier of signed tokens, where an issuer is set."""
    auth = settings.auth
    if auth.jwt_issuer is None or auth.jwt_audience is None:
        return None
    return TokenVerifier(
        issuer=auth.jwt_issuer,
        audience=auth.jwt_audience,
        tenant_claim=auth.jwt_tenant_claim,
        keys=KeySet(str(auth.jwt_jwks_url or auth.jwt_jwks_file)),
        algorithms=auth.jwt_algorithms,
    )
