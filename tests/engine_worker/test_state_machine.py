"""The engine's state machine, short. `python -m tests.engine_worker.long_run` is the long one."""

from hypothesis import HealthCheck, settings

from tests.engine_worker.machine import EngineMachine

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
