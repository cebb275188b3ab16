"""Server reflection, v1 and v1alpha: the same messages under two names."""

from collections.abc import AsyncIterable, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha._async import ReflectionServicer
from structlog.stdlib import BoundLogger

from router.access.principal import Admit
from router.api.rpc import guarded
from router.errors import Call, sent

V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
V1 = "grpc.reflection.v1.ServerReflection"
V1_FILE = "grpc/reflection/v1/reflection.proto"


def reflection_handlers(services: Sequence[str], admit: Admit, log: BoundLogger) -> list[grpc.GenericRpcHandler]:
    """Handlers that describe `services` and reflection itself to callers that `admit` accepts."""
    _describe_v1()
    servicer = ReflectionServicer((*services, V1, V1ALPHA))

    async def answer(messages: AsyncIterable[Any], call: Call) -> None:
        await admit(call)
        async for response in servicer.ServerReflectionInfo(messages, call):  # type: ignore[attr-defined]
            await sent(call.write(response.SerializeToString()))

    method: Any = grpc.stream_stream_rpc_method_handler(
        guarded(answer, log.bind(method="ServerReflectionInfo")),
        request_deserializer=pb.ServerReflectionRequest.FromString,
    )
    return [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in (V1, V1ALPHA)]


def _describe_v1() -> None:
    """Add v1's file to the descriptor pool, for clients that look up every listed service. It differs from v1alpha
    only in names."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(V1_FILE)
    except KeyError:
        alpha = FileDescriptorProto()
        pb.DESCRIPTOR.CopyToProto(alpha)
        text = json_format.MessageToJson(alpha).replace("v1alpha", "v1")
        pool.AddSerializedFile(json_format.Parse(text, FileDescriptorProto()).SerializeToString())
