"""The server: OpenAI's API over HTTP, on starlette and uvicorn (`python engine.py --serve`).

    event loop        headers, body                                              events
    four threads                     JSON, template, tokenizer, grammar                  an answer that is no stream
    engine's thread                                                      steps   (nanopaged/api/async_llm.py)

**Security.** A web page can make a browser post to this machine. So a body must be declared as JSON, which a browser
does not send to another site without asking, and Host must be an address, "localhost" or the name in --host: a page
whose own name points to this machine sends that name. Beyond localhost a key does instead, which a page does not have.
The key is for /v1 and for texts and tokens; /health and /metrics are open, as in vLLM.
"""
import asyncio
import hmac
import ipaddress
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from nanopaged.api.answers import CHAT, COMPLETIONS, ApiError, Call
from nanopaged.api.async_llm import AsyncLLM, Stream
from nanopaged.api.openai import TEXT_PATHS, Serving

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise ValueError(f"the server needs starlette and uvicorn ({error}); pip install starlette uvicorn") from None

MOST_BODY_BYTES = 2**23
MOST_SEQUENCES = 4096  # samples under way; with more, a request gets 503
NUM_THREADS = 4  # that read and answer; with more of them, steps would wait longer for Python's lock
BODY_SECONDS = 30  # for a client to send its body
SHUTDOWN_SECONDS = 30  # for requests under way to finish


class Guard:
    """The checks of a request's headers, before all others: an ASGI middleware."""

    def __init__(self, app: Any, host: str, api_key: str | None) -> None:
        self.app, self.host, self.key = app, host, api_key and f"Bearer {api_key}".encode()
        self.checks_host = not api_key or is_local(host)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self.app
        if scope["type"] == "http" and (problem := self._find_problem(scope)):
            app = error_response(problem)
        await app(scope, receive, send)

    def _find_problem(self, scope: Any) -> ApiError | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.checks_host and not self._may_be_ours(host):
            return ApiError(f"the header Host has {host!r:.80}, which is no address and not the server's name; the "
                            "server's operator can name it with --host, or set a key")
        if self.key and scope["path"].startswith(("/v1", *TEXT_PATHS)):
            if not hmac.compare_digest(headers.get(b"authorization", b""), self.key):
                return ApiError("the server's key is needed, in the header Authorization: Bearer KEY", 401)
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").decode("latin-1")
            if kind.partition(";")[0].strip().lower() != "application/json":
                return ApiError(f"the header Content-Type must be application/json, not {kind!r:.80}")
        return None

    def _may_be_ours(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name.lower() in ("localhost", self.host.lower()) or is_address(name)


def is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def is_local(host: str) -> bool:
    return host == "localhost" or is_address(host) and ipaddress.ip_address(host).is_loopback


def error_response(error: Exception) -> Response:
    if isinstance(error, HTTPException):  # starlette's, for a path or a method
        error = ApiError(f"there is no such path here, or not with this method ({error.detail})", error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError("the server failed; its log has the reason", 500)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
    return JSONResponse(error.body, error.status, headers.get(error.status))


async def read_body(request: HttpRequest) -> bytes:
    body = bytearray()
    too_large = ApiError(f"the body has more than {MOST_BODY_BYTES} bytes; send several requests", 413)
    if int(request.headers.get("content-length", 0)) > MOST_BODY_BYTES:  # HTTP's parser has checked the number
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_SECONDS} seconds", 408) from None
    return bytes(body)


def parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error})") from None


class Api:
    """The endpoints."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.llm = serving, serving.llm
        self.threads = ThreadPoolExecutor(NUM_THREADS)

    def app(self, host: str, api_key: str | None) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.engine = AsyncLLM(self.llm, asyncio.get_running_loop())
            self.engine.start()
            yield

        async def refuse(request: HttpRequest, error: Exception) -> Response:
            return error_response(error)
        routes = [Route(path, self.answer, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
        routes += [Route(path, self.convert, methods=["POST"]) for path in TEXT_PATHS]
        routes += [Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.models),
                   Route("/health", self.health), Route("/metrics", self.metrics)]
        return Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(Guard, host, api_key)],
                         exception_handlers={kind: refuse for kind in (ApiError, HTTPException, Exception)})

    def server(self, host: str, api_key: str | None) -> uvicorn.Server:
        return uvicorn.Server(uvicorn.Config(  # "httptools" is faster than "h11", and keeps headers of any size
            self.app(host, api_key), http="h11", ws="none", lifespan="on", log_level="warning", access_log=False,
            server_header=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS))

    async def answer(self, request: HttpRequest) -> Response:
        """The endpoints that generate."""
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        call, stream = await self._in_thread(self._read, request.url.path, body)
        num_sequences = self.engine.num_sequences
        if num_sequences + stream.num_sequences > MOST_SEQUENCES:
            raise ApiError(f"the server has {num_sequences} samples under way and {MOST_SEQUENCES} at most; try again "
                           "later", 503)
        if call.stream:
            return StreamingResponse(self._events(call, stream), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})
        answer, gone = asyncio.ensure_future(self._whole(call, stream)), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else Response(status_code=499)
        finally:
            answer.cancel()
            gone.cancel()

    def _in_thread(self, function: Callable, *arguments: Any) -> Awaitable:
        return self.engine.loop.run_in_executor(self.threads, function, *arguments)

    def _read(self, path: str, body: bytes) -> tuple[Call, Stream]:
        """In a worker thread: a long text takes a while."""
        call = self.serving.read(path, parse(body))
        if len(call.prompts) * call.params.n > MOST_SEQUENCES:
            raise ApiError(f"{len(call.prompts)} prompts with n {call.params.n} are more than {MOST_SEQUENCES} "
                           "samples; send several requests")
        try:
            requests = [self.llm._read_request(prompt, call.params, call.priority) for prompt in call.prompts]
        except (ValueError, TypeError) as error:
            raise ApiError.of(error) from None
        return call, Stream(requests, call.stream)

    async def _whole(self, call: Call, stream: Stream) -> Response:
        def write() -> Response:
            stream.take_news()
            return JSONResponse(call.response([stream.latest[number] for number in range(len(stream.requests))]))

        self.engine.open(stream)
        try:
            await self.engine.outputs(stream)
            return await self._in_thread(write)
        finally:
            self.engine.close(stream)

    async def _events(self, call: Call, stream: Stream) -> AsyncIterator[bytes]:
        self.engine.open(stream)
        try:
            while not stream.is_taken:
                news = await self.engine.outputs(stream)
                if text := "".join([call.events(number, output) for number, output in news.items()]):
                    yield text.encode()
            yield call.end(list(stream.latest.values())).encode()
        except ApiError as error:  # the status has been sent
            yield f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()
        finally:
            self.engine.close(stream)

    async def convert(self, request: HttpRequest) -> Response:
        body = await read_body(request)
        return JSONResponse(await self._in_thread(lambda: self.serving.read(request.url.path, parse(body))))

    async def models(self, request: HttpRequest) -> Response:
        card = {"id": self.serving.model, "object": "model", "created": int(time.time()), "owned_by": "nanopaged",
                "root": self.serving.root or self.serving.model, "parent": None, "permission": [],
                "max_model_len": self.llm.max_model_len}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [card]})
        self.serving.check_model(request.path_params["name"])
        return JSONResponse(card)

    async def health(self, request: HttpRequest) -> Response:
        if self.engine.failure is not None or not self.engine.is_alive():
            raise ApiError(f"the engine failed: {self.engine.failure}", 503)
        return Response()

    async def metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.engine.metrics(), media_type="text/plain; version=0.0.4")


def bind(host: str, port: int) -> socket.socket:
    """The server's socket: it is refused before the model is loaded. Raises ValueError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port} cannot be opened: {error}") from None
    return listener


def serve(serving: Serving, host: str, listener: socket.socket, api_key: str | None) -> int:
    """Serve until SIGTERM or Ctrl-C; then requests under way have SHUTDOWN_SECONDS to finish. The exit code."""
    if not (api_key or is_local(host)):
        print(f"warning: whoever reaches {host} may use this server; give it a key with --api-key", file=sys.stderr)
    api = Api(serving)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal once more when it has shut down
        signal.signal(number, lambda *_: None)
    listener.listen(2048)
    address = f"[{host}]" if ":" in host else host
    print(f"serving {serving.model} at http://{address}:{listener.getsockname()[1]}/v1", file=sys.stderr, flush=True)
    api.server(host, api_key).run(sockets=[listener])
    api.engine.stop()
    return 0
