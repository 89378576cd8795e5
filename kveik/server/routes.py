"""Routes for generation: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kveik.server.answer import AnswerShape, ChatShape, CompletionShape
from kveik.server.envelope import json_response
from kveik.server.openapi import GENERATION_ERRORS, streamed, takes
from kveik.server.prompts import Model
from kveik.server.protocol import ChatAnswer, ChatBody, CompletionAnswer, CompletionBody, GenerationBody
from kveik.server.reading import read_whole, while_connected
from kveik.server.sse import EventStream
from kveik.server.state import ServerState
from kveik.server.translate import Asker, Call, chat_call, completion_call

router = APIRouter(prefix="/v1", tags=["generation"], responses=GENERATION_ERRORS)

Body = TypeVar("Body", bound=GenerationBody)


@router.post("/completions", responses=streamed(CompletionAnswer), openapi_extra=takes(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    call = await _call(request, CompletionBody, completion_call, "cmpl-")
    return await _answer(request, call, CompletionShape)


@router.post("/chat/completions", responses=streamed(ChatAnswer), openapi_extra=takes(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, through the model's chat template."""
    call = await _call(request, ChatBody, chat_call, "chatcmpl-")
    return await _answer(request, call, ChatShape)


async def _call(request: Request, shape: type[Body], translate: Callable[[Body, Model, Asker], Call], prefix: str) -> Call:
    """Returns the call of an HTTP request. Every refusal but that of a full queue is raised here."""
    state: ServerState = request.app.state.server
    state.traffic.check_open()
    body, size = await state.read(request, shape)
    asker = Asker(f"{prefix}{uuid.uuid4().hex}", request.state.tenant)
    return await state.off_loop(partial(translate, body, state.model, asker), size)


async def _answer(request: Request, call: Call, make_shape: Callable[..., AnswerShape]) -> Response:
    state: ServerState = request.app.state.server
    shape = make_shape(call, state.tokenizer, created=int(state.now()), fingerprint=state.fingerprint)
    streams = state.traffic.submit(state.door, call.requests)
    if call.stream:
        close = partial(state.traffic.close, streams)
        return EventStream(call, shape, streams, stall_seconds=state.config.stall_seconds, close=close)
    finished = False
    try:
        choices = await while_connected(request.receive, read_whole(call, streams))
        finished = True
    finally:
        state.traffic.close(streams, finished)
    return json_response(shape.whole(choices, streams))
