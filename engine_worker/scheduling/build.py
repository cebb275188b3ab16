"""Builds the scheduler from the settings: built-in policies or custom classes."""

from collections.abc import Callable, Mapping
from typing import Any

from structlog.stdlib import BoundLogger

from engine_worker.scheduling.context import SchedulerContext, SchedulerWarnings
from engine_worker.scheduling.guaranteed_no_evict import GuaranteedNoEvict, StaticBatch
from engine_worker.scheduling.guarded import GuardedCapacity, GuardedMicroBatch, GuardedScheduler
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import InFlightBatching, MicroBatchScheduler
from engine_worker.scheduling.simple import CapacityScheduler, RequestScheduler, SimpleScheduler
from sluice.settings.engine import SchedulerNames
from sluice.settings.names import find

POLICIES: Mapping[str, Callable[[SchedulerContext], CapacityScheduler]] = {
    "max_utilization": MaxUtilization,
    "guaranteed_no_evict": GuaranteedNoEvict,
    "static_batch": StaticBatch,
}


def find_classes(names: SchedulerNames) -> dict[str, Callable[[SchedulerContext], Any]]:
    """The custom classes, by setting. Imports their modules. Raises ValueError."""
    policy = names.capacity_scheduler_policy
    custom = (
        ("capacity_scheduler_policy", None if policy in POLICIES else policy, "schedule_request", object),
        ("micro_batch_scheduler", names.micro_batch_scheduler, "schedule", object),
        ("scheduler", names.scheduler, "schedule", RequestScheduler),
    )
    return {
        setting: find_class(setting, value, method, base)
        for setting, value, method, base in custom
        if value is not None
    }


def build_scheduler(names: SchedulerNames, context: SchedulerContext, log: BoundLogger) -> RequestScheduler:
    """Raises ValueError, also if the constructor of a custom class raises."""
    custom = {}
    for setting, custom_class in find_classes(names).items():
        value = getattr(names, setting)
        try:
            scheduler = custom_class(context)
        except BaseException as error:  # custom code may also call sys.exit
            reason = f"its constructor failed: {type(error).__name__}: {error}"
            raise _unusable(setting, value, reason) from error
        custom[setting] = scheduler, SchedulerWarnings(value, log)
    if "scheduler" in custom:
        return GuardedScheduler(*custom["scheduler"], context)
    if "capacity_scheduler_policy" in custom:
        capacity: CapacityScheduler = GuardedCapacity(*custom["capacity_scheduler_policy"], context)
    else:
        capacity = POLICIES[names.capacity_scheduler_policy](context)
    if "micro_batch_scheduler" in custom:
        micro_batch: MicroBatchScheduler = GuardedMicroBatch(*custom["micro_batch_scheduler"], context)
    else:
        micro_batch = InFlightBatching(context)
    name = f"{names.capacity_scheduler_policy} and {names.micro_batch_scheduler or InFlightBatching.__name__}"
    return SimpleScheduler(context, capacity, micro_batch, SchedulerWarnings(name, log))


def find_class(setting: str, value: str, method: str, base: type = object) -> Callable[[SchedulerContext], Any]:
    """The class that `value` names as `module:Class`. Raises ValueError if it lacks this method or base class."""
    try:
        found = find(value)
    except ValueError as error:
        raise _unusable(setting, value, error) from error
    if not isinstance(found, type):
        raise _unusable(setting, value, "it is not a class")
    if not issubclass(found, base):
        raise _unusable(setting, value, f"it is not a subclass of {base.__name__}")
    if not callable(getattr(found, method, None)):
        raise _unusable(setting, value, f"it has no method {method}")
    return found


def _unusable(setting: str, value: str, reason: object) -> ValueError:
    return ValueError(f"{setting}: {value!r} cannot be used: {reason}")
