"""The interface through which rank 0's runner uses the other ranks of a tensor-parallel group."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine_worker.lora.device import LoadPlan
from engine_worker.runner.batch import StepArrays
from engine_worker.runner.methods import Poll
from engine_worker.sampling.replicas import ReplicatedStep
from engine_worker.step import Move
from sluice.wire.calls import MethodCall


class Followers(Protocol):
    """The other ranks, which compute every step along with rank 0."""

    def send_step(
        self,
        moves: tuple[Move, ...],
        arrays: StepArrays | None,
        processed: ReplicatedStep | None,
        loads: tuple[LoadPlan, ...] = (),
    ) -> None:
        """Send a step to compute. `arrays`: None if the step has only moves and adapter loads. `processed`: if it has
        rows, `send_rows` follows once rank 0 has the logits. `loads`: adapters to load before the step."""

    def send_rows(self, logits: Tensor, followed: Sequence[int]) -> None:
        """Send the arguments of this step's logits processors; see `ReplicatedProcessors.run`."""

    def call(self, call: MethodCall) -> Poll:
        """Run a method on the ranks that the call names. The returned function polls for their answers."""

    def on_step_failed(self, error: Exception) -> None:
        """Rank 0 failed at a step that was sent to the other ranks, so the group is out of step."""
