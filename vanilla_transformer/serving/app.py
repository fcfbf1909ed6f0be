"""The HTTP interface of LibreTranslate (https://github.com/LibreTranslate/LibreTranslate), with FastAPI."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Literal
from urllib.parse import parse_qsl

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from ..errors import one_line
from ..languages import hub_codes, known_code
from ..sentences_vanilla_transformer import InputError
from .batching import CHAR_LIMIT, QUEUE_LIMIT, Batcher, CallerGone, Job
from .models import Direction, load_models

MOST_ALTERNATIVES = 9  # which take ten beams
MOST_TRANSLATIONS = 1000  # of a request, alternatives included; others wait meanwhile
READING_SECONDS = 30  # for a whole request; a caller that sends no more would keep the server from ending
BYTES_PER_CHARACTER = 12  # at most: \ud83d\ude00 in JSON, or %F0%9F%98%80 in a form, are one
JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"


class Query(BaseModel):
    """A request to translate. Other fields, such as `api_key`, are ignored, as LibreTranslate does."""

    q: str | list[str] = Field(min_length=1, description="a text or a list of texts")
    source: str = Field(max_length=40, description="the code of a language, such as en, or auto")
    target: str = Field(max_length=40, description="the code of a language, such as de")
    format: Literal["text"] = Field("text", description="text; HTML is not supported: send the texts between its tags")
    alternatives: int = Field(
        0, ge=0, le=MOST_ALTERNATIVES, description=f"a whole number from 0 to {MOST_ALTERNATIVES}"
    )

    @property
    def texts(self) -> list[str]:
        return [self.q] if isinstance(self.q, str) else self.q


SCHEMA = {kind: {"schema": Query.model_json_schema()} for kind in (JSON, FORM, MULTIPART)}


def create_app(
    *models: str,
    char_limit: int = CHAR_LIMIT,
    queue_limit: int = QUEUE_LIMIT,
    generation: dict | None = None,
    **options,
) -> FastAPI:
    """The app of [`make_app`], for gunicorn: each worker process calls it, and loads the models itself.

    `models`, `generation` and `options` are those of [`load_models`].
    """
    return make_app(partial(load_models, models, generation or {}, **options), char_limit, queue_limit)


def make_app(
    load: Callable[[], dict[tuple[str, str], Direction]], char_limit: int = CHAR_LIMIT, queue_limit: int = QUEUE_LIMIT
) -> FastAPI:
    """A stateless server with the interface of LibreTranslate.

    Args:
        load: Called when the server starts; returns the models by source and target.
        char_limit: The most characters in a request, all its texts together.
        queue_limit: The most requests that may wait.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher = app.state.batcher = Batcher(queue_limit)
        app.state.models = await batcher.run_in_thread(load)
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()

    pages = {"docs_url": None, "redoc_url": None}  # which would load scripts from elsewhere
    app = FastAPI(title="vanilla-transformer", version=__version__, lifespan=lifespan, **pages)
    app.add_exception_handler(StarletteHTTPException, refuse)
    for kind in (CallerGone, ClientDisconnect):  # while it waits, or while it sends
        app.add_exception_handler(kind, lambda *_: Response(status_code=499))  # nobody reads it
    app.add_exception_handler(Exception, lambda *_: error_response(500, "The server failed; its log says why."))

    @app.post("/translate", openapi_extra={"requestBody": {"required": True, "content": SCHEMA}})
    async def translate(request: Request) -> dict:
        """The translations of a text or a list of texts, as LibreTranslate answers."""
        query = await read_query(request, char_limit)
        source, direction = find_direction(app.state.models, query)
        job = Job(direction, query.texts, query.alternatives, request.is_disconnected)
        try:
            found = await app.state.batcher.translate(job)
        except asyncio.QueueFull as error:
            full = f"The server is busy: {queue_limit} requests are waiting; try again later."
            raise HTTPException(503, full, {"Retry-After": "10"}) from error
        except InputError as error:
            raise HTTPException(400, one_line(error)) from error
        return describe(query, source, found)

    @app.get("/languages")
    async def languages() -> list[dict]:
        targets = {code: [] for pair in app.state.models for code in pair}
        for source, target in app.state.models:
            targets[source].append(target)
        names = hub_codes()
        return [{"code": code, "name": names.get(code, code), "targets": targets[code]} for code in sorted(targets)]

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    return app


def error_response(status: int, message: str, headers: dict | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers)


async def refuse(request: Request, error: StarletteHTTPException) -> JSONResponse:
    """The answer to an HTTPException, with the message where LibreTranslate has it."""
    message = error.detail
    if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message = "There is only POST /translate, GET /languages, GET /health and GET /openapi.json."
    return error_response(error.status_code, message, error.headers)


async def read_query(request: Request, char_limit: int) -> Query:
    """Reads and checks a query. Raises HTTPException, with a sentence for the caller, for a wrong field."""
    try:
        async with asyncio.timeout(READING_SECONDS):
            fields = await read_fields(limited(request, BYTES_PER_CHARACTER * char_limit + 2**16))
    except TimeoutError as error:
        late = f"The request did not arrive within {READING_SECONDS} seconds; send it again."
        raise HTTPException(408, late, {"Connection": "close"}) from error
    try:
        query = Query.model_validate({name: value for name, value in fields.items() if value not in ("", None)})
    except ValidationError as error:
        first = error.errors()[0]
        name, is_missing = first["loc"][0], first["type"] == "missing"
        wanted = f"must be {Query.model_fields[name].description}"
        raise HTTPException(400, f"`{name}` {'is missing; it ' if is_missing else ''}{wanted}.") from error
    if (size := sum(max(1, len(text)) for text in query.texts)) > char_limit:
        message = f"`q` has {size:,} characters, more than the {char_limit:,} allowed; send several requests."
        raise HTTPException(400, message)
    if (count := len(query.texts) * (1 + query.alternatives)) > MOST_TRANSLATIONS:
        message = f"The request is for {count:,} translations, alternatives included, more than the"
        raise HTTPException(400, f"{message} {MOST_TRANSLATIONS:,} allowed; send several requests.")
    return query


async def read_fields(request: Request) -> dict:
    """The fields of a request: JSON, a form, or part of the URL. Raises HTTPException if it is none of these."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    try:
        if kind == JSON:
            fields = await request.json()
            if isinstance(fields, dict):
                return fields
            raise ValueError("it is not an object with fields")
        if kind not in (FORM, MULTIPART, ""):
            raise ValueError(f"its Content-Type is {kind[:80]!r}")
        text = (await request.body()).decode()
        strictly = {"keep_blank_values": True, "errors": "strict"}
        pairs = parse_qsl(request.scope["query_string"].decode(), **strictly)
        if kind == MULTIPART:  # whose parser takes bytes that are not UTF-8 for Latin-1
            pairs += (await request.form(max_files=0)).multi_items()
        else:
            pairs += parse_qsl(text, **strictly)
    except (ValueError, RecursionError) as error:
        message = f"The request cannot be read: {one_line(error)}; send {JSON} or {FORM}, in UTF-8."
        raise HTTPException(400, message) from error
    texts = [value for name, value in pairs if name == "q"]
    return dict(pairs) | ({"q": texts} if len(texts) > 1 else {})


def limited(request: Request, most: int) -> Request:
    """The same request, of which reading more than `most` bytes raises HTTPException."""
    read = 0

    async def receive() -> dict:
        nonlocal read
        message = await request.receive()
        read += len(message.get("body", b""))
        if read > most:
            raise HTTPException(413, f"The request has more than {most:,} bytes; send several requests.")
        return message

    return Request(request.scope, receive)


def find_direction(models: dict[tuple[str, str], Direction], query: Query) -> tuple[str, Direction]:
    """The code of the source language, and the model for the query.

    Raises HTTPException if no model translates so or, where the source is auto, several do.
    """
    source, target = (known_code(name) or name for name in (query.source, query.target))
    if source.lower() == "auto":
        sources = [one for one, other in models if other == target]
        if len(sources) > 1:
            message = f"`source` is auto, but languages are not detected here; name one of {', '.join(sources)}."
            raise HTTPException(400, message)
        source = sources[0] if sources else source
    if (source, target) not in models:
        message = f"No model translates from {query.source!r} to {query.target!r}; GET /languages lists the pairs."
        raise HTTPException(400, message)
    return source, models[source, target]


def describe(query: Query, source: str, found: list[list[str]]) -> dict:
    """The answer to a query. Each field is a list, of one entry a text, if the query has a list of texts."""
    answer = {"translatedText": [text for text, *_ in found]}
    if query.alternatives:
        answer["alternatives"] = [others for _, *others in found]
    if query.source.lower() == "auto":  # not detected, but the only one possible
        answer["detectedLanguage"] = [{"language": source, "confidence": 0.0} for _ in found]
    return answer if isinstance(query.q, list) else {name: value for name, (value,) in answer.items()}
