"""`sluice cache-events`: follows the KV cache events of the engines."""

import json
from contextlib import suppress
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from sluice.cli.common import Server, with_server


@with_server
def cache_events(
    server: Server,
    engine: Annotated[str, typer.Option(metavar="ID", help="Only follow this engine. Default: all engines.")] = "",
) -> None:
    """Follow the changes of the engines' prefix caches.

    Prints one JSON object per line for each change, until Ctrl-C. Engines record changes only if their setting
    kv_event_buffer is above 0.
    """
    with server.client() as client, suppress(KeyboardInterrupt), client.stream_cache_events(engine) as responses:
        for response in responses:
            for event in response.events:
                fields = MessageToDict(event, preserving_proto_field_name=True)
                print(json.dumps({"engine": response.engine_id, **fields}), flush=True)
