"""`kvlane models`: the built-in models, and what one model weighs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from kvlane.policy.catalog import load_model, model_ids, model_names
from kvlane.policy.errors import InputError
from kvlane.policy.model_report import weigh
from kvlane.policy.plan import MOST_TOKENS
from kvlane.policy.units import show_bytes


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A built-in model, its Hugging Face id, or a config.json; none lists the built-in ones."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to weigh KV and a prefill at.")] = 8192,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="KV dtype (bf16, fp8, nvfp4, int4_g64, ...) [what the config says, else two bytes]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """List the built-in models, or say what one weighs: bytes to keep, to move and to reserve, FLOP, and why."""
    if model is None:
        _list(as_json)
        return
    if not 1 <= tokens <= MOST_TOKENS:
        raise InputError("--tokens", f"is {tokens}", f"a whole number from 1 to {MOST_TOKENS:,}")
    weighed = weigh(load_model(model), tokens, tp=tp, kv_dtype=kv_dtype)
    print(_json(weighed) if as_json else _in_words(weighed))


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _list(as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in model_names():
        spec = load_model(name)
        rows.append(
            {
                "name": name,
                "huggingface": model_ids(name),
                "layers": len(spec.layers),
                "bytes_per_token": spec.kv_bytes_per_token(),
                "static_bytes": spec.state_bytes(),
                "windowed_layers": sum(layer.window is not None for layer in spec.layers),
                "weight_bytes": spec.layer_weight_bytes,
                "weight_dtype": spec.weight_dtype,
            }
        )
    if as_json:
        print(_json(rows))
        return
    for row in rows:
        windows = row["windowed_layers"]
        beyond = f" beyond the windows of {windows} layers" if windows else ""
        static = f" + {show_bytes(row['static_bytes'])} of state" if row["static_bytes"] else ""
        print(
            f"{row['name']:28} {row['layers']:3} layers  {row['bytes_per_token']:>9,.0f} bytes of KV per token"
            f"{beyond}{static}"
            f"  {show_bytes(row['weight_bytes']):>8} of {row['weight_dtype']} weights  {row['huggingface'][0]}"
        )


def _in_words(weighed: dict[str, Any]) -> str:
    tokens, tp = weighed["tokens"], weighed["tp"]
    lines = [
        f"{weighed['model']}: {weighed['layer_count']} layers, {weighed['weight_dtype']} weights,"
        f" KV in {weighed['kv_dtype']}"
        + (f", {tp} ranks (summed over them; per rank below)" if tp > 1 else ""),
        "",
    ]
    for kind in weighed["layers"]:
        lines.append(f"{kind['count']:3} x {kind['kind'].replace('_', ' ')}: {kind['formula']}")
        lines += _numbers(kind, tokens, "      ")
    lines += ["in all", *_numbers(weighed, tokens, "      ")]
    if tp > 1:
        lines += ["per rank", *_numbers(weighed["per_rank"], tokens, "      ")]
    return "\n".join(lines)


def _numbers(values: dict[str, Any], tokens: int, indent: str) -> list[str]:
    lines = [f"{values['bytes_per_token']:,.12g} bytes per further token"]
    if values["indexer_bytes_per_token"]:
        lines[0] += f", and {values['indexer_bytes_per_token']:,.12g} of indexer keys apart"
    if values["static_bytes"]:
        lines.append(f"{values['static_bytes']:,.0f} bytes of state, whatever the tokens")
    move, reserve = values["move_bytes"], values["reserve_bytes"]
    lines.append(
        f"at {tokens:,} tokens: {move:,.0f} bytes to move ({show_bytes(move)}), {reserve:,.0f} to reserve"
        f" ({show_bytes(reserve)}), {_flop(values['prefill_flop'])} to compute"
    )
    return [indent + line for line in lines]


def _flop(flop: float) -> str:
    """FLOP as people read them, without an exponent."""
    return f"{flop / 1e12:,.1f} TFLOP"
