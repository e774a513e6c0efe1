"""How an error looks: OpenAI's form, or Anthropic's on its routes.

Called by the edge alone, for refusals of ours and for errors that vLLM's routers answered. Nothing
of the server's inside leaves in a message: no traceback, no path, no repr.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ..core.errors import Outcome, Rejected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Message

# https://platform.openai.com/docs/guides/error-codes and the SDKs' own classes by status
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}

_FALLBACKS = {
    404: "There is no such route.",
    405: "The route does not take this method.",
}

_TOO_LONG = ("maximum context length", "maximum model length", "longer than the maximum")
_LONE_SURROGATE = "The text is not valid Unicode: it holds half of a surrogate pair."
_DETAILS = re.compile(r" \((?:parameter|value)=.*\)\Z", re.DOTALL)
_NAME = re.compile(r"[a-z_][a-z0-9_]*\Z")
# Names of a union's branches in pydantic's error places, which are no fields
_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "list", "tuple", "dict", "none", "bytes", "constrained"}
)
_TOLD = 5
"""Fields named in one answer: thousands of bad list items must not make an answer of megabytes."""
_INTERNAL = "The server failed on this request. The request id identifies it in the server's log."


def render(rejection: Rejected, *, path: str, request_id: str) -> bytes:
    """The JSON body of a refusal, in the form of the route's family."""
    status = rejection.status
    if is_anthropic(path):
        body: dict[str, Any] = {
            "type": "error",
            "error": {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": rejection.message},
            "request_id": request_id,
        }
    else:
        body = {
            "error": {
                "message": rejection.message,
                "type": _OPENAI_TYPES.get(status, "invalid_request_error"),
                "param": rejection.param,
                "code": rejection.code,
            }
        }
    return json.dumps(body, ensure_ascii=True, allow_nan=False).encode()


def event(rejection: Rejected, *, path: str, request_id: str) -> bytes:
    """The same body as the last event of a stream. The SDKs of both families raise on it."""
    return b"event: error\ndata: " + render(rejection, path=path, request_id=request_id) + b"\n\n"


def is_anthropic(path: str) -> bool:
    """Whether the path belongs to Anthropic's family."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def from_answer(start: Message, body: bytes) -> Rejected:
    """An error that the application answered by itself, in our form.

    vLLM answers ``{"error": {"message", "type", "param", "code": <int>}}``, FastAPI
    ``{"detail": …}``, Starlette's router a plain text. 422 (a body that does not validate) and 501
    (a feature that this model or configuration has not) are the client's to change: both become 400.

    Args:
        start: The application's ``http.response.start``.
        body: Its whole body.
    """
    status = 400 if start["status"] in (422, 501) else start["status"]
    if status == 503:
        return Rejected(Outcome.OVERLOADED, "The engine cannot take this request now.", retry_after_s=1)
    if status >= 500:
        return failed()
    message, param = _read(body, status)
    if status == 404 and (param == "model" or message.startswith("The model `")):
        param = "model"  # the pooling routes leave it out
        # vLLM goes on to list every model, also those that this tenant may not know of.
        message = f"{message.partition(' Valid aliases:')[0]} /v1/models lists those that this key may use."
    return Rejected(
        Outcome.INVALID,
        message,
        code=_code(status, message, param),
        param=param,
        status=status,
        headers={k.decode("latin-1"): v.decode("latin-1") for k, v in start["headers"] if k == b"allow"},
    )


def from_validation(found: Sequence[Mapping[str, Any]]) -> Rejected:
    """A body that does not validate: each field at fault, and what is wrong with it.

    Args:
        found: pydantic's errors. One of a union's branches says enough, so a field is named once.
    """
    by_field: dict[str, str] = {}
    param = None
    for error in found:
        if error["type"] == "json_invalid":
            reason = error.get("ctx", {}).get("error", "")
            return Rejected(
                Outcome.INVALID, f"The body is not valid JSON: {reason}.", code="invalid_json", param=None
            )
        cause = error.get("ctx", {}).get("error")
        where = _field(error["loc"])
        param = param or getattr(cause, "parameter", None) or where
        by_field.setdefault(where, _without_details(str(error["msg"])))
    told = [f"{where}: {what}" if where else what for where, what in by_field.items()]
    more = [f"and {len(told) - _TOLD} more"] if len(told) > _TOLD else []
    return Rejected(
        Outcome.INVALID, "; ".join(told[:_TOLD] + more), code="invalid_request", param=param or None
    )


def _field(loc: Sequence[str | int]) -> str:
    """``messages[0].content`` for pydantic's ``("body", "messages", 0, "list[…]", "content")``."""
    path = ""
    for part in loc[1:] if loc[:1] == ("body",) else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _BRANCHES or not _NAME.match(part):
            break
        else:
            path += f".{part}" if path else part
    return path


def _without_details(message: str) -> str:
    """vLLM's own errors end with the field and the value, which stand elsewhere in the answer."""
    return _DETAILS.sub("", message.removeprefix("Value error, "))


def failed() -> Rejected:
    """Our fault, told without its inside."""
    return Rejected(Outcome.FAILED, _INTERNAL, code="internal_error")


def _read(body: bytes, status: int) -> tuple[str, str | None]:
    fallback = _FALLBACKS.get(status, f"The request was refused with status {status}.")
    try:
        answer = json.loads(body)
    except ValueError:
        return fallback, None
    if not isinstance(answer, dict):
        return fallback, None
    error = answer.get("error", answer)
    if not isinstance(error, dict):
        return fallback, None
    message = error.get("message") or error.get("detail")
    if isinstance(message, str) and message.startswith("TextEncodeInput"):
        message = _LONE_SURROGATE  # the tokenizer's word for the only text that it cannot take
    param = error.get("param")
    return (
        _without_details(message) if isinstance(message, str) and message else fallback,
        param.removeprefix("body.") if isinstance(param, str) else None,
    )


def _code(status: int, message: str, param: str | None) -> str:
    if status == 404 and param == "model":
        return "model_not_found"
    if status == 400 and any(words in message for words in _TOO_LONG):
        return "context_length_exceeded"
    return _CODES.get(status, "invalid_request")
