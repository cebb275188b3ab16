"""Requests in any phase, and the diagram of phases: python -m tests.router.requests.states rewrites it in the docs."""

import re
from pathlib import Path

from router.peers.peers import Peer
from router.peers.placement import Choice
from router.requests.admission import Permit
from router.requests.attempt import Attempt
from router.requests.request_state import TRANSITIONS, RequestPhase, RequestState
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat
from sluice.wire.params import RetentionParams
from sluice.wire.stats import StepStats
from tests.fakes.admission import make_admission

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
DIAGRAM = re.compile(r"```mermaid\nstateDiagram-v2\n.*?```", re.DOTALL)


def diagram() -> str:
    """The diagram that docs/architecture.md must show."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {RequestPhase.TOKENIZING.name}"]
    for phase, following in TRANSITIONS.items():
        lines += [f"    {phase.name} --> {then.name}: {cause}" for then, cause in following.items()]
        if not following:
            lines.append(f"    {phase.name} --> [*]")
    return "\n".join([*lines, "```"])


def phase_table() -> str:
    return "\n".join(f"| `{phase.name}` | {phase.value} |" for phase in RequestPhase)


def attempt(number: int = 0, model: str = "m") -> Attempt:
    engine, detokenizer = Peer("ipc://e", frozenset(), None), Peer("ipc://d", frozenset(), None)
    engine.heartbeat = EngineHeartbeat("e", 1, "ipc://e", model, 64, False, StepStats())
    detokenizer.heartbeat = DetokenizerHeartbeat("d", 2, "ipc://d", False, 0, 0, 0.0)
    return Attempt(number, engine, detokenizer, Choice(1, 2, 1, 0, ()), 0, 0)


def permit() -> Permit:
    admission = make_admission(1, 1, 1)
    admission.shares.enter("")
    admission._grant("", 0)
    return Permit(admission, "")


def submit(request: RequestState, model: str = "m") -> None:
    request.on_tokenized([1, 2, 3], request.spec.sampling, RetentionParams())
    request.on_admitted(permit())
    request.on_submitted(attempt(0, model))


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(DIAGRAM.sub(lambda _: diagram(), text), encoding="utf-8")
