"""Tokens of callers in tests, and calls with them."""

import hashlib

from sluice.v1 import admin_pb2

ALICE, BOB, ROOT = "alice-0123456789", "bob-0123456789ab", "root-0123456789a"


def bearer(token, **more):
    return (("authorization", f"Bearer {token}"), *more.items())


def sha256(token):
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def counts(client):
    return dict(client.router._access.refused)


async def list_models(client, *metadata):
    return await client.models.ListModels(admin_pb2.ListModelsRequest(), metadata=metadata or None)
