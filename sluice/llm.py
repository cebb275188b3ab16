"""`LLM`: the API of TensorRT-LLM's and vLLM's class of this name, over `sluice.executor`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from sluice.executor import GenerationExecutor, GenerationResult, IterationStats, SamplingParams

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")


class LLM:
    """A model on this machine: starts a ring, and stops it at `shutdown`, or as a context manager.

    `model` is a checkpoint folder or a hub id (None: the bundled tiny model); `options` are those of
    `GenerationExecutor.create`, whose errors it raises.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._executor = GenerationExecutor.create(model, **options)

    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> Any:
        """Generate and wait: a list of results for a list of prompts, one `GenerationResult` for one prompt.

        A prompt is text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}` or `{"prompt_embeds": rows}`, a
        tensor or an array [tokens, hidden size]. Otherwise as `GenerationExecutor.generate`.
        """
        return self._executor.generate(_prompts(inputs), sampling_params, use_tqdm=use_tqdm, **options)

    def generate_async(
        self, inputs: Any, sampling_params: SamplingParams | None = None, streaming: bool = False, **options: Any
    ) -> GenerationResult:
        """Start one prompt. The result can be awaited, waited for with `result()`, and with `streaming` iterated."""
        return self._executor.generate_async(_prompt(inputs), sampling_params, streaming, **options)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> Any:
        """As `generate`, for the messages of one chat or of several."""
        found: Any = messages
        return self._executor.generate(found, sampling_params, use_tqdm=use_tqdm, **options)

    def get_stats(self, timeout: float = 2.0) -> list[IterationStats]:
        """Steps since the last call; waits up to `timeout` seconds for the first."""
        return self._executor.get_latest_iteration_stats(timeout)

    def get_kv_cache_events(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        """KV cache events since the last call, for JSON; waits up to `timeout` seconds for the first.

        Needs `kv_cache_config=KvCacheConfig(event_buffer_max_size=...)`; see `GenerationExecutor.get_kv_cache_events`.
        """
        return [event.as_dict() for event in self._executor.get_kv_cache_events(timeout)]

    async def get_kv_cache_events_async(self, timeout: float = 2.0) -> AsyncIterator[dict[str, Any]]:
        """The same events one by one, until none has come for `timeout` seconds."""
        while events := await self._executor.aget_kv_cache_events(timeout):
            for event in events:
                yield event.as_dict()

    def shutdown(self) -> None:
        """Wait for the requests that run, then stop the ring."""
        self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(abort=kind is not None)


def _prompts(inputs: Any) -> Any:
    if isinstance(inputs, str | Mapping) or (inputs and isinstance(inputs[0], int)):
        return _prompt(inputs)
    return [_prompt(each) for each in inputs]


def _prompt(given: Any) -> Any:
    """Raises TypeError for a mapping with other keys: nothing in it may be ignored."""
    if not isinstance(given, Mapping):
        return given
    if len(given) != 1 or next(iter(given)) not in PROMPT_KEYS:
        raise TypeError(f"a prompt must have one of the keys {', '.join(PROMPT_KEYS)}, not {', '.join(given)}")
    return given if "prompt_embeds" in given else next(iter(given.values()))
