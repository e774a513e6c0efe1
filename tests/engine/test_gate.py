"""What a client may not set, what tenants may not share, and what is never generated (B21, B25, B36)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from app.admission.admission import Admission
from app.admission.policy import Policy
from app.admission.store import MemoryStore
from app.core.errors import Outcome
from app.core.record import Key, Principal, Record, Tenant, current_record
from app.engine.gate import EngineGate

from ..support.asgi import settle
from ..support.clock import FakeClock
from ..support.facts import facts
from ..support.stack import ACME, GLOBEX, MODEL, NARROW, SHARED, SHARED_TOO, chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ..support.stack import Stack

CHAT = "/v1/chat/completions"


async def salt(stack: Stack, key: str, client_salt: str | None = None) -> str | None:
    """The prefix-cache salt under which a tenant's request reaches the engine."""
    more = {} if client_salt is None else {"cache_salt": client_salt}
    answer = await stack.fetch("POST", CHAT, key, json=chat(**more))
    assert answer.status == 200, answer.content
    found: str | None = stack.core.last.cache_salt
    return found


async def test_tenants_have_salts_of_their_own(stack: Stack) -> None:
    """The same words twice hit the cache for one tenant, never for two."""
    acme = await salt(stack, ACME)
    assert acme
    assert acme == await salt(stack, ACME)
    assert acme != await salt(stack, GLOBEX)


async def test_client_salt_divides_its_tenants_space(stack: Stack) -> None:
    """It is honoured, and is no way into another tenant's space: not by its salt, not by its id."""
    acme, globex = await salt(stack, ACME), await salt(stack, GLOBEX)
    assert globex is not None
    divided = await salt(stack, ACME, "mine")
    assert divided == await salt(stack, ACME, "mine")
    others = [await salt(stack, ACME, guess) for guess in (globex, "globex", "tenant globex")]
    same_words = await salt(stack, GLOBEX, "mine")
    assert len({acme, globex, divided, same_words, *others}) == 7


async def test_tenants_that_share_the_cache_have_one_space(stack: Stack) -> None:
    """Only those that say so; a client's salt divides their space too."""
    assert await salt(stack, SHARED) == await salt(stack, SHARED_TOO) is None
    divided = await salt(stack, SHARED, "mine")
    assert divided
    assert divided == await salt(stack, SHARED_TOO, "mine")
    assert divided != await salt(stack, ACME, "mine")


async def test_salt_does_not_tell_its_tenant_or_secret(stack: Stack) -> None:
    """It reaches logs and KV events of the engine."""
    found = await salt(stack, ACME, "mine")
    assert found is not None
    assert len(found) == 64
    assert "acme" not in found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", {"model": MODEL, "prompt": "Say", "max_tokens": 3}),
        ("/v1/responses", {"model": MODEL, "input": "Say", "max_output_tokens": 3, "store": False}),
        ("/v1/messages", {k: v for k, v in chat().items()}),
    ],
)
async def test_client_cannot_set_what_is_the_gateways(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Priority, rank, session, transfer parameters and our own arguments are dropped, wherever they come."""
    body = {
        **body,
        "priority": -100,
        "session_id": "s",
        "kv_transfer_params": {"remote_host": "203.0.113.1"},
        "ec_transfer_params": {"remote_host": "203.0.113.1"},
        "vllm_xargs": {"fairgate": "tag", "session_id": "s", "kv_transfer_params": "x", "theirs": 1},
        "request_id": "chosen",
    }
    headers = [
        ("X-Vllm-Priority", "-100"),
        ("X-data-parallel-rank", "3"),
        ("X-Session-ID", "s"),
        ("X-Request-Id", "chosen"),
    ]
    answer = await stack.fetch("POST", path, json=body, headers=headers)
    assert answer.status == 200, answer.content
    request = stack.core.last
    assert request.priority > 0  # our place in fair order, not the client's number
    assert request.data_parallel_rank is None
    assert request.session_id is None
    assert request.kv_hints is None
    assert request.external_req_id == "fairgate-0"
    assert "chosen" not in request.request_id
    extra = request.sampling_params.extra_args or {}
    assert set(extra) <= {"theirs"}
    if path != "/v1/responses":
        assert extra == {"theirs": 1}


async def test_two_tenants_with_one_request_id_do_not_abort_each_other(stack: Stack) -> None:
    """vLLM aborts every request that shares an id; the engine never sees the client's."""
    stack.core.automatic = False
    same = [("X-Request-Id", "same")]
    async with stack.request("POST", CHAT, GLOBEX, json=chat(), headers=same) as other:
        await settle()
        async with stack.request("POST", CHAT, ACME, json=chat(), headers=same):
            await settle()
        await settle()
        assert stack.core.aborted == ["fairgate-1"]
        assert [request.external_req_id for request in stack.core.running] == ["fairgate-0"]
        stack.core.emit(2, finish="stop", request=stack.core.running[0])
        assert (await other.json())["usage"]["completion_tokens"] == 2


async def test_one_id_names_the_request_in_header_body_and_record(stack: Stack) -> None:
    """What a client quotes is found in the log."""
    answer = await stack.fetch("POST", CHAT, json=chat(), headers=[("X-Request-Id", "r-1")])
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.json_content["id"] == "chatcmpl-r-1"
    assert stack.record.id == "r-1"


async def test_cached_tokens_are_reported_and_counted(stack: Stack) -> None:
    """So that a tenant sees what the prefix cache saved it."""
    stack.core.cached_tokens = 16
    answer = await stack.fetch("POST", CHAT, json=chat())
    usage = answer.json_content["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert stack.record.usage.cached_tokens == 16
    assert stack.record.usage.prompt_tokens == usage["prompt_tokens"]
    assert stack.record.usage.completion_tokens == usage["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_of_every_sequence_are_counted(stack: Stack, stream: bool) -> None:
    """Whether outputs come as deltas or at the end."""
    await stack.fetch("POST", CHAT, json=chat(n=2, stream=stream))
    assert stack.record.usage.completion_tokens == 6


# The model allow-list


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_model_outside_the_tenants_list_is_forbidden(stack: Stack, path: str) -> None:
    """403 for a model that exists, before the engine is asked."""
    body = chat(prompt="x", input="x")
    if path == "/v1/completions":
        body = {"model": MODEL, "prompt": "x"}
    answer = await stack.fetch("POST", path, NARROW, json=body)
    assert answer.status == 403, answer.content
    assert stack.record.outcome is Outcome.FORBIDDEN
    assert stack.core.arrived == []


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_model_left_out_does_not_pass_the_list(stack: Stack, path: str) -> None:
    """vLLM takes its default where a body names none."""
    body = chat()
    del body["model"]
    answer = await stack.fetch("POST", path, NARROW, json={**body, "prompt": "x"})
    assert answer.status == 403, answer.content
    assert stack.core.arrived == []


async def test_models_shows_what_the_tenant_may_use(stack: Stack) -> None:
    """And no path of this host."""
    answer = await stack.fetch("GET", "/v1/models", ACME)
    (card,) = answer.json_content["data"]
    assert card["id"] == card["root"] == MODEL
    answer = await stack.fetch("GET", "/v1/models", NARROW)
    assert answer.json_content["data"] == []


# Without a Record


async def test_nothing_is_generated_behind_a_requests_back(stack: Stack) -> None:
    """No background responses: they would run when their Record is closed."""
    answer = await stack.fetch(
        "POST", "/v1/responses", json={"model": MODEL, "input": "x", "background": True, "store": True}
    )
    await settle()
    assert answer.status == 400, answer.content
    assert stack.core.arrived == []


class StubEngine:
    """What the gate asks of an engine, pooling included, by hand."""

    errored = False
    model_config = SimpleNamespace(max_model_len=100, is_encoder_decoder=False)
    other = "passes through"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.go = asyncio.Event()
        self.on_abort: Any = None

    async def encode(self, prompt: Any, params: Any, request_id: str, **rest: Any) -> AsyncIterator[Any]:
        """One vector, when it may."""
        self.calls.append((request_id, rest | {"prompt": prompt}))
        await self.go.wait()
        yield SimpleNamespace(num_cached_tokens=2)

    def computed(self, request_id: str) -> dict[int, int]:
        """Pooling computes no tokens, of a request that it knows."""
        return {0: 0}

    async def abort(self, request_id: str) -> None:
        """Note it."""
        self.aborted.append(request_id)


class Rig:
    """A gate over a `StubEngine`, with an open Record of acme's."""

    def __init__(self) -> None:
        self.engine = StubEngine()
        self.admission = Admission(
            facts(), store=MemoryStore(lambda: 0, lambda: 0), policy=Policy(), clock=FakeClock()
        )
        self.gate = EngineGate(
            self.engine,
            admission=self.admission,
            served_names=("tiny",),
            salt_secret=b"s",
            clock=FakeClock(),
        )
        self.record = Record("r", "POST", "/v1/embeddings", 0.0, Principal(Key("k"), Tenant("acme")))


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The rig, its Record being the current one."""
    rig = Rig()
    token = current_record.set(rig.record)
    yield rig
    current_record.reset(token)


async def take(stream: AsyncIterator[Any]) -> list[Any]:
    """All of a stream."""
    return [output async for output in stream]


async def test_pooling_is_gated_like_generation(rig: Rig) -> None:
    """A slot, a salt, an id and a place of ours, whatever the client's priority; prompt tokens counted."""
    rig.engine.go.set()
    outputs = await take(rig.gate.encode(tokens_input([1, 2, 3]), PoolingParams(), "theirs", priority=-5))
    assert len(outputs) == 1
    ((engine_id, rest),) = rig.engine.calls
    assert engine_id == "fairgate-0"
    assert rest["priority"] > 0
    assert len(rest["prompt"]["cache_salt"]) == 64
    assert (rig.record.usage.prompt_tokens, rig.record.usage.cached_tokens) == (3, 2)
    assert rig.record.usage.completion_tokens == 0
    assert rig.admission.snapshot().running == {}
    assert rig.engine.aborted == []


async def test_pooling_whose_client_leaves_is_aborted_by_the_release(rig: Rig) -> None:
    """The edge releases the Record; the generator may end whenever it likes."""
    running = asyncio.create_task(take(rig.gate.encode(tokens_input([1, 2, 3]), PoolingParams(), "theirs")))
    await settle()
    assert rig.admission.snapshot().running == {"acme": 1}
    rig.record.release()
    assert rig.admission.snapshot().running == {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await settle()
    assert rig.engine.aborted == ["fairgate-0"]
    assert rig.record.usage.prompt_tokens == 3


@pytest.mark.parametrize("state", ["none", "closed"])
async def test_without_an_open_record_there_is_no_generation(rig: Rig, state: str) -> None:
    """Whoever starts it: a task left over, a websocket, a router that is not ours."""
    if state == "none":
        current_record.set(None)
    else:
        rig.record.close(1.0, client_left=True)
    with pytest.raises(GracefulHTTPError):
        await take(rig.gate.generate(tokens_input([1]), SamplingParams(), "x"))
    with pytest.raises(GracefulHTTPError):
        await take(rig.gate.encode(tokens_input([1]), PoolingParams(), "x"))
    with pytest.raises(GracefulHTTPError):
        rig.gate.check_admission()
    assert rig.engine.calls == []


def test_rest_passes_through_to_the_engine(rig: Rig) -> None:
    """Whatever vLLM adds to its client's interface; only that a dead engine is ours to tell."""
    rig.engine.errored = True
    assert rig.gate.other == "passes through"
    assert rig.gate.errored is False
    assert repr(rig.gate) == "<EngineGate 0 running>"
