"""The page section of the speculation benchmark."""

from msgspec.structs import replace

from bench.topics import speculation
from bench.topics.speculation import NOISE, SpeculationPoint
from tests.fakes.measurements import RESULTS

ROUNDS = [0.9, 0.97, 0.94, 1.0, 0.93]
CLOSE = SpeculationPoint(NOISE, 1, 1000.0, 0.94, 0.0, ROUNDS)


def with_first(point):
    result = RESULTS["speculation"]()
    other_points = [each for each in result.points if (each.kind, each.batch) != (point.kind, point.batch)]
    return replace(result, points=[point, *other_points])


def test_a_cell_shows_the_quartiles_of_its_rounds():
    (speeds, *_) = speculation.section(with_first(CLOSE)).tables
    (row,) = (row for row in speeds.rows if row[0] == NOISE)
    assert row[1] == "0.94× (0.93–0.97)"


def test_the_lowest_ratio_is_reported_with_its_rounds():
    least = replace(CLOSE, speed_up=0.5)
    answers = " ".join(speculation.section(with_first(least)).answers)
    assert "**0.50×** (noise, 1 at a time; 5 rounds, half of them 0.93 to 0.97; goal: 0.95×)" in answers


def test_the_rule_for_more_rounds_is_described():
    question = speculation.section(RESULTS["speculation"]()).question
    assert "Cells below 1.05× after 3 rounds are measured in 4 more rounds in each of 3 more starts" in question


def test_results_without_rounds_show_only_the_ratio():
    result = RESULTS["speculation"]()
    section = speculation.section(replace(result, points=[replace(each, ratios=[]) for each in result.points]))
    assert "more starts" not in section.question
    assert "(" not in "".join(cell for row in section.tables[0].rows for cell in row[1:])


def test_the_picture_has_a_bar_for_the_rounds_of_each_cell():
    result = RESULTS["speculation"]()
    axes = speculation.draw(result).axes[0]
    assert len(axes.collections) == len(result.points)
