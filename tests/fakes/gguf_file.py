"""Ends the writing of a GGUF file by the format's own library."""

from typing import Any


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
