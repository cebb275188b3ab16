"""The inputs that a seed determines: the clients' requests, the faults, and the model of each engine."""

from dataclasses import dataclass
from random import Random

from sluice.v1 import generation_pb2 as pb
from sluice.wire.heartbeats import Phase
from sluice.wire.params import StopParams
from tests.fakes.scripted_tokens import VOCAB, continuation
from tests.sim.clients import ClientPlan
from tests.sim.services import Poison

ROUTERS, ENGINES, DETOKENIZERS = ("router-0", "router-1"), ("engine-0", "engine-1"), ("detok-0", "detok-1", "detok-2")
NAMES = (*ROUTERS, *ENGINES, *DETOKENIZERS)
STOPS = ("end", "stop", "日本", "aba")
POISON_PROBABILITY = 0.2


@dataclass(frozen=True)
class Fault:
    """An event that disturbs a process or the network."""

    at: float
    """Seconds from the start."""
    kind: str
    target: str
    """Name of a process; for the network the address of an inbox, "*" for all."""
    seconds: float
    """How long a process stays dead or frozen, or the network is disturbed."""
    probability: float = 1.0
    """The probability with which a frame is affected."""


def random_request(random: Random) -> ClientPlan:
    spec = pb.GenerationSpec()
    shared = [7 * i % VOCAB for i in range(random.choice((0, 6, 12)))]
    spec.token_ids.ids.extend([*shared, *(random.randrange(VOCAB) for _ in range(random.randint(1, 8)))])
    spec.n = random.choice((1, 1, 1, 2, 3))
    spec.sampling.seed = random.getrandbits(32)
    spec.sampling.temperature = 1.0
    spec.stopping.max_tokens = random.choice((1, 5, 20, 40, 60))
    spec.stopping.ignore_eos = True
    if random.random() < 0.4:
        spec.stopping.stop.extend(random.sample(STOPS, random.randint(1, 3)))
        spec.stopping.min_tokens = min(spec.stopping.max_tokens, random.choice((0, 0, 3, 12)))
    if random.random() < 0.3:
        spec.stopping.stop_token_ids.extend(random.sample(range(VOCAB), 3))
    if random.random() < 0.2:
        spec.output.stream_interval = random.randint(2, 9)
    if random.random() < 0.25:
        spec.output.logprobs = random.randint(0, 2)
    if random.random() < 0.4:
        _speculate(spec, random)
    spec.output.token_ids = True
    at, slow = random.uniform(0.0, 3.0) + 1.5, random.choice((0.0, 0.0, 0.0, 0.1))
    match random.random():
        case chance if chance < 0.08:
            return ClientPlan(at, spec, slow, disconnects_after=random.uniform(0.0, 2.0))
        case chance if chance < 0.16:
            spec.request_id = f"r{random.getrandbits(64)}"
            return ClientPlan(at, spec, slow, aborts_after=random.uniform(0.0, 2.0))
        case chance if chance < 0.24:
            spec.time_limit.FromMilliseconds(random.randint(1, 3000))
    return ClientPlan(at, spec, slow)


def add_tensors(requests: list[ClientPlan], random: Random) -> None:
    for plan in requests:
        if random.random() < 0.3:
            output = plan.spec.output
            output.context_logits, output.generation_logits = random.random() < 0.5, random.random() < 0.7
            if random.random() < 0.5:
                output.tensors.add(name="hidden_states", context=random.random() < 0.5)


def _speculate(spec: pb.GenerationSpec, random: Random) -> None:
    """Add draft tokens that are the first sequence's output, except for a few wrong ones."""
    output = continuation(spec.token_ids.ids, StopParams(spec.stopping.max_tokens), spec.sampling.seed)
    drafts = [token if random.random() < 0.9 else random.randrange(VOCAB) for token in output]
    spec.speculation.draft_token_ids.extend(drafts)
    spec.speculation.max_draft_tokens = random.choice((1, 4, 9))


def random_poison(random: Random) -> tuple[ClientPlan, Poison] | None:
    if random.random() > POISON_PROBABILITY:
        return None
    model = random_request(random)
    spec = pb.GenerationSpec()
    spec.token_ids.ids.extend(model.spec.token_ids.ids)
    spec.sampling.seed = random.getrandbits(32) | 1 << 40
    spec.stopping.max_tokens, spec.stopping.ignore_eos, spec.output.token_ids = 30, True, True
    spec.output.stream_interval = random.choice((1, 1, 7))
    return ClientPlan(model.at, spec), Poison(spec.sampling.seed, random.choice((0, 0, 1, 3, 12)))


def random_weights(random: Random) -> dict[str, tuple[int, int]]:
    """The same model everywhere, or in some scenarios an update to another one."""
    mixed = random.random() < 0.25
    return {name: (random.choice((0, 0, 1)), random.choice((0, 1))) if mixed else (0, 0) for name in ENGINES}


def random_phases(random: Random) -> dict[str, Phase]:
    """None in most scenarios."""
    first, second = random.sample(ENGINES, 2)
    return random.choice(({}, {}, {first: "prefill", second: "decode"}, {first: "prefill"}))


def random_fault(random: Random) -> Fault:
    at = random.uniform(1.0, 6.0)
    kind = random.choice(("kill", "kill", "kill", "freeze", "drain", "lose", "repeat", "delay", "reorder"))
    if kind in ("kill", "drain"):
        return Fault(at, kind, random.choice(NAMES), random.choice((0.3, 1.0, 5.0)))
    if kind == "freeze":
        return Fault(at, kind, random.choice((*ENGINES, *DETOKENIZERS)), random.choice((0.5, 3.0, 12.0)))
    target = random.choice(("*", *(f"ipc:///sim/{name}" for name in NAMES)))
    return Fault(at, kind, target, random.choice((0.1, 0.5, 2.0)), random.choice((0.05, 0.3, 1.0)))
