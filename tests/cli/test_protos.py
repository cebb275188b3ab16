"""`sluice protos export` writes a complete set of .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from sluice.v1 import generation_pb2

RELEASED = Path(__file__).parents[2] / "protos" / "released.binpb"


@pytest.mark.process
def test_exported_files_compile_on_their_own(sluice, tmp_path) -> None:
    folder = tmp_path / "new" / "folder"
    result = sluice("protos", "export", str(folder))
    assert result.exit_code == 0
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    assert paths == [
        "google/rpc/error_details.proto",
        "google/rpc/status.proto",
        "sluice/v1/admin.proto",
        "sluice/v1/generation.proto",
        "sluice/v1/sampling.proto",
    ]
    written = [str(folder / path) for path in (*paths, "buf.yaml")]
    assert sorted(result.stdout.split()) == sorted(written)
    compiled = tmp_path / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--descriptor_set_out={compiled}", *paths]
    subprocess.run(command, check=True)
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    exported = next(file for file in descriptors.file if file.name == "sluice/v1/generation.proto")
    for file in (exported, expected := descriptor_pb2.FileDescriptorProto()):
        file.ClearField("source_code_info")
    generation_pb2.DESCRIPTOR.CopyToProto(expected)
    assert [message.name for message in exported.message_type] == [message.name for message in expected.message_type]


@pytest.mark.process
def test_buf_accepts_the_exported_files(sluice, tmp_path) -> None:
    sluice("protos", "export", str(tmp_path))
    buf = str(Path(sys.executable).with_name("buf"))
    for command in (["lint"], ["build"], ["breaking", "--against", str(RELEASED)]):
        process = subprocess.run([buf, *command], cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr


def test_a_folder_that_cannot_be_written(sluice, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    result = sluice("protos", "export", str(tmp_path / "file"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot write the .proto files")


def test_version(sluice) -> None:
    assert sluice("--version").stdout.startswith("sluice 0.")
