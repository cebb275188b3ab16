"""Specs with invalid options of sampling, stopping, guides or speculation, each with its status and field."""

import math

from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import OutputOptions
from sluice.v1.sampling_pb2 import BeamSearch, ChoiceList, GuidedDecoding, StoppingCriteria
from tests.router.conftest import text_spec
from tests.router.parse.spec_builders import (
    BEAMS,
    CONTEXT,
    DRAFTS,
    HUGE,
    INVALID,
    TOKENIZER,
    VOCABULARY,
    beams,
    draft_logits,
    guided,
    sampling,
    speculation,
    stopping,
)

BAD_SAMPLING = [
    # Sampling.
    *[
        (f"{name} {value}", sampling(**{name: value}), INVALID, f"spec.sampling.{name}")
        for name, values in {
            "temperature": (-0.1, 2.1, 1e30, math.nan, math.inf, -math.inf),
            "top_p": (0.0, -1.0, 1.01, math.nan, math.inf),
            "min_p": (-0.01, 1.01, math.nan),
            "repetition_penalty": (0.0, -1.0, 101.0, math.nan, math.inf),
            "presence_penalty": (-2.1, 2.1, math.nan),
            "frequency_penalty": (-2.1, 2.1, -math.inf),
        }.items()
        for value in values
    ],
    ("bias too large", sampling(logit_bias={7: 101.0}), INVALID, "spec.sampling.logit_bias[7]"),
    ("bias NaN", sampling(logit_bias={7: math.nan}), INVALID, "spec.sampling.logit_bias[7]"),
    ("bias −inf", sampling(logit_bias={7: -math.inf}), INVALID, "spec.sampling.logit_bias[7]"),
    ("bias for no token", sampling(logit_bias={VOCABULARY: 1.0}), INVALID, f"spec.sampling.logit_bias[{VOCABULARY}]"),
    ("many biases", sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), INVALID, "spec.sampling.logit_bias"),
    ("bad id", sampling(bad_token_ids=[1, HUGE]), INVALID, "spec.sampling.bad_token_ids[1]"),
    ("many bad ids", sampling(bad_token_ids=[1] * 16_385), INVALID, "spec.sampling.bad_token_ids"),
    ("all are bad", sampling(bad_token_ids=range(VOCABULARY)), INVALID, "spec.sampling.bad_token_ids"),
    ("allowed id", sampling(allowed_token_ids=[VOCABULARY]), INVALID, "spec.sampling.allowed_token_ids[0]"),
    ("many allowed ids", sampling(allowed_token_ids=[1] * 16_385), INVALID, "spec.sampling.allowed_token_ids"),
    (
        "all allowed tokens are bad",
        sampling(allowed_token_ids=[1, 2], bad_token_ids=[2, 1]),
        INVALID,
        "spec.sampling.allowed_token_ids",
    ),
    (
        "an unknown processor",
        sampling(logits_processors=["p"]),
        INVALID,
        "spec.sampling.logits_processors[0]",
    ),
    ("many processors", sampling(logits_processors=["p"] * 17), INVALID, "spec.sampling.logits_processors"),
    ("a long name", sampling(logits_processors=["p" * 257]), INVALID, "spec.sampling.logits_processors[0]"),
    ("an empty bad word behind others", sampling(bad_words=["no", "no", ""]), INVALID, "spec.sampling.bad_words[2]"),
    ("an empty bad word", sampling(bad_words=["no", ""]), INVALID, "spec.sampling.bad_words[1]"),
    ("many bad words", sampling(bad_words=["no"] * 257), INVALID, "spec.sampling.bad_words"),
    ("a long bad word", sampling(bad_words=["n" * 257]), INVALID, "spec.sampling.bad_words[0]"),
    (
        "bad words that are all that is allowed",
        sampling(bad_words=["a"], allowed_token_ids=[TOKENIZER.encode("a").ids[0]]),
        INVALID,
        "spec.sampling.bad_words",
    ),
    ("n-grams of 17", sampling(no_repeat_ngram_size=17), INVALID, "spec.sampling.no_repeat_ngram_size"),
    # Stopping.
    ("no tokens", stopping(max_tokens=0), INVALID, "spec.stopping.max_tokens"),
    ("max_tokens beyond the context", stopping(max_tokens=CONTEXT), INVALID, "spec.stopping.max_tokens"),
    ("huge max_tokens", stopping(max_tokens=HUGE), INVALID, "spec.stopping.max_tokens"),
    ("min over max", stopping(max_tokens=4, min_tokens=5), INVALID, "spec.stopping.min_tokens"),
    ("huge min_tokens", stopping(min_tokens=HUGE), INVALID, "spec.stopping.min_tokens"),
    ("min_tokens beyond the room", stopping(min_tokens=CONTEXT), INVALID, "spec.stopping.min_tokens"),
    ("empty stop", stopping(stop=["a", ""]), INVALID, "spec.stopping.stop[1]"),
    ("long stop", stopping(stop=["x" * 1025]), INVALID, "spec.stopping.stop[0]"),
    ("many stops", stopping(stop=[str(i) for i in range(33)]), INVALID, "spec.stopping.stop"),
    ("stop id", stopping(stop_token_ids=[VOCABULARY]), INVALID, "spec.stopping.stop_token_ids[0]"),
    ("many stop ids", stopping(stop_token_ids=[1] * 16_385), INVALID, "spec.stopping.stop_token_ids"),
    # A guide.
    ("empty regex", guided(regex=""), INVALID, "spec.guided.regex"),
    ("empty grammar", guided(ebnf=""), INVALID, "spec.guided.ebnf"),
    ("no choices", guided(choice=ChoiceList()), INVALID, "spec.guided.choice.choices"),
    ("an empty choice", guided(choice=ChoiceList(choices=["a", ""])), INVALID, "spec.guided.choice.choices[1]"),
    ("a schema that is no JSON", guided(json_schema="{"), INVALID, "spec.guided.json_schema"),
    ("a schema that is a list", guided(json_schema="[]"), INVALID, "spec.guided.json_schema"),
    ("a schema that is true", guided(json_schema="true"), INVALID, "spec.guided.json_schema"),
    ("a schema too deep", guided(json_schema="[" * 60_000), INVALID, "spec.guided.json_schema"),
    ("a structural tag that is true", guided(structural_tag="true"), INVALID, "spec.guided.structural_tag"),
    ("a long guide", guided(regex="a" * 65_537), INVALID, "spec.guided.regex"),
    # Speculation.
    ("long drafts", speculation(max_draft_tokens=65), INVALID, "spec.speculation.max_draft_tokens"),
    (
        "draft beyond the vocabulary",
        speculation(draft_token_ids=[VOCABULARY]),
        INVALID,
        "spec.speculation.draft_token_ids[0]",
    ),
    (
        "drafts beyond the context",
        speculation(draft_token_ids=[5] * (CONTEXT + 1)),
        INVALID,
        "spec.speculation.draft_token_ids",
    ),
    ("draft logits alone", speculation(draft_logits=draft_logits(2)), INVALID, "spec.speculation.draft_logits"),
    *(
        (
            f"draft logits, {name}",
            speculation(draft_token_ids=[1, 2], draft_logits=logits),
            INVALID,
            f"{DRAFTS}.{field}",
        )
        for name, logits, field in (
            ("empty", pb.DraftLogits(), "draft_logits.dtype"),
            ("doubles", draft_logits(2, dtype="float64"), "draft_logits.dtype"),
            ("too few", draft_logits(1), "draft_logits.data"),
            ("too many", draft_logits(3), "draft_logits.data"),
            ("of another dtype", draft_logits(2, dtype="float32"), "draft_logits.data"),
            ("no whole row", pb.DraftLogits(dtype="float16", data=bytes(5)), "draft_logits.data"),
            ("none", pb.DraftLogits(dtype="float16"), "draft_logits.data"),
        )
    ),
    (
        "draft logits beyond the limit",
        speculation(draft_token_ids=[1] * 1025, draft_logits=draft_logits(1025)),
        INVALID,
        "spec.speculation.draft_logits.data",
    ),
    *(
        (
            f"acceptance threshold {value}",
            speculation(draft_token_ids=[1], draft_logits=draft_logits(1), acceptance_threshold=value),
            INVALID,
            "spec.speculation.acceptance_threshold",
        )
        for value in (0.0, -1.0, 1.01, math.nan, math.inf)
    ),
    (
        "acceptance threshold without draft logits",
        speculation(draft_token_ids=[1], acceptance_threshold=0.5),
        INVALID,
        "spec.speculation.acceptance_threshold",
    ),
    # Beam search.
    ("beam search of no width", beams(width=0), INVALID, "spec.sampling.beam_search.width"),
    ("beam search of 129", beams(width=129), INVALID, "spec.sampling.beam_search.width"),
    ("a length penalty", beams(length_penalty=10.5), INVALID, "spec.sampling.beam_search.length_penalty"),
    ("no length penalty", beams(length_penalty=math.nan), INVALID, "spec.sampling.beam_search.length_penalty"),
    ("much diversity", beams(diversity_rate=101), INVALID, "spec.sampling.beam_search.diversity_rate"),
    (
        "both stops",
        beams(early_stopping=True, exhaustive=True),
        INVALID,
        "spec.sampling.beam_search.exhaustive",
    ),
    ("more outputs than beams", text_spec(sampling=BEAMS, n=5), INVALID, "spec.n"),
    ("best_of of beams", text_spec(sampling=BEAMS, best_of=1), INVALID, "spec.best_of"),
    ("beams that resume", text_spec(sampling=BEAMS, resume=[pb.ResumeFrom()]), INVALID, "spec.resume"),
    ("guided beams", text_spec(sampling=BEAMS, guided=GuidedDecoding(regex="a")), INVALID, "spec.guided"),
    (
        "beams with drafts",
        text_spec(sampling=BEAMS, speculation=pb.Speculation(max_draft_tokens=2)),
        INVALID,
        "spec.speculation",
    ),
    (
        "beams with draft logits",
        text_spec(sampling=BEAMS, speculation=pb.Speculation(draft_token_ids=[1], draft_logits=draft_logits(1))),
        INVALID,
        "spec.speculation",
    ),
    (
        "beams with stop strings",
        text_spec(sampling=BEAMS, stopping=StoppingCriteria(stop=["a"])),
        INVALID,
        "spec.stopping.stop",
    ),
    *(
        (
            f"beams with {name}",
            sampling(beam_search=BeamSearch(width=4), **{name: value}),
            INVALID,
            f"spec.sampling.{name}",
        )
        for name, value in {
            "temperature": 0.7,
            "top_k": 4,
            "top_p": 0.5,
            "min_p": 0.5,
            "logits_processors": ["p"],
        }.items()
    ),
    (
        "beams with tensors",
        text_spec(sampling=BEAMS, output=OutputOptions(generation_logits=True)),
        INVALID,
        "spec.sampling.beam_search",
    ),
]
