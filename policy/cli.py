"""`kvlane`: ask the policy from the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvlane.policy.calibration_apply import Parameters, calibrated
from kvlane.policy.calibration_record import read
from kvlane.policy.catalog import load_machine, load_model
from kvlane.policy.cli_machines import machines
from kvlane.policy.cli_models import models
from kvlane.policy.cli_serve import serve
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Machine
from kvlane.policy.plan import EXECUTORS, Executor, Plan, Request
from kvlane.policy.planner import Planner
from kvlane.policy.units import parse_rate, show_bytes, show_rate, show_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _front_door() -> None:
    """Load, recompute or split: decide by cost where a prompt's KV cache comes from."""


@app.command()
def decide(
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")],
    model: Annotated[
        str | None,
        typer.Option(help="A built-in model, its Hugging Face id, or a config.json [the calibration's own]."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="A built-in machine, or a TOML profile [what the calibration was measured on]."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A record of kvlane-bench calibrate, of this model, device, engine, dtypes and ranks: its"
            " numbers take the place of the profile's. --link still goes before it."
        ),
    ] = None,
    hit: Annotated[
        list[str] | None,
        typer.Option(
            help="TIER=TOKENS stored from token 0, one number or one per rank (host=1024,768); repeatable: two"
            " tiers may then load at once."
        ),
    ] = None,
    resident: Annotated[int, typer.Option(help="Prefix tokens already in device KV.")] = 0,
    load_unit: Annotated[int, typer.Option(help="Smallest loadable run of tokens.")] = 16,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Most tokens the engine prefills in one pass.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks [1, or the calibration's].")] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="KV dtype, if not the model's own or the calibration's (fp8, bf16, ...)."),
    ] = None,
    state_checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="TIER=TOKENS,TOKENS after which a snapshot of recurrent state is stored, for models that have"
            " one; repeatable."
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="What the engine can do: bulk (all layers, then compute), layered (each layer waits for its own"
            " KV) or two_ended (layered, and the front of the prefix is computed while the rest loads)."
        ),
    ] = "bulk",
    link: Annotated[
        list[str] | None,
        typer.Option(help='Achieved link rate, "50 GB/s" for every tier or TIER="50 GB/s"; repeatable.'),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine family whose prefill efficiency to use [vllm, or the calibration's]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say whether to load, recompute or split one request's prefix, and what each would take."""
    for option, value in (("--engine", engine), ("--kv-dtype", kv_dtype)):
        if value is not None and not value.strip():
            raise InputError(option, "is empty", "a name, or leave it out")
    if executor not in EXECUTORS:
        raise InputError("--executor", f"unknown executor {executor!r}", " or ".join(EXECUTORS))
    found = _parameters(model, machine, calibration, engine, tp, kv_dtype)
    planner = Planner(
        found.model,
        _linked(found.machine, link or []),
        executor=_executor(executor),
        tp=found.tp,
        kv_dtype=found.kv_dtype,
        engine=found.engine,
        calibration=found.calibration,
    )
    request = Request(
        prompt_tokens=prompt_tokens,
        hits=_hits(hit or []),
        resident_tokens=resident,
        load_unit_tokens=load_unit,
        prefill_chunk_tokens=prefill_chunk,
        state_checkpoints=_checkpoints(state_checkpoint or []),
    )
    plan = planner.decide(request)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(plan.to_dict()), indent=2).decode())
    else:
        print(_in_words(plan))


app.command()(models)
app.command()(machines)
app.command()(serve)


def _parameters(
    model: str | None,
    machine: str | None,
    calibration: Path | None,
    engine: str | None,
    tp: int | None,
    kv_dtype: str | None,
) -> Parameters:
    """What to plan with: the profiles alone, or a calibration record on them or on its own."""
    spec = None if model is None else load_model(model)
    where = None if machine is None else load_machine(machine)
    if calibration is not None:
        return calibrated(
            read(calibration), model=spec, machine=where, engine=engine, tp=tp, kv_dtype=kv_dtype
        )
    if spec is None:
        raise InputError("--model", "is missing", "a model, or a --calibration that carries one")
    if where is None:
        raise InputError("--machine", "is missing", "a machine, or a --calibration of one")
    return Parameters(spec, where, engine or "vllm", 1 if tp is None else tp, kv_dtype, None)


def _executor(name: str) -> Executor:
    return next(known for known in EXECUTORS if known == name)


def _tier_tokens(text: str, option: str, example: str) -> tuple[str, tuple[int, ...]]:
    """The tier and the counts of one TIER=TOKENS,TOKENS; raises `InputError` naming the option."""
    tier, sign, tokens = text.partition("=")
    try:
        counts = tuple(int(count) for count in tokens.split(","))
    except ValueError:
        counts = ()
    if not tier.strip() or not sign or not counts:
        raise InputError(option, f"{text!r} is not TIER=TOKENS", f"such as {example}")
    return tier.strip(), counts


def _hits(texts: list[str]) -> dict[str, int | tuple[int, ...]]:
    hits: dict[str, int | tuple[int, ...]] = {}
    for text in texts:
        tier, ranks = _tier_tokens(text, "--hit", "host=12368")
        if tier in hits:
            raise InputError("--hit", f"names tier {tier!r} twice", "each tier once")
        hits[tier] = ranks if len(ranks) > 1 else ranks[0]
    return hits


def _checkpoints(texts: list[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        tier, counts = _tier_tokens(text, "--state-checkpoint", "host=4096,8192")
        found[tier] = (*found.get(tier, ()), *counts)
    return found


def _linked(machine: Machine, texts: list[str]) -> Machine:
    for text in texts:
        tier, sign, rate = text.partition("=")
        if sign:
            if tier.strip() not in machine.tiers:
                known = ", ".join(machine.tiers)
                raise InputError("--link", f"{machine.name} has no tier {tier.strip()!r}", known)
            machine = machine.with_link_rate(parse_rate(rate, "--link"), tier.strip())
        else:
            machine = machine.with_link_rate(parse_rate(text, "--link"))
    return machine


def _in_words(plan: Plan) -> str:
    load = plan.estimates["load"]
    size = f", {show_bytes(load.load_bytes)} to load" if load is not None else ""
    lines = [
        plan.reason,
        "",
        f"model           {plan.model}, {plan.kv_bytes_per_token:,.0f} bytes of KV per token"
        + (f" and rank (tp {plan.tp})" if plan.tp > 1 else ""),
        f"usable prefix   {plan.usable_tokens:,} tokens{size}",
        f"load            {plan.load_tokens:,} tokens, {show_bytes(plan.load_bytes)}{_runs(plan)}",
        f"recompute       {plan.recompute_tokens:,} tokens{_front(plan)}",
        f"predicted TTFT  {show_seconds(plan.ttft_s)}, of which {show_seconds(plan.exposed_s)} exposed",
    ]
    for path, estimate in plan.estimates.items():
        if estimate is None:
            lines.append(f"  {path:13} none: {plan.unavailable[path]}")
        else:
            band = f"{show_seconds(estimate.low_s)} to {show_seconds(estimate.high_s)}"
            loads = f", loads {estimate.load_tokens:,} tokens" if estimate.load_tokens else ""
            lines.append(f"  {path:13} {show_seconds(estimate.ttft_s)} ({band}){loads}")
    crossover = f"{plan.crossover_tokens:,} tokens" if plan.crossover_tokens is not None else "none"
    rate = show_rate(plan.break_even_bytes_per_s) if plan.break_even_bytes_per_s is not None else "none"
    lines += [
        f"crossover       {crossover} ({plan.crossover_note})",
        f"break-even      {rate} ({plan.break_even_note})",
        f"parameters      {'calibrated' if plan.calibrated else 'not calibrated on this machine'}",
    ]
    for name, parameter in plan.parameters_from.items():
        lines.append(f"  {name:13} {parameter.source}: {parameter.text}")
    lines += [f"note            {note}" for note in plan.notes]
    return "\n".join(lines)


def _runs(plan: Plan) -> str:
    """What is loaded from where, as far as the first words leave it open."""
    if len(plan.load) < 2 and not _front(plan) and plan.group_layers == 1:
        return ""
    runs = " and ".join(f"{part.start:,} to {part.end:,} from {part.tier}" for part in plan.load)
    return f": {runs}" + (f", an event for {plan.group_layers} layers" if plan.group_layers > 1 else "")


def _front(plan: Plan) -> str:
    front = plan.load[0].start - plan.resident_tokens if plan.load else 0
    return f", {front:,} of them beside the load" if front else ""


_INTERRUPTED = 130


def run_app(application: typer.Typer, name: str, arguments: list[str] | None = None) -> int:
    """Runs a typer application; every wrong input becomes one line on stderr and status 2."""
    command = typer.main.get_command(application)
    return _guarded(lambda: command.main(args=arguments, prog_name=name, standalone_mode=False), name)


def _guarded(call: Callable[[], Any], name: str) -> int:
    try:
        status = call()
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except typer.Exit as leave:
        if leave.exit_code == _INTERRUPTED:  # what typer makes of Ctrl-C
            print(f"{name}: interrupted", file=sys.stderr)
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"{name}: cannot write the answer: {error.strerror or error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        # click's usage errors, by their shape: typer may carry its own copy of click.
        words = " ".join(str(error.format_message()).split())
        if words == "Missing command.":
            words = f"command: is missing (expected one that `{name} --help` lists)"
        print(f"{name}: {words}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


def main() -> None:
    """The `kvlane` command."""
    sys.exit(run_app(app, "kvlane"))


if __name__ == "__main__":
    main()
