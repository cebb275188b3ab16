"""Optional features of the engines, as reported in their heartbeats."""

from collections.abc import Iterable
from dataclasses import dataclass

from router.peers.peers import EnginePeer, Peers
from sluice.wire.heartbeats import EngineHeartbeat


@dataclass(frozen=True)
class EngineFeatures:
    """Features of all known engines, including lost ones, because they may return. None if no engine has reported
    yet."""

    _engines: Peers[EngineHeartbeat]
    model_context_tokens: int

    @property
    def context_tokens(self) -> int:
        """Maximum number of tokens of prompt plus output: the model's limit, or less if no usable engine can hold that
        many."""
        return self.longest(self._engines.usable)

    def longest(self, engines: Iterable[EnginePeer]) -> int:
        """Like `context_tokens`, for these engines."""
        known = [peer.heartbeat.max_sequence_tokens for peer in engines if peer.heartbeat]
        return min(self.model_context_tokens, max(known)) if known else self.model_context_tokens

    @property
    def processors(self) -> set[str] | None:
        """Names of logits processors."""
        heartbeats = self._heartbeats
        return {name for heartbeat in heartbeats for name in heartbeat.logits_processors} if heartbeats else None

    @property
    def tensors(self) -> set[str] | None:
        """Names of tensors that can be returned, except logits, which every engine supports."""
        heartbeats = self._heartbeats
        return {name for heartbeat in heartbeats for name in heartbeat.tensors} if heartbeats else None

    @property
    def has_adapters(self) -> bool | None:
        """Whether some engine serves LoRA adapters."""
        heartbeats = self._heartbeats
        return any(heartbeat.has_adapters for heartbeat in heartbeats) if heartbeats else None

    @property
    def hidden_sizes(self) -> set[int] | None:
        """Widths of the rows of prompt tables; empty if no engine accepts any."""
        heartbeats = self._heartbeats
        return {heartbeat.hidden_size for heartbeat in heartbeats} - {0} if heartbeats else None

    @property
    def image_rows(self) -> set[int] | None:
        """Tokens per image; empty if no engine accepts images."""
        heartbeats = self._heartbeats
        return {heartbeat.image_rows for heartbeat in heartbeats} - {0} if heartbeats else None

    @property
    def _heartbeats(self) -> list[EngineHeartbeat]:
        return [peer.heartbeat for peer in self._engines.all if peer.heartbeat]
