"""First-token time through the ring with nine tenths of the prompt in the prefix cache, and with nothing in it."""

import statistics
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import asdict

from bench.harness.load import Ask, Load, System, Trace
from bench.harness.models import TINY, python_prompts
from bench.harness.style import BLUE, ORANGE, Series, canvas, frame, lines
from bench.harness.tables import Section, table
from bench.harness.topic import Plan, Step, Topic, engine_settings
from bench.systems.ring import through_ring


class PrefixPlan(Plan, frozen=True):
    prompt_tokens: tuple[int, ...] = (256, 512, 1024, 1920)
    share: float = 0.9
    """Of the prompt, in the cache."""
    repeats: int = 7


class PrefixPoint(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cached_tokens: int
    """As the server reports: whole blocks only."""
    cold: float
    cached: float
    ratio: float
    """Cold by cached: median of the rounds' ratios."""


class PrefixResult(PrefixPlan, frozen=True, kw_only=True):
    points: list[PrefixPoint]


def measure(plan: PrefixPlan, logs: Path, step: Step) -> PrefixResult:
    with through_ring(TINY, engine_settings(plan.threads), logs) as ring:
        points = [_point(ring, plan, tokens, step) for tokens in plan.prompt_tokens]
    return PrefixResult(**asdict(plan), points=points)


def _point(ring: System, plan: PrefixPlan, tokens: int, step: Step) -> PrefixPoint:
    prompts = python_prompts(TINY, plan.repeats + 1, tokens)
    pairs = []
    for round_, prompt in enumerate(prompts):
        cold = _one(ring, prompt, f"cold-{tokens}-{round_}")
        # An earlier request with the first part of the prompt fills the cache of this domain.
        _one(ring, prompt[: int(tokens * plan.share)], f"cached-{tokens}-{round_}")
        pairs.append((cold, _one(ring, prompt, f"cached-{tokens}-{round_}")))
        step(f"{tokens} prompt tokens, round {round_}")
    # The first round warms up.
    counted = [(cold.first_token_ms, cached.first_token_ms) for cold, cached in pairs[1:]]
    return PrefixPoint(
        tokens,
        min(cached.cached_tokens for _, cached in pairs),
        statistics.median(cold for cold, _ in counted),
        statistics.median(cached for _, cached in counted),
        statistics.median(cold / cached for cold, cached in counted),
    )


def _one(ring: System, prompt: list[int], salt: str) -> Trace:
    return ring.run(Load([Ask(prompt, 1)], width=1, salt=salt)).traces[0]


def section(result: PrefixResult) -> Section:
    longest = result.points[-1]
    rows = (
        f"{p.prompt_tokens} | {p.cached_tokens} | {p.cold:.1f} | {p.cached:.1f} | **{p.ratio:.1f}×**"
        for p in result.points
    )
    return Section(
        "First token with and without a cached prefix",
        f"One stream through the ring; an earlier request computed {result.share:.0%} of the prompt. Only whole blocks "
        "are reused.",
        [f"A prompt of {longest.prompt_tokens} tokens gets its first token **{longest.ratio:.1f}×** sooner."],
        [table("prompt tokens | from the cache | cold, ms | cached, ms | sooner", rows)],
    )


def draw(result: PrefixResult) -> Figure:
    cached = f"with {result.share:.0%} of the prompt cached and with none"
    about = f"First-token time through the ring, one stream, {cached}."
    figure, ((axes,),) = canvas((1, 1), (8, 4.6), "A cached prefix is not computed again", about)
    times = [
        Series("cold", ORANGE, [point.cold for point in result.points]),
        Series(f"{result.share:.0%} cached", BLUE, [point.cached for point in result.points]),
    ]
    lines(axes, [point.prompt_tokens for point in result.points], times)
    frame(axes, "First token, ms", x="prompt tokens", grid="y")
    return figure


TOPIC = Topic(PrefixPlan(), PrefixPlan((128,), repeats=1), measure, PrefixResult, section, draw)
