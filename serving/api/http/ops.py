"""The endpoints beside generation: models, tokenizer, health, load, cache."""

import asyncio
import dataclasses
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from serving.api.http.body import read_body
from serving.api.http.chat_prompt import chat_prompt_ids
from serving.api.http.requests import DetokenizeRequest, TokenizeRequest
from serving.api.http.responses import (
    DetokenizeResponse,
    FlushResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionResponse,
)
from serving.api.http.sending import json_response
from serving.api.service import Service
from serving.errors import InvalidRequest

SECRET_FIELDS = ("api_keys", "admin_api_key")


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=int(service.start_time),
                     root=service.config.engine.model or service.model_name,
                     max_model_len=service.engine.info.max_model_len)


async def models(service: Service, request: Request) -> Response:
    return json_response(ModelList(data=[_card(service, name) for name in service.model_names]))


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["model_id"]
    service.check_model(name)
    return json_response(_card(service, name))


async def tokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, TokenizeRequest, service.config.max_body_bytes)
    service.check_model(body.model)
    if body.prompt is not None:
        ids = await service.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = await chat_prompt_ids(service, body.chat(), add_special_tokens=bool(body.add_special_tokens))
    texts = None
    if body.return_token_strs:  # a body may hold millions of tokens: beside the event loop
        texts = await asyncio.to_thread(lambda: [service.tokenizer.token_text(token_id) for token_id in ids])
    return json_response(TokenizeResponse(count=len(ids), max_model_len=service.engine.info.max_model_len, tokens=ids,
                                          token_strs=texts))


async def detokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, DetokenizeRequest, service.config.max_body_bytes)
    service.check_model(body.model)
    vocab_size = service.engine.info.vocab_size
    for token_id in body.tokens:
        if token_id >= vocab_size:
            raise InvalidRequest(f"tokens has token id {token_id}, must be in the vocabulary: 0 to {vocab_size - 1}",
                                 "tokens")
    text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))


async def health(service: Service, request: Request) -> Response:
    service.check_admission()
    return Response()


async def version(service: Service, request: Request) -> Response:
    return json_response(VersionResponse(service.version))


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


async def load(service: Service, request: Request) -> Response:
    return json_response(LoadResponse(service.lifecycle.live))


async def server_info(service: Service, request: Request) -> Response:
    config: dict[str, Any] = dataclasses.asdict(service.config)
    for name in SECRET_FIELDS:
        config.pop(name)
    return json_response({"version": service.version, "model": service.model_name, "config": config,
                          "engine": service.engine.info})


async def flush_cache(service: Service, request: Request) -> Response:
    service.engine.check_health()
    return json_response(FlushResponse(await service.engine.flush_cache()))
