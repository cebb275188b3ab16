"""Calls that load and list LoRA adapters, and the libraries of fake engines."""

from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import AdapterFiles
from tests.fakes.library import files

A, B = files("a"), files("b")


def weights(files: AdapterFiles) -> pb.LoraWeights:
    return pb.LoraWeights(config_json=files.config, safetensors=files.weights)


async def load(client, name, path="", files=None) -> admin.Lora:
    source = {"path": path} if files is None else {"weights": weights(files)}
    return (await client.models.LoadLora(admin.LoadLoraRequest(lora_id=name, **source))).lora


async def listed(client, **page):
    return await client.models.ListLoras(admin.ListLorasRequest(**page))


def libraries(ring):
    return [engine.library for engine in ring.engines.values()]
