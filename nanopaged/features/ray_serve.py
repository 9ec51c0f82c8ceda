"""The server on many machines, with Ray Serve: `serve run nanopaged.features.ray_serve:build [NAME=VALUE ..]`.

    clients --> a proxy on each machine --> replicas, each the application of features/server/app.py
                x-session-id: to the replica whose prefix cache has the session's blocks

NAME=VALUE: `num_gpus` and `num_cpus` of each replica [0, 1], `min_replicas` and `max_replicas` [1, 2], as many as there
is work for, and what `app` in app.py takes: `model`, `api_key`, options of LLM, and so on.
"""
import asyncio
import os
from typing import Any

from nanopaged.features.ray_words import read_words
from nanopaged.options import feature

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ImportError as error:
    raise ValueError(f'many machines need Ray ({error}); pip install "ray[data,serve]"') from None

# By x-session-id. Ray's PrefixCacheAffinityRouter would look at the prompt, but it reads the request objects of Ray's
# own server, whose package needs vLLM or SGLang. A replica here gets HTTP as it comes.
STICKY = RequestRouterConfig(request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter")
NUMBERS = {"num_gpus": 0, "num_cpus": 1, "min_replicas": 1, "max_replicas": 2}
TEXTS = "name", "api_key", "allowed_hosts", "chat_template", "tool_call_parser", "reasoning_parser"


@serve.deployment(max_ongoing_requests=256,  # Serve's default is 5; more would wait in the proxy
                  graceful_shutdown_timeout_s=600,  # for streams under way; without any, a replica ends at once
                  health_check_period_s=5, request_router_config=STICKY)
@serve.ingress()
class Nanopaged:
    async def __init__(self, **options: Any) -> None:
        self.application = await asyncio.to_thread(feature("server.app", "Ray Serve").app, **options)

    def __serve_build_asgi_app__(self) -> Any:
        return self.application

    async def check_health(self) -> None:
        await self.application.check()  # if it raises, Serve puts another replica in the place of this one


def build(words: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and for Serve's configuration files."""
    options = read_words({"api_key": os.environ.get("NANOPAGED_API_KEY")} | words, NUMBERS, TEXTS)
    gpus, cpus, least, most = [options.pop(name, default) for name, default in NUMBERS.items()]
    options["allowed_hosts"] = options.get("allowed_hosts", "").split(",")
    resources = {"num_gpus": gpus, "num_cpus": cpus}
    replicas = {"min_replicas": least, "max_replicas": max(least, most), "target_ongoing_requests": 64}
    return Nanopaged.options(ray_actor_options=resources, autoscaling_config=replicas).bind(**options)
