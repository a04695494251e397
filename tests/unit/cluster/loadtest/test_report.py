"""A report is read back as it was written; its page needs nothing else and shows what is in it."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import orjson
import pytest

from cluster.loadtest.html_report import render_html
from cluster.loadtest.parcel import Torn, Unwrapper, wrapped
from cluster.loadtest.record import Outcome
from cluster.loadtest.report import LoadReport, from_json, histogram, make_detail, to_json
from core.errors import InvalidConfig
from tests.unit.cluster.loadtest.records import record
from tests.unit.cluster.loadtest.reports import SLO, make_report, queue_records


@pytest.fixture(scope="module")
def found() -> LoadReport:
    return make_report(2.0, 3.6, 6.0)


def test_a_report_comes_back_as_it_was(found: LoadReport) -> None:
    assert from_json(to_json(found)) == found


def test_a_report_of_another_form_is_refused_by_name(found: LoadReport) -> None:
    tree = orjson.loads(to_json(found))
    with pytest.raises(InvalidConfig, match=r"report\.format is 99"):
        from_json(orjson.dumps({**tree, "format": 99}))
    del tree["slo"]
    with pytest.raises(InvalidConfig, match=r"report\.slo"):
        from_json(orjson.dumps(tree))
    with pytest.raises(InvalidConfig, match="not JSON"):
        from_json(b"{")


def test_rows_are_bounded_and_good_ones_marked() -> None:
    records = queue_records(4.0)
    whole, some = make_detail(0, records, SLO, 5.0), make_detail(0, records, SLO, 5.0, max_rows=50)
    assert len(whole.rows) == len(records)
    assert [row.is_good for row in whole.rows] == [SLO.is_met_by(one) for one in records]
    assert some.rows == whole.rows[:: some.every]
    assert len(some.rows) <= 50
    counted = [one for one in records if one.due_s >= 5.0]
    assert sum(whole.ttft.counts) == len(counted)


def test_a_histogram_holds_each_value_once() -> None:
    assert histogram([]).counts == ()
    assert sum(histogram([0.0, 0.0, 0.5, 2.0]).counts) == 4
    found = histogram([0.1, 0.1, 0.1])
    assert sum(found.counts) == 3
    assert len(found.edges_s) == len(found.counts) + 1


def test_the_page_needs_nothing_from_elsewhere_and_its_pictures_are_well_formed(found: LoadReport) -> None:
    page = render_html(found)
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|<script""", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert "nan" not in picture
        assert len(list(root.iter())) > 10
    assert found.verdict.headline in page
    assert "prefers-color-scheme: dark" in page


def test_each_request_is_a_dot_of_its_outcome() -> None:
    report = make_report(4.0, refused_share=0.2)
    page, rows = render_html(report), report.detail.rows
    refused = sum(row.outcome is Outcome.REFUSED for row in rows)
    good = sum(row.is_good for row in rows)
    assert 0 < refused < len(rows)
    assert page.count('<circle class="refused"') == refused
    assert page.count('<circle class="good"') == good
    assert page.count("<circle") == len(rows)


def test_a_server_s_words_are_text_and_never_markup(found: LoadReport) -> None:
    evil = '<script>alert("x")</script>'
    bad = [record(0.0, outcome=Outcome.ERROR, detail=evil), record(0.0, 0.5, 0.6)]
    detail = make_detail(0, bad, SLO, 0.0)
    verdict = replace(found.verdict, reasons=(evil,), warnings=(evil,), headline=evil)
    page = render_html(replace(found, model=evil, title=evil, detail=detail, verdict=verdict))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_a_report_without_any_answer_is_a_page_too(found: LoadReport) -> None:
    bad = [record(float(i), outcome=Outcome.ERROR, detail="no") for i in range(3)]
    page = render_html(replace(found, detail=make_detail(0, bad, SLO, 0.0)))
    assert page.count('<circle class="error"') == 3


def test_a_report_survives_a_log(found: LoadReport) -> None:
    lines = ["before", *wrapped(found), "after"]
    text = "".join(line + "\n" for line in lines)
    for size in (17, 1000, len(text)):
        unwrapper, shown = Unwrapper(), []
        for start in range(0, len(text), size):
            shown += unwrapper.feed(text[start : start + size])
        assert shown == ["before", "after"]
        assert unwrapper.report() == found


def test_a_torn_report_is_none(found: LoadReport) -> None:
    lines = list(wrapped(found))
    assert len(lines) > 2

    def read(*kept: str) -> LoadReport | None:
        unwrapper = Unwrapper()
        unwrapper.feed("".join(line + "\n" for line in kept))
        return unwrapper.report()

    assert read("nothing of the kind") is None
    with pytest.raises(Torn, match="1 of"):
        read(*lines[1:])
    with pytest.raises(Torn, match="ends after"):
        read(*lines[:-1])
    with pytest.raises(Torn, match="changed"):
        read(lines[1].replace(" 1 ", " 0 "), *lines[1:])
