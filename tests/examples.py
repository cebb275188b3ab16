"""The number of examples of a property test: all in `make test`, a tenth in `make check`."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

PROFILE, CHECK = "all", "check"
FEW = 10

# No deadline, because a loaded machine is not a failure. Derandomized, so that a failure reproduces in the next run;
# tests/engine_worker/core/long_run.py searches for new examples.
# Hypothesis would also use constants from our modules that happen to be imported. They differ between runs of one test
# and of all tests, so a failure might not reproduce when its test is run alone.
providers.is_local_module_file = lambda _: False
settings.register_profile(
    PROFILE, max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(CHECK, settings.get_profile(PROFILE), max_examples=FEW)


def examples(count: int, **options: Any) -> settings:
    """Settings of a property test with `count` examples in place of the default of 50."""
    if settings.get_current_profile_name() == CHECK:
        count = min(count, max(FEW, count // 10))
    return settings(max_examples=count, **options)
