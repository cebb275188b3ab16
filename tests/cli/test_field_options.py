"""Errors name the options of the command line in place of API fields."""

import grpc
import pytest
from typer.main import get_command

from sluice.cli.commands import app
from sluice.cli.common import OPTIONS
from sluice.v1 import generation_pb2 as pb
from tests.fakes.failures import Failure, bad_request

SET_NO_FIELD = {
    "--address",
    "--chat",
    "--image",
    "--stats",
    "--tenant",
    "--tls-ca",
    "--tls-cert",
    "--tls-key",
    "--token",
}


def test_the_table_names_real_options_and_fields() -> None:
    generate = get_command(app).commands["generate"]
    # The prompt has no option, only the name that the help shows.
    options = {parameter.metavar if parameter.name == "text" else parameter.opts[0] for parameter in generate.params}
    assert set(OPTIONS.values()) | SET_NO_FIELD == options
    for path in OPTIONS:
        kind = pb.GenerationSpec.DESCRIPTOR
        for name in path.split(".")[1:]:
            kind = kind.fields_by_name[name].message_type


@pytest.mark.parametrize(
    ("field", "description", "expected"),
    [
        (
            "spec.n",
            "is 4, must be at most spec.sampling.beam_search.width, which is 2",
            "error: --n: is 4, must be at most --beams, which is 2\n",
        ),
        ("spec.guided.ebnf", "cannot be compiled", "error: --grammar: cannot be compiled\n"),
        ("spec.engine_deaths", "is 9.", "error: spec.engine_deaths: is 9.\n"),
    ],
)
def test_a_refused_field(sluice, script, field, description, expected) -> None:
    script.failure = bad_request(field, description)
    result = sluice("generate", "x")
    assert (result.exit_code, result.stderr) == (1, expected)


def test_a_refused_token(sluice, script) -> None:
    script.failure = Failure(grpc.StatusCode.UNAUTHENTICATED, "the call has no token")
    assert sluice("generate", "x").stderr == "error: the call has no token (--token or SLUICE_TOKEN)\n"
