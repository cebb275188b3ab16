"""Which keepers of other machines an engine may ask for the blocks of a request. All of it is hints.

A ring without keepers never enters this file.
"""

from collections.abc import Sequence

from router.peers.kv_groups import KvSite
from router.peers.prefix_index import Chain, PrefixIndex
from sluice.host.address import is_local
from sluice.wire.requests import MAX_KEEPERS

MIN_TOKENS = 256
"""Tokens that a keeper must have beyond those that are on the engine's machine. Engines ask for no fewer."""


def keepers_for(
    reader: KvSite, computed: KvSite, caches: Sequence[tuple[KvSite, PrefixIndex]], chain: Chain, block_tokens: int
) -> tuple[str, ...]:
    """Addresses of the keepers that `reader` should ask, the likeliest first.

    `computed`: where an earlier attempt has computed the request. `caches`: what is known of the caches of living
    engines, then of lost ones. `chain`: hashes of the prompt's blocks, each of `block_tokens` tokens.
    """
    found = [computed.keeper] if _can_ask(reader, computed) else []
    here = [cache.num_reported(chain, 0) for site, cache in caches if site == reader]
    longest, keeper = max(here, default=0) + MIN_TOKENS // max(1, block_tokens) - 1, ""
    for site, cache in caches:
        # The first one may be lost together with its machine.
        if _can_ask(reader, site) and site.keeper not in found and (blocks := cache.num_reported(chain, 0)) > longest:
            longest, keeper = blocks, site.keeper
    return tuple([*found, *filter(None, [keeper])][:MAX_KEEPERS])


def _can_ask(reader: KvSite, owner: KvSite) -> bool:
    """Whether the owner's blocks are of use, and on another machine: on this one they are read without a keeper."""
    elsewhere = owner.group != reader.group and owner.keeper not in ("", reader.keeper)
    # On another machine, an address within this one would be that of someone else.
    reachable = not is_local(owner.keeper) or is_local(reader.keeper)
    return elsewhere and reachable and owner.layout == reader.layout
