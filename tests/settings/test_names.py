"""Names that users write: `module:function`, and names of options."""

import re
import sys
from dataclasses import dataclass, replace
from inspect import signature

import pytest

from sluice.settings.names import check_options, checks_options, find_function


@pytest.mark.parametrize("name", ["json", "json:", ":dumps", "no_such_module:f", "json:nothing", "json:__name__"])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(ValueError, match=f"^stats_callback: '{name}' cannot be used: "):
        find_function("stats_callback", name)


def test_a_function_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_statistics.py").write_text("def echo(text): return text\n")
    monkeypatch.chdir(tmp_path)
    assert find_function("stats_callback", "my_statistics:echo")("x") == "x"
    assert str(tmp_path) not in sys.path
    sys.modules.pop("my_statistics")


def test_an_unknown_option_names_what_to_write_in_its_place():
    known, elsewhere = {"stop", "seed"}, {"stop_strings": "'stop'", "regex": "guided={'regex': ...}"}
    check_options(["seed", "stop"], known, elsewhere)
    for name, hint in {
        "sead": "; did you mean 'seed'?",
        "stop_strings": "; did you mean 'stop'?",
        "stop_stringz": "; did you mean 'stop'?",
        "regex": "; did you mean guided={'regex': ...}?",
        "colour": "",
    }.items():
        with pytest.raises(TypeError, match=f"^{re.escape(f'unknown option {name!r}{hint}')}$"):
            check_options([name], known, elsewhere)


def test_a_constructor_that_checks_its_options():
    @checks_options({"b": "'a'"})
    @dataclass(frozen=True, slots=True)
    class Options:
        a: int = 0

    assert (Options(1), replace(Options(), a=2).a) == (Options(a=1), 2)
    assert list(signature(Options).parameters) == ["a"]
    with pytest.raises(TypeError, match=r"unknown option 'b'; did you mean 'a'\?"):
        Options(b=1)
