"""`LLM`: the API of TensorRT-LLM's and vLLM's class of this name, over `sluice.executor`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from sluice.executor import GenerationExecutor, GenerationResult, IterationStats, SamplingParams
from sluice.executor.batch import per_prompt

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
SALT = "cache_salt"
POOLING = "models generate text here; there are no pooling models"
TOKENIZER = "the routers tokenize; for a tokenizer of your own, transformers' AutoTokenizer reads the checkpoint"
OTHER_PROCESSES = "engines are other processes; collective_rpc calls methods that they know by name"
REFUSED = {
    **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), POOLING),
    **dict.fromkeys(("tokenizer", "get_tokenizer", "set_tokenizer"), TOKENIZER),
    **dict.fromkeys(("apply_model", "llm_engine", "start_profile", "stop_profile"), OTHER_PROCESSES),
    **dict.fromkeys(("sleep", "wake_up"), "engines do not give up their weights; shut this LLM down and make another"),
    "beam_search": "give generate SamplingParams(use_beam_search=True, n=…, best_of=…)",
    "get_metrics": "services have Prometheus metrics of their own; get_stats has those of steps",
}
"""Names that the class has elsewhere, and why not here."""


class UnsupportedNameError(NotImplementedError, AttributeError):
    """So that `hasattr` is False too."""


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
        tensor or an array [tokens, hidden size]; also with a `cache_salt`. Otherwise as `GenerationExecutor.generate`.
        """
        if isinstance(inputs, str | Mapping) or (inputs and isinstance(inputs[0], int)):
            prompts, options = _prompt(inputs, options)
        else:
            prompts, options = _prompts(inputs, options)
        return self._executor.generate(prompts, sampling_params, use_tqdm=use_tqdm, **options)

    def generate_async(
        self, inputs: Any, sampling_params: SamplingParams | None = None, streaming: bool = False, **options: Any
    ) -> GenerationResult:
        """Start one prompt. The result can be awaited, waited for with `result()`, and with `streaming` iterated."""
        prompt, options = _prompt(inputs, options)
        return self._executor.generate_async(prompt, sampling_params, streaming, **options)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Any:
        """As `generate`, for the messages of one chat or of several; with `tools`, `chat_template_kwargs` and
        `continue_final_message`, which are those of vLLM. Raises NotImplementedError for a `chat_template`."""
        if chat_template is not None:
            raise NotImplementedError("LLM.chat(chat_template=…): chats have the template of the checkpoint")
        if not add_generation_prompt:
            variables = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {**variables, "add_generation_prompt": False}
        found: Any = messages
        return self._executor.generate(found, sampling_params, use_tqdm=use_tqdm, **options)

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of requests that have none."""
        return SamplingParams()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `GenerationExecutor.collective_rpc`."""
        return self._executor.collective_rpc(method, args, kwargs, timeout=timeout)

    def get_stats(self, timeout: float = 2.0) -> list[IterationStats]:
        """Steps since the last call; waits up to `timeout` seconds for the first."""
        return self._executor.get_latest_iteration_stats(timeout)

    async def get_stats_async(self, timeout: float = 2.0) -> AsyncIterator[IterationStats]:
        """The same steps one by one, until none has come for `timeout` seconds."""
        while steps := await asyncio.to_thread(self.get_stats, timeout):
            for step in steps:
                yield step

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

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise UnsupportedNameError(f"LLM.{name}: {REFUSED[name]}")
        raise AttributeError(f"LLM has no attribute {name!r}")

    def shutdown(self) -> None:
        """Wait for the requests that run, then stop the ring."""
        self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(abort=kind is not None)


def _prompts(inputs: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The prompts, and the options with the salts that are in them."""
    common = {name: value for name, value in options.items() if name != SALT}
    salts = per_prompt(SALT, options.get(SALT), len(inputs))
    found = [_prompt(each, {SALT: salt}) for each, salt in zip(inputs, salts, strict=True)]
    return [prompt for prompt, _ in found], {**common, SALT: [own[SALT] for _, own in found]}


def _prompt(given: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Raises TypeError for a mapping with other keys: nothing in it may be ignored."""
    if not isinstance(given, Mapping):
        return given, options
    names = set(given) - {SALT}
    if len(names) != 1 or not names <= set(PROMPT_KEYS):
        keys = f"one of the keys {', '.join(PROMPT_KEYS)}, and may have {SALT}"
        raise TypeError(f"a prompt must have {keys}, not {', '.join(given)}; images are an option of generate_async")
    (name,) = names
    prompt = {name: given[name]} if name == "prompt_embeds" else given[name]
    return prompt, {**options, SALT: given[SALT]} if SALT in given else options
