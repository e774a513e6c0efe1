"""Cases B17, B25 and B38 on the real thing: one form of error, no way around a key, no secret anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway import MODEL, TOKEN, chat

if TYPE_CHECKING:
    import httpx

    from tests.support.gateway import Gateway

PROMPT = "sentinel prompt zebra-quartz-4711"

VARIANTS = (
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("OPTIONS", "/v1/models"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/v1/../v1/chat/completions"),
    ("POST", "/V1/chat/completions"),
    ("POST", "/v1/chat/completions/"),
    ("POST", "/%2fv1/chat/completions"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/readyz/"),
    ("GET", "/livez/../metrics"),
    ("POST", "/tokenize"),
    ("POST", "/sleep"),
    ("POST", "/v1/load_lora_adapter"),
)


def check_strict(answer: httpx.Response, status: int) -> dict[str, Any]:
    """OpenAI's form and nothing else; gives the error."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    for inside in ("Traceback", "site-packages", ".py", "object at 0x", "detail", str(Path.home())):
        assert inside not in error["message"]
    return error


@pytest.mark.parametrize(("method", "path"), VARIANTS)
def test_nothing_answers_without_a_key(gateway: Gateway, method: str, path: str) -> None:
    """401 for every path, whether it exists or not, and no work in the engine."""
    before = gateway.value("vllm:prompt_tokens_total")
    with gateway.http() as client:
        answer = client.request(method, path, json=chat(PROMPT), headers={"x-forwarded-prefix": "/livez"})
    if method == "HEAD":
        assert answer.status_code == 401
    else:
        assert check_strict(answer, 401)["code"] == "invalid_api_key"
    assert gateway.value("vllm:prompt_tokens_total") == before


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
def test_operators_pages_are_for_operators(gateway: Gateway, path: str) -> None:
    """A tenant's key does not open them; an operator's does, and does not generate."""
    with gateway.http(gateway.keys["acme"]) as client:
        assert check_strict(client.get(path), 403)["code"] == "operator_key_required"
    with gateway.http(gateway.keys["operator"]) as client:
        assert client.get(path).status_code == 200
        answer = client.post("/v1/chat/completions", json=chat("x"))
        assert check_strict(answer, 403)["code"] == "tenant_key_required"


def test_docs_show_what_is_served_and_no_more(gateway: Gateway) -> None:
    """Every path of the schema is one that this model answers: nothing of vLLM's besides."""
    with gateway.http(gateway.keys["operator"]) as client:
        schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
    }


def test_errors_have_one_form(gateway: Gateway) -> None:
    """B17's list, as far as the real engine has a part in it."""
    with gateway.http(gateway.keys["acme"]) as client:
        check_strict(client.get("/v1/nothing"), 404)
        check_strict(client.get("/v1/chat/completions"), 405)
        assert check_strict(client.post("/v1/completions", json={"model": "nope"}), 400)["param"] == "prompt"
        unknown = check_strict(client.post("/v1/chat/completions", json={**chat("x"), "model": "nope"}), 404)
        assert unknown["code"] == "model_not_found"
        check_strict(client.post("/v1/chat/completions", content=b"{"), 400)
        huge = b'{"model": "' + b"x" * 17 * 2**20 + b'"}'
        check_strict(client.post("/v1/chat/completions", content=huge), 413)
    with gateway.http(gateway.keys["outsider"]) as client:
        check_strict(client.post("/v1/chat/completions", json=chat("x")), 403)


def test_a_tenant_learns_no_names_that_it_may_not_use(gateway: Gateway) -> None:
    """A wrong name is not answered with the right ones of others."""
    with gateway.http(gateway.keys["outsider"]) as client:
        answer = client.post("/v1/chat/completions", json={**chat("x"), "model": "nope"})
    error = check_strict(answer, 404)
    assert MODEL not in error["message"].replace("The model", "").replace("nope", "")


def test_no_secret_is_shown(gateway: Gateway) -> None:
    """B38: keys, the hub's token, the salt and prompts stand in no log, metric, answer or command line."""
    near_miss = gateway.keys["acme"][:-1] + ("A" if gateway.keys["acme"][-1] != "A" else "B")
    answers = []
    with gateway.http(gateway.keys["acme"]) as client:
        for path, body in (
            ("/v1/chat/completions", chat(PROMPT, max_tokens=2)),
            ("/v1/chat/completions", chat(PROMPT, max_tokens=2, temperature=-1)),
            ("/v1/chat/completions", chat(PROMPT, max_tokens=2, cache_salt="sentinel-salt")),
            ("/v1/chat/completions", {**chat(PROMPT), "model": "nope"}),
            ("/v1/completions", {"model": MODEL, "prompt": [PROMPT], "max_tokens": 0}),
            ("/v1/completions", {"model": MODEL, "prompt": {"text": PROMPT}}),
            ("/v1/messages", {"model": MODEL, "max_tokens": 0, "messages": [{"role": "user", "content": 1}]}),
            ("/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 2}),
            ("/tokenize", {"model": MODEL, "prompt": PROMPT, "add_special_tokens": 5}),
        ):
            answers.append(client.post(path, json=body))
        answers.append(client.post("/v1/chat/completions", content=f'{{"{PROMPT}'.encode()))
    for key in (near_miss, gateway.keys["acme"] + "x"):
        with gateway.http(key) as client:
            answers.append(check := client.post("/v1/chat/completions", json=chat(PROMPT)))
            assert check.status_code == 401
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404}

    shown = {"log": gateway.log, "output": gateway.out_path.read_text(errors="replace")}
    shown["metrics"] = gateway.metrics()
    shown["command lines"] = json.dumps(gateway.processes())
    for number, answer in enumerate(answers):
        if answer.status_code != 200:
            shown[f"answer {number}"] = answer.text
    secrets = {
        **gateway.keys,
        "near miss": near_miss,
        "token": TOKEN,
        "prompt": PROMPT,
        "salt": "sentinel-salt",
    }
    for place, text in shown.items():
        for name, secret in secrets.items():
            assert secret not in text, f"{name} stands in {place}"
            assert secret[-20:] not in text, f"the end of {name} stands in {place}"
    assert "acme-" in shown["log"], "keys are named by their ids"
