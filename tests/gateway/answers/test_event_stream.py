"""Chunks as events: the bytes equal those of encoding the whole object."""

import msgspec
import pytest
from msgspec import UNSET

from gateway.answers.event_stream import ChunkEvents
from gateway.answers.objects import Answer, ChatDeltaChoice, CompletionChoice, Delta

CHOICES = [
    ChatDeltaChoice(index=1, delta=Delta(content='"choices":[]\n')),
    ChatDeltaChoice(index=0, delta=Delta(), finish_reason="stop", stop_reason="é"),
    CompletionChoice(index=0, text=""),
]


@pytest.mark.parametrize("usage", [UNSET, None])
@pytest.mark.parametrize("model", ["tiny", 'a,"choices":[],"b'])
def test_an_event_equals_the_encoded_object(model, usage):
    common = {"id": "c-1", "object": "chat.completion.chunk", "created": 5, "model": model, "usage": usage}
    events = ChunkEvents(Answer(choices=[], **common))
    for choice in CHOICES:
        assert events.of(choice) == b"data: " + msgspec.json.encode(Answer(choices=[choice], **common)) + b"\n\n"
