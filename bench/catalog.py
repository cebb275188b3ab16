"""All topics, by their names on the command line and in file names."""

from collections.abc import Mapping

from bench.deaths import kills, pauses, precisions, restart
from bench.harness.topic import Topic
from bench.overload import overload
from bench.takeover import costs, roles, takeover_page
from bench.topics import (
    beams,
    cache,
    gateway,
    gguf,
    guided,
    logit_rules,
    long_context,
    lora,
    peers,
    policies,
    prompt_logprobs,
    quantize,
    ring,
    router,
    scheduler,
    slow_reader,
    speculation,
    steps,
)

TOPICS: Mapping[str, Topic] = {
    "ring": ring.TOPIC,
    "router": router.TOPIC,
    "gateway": gateway.TOPIC,
    "policies": policies.TOPIC,
    "scheduler": scheduler.TOPIC,
    "steps": steps.TOPIC,
    "logit_rules": logit_rules.TOPIC,
    "speculation": speculation.TOPIC,
    "guided": guided.TOPIC,
    "beams": beams.TOPIC,
    "lora": lora.TOPIC,
    "prompt_logprobs": prompt_logprobs.TOPIC,
    "cache": cache.TOPIC,
    "peers": peers.TOPIC,
    "peers_large": peers.LARGE_TOPIC,
    "long_context": long_context.TOPIC,
    "gguf": gguf.TOPIC,
    "quantize": quantize.TOPIC,
    "deaths": kills.TOPIC,
    "deaths_by_precision": precisions.TOPIC,
    "restart": restart.TOPIC,
    "pauses": pauses.TOPIC,
    "takeover": takeover_page.TOPIC,
    "roles": roles.TOPIC,
    "pool_files": costs.TOPIC,
    "overload": overload.TOPIC,
    "slow_reader": slow_reader.TOPIC,
    "slow_tensors": slow_reader.TENSORS_TOPIC,
    "soak": kills.SOAK,
}
