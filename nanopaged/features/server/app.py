"""The server: OpenAI's API over HTTP, on starlette and uvicorn (`python engine.py --serve`). What answers is an ASGI
application, which other servers can run, too (`app`, used by features/ray_serve.py).

    event loop        headers, body                                              events
    four threads                     JSON, template, tokenizer                            answers, log probabilities
    a process                                           grammar                  (features/grammar.py)
    engine's thread                                                      steps   (async_llm.py)

**Security.** A web page can make a browser post to this machine. So a body must be declared as JSON, which a browser
does not send to another site without asking, and Host must be an address, "localhost", the name in --host or one in
--allowed-hosts: a page whose own name points to this machine sends that name. A key does instead, which a page does not
have. The key is for /v1 and for texts and tokens; the other paths are open, as in vLLM, and /health, /ping and /metrics
answer to any Host.

**No client may stop the others.** What takes long has a bound: the constants below, and those of openai.py.
"""
import asyncio
import errno
import hmac
import ipaddress
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from nanopaged import LLM, SamplingParams, __version__
from nanopaged.features.server.answers import CHAT, COMPLETIONS, ApiError, Call
from nanopaged.features.server.async_llm import AsyncLLM, Stream
from nanopaged.features.server.openai import TEXT_PATHS, Serving, make_reader
from nanopaged.features.server.responses import RESPONSES
from nanopaged.options import feature

try:
    import uvicorn
    from starlette._utils import get_route_path  # what the routes are found by: the path behind a prefix
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ValueError(f"the server needs starlette and uvicorn ({error}); pip install starlette uvicorn") from None

MOST_BODY_BYTES = 2**21  # or more, if the model takes more token ids
MOST_BRACKETS = 100_000  # of a body: Python takes 12 ms for so many lists, and 0.9 s for 700,000, which 2 MB can have
LARGE_BODY_BYTES = 2**16  # larger bodies are read one at a time: JSON's parser does not let other threads run
MOST_SEQUENCES = 4096  # samples under way; with more, a request gets 503
NUM_THREADS = 4  # that read and answer; with more of them, steps would wait longer for Python's lock
MOST_PROMPT_LOGPROBS = 2**19  # of a call, 200 MB
HEADER_SECONDS = 10  # for a client to send its headers
BODY_SECONDS = 30  # for a client to send its body
READ_SECONDS = 60  # for a client to read something of what was sent
SHUTDOWN_SECONDS = 30  # for requests under way to finish
ANY_HOST = ("/health", "/ping", "/metrics")


class Guard:
    """An ASGI application: checks a request's headers, gives the request to the routes, and adds an id to the answer.
    What goes wrong is an error in OpenAI's form."""

    def __init__(self, routes: list[Route], lifespan: Any, names: Collection[str], api_key: str | None) -> None:
        kinds = ApiError, HTTPException, ClientDisconnect, Exception  # uvicorn logs what is none of the first three
        self.app: Any = Starlette(routes=routes, lifespan=lifespan,
                                  exception_handlers=dict.fromkeys(kinds, error_response))
        self.key = (api_key or "").encode()
        self.names = {"localhost", *(name.strip().lower() for name in names)} - {""}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # "lifespan", or "websocket", which has no route
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", uuid.uuid4().hex.encode())[:128]

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        app = self.app
        if problem := self._find_problem(scope, headers):
            app = await error_response(None, problem)
            app.headers["Connection"] = "close"
        await app(scope, receive, send_with_id)

    def _find_problem(self, scope: Any, headers: dict[bytes, bytes]) -> ApiError | None:
        host, path = headers.get(b"host", b"").decode("latin-1"), get_route_path(scope)
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not (self.key or path in ANY_HOST or name.lower() in self.names or is_address(name)):
            return ApiError(f"the header Host has {host!r:.80}, which is no address and not the server's name; the "
                            "server's operator can name it with --allowed-hosts, or set a key")
        if self.key and path.startswith(("/v1", *TEXT_PATHS)):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.key):
                return ApiError("the server's key is needed, in the header Authorization: Bearer KEY", 401,
                                "invalid_api_key")
        if b"content-length" in headers and b"transfer-encoding" in headers:  # a proxy may have read the other one
            return ApiError("the headers Content-Length and Transfer-Encoding are both given; leave one out")
        if scope["method"] == "POST" and path not in ANY_HOST:
            kind = headers.get(b"content-type", b"").decode("latin-1")
            if kind.partition(";")[0].strip().lower() != "application/json":
                return ApiError(f"a body needs the header Content-Type: application/json, not {kind!r:.80}")
        return None


class Protocol(H11Protocol):
    """uvicorn's, with a time limit for headers. Its own limit is for a kept connection that is silent."""
    header_seconds = HEADER_SECONDS

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.headers_due = self.loop.call_later(self.header_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # all headers of a request have come
            self.headers_due.cancel()
        elif self.headers_due.cancelled():
            self.headers_due = self.loop.call_later(self.header_seconds, self.transport.abort)


def is_address(name: str, is_loopback: bool = False) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback or not is_loopback
    return False


async def error_response(request: Any, error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):  # the router's
        headers = dict(error.headers or {})
        paths = ", ".join(route.path for route in request.app.routes).replace("{name:path}", "NAME")
        sentence = f"the methods of this path are {headers['Allow']}" if error.status_code == 405 else (
            f"there is no such path here, but {paths}")
        error = ApiError(sentence, error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError("the server failed; its log has the reason", 500)
    headers |= {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status, {})
    return JSONResponse(error.body, error.status, headers)


def parse(body: bytes) -> Any:
    if (num_brackets := body.count(b"[") + body.count(b"{")) > MOST_BRACKETS:
        raise ApiError(f"the body has {num_brackets} opening brackets, and at most {MOST_BRACKETS}; send several "
                       "requests", 413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error})") from None


class Application(Guard):
    """The endpoints, and their engine, which runs during the application's lifespan.

    names: of this server, that the header Host may have besides addresses and "localhost"
    """
    most_sequences, body_seconds = MOST_SEQUENCES, BODY_SECONDS
    engine: AsyncLLM
    compiler: Any = None  # the engine's compiler, from the first request with a grammar on

    def __init__(self, serving: Serving, names: Collection[str] = (), api_key: str | None = None) -> None:
        self.serving, self.llm = serving, serving.llm
        self.most_bytes = max(MOST_BODY_BYTES, 8 * self.llm.max_model_len)
        self.threads, self.large_thread = ThreadPoolExecutor(NUM_THREADS), ThreadPoolExecutor(1)
        routes = [Route(path, self.answer, methods=["POST"]) for path in (COMPLETIONS, CHAT, RESPONSES, *TEXT_PATHS)]
        routes += [Route(path, answer, methods=["GET"]) for path, answer in (
            ("/v1/models", self.models), ("/v1/models/{name:path}", self.models), ("/health", self.health),
            ("/ping", self.health), ("/metrics", self.metrics), ("/version", JSONResponse({"version": __version__})))]
        super().__init__(routes, self.lifespan, names, api_key)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.engine = AsyncLLM(self.llm)
        self.engine.start()
        yield
        self.engine.end()
        await asyncio.to_thread(self.engine.stop)
        if self.compiler:
            await self.compiler.close()

    async def answer(self, request: HttpRequest) -> Response:
        """The endpoints that generate, and those of TEXT_PATHS. The work is cancelled when the client leaves."""
        body = await self.read_body(request)
        done = asyncio.ensure_future(self._respond(get_route_path(request.scope), body))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientDisconnect
            return done.result()
        finally:
            done.cancel()
            gone.cancel()

    async def read_body(self, request: HttpRequest) -> bytes:
        body = bytearray()
        too_large = ApiError(f"the body has more than {self.most_bytes} bytes; send several requests", 413)
        if int(request.headers.get("content-length", 0)) > self.most_bytes:  # HTTP's parser has checked the number
            raise too_large
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.most_bytes:
                        raise too_large
        except TimeoutError:
            raise ApiError(f"the body did not arrive within {self.body_seconds} seconds", 408) from None
        return bytes(body)

    def _in_thread(self, is_large: bool, function: Callable, *arguments: Any) -> Awaitable:
        """What may take a while, without the event loop; of what is large one at a time."""
        return self.engine.loop.run_in_executor(self.large_thread if is_large else self.threads, function, *arguments)

    async def _respond(self, path: str, body: bytes) -> Response:
        is_large = len(body) > LARGE_BODY_BYTES
        call = await self._in_thread(is_large, lambda: self.serving.read(path, parse(body)))
        if path in TEXT_PATHS:
            return JSONResponse(call)
        try:
            if call.params.structured_outputs:
                compiler_of = feature("grammar", "a request that asks for grammar").compiler_of
                self.compiler = await self._in_thread(False, compiler_of, self.llm)
                await self.compiler.compile_safely(call.params.structured_outputs)
            stream = await self._in_thread(is_large, self._make_stream, call)
        except (ValueError, TypeError) as error:
            raise ApiError.of(error) from None
        num_sequences = self.engine.num_unfinished()
        if num_sequences + stream.num_sequences > self.most_sequences:
            raise ApiError(f"the server has {num_sequences} samples under way and {self.most_sequences} at most; try "
                           "again later", 503)
        if call.stream:
            return StreamingResponse(self._events(call, stream), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # nginx's
        with self.engine.open(stream):
            await self.engine.outputs(stream)
            return await self._in_thread(call.params.prompt_logprobs is not None, lambda: JSONResponse(
                call.response([*stream.take_news().values()])))

    def _make_stream(self, call: Call) -> Stream:
        requests = [self.llm.read_request(prompt, call.params, call.priority) for prompt in call.prompts]
        if (echoes := call.params.prompt_logprobs) is not None:
            num_tokens = sum(len(request.prompt_token_ids) for request in requests)
            if num_tokens * (echoes + 1) > MOST_PROMPT_LOGPROBS:
                raise ApiError(f"{num_tokens} prompt tokens with {echoes + 1} log probabilities each are more than "
                               f"{MOST_PROMPT_LOGPROBS}; send several requests")
        # Log probabilities of prompts are converted at once, in a thread: so these streams have one event.
        return Stream(requests, call.stream and echoes is None)

    async def _events(self, call: Call, stream: Stream) -> AsyncIterator[bytes]:
        def write() -> str:
            return "".join([call.events(number, output) for number, output in (news or stream.take_news()).items()])

        with self.engine.open(stream):
            try:
                while stream.has_news or not stream.finished:
                    news = await self.engine.outputs(stream)
                    is_long = call.params.logprobs is not None
                    if text := await self._in_thread(not stream.in_parts, write) if is_long else write():
                        yield text.encode()
                yield call.end([request.output() for request in stream.requests]).encode()
            except ApiError as error:  # the status has been sent
                yield f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()

    async def models(self, request: HttpRequest) -> Response:
        card = {"id": self.serving.model, "object": "model", "created": int(time.time()), "owned_by": "nanopaged",
                "root": self.serving.root or self.serving.model, "parent": None, "permission": [],
                "max_model_len": self.llm.max_model_len}
        self.serving.check_model(request.path_params.get("name", self.serving.model))
        return JSONResponse(card if "name" in request.path_params else {"object": "list", "data": [card]})

    async def health(self, request: HttpRequest) -> Response:
        await self.check()
        return Response()

    async def check(self) -> None:
        """ApiError if the engine computes no texts."""
        if problem := self.engine.problem():
            raise ApiError(problem, 503)
        if self.engine.failure is not None:  # a load balancer sends no request that would tell whether it has recovered
            stream = Stream([self.llm.read_request([0], SamplingParams(max_tokens=1, detokenize=False))], False)
            with self.engine.open(stream):
                await self.engine.outputs(stream)
            if self.engine.failure is not None:
                raise ApiError(f"the engine failed: {ApiError.of(self.engine.failure)}", 503)

    async def metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.engine.metrics.text(self.serving.model), media_type="text/plain; version=0.0.4")


class Server(uvicorn.Server):
    """uvicorn's, with an end that requests under way do not delay for long."""
    shutdown_seconds = SHUTDOWN_SECONDS

    def __init__(self, app: Application) -> None:
        self.app, self.is_out_of_files = app, False
        super().__init__(uvicorn.Config(  # "httptools" is faster than "h11", and keeps headers of any size
            app, http=Protocol, ws="none", lifespan="on", log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS + 10))  # then uvicorn prints a traceback for each request

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.say_once)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        print(f"stopping: requests under way get {self.shutdown_seconds} seconds, and a second Ctrl-C ends them",
              file=sys.stderr, flush=True)
        asyncio.get_running_loop().call_later(self.shutdown_seconds, self.hurry)
        await super().shutdown(sockets)

    def handle_exit(self, number: int, frame: Any) -> None:
        """As uvicorn's, which would raise the signal once more after the shutdown."""
        if self.should_exit:
            self.hurry()
        self.should_exit = True

    def hurry(self) -> None:
        """Requests under way end with an error."""
        self.app.engine.end()
        for connection in list(self.server_state.connections):  # some do not read their errors
            self.app.engine.loop.call_later(3, connection.transport.abort)

    def say_once(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio reports each connection that it cannot accept, with a traceback."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self.is_out_of_files:
            self.is_out_of_files = True
            print("warning: no more connections can be accepted: the process has all files open that it may have; "
                  "raise the limit (ulimit -Hn)", file=sys.stderr)


def bind(host: str, port: int) -> socket.socket:
    """The server's socket: it is refused before the model is loaded. Raises ValueError."""
    # With the protocol named, asyncio sets TCP_NODELAY; else an answer on a kept connection waits for 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux closes the connection of a client that does not read
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * READ_SECONDS)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port} cannot be opened: {error}") from None
    return listener


def serve(serving: Serving, host: str, listener: socket.socket, api_key: str | None,
          allowed_hosts: Collection[str] = ()) -> int:
    """Serve until SIGTERM or Ctrl-C; then requests under way have SHUTDOWN_SECONDS to finish, or until the signal comes
    again. The exit code."""
    if not (api_key or host == "localhost" or is_address(host, is_loopback=True)):
        print(f"warning: whoever reaches {host} may use this server; give it a key with --api-key", file=sys.stderr)
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = Server(Application(serving, {host, *allowed_hosts}, api_key))
    listener.listen(2048)
    address = f"[{host}]" if ":" in host else host
    print(f"serving {serving.model} at http://{address}:{listener.getsockname()[1]}/v1", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    print("stopped", file=sys.stderr)
    return 0


def app(model: str = "shakespeare", *, name: str | None = None, api_key: str | None = None,
        allowed_hosts: Collection[str] = (), chat_template: str | None = None, tool_call_parser: str | None = None,
        reasoning_parser: str | None = None, **options: Any) -> Application:
    """The server as an ASGI application with its own LLM, for other servers. `uvicorn --factory
    nanopaged.features.server.app:app` serves the bundled model. The time limits for headers and for clients that do
    not read are those of that server.

    name: under which the model is served; None: `model`
    api_key: None: that of the environment variable NANOPAGED_API_KEY, if it is set
    allowed_hosts: what the header Host may have besides addresses and "localhost", if there is no key
    chat_template: in Jinja; None: the checkpoint's
    options: those of LLM
    """
    llm = LLM(model, **{"warm_up": True} | options)
    serving = make_reader(llm, model, served_model_name=name, chat_template=chat_template,
                          tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
    return Application(serving, allowed_hosts, api_key or os.environ.get("NANOPAGED_API_KEY"))
