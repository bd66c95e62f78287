"""The OpenAPI document: made of the types that decode, valid by 3.1, and true by schemathesis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from kvlane.policy.service import types
from kvlane.policy.service.app import OPERATIONS
from kvlane.policy.service.openapi import document
from kvlane.policy.service.problems import CODES

CONFIG = Path(__file__).with_name("schemathesis.toml")


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    whole = document(OPERATIONS, needs_token=True)
    schemas = whole["components"]["schemas"]
    assert {name.removeprefix("#/components/schemas/") for name in references(whole)} <= set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def test_the_document_is_made_of_the_types_that_decode() -> None:
    schemas = document(OPERATIONS, needs_token=False)["components"]["schemas"]
    for kind in (types.DecideRequest, types.BatchRequest, types.TransferObservation, types.State, types.Hit):
        schema = schemas[kind.__name__]
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert set(schema["properties"]) - {"type"} == fields
        assert schema["additionalProperties"] is False
    assert schemas["DecideRequest"]["required"] == ["prompt_tokens"]


def test_the_example_is_answered(server: Any) -> None:
    for operation in OPERATIONS:
        if operation.example is not None:
            answer = server.ask(operation.method, operation.path, dict(operation.example))
            assert answer.status == 200, answer.raw


def test_answers_are_what_the_document_says(server: Any) -> None:
    whole = server.ask("GET", "/openapi.json").body
    checked = {
        "Decision": server.decide(prompt_tokens=1000, candidates=[{"instance": "a"}, {"instance": "b"}]),
        "Decisions": server.ask("POST", "/v1/decide/batch", {"prompt_tokens": [5]}).body,
        "Problem": server.ask("POST", "/v1/decide", {}).body,
    }
    for name, value in checked.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": whole["components"]}
        jsonschema_rs.validate(schema, value)


def test_every_code_is_told_where_it_can_come() -> None:
    text = msgspec.json.encode(document(OPERATIONS, needs_token=True)).decode()
    # What is no path has no place in the document.
    assert [code for code in CODES if f"`{code}`" not in text] == ["not_found"]


@pytest.mark.parametrize("token", [None, "s3cret"])
def test_schemathesis_finds_nothing(serve: Callable[..., Any], tmp_path: Path, token: str | None) -> None:
    environment = {} if token is None else {"KVLANE_TOKEN": token}
    served = serve({}, environment=environment)
    command = [
        sys.executable,
        "-c",
        "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file",
        str(CONFIG),
        "run",
        f"http://127.0.0.1:{served.port}/openapi.json",
        "--max-examples",
        os.environ.get("KVLANE_EXAMPLES", "20"),
        "--no-color",
    ]
    if token is not None:
        command += ["--header", f"Authorization: Bearer {token}"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert served.ask("GET", "/healthz").status == 200
    assert served.metric("kvlane_problems_total", code="internal_error") == 0
    assert not [line for line in served.log[1:] if '"error"' in line]
