"""Plausible results of every benchmark, for tests of the report."""

from functools import partial

from bench.harness.machine import Meanwhile
from bench.harness.stats import Figures
from bench.systems import engine_alone
from bench.systems import ring as ring_system
from bench.systems.router_alone import Seen
from bench.systems.step_profile import PARTS
from bench.topics import (
    beams,
    cache,
    gateway,
    gguf,
    guided,
    logit_rules,
    long_context,
    long_prompt,
    lora,
    peers,
    policies,
    prompt_logprobs,
    quantize,
    ring,
    router,
    scheduler,
    speculation,
    steps,
)
from tests.fakes.measurements_under_stress import (
    costs_result,
    deaths_result,
    deaths_with_files_result,
    overload_result,
    pauses_result,
    precisions_result,
    restart_result,
    roles_result,
    slow_reader_result,
    takeover_result,
)


def figures(rate: float, cpu: dict[str, float] | None = None, gap: float | None = 4.0) -> Figures:
    return Figures(rate, (rate * 0.9, rate * 1.1), 5.0, 9.0, gap, gap, 1.0, cpu or {"engine": 1e6 / rate}, 5)


def ring_result() -> ring.RingResult:
    through = {"engine": 600.0, "router": 50.0, "detok": 10.0, "client": 40.0}
    points = [
        ring.RingPoint(ring.StreamShape(1, 64, 128), figures(200, gap=None), figures(190, through), 0.95),
        ring.RingPoint(ring.StreamShape(16, 64, 128), figures(2000), figures(1800, through), 0.90),
    ]
    return ring.RingResult([ring.RingModel("tiny model", points), ring.RingModel("large model", points)])


def router_result() -> router.RouterResult:
    points = [
        router.RouterPoint(
            streams,
            [router.RouterCost(1900.0 + i, 130.0, 7.0, 12.0, 4.0, 9.0) for i in range(3)],
            [Seen(2.0, 4000, 16000, 20.0, 6.0, 30.0, 0.9 + 0.01 * i) for i in range(3)],
        )
        for streams in (64, 256)
    ]
    return router.RouterResult(sizes=[64, 256], repeats=3, points=points)


def policies_result() -> policies.PoliciesResult:
    lives = [policies.Life(at + 0.1, at + 1 + i) for at in (0.0, 2.0) for i in (0, 1)]
    steps = {"max_utilization": 50, "guaranteed_no_evict": 50, "static_batch": 100}
    entries = [
        policies.PolicyEntry(policy, figures(40000 / count), 100 / count, count, 7.0, lives, 70.0)
        for policy, count in steps.items()
    ]
    mixes = [policies.Mix("2 at a time", True, 2), policies.Mix("3 at a time", False, 3, pool=64)]
    outcomes = [policies.Outcome(mix, 400, entries) for mix in mixes]
    return policies.PoliciesResult(4, 32, 8, 256, outcomes=outcomes, modes=long_prompt_entries())


def long_prompt_entries() -> list[long_prompt.ModeEntry]:
    def entry(mode: str, slower: float) -> long_prompt.ModeEntry:
        streams = [[0.01 * i + 0.003 * stream for i in range(-5, 40)] for stream in range(3)]
        newcomers = [long_prompt.Arrival(0.05 * i, 0.05 * i + 0.04 * slower) for i in range(4)]
        episode = long_prompt.Episode(streams, long_prompt.Arrival(0.0, 0.35), newcomers)
        return long_prompt.ModeEntry(mode, 20.0 * slower, 40.0 * slower, 8.0, 60.0 * slower, 350.0, 32, episode)

    return [entry(mode, i) for mode, i in zip(long_prompt.MODES, (8, 7, 1), strict=True)]


def scheduler_result() -> scheduler.SchedulerResult:
    points = [
        scheduler.SchedulerPoint(
            policy, running, waiting, scheduler.StepCosts(running + 10.0, running + 20.0, 3.0 * running, 999.0)
        )
        for policy in policies.POLICIES
        for waiting in (0, 1000)
        for running in (1, 64, 256)
    ]
    return scheduler.SchedulerResult((1, 64, 256), samples=100, points=points)


def logit_rules_result() -> logit_rules.LogitRulesResult:
    points = [
        logit_rules.LogitRulesPoint(kind, sequences, prompt, 20.0 * sequences, 4.0 + i)
        for i, kind in enumerate((*logit_rules.KINDS, logit_rules.ALL))
        for sequences in (1, 8)
        for prompt in (128, 4096)
    ]
    return logit_rules.LogitRulesResult((1, 8), (128, 4096), points=points)


def speculation_result() -> speculation.SpeculationResult:
    points = [
        speculation.SpeculationPoint(
            kind, batch, 400.0 * batch, 0.9 + 2.0 / (i + batch), 0.5 / (i + batch), [0.8 + 2.0 / (i + batch), 9.0, 0.5]
        )
        for i, kind in enumerate(speculation.KINDS)
        for batch in (1, 4, 16)
    ]
    return speculation.SpeculationResult((1, 4, 16), points=points)


def guided_result() -> guided.GuidedResult:
    points = [
        guided.GuidedPoint(name, streams, threads, 2.0 * streams + i, 1.0 + 0.02 * i)
        for threads in (1, 2)
        for streams in (1, 32)
        for i, name in enumerate((guided.PLAIN, *guided.GUIDES))
    ]
    return guided.GuidedResult(threads=2, points=points, waits=[guided.Wait(name, 12.0) for name in guided.GUIDES])


def beams_result() -> beams.BeamsResult:
    points = [
        beams.BeamsPoint(model, width, 900.0 * width, 1.0 - width / 40) for model in ("tiny", "25M") for width in (2, 8)
    ]
    return beams.BeamsResult(widths=(2, 8), points=points)


def lora_result() -> lora.LoraResult:
    points = [lora.LoraPoint(name, 900.0, 0.99, (0.95, 0.9, 0.8), 1.4) for name in ("tiny", "25M")]
    return lora.LoraResult(points=points)


def quantize_result() -> quantize.QuantizeResult:
    losses = [quantize.Loss(side, 0.05, 82.4, -1e-9, 0.956) for side in quantize.SIDES]
    return quantize.QuantizeResult(quantize.PLAN, losses)


def gguf_result() -> gguf.GgufResult:
    points = [gguf.GgufPoint(gguf.PEER, [30.0, 200.0], [1.0, 1.0], 250.0, None, None, None)]
    points += [gguf.GgufPoint(side, [29.0, 410.0], [0.97, 2.05], 260.0, 82.4, 3.7e-3, 0.956) for side in gguf.SIDES]
    return gguf.GgufResult(gguf.PLAN, points, 82.2)


def prompt_logprobs_result() -> prompt_logprobs.PromptLogprobsResult:
    points = [
        prompt_logprobs.PromptLogprobsPoint(model, backend, head, 120.0, [1.1 + head, 1.2 + head])
        for model, head in (("tiny", 0.2), ("25M", 2.0))
        for backend in prompt_logprobs.BACKENDS
    ]
    return prompt_logprobs.PromptLogprobsResult(points=points)


def cache_result() -> cache.CacheResult:
    def point(size: float, tokens: int, *measured: tuple[int, float]) -> cache.CachePoint:
        sides = [cache.Found(tokens, cached, time, 2 * time) for cached, time in measured]
        return cache.CachePoint(size, sides, same=2, outputs=3)

    return cache.CacheResult(
        reused=[point(256, 256, (0, 50.0), (224, 10.0)), point(1024, 1024, (0, 200.0), (912, 25.0))],
        retained=[point(flood, 512, (0, 50.0), (512, 8.0), (0, 52.0)) for flood in (0.5, 2.0)],
        tiered=[point(0.5, 12000, (11400, 5.0), (11400, 5.0)), point(3.0, 12000, (0, 50.0), (11400, 6.0))],
    )


def peers_result() -> peers.PeersResult:
    works = [peers.Work("32 requests, 8 at a time", 32, 8, 32, 8, 256), peers.Work("one stream", 1, 1, 32, 8, 256)]
    meanwhile = Meanwhile(2, 60.0, steal=0.01, ours=0.9, foreign=0.05)

    def entry(name: str, precision: str, by_best: float, alike: float | None) -> peers.PeerEntry:
        ours = name in (engine_alone.NAME, ring_system.NAME)
        return peers.PeerEntry(name, precision, ours, figures(100.0 * by_best), by_best, alike, 1)

    entries = [
        entry("transformers generate", "float32", 0.5, 1.0),
        entry("OpenVINO GenAI, int8", "int8", 1.0, 1.0),
        entry(engine_alone.NAME, "int8", 1.25, 1.25),
        entry(ring_system.NAME, "int8", 1.0, None),
    ]
    tables = [peers.PeerTable("25M", work, entries, meanwhile) for work in works]
    return peers.PeersResult(tables, {"OpenVINO GenAI": "2026.4"}, ["onnxruntime-genai"])


def long_context_result() -> long_context.LongContextResult:
    def table(tokens: int, by_best: float | None) -> peers.PeerTable:
        entry = peers.PeerEntry(engine_alone.NAME, "float32", True, figures(100.0), by_best, by_best, 1)
        work = peers.Work(f"a prompt of {tokens:,} tokens", 1, 1, tokens, 1, 1)
        return peers.PeerTable("5M", work, [entry], Meanwhile(2, 10.0))

    tables = [table(1024, None), table(4096, None)]
    return long_context.LongContextResult(peers.PeersResult(tables, {}, ["OpenVINO GenAI"]))


def steps_result() -> steps.StepsResult:
    profiles = [
        steps.Profile(engine, work, {part: 10.0 / slower + i for i, part in enumerate(PARTS)})
        for work in ("a step of 1 sequence", "a prompt of 1,024 tokens")
        for slower, engine in enumerate(steps.ENGINES, 1)
    ]
    return steps.StepsResult(profiles=profiles)


def gateway_result() -> gateway.GatewayResult:
    points = [
        gateway.GatewayPoint(streams, [gateway.GatewayCost(1200.0 + i, 60.0 + i, 8.0, 1.0, 4.0) for i in range(3)])
        for streams in (16, 64)
    ]
    return gateway.GatewayResult(sizes=[16, 64], points=points)


RESULTS = {
    "ring": ring_result,
    "router": router_result,
    "gateway": gateway_result,
    "policies": policies_result,
    "scheduler": scheduler_result,
    "steps": steps_result,
    "logit_rules": logit_rules_result,
    "speculation": speculation_result,
    "guided": guided_result,
    "beams": beams_result,
    "lora": lora_result,
    "prompt_logprobs": prompt_logprobs_result,
    "cache": cache_result,
    "peers": peers_result,
    "peers_large": peers_result,
    "long_context": long_context_result,
    "gguf": gguf_result,
    "quantize": quantize_result,
    "deaths": deaths_with_files_result,
    "deaths_by_precision": precisions_result,
    "restart": restart_result,
    "pauses": pauses_result,
    "takeover": takeover_result,
    "roles": roles_result,
    "pool_files": costs_result,
    "overload": overload_result,
    "slow_reader": slow_reader_result,
    "slow_tensors": partial(slow_reader_result, tensors=True),
    "soak": deaths_result,
}
