"""The documentation's site builds: every page is in the navigation, and every link and anchor has a target."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site_hooks import on_page_markdown

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.process
@pytest.mark.timeout(300)
def test_it_has_the_pages(site):
    pages = {page.relative_to(site).parent.as_posix() for page in site.rglob("index.html")}
    assert pages >= {".", "api", "tutorials/first_stream", "decisions", "measurements"}
    contract = (site / "reference" / "contract" / "index.html").read_text(encoding="utf-8")
    assert all(message in contract for message in ("GenerationSpec", "GuidedDecoding", "ModelService"))
    assert "AsyncClient" in (site / "reference" / "client" / "index.html").read_text(encoding="utf-8")


@pytest.mark.process
@pytest.mark.timeout(300)
def test_it_loads_nothing_from_other_hosts(site):
    loaded = r'<(?:script|img)[^>]* src="(https?:[^"]*)"|<link[^>]* rel="stylesheet"[^>]* href="(https?:[^"]*)"'
    for page in site.rglob("*.html"):
        assert re.findall(loaded, page.read_text(encoding="utf-8")) == [], page


class _Page:
    class file:  # noqa: N801
        src_uri = "tutorials/kubernetes.md"


class _Config:
    repo_url = "https://host/repo"


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("../api.md#errors", "../api.md#errors"),
        ("../../k8s/README.md#day-two", "https://host/repo/blob/main/k8s/README.md#day-two"),
        ("../../README.md", "https://host/repo/blob/main/README.md"),
        ("own_model.md", "own_model.md"),
        ("https://elsewhere/../x", "https://elsewhere/../x"),
    ],
)
def test_links_that_leave_the_folder_go_to_the_repository(link, expected):
    assert on_page_markdown(f"see [it]({link}).", page=_Page, config=_Config) == f"see [it]({expected})."
