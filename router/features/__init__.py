"""The optional features of requests, one per file. A request enters only those whose fields it sets."""

from router.features.bad_words import BadWords
from router.features.drafts import Drafts
from router.features.guides import Guides
from router.features.images import Images
from router.features.lora import Lora
from router.features.max_queue_time import MaxQueueTime
from router.features.processors import Processors
from router.features.prompt_logprobs import PromptLogprobs
from router.features.retention import Retentions
from router.features.tables import Tables
from router.features.tensors import Tensors
from router.parse.model import Limits, ServedModel
from router.peers.adapters import Adapters
from router.peers.prompt_adapters import PromptAdapters
from router.requests.part import Feature
from router.text.tokenizer_pool import TokenizerPool


def all_features(
    model: ServedModel,
    limits: Limits,
    text: TokenizerPool,
    adapters: Adapters,
    prompt_adapters: PromptAdapters,
    *,
    lora_in_requests: bool,
) -> tuple[Feature, ...]:
    return (
        Lora(model, adapters, lora_in_requests),
        # The ids of images' rows follow those of tables' rows.
        Tables(model, limits, prompt_adapters, text),
        Images(model, limits, text),
        BadWords(model, limits, text),
        Retentions(limits),
        Guides(limits),
        Drafts(model, limits),
        PromptLogprobs(model, limits),
        Tensors(),
        Processors(limits),
        MaxQueueTime(limits),
    )
