"""Routes for information: models, tokens, health, metrics, version, cache, and the page at /."""

from __future__ import annotations

import html
import importlib.resources
import json
from dataclasses import asdict, replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kveik import __version__
from kveik.engine.cache_stats import CacheStats
from kveik.errors import BadValue, EngineStopped, ModelNotFound, NotAuthorized, Overloaded
from kveik.observe.metrics import CONTENT_TYPE
from kveik.observe.tiers import TierSnapshot
from kveik.server.call_limits import MAX_TOKENIZE_TOKENS
from kveik.server.envelope import error_response, json_response
from kveik.server.openapi import BODY_ERRORS, errors, takes
from kveik.server.prompts import Model, chat_prompt, check_tokens
from kveik.server.protocol import (
    DetokenizeAnswer,
    DetokenizeBody,
    ModelCard,
    ModelList,
    StatusAnswer,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
)
from kveik.server.request_fields import refuse_unsupported
from kveik.server.state import ServerState
from kveik.server.translate import served_name
from kveik.words import counted

router = APIRouter()

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    "x-content-type-options": "nosniff",
}


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


@router.get("/v1/models", tags=["models"], response_model=ModelList, responses=errors(401))
async def models(request: Request) -> Response:
    """The names that the model is served under."""
    state = _state(request)
    return json_response({"object": "list", "data": [_card(name, state) for name in state.names]})


@router.get("/v1/models/{name:path}", tags=["models"], response_model=ModelCard, responses=errors(401, 404))
async def model(request: Request, name: str) -> Response:
    """One served model."""
    state = _state(request)
    if name not in state.names:
        raise ModelNotFound(state.names)
    return json_response(_card(name, state))


def _card(name: str, state: ServerState) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "kveik",
        "root": state.names[0],
        "max_model_len": state.max_model_len,
    }


@router.post(
    "/tokenize", tags=["tokens"], response_model=TokenizeAnswer, responses=BODY_ERRORS, openapi_extra=takes(TokenizeBody)
)
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of the messages of a chat."""
    state = _state(request)
    body, size = await state.read(request, TokenizeBody)
    tokens = await state.off_loop(partial(_tokens, body, state.model), size)
    texts = [state.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return json_response({"count": len(tokens), "max_model_len": state.max_model_len, "tokens": tokens, "token_strs": texts})


@router.get("/tokenizer_info", tags=["tokens"], response_model=TokenizerInfo, responses=errors(401))
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's special tokens and the chat template, under vLLM's names."""
    state = _state(request)
    tokenizer, roles = state.tokenizer, state.tokenizer.named
    ends = sorted(tokenizer.eos_ids)
    answer = {
        # The class of transformers that reads any tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": state.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": roles.get("bos_token") or (None if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)),
        "eos_token": roles.get("eos_token") or (tokenizer.token_text(ends[0]) if ends else None),
        "unk_token": roles.get("unk_token"),
        "pad_token": roles.get("pad_token"),
        "chat_template": state.chat_template.source if state.chat_template else None,
    }
    return json_response(answer)


def _tokens(body: TokenizeBody, model: Model) -> list[int]:
    served_name(body.model, model)
    refuse_unsupported(body.model_extra or {})
    limit = max(MAX_TOKENIZE_TOKENS, model.max_model_len)
    if (body.prompt is None) == (body.messages is None):
        raise BadValue("Give either `prompt` or `messages`.", param="prompt")
    if body.prompt is None:
        return chat_prompt(body, model, limit)
    least = model.tokenizer.more_than(body.prompt, limit)
    if least is not None:
        raise BadValue(f"`prompt` has at least {counted(least, 'token')}. Send at most {limit} to /tokenize.", param="prompt")
    return model.tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)


@router.post(
    "/detokenize", tags=["tokens"], response_model=DetokenizeAnswer, responses=BODY_ERRORS, openapi_extra=takes(DetokenizeBody)
)
async def detokenize(request: Request) -> Response:
    """Token ids as text, special tokens included."""
    state = _state(request)
    body, size = await state.read(request, DetokenizeBody)
    return json_response({"prompt": await state.off_loop(partial(_text, body, state.model), size)})


def _text(body: DetokenizeBody, model: Model) -> str:
    served_name(body.model, model)
    check_tokens(body.tokens, model.tokenizer.vocab_size, "tokens")
    return model.tokenizer.decode(body.tokens, skip_special=False)


@router.get("/health", tags=["operation"], responses=errors(500, 503))
async def health(request: Request) -> Response:
    """200 while requests are accepted, 503 while the server drains, 500 when the engine has stopped."""
    state = _state(request)
    # Returned rather than raised: a probe does not count as a refused request, and is not logged every few seconds.
    try:
        state.traffic.check_open()
    except Overloaded as draining:
        return error_response(draining)
    if not state.alive():
        return error_response(EngineStopped())
    return json_response({"status": "ok"})


@router.get("/metrics", tags=["operation"], responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus' text format. Needs no key."""
    state = _state(request)
    engine = state.metrics()
    text = engine.encode() if isinstance(engine, str) else engine
    return Response(text + state.gauges.exposition(), headers={"content-type": CONTENT_TYPE})


@router.get("/version", tags=["operation"])
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@router.get("/status", tags=["operation"], response_model=StatusAnswer)
async def status(request: Request) -> Response:
    """The live numbers of the page at /."""
    state = _state(request)
    answer = {
        "draining": state.traffic.draining,
        "facts": dict(state.facts),
        "counts": dict(state.counts()),
        "prompt_tokens": dict(state.prompt_tokens()),
        "tiers": [_tier(tier, state) for tier in state.tiers()],
    }
    return json_response(answer)


def _tier(tier: TierSnapshot, state: ServerState) -> dict[str, object]:
    # A reason may name another machine, and this answer needs no key.
    hidden = tier.reason and state.config.api_key
    return asdict(replace(tier, reason="see the log or /cache/stats") if hidden else tier)


@router.get("/cache/stats", tags=["operation"], response_model=CacheStats, responses=errors(401, 503))
async def cache_stats(request: Request) -> Response:
    """Contents of pool and tiers, and counts of loads, offloads and misses."""
    return json_response(asdict(await _state(request).cache_stats()))


@router.post("/cache/reset", tags=["operation"], response_model=CacheStats, responses=errors(401, 503))
async def cache_reset(request: Request) -> Response:
    """Evict every block that no running request uses, in the pool and in the tiers of this server alone."""
    state = _state(request)
    if state.operator is not None and request.state.tenant != state.operator:
        raise NotAuthorized("Only the first --api-key may reset the cache, because all keys share it. Use that key.")
    return json_response(asdict(await state.cache_reset()))


@router.get("/", tags=["operation"], response_class=HTMLResponse)
async def page(request: Request) -> Response:
    """The live page, for browsers."""
    return HTMLResponse(_page(_state(request)), headers=PAGE_HEADERS)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The schema as a page. FastAPI's own page loads scripts from elsewhere and is blank without a network."""
    return HTMLResponse(_source("docs.html"), headers=PAGE_HEADERS)


def _source(name: str) -> str:
    return importlib.resources.files("kveik.server").joinpath("page", name).read_text("utf-8")


def _page(state: ServerState) -> str:
    source = _source("index.html")
    # The name appears in HTML text and inside a JSON string of a shell command; both need their own escapes.
    name = state.names[0]
    values = {
        "{{model}}": html.escape(name),
        "{{model_json}}": html.escape(json.dumps(name).replace("'", "\\u0027")),
        "{{version}}": html.escape(__version__),
        "{{max_model_len}}": str(state.max_model_len),
        "{{endpoint}}": "chat/completions" if state.chat_template else "completions",
        "{{ask}}": '"messages": [{"role": "user", "content": "Hello"}]' if state.chat_template else '"prompt": "Hello"',
        "{{key}}": ' \\\n  -H "Authorization: Bearer $KEY"' if state.config.api_key else "",
    }
    for mark, value in values.items():
        source = source.replace(mark, value)
    return source
