"""A sample value of every field of GenerationSpec, by path."""

from google.protobuf.duration_pb2 import Duration

from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import (
    ChatMessage,
    ChatPrompt,
    ContentPart,
    KvCacheOptions,
    OutputOptions,
    ResumeFrom,
    TokenIds,
    TokenRangeRetention,
)
from sluice.v1.sampling_pb2 import BeamSearch, ChoiceList, GuidedDecoding, StoppingCriteria
from sluice.v1.sampling_pb2 import SamplingParams as Sampling

VOCABULARY = 4096
PROPOSING = pb.Speculation(
    draft_token_ids=[1, 2], draft_logits=pb.DraftLogits(dtype="bfloat16", data=bytes(2 * VOCABULARY * 2))
)
ROW = pb.Embeddings(shape=[1, 2], dtype="float16", data=bytes(4))


def called(**fields: str) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=[pb.ToolCall(**fields)])


SAMPLES = {
    "request_id": {"request_id": "r"},
    "text": {"text": "other"},
    "token_ids.ids": {"token_ids": TokenIds(ids=[1, 2])},
    "chat.messages.role": {"chat": ChatPrompt(messages=[ChatMessage(role="user")])},
    "chat.messages.content": {"chat": ChatPrompt(messages=[ChatMessage(role="user", content="c")])},
    "chat.messages.tool_call_id": {"chat": ChatPrompt(messages=[ChatMessage(role="tool", tool_call_id="c")])},
    "chat.messages.tool_calls": {"chat": ChatPrompt(messages=[called(id="1", name="f", arguments_json="{}")])},
    "chat.messages.reasoning_content": {
        "chat": ChatPrompt(messages=[ChatMessage(role="assistant", reasoning_content="r")])
    },
    "chat.messages.name": {"chat": ChatPrompt(messages=[ChatMessage(role="user", name="n")])},
    "chat.messages.parts": {"chat": ChatPrompt(messages=[ChatMessage(role="user", parts=[ContentPart(text="c")])])},
    "images": {"images": [pb.Image(data=b"i")]},
    "chat.tools_json": {"chat": ChatPrompt(messages=[ChatMessage(role="user")], tools_json='[{"a": 1}]')},
    "chat.template_kwargs": {"chat": ChatPrompt(messages=[ChatMessage(role="user")], template_kwargs={"a": 1})},
    "chat.continue_final_message": {
        "chat": ChatPrompt(messages=[ChatMessage(role="user")], continue_final_message=True)
    },
    "sampling.temperature": {"sampling": Sampling(temperature=0)},
    "sampling.top_k": {"sampling": Sampling(top_k=0)},
    "sampling.top_p": {"sampling": Sampling(top_p=0.5)},
    "sampling.min_p": {"sampling": Sampling(min_p=0.5)},
    "sampling.repetition_penalty": {"sampling": Sampling(repetition_penalty=1.5)},
    "sampling.presence_penalty": {"sampling": Sampling(presence_penalty=0.5)},
    "sampling.frequency_penalty": {"sampling": Sampling(frequency_penalty=-0.5)},
    "sampling.seed": {"sampling": Sampling(seed=2**64 - 1)},
    "sampling.logit_bias": {"sampling": Sampling(logit_bias={5: -100})},
    "sampling.bad_token_ids": {"sampling": Sampling(bad_token_ids=[3, 1, 3])},
    "sampling.allowed_token_ids": {"sampling": Sampling(allowed_token_ids=[4])},
    "sampling.bad_words": {"sampling": Sampling(bad_words=["a", "b", "a"])},
    "sampling.no_repeat_ngram_size": {"sampling": Sampling(no_repeat_ngram_size=3)},
    "sampling.beam_search": {"sampling": Sampling(beam_search=BeamSearch(width=4))},
    "sampling.logits_processors": {"sampling": Sampling(logits_processors=["p", "q"])},
    "client_id": {"client_id": 0},
    "guided": {"guided": GuidedDecoding(choice=ChoiceList(choices=["yes", "no"]))},
    "speculation.max_draft_tokens": {"speculation": pb.Speculation(max_draft_tokens=0)},
    "speculation.draft_token_ids": {"speculation": pb.Speculation(draft_token_ids=[1, 2])},
    "speculation.draft_logits": {"speculation": PROPOSING},
    "speculation.acceptance_threshold": {
        "speculation": pb.Speculation(
            draft_token_ids=[1, 2], draft_logits=PROPOSING.draft_logits, acceptance_threshold=0.5
        )
    },
    "stopping.max_tokens": {"stopping": StoppingCriteria(max_tokens=5)},
    "stopping.min_tokens": {"stopping": StoppingCriteria(min_tokens=5)},
    "stopping.stop": {"stopping": StoppingCriteria(stop=["a", "b", "a"])},
    "stopping.stop_token_ids": {"stopping": StoppingCriteria(stop_token_ids=[5])},
    "stopping.ignore_eos": {"stopping": StoppingCriteria(ignore_eos=True)},
    "stopping.include_stop_in_output": {"stopping": StoppingCriteria(include_stop_in_output=True)},
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "output.token_ids": {"output": OutputOptions(token_ids=True)},
    "output.logprobs": {"output": OutputOptions(logprobs=0)},
    "output.prompt_logprobs": {"output": OutputOptions(prompt_logprobs=0)},
    "output.context_logits": {"output": OutputOptions(context_logits=True)},
    "output.generation_logits": {"output": OutputOptions(generation_logits=True)},
    "output.tensors": {"output": OutputOptions(tensors=[pb.TensorSpec(name="hidden_states")])},
    "output.echo": {"output": OutputOptions(echo=True)},
    "output.stream_interval": {"output": OutputOptions(stream_interval=4)},
    "output.keep_special_tokens": {"output": OutputOptions(keep_special_tokens=["<tool_call>"])},
    "output.prompt_tail": {"output": OutputOptions(prompt_tail=16)},
    "output.skip_special_tokens": {"output": OutputOptions(skip_special_tokens=False)},
    "output.timings": {"output": OutputOptions(timings=True)},
    "kv_cache.salt": {"kv_cache": KvCacheOptions(salt="s")},
    "kv_cache.prompt_retention": {"kv_cache": KvCacheOptions(prompt_retention=[TokenRangeRetention()])},
    "kv_cache.decode_priority": {"kv_cache": KvCacheOptions(decode_priority=0)},
    "kv_cache.decode_duration": {"kv_cache": KvCacheOptions(decode_duration=Duration(seconds=1))},
    "priority": {"priority": pb.PRIORITY_HIGH},
    "engine_deaths": {"engine_deaths": 8},
    "resume.index": {"resume": [ResumeFrom()]},
    "resume.token_ids": {"resume": [ResumeFrom(index=1, token_ids=[7])], "n": 2, "sampling": Sampling(seed=2**64 - 1)},
    "resume.tensor_rows": {
        "resume": [ResumeFrom(token_ids=[7], tensor_rows=1)],
        "output": OutputOptions(generation_logits=True),
        "sampling": Sampling(seed=2**64 - 1),
    },
    "resume_context_rows": {"resume_context_rows": 2, "output": OutputOptions(context_logits=True)},
    "resume.model_fingerprint": {"resume": [ResumeFrom(model_fingerprint="a1")]},
    "lora_id": {"lora_id": "sql"},
    "lora_weights": {"lora_weights": pb.LoraWeights(config_json=b"{}", safetensors=b"s")},
    "max_queue_time": {"max_queue_time": Duration(seconds=1)},
    "time_limit": {"time_limit": Duration(seconds=2, nanos=500_000_000)},
    "add_special_tokens": {"add_special_tokens": False},
    "prompt_embeds": {"prompt_embeds": ROW},
    "prompt_adapter_id": {"prompt_adapter_id": "terse"},
    "prompt_table": {"prompt_table": pb.PromptTable(embeddings=ROW)},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
}
