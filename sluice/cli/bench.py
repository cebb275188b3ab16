"""`sluice bench`: the same load for one server or several, and their figures."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sluice.cli import bench_result
from sluice.cli.bench_servers import Api, Asked, BenchServer, connect, give_tokens, read_servers
from sluice.cli.common import Server, asks_server_without_token, fail, notes
from sluice.loadgen import report, workload
from sluice.loadgen.run import Measured, Pace, run_load, send_one
from sluice.loadgen.target import Target, TargetError
from sluice.loadgen.workload import MAX_TOKENS

BAR = (
    TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send to each server. One value for the whole command."""

    requests: int
    """Of a round."""
    rounds: int
    lengths: workload.Lengths
    file: Path | None
    pace: Pace
    warmup: int
    seed: int

    def warmup_requests(self, tokens_per_word: float, server: int) -> list[workload.Request]:
        return workload.random_requests(
            self.warmup, self.lengths, tokens_per_word, self.seed, f"{server}, before the first round"
        )

    def loads(self, tokens_per_word: float, server: int) -> list[Sequence[workload.Request]]:
        """One per round. Random prompts differ between servers, which may share an engine and its prefix cache.

        Raises WorkloadError.
        """
        count = self.requests * self.rounds
        if self.file is None:
            found = workload.random_requests(count, self.lengths, tokens_per_word, self.seed, server)
        else:
            found = workload.read_requests(self.file, count, self.lengths, tokens_per_word, self.seed)
        return [found[at : at + self.requests] for at in range(0, count, self.requests)]


@dataclass(frozen=True, slots=True)
class Contender:
    """A server, its connections, and the requests that it gets."""

    server: BenchServer
    target: Target
    warmup: Sequence[workload.Request]
    loads: Sequence[Sequence[workload.Request]]
    """One per round."""


@asks_server_without_token
def bench(
    server: Server,
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]ADDRESS...", help="host:port of a ring, or http://host:port; they take turns"),
    ] = None,
    api: Annotated[
        Api | None, typer.Option(help="Sluice's own, or OpenAI's. Default: OpenAI's for http:// and https://")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages of a user")] = False,
    token: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SLUICE_TOKEN",
            metavar="[NAME=]TOKEN",
            help="Bearer token of the server NAME; NAME= may be left out for a single server; repeatable",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists")] = "",
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of requests")] = 100,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Turns of each server, with so many requests each")] = 1,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second, as a Poisson process")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="About, by the server's count")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="At most, with --no-ignore-eos")] = 128,
    spread: Annotated[float, typer.Option(min=0, max=0.99, help="0.5: lengths from half to 1.5 times these")] = 0.0,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Lines of JSON: prompt or prompt_tokens, output_tokens"),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate output_tokens even if the model ends earlier")] = True,
    temperature: Annotated[float, typer.Option(min=0, help="Of all requests")] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measured ones")] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and moments")] = 0,
    timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds per request")] = None,
    percentiles: Annotated[str, typer.Option(help="Of each time, separated by commas")] = "50,90,99",
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS", help="Limit for ttft, tpot or e2el; repeatable")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here; - for stdout")] = None,
    detailed: Annotated[bool, typer.Option("--detailed", help="With --json: every request too")] = False,
    label: Annotated[str, typer.Option(help="A name for this run, in the JSON")] = "",
) -> None:
    """Measure servers under load: times to first token, between tokens and to the end, throughput, goodput."""
    goals, ranks = _goals(goodput or []), _percentiles(percentiles)
    servers = give_tokens(read_servers(addresses or [], api, server.addresses), token or [])
    if server.tenant is not None and any(each.api == "openai" for each in servers):
        raise typer.BadParameter("--tenant is for --api grpc")
    lengths = workload.Lengths(prompt_tokens, output_tokens, spread)
    plan = Plan(requests, rounds, lengths, file, Pace(rate, concurrency), warmup, seed)
    asked = Asked(model, chat, temperature, ignore_eos, timeout)
    try:
        found = asyncio.run(_measure(plan, servers, server, asked))
    except (TargetError, workload.WorkloadError, OSError, ValueError) as error:
        raise fail(str(error)) from error
    results = []
    for each, (served, measured) in zip(servers, found, strict=True):
        about = bench_result.heading(each, served, label, plan.requests * plan.rounds, plan.pace)
        figures = report.summarize(measured, ranks, goals)
        results.append(about | figures | (report.details(Measured.joined(measured).outcomes) if detailed else {}))
    bench_result.write(results, json_file)
    if json_file != Path("-"):
        bench_result.show(results, ranks)
    for each, (_, measured) in zip(servers, found, strict=True):
        bench_result.show_errors(each.name, Measured.joined(measured).outcomes)
    if not all(each["completed"] for each in results):
        raise typer.Exit(1)


async def _measure(
    plan: Plan, servers: Sequence[BenchServer], access: Server, asked: Asked
) -> list[tuple[str, list[Measured]]]:
    """The model's name and the rounds of each server. Raises TargetError, WorkloadError, OSError."""
    async with AsyncExitStack() as stack:
        contenders = []
        for number, server in enumerate(servers):
            target = await connect(server, access, asked)
            stack.push_async_callback(target.close)
            tokens_per_word = await _tokens_per_word(server, target)
            warmup, loads = plan.warmup_requests(tokens_per_word, number), plan.loads(tokens_per_word, number)
            contenders.append(Contender(server, target, warmup, loads))
        with Progress(*BAR, console=notes(), transient=True) as bar:
            unpaced = Pace(concurrency=plan.pace.concurrency)
            for each in contenders:
                await _send(each, each.warmup, unpaced, plan.seed, bar)
            rounds: list[list[Measured]] = [[] for _ in contenders]
            for turn in range(plan.rounds):
                for each, own in zip(contenders, rounds, strict=True):
                    own.append(await _send(each, each.loads[turn], plan.pace, plan.seed + turn, bar))
        return [(each.target.model, own) for each, own in zip(contenders, rounds, strict=True)]


async def _send(to: Contender, load: Sequence[workload.Request], pace: Pace, seed: int, bar: Progress) -> Measured:
    task = bar.add_task(to.server.name, total=len(load))
    measured = await run_load(to.target, load, pace, seed, lambda _: bar.advance(task))
    bar.remove_task(task)
    return measured


async def _tokens_per_word(server: BenchServer, target: Target) -> float:
    """By the server's count of a prompt; 1 if it does not say. Raises TargetError if the request fails."""
    outcome = await send_one(target, workload.Request(" ".join(workload.WORDS[: workload.CALIBRATION_WORDS]), 1))
    if not outcome.succeeded:
        hint = "; try --no-ignore-eos" if "ignore_eos" in outcome.error else ""
        raise TargetError(f"the first request to {server.name} failed: {outcome.error}{hint}")
    return outcome.prompt_tokens / workload.CALIBRATION_WORDS or 1.0


def _goals(given: list[str]) -> dict[str, float]:
    """Raises typer.BadParameter."""
    goals = {}
    for each in given:
        name, _, limit = each.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise typer.BadParameter(f"--goodput {each}: must be a name, a colon and milliseconds") from None
        if name not in report.GOALS or not goals[name] >= 0:
            raise typer.BadParameter(f"--goodput {each}: not one of {', '.join(report.GOALS)} with 0 or more")
    return goals


def _percentiles(given: str) -> list[float]:
    """Raises typer.BadParameter."""
    try:
        found = [float(each) for each in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--percentiles {given}: must be numbers separated by commas") from None
    if not all(0 <= each <= 100 for each in found):
        raise typer.BadParameter(f"--percentiles {given}: must be from 0 to 100")
    return found
