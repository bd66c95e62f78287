"""`kvlane serve`: the decision endpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlane.policy.errors import InputError


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help="A serve.toml with one deployment or several; the other options are for one without it."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A built-in model, its Hugging Face id, or a config.json.")
    ] = None,
    machine: Annotated[str | None, typer.Option(help="A built-in machine, or a TOML profile.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A record of kvlane-bench calibrate to begin with.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the deployment is called [default].")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="KV dtype, if not the model's own.")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine family [vllm].")] = None,
    executor: Annotated[
        str | None, typer.Option(help="bulk (all layers, then compute), layered or two_ended [bulk].")
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Most tokens the engine prefills in one pass.")
    ] = None,
    load_unit: Annotated[int | None, typer.Option(help="Smallest loadable run of tokens [16].")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT [127.0.0.1:8780].")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A name the endpoint is also asked under; repeatable.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where calibration and ledger are kept over restarts [nowhere].")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token to ask with [KVLANE_TOKEN from the environment].")
    ] = None,
    observe_token_file: Annotated[
        Path | None, typer.Option(help="Holds the token to observe with [KVLANE_OBSERVE_TOKEN].")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody ask who can reach it, without a token.")
    ] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error [info].")] = None,
) -> None:
    """Answer routers and engines over HTTP: decisions, reservations, observations, metrics."""
    deployment: dict[str, Any] = {
        "model": model,
        "machine": machine,
        "calibration": None if calibration is None else str(calibration),
        "tensor_parallel_size": tp,
        "kv_cache_dtype": kv_dtype,
        "engine": engine,
        "executor": executor,
        "prefill_chunk_tokens": prefill_chunk,
        "load_unit_tokens": load_unit,
        "name": name,
    }
    service: dict[str, Any] = {
        "listen": listen,
        "hosts": host or None,
        "state_dir": None if state_dir is None else str(state_dir),
        "token_file": None if token_file is None else str(token_file),
        "observe_token_file": None if observe_token_file is None else str(observe_token_file),
        "insecure": insecure or None,
        "log_level": log_level,
    }
    try:
        # The one command that needs the extra, and the only one whose start-up should pay for it.
        from kvlane.policy.service import config as settings
        from kvlane.policy.service import logs, run
    except ModuleNotFoundError as error:
        raise InputError("serve", f"needs {error.name}", "pip install 'kvlane[serve]'") from None

    def read() -> settings.Settings:
        given = {key: value for key, value in service.items() if value is not None}
        if config is not None:
            stray = [key for key, value in deployment.items() if value is not None]
            if stray:
                raise InputError("--config", f"stands beside {', '.join(stray)}", "one or the other")
            return settings.overridden(settings.read(config), given)
        one = {key: value for key, value in deployment.items() if value is not None}
        return settings.from_fields({**given, "deployments": [{"name": "default", **one}]})

    def listening(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        print(f"kvlane listens on http://{shown}:{port}", file=sys.stderr, flush=True)

    found = read()
    logs.set_up(found.log_level)
    run.serve(found, read, listening)
