"""Case B08, the engine core killed: everyone is told, and the process ends with the reason."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.support.gateway import TOKEN, Stream, chat, eventually

if TYPE_CHECKING:
    import httpx

    from tests.support.gateway import Gateway

PROMPT = "sentinel prompt cobalt-heron-1984"


def test_death_of_the_engine_is_told_to_everyone(mortal: Gateway) -> None:
    """Streams break off with an error and no [DONE], others get 503; exit status not 0; nothing left."""
    key = mortal.keys["acme"]
    body = chat(PROMPT, max_tokens=3000, ignore_eos=True)
    with ThreadPoolExecutor(2) as pool, Stream(mortal, key, "/v1/chat/completions", body) as stream:
        assert json.loads(stream.next_event())["choices"]

        def ask() -> httpx.Response:
            with mortal.http(key) as client:
                return client.post("/v1/chat/completions", json=body)

        def drain() -> list[str]:
            return list(stream.events())

        whole, rest = pool.submit(ask), pool.submit(drain)
        eventually(lambda: mortal.value("vllm:num_requests_running") == 2, 10)
        os.kill(mortal.engine_core(), signal.SIGKILL)

        events = rest.result(timeout=10)
        assert "[DONE]" not in events
        assert "error" in json.loads(events[-1])
        assert not any(choice["finish_reason"] for event in events[:-1] for choice in _choices(event))
        answer = whole.result(timeout=10)
        assert answer.status_code in {500, 503}
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert mortal.exit_code(within_s=10) not in {0, None}
    assert mortal.last_line == "fairgate: the engine core has ended"
    eventually(lambda: not mortal.processes(), 5)
    # B38: also a crash at debug level shows no secret
    for place in (mortal.log, mortal.out_path.read_text(errors="replace"), answer.text, *events):
        for secret in (*mortal.keys.values(), TOKEN, PROMPT):
            assert secret not in place


def _choices(event: str) -> list[dict[str, str | None]]:
    choices: list[dict[str, str | None]] = json.loads(event)["choices"]
    return choices
