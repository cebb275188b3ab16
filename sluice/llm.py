"""`LLM`: the API of the class of that name in TensorRT-LLM and vLLM, over `sluice.executor`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from sluice.client.values import is_id
from sluice.executor import GenerationExecutor, GenerationResult, IterationStats, SamplingParams
from sluice.executor.batch import per_prompt
from sluice.llm_options import own_options

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
SALT = "cache_salt"
POOLING = "pooling models are not supported, only models that generate text"
TOKENIZER = "the routers tokenize; to tokenize in your program, load the checkpoint with transformers' AutoTokenizer"
OTHER_PROCESSES = "engines are separate processes; collective_rpc calls methods that they know by name"
REFUSED = {
    **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), POOLING),
    **dict.fromkeys(("tokenizer", "get_tokenizer", "set_tokenizer"), TOKENIZER),
    **dict.fromkeys(("apply_model", "llm_engine", "start_profile", "stop_profile"), OTHER_PROCESSES),
    **dict.fromkeys(("sleep", "wake_up"), "engines cannot unload their weights; shut this LLM down and create another"),
    "beam_search": "use generate with SamplingParams(use_beam_search=True, n=…, best_of=…)",
    "save": "checkpoints are served as they are, so there is no compiled engine to save",
    "get_metrics": "services export Prometheus metrics; get_stats returns the statistics of steps",
}
"""Attributes of TensorRT-LLM's or vLLM's class that this class does not have, and why."""


class UnsupportedNameError(NotImplementedError, AttributeError):
    """An attribute that this class does not have. An AttributeError, so that `hasattr` is False."""


class SingleResult(list[GenerationResult]):
    """The result of one prompt: vLLM's list of one result, which also has the attributes of that result, TensorRT-LLM's
    return value."""

    def __getattr__(self, name: str) -> Any:
        # Python looks up special names, for example to copy the list.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


class LLM:
    """A model on this machine. Starts a ring, which `shutdown` or leaving the `with` block stops.

    ::

        with LLM("path/to/checkpoint") as llm:
            print(llm.generate("Hello", SamplingParams(max_tokens=16)).outputs[0].text)
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """`model` is a checkpoint folder or a Hugging Face id (None: the bundled tiny model).

        Has the `options`, and raises the exceptions, of `GenerationExecutor.create`. Options of vLLM's and
        TensorRT-LLM's classes are accepted with neutral values, or mapped to those; others raise NotImplementedError.
        """
        self._executor = GenerationExecutor.create(model, **own_options(options))

    def generate(
        self,
        inputs: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompts: Any = None,
        **options: Any,
    ) -> Any:
        """Generate for one prompt or for a list of prompts, and wait for the `GenerationResult` of each.

        The result of one prompt is a `SingleResult`. `prompts` is vLLM's name of `inputs`.

        A prompt is text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}` or `{"prompt_embeds": rows}` with a
        tensor or array [tokens, hidden size]; a mapping may also have a `cache_salt`. Has the `options`, and raises the
        exceptions, of `GenerationExecutor.generate`.
        """
        if (inputs is None) == (prompts is None):
            raise TypeError("generate takes either inputs or prompts")
        given = prompts if inputs is None else inputs
        is_single = isinstance(given, str | Mapping) or _is_ids(given)
        parsed, options = (_prompt if is_single else _prompts)(given, options)
        return _listed(self._executor.generate(parsed, sampling_params, use_tqdm=use_tqdm, **options))

    def generate_async(
        self, inputs: Any, sampling_params: SamplingParams | None = None, streaming: bool = False, **options: Any
    ) -> GenerationResult:
        """Start generating for one prompt.

        Wait for the result with `await` or `result()`; with `streaming`, iterate over it to read tokens as they arrive.
        """
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
        """Like `generate`, for the messages of one chat or of several.

        The options `tools`, `chat_template_kwargs` and `continue_final_message` are those of vLLM. Raises
        NotImplementedError for a `chat_template`.
        """
        if chat_template is not None:
            raise NotImplementedError("LLM.chat(chat_template=…): chats always use the checkpoint's template")
        if not add_generation_prompt:
            variables = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {**variables, "add_generation_prompt": False}
        chats: Any = messages
        return _listed(self._executor.generate(chats, sampling_params, use_tqdm=use_tqdm, **options))

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of requests without any."""
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
        """Return the steps since the last call. Waits up to `timeout` seconds for the first."""
        return self._executor.get_latest_iteration_stats(timeout)

    async def get_stats_async(self, timeout: float = 2.0) -> AsyncIterator[IterationStats]:
        """Iterate over the steps since the last call, until there was none for `timeout` seconds."""
        while steps := await asyncio.to_thread(self.get_stats, timeout):
            for step in steps:
                yield step

    def get_kv_cache_events(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        """Return the KV cache events since the last call, in JSON form. Waits up to `timeout` seconds for the first.

        Requires an LLM with `kv_cache_config=KvCacheConfig(event_buffer_max_size=…)`; see
        `GenerationExecutor.get_kv_cache_events`.
        """
        return [event.as_dict() for event in self._executor.get_kv_cache_events(timeout)]

    async def get_kv_cache_events_async(self, timeout: float = 2.0) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the events since the last call, until there was none for `timeout` seconds."""
        while events := await self._executor.aget_kv_cache_events(timeout):
            for event in events:
                yield event.as_dict()

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise UnsupportedNameError(f"LLM.{name}: {REFUSED[name]}")
        raise AttributeError(f"LLM has no attribute {name!r}")

    def shutdown(self) -> None:
        """Wait for the running requests, then stop the ring. Idempotent."""
        self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(abort=kind is not None)


def _is_ids(inputs: Any) -> bool:
    """Whether these are the token ids of one prompt, not a list of prompts."""
    if hasattr(inputs, "shape"):
        return len(inputs.shape) < 2
    return bool(len(inputs)) and is_id(inputs[0])


def _listed(results: Any) -> Any:
    return results if isinstance(results, list) else SingleResult([results])


def _prompts(inputs: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The prompts as the executor expects them, and the options, with the cache salts of the prompts."""
    common = {name: value for name, value in options.items() if name != SALT}
    salts = per_prompt(SALT, options.get(SALT), len(inputs))
    parsed = [_prompt(prompt, {SALT: salt}) for prompt, salt in zip(inputs, salts, strict=True)]
    prompts, salt_options = zip(*parsed, strict=True) if parsed else ((), ())
    return list(prompts), {**common, SALT: [option[SALT] for option in salt_options]}


def _prompt(prompt: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A prompt as the executor expects it, and the options, with the cache salt of the prompt.

    Raises TypeError for a mapping with unknown keys, none of which may be ignored.
    """
    if not isinstance(prompt, Mapping):
        return prompt, options
    names = set(prompt) - {SALT}
    if len(names) != 1 or not names <= set(PROMPT_KEYS):
        keys = f"one of the keys {', '.join(PROMPT_KEYS)}, and may have {SALT}"
        raise TypeError(f"a prompt must have {keys} (got {', '.join(prompt)}); images are an option of generate_async")
    (name,) = names
    content = {name: prompt[name]} if name == "prompt_embeds" else prompt[name]
    return content, {**options, SALT: prompt[SALT]} if SALT in prompt else options
