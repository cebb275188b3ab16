"""Options for the processes of an executor. Only the defaults, and orchestrator mode, are supported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.trtllm.enums import CommunicationMode, CommunicationType


@dataclass
class OrchestratorConfig:
    """No effect with its defaults: an executor always starts its services as child processes, like an orchestrator."""

    is_orchestrator: bool = True
    worker_executable_path: str = ""
    """No effect: the services are Sluice's, not TensorRT-LLM's worker."""
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
