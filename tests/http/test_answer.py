"""What the driver of whole exchanges cannot time: a fault between two messages of one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.core.record import Record
from app.http.answer import Answer

if TYPE_CHECKING:
    from starlette.types import Message

DONE = b"data: [DONE]\n\n"


async def test_engine_that_fails_while_the_start_goes_out_is_no_success() -> None:
    """The fault falls into the await of the response's start; ``[DONE]`` is withheld all the same."""
    record = Record("r", "POST", "/v1/completions", 0.0)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.fail(RuntimeError("the engine is gone"))
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    answer = Answer(record, receive, send, max_body_bytes=1)
    record.decide(1.0)
    headers = [(b"content-type", b"text/event-stream")]
    await answer({"type": "http.response.start", "status": 200, "headers": headers})
    await answer({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await answer({"type": "http.response.body", "body": DONE, "more_body": True})
    await answer({"type": "http.response.body", "body": b"", "more_body": False})
    assert [message.get("body") for message in sent] == [None, b"data: {}\n\n", b"", b""]
