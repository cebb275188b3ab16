"""What the documents promise, and its limits, are in the same section."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "measurements")]
EXACT = ["On a CPU", "the text that it would have had", "`exact: True`"]
ROUNDING = ["on a GPU", "may differ", "rounding depends on the batch", "api.md#seeds"]
TEXTS = [
    ("README.md", "# Sluice", ["no token lost or repeated", *EXACT, *ROUNDING]),
    ("docs/api.md", "## A stream that breaks", ["on a CPU the text is the same", *ROUNDING[:-1], "(#seeds)"]),
    ("docs/api.md", "## Seeds", ["same tokens", "*Equal except for the last bits* on a GPU", "no token is lost or"]),
    ("docs/pypi.md", "# Sluice", ["no token lost or repeated", *EXACT, *ROUNDING]),
    ("docs/tutorials/first_stream.md", "# First stream", ["no token is lost", "with the same text", *ROUNDING]),
    ("docs/http.md", "## Several gateways", [
        "**Death of a gateway**: its connections are closed, and with them its responses and streams",
        "no `data: [DONE]`", "cannot resume a stream", "the client sends the request again",
        "The routers cancel the requests of the dead gateway", "The gRPC API has no such gap", *ROUNDING,
    ]),
    ("README.md", "# Sluice", [
        "gRPC, text in and out, [one contract](protos/sluice/v1): `sluice protos export DIR`",
        "gRPC by [`vllm serve --grpc`](https://github.com/vllm-project/vllm/pull/36169)",
        "text or token ids by its [Rust server]",
        "gRPC in [token ids](https://github.com/sgl-project/sglang/pull/10283) for its gateway by [`--grpc-mode`]",
        "by [`trtllm-serve --grpc`]",
    ]),
    ("README.md", "## As a library", [
        "Programs written for TensorRT-LLM run with `import sluice.trtllm as trtllm`",
        "for the `LLM` class of TensorRT-LLM or vLLM with `from sluice import LLM`",
        "if their options have a counterpart", "others are refused by name", "(docs/trtllm.md)",
    ]),
    ("docs/trtllm.md", "# Programs written for TensorRT-LLM", ["examples/trtllm", "**Unsupported options raise.**"]),
    ("docs/trtllm.md", "# `sluice.LLM`", [
        "**Programs that were run**", "NVIDIA's `examples/llm-api`", "vLLM 0.11.2's `examples/offline_inference`",
        "| runs |", "`quickstart_example`", "`basic/basic`", "| needs a change | which |", "`llm_guided_decoding`",
        "| does not run | the reason", "`llm_speculative_decoding`",
    ]),
    ("README.md", "# Sluice", [
        "| vLLM | SGLang | TGI | TensorRT-LLM |", "NVIDIA Dynamo, a layer over", "also continues the requests",
        "`--migration-limit`, 0 by default", "guided requests and those with `n` above 1 are not migrated",
        "penalties that count only generated tokens do not see them",
        "llama.cpp's server", "a stream does not outlive its server", "docs/when_not_to_use.md",
    ]),
]  # fmt: skip
PROMISE = re.compile(
    "continues[^.;]* with the same (text|tokens)|the same outputs|text is the same|it would have had|undisturbed stream"
)
"""Of the text after a death or a resume."""
LIMIT = re.compile("on a GPU|openvino|#seeds")


def sections(page: Path) -> list[tuple[str, str]]:
    """Each heading with the text up to the next one, with single spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    _, *parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    return [(heading, " ".join(body.split())) for heading, body in zip(parts[::2], parts[1::2], strict=True)]


@pytest.mark.parametrize(("page", "heading", "words"), TEXTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_section_says_what_it_promises(page, heading, words):
    text = dict(sections(ROOT / page))[heading]
    assert [word for word in words if word not in text] == []


def test_each_section_that_promises_equal_text_says_where():
    texts = [(page.name, *section) for page in PAGES for section in sections(page)]
    promising = [section for section in texts if PROMISE.search(section[-1])]
    assert len(promising) >= 6
    assert [(page, heading) for page, heading, text in promising if not LIMIT.search(text)] == []
