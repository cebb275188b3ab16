"""Results of the bench as they could have been measured."""

from bench.parts import batching, peers, prefix, ring
from bench.stats import Figures
from bench.systems import engine_alone, through_ring


def figures(rate: float, cpu: dict[str, float] | None = None, gap: float | None = 4.0) -> Figures:
    return Figures(rate, (rate * 0.9, rate * 1.1), 5.0, 9.0, gap, gap, 1.0, cpu or {"engine": 1e6 / rate}, 5)


def ring_result() -> ring.Result:
    through = {"engine": 600.0, "router": 50.0, "detok": 10.0, "client": 40.0}
    points = [
        ring.Point(ring.Shape(1, 64, 128), figures(200, gap=None), figures(190, through), 0.95),
        ring.Point(ring.Shape(16, 64, 128), figures(2000), figures(1800, through), 0.90),
    ]
    return ring.Result([ring.Points("tiny model", points), ring.Points("large model", points)])


def batching_result() -> batching.Result:
    lives = [batching.Life(at, at + 0.1, at + 1 + i) for at in (0.0, 2.0) for i in (0, 1)]
    return batching.Result(4, 2, 8, 256, figures(800), figures(400), 2.0, lives, lives)


def prefix_result() -> prefix.Result:
    points = [prefix.Point(256, 224, 50.0, 10.0, 5.0), prefix.Point(1024, 912, 200.0, 25.0, 8.0)]
    return prefix.Result(0.9, 3, points)


def peers_result() -> peers.Result:
    work = peers.Work("32 requests, 8 at a time", 32, 8, 32, 8, 256)
    names = ("transformers generate", "transformers continuous batching", engine_alone.NAME, through_ring.NAME)
    entries = [peers.Entry(name, figures(100.0 * i), float(i), 32) for i, name in enumerate(names, 1)]
    return peers.Result([peers.Table(work, entries)])


RESULTS = {"ring": ring_result, "batching": batching_result, "prefix": prefix_result, "peers": peers_result}
