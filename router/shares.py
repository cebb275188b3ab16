"""Shares of tenants: in work that takes time, and in a limited space."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping


def of_tenant(tenant: str) -> str:
    """The words that name the tenant in messages about its share. Empty if there is no tenant."""
    return f" of the tenant {tenant!r}" if tenant else ""


class FairShare:
    """Decides which tenant is next: the one with the least service relative to its weight, by costs actually charged.

    Implements virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant
    is present while it has a waiting or live request. A tenant that returns starts at the counter of the least-served
    present tenant, so absence earns no credit; a higher counter is remembered while any tenant is present.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """A tenant of weight 2 gets twice the service of a tenant of weight 1, the default."""
        self._weights = dict(weights)
        self._served: dict[str, float] = {}
        """Cost divided by weight, of the present tenants and of absent ones whose counter is higher than theirs."""
        self._present: Counter[str] = Counter()
        """Number of waiting and live requests by tenant."""

    @property
    def tenants(self) -> int:
        """Number of present tenants."""
        return len(self._present)

    def requests(self, tenant: str) -> int:
        return self._present[tenant]

    def enter(self, tenant: str) -> None:
        if tenant not in self._present:
            floor = min((self._served[other] for other in self._present), default=0.0)
            # Absent tenants at or below the floor would start at the floor anyway, so forget them.
            forgotten = [
                other for other, served in self._served.items() if other not in self._present and served <= floor
            ]
            for other in forgotten:
                del self._served[other]
            self._served[tenant] = max(floor, self._served.get(tenant, 0.0))
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        if not self._present:
            self._served.clear()

    def charge(self, tenant: str, cost: float) -> None:
        self._served[tenant] += cost / self._weights.get(tenant, 1.0)

    def first(self, tenants: Iterable[str]) -> str:
        """The next of these tenants, all of which must be present."""
        return min(tenants, key=self._served.__getitem__)


class SharedSpace:
    """A limited space, such as places in a queue or bytes of memory. Each holder may have half of what others leave.

    So a newcomer always finds room, and n greedy holders end with 1 / (n + 1) of the space each: dynamic thresholds
    (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[Hashable] = Counter()
        self.total = 0

    def limit_of(self, holder: Hashable) -> int:
        """How much this holder may have in total now."""
        return max(0, self._limit - (self.total - self._held[holder])) // 2

    def has_room(self, holder: Hashable, size: int) -> bool:
        """Whether the holder may take this much more. A single item of any size fits into an empty space."""
        return not self.total or self._held[holder] + size <= self.limit_of(holder)

    def take(self, holder: Hashable, size: int) -> None:
        self._held[holder] += size
        self.total += size

    def release(self, holder: Hashable, size: int) -> None:
        self.total -= size
        self._held[holder] -= size
        if not self._held[holder]:
            del self._held[holder]
