"""The scheduler that the settings ask for."""

from collections.abc import Callable, Mapping
from typing import Any

from structlog.stdlib import BoundLogger

from engine_worker.scheduling.capacity import CapacityScheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.scheduling.guaranteed_no_evict import GuaranteedNoEvict
from engine_worker.scheduling.guarded import GuardedCapacity, GuardedMicroBatch, GuardedScheduler
from engine_worker.scheduling.load import find_class, make
from engine_worker.scheduling.max_utilization import MaxUtilization
from engine_worker.scheduling.micro_batch import InFlightBatching, MicroBatchScheduler
from engine_worker.scheduling.simple import RequestScheduler, SimpleScheduler
from engine_worker.scheduling.static_batch import StaticBatch
from engine_worker.scheduling.warnings import SchedulerWarnings
from sluice.settings.engine import SchedulerNames

POLICIES: Mapping[str, Callable[[SchedulerContext], CapacityScheduler]] = {
    "max_utilization": MaxUtilization,
    "guaranteed_no_evict": GuaranteedNoEvict,
    "static_batch": StaticBatch,
}


def find_classes(names: SchedulerNames) -> dict[str, Callable[[SchedulerContext], Any]]:
    """The users' classes by setting, their modules imported. Raises SchedulerLoadError."""
    found = {}
    if names.capacity_scheduler_policy not in POLICIES:
        setting = "capacity_scheduler_policy"
        found[setting] = find_class(setting, names.capacity_scheduler_policy, "schedule_request")
    if names.micro_batch_scheduler is not None:
        setting = "micro_batch_scheduler"
        found[setting] = find_class(setting, names.micro_batch_scheduler, "schedule")
    if names.scheduler is not None:
        found["scheduler"] = find_class("scheduler", names.scheduler, "schedule", RequestScheduler)
    return found


def build_scheduler(names: SchedulerNames, context: SchedulerContext, log: BoundLogger) -> RequestScheduler:
    """What `names` say. Raises SchedulerLoadError."""
    made = {
        setting: (
            make(setting, getattr(names, setting), found, context),
            SchedulerWarnings(getattr(names, setting), log),
        )
        for setting, found in find_classes(names).items()
    }
    if "scheduler" in made:
        return GuardedScheduler(*made["scheduler"], context)
    if "capacity_scheduler_policy" in made:
        capacity: CapacityScheduler = GuardedCapacity(*made["capacity_scheduler_policy"], context)
    else:
        capacity = POLICIES[names.capacity_scheduler_policy](context)
    if "micro_batch_scheduler" in made:
        micro_batch: MicroBatchScheduler = GuardedMicroBatch(*made["micro_batch_scheduler"], context)
    else:
        micro_batch = InFlightBatching(context)
    name = f"{names.capacity_scheduler_policy} and {names.micro_batch_scheduler or InFlightBatching.__name__}"
    return SimpleScheduler(context, capacity, micro_batch, SchedulerWarnings(name, log))
