"""What a client may wish for, and what is not its to set: plain functions on a request's parts.

Used by the gate, and by ``routes.py`` for the priority that vLLM's handlers pass on. Each takes something
of a client's and gives back what the engine may see of it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.record import Demand, Record, Tenant

# Keys of sampling_params.extra_args (the body's kv_transfer_params and vllm_xargs) that are not a client's.
_RESERVED_ARGS = ("fairgate", "kv_transfer_params", "ec_transfer_params", "session_id")

FLEX = 1
"""`priority_of` a request that asks for the batch class."""


def salted(prompt: Any, tenant: Tenant, secret: bytes) -> Any:
    """The prompt under the tenant's own prefix-cache salt. A client's salt divides its tenant's space."""
    client_salt = prompt.get("cache_salt") or ""
    if tenant.shared_prefix_cache and not client_salt:
        prompt.pop("cache_salt", None)
        return prompt
    space = "shared" if tenant.shared_prefix_cache else f"tenant {tenant.id}"
    message = f"{space}\0{client_salt}".encode("utf-8", "surrogatepass")
    prompt["cache_salt"] = hmac.new(secret, message, hashlib.sha256).hexdigest()
    return prompt


def strip(params: Any) -> None:
    """Take away what a client may not set for itself."""
    if params.extra_args:
        params.extra_args = {k: v for k, v in params.extra_args.items() if k not in _RESERVED_ARGS} or None


def capped(demand: Demand, record: Record) -> Demand:
    """The demand of a client that named no bound on the answer: the tenant's or key's, if there is one."""
    assert record.principal is not None, "auth stands before the gate"
    limits = (record.principal.key.limits, None if record.tenant is None else record.tenant.limits)
    caps = [one.max_output_tokens for one in limits if one is not None and one.max_output_tokens is not None]
    return replace(demand, max_new_tokens=min([demand.max_new_tokens, *caps]))


def priority_of(request: Any) -> int:
    """What vLLM's handlers pass on as a request's priority: whether the client has lowered its own.

    ``service_tier: "flex"`` is OpenAI's word for it. A number of the client's counts for nothing.
    """
    return FLEX if getattr(request, "service_tier", None) == "flex" else 0
