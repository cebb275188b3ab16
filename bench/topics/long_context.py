"""The cost of a token of a long prompt, by the prompt's length, compared with OpenVINO GenAI."""

from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from bench.harness.style import BLUE, GREY, LEGEND, ORANGE, TEAL, canvas, frame
from bench.harness.tables import Section, number, table
from bench.harness.topic import Plan, Step, Topic
from bench.peers.catalog import OPENVINO
from bench.peers.checkpoints import TINY_NAME
from bench.peers.contenders import OURS, Ours
from bench.topics import peers

COLOURS = (ORANGE, BLUE, TEAL, GREY)
FAST = [each for each in OURS if each.settings["backend"] == "openvino"]
ALONE = [Ours(each.title, each.precision, each.settings, with_ring=False) for each in FAST]


class LongContextPlan(Plan, frozen=True):
    model: str
    lengths: list[int]
    repeats: int


class LongContextResult(msgspec.Struct, frozen=True):
    beside: peers.PeersResult

    @property
    def systems(self) -> list[str]:
        return [entry.system for entry in self.beside.tables[0].entries]

    @property
    def lengths(self) -> list[int]:
        return [found.work.prompt_tokens for found in self.beside.tables]

    def first_token_ms(self, system: str) -> list[float]:
        found = [{entry.system: entry for entry in each.entries}[system] for each in self.beside.tables]
        return [entry.figures.first_token_p50 for entry in found]

    def costs(self, system: str) -> list[float]:
        """Microseconds per token of the prompt, by length."""
        return [1000 * ms / tokens for ms, tokens in zip(self.first_token_ms(system), self.lengths, strict=True)]


def measure(plan: LongContextPlan, logs: Path, step: Step) -> LongContextResult:
    works = [peers.Work(f"a prompt of {tokens:,} tokens", 1, 1, tokens, 1, 1) for tokens in plan.lengths]
    bout = peers.Bout(plan.model, works, [], ALONE, kv_cache_tokens=3 * max(plan.lengths))
    peers_plan = peers.PeersPlan([bout], plan.repeats, [OPENVINO.name], threads=plan.threads)
    return LongContextResult(peers.measure(peers_plan, logs, step))


def section(result: LongContextResult) -> Section:
    lengths = result.lengths
    costs = {system: result.costs(system) for system in result.systems}
    cells = " | ".join(f"{tokens:,} tokens" for tokens in lengths)
    return Section(
        "Long prompts",
        "One prompt at a time, in the tiny model's shape with random weights: time to first token divided by the "
        "number "
        "of prompt tokens, in microseconds; in brackets the time to first token. " + peers.heading(result.beside),
        [
            f"{system}: a token of a prompt of {lengths[-1]:,} tokens costs **{own[-1] / own[0]:.1f}×** as much as a "
            f"token of a prompt of {lengths[0]:,}."
            for system, own in costs.items()
        ],
        [
            table(
                f"µs per token of the prompt | {cells}",
                (
                    f"{system} | "
                    + " | ".join(
                        f"{number(cost)} ({number(ms / 1000)} s)"
                        for cost, ms in zip(own, result.first_token_ms(system), strict=True)
                    )
                    for system, own in costs.items()
                ),
            ),
            peers.meanwhile(result.beside.tables),
        ],
    )


def draw(result: LongContextResult) -> Figure:
    figure, ((axes,),) = canvas((1, 1), (8, 5), "Long prompts", "Microseconds per token of the prompt, by its length")
    # Solid lines for Sluice, dotted ones for others; one colour per precision.
    entries = result.beside.tables[0].entries
    kinds = [entry.system.partition(", ")[2].removeprefix("engine alone, ") for entry in entries]
    colours = dict(zip(dict.fromkeys(kinds), COLOURS, strict=False))
    for entry, kind in zip(entries, kinds, strict=True):
        line = "o-" if entry.is_ours else "o:"
        axes.plot(result.lengths, result.costs(entry.system), line, color=colours[kind], label=entry.system)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(result.lengths, [f"{length:,}" for length in result.lengths])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(**LEGEND)
    frame(axes, x="tokens of the prompt", grid="y")
    return figure


PLAN = LongContextPlan("5M", [1024, 4096, 16384, 32768], 3)
QUICK = LongContextPlan(TINY_NAME, [64, 128], 1)
TOPIC = Topic(PLAN, QUICK, measure, LongContextResult, section, draw)
