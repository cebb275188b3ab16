"""The real engine with the real runner and lanes in memory: takes whole requests, returns token ids."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import structlog
import torch

from engine_worker.backend import load_runner
from engine_worker.core.engine import Engine
from engine_worker.core.refusals import EngineLimits, longest_sequence
from engine_worker.guided.guides import Guides
from engine_worker.hooks import Hooks, Report
from engine_worker.parallel.leader import Leader
from engine_worker.parallel.rank_env import RankEnv
from engine_worker.ringside.mailbox import Mailbox
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.tensor_outbox import TensorOutbox
from engine_worker.runner.config import DraftConfig, RunnerConfig
from engine_worker.runner.debug_tensors import DebugTensors
from engine_worker.runner.extensions import Extensions
from engine_worker.sampling.processors import find_processors
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.engine import Batching, ChunkingPolicy, ProcessorNames, RecomputeMode
from sluice.wire.adapters import Adapter
from sluice.wire.params import Guide, SamplingParams, Speculation, StopParams, TextParams
from sluice.wire.prompt_logprobs import Row
from sluice.wire.requests import Submit
from sluice.wire.stats import RequestProgress, StepStats
from sluice.wire.tables import NO_TABLES, PromptTables
from sluice.wire.tensors import NO_TENSORS, TensorParams
from tests.fakes.clock import Clock
from tests.fakes.drafting import draft_from_the_first_step
from tests.fakes.lane import Receiver, Stream
from tests.fakes.submits import submit_of

DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
"""cuda: run the tests on a GPU, with the attention backend and overlap that engines use there; see docs/gpu.md."""
EPOCH = 1
LOAD_SECONDS, STEP_SECONDS = 120.0, 60.0
LORA_RANKS = 1024
"""Memory for LoRA adapters, in ranks of one linear map of one layer."""
QUIET = structlog.make_filtering_bound_logger(50)


def ignore(done: int, total: int) -> None:
    """A progress callback that does nothing."""


class EngineHarness:
    """Submit requests, `run` until all have ended, then read their streams. `run` also checks the block pool."""

    def __init__(
        self,
        folder: Path,
        *,
        max_batch_size: int = 64,
        max_tokens_per_step: int = 2048,
        chunked_context: bool = True,
        kv_cache_tokens: int = 64 * 1024,
        kv_host_memory: int = 0,
        tokens_per_block: int = 16,
        attention: str = "cpu",
        max_draft_batch: int = 8,
        recompute: RecomputeMode = "auto",
        overlap: bool = DEVICE == "cuda",
        max_attention_window: tuple[int, ...] = (),
        policy: str = "max_utilization",
        chunking: ChunkingPolicy = "first_come_first_served",
        block_reuse: bool = True,
        tensor_parallel: int = 1,
        backend: str = "torch",
        dtype: str = "float32",
        quantize: str = "none",
        quantized_activations: bool = True,
        kv_precision: str = "auto",
        lora: bool = False,
        guides: Guides | None = None,
        tensor_buffer: int = 1 << 20,
        output_tensors: dict[str, str] | None = None,
        processors: ProcessorNames = ProcessorNames(),  # noqa: B008 - frozen
        draft_model: Path | None = None,
        output_layers: tuple[int, ...] = (),
        image_cache_size: int = 1 << 20,
        debug: DebugTensors | None = None,
    ) -> None:
        if backend == "openvino":
            pytest.importorskip("openvino")
        checkpoint = open_checkpoint(str(folder))
        if backend != "torch" or (attention == "cpu" and DEVICE != "cpu"):
            attention = "auto"
        config = RunnerConfig(
            device=DEVICE if backend == "torch" else "cpu",
            dtype=dtype,
            backend=backend,
            quantize=quantize,
            quantized_activations=quantized_activations,
            kv_precision=kv_precision,
            lora=lora,
            lora_folders=("/",),
            lora_num_device_module_layer=LORA_RANKS,
            attention=attention,
            overlap=overlap,
            tokens_per_block=tokens_per_block if backend == "torch" else 0,
            kv_cache_tokens=kv_cache_tokens,
            kv_host_memory=kv_host_memory,
            max_batch_size=max_batch_size,
            max_tokens_per_step=max_tokens_per_step,
            max_attention_window=max_attention_window,
            output_layers=output_layers,
            image_cache_size=image_cache_size,
        )
        log = structlog.wrap_logger(None, wrapper_class=QUIET)
        extensions = Extensions(
            processors=find_processors(processors, lambda *_: None),
            output_tensors=output_tensors or {},
            debug=debug,
            guides=guides,
        )
        self.leader: Leader | None = None
        if tensor_parallel == 1:
            draft = None if draft_model is None else DraftConfig(open_checkpoint(str(draft_model)), max_draft_batch)
            runner = load_runner(checkpoint, config, ignore, ignore, ignore, draft, extensions)
        else:
            self.leader = Leader(RankEnv(0, tensor_parallel, 0, tensor_parallel), LOAD_SECONDS, STEP_SECONDS, log)
            replicated = processors if processors.logits_processor_replicate else None
            runner = self.leader.load(
                str(folder), checkpoint, config, ignore, ignore, processors=replicated, extensions=extensions
            )
        self.runner = runner
        batching = Batching(
            max_batch_size,
            max_tokens_per_step,
            chunked_context=chunked_context,
            block_reuse=block_reuse,
            context_chunking_policy=chunking,
            capacity_scheduler_policy=policy,
            max_draft_batch=max_draft_batch,
            recompute=recompute,
        )
        longest = longest_sequence(runner, batching, checkpoint.max_context_tokens)
        self.receiver = Receiver()
        outbox = Outbox("engine", EPOCH, self.receiver.open_lane, time.monotonic, log)
        tensors = TensorOutbox("engine", EPOCH, self.receiver.open_lane, time.monotonic, log, tensor_buffer)
        mailbox = Mailbox(EPOCH, self._receive, outbox, tensors, log)
        self.steps: list[StepStats] = []
        self.requests: dict[int, RequestProgress] = {}
        """The latest statistics of each request, by number."""
        self._inbox: list[Submit] = []
        self._numbers = iter(range(1, 1 << 30))
        self.engine = Engine(
            runner,
            EngineLimits(
                checkpoint.fingerprint,
                checkpoint.vocab_size,
                longest,
                max_requests=1024,
                processors=frozenset(processors.processor_names),
                tensors=frozenset(runner.tensors),
                hidden_size=runner.hidden_size,
                image_rows=runner.image_rows,
            ),
            batching,
            Hooks(
                mailbox.get_requests, mailbox.send_responses, mailbox.poll_stop_ids, self._report, mailbox.tensor_room
            ),
            # All steps take no time, so that the number of draft tokens depends only on how many are accepted.
            Clock(),
            log,
        )
        draft_from_the_first_step(self.engine)

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.leader is not None:
            self.leader.close()

    @property
    def pauses(self) -> int:
        """Number of preemptions of sequences."""
        return sum(stats.pauses for stats in self.requests.values())

    def submit(
        self, prompt: list[int], sampling: SamplingParams, max_tokens: int, *, n: int = 1, salt: str = ""
    ) -> int:
        return self.send(prompt, sampling, StopParams(max_tokens=max_tokens), n=n, salt=salt)

    def send(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stopping: StopParams,
        *,
        n: int = 1,
        salt: str = "",
        resume: dict[int, list[int]] | None = None,
        ended: Iterable[int] = (),
        speculation: Speculation = Speculation(),  # noqa: B008 - frozen
        guide: Guide | None = None,
        prompt_logprobs: int | None = None,
        tensors: TensorParams = NO_TENSORS,
        tables: PromptTables = NO_TABLES,
        stop: tuple[str, ...] = (),
        adapter: Adapter | None = None,
    ) -> int:
        """Returns the request's number. `stop`: stop strings, which the reader of the tokens applies."""
        number = next(self._numbers)
        self._inbox.append(
            submit_of(
                request=number,
                attempt=0,
                engine_epoch=EPOCH,
                name=str(number),
                prompt=prompt,
                n=n,
                sampling=sampling,
                stopping=stopping,
                text=TextParams(stop=stop, min_tokens=stopping.min_tokens),
                priority=2,
                salt=salt,
                time_limit=None,
                detokenizer="mem://detokenizer",
                router="mem://router",
                resume=resume or {},
                ended=list(ended),
                speculation=speculation,
                guide=guide,
                prompt_logprobs=prompt_logprobs,
                tensors=tensors or None,
                tables=tables or None,
                adapter=adapter,
            )
        )
        self.receiver.first_rows[number, 0, 0, True] = tensors.context_rows
        for index, rows in tensors.output_rows.items():
            self.receiver.first_rows[number, 0, index, False] = rows
        return number

    def run(self) -> None:
        while self.engine.step() or self.engine.live.requests:
            self.receiver.read()
        self.receiver.read()
        self.engine.cache.check()

    def stream(self, request: int, sequence: int = 0) -> Stream:
        return self.receiver.streams[request, 0, sequence]

    def prompt_logprobs(self, request: int) -> list[Row]:
        return self.receiver.prompt_logprobs.get((request, 0), [])

    def tensor(self, request: int, name: str, sequence: int = 0, *, context: bool = False) -> torch.Tensor:
        """All rows received so far."""
        parts = self.receiver.tensors.get((request, 0, sequence, name, context), [])
        return torch.cat(
            [
                torch.frombuffer(bytearray(part.data), dtype=getattr(torch, part.dtype)).view(part.shape)
                for part in parts
            ]
        )

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, max_tokens: int) -> list[list[int]]:
        """Submit all prompts together, run, and return their outputs."""
        numbers = [self.submit(prompt, sampling, max_tokens) for prompt in prompts]
        self.run()
        return [self.stream(number).tokens for number in numbers]

    def cached_tokens(self, request: int) -> int:
        return self.receiver.opens[request, 0].cached_tokens

    def _report(self, report: Report) -> None:
        if report.step is not None:
            self.steps.append(report.step)
        self.requests.update((stats.request, stats) for stats in report.requests)

    def _receive(self) -> list[Submit]:
        messages, self._inbox = self._inbox, []
        return messages


def check_preemptions_change_nothing(
    harness: EngineHarness, prompts: list[list[int]], expected: list[list[int]], copies: int = 4
) -> None:
    """Compare greedy outputs in a pool that is too small for them.

    Sends each prompt several times. The copies share no blocks, so that their outputs compete for memory.
    """
    greedy = SamplingParams(temperature=0.0)
    numbers = [
        [harness.submit(prompt, greedy, len(output), salt=str(copy)) for copy in range(copies)]
        for prompt, output in zip(prompts, expected, strict=True)
    ]
    harness.run()
    assert harness.pauses > 0
    assert [[harness.stream(number).tokens for number in group] for group in numbers] == [
        [output] * copies for output in expected
    ]
