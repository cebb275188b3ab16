"""Loads prompt adapters for sluice.v1.ModelService: from files or rows to a table."""

import asyncio
from dataclasses import dataclass, field

from router.errors import Reason, RequestError, Violations
from router.features.tables import check_rows, rows_need
from router.parse.adapter_ids import check_form
from router.parse.model import Limits, ServedModel, check_model
from router.parse.needs import check_needs
from router.parse.prompt_files import PromptFiles, read_folder, read_rows
from router.peers.offers import Offers
from router.peers.prompt_adapters import PromptAdapters
from sluice.v1 import admin_pb2 as pb
from sluice.v1.generation_pb2 import Embeddings
from sluice.wire.adapters import AdapterEntry
from sluice.wire.errors import ErrorCode
from sluice.wire.tables import Table

MAX_LOADING = 4
"""Concurrent loads: each may take twice its size in memory."""


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
