"""The expected results of each request of the engine's state machine, computed without an engine."""

from sluice.wire.prompt_logprobs import Row
from sluice.wire.requests import Submit
from sluice.wire.tables import VirtualTokens
from sluice.wire.tensors import LOGITS_NAMES, TensorRows
from tests.fakes.adapters import initial_digest
from tests.fakes.beams import search_alone
from tests.fakes.scripted_tokens import VOCAB, continuation, digest, prompt_row, shown_to_model, tensor_row
from tests.fakes.submits import extras_of


class Oracle:
    """The results of undisturbed requests on the scripted model."""

    def __init__(self) -> None:
        self._beams: dict[tuple[int, int], list[list[int]]] = {}
        """Results of beam searches, the best first, by request and attempt."""

    def output(self, spec: Submit, sequence: int) -> list[int]:
        """The complete output of a sequence."""
        if spec.sampling.beam_search is not None:
            key = (spec.request, spec.attempt)
            if key not in self._beams:
                self._beams[key] = [tokens for tokens, _ in search_alone(spec)]
            return self._beams[key][sequence]
        seed = spec.sampling.seed
        return continuation(
            _prompt(spec), spec.stopping, seed, sequence, extras_of(spec).speculation, spec.adapter_version
        )

    def check_prompt_logprobs(self, spec: Submit, rows: list[Row]) -> None:
        """`rows`: those received so far, from the start of the prompt."""
        top = extras_of(spec).prompt_logprobs or 0
        assert rows == [prompt_row(spec.prompt, i, top, spec.adapter_version) for i in range(len(rows))]

    def check_tensor_rows(self, spec: Submit, sequence: int, parts: list[TensorRows]) -> None:
        """`parts`: received rows of one tensor, of the prompt or of a sequence's output."""
        for part in parts:
            tokens = [*_prompt(spec), *([] if part.context else self.output(spec, sequence))]
            # Row i of an output belongs to the position from which its token i was sampled.
            first = 0 if part.context else len(spec.prompt) - 1
            source = "logits" if part.name in LOGITS_NAMES else part.name
            initial = initial_digest(spec.adapter_version)
            positions = range(first + part.start, first + part.end)
            assert part.data == tensor_row(source, [digest(tokens[: i + 1], initial) for i in positions])


def _prompt(spec: Submit) -> list[int]:
    """The prompt as the model sees it."""
    return shown_to_model(spec.prompt, VirtualTokens.of(VOCAB, extras_of(spec).tables))
