"""The settings of each service: the settings that all services share, and the sections of that service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass as validated

from sluice.host.address import check_advertised, is_wildcard, reachable_at
from sluice.host.ports import Port
from sluice.lanes.keys import Keys, Role, Security
from sluice.settings.engine import (
    BATCHED,
    CAPACITY_POLICIES,
    DEBUG_INPUTS,
    DEBUG_OUTPUTS,
    OPENVINO_BLOCK,
    RESERVED_TENSORS,
    SMALLEST_BLOCK,
    Batching,
    Compute,
    DebugOptions,
    GuideLimits,
    ImageOptions,
    KvCacheSize,
    LoraOptions,
    Parallelism,
    ProcessorNames,
    TensorOptions,
    requires_openvino,
    unsupported_by_openvino,
)
from sluice.settings.fields import NotEmpty, PositiveInt, Range
from sluice.settings.gateway import GatewaySettings
from sluice.settings.keeper import KeeperSettings
from sluice.settings.process import STRICT, ProcessSettings, is_loopback
from sluice.settings.router import (
    AccessSettings,
    AdapterSettings,
    AdmissionSettings,
    ClientLimits,
    ListenSettings,
    PeerSettings,
    RecoverySettings,
    TracingSettings,
    check_default_sampling,
)
from sluice.wire.tensors import LAYER_PREFIX


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(ProcessSettings):
    """Place in the ring"""

    role: ClassVar[Role]

    model: str
    """Folder or Hugging Face id of the model. Router and detokenizer read only its configuration and tokenizer."""
    name: str | None = None
    """Name under which the model is served. Default: the name of its folder."""
    revision: Annotated[str | None, Field(min_length=1)] = None
    """Branch, tag or commit of a Hugging Face model. Default: its main branch."""
    listen: str = "tcp://127.0.0.1:*"
    """Address of the ring inbox: ipc:///path or tcp://host:port. A port of * is any free port. A host of * is every
    interface and needs `advertise`."""
    advertise: str | None = None
    """Address at which the other services reach the inbox: a host, host:port or a full address. Default: the address
    that the inbox is bound to. A host without a port uses the inbox's port."""
    keys: Path | None = None
    """Folder with the ring's keys, created by `sluice keygen`. Required for tcp:// between services, unless
    insecure_ring is set."""
    insecure_ring: bool = False
    """Allow tcp:// between services without keys. Any host that can reach the port can then join the ring."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_advertised(self.listen, self.advertise)

    @property
    def model_name(self) -> str:
        return self.name or self.model

    def address(self, bound: str) -> str:
        """The address at which other services reach an inbox that is bound to `bound`."""
        return reachable_at(bound, self.advertise)

    @property
    def security(self) -> Security:
        """The keys with which this service protects its lanes. Raises KeysError."""
        return Security(None if self.keys is None else Keys(self.keys, self.role), self.insecure_ring)


@validated(frozen=True, kw_only=True, config=STRICT)
class RouterSettings(
    AdapterSettings,
    ClientLimits,
    AdmissionSettings,
    RecoverySettings,
    PeerSettings,
    AccessSettings,
    TracingSettings,
    ListenSettings,
    ServiceSettings,
):
    """Router"""

    role: ClassVar[Role] = "router"
    module: ClassVar[str] = "router"
    summary: ClassVar[str] = "Serves the public gRPC API and distributes requests among engines and detokenizers."

    text_threads: PositiveInt = 2
    """Threads that tokenize prompts."""
    chat_template: Annotated[str | None, NotEmpty()] = None
    """File with a chat template (Jinja) that replaces the model's templates."""
    default_sampling: Annotated[dict[str, float], AfterValidator(check_default_sampling)] = field(default_factory=dict)
    """Sampling parameters for what requests leave unset, such as {"temperature": 0.7, "top_p": 0.9}. They precede the
    model's generation_config.json. See docs/api.md."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        self.check_exposure(self.interfaces)
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self

    @model_validator(mode="after")
    def _check_connection_age(self) -> Self:
        if self.max_connection_age_grace is not None and not self.max_connection_age:
            raise ValueError(
                "max_connection_age_grace: has no effect without max_connection_age "
                f"(got {self.max_connection_age_grace:g})"
            )
        return self

    @model_validator(mode="after")
    def _check_admin_port(self) -> Self:
        if self.admin_tokens_file is not None and self.admin_port is None:
            raise ValueError("admin_tokens_file needs admin_port")
        protected = is_loopback(self.admin_host) or self.authenticates or self.admin_tokens_file
        if self.admin_port is not None and not protected:
            raise ValueError(f"admin_host {self.admin_host} can be reached from other machines: set admin_tokens_file")
        return self

    @property
    def interfaces(self) -> dict[str, str]:
        """The hosts that the gRPC servers listen on, by the name of the setting."""
        return {"host": self.host} | ({} if self.admin_port is None else {"admin_host": self.admin_host})

    @property
    def ports(self) -> list[Port]:
        grpc_ports = [Port("port", self.host, self.port), Port("admin_port", self.admin_host, self.admin_port or 0)]
        return grpc_ports + super().ports

    @property
    def admin_on_main(self) -> bool:
        """Whether AdminService is on the main port: it has no separate port, and only trusted callers reach this."""
        return self.admin_port is None and (self.authenticates or is_loopback(self.host))


@validated(frozen=True, kw_only=True, config=STRICT)
class EngineSettings(
    Parallelism,
    Batching,
    LoraOptions,
    GuideLimits,
    ImageOptions,
    DebugOptions,
    TensorOptions,
    ProcessorNames,
    KvCacheSize,
    Compute,
    ServiceSettings,
):
    """Engine"""

    role: ClassVar[Role] = "engine"
    module: ClassVar[str] = "engine_worker"
    summary: ClassVar[str] = "Runs the model: computes the tokens of requests that routers send to its inbox."

    max_requests: Annotated[int, Range(ge=1, le=1 << 20)] = 256
    """Maximum number of requests in the engine. Further requests are refused with OVERLOADED."""
    max_context_tokens: Annotated[int | None, Range(ge=2)] = None
    """Maximum number of tokens of prompt plus output of a request. Default: the model's context, which it must not
    exceed."""
    model_version: Annotated[str, Field(max_length=253)] = ""
    """Label of this engine's model, to which the router's serving_version refers. See "Updating weights" in
    docs/operations.md."""
    stats_callback: str | None = None
    """Your function, as module:function, to call with a JSON object for each step and for each request's statistics.
    """

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        size, tokens = self.max_batch_size, self.max_tokens_per_step
        if tokens < size:
            raise ValueError(f"max_tokens_per_step: must be at least max_batch_size, {size} (got {tokens})")
        policy = self.context_chunking_policy
        if policy != "first_come_first_served" and not self.chunked_context:
            raise ValueError(f"context_chunking_policy: has no effect without chunked_context (got {policy!r})")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        required_by = requires_openvino(self, self.device)
        if required_by is not None:
            for setting, reason in unsupported_by_openvino(
                self,
                self.device,
                tokens_per_block=self.tokens_per_block,
                ranks=self.tensor_parallel,
            ):
                raise ValueError(f"{setting} contradicts {required_by}: OpenVINO {reason}")
        block = self.tokens_per_block or (SMALLEST_BLOCK if required_by is None else OPENVINO_BLOCK)
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < block:
            raise ValueError(f"kv_cache_tokens: must be at least one block, {block} (got {self.kv_cache_tokens})")
        return self

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        if self.needs_pool_folder and self.tensor_parallel > 1:
            raise ValueError(f"kv_folder: is not supported with tensor_parallel > 1 (got {self.tensor_parallel})")
        if self.kv_keeper is not None and (self.pool_folder is None or not self.kv_fetch):
            raise ValueError("kv_keeper: needs kv_folder, and kv_fetch")
        if self.kv_keeper is not None and (is_wildcard(self.kv_keeper) or self.kv_keeper.endswith(":*")):
            raise ValueError(f"kv_keeper: other machines cannot connect to {self.kv_keeper}")
        return self

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.draft_model is not None and self.tensor_parallel > 1:
            raise ValueError(f"draft_model: is not supported with tensor_parallel > 1 (got {self.tensor_parallel})")
        return self

    @model_validator(mode="after")
    def _check_processors(self) -> Self:
        for name, value in self.logits_processors.items():
            if not name or name == BATCHED:
                raise ValueError(f"logits_processors: {name!r} is not a valid name of a processor")
            if ":" not in value:
                raise ValueError(f"logits_processors: {name} must have the form module:function (got {value!r})")
        batched = self.logits_processor_batched
        if batched is not None and ":" not in batched:
            raise ValueError(f"logits_processor_batched: must have the form module:function (got {batched!r})")
        return self

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        for name, value in self.output_tensors.items():
            if not name or name in RESERVED_TENSORS or name.startswith(LAYER_PREFIX):
                raise ValueError(f"output_tensors: {name!r} is not a valid name of a tensor")
            if ":" not in value:
                raise ValueError(f"output_tensors: {name} must have the form module:function (got {value!r})")
        if len(set(self.output_layers)) < len(self.output_layers):
            raise ValueError(f"output_layers: must not name a layer twice (got {self.output_layers})")
        if self.tensor_buffer < 1:
            raise ValueError(f"tensor_buffer: must be at least 1 byte (got {self.tensor_buffer})")
        return self

    @model_validator(mode="after")
    def _check_debug(self) -> Self:
        known = (*DEBUG_INPUTS, *DEBUG_OUTPUTS)
        for name in self.debug_tensors:
            if name not in known:
                raise ValueError(f"debug_tensors: must be among {', '.join(known)} (got {name!r})")
        if self.debug_tensors and self.debug_folder is None:
            raise ValueError(f"debug_tensors: needs debug_folder (got {', '.join(self.debug_tensors)})")
        return self

    @model_validator(mode="after")
    def _check_schedulers(self) -> Self:
        policy = self.capacity_scheduler_policy
        if policy not in CAPACITY_POLICIES and ":" not in policy:
            known = ", ".join(CAPACITY_POLICIES)
            raise ValueError(f"capacity_scheduler_policy: must be {known} or module:Class (got {policy!r})")
        for setting in ("micro_batch_scheduler", "scheduler"):
            name = getattr(self, setting)
            if name is not None and ":" not in name:
                raise ValueError(f"{setting}: must have the form module:Class (got {name!r})")
        replaced = policy, self.micro_batch_scheduler
        if self.scheduler is not None and replaced != ("max_utilization", None):
            raise ValueError(
                "scheduler: cannot be combined with capacity_scheduler_policy or micro_batch_scheduler, "
                f"which it replaces (got {self.scheduler!r})"
            )
        return self


@validated(frozen=True, kw_only=True, config=STRICT)
class DetokenizerSettings(ServiceSettings):
    """Detokenizer"""

    role: ClassVar[Role] = "detok"
    module: ClassVar[str] = "detok_service"
    summary: ClassVar[str] = "Converts the tokens that engines send to its inbox into text for routers."

    max_streams: PositiveInt = 200_000
    """Maximum number of sequences in progress. Further sequences are refused with OVERLOADED."""


RING: Mapping[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "engine": EngineSettings,
    "detokenizer": DetokenizerSettings,
}
SERVICES: Mapping[str, type[ProcessSettings]] = {**RING, "gateway": GatewaySettings}
"""What serves requests."""
PROCESSES: Mapping[str, type[ProcessSettings]] = {**SERVICES, "keeper": KeeperSettings}
"""What `sluice serve` starts."""
