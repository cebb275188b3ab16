"""Which fields of GenerationSpec are honoured, and which are refused by name because they are not built yet.

Every field of the .proto stands in exactly one of the two tables; a test walks the descriptor.
"""

from collections.abc import Callable, Mapping

from google.protobuf.message import Message

from router.errors import RequestError, Violation
from sluice.ring.errors import ErrorCode
from sluice.v1.generation_pb2 import GenerationSpec

NESTED = frozenset({"chat", "chat.messages", "kv_cache", "output", "resume", "sampling", "stopping", "token_ids"})
"""Messages whose own fields are listed one by one."""

HONOURED = frozenset(
    {
        "request_id",
        "model",
        "text",
        "token_ids.ids",
        "chat.messages.role",
        "chat.messages.content",
        "chat.messages.tool_call_id",
        "chat.tools_json",
        "chat.template_kwargs",
        "chat.continue_final_message",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.seed",
        "sampling.logit_bias",
        "sampling.bad_token_ids",
        "sampling.allowed_token_ids",
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.stop",
        "stopping.stop_token_ids",
        "stopping.ignore_eos",
        "stopping.include_stop_in_output",
        "n",
        "output.token_ids",
        "output.logprobs",
        "output.echo",
        "output.stream_interval",
        "output.skip_special_tokens",
        "output.timings",
        "kv_cache.salt",
        "kv_cache.prompt_retention",
        "kv_cache.decode_priority",
        "kv_cache.decode_duration",
        "priority",
        "time_limit",
        "engine_deaths",
        "resume.index",
        "resume.token_ids",
        "resume.model_fingerprint",
        "add_special_tokens",
        "truncate_prompt_tokens",
    }
)

REFUSED = frozenset(
    {
        "sampling.bad_words",
        "sampling.no_repeat_ngram_size",
        "sampling.beam_search",
        "sampling.logits_processors",
        "guided",
        "output.prompt_logprobs",
        "output.context_logits",
        "output.generation_logits",
        "output.tensors",
        "lora_id",
        "best_of",
        "prompt_adapter_id",
        "speculation",
    }
)

OFF: Mapping[str, Callable[[GenerationSpec], bool]] = {
    "sampling.no_repeat_ngram_size": lambda spec: spec.sampling.no_repeat_ngram_size == 0,
    "sampling.beam_search": lambda spec: spec.sampling.beam_search.width == 1,
    "guided": lambda spec: spec.guided.WhichOneof("guide") is None,
    "best_of": lambda spec: spec.best_of <= (spec.n if spec.HasField("n") else 1),
    "speculation": lambda spec: (
        not spec.speculation.max_draft_tokens
        and (spec.speculation.HasField("max_draft_tokens") or not spec.speculation.draft_token_ids)
    ),
}
"""Whether the value of a refused field asks for nothing. The other refused fields are off only while they are unset;
of `best_of` less than n is an error of its own."""


def refuse_unbuilt(spec: GenerationSpec) -> None:
    """Raise RequestError NOT_BUILT_YET naming every refused field that is set to something other than off."""
    found = [f"spec.{path}" for path in sorted(REFUSED) if _is_set(spec, path) and not _is_off(spec, path)]
    if found:
        raise RequestError(
            ErrorCode.NOT_BUILT_YET,
            f"not built yet: {', '.join(found)}",
            [Violation(path, "is not built yet: leave it unset or off") for path in found],
        )


def _is_off(spec: GenerationSpec, path: str) -> bool:
    return path in OFF and OFF[path](spec)


def _is_set(spec: GenerationSpec, path: str) -> bool:
    message: Message = spec
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    return any(field.name == name for field, _ in message.ListFields())
