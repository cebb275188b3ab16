"""`sluice bench`: a load for a server, and what it makes of it."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from sluice.cli import bench_result
from sluice.cli.common import Server, asks_server, describe, fail, notes
from sluice.client import Options, SluiceError, TlsOptions
from sluice.loadgen import report, workload
from sluice.loadgen.grpc_target import GrpcTarget
from sluice.loadgen.run import Measured, Pace, run_load, send_one
from sluice.loadgen.target import Target, TargetError
from sluice.loadgen.workload import MAX_TOKENS

Api = Literal["grpc", "openai"]
BAR = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. One value for the whole command."""

    requests: int
    lengths: workload.Lengths
    file: Path | None
    pace: Pace
    warmup: int
    seed: int

    def rehearsal(self, tokens_per_word: float) -> list[workload.Request]:
        """Other prompts than those of the load, which the server must not have in its prefix cache."""
        return workload.random_requests(self.warmup, self.lengths, tokens_per_word, ~self.seed)

    def load(self, tokens_per_word: float) -> list[workload.Request]:
        """Raises WorkloadError."""
        if self.file is None:
            return workload.random_requests(self.requests, self.lengths, tokens_per_word, self.seed)
        return workload.read_requests(self.file, self.requests, self.lengths, tokens_per_word, self.seed)


@asks_server
def bench(
    server: Server,
    target: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="host:port, or http://host:port with --api openai")
    ] = None,
    api: Annotated[Api, typer.Option(help="Of the server: Sluice's own, or OpenAI's over HTTP")] = "grpc",
    chat: Annotated[bool, typer.Option("--chat", help="With --api openai: /v1/chat/completions")] = False,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists")] = "",
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of requests")] = 100,
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
    """Measure a server under load: times to first token, between tokens and to the end, throughput, goodput."""
    goals, ranks = _goals(goodput or []), _percentiles(percentiles)
    addressed = server if target is None else replace(server, addresses=tuple(target.split(",")))
    if api == "openai" and (target is None or len(addressed.addresses) > 1):
        raise typer.BadParameter("--api openai needs the one ADDRESS of the server")
    if api == "openai" and server.tenant is not None:
        raise typer.BadParameter("--tenant is for --api grpc")
    if api == "grpc" and target is not None and "://" in target:
        raise typer.BadParameter(f"{target} is a URL: add --api openai, or give host:port of a Sluice server")
    if api == "grpc" and chat:
        raise typer.BadParameter("--chat is for --api openai")
    lengths = workload.Lengths(prompt_tokens, output_tokens, spread)
    plan = Plan(requests, lengths, file, Pace(rate, concurrency), warmup, seed)
    sampling = {"temperature": temperature, "ignore_eos": ignore_eos or None}
    try:
        name, measured = asyncio.run(_measure(plan, lambda: _open(addressed, api, chat, model, sampling, timeout)))
    except SluiceError as error:
        raise fail(describe(error, " or ".join(addressed.addresses))) from error
    except (TargetError, workload.WorkloadError, OSError, ValueError) as error:
        raise fail(str(error)) from error
    figures = report.summarize(measured, ranks, goals)
    about = bench_result.heading(api, name, label, plan.requests, plan.pace)
    bench_result.write(about | figures | (report.details(measured.outcomes) if detailed else {}), json_file)
    if json_file != Path("-"):
        bench_result.show(about, figures, ranks)
    bench_result.show_errors(measured.outcomes)
    if not figures["completed"]:
        raise typer.Exit(1)


async def _open(
    server: Server, api: Api, chat: bool, model: str, sampling: dict[str, Any], timeout: float | None
) -> Target:
    if api == "grpc":
        options = Options(temperature=sampling["temperature"], ignore_eos=sampling["ignore_eos"])
        connection = {"timeout": timeout, "tls": server.tls, "token": server.token, "tenant": server.tenant}
        return await GrpcTarget.open(server.addresses, model, options, **connection)
    # Slow to import, and needed here alone.
    from sluice.loadgen.openai_target import OpenAITarget

    fields = {name: value for name, value in sampling.items() if value is not None}
    address, tls = server.addresses[0], _certificates(server.tls)
    return await OpenAITarget.open(address, model, fields, chat=chat, token=server.token, tls=tls, timeout=timeout)


def _certificates(tls: TlsOptions | None) -> ssl.SSLContext:
    """Raises OSError for a file that cannot be read."""
    context = ssl.create_default_context(cafile=None if tls is None else tls.ca)
    if tls is not None and tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


async def _measure(plan: Plan, opening: Callable[[], Awaitable[Target]]) -> tuple[str, Measured]:
    """The model's name, and what was measured. Raises SluiceError, TargetError, WorkloadError."""
    target = await opening()
    try:
        tokens_per_word = await _tokens_per_word(target)
        load = plan.load(tokens_per_word)
        with Progress(*BAR, console=notes(), transient=True) as bar:
            at_once = Pace(concurrency=plan.pace.concurrency)
            await _send(target, plan.rehearsal(tokens_per_word), at_once, plan.seed, bar)
            return target.model, await _send(target, load, plan.pace, plan.seed, bar)
    finally:
        await target.close()


async def _send(target: Target, load: list[workload.Request], pace: Pace, seed: int, bar: Progress) -> Measured:
    task = bar.add_task("requests", total=len(load))
    return await run_load(target, load, pace, seed, lambda _: bar.advance(task))


async def _tokens_per_word(target: Target) -> float:
    """By the server's count of a prompt; 1 if it does not say. Raises TargetError if the request fails."""
    outcome = await send_one(target, workload.Request(" ".join(workload.WORDS[: workload.CALIBRATION_WORDS]), 1))
    if not outcome.succeeded:
        hint = "; try --no-ignore-eos" if "ignore_eos" in outcome.error else ""
        raise TargetError(f"the first request failed: {outcome.error}{hint}")
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
