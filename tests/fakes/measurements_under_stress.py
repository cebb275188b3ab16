"""Plausible results of the benchmarks of failures, overload and slow clients."""

import msgspec

from bench.deaths import kills, pauses, precisions, restart
from bench.deaths.freeze import Frozen, Leftovers
from bench.harness.memory import Trail
from bench.harness.pool_files import OFF, ON
from bench.overload.floods import Burst, Retried, TenantPlan, Tenants, TenantTimes
from bench.overload.overload import OverloadResult
from bench.takeover import copies, costs, roles, takeovers
from bench.topics import slow_reader


def deaths_result() -> kills.KillResult:
    deaths = [kills.Death("router-0", 1.5), kills.Death("detok-1", 3.0)]
    times = [0.1, 0.2, 0.4]
    memory = [
        Trail("router-0", [0.0, 1.0, 2.0, 3.0], [80.0, 81.0, 82.0, 82.0]),
        Trail("router-0", [5.0, 6.0], [79.0, 80.0]),
        Trail("detok-1", [0.0, 1.0, 6.0], [60.0, 60.0, 60.0]),
    ]
    slow = [0.1, 0.3, 2.5, 2.6]
    return kills.KillResult(
        plan=kills.KillPlan(),
        deaths=deaths,
        quiet_seconds=2.0,
        seconds=4.0,
        streams=4,
        resumed=1,
        quiet_first=times,
        quiet_stall=times,
        first=slow,
        stall=slow,
        memory=memory,
    )


def deaths_with_files_result() -> kills.KillResult:
    return msgspec.structs.replace(deaths_result(), with_files=msgspec.structs.replace(deaths_result(), in_files=True))


def takeover_result() -> takeovers.TakeoverResult:
    plan = takeovers.TakeoverPlan(repeats=2)
    runs = [
        takeovers.Takeover(
            precision=precision,
            prompt=prompt,
            case=case,
            kv=kv,
            first_token=20.0 + repeat,
            pause=0.5 + repeat / 5 if kv == ON else 40.0 + repeat,
            recomputed=12 if kv == ON else prompt + 40,
            adopted=0,
            fetched=100 if kv == ON else 0,
            difference="",
            same_bits=True,
        )
        for precision in plan.precisions
        for prompt in plan.prompts
        for case in takeovers.CASES
        for kv in (OFF, ON)
        for repeat in range(plan.repeats)
    ]
    return takeovers.TakeoverResult(plan, runs)


def roles_result() -> roles.RolesResult:
    quiet = [0.1, 0.11, 0.12]
    beside = {roles.TOGETHER: [0.1, 0.5, 0.9], roles.APART: [0.1, 0.11, 0.15]}
    waits = [roles.Waits(kind, quiet, times, [20.0, 21.0], 0) for kind, times in beside.items()]
    return roles.RolesResult(roles.PLAN, waits)


def costs_result() -> costs.CostsResult:
    points = [
        costs.CostPoint(system, work, 800.0, [0.001, 0.004, 0.002], 0.998)
        for system in costs.BACKENDS
        for work in (costs.PREFILL, costs.DECODE)
    ]
    return costs.CostsResult(costs.PLAN, points, copies.Copies(4096, 100.0, 0.3, 0.04, 15.0, 0.2))


def precisions_result() -> precisions.PrecisionResult:
    plan = precisions.QUICK
    return precisions.PrecisionResult(plan, {name: deaths_result() for name in plan.precisions})


def pauses_result() -> pauses.PausesResult:
    measured = [
        pauses.Pauses(version, cause, victim, [0.1, 0.2, 0.3], [0.05, 0.1, 0.1])
        for version in (pauses.BEFORE, pauses.NOW)
        for cause in pauses.CAUSES
        for victim in pauses.VICTIMS
    ]
    return pauses.PausesResult(pauses.PausesPlan(), 0, measured)


def restart_result() -> restart.RestartResult:
    def phase(name: str, stall: float) -> restart.RestartPhase:
        return restart.RestartPhase(
            name=name, seconds=30.0, streams=3, resumed=1, first=[0.1, 0.2, 0.3], stall=[0.1, 0.2, stall]
        )

    names = (restart.QUIET, restart.RESTARTS, restart.STOPPED, restart.GOES_ON)
    phases = [phase(name, stall) for name, stall in zip(names, (0.3, 1.5, 4.0, 0.4), strict=True)]
    services = (("engine-0", 0.9), ("detok-0", 1.1), ("router-0", 3.4))
    restarts = [restart.Restart(service, drain, 2.5, "ended with code 0") for service, drain in services]
    frozen = Frozen("engine-0", 30.0, 16, 9, 40)
    return restart.RestartResult(restart.RestartPlan(), 2.0, phases, restarts, frozen, Leftovers([]))


def overload_result() -> OverloadResult:
    cpu = {"client": 0.4, "router": 0.5}
    bursts = [
        Burst(100, at, served=20, refused=80, told_when=80, client=[5.0, 9.0], router=[0.3, 0.8], cpu=cpu)
        for at in (0.0, 1.0)
    ]
    bursts.append(msgspec.structs.replace(bursts[0], requests=400, connections=8, unexplained={"CANCELLED": 3}))
    alone, flooded = TenantTimes([10.0, 12.0], [1.0, 2.0], [5.0]), TenantTimes([15.0, 31.0], [1.0, 2.0], [9.0, 10.0])
    return OverloadResult(
        8,
        16,
        bursts,
        Retried(100, 99, {"UNAVAILABLE": 1}, 20.0),
        Tenants(TenantPlan(2, 1, 64, 400), 16, alone, flooded),
    )


def slow_reader_result(*, tensors: bool = False) -> slow_reader.SlowReaderResult:
    memory = [Trail(name, [0.0, 5.0, 10.0], [60.0, 61.0, 61.0]) for name in ("router", "engine-0", "detok-0")]
    return slow_reader.SlowReaderResult(
        slow_tokens=900,
        tensors=tensors,
        without=[900.0, 1000.0],
        beside=[890.0, 1010.0],
        read_later=850,
        slow_from=5.0,
        memory=memory,
        cpu_without=300.0,
        cpu_beside=301.0,
    )
