"""The phases of a request, and the legal transitions between them."""

from collections.abc import Mapping
from enum import Enum


class RequestPhase(Enum):
    """Phases from a request's arrival to the end of its last attempt. The value describes the phase."""

    TOKENIZING = "the prompt is being tokenized"
    QUEUED = "the request waits for a permit"
    PLACING = "the request waits for peers that can accept its first attempt"
    ON_RING = "an attempt is running"
    CANCELLING = "a Cancel was sent for the attempt, and its terminal rows are awaited"
    RECOVERING = "the attempt was lost, and the request waits for peers that can accept the next one"
    PAUSED = "the client reads too slowly: no attempt and no permit until it has caught up"
    ENDED = "no attempt is running, and none will follow"


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
"""Every legal transition, with its cause. "Stopped" means by an abort, a client that disconnected, the time limit, or a
draining router. The diagram in docs/architecture.md is generated from this table."""
