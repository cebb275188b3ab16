"""Guided streams: the output matches its guide, and is the same however the engine computes it."""

import json
import os
import re
import signal

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import Model
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.errors import ErrorCode, FinishReason
from sluice.ring.params import Guide, GuideKind, SamplingParams, Speculation, StopParams
from sluice.settings.engine import GuideLimits
from tests.engine_worker.guided.tools import prepared
from tests.parity.harness import EngineHarness

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
    guides = Guides(Model.of(open_checkpoint(str(model_folder))), GuideLimits())
    # Otherwise requests would wait for them, and which ones meet would depend on how long that takes.
    for guide in GUIDES.values():
        assert prepared(guides, guide) is None
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def requests(prompts) -> list[dict]:
    found = []
    for i, (name, kind) in enumerate((name, kind) for name in GUIDES for kind in KINDS):
        stopping = StopParams(MAX_TOKENS, eos_token_ids=(END,) if i % 3 else ())
        sampling = SamplingParams(seed=i, logprobs=1, **KINDS[kind])
        prompt = prompts[12 + i][:50] * (1 + i % 2)
        found.append(
            {"prompt": prompt, "sampling": sampling, "stopping": stopping, "n": 1 + (i % 4 == 0), "guide": GUIDES[name]}
        )
        # Neighbours without a guide.
        if i % 4 == 0:
            found.append({**found[-1], "guide": None, "n": 1})
    return found


def run(harness: EngineHarness, asked: list[dict], **more: list) -> list:
    """(tokens, reason) of each sequence."""
    numbers = [
        harness.send(**each, **{name: values[i] for name, values in more.items()}) for i, each in enumerate(asked)
    ]
    harness.run()
    streams = [harness.stream(number, i) for number, each in zip(numbers, asked, strict=True) for i in range(each["n"])]
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
    asked = requests(prompts)
    return asked, run(EngineHarness(model_folder, guides=guides), asked)


def test_the_output_matches(plain, tokenizer):
    asked, found = plain
    each_of = [each for each in asked for _ in range(each["n"])]
    ended = set()
    for each, (tokens, reason) in zip(each_of, found, strict=True):
        if each["guide"] is None or reason is FinishReason.LENGTH:
            continue
        assert reason is FinishReason.EOS
        assert (tokens[-1] == END) == bool(each["stopping"].eos_token_ids)
        assert matches(each["guide"], tokenizer.decode(tokens, skip_special_tokens=True)), tokens
        ended.add(each["guide"].kind)
    assert {GuideKind.REGEX, GuideKind.CHOICE} <= ended


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
def test_the_same_tokens(model_folder, guides, plain, options):
    asked, expected = plain
    harness = EngineHarness(model_folder, guides=guides, **options)
    assert run(harness, asked) == expected
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


def test_masks_that_are_asked_for_behind_the_model(model_folder, guides, plain):
    """As on a GPU, where the tokens of the step before are still being drawn."""
    asked, expected = plain
    harness = EngineHarness(model_folder, guides=guides, overlap=True)
    harness.runner._computer._masks_first = False
    assert run(harness, asked) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_nothing(model_folder, guides, plain, overlap):
    asked, expected = plain
    firsts = [sum(each["n"] for each in asked[:i]) for i in range(len(asked))]
    speculations = []
    for i, first in enumerate(firsts):
        tokens = list(expected[first][0])
        tokens[2 + i % 5 :: 9] = [7] * len(tokens[2 + i % 5 :: 9])
        speculations.append(Speculation(5, tuple(tokens)))
    harness = EngineHarness(model_folder, guides=guides, overlap=overlap, max_draft_batch=64)
    assert run(harness, asked, speculation=speculations) == expected
    assert harness.engine.stats.accepted_draft_tokens > 50


def test_resumed_in_the_middle(model_folder, guides, plain):
    asked, expected = plain
    resumes, at = [], 0
    for i, each in enumerate(asked):
        firsts = [expected[at + sequence][0] for sequence in range(each["n"])]
        resumes.append({k: tokens[: (1 + 5 * i + 3 * k) % (len(tokens) + 1)] for k, tokens in enumerate(firsts)})
        at += each["n"]
    assert run(EngineHarness(model_folder, guides=guides), asked, resume=resumes) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_kills_of_the_guide_worker(model_folder, guides, plain, overlap):
    asked, expected = plain
    harness = EngineHarness(model_folder, guides=guides, overlap=overlap)
    numbers = [harness.send(**each) for each in asked]
    forks, steps = guides._processes.forks, 0
    while harness.engine.step() or harness.engine.live.requests:
        harness.receiver.read()
        steps += 1
        if steps % 7 == 3 and harness.steps:
            os.kill(guides._processes.current().pid, signal.SIGKILL)
    harness.receiver.read()
    streams = [harness.stream(number, i) for number, each in zip(numbers, asked, strict=True) for i in range(each["n"])]
    assert [(stream.tokens, stream.end.reason) for stream in streams] == expected
    assert guides._processes.forks > forks + 2


def test_one_that_becomes_too_complex_ends_alone(model_folder, guides, plain, prompts):
    asked, expected = plain
    harness = EngineHarness(model_folder, guides=guides)
    hostile = harness.send(
        prompts[5][:20],
        SamplingParams(temperature=0.0, logit_bias=((64, 100.0),)),
        StopParams(600),
        guide=Guide(GuideKind.EBNF, 'root ::= root root | "a" | "" | root root root'),
    )
    assert run(harness, asked) == expected
    end = harness.stream(hostile).end
    assert end.reason is FinishReason.ERROR
    assert end.fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
    assert "guided_mask_seconds" in end.fault.message
