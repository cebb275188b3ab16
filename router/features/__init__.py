"""The optional features of requests, one per file. A request enters only those whose fields it sets."""

from router.features.drafts import Drafts
from router.features.guides import Guides
from router.features.max_queue_time import MaxQueueTime
from router.features.processors import Processors
from router.features.prompt_logprobs import PromptLogprobs
from router.features.tensors import Tensors
from router.parse.model import Limits, ServedModel
from router.requests.part import Feature


def all_features(model: ServedModel, limits: Limits) -> tuple[Feature, ...]:
    return (
        Guides(limits),
        Drafts(model, limits),
        PromptLogprobs(model, limits),
        Tensors(),
        Processors(),
        MaxQueueTime(limits),
    )
