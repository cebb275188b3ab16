"""Who can be asked, and under which name it is found."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from bench.gpu.peers import nanovllm, sglang, transformers, vllm
from bench.gpu.peers.options import Options


class Peer(Protocol):
    """A system with its model in memory, warm."""

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        """Serve these at once, so many tokens each; returns how many came."""
        ...

    def close(self) -> None:
        """End whatever it started."""
        ...


class Entry(NamedTuple):
    """A system."""

    name: str
    package: str
    load: Callable[[Options], Peer]
    cpu: bool
    """Whether it is asked on a CPU too."""


ENTRIES: Mapping[str, Entry] = {
    entry.package: entry
    for entry in (
        Entry("transformers, continuous batching", "transformers", transformers.load, cpu=True),
        Entry("vLLM", "vllm", vllm.load, cpu=False),
        Entry("SGLang", "sglang", sglang.load, cpu=False),
        Entry("nano-vllm", "nanovllm", nanovllm.load, cpu=False),
    )
}
