"""lm-eval against the gateway of a real model: in float32 it finds the same as its own class for transformers.

The tasks are in lm_eval_tasks: texts in eight scripts, with emoji, special tokens and white space.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.launch import Ring
from tests.fakes.ports import free_ports
from tests.gateway.clients.environment import environment, run

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1800)]

TASKS = Path(__file__).parent / "lm_eval_tasks"
COMPLETIONS, CHATS = "local-completions", "local-chat-completions"
SCORES, ROLLING, ANSWERS = "sluice_scores", "sluice_rolling", "sluice_answers"
PLAIN = (SCORES, ROLLING, ANSWERS)
SIZES = {SCORES: 30, ROLLING: 7, ANSWERS: 7}
NAME = "smollm2"
TOLERANCE = 1e-3
"""Of the sum of a text's log-probabilities. Both sides add up float32 values, in another order."""

PROMPTS = {"token ids": [], "texts in batches": ["tokenized_requests=False", "num_concurrent=4"]}
BATCHES = {"token ids": 1, "texts in batches": 8}

Samples = dict[str, list[Any]]
"""By task: what lm-eval found for each of its texts."""
Evaluate = Callable[..., Samples]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory) -> Evaluate:
    """Runs lm-eval with a model class and its arguments."""
    program = environment("lm-eval", "lm-eval[api,hf]==0.4.13") / "lm_eval"

    def run_tasks(model: str, *arguments: str, tasks: tuple[str, ...], batch: int = 1, chat: bool = False) -> Samples:
        folder = tmp_path_factory.mktemp("lm_eval")
        options = ["--model", model, "--model_args", ",".join(arguments), "--tasks", ",".join(tasks)]
        options += ["--batch_size", str(batch), "--device", "cpu", *(["--apply_chat_template"] if chat else [])]
        # The tasks name their texts relative to the current folder.
        run([program, *options, "--include_path", TASKS, "--output_path", folder, "--log_samples"], cwd=TASKS)
        return {task: samples(folder, task) for task in tasks}

    return run_tasks


def samples(folder: Path, task: str) -> list[Any]:
    """What the model answered per text: [log-probability, is greedy], [log-probability] or [text]."""
    (path,) = folder.glob(f"*/samples_{task}_*.jsonl")
    found = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    assert len(found) == SIZES[task]
    return [sample["resps"][0] for sample in found]


@pytest.fixture(scope="module")
def ring(evaluate, real_model) -> Iterator[Ring]:
    port = free_ports(2)
    with Ring(str(real_model), name=NAME, port=port, http_port=port + 1, engine_args={"dtype": "float32"}) as ring:
        yield ring


def on(ring: Ring, path: str, *arguments: str) -> tuple[str, ...]:
    return (f"model={NAME}", f"base_url=http://{ring.http_address}/v1/{path}", *arguments)


@pytest.fixture(scope="module")
def transformers_finds(evaluate, real_model) -> Samples:
    return evaluate("hf", f"pretrained={real_model}", "dtype=float32", tasks=PLAIN)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_completions_find_what_transformers_finds(evaluate, ring, real_model, transformers_finds, prompts):
    arguments = on(ring, "completions", f"tokenizer={real_model}", *PROMPTS[prompts])
    found = evaluate(COMPLETIONS, *arguments, tasks=PLAIN, batch=BATCHES[prompts])
    wanted, scores = (
        [(float(score), greedy) for (score, greedy), *_ in texts[SCORES]] for texts in (transformers_finds, found)
    )
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in wanted]
    assert {greedy for _, greedy in wanted} == {"True", "False"}
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in wanted], abs=TOLERANCE)
    assert numbers(found[ROLLING]) == pytest.approx(numbers(transformers_finds[ROLLING]), abs=TOLERANCE)
    assert found[ANSWERS] == transformers_finds[ANSWERS]


def numbers(rolling: list[Any]) -> list[float]:
    return [float(value) for (value,) in rolling]


def test_chats_answer_what_transformers_answers(evaluate, ring, real_model):
    wanted = evaluate("hf", f"pretrained={real_model}", "dtype=float32", tasks=(ANSWERS,), chat=True)
    found = evaluate(CHATS, *on(ring, "chat/completions"), tasks=(ANSWERS,), chat=True)
    assert found == wanted
    assert all(text for (text,) in found[ANSWERS])


def test_a_model_in_int8_is_scored_and_answers(evaluate, real_model):
    pytest.importorskip("openvino")
    port, int8 = free_ports(2), {"backend": "openvino", "quantize": "int8"}
    with Ring(str(real_model), name=NAME, port=port, http_port=port + 1, engine_args=int8) as ring:
        completions = on(ring, "completions", f"tokenizer={real_model}")
        assert all(float(score) < 0 for (score, _), *_ in evaluate(COMPLETIONS, *completions, tasks=(SCORES,))[SCORES])
        evaluate(CHATS, *on(ring, "chat/completions"), tasks=(ANSWERS,), chat=True)
