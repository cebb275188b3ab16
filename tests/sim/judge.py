"""Compares the outcome of a scenario with the outcomes of the same requests undisturbed."""

from codecs import utf_8_decode

from tests.sim.clients import Transcript
from tests.sim.inputs import STOPS
from tests.sim.scenario import Scenario
from tests.sim.simulation import Outcome
from tests.sim.world import tables

MAX_POISON_DEATHS = 4
"""The first death, at a later token, blames no request. The second makes this request a suspect; if the engine's lane
to the detokenizer was still connecting, it also takes more tokens than a quarantine lasts for. The third then happens
after the quarantine, which brings them, and the fourth convicts the request. Seed 1265 is such a case."""
CUT_SHORT = ("aborted ", "time_limit ")
"""Ends of outputs that may be incomplete."""


def differences(actual: Transcript, expected: Transcript) -> list[str]:
    """How a complete stream differs from the undisturbed one."""
    names = ("tokens", "text", "logprobs", "tensors", "ends", "usage")
    pairs = ((name, getattr(actual, name), getattr(expected, name)) for name in names)
    return [f"{name} {received} instead of {right}" for name, received, right in pairs if received != right]


def prefix_differences(actual: Transcript, expected: Transcript) -> list[str]:
    """How a stream that may have ended early differs from the beginning of the undisturbed one."""
    wrong = _tensor_differences(actual, expected)
    for index in actual.tokens:
        wrong += _output_differences(actual, expected, index)
    if not (actual.disconnected or actual.model_changed):
        if sorted(actual.ends) != sorted(expected.ends):
            wrong.append(f"outputs {sorted(actual.ends)} ended instead of {sorted(expected.ends)}")
        usage = expected.usage[0], sum(map(len, actual.tokens.values()))
        if actual.usage != usage:
            wrong.append(f"usage {actual.usage} instead of {usage}")
    return wrong


def _output_differences(actual: Transcript, expected: Transcript, index: int) -> list[str]:
    wrong = []
    tokens, text, end = actual.tokens[index], actual.text.get(index, ""), actual.ends.get(index)
    count = len(tokens)
    if tokens != expected.tokens[index][:count]:
        wrong.append(f"tokens {tokens} instead of the first of {expected.tokens[index]}")
    if (logprobs := actual.logprobs.get(index, [])) != expected.logprobs.get(index, [])[: len(logprobs)]:
        wrong.append(f"logprobs {logprobs} instead of the first of {expected.logprobs[index]}")
    if _is_cut_short(end):
        prompt, output = (b"".join(tables()[0][token] for token in ids) for ids in (actual.prompt, tokens))
        # A character that the prompt begins belongs to the output.
        _, complete = utf_8_decode(prompt, "replace", False)
        right_text = (prompt[complete:] + output).decode("utf-8", "replace")
    else:
        right_text = expected.text[index] if end else expected.text[index][: len(text)]
        if end and (end, count) != (expected.ends[index], len(expected.tokens[index])):
            wrong.append(f"ends {end} after {count} tokens instead of {expected.ends[index]}")
    if text != right_text and not (end and _is_held_back(text, right_text)):
        wrong.append(f"text {text!r} instead of {right_text!r}")
    return wrong


def _tensor_differences(actual: Transcript, expected: Transcript) -> list[str]:
    """Rows may be missing only from outputs that have not come to their natural end."""
    wrong = []
    for key, right in expected.tensors.items():
        rows, end = actual.tensors.get(key, []), actual.ends.get(key[0])
        complete = end is not None and not _is_cut_short(end)
        if rows != (right if complete else right[: len(rows)]):
            wrong.append(f"rows {rows} of {key} instead of {right}")
    unknown = set(actual.tensors) - set(expected.tensors)
    return [*wrong, *(f"rows of {key} were not requested" for key in unknown)]


def _is_cut_short(end: list[str] | None) -> bool:
    return end is not None and len(end) == 1 and end[0] in CUT_SHORT


def _is_held_back(text: str, expected: str) -> bool:
    """Whether the missing text may have been held back as the start of a stop string.

    A router that ends a request between two attempts cannot deliver such text, because only the detokenizer had it.
    """
    missing = expected.removeprefix(text).rstrip("\ufffd")
    return expected.startswith(text) and any(stop.startswith(missing) for stop in STOPS)


def poison_violations(scenario: Scenario, outcome: Outcome, transcript: Transcript) -> list[str]:
    """Violations in the end of the request that kills engines."""
    convicted = transcript.error == "POISON" or (transcript.model_changed and len(scenario.models) > 1)
    wrong = [] if convicted else [f"the poisonous request ended with {transcript.error or transcript.ends}"]
    if not scenario.faults and outcome.poison_deaths > MAX_POISON_DEATHS:
        wrong.append(f"the poisonous request killed {outcome.poison_deaths} engines")
    return wrong


def judge(scenario: Scenario) -> tuple[list[str], Outcome]:
    """Play a scenario with its faults, and undisturbed with each of its models. Returns what went wrong."""
    references, outcome = [scenario.play(False, weights) for weights in scenario.models], scenario.play(True)
    wrong = []
    for reference in references:
        violations = [violation for transcript in reference.transcripts for violation in transcript.violations]
        wrong += [f"undisturbed: {problem}" for problem in (*violations, *reference.leftovers)]
    if scenario.poison:
        wrong += poison_violations(scenario, outcome, outcome.transcripts.pop())
    for number, transcript in enumerate(outcome.transcripts):
        problems = [*transcript.violations]
        if transcript.model_changed and len(references) == 1:
            problems.append("it ended because its model is no longer served, but there is only one model")
        if not transcript.violations:
            may_end_early = scenario.requests[number].may_end_early or transcript.model_changed
            compare = prefix_differences if may_end_early else differences
            # The stream must be that of one of the models, without any mixture.
            problems += min((compare(transcript, reference.transcripts[number]) for reference in references), key=len)
        wrong += [f"request {number}: {problem}" for problem in problems]
    return wrong + outcome.leftovers, outcome
