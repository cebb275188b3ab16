"""A validated request."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.parse.images import GivenImages
from router.parse.model import Began
from router.parse.needs import Need
from router.parse.prompt import Prompt, Retention
from router.parse.sampling import Stopping
from router.parse.tables import GivenTable
from sluice.wire.adapters import Adapter, AdapterFiles
from sluice.wire.hashing import Domain
from sluice.wire.params import SamplingParams, TextParams
from sluice.wire.tables import Table


@dataclass(frozen=True, slots=True)
class Spec:
    """A request whose fields are all set and in range. The prompt is not tokenized yet."""

    request_id: str
    prompt: Prompt
    keep_prompt_tokens: int | None
    """Truncate the prompt to its last tokens, this many; None to keep all of them."""
    retention: Retention | None
    """None: the default."""
    sampling: SamplingParams
    """Does not include the bad words, which are not tokenized yet."""
    bad_words: tuple[str, ...]
    stopping: Stopping
    text: TextParams
    n: int
    """Number of sequences to generate."""
    num_outputs: int
    """Number of sequences to return: the most likely ones if fewer than `n`."""
    logprobs: int | None
    """Alternatives to return with each output token; None to return no logprobs."""
    priority: int
    """1 low, 2 normal, 3 high."""
    salt: str
    """Salt of the prefix cache."""
    time_limit: float | None
    """Seconds from the request's arrival."""
    token_ids: bool
    echo: bool
    prompt_tail: int
    """Number of the prompt's last tokens whose text is returned."""
    timings: bool
    streaming: bool
    resume: Mapping[int, tuple[int, ...]]
    """Tokens that the caller already has, by output index."""
    resume_model: str
    """Fingerprint of the model that generated the `resume` tokens; empty if unknown."""
    client_id: int | None
    """Passed to logits processors."""
    adapter: Adapter | None = None
    """Includes the version that the adapter's id referred to when the request arrived."""
    adapter_files: AdapterFiles | None = None
    """The adapter's files, if the request contains them."""
    table: GivenTable | None = None
    images: GivenImages | None = None
    """None if the model does not support images. May be empty."""
    needs: tuple[Need, ...] = ()
    """What not every engine offers."""
    engine_deaths: int = 0
    """Successive engine deaths under this request, as reported by other routers."""

    def began(self, model: str) -> Began:
        """The model and adapters with which the request began. `model`: fingerprint of the model."""
        adapter = "" if self.adapter is None else self.adapter.version
        return Began(model, adapter, "" if self.table is None else self.table.version)

    @property
    def domain(self) -> Domain:
        return Domain(self.salt, "" if self.adapter is None else self.adapter.version)

    @property
    def sequences(self) -> int:
        """Number of sequences that an engine runs for the request at the same time."""
        return self.n if self.sampling.beam_search is None else self.sampling.beam_search.width

    @property
    def has_rows(self) -> bool:
        """Whether the request has a table or images."""
        return self.table is not None or bool(self.images and self.images.images)

    @property
    def own_bytes(self) -> int:
        """Bytes of the rows and images that the request contains itself."""
        table = 0 if self.table is None or self.table.table is not None else len(self.table.data)
        return table if self.images is None else table + self.images.size

    @property
    def shared_tables(self) -> tuple[Table, ...]:
        """Tables of prompt adapters, which requests may share."""
        return () if self.table is None or self.table.table is None else (self.table.table,)

    @property
    def resumed_tokens(self) -> int:
        """Number of resumed tokens of all outputs. The engine computes them again."""
        return sum(map(len, self.resume.values()))

    def echoes(self, index: int) -> bool:
        """Whether this output begins with the prompt's text. A resumed stream has sent it already."""
        return self.echo and index not in self.resume and not any(self.resume.values())
