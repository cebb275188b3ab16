"""More than there is room for."""

from collections.abc import Sequence

from bench.overload.refusals import Burst
from bench.overload.tenants import Tenants
from bench.parts import overload
from bench.sections.words import Section, Table, number
from bench.stats import percentile

MOST_TIMES_SLOWER = 2.0
"""That the other tenant's first token may take."""


def of_overload(result: overload.Result) -> Section:
    """Refusals, then tenants."""
    plan = result.tenants.plan
    return Section(
        "Overload",
        f"A router with {result.max_live} live and {result.max_waiting} waiting requests at most. *At the client*: "
        "from call to refusal, in one Python event loop that makes all the calls; *in the router*: from when it has "
        f"read the message. Then an engine that runs {result.tenants.batch} requests at once, where one tenant always "
        f"has {plan.flood} requests of {plan.flood_tokens} tokens and another asks one small thing after the other, in "
        "turns with and without that flood.",
        [*map(_refused, result.bursts), _retried(result), _flooded(result.tenants)],
        [_refusals(result.bursts), _tenants(result.tenants)],
    )


def _refused(burst: Burst) -> str:
    return (
        f"{burst.requests:,} requests {_within(burst)}: {burst.refused} refused, {burst.told_when} of them with "
        f"RetryInfo; they know after **{number(percentile(burst.client, 99))} ms** (p99) at the client, "
        f"{number(percentile(burst.router, 99))} ms in the router.{_unexplained(burst)}"
    )


def _unexplained(burst: Burst) -> str:
    found = ", ".join(f"{count} {status}" for status, count in sorted(burst.unexplained.items()))
    return f" **{found}** without the router's word." if found else ""


def _retried(result: overload.Result) -> str:
    errors = ", ".join(f"{count} {status}" for status, count in sorted(result.retried.errors.items()))
    return (
        f"Through gRPC's own retries {result.retried.served:,} of {result.retried.requests:,} at once are answered"
        f"{f' (others: {errors})' if errors else ''}, in {result.retried.seconds:.0f} s."
    )


def _flooded(tenants: Tenants) -> str:
    ratios = [percentile(tenants.flooded.first_token, p) / percentile(tenants.alone.first_token, p) for p in (50, 99)]
    return (
        f"In the other's flood a tenant's first token takes {ratios[0]:.1f} times what it takes alone (p50), and "
        f"**{ratios[1]:.1f} times** at p99 (it may take {MOST_TIMES_SLOWER:g})."
    )


def _within(burst: Burst) -> str:
    when = f"within {burst.seconds:g} s" if burst.seconds else "at once"
    return when if burst.connections == 1 else f"{when} over {burst.connections} connections"


def _refusals(bursts: Sequence[Burst]) -> Table:
    columns = [
        "requests",
        "served",
        "refused",
        "at the client p50 · p99, ms",
        "in the router p50 · p99, ms",
        "CPU of client · router, ms each",
    ]
    rows = [
        [
            f"{each.requests:,} {_within(each)}",
            str(each.served),
            str(each.refused),
            _both(each.client),
            _both(each.router),
            f"{number(each.cpu['client'])} · {number(each.cpu['router'])}",
        ]
        for each in bursts
    ]
    return Table(columns, rows)


def _tenants(tenants: Tenants) -> Table:
    columns = ["p50 · p99, ms", "first token", "of that in the router", "between two tokens"]
    rows = [
        [name, _both(asked.first_token), _both(asked.queue), _both(asked.gaps)]
        for name, asked in (("alone", tenants.alone), ("in the flood", tenants.flooded))
    ]
    return Table(columns, rows)


def _both(times: Sequence[float]) -> str:
    return f"{number(percentile(times, 50))} · {number(percentile(times, 99))}"
