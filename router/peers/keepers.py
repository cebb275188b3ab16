"""Which keepers of other machines an engine may ask for the blocks of a request. All of it is hints.

A ring without keepers never enters this file.
"""

from collections.abc import Iterable

from router.peers.kv_groups import KvSite
from router.peers.prefix_index import Chain, PrefixIndex
from sluice.wire.requests import MAX_KEEPERS


def keepers_for(
    reader: KvSite, computed: KvSite, caches: Iterable[tuple[KvSite, PrefixIndex]], chain: Chain
) -> tuple[str, ...]:
    """Addresses of the keepers that `reader` should ask, the likeliest first.

    `computed`: where an earlier attempt has computed the request. `caches`: what is known of all engines' caches.
    `chain`: hashes of the prompt's blocks.
    """
    found = [computed.keeper] if _can_ask(reader, computed) else []
    longest, keeper = 0, ""
    for site, cache in caches:
        # The first one may be lost together with its machine.
        if _can_ask(reader, site) and site.keeper not in found and (blocks := cache.num_reported(chain, 0)) > longest:
            longest, keeper = blocks, site.keeper
    return tuple([*found, *filter(None, [keeper])][:MAX_KEEPERS])


def _can_ask(reader: KvSite, owner: KvSite) -> bool:
    """Whether the owner's blocks are of use, and on another machine: on this one they are read without a keeper."""
    elsewhere = owner.group != reader.group and owner.keeper not in ("", reader.keeper)
    return elsewhere and owner.layout == reader.layout
