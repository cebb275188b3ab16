"""Key files: their content, the rotation of keys, and invalid files."""

import shutil

import pytest

from sluice.lanes.keys import ROLES, Keys, KeysError, generate, retire


def test_keygen_writes_exactly_what_a_service_needs(folder):
    secret = folder / "secret" / "engine.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (folder / "secret").stat().st_mode & 0o777 == 0o700
    for role in ("router", "detok"):
        (folder / "secret" / f"{role}.key").unlink()
    keys = Keys(folder, "engine")
    assert keys.own.public.decode() == (folder / "public" / "engine.key").read_text().strip()
    assert len({keys.public(role) for role in ROLES}) == 3
    with pytest.raises(KeysError, match=r"secret/router\.key"):
        Keys(folder, "router")


def test_a_former_key_stays_valid_after_a_new_one(folder):
    keys = Keys(folder, "router")
    (first,) = keys.public("engine")
    generate(folder, "engine")
    second, former = keys.public("engine")
    assert former == first != second
    generate(folder, "engine")
    assert keys.public("engine")[1:] == (second,)
    assert Keys(folder, "engine").own.public == keys.public("engine")[0]


def test_after_a_rotation_the_former_key_is_invalid(folder):
    keys = Keys(folder, "router")
    with pytest.raises(KeysError, match=r"public/engine.key contains one key: there is no former key"):
        retire(folder, "engine")
    generate(folder, "engine")
    newest, former = keys.public("engine")
    retire(folder, "engine")
    assert keys.public("engine") == (newest,)
    assert keys.admits(former) is None
    assert Keys(folder, "engine").own.public == newest


def test_a_key_that_is_still_in_use_is_not_removed(folder):
    """The new secret key has not been written yet."""
    secret = folder / "secret" / "engine.key"
    content = secret.read_bytes()
    generate(folder, "engine")
    secret.write_bytes(content)
    before = Keys(folder, "router").public("engine")
    with pytest.raises(KeysError, match="does not belong to the newest key"):
        retire(folder, "engine")
    assert Keys(folder, "router").public("engine") == before


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("secret/engine.key", None, "cannot read"),
        ("secret/engine.key", b"short", "40 characters"),
        ("secret/engine.key", b"~" * 40, "40 characters"),
        ("secret/engine.key", b"a" * 40, "does not belong to any key"),
        ("secret/engine.key", b"a" * 40 + b"\n" + b"b" * 40, r"one key \(got 2\)"),
        ("public/router.key", None, "cannot read"),
        ("public/router.key", b"", "40 characters"),
        ("public/router.key", b"\xff" * 40, "40 characters"),
    ],
)
def test_a_bad_key_file_is_refused_with_its_reason(folder, file, content, message):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o600)
    with pytest.raises(KeysError, match=message) as raised:
        Keys(folder, "engine")
    assert file in str(raised.value)


def test_a_secret_that_all_users_can_read_is_refused(folder):
    (folder / "secret" / "engine.key").chmod(0o604)
    with pytest.raises(KeysError, match="accessible to all users"):
        Keys(folder, "engine")


def test_keys_stay_in_effect_after_their_files_are_gone(folder):
    keys = Keys(folder, "engine")
    own_key, router_key = keys.own, keys.public("router")
    shutil.rmtree(folder)
    assert (keys.own, keys.public("router")) == (own_key, router_key)
