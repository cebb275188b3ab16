"""`sluice bench`: measures one or several servers under the same load."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sluice.cli import bench_result
from sluice.cli.bench_servers import Api, BenchServer, assign_tokens, connect, read_servers
from sluice.cli.common import Server, fail, notes, with_server_without_token
from sluice.loadgen import report, workload
from sluice.loadgen.run import Measured, Pace, run_load, send_one
from sluice.loadgen.target import RequestOptions, Target, TargetError
from sluice.loadgen.workload import MAX_TOKENS

BAR = (
    TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send to each server."""

    requests: int
    """Number of requests in a round."""
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
        """The requests of each round for the server with index `server`. Raises WorkloadError.

        Random prompts differ between servers, because these may share an engine and its prefix cache.
        """
        count = self.requests * self.rounds
        if self.file is None:
            requests = workload.random_requests(count, self.lengths, tokens_per_word, self.seed, server)
        else:
            requests = workload.read_requests(self.file, count, self.lengths, tokens_per_word, self.seed)
        return [requests[start : start + self.requests] for start in range(0, count, self.requests)]


@dataclass(frozen=True, slots=True)
class Contender:
    """A server, the connections to it, and the requests to send to it."""

    server: BenchServer
    target: Target
    warmup: Sequence[workload.Request]
    loads: Sequence[Sequence[workload.Request]]
    """The requests of each round."""


@with_server_without_token
def bench(
    server: Server,
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]ADDRESS...",
            help="Servers to compare, which are measured in turns: host:port of a Sluice server, or http://host:port "
            "of an OpenAI-compatible one. Default: --address.",
        ),
    ] = None,
    api: Annotated[
        Api | None,
        typer.Option(
            help="API to use: Sluice's gRPC API or OpenAI's HTTP API. Default: openai for http:// and https://, "
            "otherwise grpc."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user message of a chat.")] = False,
    token: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SLUICE_TOKEN",
            metavar="[NAME=]TOKEN",
            help="Bearer token for the server NAME. NAME= can be omitted for a single server. Repeatable.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model to request. Default: the first that the server lists.")
    ] = "",
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="Number of requests per server and round.")
    ] = 100,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Number of rounds. Servers are measured in turns.")
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            min=0.001,
            help="Requests per second, at random times (Poisson process). Default: all requests start together.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of requests in flight. Default: no limit."),
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS", min=1, max=MAX_TOKENS, help="Approximate length of a prompt, as counted by the server."
        ),
    ] = 128,
    output_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS", min=1, max=MAX_TOKENS, help="Length of an output; with --no-ignore-eos, the maximum."
        ),
    ] = 128,
    spread: Annotated[
        float,
        typer.Option(
            metavar="FRACTION", min=0, max=0.99, help="Vary both lengths: 0.5 means from 0.5 to 1.5 times as long."
        ),
    ] = 0.0,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File of requests, one JSON object per line, with prompt or prompt_tokens, and output_tokens.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate all output tokens, even after the model's end-of-sequence token.")
    ] = True,
    temperature: Annotated[float, typer.Option(metavar="NUMBER", min=0, help="Sampling temperature.")] = 0.0,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of requests to send before the measured ones.")
    ] = 2,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Seed for prompts, lengths and the times of requests.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="Timeout of a request. Default: none.")
    ] = None,
    percentiles: Annotated[
        str, typer.Option(metavar="LIST", help="Percentiles of the latencies to show, separated by commas.")
    ] = "50,90,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Count requests within this limit as goodput. NAME is ttft (time to first token), tpot (time per "
            "output token) or e2el (end-to-end latency). Repeatable.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results to this file as JSON. - writes to stdout."),
    ] = None,
    detailed: Annotated[
        bool, typer.Option("--detailed", help="With --json: include the times of every request.")
    ] = False,
    label: Annotated[str, typer.Option(metavar="TEXT", help="Label of this run in the JSON.")] = "",
) -> None:
    """Measure the performance of servers under load.

    Reports the time to the first token, per output token and to the end, throughput and goodput. Exits with code 1 if
    a server completed no request.
    """
    goals, ranks = _goals(goodput or []), _percentiles(percentiles)
    servers = assign_tokens(read_servers(addresses or [], api, server.addresses), token or [])
    if server.tenant is not None and any(target.api == "openai" for target in servers):
        raise typer.BadParameter("--tenant is only supported with --api grpc")
    lengths = workload.Lengths(prompt_tokens, output_tokens, spread)
    plan = Plan(requests, rounds, lengths, file, Pace(rate, concurrency), warmup, seed)
    request_options = RequestOptions(model, chat, temperature, ignore_eos, timeout)
    try:
        measurements = asyncio.run(_measure(plan, servers, server, request_options))
    except (TargetError, workload.WorkloadError, OSError, ValueError) as error:
        raise fail(str(error)) from error
    results = []
    for target, (model_name, measured) in zip(servers, measurements, strict=True):
        about = bench_result.heading(target, model_name, label, plan.requests * plan.rounds, plan.pace)
        figures = report.summarize(measured, ranks, goals)
        results.append(about | figures | (report.details(Measured.joined(measured).outcomes) if detailed else {}))
    bench_result.write(results, json_file)
    if json_file != Path("-"):
        bench_result.show(results, ranks)
    for target, (_, measured) in zip(servers, measurements, strict=True):
        bench_result.show_errors(target.name, Measured.joined(measured).outcomes)
    if not all(result["completed"] for result in results):
        raise typer.Exit(1)


async def _measure(
    plan: Plan, servers: Sequence[BenchServer], access: Server, request_options: RequestOptions
) -> list[tuple[str, list[Measured]]]:
    """The model's name and the rounds of each server. Raises TargetError, WorkloadError, OSError."""
    async with AsyncExitStack() as stack:
        contenders = []
        for number, server in enumerate(servers):
            target = await connect(server, access, request_options)
            stack.push_async_callback(target.close)
            tokens_per_word = await _tokens_per_word(server, target)
            warmup, loads = plan.warmup_requests(tokens_per_word, number), plan.loads(tokens_per_word, number)
            contenders.append(Contender(server, target, warmup, loads))
        console = notes()
        # Without a terminal, the bar would leave an empty line.
        with Progress(*BAR, console=console, transient=True, disable=not console.is_terminal) as bar:
            unpaced = Pace(concurrency=plan.pace.concurrency)
            for contender in contenders:
                await _send(contender, contender.warmup, unpaced, plan.seed, bar)
            results: list[list[Measured]] = [[] for _ in contenders]
            for turn in range(plan.rounds):
                for contender, rounds in zip(contenders, results, strict=True):
                    rounds.append(await _send(contender, contender.loads[turn], plan.pace, plan.seed + turn, bar))
        return [(contender.target.model, rounds) for contender, rounds in zip(contenders, results, strict=True)]


async def _send(
    contender: Contender, load: Sequence[workload.Request], pace: Pace, seed: int, bar: Progress
) -> Measured:
    task = bar.add_task(contender.server.name, total=len(load))
    measured = await run_load(contender.target, load, pace, seed, lambda _: bar.advance(task))
    bar.remove_task(task)
    return measured


async def _tokens_per_word(server: BenchServer, target: Target) -> float:
    """Tokens per word as counted by the server for a short prompt; 1 if it reports no count.

    Raises TargetError if the request fails.
    """
    outcome = await send_one(target, workload.Request(" ".join(workload.WORDS[: workload.CALIBRATION_WORDS]), 1))
    if not outcome.succeeded:
        hint = "; try --no-ignore-eos" if "ignore_eos" in outcome.error else ""
        raise TargetError(f"the first request to {server.name} failed: {outcome.error}{hint}")
    return outcome.prompt_tokens / workload.CALIBRATION_WORDS or 1.0


def _goals(texts: list[str]) -> dict[str, float]:
    """Limits in milliseconds by name, from texts such as ttft:200. Raises typer.BadParameter."""
    goals = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise typer.BadParameter(f"--goodput {text}: must be a name, a colon and milliseconds") from None
        if name not in report.GOALS:
            raise typer.BadParameter(f"--goodput {text}: the name must be one of {', '.join(report.GOALS)}")
        if not goals[name] >= 0:
            raise typer.BadParameter(f"--goodput {text}: the limit must be 0 ms or more")
    return goals


def _percentiles(text: str) -> list[float]:
    """Raises typer.BadParameter."""
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--percentiles {text}: must be numbers separated by commas") from None
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise typer.BadParameter(f"--percentiles {text}: must be from 0 to 100")
    return percentiles
