"""How errors look: both families, every status, nothing of the server's inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.core.errors import STATUS, Outcome, Rejected
from app.http import errors

OPENAI = "/v1/chat/completions"
ANTHROPIC = "/v1/messages"


def rendered(rejection: Rejected, path: str = OPENAI) -> dict[str, Any]:
    """The body, read."""
    body: dict[str, Any] = json.loads(errors.render(rejection, path=path, request_id="r-1"))
    return body


def answered(status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None) -> Rejected:
    """What becomes of an error that the application answered by itself."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return errors.from_answer(
        {"type": "http.response.start", "status": status, "headers": headers or []}, raw
    )


@pytest.mark.parametrize("outcome", STATUS)
def test_every_refusal_has_a_type_in_both_families(outcome: Outcome) -> None:
    """The SDKs choose their exception by status, and show the rest."""
    rejection = Rejected(outcome, "why", param="model")
    assert rendered(rejection) == {
        "error": {
            "message": "why",
            "type": rendered(rejection)["error"]["type"],
            "param": "model",
            "code": outcome.value,
        }
    }
    assert rendered(rejection)["error"]["type"].endswith("_error")
    body = rendered(rejection, ANTHROPIC)
    assert body == {
        "type": "error",
        "error": {"type": body["error"]["type"], "message": "why"},
        "request_id": "r-1",
    }
    # https://docs.anthropic.com/en/api/errors
    documented = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
    }
    assert body["error"]["type"] == documented[rejection.status]


@pytest.mark.parametrize(
    ("path", "is_anthropic"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messagesx", False),
        ("/v1/models", False),
        ("/messages", False),
    ],
)
def test_family_goes_by_the_path(path: str, is_anthropic: bool) -> None:
    """Anthropic's is ``/v1/messages`` and what is below."""
    assert errors.is_anthropic(path) is is_anthropic


def test_vllm_error_keeps_its_message_and_parameter() -> None:
    """vLLM's ``code`` is the status as a number; OpenAI's is a word."""
    body = {"error": {"message": "n must be 1", "type": "BadRequestError", "param": "n", "code": 400}}
    rejection = answered(400, body)
    assert (rejection.outcome, rejection.status) == (Outcome.INVALID, 400)
    assert (rejection.message, rejection.param, rejection.code) == ("n must be 1", "n", "invalid_request")


def test_unknown_model_has_openais_code() -> None:
    """``model_not_found`` under 404."""
    body = {"error": {"message": "no such model", "param": "model", "code": 404}}
    assert answered(404, body).code == "model_not_found"


def test_prompt_that_is_too_long_has_openais_code() -> None:
    """Clients shorten their history on ``context_length_exceeded``."""
    message = "This model's maximum context length is 512 tokens. However, you requested 600."
    assert answered(400, {"error": {"message": message}}).code == "context_length_exceeded"


@pytest.mark.parametrize("status", [422, 501])
def test_what_the_client_can_change_is_a_400(status: int) -> None:
    """FastAPI's 422, and vLLM's 501 for a feature that this model has not."""
    assert answered(status, {"error": {"message": "no"}}).status == 400


@pytest.mark.parametrize("status", [500, 502])
def test_fault_tells_nothing(status: int) -> None:
    """Whatever the application said."""
    rejection = answered(status, {"error": {"message": "KeyError: '/root/model'"}})
    assert (rejection.outcome, rejection.status) == (Outcome.FAILED, 500)
    assert "root" not in rejection.message


def test_503_of_the_application_says_when_to_come_back() -> None:
    """vLLM's own admission."""
    rejection = answered(503, {"error": {"message": "queue"}})
    assert (rejection.outcome, rejection.retry_after_s) == (Outcome.OVERLOADED, 1)


@pytest.mark.parametrize(
    "body", [b"Not Found", b"", b"[]", b"\xff", {"detail": []}, {"error": "x"}, {"error": {"message": 3}}]
)
def test_answer_of_any_form_gets_words(body: object) -> None:
    """Starlette's plain text, FastAPI's ``detail`` list, rubbish."""
    rejection = answered(404, body)
    assert rejection.message == "There is no such route."
    assert rejection.code == "not_found"


def test_detail_in_words_is_kept() -> None:
    """FastAPI's HTTPException."""
    assert answered(400, {"detail": "Unsupported Media Type"}).message == "Unsupported Media Type"


def test_405_keeps_the_methods_that_work() -> None:
    """The ``Allow`` header, and no other of the application's."""
    rejection = answered(405, b"Method Not Allowed", [(b"allow", b"POST"), (b"x-inside", b"1")])
    assert rejection.headers == {"allow": "POST"}
    assert rejection.code == "method_not_allowed"


def test_body_is_ascii_whatever_the_message() -> None:
    """A lone surrogate of the client's cannot break the answer."""
    assert errors.render(Rejected(Outcome.INVALID, "\ud800 é"), path=OPENAI, request_id="r").isascii()


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_event_holds_the_same_body(path: str) -> None:
    """One event of a stream, which ends there."""
    rejection = errors.failed()
    lines = errors.event(rejection, path=path, request_id="r-1").decode().split("\n")
    assert lines[0] == "event: error"
    assert json.loads(lines[1].removeprefix("data: ")) == rendered(rejection, path)
    assert lines[2:] == ["", ""]
