import signal

from hypothesis import HealthCheck, settings

# A loaded machine is not a failure: no time limit per example, none for drawing it. The same examples in every run, so
# that what fails fails again; tests/engine_worker/core/long_run.py looks for new ones.
settings.register_profile("sluice", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")

# A shell that runs the tests in the background has them ignore Ctrl-C, nohup has them ignore SIGHUP, and ignoring is
# inherited: the processes that the tests interrupt would not end. A handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
