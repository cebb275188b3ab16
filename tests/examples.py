"""How many examples a property test runs: all of them in `make test`, a tenth in `make check`."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

PROFILE, CHECK = "all", "check"
FEW = 10

# No deadline: a loaded machine is not a failure. Derandomised: what fails fails again in the next run;
# tests/engine_worker/core/long_run.py looks for new examples.
# Hypothesis would also draw constants of those of our modules that are imported by then, which differs from run to run:
# what fails among others would not fail alone.
providers.is_local_module_file = lambda _: False
settings.register_profile(
    PROFILE, max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(CHECK, settings.get_profile(PROFILE), max_examples=FEW)


def examples(count: int, **options: Any) -> settings:
    """Settings of a test that needs another number of examples than hypothesis' usual 50."""
    if settings.get_current_profile_name() == CHECK:
        count = min(count, max(FEW, count // 10))
    return settings(max_examples=count, **options)
