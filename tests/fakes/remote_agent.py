"""An agent in this process that can be unavailable, restarted or lost, as if it were in an actor."""

import threading
from typing import Any

from sluice.launch.hosts.agent import Agent
from sluice.launch.hosts.remote_child import AgentLostError, AgentUnavailableError


class FakeRemoteAgent:
    def __init__(self) -> None:
        self.agent = Agent("127.0.0.1", {})
        self.unavailable = False
        self.lost = False
        self._calls = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        if self.lost:
            raise AgentLostError("the actor is dead")
        if self.unavailable:
            raise AgentUnavailableError("the actor is restarting")
        with self._calls:
            return getattr(self.agent, method)(*arguments)

    def send(self, method: str, *arguments: Any) -> None:
        if not (self.unavailable or self.lost):
            with self._calls:
                getattr(self.agent, method)(*arguments)

    def restart(self) -> None:
        """Replace the agent, as Ray does after the actor's process was killed and the service died with it.

        Under the lock, because a call in between would make the former agent report that its service was killed.
        """
        with self._calls:
            self.agent.close()
            self.agent = Agent("127.0.0.1", {})
