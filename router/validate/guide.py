"""Guided decoding is not built yet; its texts are bounded all the same."""

from router.validate.limits import Limits
from router.validate.violations import Violations
from sluice.v1 import sampling_pb2

FIELD = "spec.guided"
TEXTS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_guide(message: sampling_pb2.GuidedDecoding, limits: Limits, bad: Violations) -> None:
    """Nothing of the guide is compiled before this."""
    kind = message.WhichOneof("guide")
    if kind in TEXTS:
        bad.at_most(f"{FIELD}.{kind}", len(getattr(message, kind).encode()), limits.guide_bytes, "bytes")
    elif kind == "choice":
        bad.at_most(f"{FIELD}.choice.choices", message.choice.ByteSize(), limits.guide_bytes, "bytes")
