"""Loads prompt adapters for sluice.v1.ModelService: from rows, or from the files of a prompt that peft tuned and saved.

The files come from users, so their sizes are checked before anything is parsed. Routers do not need the safetensors
package.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from router.errors import Reason, RequestError, Violations, shown
from router.features.tables import check_rows, rows_need
from router.parse.adapter_ids import check_form
from router.parse.model import Limits, ServedModel, check_model
from router.peers.offers import Offers, check_needs
from router.peers.prompt_adapters import PromptAdapters
from sluice.checkpoint.peft import CONFIG, DESCRIPTIONS, PICKLE, WEIGHTS
from sluice.checkpoint.tensor_file import INVALID_JSON, LENGTH_BYTES, TensorFileError, decode, split
from sluice.v1 import admin_pb2 as pb
from sluice.v1.generation_pb2 import Embeddings
from sluice.wire.adapters import MAX_CONFIG_BYTES, AdapterEntry
from sluice.wire.errors import ErrorCode
from sluice.wire.tables import MAX_TABLE_BYTES, Table

MAX_LOADING = 4
"""Concurrent loads: each may take twice its size in memory."""
MAX_HEADER_BYTES = 1 << 16
MAX_WEIGHTS_BYTES = MAX_TABLE_BYTES + MAX_HEADER_BYTES + LENGTH_BYTES
TENSOR = "prompt_embeddings"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WITHOUT_EFFECT = DESCRIPTIONS | frozenset(
    [
        "num_attention_heads",
        "num_layers",
        "prompt_tuning_init",
        "prompt_tuning_init_text",
        "tokenizer_name_or_path",
        "tokenizer_kwargs",
    ]
)
"""Options that only matter for training or for other kinds of adapters."""
READ = frozenset(["peft_type", "num_virtual_tokens", "token_dim", "num_transformer_submodules"])
Size = Annotated[int, Meta(ge=0, le=1 << 32)]


@dataclass(frozen=True)
class PromptAdapterLoader:
    _model: ServedModel
    _limits: Limits
    _offers: Offers
    _adapters: PromptAdapters
    _folders: tuple[str, ...]
    """Folders from which files may be read."""
    _loading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LOADING))

    async def load(self, message: pb.LoadPromptAdapterRequest, *, configured: bool = False) -> AdapterEntry:
        """`configured`: the adapter is named in the settings, see `PromptAdapters.load`. Raises RequestError."""
        check_model(message.model, self._model, "model")
        bad = Violations()
        check_form("prompt_adapter_id", message.prompt_adapter_id, bad)
        source = message.WhichOneof("source")
        if not (message.path if source == "path" else source):
            bad.add("path", "is empty, and neither files nor rows are set", reason=Reason.MISSING)
        bad.at_most("path", len(message.path), 1024, "characters")
        bad.raise_if_any()
        if self._loading.locked():
            raise RequestError(ErrorCode.OVERLOADED, f"{MAX_LOADING} prompt adapters are being loaded: try again later")
        async with self._loading:
            table = await self._table(message)
        return self._adapters.load(message.prompt_adapter_id, message.path, table, configured=configured)

    async def load_configured(self, adapter_id: str, path: str) -> None:
        """Raises RequestError."""
        await self.load(pb.LoadPromptAdapterRequest(prompt_adapter_id=adapter_id, path=path), configured=True)

    async def _table(self, message: pb.LoadPromptAdapterRequest) -> Table:
        """Raises RequestError."""
        field = message.WhichOneof("source") or ""
        rows = message.rows if field == "rows" else await asyncio.to_thread(self._read, field, message)
        bad = Violations()
        table = check_rows(field, rows, self._limits, bad)
        bad.raise_if_any()
        if table is None:
            raise RequestError(ErrorCode.INTERNAL, "rows were refused without a violation")
        known = self._offers.known
        if known is None:
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive")
        check_needs([rows_need(f"{field}.shape", table.hidden_size)], known)
        return await asyncio.to_thread(table.checked)

    def _read(self, field: str, message: pb.LoadPromptAdapterRequest) -> Embeddings:
        """Must be called in a thread, because it reads and parses files."""
        if field == "path":
            return read_rows(field, read_folder(message.path, self._folders))
        return read_rows(field, PromptFiles(message.files.config_json, message.files.safetensors))


class PromptFiles(NamedTuple):
    config: bytes
    weights: bytes


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]
    """(first byte, byte after the last), relative to the end of the header."""


def read_folder(path: str, folders: Iterable[str]) -> PromptFiles:
    """Read the files in a folder. Raises RequestError unless the path, with symbolic links resolved, lies within one of
    `folders`."""
    try:
        folder = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise _refused("path", f"{shown(path)} is not a folder: {error}") from error
    if not any(folder.is_relative_to(Path(allowed).resolve()) for allowed in folders):
        raise _refused("path", f"{shown(path)} is not within one of prompt_adapter_folders")
    return PromptFiles(_read(folder, CONFIG, MAX_CONFIG_BYTES), _read(folder, WEIGHTS, MAX_WEIGHTS_BYTES))


def read_rows(field: str, files: PromptFiles) -> Embeddings:
    """The rows of a tuned prompt. `field`: field of the call, for errors. Raises RequestError."""
    for name, data, limit in (
        (CONFIG, files.config, MAX_CONFIG_BYTES),
        (WEIGHTS, files.weights, MAX_WEIGHTS_BYTES),
    ):
        if len(data) > limit:
            raise _refused(field, f"{name} has {len(data)} bytes, at most {limit} are allowed")
    raw = _read_config(field, files.config)
    tensor, data = _read_tensor(field, files.weights)
    if tensor.dtype not in DTYPES:
        raise _refused(field, f"{WEIGHTS} has values of type {shown(tensor.dtype)}, must be one of {', '.join(DTYPES)}")
    expected = [raw.get("num_virtual_tokens"), raw.get("token_dim")]
    # peft may omit the sizes or write null.
    comparable = [size for size, configured in zip(tensor.shape, expected, strict=False) if configured is not None]
    if len(tensor.shape) != 2 or comparable != [size for size in expected if size is not None]:
        raise _refused(field, f"{TENSOR} has the shape {list(tensor.shape)}, but {CONFIG} says {shown(expected)}")
    return Embeddings(shape=tensor.shape, dtype=DTYPES[tensor.dtype], data=data)


def _read(folder: Path, name: str, limit: int) -> bytes:
    path = folder / name
    try:
        # Reject symbolic links, which may lead out of the allowed folders.
        if path.resolve() != path or (path.exists() and not path.is_file()):
            raise _refused("path", f"{name} is not a file")
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        if name == WEIGHTS and (folder / PICKLE).exists():
            reason = f"{PICKLE} is a pickle, which may run code: save the prompt as {WEIGHTS}"
        else:
            reason = f"{name} cannot be read: {error.strerror or error}"
        raise _refused("path", reason) from error


def _read_config(field: str, data: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
    except INVALID_JSON as error:
        raise _refused(field, f"{CONFIG} is not a JSON object: {error}") from error
    if raw.get("peft_type") != "PROMPT_TUNING":
        raise _refused(field, f"{CONFIG}: peft_type must be PROMPT_TUNING (got {shown(raw.get('peft_type'))})")
    for name, value in raw.items():
        if name not in WITHOUT_EFFECT and name not in READ and value not in (None, False, [], {}, ""):
            raise _refused(field, f"{CONFIG}: {shown(name)} = {shown(value)} is not supported")
    if raw.get("num_transformer_submodules") not in (None, 1):
        value = shown(raw["num_transformer_submodules"])
        raise _refused(field, f"{CONFIG}: num_transformer_submodules = {value} is not supported")
    return raw


def _read_tensor(field: str, data: bytes) -> tuple[_Tensor, bytes]:
    try:
        entries, start = split(data, MAX_HEADER_BYTES)
        if entries.keys() != {TENSOR}:
            raise _refused(field, f"{WEIGHTS} has the tensors {shown(sorted(entries)[:8])}, must have only {TENSOR}")
        tensor = decode(entries[TENSOR], _Tensor)
    except TensorFileError as error:
        raise _refused(field, f"{WEIGHTS} {error}") from error
    values = data[start:]
    if tensor.data_offsets != (0, len(values)):
        raise _refused(field, f"{WEIGHTS} has {len(values)} bytes of values, but its header says {tensor.data_offsets}")
    return tensor, values


def _refused(field: str, description: str) -> RequestError:
    return RequestError.at(field, description, private=True)
