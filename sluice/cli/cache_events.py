"""`sluice cache-events`: the KV cache events of the engines."""

import json
from contextlib import suppress
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from sluice.cli.common import Server, asks_server


@asks_server
def cache_events(
    server: Server, engine: Annotated[str, typer.Option(help="Id of an engine; default: all of them")] = ""
) -> None:
    """Print the changes of the engines' prefix caches, a line of JSON for each, until Ctrl-C."""
    with server.client() as client, suppress(KeyboardInterrupt), client.stream_cache_events(engine) as responses:
        for response in responses:
            for event in response.events:
                fields = MessageToDict(event, preserving_proto_field_name=True)
                print(json.dumps({"engine": response.engine_id, **fields}), flush=True)
