"""The orderly end of the shared engine, and so the last test on it: a signal to the whole process group."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.support.gateway import Stream, chat, chunks, eventually

if TYPE_CHECKING:
    from tests.support.gateway import Gateway


def test_sigterm_lets_running_streams_finish(gateway: Gateway) -> None:
    """No new work, told with a date; the old work to its end; exit status 0, and no process left."""
    usage = {"stream_options": {"include_usage": True}}
    body = chat("a long story", max_tokens=1500, ignore_eos=True, **usage)
    with (
        ThreadPoolExecutor(1) as pool,
        Stream(gateway, gateway.keys["umbrella"], "/v1/chat/completions", body) as stream,
        gateway.http(gateway.keys["acme"]) as client,
    ):
        first = stream.next_event()
        rest = pool.submit(lambda: [first, *stream.events()])
        # Ctrl-C and some supervisors signal the group: the engine must not hear of it.
        os.killpg(gateway.process.pid, signal.SIGTERM)
        eventually(lambda: client.get("/readyz").status_code == 503, 2)
        assert int(client.get("/readyz").headers["retry-after"]) >= 1
        assert client.get("/livez").status_code == 200
        refused = client.post("/v1/chat/completions", json=chat("too late"))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert not rest.done(), "the stream was still running"
        answer = chunks(rest.result(timeout=60))
        assert answer[-2]["choices"][0]["finish_reason"] == "length"
        assert answer[-1]["usage"]["completion_tokens"] == 1500
    assert gateway.exit_code(within_s=20) == 0
    eventually(lambda: not gateway.processes(), 5)
