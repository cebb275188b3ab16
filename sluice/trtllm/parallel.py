"""Where the processes of an executor run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.trtllm.enums import CommunicationMode, CommunicationType


@dataclass
class OrchestratorConfig:
    """An executor always starts its services as child processes, which is what an orchestrator does."""

    is_orchestrator: bool = True
    worker_executable_path: str = ""
    """Of TensorRT-LLM's worker; here the services are Sluice's own."""
    orch_leader_comm: Any = None
    spawn_processes: bool = True


@dataclass
class ParallelConfig:
    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: Sequence[int] | None = None
    participant_ids: Sequence[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = None
