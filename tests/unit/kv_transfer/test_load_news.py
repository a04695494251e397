"""Who watches hears of sequences that came or went soon, however slow the period, and not too often."""

from __future__ import annotations

from kv_transfer.load_news import LoadNews


def _told(*num_seqs: int, now: float = 0.0) -> LoadNews:
    news = LoadNews(1.0, min_period_s=0.05)
    news.told(now, *num_seqs)
    return news


def test_the_first_load_is_due_at_once() -> None:
    assert LoadNews(1.0).is_due(0.0, 0, 0)


def test_a_load_without_news_is_due_each_period() -> None:
    news = _told(1, 2, now=5.0)
    assert not news.is_due(5.999, 1, 2)
    assert news.is_due(6.0, 1, 2)


def test_a_sequence_that_ends_or_begins_makes_the_load_due_but_not_too_often() -> None:
    for num_seqs in ((0, 2), (1, 1), (1, 3), (0, 0)):
        news = _told(1, 2, now=5.0)
        assert not news.is_due(5.049, *num_seqs)
        assert news.is_due(5.05, *num_seqs)


def test_one_that_came_while_another_ended_is_news_though_the_counts_are_the_same() -> None:
    news = _told(0, 1)
    news.arrived()
    assert news.is_due(0.06, 0, 1)
    news.told(0.06, 0, 1)
    assert not news.is_due(0.9, 0, 1)


def test_a_period_that_is_shorter_than_the_shortest_holds() -> None:
    news = LoadNews(0.01)
    news.told(0.0, 0, 0)
    assert news.is_due(0.01, 1, 0)
