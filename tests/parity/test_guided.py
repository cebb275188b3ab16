"""Guided outputs match their guide and are the same under every engine configuration."""

import json
import os
import re
import signal

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import GuideModel
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.engine import GuideLimits
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.params import Guide, GuideKind, SamplingParams, Speculation, StopParams
from tests.engine_worker.guided.tools import prepared
from tests.parity.harness import EngineHarness

pytestmark = pytest.mark.one_model

MAX_TOKENS = 40
END = 4093
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
GUIDES = {
    "object": Guide(GuideKind.JSON_OBJECT),
    "schema": Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Guide(GuideKind.REGEX, r"[a-f]{3}(-[0-9é日]{2}){4}"),
    "ebnf": Guide(GuideKind.EBNF, 'root ::= "(" root ")" | [a-z] | root "," root'),
    "choice": Guide(GuideKind.CHOICE, json.dumps(["red", "green", "blue\n", "日本語"])),
    "tag": Guide(GuideKind.STRUCTURAL_TAG, json.dumps(TAG)),
}
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9},
    "rules": {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.1, "bad_token_ids": (11,), "min_p": 0.01},
}


@pytest.fixture(scope="module")
def guides(model_folder):
    guides = Guides(GuideModel.of(open_checkpoint(str(model_folder))), GuideLimits())
    # Otherwise requests would wait for their guides, and which of them share a batch would depend on timing.
    for guide in GUIDES.values():
        assert prepared(guides, guide) is None
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def requests(prompts) -> list[dict]:
    specs = []
    for i, (name, kind) in enumerate((name, kind) for name in GUIDES for kind in KINDS):
        stopping = StopParams(MAX_TOKENS, eos_token_ids=(END,) if i % 3 else ())
        sampling = SamplingParams(seed=i, logprobs=1, **KINDS[kind])
        prompt = prompts[12 + i][:50] * (1 + i % 2)
        specs.append(
            {"prompt": prompt, "sampling": sampling, "stopping": stopping, "n": 1 + (i % 4 == 0), "guide": GUIDES[name]}
        )
        # Some requests without a guide share their batch.
        if i % 4 == 0:
            specs.append({**specs[-1], "guide": None, "n": 1})
    return specs


def run(harness: EngineHarness, specs: list[dict], **fields: list) -> list:
    """(tokens, reason) of each sequence. `fields`: fields to add, one value for each request."""
    numbers = [
        harness.send(**spec, **{name: values[i] for name, values in fields.items()}) for i, spec in enumerate(specs)
    ]
    harness.run()
    streams = [harness.stream(number, i) for number, spec in zip(numbers, specs, strict=True) for i in range(spec["n"])]
    return [(stream.tokens, stream.end.reason) for stream in streams]


def matches(guide: Guide, text: str) -> bool:
    if guide.kind is GuideKind.REGEX:
        return re.fullmatch(guide.text, text) is not None
    if guide.kind is GuideKind.CHOICE:
        return text in json.loads(guide.text)
    if guide.kind in (GuideKind.JSON_OBJECT, GuideKind.JSON_SCHEMA):
        jsonschema.validate(json.loads(text), SCHEMA if guide.text else {"type": "object"})
    if guide.kind is GuideKind.EBNF:
        return re.fullmatch(r"[(),a-z]+", text) is not None and text.count("(") == text.count(")")
    return True


@pytest.fixture(scope="module")
def plain(model_folder, prompts, guides):
    """The requests, and their outputs on an undisturbed engine."""
    specs = requests(prompts)
    return specs, run(EngineHarness(model_folder, guides=guides), specs)


def test_complete_outputs_match_their_guides(plain, tokenizer):
    specs, outputs = plain
    by_sequence = [spec for spec in specs for _ in range(spec["n"])]
    ended = set()
    for spec, (tokens, reason) in zip(by_sequence, outputs, strict=True):
        if spec["guide"] is None or reason is FinishReason.LENGTH:
            continue
        assert reason is FinishReason.EOS
        assert (tokens[-1] == END) == bool(spec["stopping"].eos_token_ids)
        assert matches(spec["guide"], tokenizer.decode(tokens, skip_special_tokens=True)), tokens
        ended.add(spec["guide"].kind)
    assert {GuideKind.REGEX, GuideKind.CHOICE} <= ended


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8},
        {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8, "overlap": True},
        {"backend": "openvino"},
        {"block_reuse": False, "max_batch_size": 8},
    ],
    ids=["overlap", "pauses", "overlap and pauses", "openvino", "few at a time"],
)
def test_no_engine_configuration_changes_a_token(model_folder, guides, plain, options):
    specs, expected = plain
    harness = EngineHarness(model_folder, guides=guides, **options)
    assert run(harness, specs) == expected
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


def test_masks_requested_after_the_forward_pass_change_no_token(model_folder, guides, plain):
    """On a GPU, the tokens of the previous step are not known before the forward pass, so masks come after it."""
    specs, expected = plain
    harness = EngineHarness(model_folder, guides=guides, overlap=True)
    harness.runner._computer._masks_first = False
    assert run(harness, specs) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_tokens_change_no_token(model_folder, guides, plain, overlap):
    specs, expected = plain
    firsts = [sum(spec["n"] for spec in specs[:i]) for i in range(len(specs))]
    speculations = []
    for i, first in enumerate(firsts):
        tokens = list(expected[first][0])
        tokens[2 + i % 5 :: 9] = [7] * len(tokens[2 + i % 5 :: 9])
        speculations.append(Speculation(5, tuple(tokens)))
    harness = EngineHarness(model_folder, guides=guides, overlap=overlap, max_draft_batch=64)
    assert run(harness, specs, speculation=speculations) == expected
    assert harness.engine.stats.accepted_draft_tokens > 50


def test_requests_that_resume_in_the_middle_return_the_same_tokens(model_folder, guides, plain):
    specs, expected = plain
    resumes, first = [], 0
    for i, spec in enumerate(specs):
        outputs = [expected[first + sequence][0] for sequence in range(spec["n"])]
        resumes.append({k: tokens[: (1 + 5 * i + 3 * k) % (len(tokens) + 1)] for k, tokens in enumerate(outputs)})
        first += spec["n"]
    assert run(EngineHarness(model_folder, guides=guides), specs, resume=resumes) == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_killing_the_guide_worker_changes_no_token(model_folder, guides, plain, overlap):
    specs, expected = plain
    harness = EngineHarness(model_folder, guides=guides, overlap=overlap)
    numbers = [harness.send(**spec) for spec in specs]
    forks, steps = guides._processes.forks, 0
    while harness.engine.step() or harness.engine.live.requests:
        harness.receiver.read()
        steps += 1
        if steps % 7 == 3 and harness.steps:
            os.kill(guides._processes.current().pid, signal.SIGKILL)
    harness.receiver.read()
    streams = [harness.stream(number, i) for number, spec in zip(numbers, specs, strict=True) for i in range(spec["n"])]
    assert [(stream.tokens, stream.end.reason) for stream in streams] == expected
    assert guides._processes.forks > forks + 2


@pytest.mark.long
def test_a_guide_that_becomes_too_complex_ends_only_its_own_request(model_folder, guides, plain, prompts):
    specs, expected = plain
    harness = EngineHarness(model_folder, guides=guides)
    hostile = harness.send(
        prompts[5][:20],
        SamplingParams(temperature=0.0, logit_bias=((64, 100.0),)),
        StopParams(600),
        guide=Guide(GuideKind.EBNF, 'root ::= root root | "a" | "" | root root root'),
    )
    assert run(harness, specs) == expected
    end = harness.stream(hostile).end
    assert end.reason is FinishReason.ERROR
    assert end.fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
    assert "guided_mask_seconds" in end.fault.message
