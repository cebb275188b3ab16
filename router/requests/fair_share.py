"""Whose turn it is: tenants by the service that they had, in tokens that really were computed.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the tenant that had the
least, for its weight, goes first. One that comes back begins where the least of those present stands, so being away
earns nothing; what it had beyond that is not forgotten as long as somebody else is present.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

PROMPT_COST = 1.0
"""Of a prompt token that is computed."""
CACHED_COST = 0.1
"""Of one that was cached."""
OUTPUT_COST = 2.0


class FairShare:
    """The counters. A tenant is present while it has a request here, waiting or live."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: a tenant of weight 2 gets twice what one of weight 1 gets, which all others have."""
        self._weights = dict(weights)
        self._served: dict[str, float] = {}
        """Cost over weight, of those present and of those who had more than these."""
        self._present: Counter[str] = Counter()
        """Requests."""

    @property
    def tenants(self) -> int:
        """Those present."""
        return len(self._present)

    def requests(self, tenant: str) -> int:
        """Of this tenant, here now."""
        return self._present[tenant]

    def enter(self, tenant: str) -> None:
        """A request comes."""
        if tenant not in self._present:
            floor = min((self._served[other] for other in self._present), default=0.0)
            behind = [other for other, served in self._served.items() if other not in self._present and served <= floor]
            for other in behind:
                del self._served[other]
            self._served[tenant] = max(floor, self._served.get(tenant, 0.0))
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """It has gone."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        if not self._present:
            self._served.clear()

    def charge(self, tenant: str, cost: float) -> None:
        """Of a request that is here."""
        self._served[tenant] += cost / self._weights.get(tenant, 1.0)

    def first(self, tenants: Iterable[str]) -> str:
        """Whose turn it is, of these, which are present."""
        return min(tenants, key=self._served.__getitem__)
