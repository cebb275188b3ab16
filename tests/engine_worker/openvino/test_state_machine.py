"""The engine's state machine, as in tests/engine_worker/core/machine.py, on a real model.

Each request must get the tokens that it gets alone on an idle engine. Steps do not fail here: a failure in OpenVINO
ends the engine, see test_lost.py.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from msgspec.structs import replace

from engine_worker.runner.runner import ModelRunner
from sluice.settings.engine import SchedulerNames
from sluice.wire.params import RetentionParams, derive_seed
from sluice.wire.prompt_logprobs import Row
from sluice.wire.requests import Submit
from sluice.wire.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, HIDDEN_STATES, TensorParams, TensorRows
from tests.engine_worker.core.machine import EVENT_BUFFER, QUIET, EngineMachine
from tests.engine_worker.core.machine_oracle import Oracle
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine_worker.openvino.loaded import load
from tests.examples import examples
from tests.fakes.engine import EngineBench
from tests.fakes.submits import extras_of, with_extras

ALL = TensorParams((CONTEXT_LOGITS, HIDDEN_STATES), (GENERATION_LOGITS, HIDDEN_STATES))
BLOCK = 2 * 2 * 2 * 16 * 32 * 4
"""Bytes of a block: layers * (keys and values) * KV heads * head size * tokens * float32."""


@cache
def runner(folder: Path, window: int | None, overlap: bool, purpose: str) -> ModelRunner:
    """A runner with 6 blocks on the device and 6 in host memory. Examples share it, so they also check that no example
    reads what an earlier one wrote to the cache."""
    windows = () if window is None else (window,)
    return load(folder, kv_cache_tokens=192, kv_host_memory=6 * BLOCK, overlap=overlap, max_attention_window=windows)


@pytest.fixture(scope="module", autouse=True)
def checkpoint(tmp_path_factory):
    OpenVinoMachine.folder = tmp_path_factory.mktemp("model")
    write_checkpoint(OpenVinoMachine.folder, CONFIGS["qwen3, tied"])


class Expected(NamedTuple):
    """Results of a sequence whose request ran alone."""

    output: list[int]
    prompt_logprobs: list[Row]
    tensors: dict[tuple[str, bool], np.ndarray]
    """By name, and whether the rows are of the prompt."""


def joined(parts: list[TensorRows]) -> np.ndarray:
    return np.concatenate([np.frombuffer(part.data, np.float32).reshape(part.shape) for part in parts])


class IdleEngineOracle(Oracle):
    """Runs each request alone on an idle engine with the same model."""

    def __init__(self, folder: Path, window: int | None) -> None:
        super().__init__()
        self._folder = folder
        self._window = window
        self._expected: dict[tuple[Any, ...], Expected] = {}

    def output(self, spec: Submit, sequence: int) -> list[int]:
        return self._run_alone(spec, sequence).output

    def check_prompt_logprobs(self, spec: Submit, rows: list[Row]) -> None:
        expected = self._run_alone(spec, 0).prompt_logprobs
        assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected[: len(rows)]], abs=1e-4)

    def check_tensor_rows(self, spec: Submit, sequence: int, parts: list[TensorRows]) -> None:
        for part in parts:
            expected = self._run_alone(spec, sequence).tensors[part.name, part.context]
            rows = np.frombuffer(part.data, np.float32).reshape(part.shape)
            np.testing.assert_allclose(rows, expected[part.start : part.end], atol=1e-3)

    def _run_alone(self, spec: Submit, sequence: int) -> Expected:
        beams, seed = spec.sampling.beam_search, derive_seed(spec.sampling.seed, sequence)
        alone = replace(
            spec,
            request=1,
            attempt=0,
            n=1 if beams is None else spec.n,
            sampling=spec.sampling if beams is not None else replace(spec.sampling, seed=seed),
            time_limit=None,
            resume={},
            ended=[],
        )
        tensors = None if beams is not None else ALL
        alone = with_extras(alone, retention=RetentionParams(), prompt_logprobs=0, tensors=tensors)
        number = 0 if beams is None else sequence
        speculation = extras_of(spec).speculation
        # Draft tokens change the output only if they come with logits.
        drafts = None if speculation.draft_logits is None else speculation
        key = (tuple(alone.prompt), alone.sampling.seed, alone.stopping, beams, alone.n, number, drafts)
        if key not in self._expected:
            idle = runner(self._folder, self._window, False, "alone")
            bench = EngineBench(runner=idle, max_tokens_per_step=512, log=QUIET, tensor_buffer=1 << 24)
            bench.send(alone)
            bench.run()
            logprobs, tensors = bench.receiver.prompt_logprobs.get((1, 0), []), bench.receiver.tensors
            self._expected[key] = Expected(
                bench.output(1, number), logprobs, {key[3:]: joined(tensors[key]) for key in tensors}
            )
        return self._expected[key]


class OpenVinoMachine(EngineMachine):
    folder: Path

    @initialize(
        window=st.sampled_from([None, None, 40]),
        batch=st.sampled_from([6, 4, 2, 1]),
        budget=st.sampled_from([6, 16, 40]),
        chunked=st.booleans(),
        reuse=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"]),
        overlap=st.booleans(),
    )
    def start(self, window, batch, budget, chunked, reuse, policy, overlap):
        bench = EngineBench(
            runner=runner(self.folder, window, overlap, "test"),
            max_batch_size=batch,
            max_tokens_per_step=budget,
            chunked_context=chunked,
            block_reuse=reuse,
            max_requests=12,
            kv_event_buffer=EVENT_BUFFER,
            log=QUIET,
            schedulers=SchedulerNames(policy),
        )
        self._begin(bench, IdleEngineOracle(self.folder, window), policy)

    draw_fails = draws_are_postponed = step_may_fail = moving_will_fail = None

    def _note_failures(self) -> None:
        """No step fails here."""


pytestmark = pytest.mark.timeout(600)
TestEngine = OpenVinoMachine.TestCase
# Phase.generate only: shrinking a failing example would take many minutes of real steps.
TestEngine.settings = examples(
    12, stateful_step_count=30, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
)
