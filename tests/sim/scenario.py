"""A scenario: some requests and some faults, both determined by a seed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from random import seed as seed_all

from sluice.wire.heartbeats import Phase
from tests.sim.clients import ClientPlan
from tests.sim.inputs import (
    ENGINES,
    Fault,
    add_tensors,
    random_fault,
    random_phases,
    random_poison,
    random_request,
    random_weights,
)
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network
from tests.sim.services import Poison
from tests.sim.simulation import Outcome, Simulation
from tests.sim.world import pool_files, simulated

MAX_FAULTS = 10


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed determines."""

    seed: int
    policy: str
    overlap: bool
    requests: list[ClientPlan]
    faults: list[Fault]
    weights: dict[str, tuple[int, int]]
    """The weights of each engine: at first, and after a restart."""
    poison: tuple[ClientPlan, Poison] | None = None
    phases: Mapping[str, Phase] = field(default_factory=dict)
    """Of engines, by name; the others have both."""

    @property
    def models(self) -> list[int]:
        """All weights that may be served at some time."""
        return sorted({weights for pair in self.weights.values() for weights in pair})

    @classmethod
    def of(cls, number: int) -> "Scenario":
        random = Random(number)
        policy = random.choice(("max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"))
        requests = [random_request(random) for _ in range(random.randint(2, 7))]
        add_tensors(requests, Random(number + 4))
        count = sum(random.random() < 0.5 for _ in range(MAX_FAULTS))
        overlap, faults = random.random() < 0.3, [random_fault(random) for _ in range(count)]
        poison = random_poison(Random(number + 3))
        if poison and number % 2:
            faults = []
        phases = random_phases(Random(number + 7))
        return cls(number, policy, overlap, requests, faults, random_weights(random), poison, phases)

    def play(self, disturbed: bool, weights: int = 0) -> Outcome:
        """Run the scenario; undisturbed, without faults, early ends and phases, and with these weights in all
        engines."""
        loop = VirtualLoop()
        network = Network(Random(self.seed + 1))
        seed_all(self.seed)
        try:
            with simulated(network, loop), pool_files(disturbed and not self.seed % 2) as folder:
                requests = self.requests if disturbed else [plan.to_natural_end for plan in self.requests]
                if disturbed and self.poison:
                    requests = [*requests, self.poison[0]]
                served = self.weights if disturbed else dict.fromkeys(ENGINES, (weights, weights))
                poison = self.poison and self.poison[1]
                phases = self.phases if disturbed else {}
                simulation = Simulation(network, self.policy, self.overlap, served, poison, phases, folder)
                clients = Random(self.seed + 2)
                return loop.run_until_complete(simulation.run(requests, self.faults if disturbed else [], clients))
        finally:
            loop.close()
