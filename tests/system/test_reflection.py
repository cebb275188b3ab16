"""A client without our .proto files lists and calls services through server reflection."""

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2

SERVICES = {
    "sluice.v1.GenerationService",
    "sluice.v1.ModelService",
    "sluice.v1.AdminService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}


class Reflection:
    """A generic client of the reflection service, whose versions v1 and v1alpha have the same messages."""

    def __init__(self, channel: grpc.Channel, version: str) -> None:
        self._channel = channel
        self._server_reflection_info = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        self._pool = DescriptorPool()
        self._added: set[str] = set()

    def services(self) -> set[str]:
        answer = self._request_info(list_services="")
        return {service.name for service in answer.list_services_response.service}

    def method(self, service: str, name: str):
        """The method's descriptor, with types that are known only from the server."""
        self._add(self._request_info(file_containing_symbol=service))
        return self._pool.FindServiceByName(service).FindMethodByName(name)

    def call(self, service: str, name: str):
        method = self.method(service, name)
        kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        return kind(
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    def request(self, service: str, name: str, **fields):
        return GetMessageClass(self.method(service, name).input_type)(**fields)

    def _request_info(self, **fields):
        request = reflection_pb2.ServerReflectionRequest(**fields)
        (answer,) = self._server_reflection_info(iter([request]), timeout=60)
        assert not answer.HasField("error_response"), answer
        return answer

    def _add(self, answer) -> None:
        files = [FileDescriptorProto.FromString(raw) for raw in answer.file_descriptor_response.file_descriptor_proto]
        for file in files:
            if file.name not in self._added:
                self._added.add(file.name)
                for dependency in file.dependency:
                    if dependency not in self._added:
                        self._add(self._request_info(file_by_filename=dependency))
                self._pool.Add(file)


@pytest.fixture(params=["v1", "v1alpha"])
def reflection(ring, request):
    with grpc.insecure_channel(ring.address) as channel:
        yield Reflection(channel, request.param)


def test_services_are_listed_and_described(reflection) -> None:
    assert reflection.services() == SERVICES
    for service in SERVICES:
        assert reflection.method(service, "Check" if "health" in service else first_method(service))


def first_method(service: str) -> str:
    return {
        "GenerationService": "Generate",
        "ModelService": "ListModels",
        "AdminService": "GetStats",
        "ServerReflection": "ServerReflectionInfo",
    }[service.rsplit(".", 1)[1]]


def test_generate_can_be_called_from_descriptors_alone(reflection) -> None:
    service = "sluice.v1.GenerationService"
    spec = {"text": "import os", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 8}}
    answer = reflection.call(service, "Generate")(reflection.request(service, "Generate", spec=spec), timeout=60)
    assert answer.usage.completion_tokens == 8
    events = list(
        reflection.call(service, "GenerateStream")(reflection.request(service, "GenerateStream", spec=spec), timeout=60)
    )
    assert "".join(event.delta.text for event in events) == answer.outputs[0].text
    assert [event.WhichOneof("event") for event in events][-2:] == ["finished", "done"]
