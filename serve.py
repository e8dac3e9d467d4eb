"""`python -m serve`: a model behind HTTP (OpenAI) and gRPC. `--help` lists the flags.

This process holds the front ends; the engine core is a child process. Exit codes: 0 after SIGTERM or SIGINT, 1 when the
engine died, 2 when the service cannot start as configured (one line on standard error says why).
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import uvloop

from checkpoints.default_model import default_model_path
from checkpoints.errors import CheckpointError
from serving.api.server import Ports, bind_ports, serve_apis
from serving.api.service import Service
from serving.config import ServerConfig
from serving.distributed.following import report_failure
from serving.distributed.leading import refuse_followers
from serving.engine.process import CoreProcess, launch_core
from serving.engine.socket_client import SocketClient
from serving.errors import ConfigError, EngineDead, PageloomError
from serving.flags import parse_flags
from serving.metrics import Metrics
from serving.tokenizer.load import load_tokenizer
from serving.tokenizer.tokenizer import Tokenizer

BUILD = "serving.build:build_core"


def main() -> None:
    started = time.time()
    try:
        config = parse_flags(sys.argv[1:], os.environ)
        code = _follow(config) if config.engine.is_follower else _lead(config, started)
    except EngineDead as error:
        print(f"pageloom: {error}", file=sys.stderr)
        code = 1
    except (PageloomError, CheckpointError) as error:
        print(f"pageloom: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _lead(config: ServerConfig, started: float) -> int:
    try:
        ports, config = bind_ports(config), _resolve(config)
    except (PageloomError, CheckpointError) as error:
        if config.engine.hosts is not None:
            refuse_followers(config.engine.hosts, str(error))
        raise
    return _run(config, ports, started)


def _follow(config: ServerConfig) -> int:
    """No front ends, no scheduler: the core of host 0 says what to do."""
    from serving.distributed.follower import follow  # loads jax

    try:
        model = config.engine.model or str(default_model_path(progress=True))
    except CheckpointError as error:
        assert config.engine.hosts is not None
        report_failure(config.engine.hosts, str(error))
        raise
    return follow(replace(config.engine, model=model), config.shutdown_grace_seconds)


def _resolve(config: ServerConfig) -> ServerConfig:
    """Settles the model's path and name, and reads the chat template."""
    path = config.engine.model or str(default_model_path(progress=True))
    name = config.served_model_name or Path(path).expanduser().absolute().name.removesuffix(".gguf")
    template = config.chat_template
    if template is not None:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--chat-template {template}: {reason}; it must be a Jinja file in UTF-8") from error
    engine = replace(config.engine, model=path)
    return replace(config, engine=engine, served_model_name=name, chat_template=template)


def _run(config: ServerConfig, ports: Ports, started: float) -> int:
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_tokenizer, config.engine.tokenizer or config.engine.model)
        core = launch_core(BUILD, config.engine)
        try:
            return uvloop.run(_serve(config, ports, core, loading.result(), started))
        finally:
            core.kill()


async def _serve(config: ServerConfig, ports: Ports, core: CoreProcess, tokenizer: Tokenizer, started: float) -> int:
    client = await SocketClient.connect(core.address, core)
    name = config.served_model_name or ""
    service = Service(
        engine=client,
        tokenizer=tokenizer,
        config=config,
        model_name=name,
        metrics=Metrics(name, client.info, lambda: client.stats),
        version=version("pageloom"),
        start_time=time.time(),
    )
    return await serve_apis(service, ports, on_ready=lambda: _print_ready(config, ports, name, started))


def _print_ready(config: ServerConfig, ports: Ports, name: str, started: float) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    base = f"http://{host}:{ports.http_port}"
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
    lines = [f"Ready after {time.time() - started:.1f} s: {name} at {base}/v1"]
    if ports.grpc_port is not None:
        lines.append(f"gRPC (vllm.grpc.engine.VllmEngine) at {host}:{ports.grpc_port}")
    lines += ["Try it:", f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"]
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
