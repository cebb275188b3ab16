"""Options that a topic does not have are refused, not ignored."""

import pytest

from bench.__main__ import _chosen, _options


def test_deaths_with_a_precision_are_those_of_a_real_model():
    assert _chosen(_options(["deaths", "ring", "--precision", "int8"])) == ["deaths_by_precision", "ring"]
    assert _chosen(_options(["deaths"])) == ["deaths"]


@pytest.mark.parametrize(
    "options", [["ring", "--precision", "int8"], ["deaths", "--rounds", "3"], ["ring", "--kv", "on"]]
)
def test_an_option_without_effect_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        _options(options)
    assert f"{options[1]}: has no effect on {options[0]}" in capsys.readouterr().err
