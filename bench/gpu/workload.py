"""What the engine and its peers are asked to do, side by side."""

from typing import NamedTuple

from bench.gpu.findings import Throughput


class Workload(NamedTuple):
    """Requests of random tokens, all at once, greedy where the system can, on past any end of sequence."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def seeds(self) -> range:
        """Of the prompts of each round; the fastest round counts. No round finds the prompts of another cached."""
        return range(1000 + self.batch, 1002 + self.batch)

    def result(self, system: str, shape: str, seconds: float) -> Throughput:
        """It took so long."""
        rate = self.batch * self.output_tokens / seconds
        return Throughput(system, shape, self.batch, self.prompt_tokens, self.output_tokens, rate)
