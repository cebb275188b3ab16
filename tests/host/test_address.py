"""The address at which other services reach an inbox."""

import pytest

from sluice.host.address import check_advertised, reachable_at
from sluice.settings.read import SettingsError, read_settings
from sluice.settings.services import RING

BOUND = "tcp://0.0.0.0:7000"


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("10.0.0.5", "tcp://10.0.0.5:7000"),
        ("tcp://10.0.0.5", "tcp://10.0.0.5:7000"),
        ("engine-0.ring.svc", "tcp://engine-0.ring.svc:7000"),
        ("engine-0:31000", "tcp://engine-0:31000"),
        ("tcp://engine-0:31000", "tcp://engine-0:31000"),
        ("fd00::5", "tcp://[fd00::5]:7000"),
        ("tcp://fd00::5", "tcp://[fd00::5]:7000"),
        ("[fd00::5]", "tcp://[fd00::5]:7000"),
        ("[fd00::5]:31000", "tcp://[fd00::5]:31000"),
        ("tcp://[fd00::5]:31000", "tcp://[fd00::5]:31000"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:7000"),
        ("ipc:///run/engine", "ipc:///run/engine"),
        (None, BOUND),
    ],
)
def test_valid_advertised_addresses(advertise: str | None, address: str) -> None:
    assert reachable_at(BOUND, advertise) == address


@pytest.mark.parametrize(
    "advertise",
    [
        *("", "tcp://", "*", "0.0.0.0", "tcp://0.0.0.0:7000", "::", "[::]:7000", "[::1]x"),
        *("a:0", "a:70000", "a:*", "a:", "dns://a:7000", "http://a", "a b"),
    ],
)
def test_addresses_that_cannot_be_connected_to_are_refused(advertise: str) -> None:
    with pytest.raises(ValueError, match=r"^advertise: .*\(got "):
        check_advertised("tcp://*:7000", advertise)


def test_a_host_without_a_port_uses_the_bound_port() -> None:
    with pytest.raises(ValueError, match="advertise: needs a port, because listen is ipc:///run/engine"):
        check_advertised("ipc:///run/engine", "10.0.0.5")


@pytest.mark.parametrize("service", RING)
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*"])
def test_every_interface_needs_advertise(service: str, host: str) -> None:
    peers = ["--engines", "tcp://a:1", "--detokenizers", "tcp://b:1"] if service == "router" else []
    flags = ["--model", "m", "--listen", f"tcp://{host}:7000", *peers]
    with pytest.raises(SettingsError, match="advertise"):
        read_settings(RING[service], flags, {})
    variable = {f"{RING[service].prefix()}ADVERTISE": "fd00::5"}
    assert read_settings(RING[service], flags, variable).address("tcp://[::]:7000") == "tcp://[fd00::5]:7000"


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:*", "tcp://eth0:7000", "tcp://[fd00::5]:7000", "ipc:///run/x"])
def test_other_addresses_do_not_need_advertise(listen: str) -> None:
    check_advertised(listen, None)


@pytest.mark.parametrize("address", ["tcp://*:5900", "tcp://0.0.0.0:5900", "tcp://10.0.0.7:*"])
def test_a_keeper_must_have_an_address_to_connect_to(address: str) -> None:
    with pytest.raises(SettingsError, match="kv_keeper: other machines cannot connect"):
        read_settings(RING["engine"], ["--model", "m", "--kv-folder", "/dev/shm/kv", "--kv-keeper", address], {})


def test_a_keeper_needs_blocks_in_a_file() -> None:
    with pytest.raises(SettingsError, match="kv_keeper: needs kv_folder"):
        read_settings(RING["engine"], ["--model", "m", "--kv-keeper", "tcp://10.0.0.7:5900"], {})
