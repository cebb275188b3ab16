"""Where a request stands, and which changes of that are legal."""

from collections.abc import Mapping
from enum import Enum


class RequestPhase(Enum):
    """Where a request is between its arrival and the end of its last attempt; the value says what happens there."""

    TOKENIZING = "its prompt becomes token ids"
    QUEUED = "it waits for a permit"
    PLACING = "it waits for peers that can take its first attempt"
    ON_RING = "an attempt runs"
    CANCELLING = "a Cancel was sent for its attempt, whose terminal rows are awaited"
    RECOVERING = "its attempt was lost; it waits for peers that can take the next one"
    PAUSED = "its client reads too slowly: no attempt and no permit until the client has caught up"
    ENDED = "no attempt runs, and none will follow"


P = RequestPhase
PREPARING = frozenset({P.TOKENIZING, P.QUEUED, P.PLACING})
SUBMITTED = frozenset({P.ON_RING, P.CANCELLING})
WITHOUT_PERMIT = frozenset({P.PAUSED, P.ENDED})

TRANSITIONS: Mapping[P, Mapping[P, str]] = {
    P.TOKENIZING: {P.QUEUED: "prompt tokenized", P.ENDED: "refused or stopped"},
    P.QUEUED: {P.PLACING: "permit granted", P.ENDED: "refused or stopped"},
    P.PLACING: {P.ON_RING: "submitted", P.ENDED: "no peers, or stopped"},
    P.ON_RING: {
        P.CANCELLING: "stopped",
        P.RECOVERING: "attempt lost",
        P.PAUSED: "client too slow",
        P.ENDED: "last terminal row, or attempt lost beyond recovery",
    },
    P.CANCELLING: {P.ENDED: "last terminal row, or attempt lost"},
    P.RECOVERING: {P.ON_RING: "submitted again", P.ENDED: "no peers, or stopped"},
    P.PAUSED: {P.RECOVERING: "client caught up, permit granted", P.ENDED: "stopped"},
    P.ENDED: {},
}
"""Every legal change of phase, with its cause. "Stopped": by an abort, a client that has gone, the time limit, or a
router that drains. docs/architecture.md has the diagram, generated from this table."""
