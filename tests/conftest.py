from hypothesis import HealthCheck, settings

# A loaded machine is not a failure: no time limit per example, none for drawing it.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")
