"""Fixtures of the tests with sockets."""

import pytest
import zmq


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
