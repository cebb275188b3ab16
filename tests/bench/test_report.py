import pytest
from rich.console import Console

from bench.catalog import TOPICS
from bench.harness.origin import origin
from bench.page import OUT, Measured, load, save, show, write_page
from tests.fakes.measurements import RESULTS


@pytest.fixture(params=list(TOPICS))
def part(request):
    return request.param


@pytest.fixture
def measured(part):
    return Measured(origin(["--quick"], 2), RESULTS[part]())


@pytest.mark.quick(5)
def test_saved_results_are_loaded(part, measured, tmp_path):
    save(tmp_path, part, measured)
    assert load(tmp_path) == {part: measured}
    assert (tmp_path / f"{part}.png").read_bytes().startswith(b"\x89PNG")


def test_every_table_is_as_wide_as_its_header(part, measured):
    section = TOPICS[part].section(measured.result)
    assert section.answers
    assert section.tables
    for table in section.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_page_and_summary_contain_answers_and_origin(part, measured, tmp_path):
    write_page(tmp_path, {part: measured})
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    section = TOPICS[part].section(measured.result)
    assert all(answer in page for answer in section.answers)
    assert f"{part}.png" in page
    assert "python -m bench --quick" in page
    assert measured.origin.machine in page
    assert "no such results are committed" in page
    console = Console(record=True, width=200)
    show(console, {part: measured})
    assert section.title in console.export_text()


def test_the_committed_page_matches_the_committed_results(tmp_path):
    if (OUT / "gpu.md").is_file():
        (tmp_path / "gpu.md").touch()
    write_page(tmp_path, load(OUT))
    assert (tmp_path / "README.md").read_text("utf-8") == (OUT / "README.md").read_text("utf-8")


def test_the_page_links_to_the_gpu_page_if_it_exists(tmp_path):
    (tmp_path / "gpu.md").touch()
    write_page(tmp_path, {})
    assert "[gpu.md](gpu.md)" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_share_of_the_ring_is_router_and_detokenizers_in_the_cpu_time_of_the_servers():
    section = TOPICS["ring"].section(RESULTS["ring"]())
    assert "90% to 95%" in section.answers[0]
    assert "9.1%" in section.answers[0]
