"""Invalid specs of requests, each with its name, status and field."""

from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import KvCacheOptions, OutputOptions, TokenRangeRetention
from sluice.v1.sampling_pb2 import SamplingParams
from sluice.wire.tensors import MAX_NAMES
from tests.router.conftest import text_spec
from tests.router.parse.bad_prompts import BAD_PROMPTS
from tests.router.parse.bad_sampling import BAD_SAMPLING
from tests.router.parse.spec_builders import HUGE, INVALID, decode, output, retention

SPECS = [
    *BAD_PROMPTS,
    *BAD_SAMPLING,
    # Output.
    ("n is 0", text_spec(n=0), INVALID, "spec.n"),
    ("n is 129", text_spec(n=129), INVALID, "spec.n"),
    ("huge n", text_spec(n=HUGE), INVALID, "spec.n"),
    ("21 logprobs", output(logprobs=21), INVALID, "spec.output.logprobs"),
    ("huge logprobs", output(logprobs=HUGE), INVALID, "spec.output.logprobs"),
    ("interval 0", output(stream_interval=0), INVALID, "spec.output.stream_interval"),
    ("a choice among resumed outputs", text_spec(best_of=2, resume=[pb.ResumeFrom()]), INVALID, "spec.best_of"),
    ("best_of below n", text_spec(best_of=1, n=2), INVALID, "spec.best_of"),
    ("best_of is 0", text_spec(best_of=0), INVALID, "spec.best_of"),
    ("many to choose from", text_spec(best_of=129), INVALID, "spec.best_of"),
    ("prompt_logprobs of 21", output(prompt_logprobs=21), INVALID, "spec.output.prompt_logprobs"),
    # Tensors.
    ("a tensor without a name", output(tensors=[pb.TensorSpec()]), INVALID, "spec.output.tensors[0].name"),
    (
        "logits among the named tensors",
        output(tensors=[pb.TensorSpec(name="context_logits")]),
        INVALID,
        "spec.output.tensors[0].name",
    ),
    (
        "a tensor that no engine has",
        output(tensors=[pb.TensorSpec(name="hidden")]),
        INVALID,
        "spec.output.tensors[0].name",
    ),
    (
        "a tensor twice",
        output(tensors=[pb.TensorSpec(name="hidden_states"), pb.TensorSpec(name="hidden_states", context=True)]),
        INVALID,
        "spec.output.tensors[1].name",
    ),
    (
        "more tensors than allowed",
        output(tensors=[pb.TensorSpec(name=str(i)) for i in range(MAX_NAMES + 1)]),
        INVALID,
        "spec.output.tensors",
    ),
    (
        "best_of with tensors",
        text_spec(best_of=2, output=OutputOptions(generation_logits=True)),
        INVALID,
        "spec.best_of",
    ),
    (
        "rows of the prompt's tensors that were not requested",
        text_spec(resume_context_rows=1, output=OutputOptions(generation_logits=True)),
        INVALID,
        "spec.resume_context_rows",
    ),
    (
        "more rows of the prompt's tensors than tokens",
        text_spec(resume_context_rows=1000, output=OutputOptions(context_logits=True)),
        INVALID,
        "spec.resume_context_rows",
    ),
    (
        "more rows of an output's tensors than tokens",
        text_spec(
            sampling=SamplingParams(seed=1),
            output=OutputOptions(generation_logits=True),
            resume=[pb.ResumeFrom(token_ids=[7], tensor_rows=2)],
        ),
        INVALID,
        "spec.resume[0].tensor_rows",
    ),
    # Ids, priority, salt.
    ("id with a space", text_spec(request_id="a b"), INVALID, "spec.request_id"),
    ("id not ASCII", text_spec(request_id="é"), INVALID, "spec.request_id"),
    ("id with a newline", text_spec(request_id="a\n"), INVALID, "spec.request_id"),
    ("long id", text_spec(request_id="a" * 129), INVALID, "spec.request_id"),
    ("unknown priority", text_spec(priority=9), INVALID, "spec.priority"),
    ("negative priority", text_spec(priority=-1), INVALID, "spec.priority"),
    ("long salt", text_spec(kv_cache=KvCacheOptions(salt="s" * 257)), INVALID, "spec.kv_cache.salt"),
    # Adapters and resumed outputs.
    ("an unknown adapter", text_spec(lora_id="l"), StatusCode.NOT_FOUND, "spec.lora_id"),
    ("an adapter of an unknown model", text_spec(lora_id="l", model="m"), StatusCode.NOT_FOUND, None),
    (
        "weights in a request",
        text_spec(lora_weights=pb.LoraWeights(config_json=b"{}", safetensors=b"s")),
        StatusCode.PERMISSION_DENIED,
        "spec.lora_weights",
    ),
    (
        "a fingerprint with no version",
        text_spec(resume=[pb.ResumeFrom(model_fingerprint="a.b")]),
        INVALID,
        "spec.resume[0].model_fingerprint",
    ),
    ("resume of an output beyond n", text_spec(resume=[pb.ResumeFrom(index=1)]), INVALID, "spec.resume[0].index"),
    ("an unknown prompt adapter", text_spec(prompt_adapter_id="p"), StatusCode.NOT_FOUND, "spec.prompt_adapter_id"),
    ("a prompt adapter with a blank", text_spec(prompt_adapter_id="p q"), INVALID, "spec.prompt_adapter_id"),
    # Retention.
    ("empty range", *retention({"start": 3, "end": 3})),
    ("backward range", *retention({"start": 3, "end": 2})),
    ("range to nothing", *retention({"end": 0})),
    ("range beyond the prompt", *retention({"end": 10}, {"start": 10, "end": 11}, field="start", i=1)),
    ("open range beyond the prompt", *retention({"start": HUGE}, field="start")),
    ("range that leaves the prompt", *retention({"start": 9, "end": 11})),
    ("range that leaves the prompt before it is cut", *retention({"end": 11}, truncate_prompt_tokens=5)),
    (
        "range beyond a text",
        text_spec("x", kv_cache=KvCacheOptions(prompt_retention=[TokenRangeRetention(end=HUGE)])),
        INVALID,
        "spec.kv_cache.prompt_retention[0].end",
    ),
    ("overlap", *retention({"start": 4, "end": 8}, {"start": 0, "end": 5}, field="start", i=0)),
    ("overlap with an open one", *retention({"start": 2}, {"start": 8, "end": 9}, field="start", i=1)),
    ("the same range twice", *retention({"end": 5}, {"end": 5}, field="start", i=1)),
    ("priority 101", *retention({"priority": 101}, field="priority")),
    ("huge priority", *retention({"priority": HUGE}, field="priority")),
    ("a duration of zero", *retention({"duration": Duration()}, field="duration")),
    ("a negative duration", *retention({"duration": Duration(seconds=-1)}, field="duration")),
    ("a long duration", *retention({"duration": Duration(seconds=2_592_001)}, field="duration")),
    ("a huge duration", *retention({"duration": Duration(seconds=2**62)}, field="duration")),
    (
        "many ranges",
        text_spec(kv_cache=KvCacheOptions(prompt_retention=[TokenRangeRetention(end=1)] * 65)),
        INVALID,
        "spec.kv_cache.prompt_retention",
    ),
    ("decode priority", *decode(decode_priority=101)),
    ("decode duration", *decode(decode_duration=Duration())),
    ("long decode duration", *decode(decode_duration=Duration(seconds=2_592_001))),
    # Time and model.
    ("no time", text_spec(time_limit=Duration()), INVALID, "spec.time_limit"),
    ("negative time", text_spec(time_limit=Duration(seconds=-1)), INVALID, "spec.time_limit"),
    ("huge time", text_spec(time_limit=Duration(seconds=2**62)), INVALID, "spec.time_limit"),
    ("unknown model", text_spec(model="gpt-17"), StatusCode.NOT_FOUND, None),
    ("huge model name", text_spec(model="m" * 1_000_000), StatusCode.NOT_FOUND, None),
]
