"""Side by side with transformers' `generate` and its continuous batching: same checkpoint, same requests."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from bench.harness.children import SystemProcess
from bench.harness.load import Ask, Load, System
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import Figures, figures, ratio
from bench.harness.style import BLUE, GREY, canvas, frame, ranks
from bench.harness.tables import Section, short, table
from bench.harness.topic import Plan, Step, Topic, engine_settings, interleave, speed_cells
from bench.systems.engine_alone import NAME as ALONE
from bench.systems.engine_alone import engine_alone
from bench.systems.ring import NAME as RING
from bench.systems.ring import through_ring

BASE = "transformers generate"


class Work(msgspec.Struct, frozen=True):
    title: str
    requests: int
    width: int
    prompt_tokens: int
    shortest: int
    longest: int

    def load(self) -> Load:
        lengths = random.Random(0)
        prompts = python_prompts(TINY, self.requests, self.prompt_tokens)
        asks = [Ask(prompt, lengths.randint(self.shortest, self.longest)) for prompt in prompts]
        return Load(asks, self.width, with_ids=True)


class PeersPlan(Plan, frozen=True):
    works: list[Work]
    repeats: int


class PeerEntry(msgspec.Struct, frozen=True):
    system: str
    figures: Figures
    ratio: float
    """Tokens per second by those of transformers' generate: median of the rounds' ratios."""
    same: int
    """Requests whose greedy tokens are those of transformers' generate."""


class PeerTable(msgspec.Struct, frozen=True):
    work: Work
    entries: list[PeerEntry]


class PeersResult(msgspec.Struct, frozen=True):
    tables: list[PeerTable]


def measure(plan: PeersPlan, logs: Path, step: Step) -> PeersResult:
    engine = engine_settings(plan.threads)
    width = max(work.width for work in plan.works)

    def transformers(name: str, mode: str) -> SystemProcess:
        options = [str(TINY), mode, str(plan.threads), str(width)]
        return SystemProcess(name, "bench.systems.transformers_peer", options, logs / f"{mode}.log")

    with ExitStack() as stack:
        systems: list[System] = [
            stack.enter_context(transformers(BASE, "generate")),
            stack.enter_context(transformers("transformers continuous batching", "continuous")),
            stack.enter_context(engine_alone(TINY, engine, logs)),
            stack.enter_context(through_ring(TINY, engine, logs)),
        ]
        return PeersResult([_measure_work(work, systems, plan.repeats, step) for work in plan.works])


def _measure_work(work: Work, systems: Sequence[System], repeats: int, step: Step) -> PeerTable:
    load = work.load()
    runs = interleave({system.name: (system, load) for system in systems}, repeats, step)
    base, entries = runs[0], []
    for system, own in zip(systems, runs, strict=True):
        same = sum(a.tokens == b.tokens for a, b in zip(own[0].traces, base[0].traces, strict=True))
        entries.append(PeerEntry(system.name, figures(own), ratio(own, base), same))
    return PeerTable(work, entries)


def section(result: PeersResult) -> Section:
    ratios = [{entry.system: entry.ratio for entry in peers.entries}[RING] for peers in result.tables]
    return Section(
        "Side by side with transformers",
        "The same checkpoint in float32, requests, greedy sampling, output lengths and number of threads. `generate` "
        "runs padded groups that wait for their slowest member; continuous batching is the library's own scheduler "
        "over its paged cache. *Same tokens*: requests whose output equals that of `generate`.",
        [
            f"{peers.work.title}: the ring reaches **{ratio:.2f}×** the tokens/s of transformers' generate."
            for peers, ratio in zip(result.tables, ratios, strict=True)
        ],
        [
            table(
                f"{peers.work.title} | tokens/s (range) | by generate | first token p50 · p99, ms | "
                "inter-token p50 · p99, ms | same tokens",
                (
                    f"{entry.system} | {speed_cells(entry.figures, f'**{entry.ratio:.2f}×**')} | "
                    f"{entry.same}/{peers.work.requests}"
                    for entry in peers.entries
                ),
            )
            for peers in result.tables
        ],
    )


def draw(result: PeersResult) -> Figure:
    same = "same checkpoint, requests, greedy sampling and threads"
    about = f"Output tokens per second: {same}. In brackets: by generate."
    columns, title = len(result.tables), "Side by side with transformers on the same CPU"
    figure, (row,) = canvas((1, columns), (1.5 + 5 * columns, 3.2), title, about)
    for axes, peers in zip(row, result.tables, strict=True):
        names = [entry.system for entry in peers.entries]
        rates = [entry.figures.tokens_per_second for entry in peers.entries]
        texts = [f"{short(entry.figures.tokens_per_second)}  ({entry.ratio:.2f}×)" for entry in peers.entries]
        ranks(axes, names, rates, [BLUE if name in (RING, ALONE) else GREY for name in names], texts)
        head, _, tail = peers.work.title.partition(", ")
        frame(axes, head, tail, bare="bottom")
    return figure


WORKS = [
    Work("32 requests at once, 128 tokens in, 128 out", 32, 32, 128, 128, 128),
    Work("32 requests, 8 at a time, 32 tokens in, 8 to 256 out", 32, 8, 32, 8, 256),
    Work("one stream, 128 tokens in, 128 out", 1, 1, 128, 128, 128),
]
QUICK = PeersPlan([Work("4 requests, 2 at a time, 16 tokens in, 2 to 8 out", 4, 2, 16, 2, 8)], 1)
TOPIC = Topic(PeersPlan(WORKS, 3), QUICK, measure, PeersResult, section, draw)
