import pytest

from router.peers.discovery import AddressError, Addresses, resolve_host


class Names:
    def __init__(self):
        self.known = {}

    async def __call__(self, host, port):
        if host not in self.known:
            raise OSError("no such name")
        return frozenset(f"tcp://{ip}:{port}" for ip in self.known[host])


async def test_fixed_addresses_are_their_own_aliases():
    addresses = Addresses(("ipc:///tmp/a", "tcp://10.0.0.1:5", "tcp://[::1]:6"))
    every = {address: frozenset({address}) for address in ("ipc:///tmp/a", "tcp://10.0.0.1:5", "tcp://[::1]:6")}
    assert addresses.unresolved == every
    assert await addresses.look_up() == every


@pytest.mark.parametrize("prefix", ["dns://", "dns:"])
async def test_a_dns_name_is_one_peer_per_address_and_follows_changes(prefix):
    names = Names()
    addresses = Addresses((f"{prefix}engines:7",), names)
    assert addresses.unresolved == {}
    assert await addresses.look_up() == {}
    names.known["engines"] = ["10.0.0.1", "10.0.0.2"]
    assert set(await addresses.look_up()) == {"tcp://10.0.0.1:7", "tcp://10.0.0.2:7"}
    names.known["engines"] = ["10.0.0.2", "10.0.0.3"]
    assert set(await addresses.look_up()) == {"tcp://10.0.0.2:7", "tcp://10.0.0.3:7"}
    del names.known["engines"]
    assert set(await addresses.look_up()) == {"tcp://10.0.0.2:7", "tcp://10.0.0.3:7"}


async def test_a_host_name_is_one_peer_that_may_report_its_ip_address():
    names = Names()
    names.known["engine-0"] = ["10.0.0.9"]
    addresses = Addresses(("tcp://engine-0:7",), names)
    assert addresses.unresolved == {"tcp://engine-0:7": frozenset({"tcp://engine-0:7"})}
    assert await addresses.look_up() == {"tcp://engine-0:7": frozenset({"tcp://engine-0:7", "tcp://10.0.0.9:7"})}


async def test_the_systems_resolver():
    assert "tcp://127.0.0.1:7" in await resolve_host("localhost", 7)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "engine",
        "tcp://",
        "tcp://a",
        "tcp://a:b",
        "tcp://a:0",
        "tcp://a:70000",
        "ipc://",
        "ipc://@",
        "dns://a",
        "http://a:1",
        "file://",
        "file:///",
        "file://a",
        "tcp://a b:1",
        "tcp://-:1",
    ],
)
def test_invalid_addresses_are_named(entry):
    with pytest.raises(AddressError, match=entry or "''"):
        Addresses((entry,))
