import signal

from hypothesis import HealthCheck, settings

# A loaded machine is not a failure: no time limit per example, none for drawing it. The same examples in every run, so
# that what fails fails again; tests/engine_worker/long_run.py looks for new ones.
settings.register_profile("sluice", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")

# A shell that runs the tests in the background has them ignore Ctrl-C, and ignoring is inherited: the processes that
# the tests interrupt would not end. A handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
