"""Comparison with other systems on the same CPU: the same checkpoints, requests and lengths, in turns in one run."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench.harness.load import Load, PlannedRequest, Run
from bench.harness.machine import MachineTimes, Meanwhile
from bench.harness.models import TINY, python_prompts
from bench.harness.stats import Figures, figures, ratio
from bench.harness.style import BLUE, GREY, canvas, frame, ranks
from bench.harness.tables import Section, Table, number, short, table
from bench.harness.topic import Plan, Step, Topic, interleave, speed_cells
from bench.peers.catalog import KINDS, PeerKind
from bench.peers.checkpoints import TINY_NAME
from bench.peers.contenders import BASES, BFLOAT16, INT8, OURS, PRECISIONS, Contender, Field, Ours


class Work(msgspec.Struct, frozen=True):
    title: str
    requests: int
    width: int
    prompt_tokens: int
    shortest: int
    longest: int
    shared_tokens: int = 0
    """Length of the prefix that all prompts share."""
    shortest_prompt: int | None = None
    """Prompts have between this and `prompt_tokens` tokens; None: all have `prompt_tokens`."""

    def load(self) -> Load:
        lengths = random.Random(0)
        prompts = python_prompts(TINY, self.requests, self.prompt_tokens)
        least = self.prompt_tokens if self.shortest_prompt is None else self.shortest_prompt
        requests = []
        for prompt in prompts:
            whole = prompts[0][: self.shared_tokens] + prompt[self.shared_tokens :]
            cut = whole[: lengths.randint(least, self.prompt_tokens)]
            requests.append(PlannedRequest(cut, lengths.randint(self.shortest, self.longest)))
        # The salt is the title, so that no work has prefix cache hits from another one.
        return Load(requests, self.width, salt=self.title, with_ids=True)


class Bout(msgspec.Struct, frozen=True):
    """Loads on one checkpoint, and the systems that serve them in addition to the installed peers."""

    model: str
    works: list[Work]
    bases: list[str]
    """Modes of transformers: generate, continuous."""
    ours: Sequence[Ours] = OURS
    kv_cache_tokens: int = 65536
    precisions: Sequence[str] = PRECISIONS

    def field(self, peers: Sequence[PeerKind], threads: int) -> Field:
        width = max(work.width for work in self.works)
        return Field(self.model, self.bases, self.ours, peers, threads, width, self.kv_cache_tokens, self.precisions)


class PeersPlan(Plan, frozen=True):
    bouts: list[Bout]
    repeats: int
    peers: Sequence[str] = tuple(KINDS)


class PeerEntry(msgspec.Struct, frozen=True):
    system: str
    precision: str
    is_ours: bool
    figures: Figures
    by_best: float | None
    """Tokens per second divided by those of the fastest peer: median of the rounds' ratios. None without a peer."""
    by_best_alike: float | None
    """The same for the fastest peer of this precision. None if no peer has this precision."""
    same: int
    """Number of requests with the same greedy tokens as the first system."""


class PeerTable(msgspec.Struct, frozen=True):
    model: str
    work: Work
    entries: list[PeerEntry]
    meanwhile: Meanwhile

    @property
    def peers(self) -> list[PeerEntry]:
        return [entry for entry in self.entries if not entry.is_ours]


class PeersResult(msgspec.Struct, frozen=True):
    tables: list[PeerTable]
    installed: dict[str, str]
    """Versions of the peers."""
    absent: list[str]


def measure(plan: PeersPlan, logs: Path, step: Step) -> PeersResult:
    kinds = [KINDS[name] for name in plan.peers]
    tables = []
    for bout in plan.bouts:
        with bout.field(kinds, plan.threads).started(logs, step) as found:
            tables += [_measure_work(bout.model, work, found, plan.repeats, step) for work in bout.works]
    versions = {kind.title: kind.version() for kind in kinds if kind.is_installed}
    return PeersResult(tables, versions, [kind.title for kind in kinds if not kind.is_installed])


def _measure_work(model: str, work: Work, found: Sequence[Contender], repeats: int, step: Step) -> PeerTable:
    load, before = work.load(), MachineTimes.read()
    sides = {each.system.name: (each.system, load) for each in found}
    runs = interleave(sides, repeats, lambda done: step(f"{model}, {work.title}: {done}"))
    meanwhile = before.until(MachineTimes.read())
    peers = [(each, own) for each, own in zip(found, runs, strict=True) if not each.is_ours]
    entries = []
    for each, own in zip(found, runs, strict=True):
        alike = [theirs for peer, theirs in peers if peer.precision == each.precision]
        by_best, by_best_alike = (_by_fastest(own, theirs) for theirs in ([theirs for _, theirs in peers], alike))
        same = sum(a.tokens == b.tokens for a, b in zip(own[0].traces, runs[0][0].traces, strict=True))
        name = each.system.name
        entries.append(PeerEntry(name, each.precision, each.is_ours, figures(own), by_best, by_best_alike, same))
    return PeerTable(model, work, entries, meanwhile)


def _by_fastest(own: list[Run], peers: Sequence[list[Run]]) -> float | None:
    fastest = max(peers, key=lambda runs: figures(runs).tokens_per_second, default=None)
    return None if fastest is None else ratio(own, fastest)


def heading(result: PeersResult) -> str:
    """The peers that ran, and those that are not installed."""
    ran = ", ".join(f"{title} {version}" for title, version in result.installed.items())
    absent = ", ".join(result.absent)
    return " ".join(
        filter(None, (f"Compared with {ran}." if ran else "", f"Not installed: {absent}." if absent else ""))
    )


def section(result: PeersResult) -> Section:
    return Section(
        "Side by side with other systems: " + ", ".join(sorted({found.model for found in result.tables})),
        "Every system loads the same checkpoint (the bundled one, or random weights), uses the same number of threads, "
        "and serves the same requests with greedy sampling and fixed output lengths. transformers' `generate` and "
        "onnxruntime-genai run padded batches, each until its longest request ends; the others batch in flight. "
        "[bench/peers](../../bench/peers/README.md) lists each peer's settings. *Ratio to best*: tokens/s divided by "
        "those of the fastest peer, and by those of the fastest peer of the same precision. *Same tokens*: requests "
        "whose output equals that of the first row; other kernels may round differently. " + heading(result),
        [_answer(found) for found in result.tables],
        [*map(_speeds, result.tables), meanwhile(result.tables)],
    )


def _answer(found: PeerTable) -> str:
    best = max(found.peers, key=lambda entry: entry.figures.tokens_per_second)
    ours = max((each for each in found.entries if each.is_ours), key=lambda each: each.figures.tokens_per_second)
    reached = f"**{_times(ours.by_best)}** the tokens/s of {best.system}"
    text = f"{found.model}, {found.work.title}: {ours.system} reaches {reached}."
    between = [(entry.figures.inter_token_p50, entry) for entry in found.peers]
    shortest = min((gap for gap, _ in between if gap is not None), default=None)
    own = ours.figures.inter_token_p50
    if found.work.width == 1 and shortest and own:
        text += (
            f" The time between tokens is {number(own)} ms, with the best peer {number(shortest)} ms "
            f"(**{own / shortest:.2f}×**)."
        )
    return text


def _speeds(found: PeerTable) -> Table:
    def row(entry: PeerEntry) -> str:
        mark = "**" if entry.is_ours else ""
        ratios = f"{mark}{_times(entry.by_best)}{mark} · {_times(entry.by_best_alike)}"
        return f"{entry.system} | {speed_cells(entry.figures, ratios)} | {entry.same}/{found.work.requests}"

    return table(
        f"{found.model}, {found.work.title} | tokens/s (range) | ratio to best · of its precision | "
        "first token p50 · p99, ms | inter-token p50 · p99, ms | same tokens",
        map(row, found.entries),
    )


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def meanwhile(tables: Sequence[PeerTable]) -> Table:
    """Use of the machine by other processes during the measurement."""
    rows = (
        f"{found.model}, {found.work.title} | {found.meanwhile.seconds:.0f} | {found.meanwhile.ours:.0%} | "
        f"{found.meanwhile.foreign:.1%} | {found.meanwhile.steal:.1%}"
        for found in tables
    )
    return table("use of the machine | seconds | benchmark's CPU time | other processes | stolen by the host", rows)


def draw(result: PeersResult) -> Figure:
    about = (
        "Output tokens per second: same checkpoint, requests, greedy sampling and threads. In brackets: ratio to the "
        "best peer."
    )
    columns = min(2, len(result.tables))
    rows = -(-len(result.tables) // columns)
    most = max(len(found.entries) for found in result.tables)
    size = (2 + 6.5 * columns, 0.8 + rows * (1.0 + 0.24 * most))
    figure, grid = canvas((rows, columns), size, "Side by side on the same CPU", about)
    places = [axes for row in grid for axes in row]
    for axes in places[len(result.tables) :]:
        axes.set_visible(False)
    for axes, found in zip(places, result.tables, strict=False):
        rates = [entry.figures.tokens_per_second for entry in found.entries]
        texts = [f"{short(entry.figures.tokens_per_second)}  ({_times(entry.by_best)})" for entry in found.entries]
        colours = [BLUE if entry.is_ours else GREY for entry in found.entries]
        ranks(axes, [entry.system for entry in found.entries], rates, colours, texts)
        frame(axes, found.model, found.work.title, bare="bottom")
    return figure


WORKS_25M = [
    Work("32 requests at once, 128 tokens in, 128 out", 32, 32, 128, 128, 128),
    Work("one stream, 128 tokens in, 128 out", 1, 1, 128, 128, 128),
    Work("a prompt of 1,024 tokens, 1 out", 1, 1, 1024, 1, 1),
    Work("16 requests, 8 at a time, 16 to 256 tokens in, 8 to 128 out", 16, 8, 256, 8, 128, shortest_prompt=16),
    Work("16 requests, 8 at a time, 1,024 tokens in of which 960 are shared, 16 out", 16, 8, 1024, 16, 16, 960),
]
WORKS_06B = [
    Work("one stream, 16 tokens in, 16 out", 1, 1, 16, 16, 16),
    Work("8 requests at once, 16 tokens in, 12 out", 8, 8, 16, 12, 12),
    Work("32 requests at once, 16 tokens in, 8 out", 32, 32, 16, 8, 8),
]
SMALL = Bout("25M", WORKS_25M, list(BASES))
# To limit memory: a dozen processes in float32 would need 50 GB, and each ring has another engine.
LARGE = Bout(
    "0.6B",
    WORKS_06B,
    ["generate"],
    [replace(each, with_ring=False) for each in OURS],
    kv_cache_tokens=8192,
    precisions=(INT8, BFLOAT16),
)
QUICK_WORK = Work("4 requests, 2 at a time, 16 tokens in, 2 to 8 out", 4, 2, 16, 2, 8)
QUICK = PeersPlan([Bout(TINY_NAME, [QUICK_WORK], list(BASES))], 1)
TOPIC = Topic(PeersPlan([SMALL], 3), QUICK, measure, PeersResult, section, draw)
LARGE_TOPIC = TOPIC._replace(plan=PeersPlan([LARGE], 3))
