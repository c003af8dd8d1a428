"""Reports of an engine's pages: what changed, everything after a gap, the same keys as those of a router."""

from __future__ import annotations

import random

import pytest

from penstock.engine import page_journal
from penstock.engine.page_journal import PageJournal
from penstock.engine.pages import PageKeys, PageLedger


def journal_of(ledger: PageLedger) -> PageJournal:
    journal = PageJournal()
    journal.watch(ledger)
    return journal


def named(ledger: PageLedger, *keys: bytes):
    """Compute pages with these keys."""
    pages = ledger.open()
    assert ledger.grow(pages, 32 * len(keys))
    ledger.name(pages, keys)
    return pages


def test_only_changes_are_reported_once_someone_asked() -> None:
    ledger = PageLedger(3, (0,))
    journal = journal_of(ledger)
    first = named(ledger, b"a", b"b")
    assert journal.take() is None, "no one asked"
    journal.ask()
    report = journal.take()
    assert (report.number, report.is_full, report.gained, report.dropped) == (1, True, [b"a", b"b"], ())
    assert report.num_blank == 1
    assert journal.take() is None
    ledger.close(first)
    assert journal.take() is None, "free pages keep their names"
    named(ledger, b"c", b"d")  # takes the page of b, which was used last
    report = journal.take()
    assert (report.number, report.is_full, sorted(report.gained), report.dropped) == (2, False, [b"c", b"d"], [b"b"])
    assert report.num_blank == 0


def test_a_key_counts_once_whatever_happened_to_it() -> None:
    ledger = PageLedger(4, (0,))
    journal = journal_of(ledger)
    journal.ask()
    journal.take()
    pages = named(ledger, b"a")
    ledger.unname(pages)
    report = journal.take()
    assert (report.gained, report.dropped) == ([], [b"a"])
    ledger.forget()
    assert journal.take().is_full, "all names are gone"


def test_too_many_changes_become_a_full_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_journal, "MAX_CHANGES", 3)
    ledger = PageLedger(10, (0,))
    journal = journal_of(ledger)
    journal.ask()
    journal.take()
    keys = [bytes([number]) for number in range(5)]
    named(ledger, *keys)
    report = journal.take()
    assert (report.is_full, report.gained) == (True, keys)
    named(ledger, b"x")
    assert journal.take().gained == [b"x"]


def test_another_ledger_is_reported_in_full() -> None:
    journal = journal_of(PageLedger(4, (0,)))
    journal.ask()
    journal.take()
    other = PageLedger(4, (16, 0))
    journal.watch(other)
    named(other, b"a")
    report = journal.take()
    assert (report.is_full, report.gained) == (True, [b"a"]), "the group that sees everything"
    nothing = PageJournal()
    nothing.watch(PageLedger(4, ()))
    nothing.ask()
    assert nothing.take().gained == ()
    nothing.watch(PageLedger(4, (16, 40)))
    assert nothing.take() is None, "its first pages may be gone, its last ones are shared"


def test_the_sum_of_reports_is_what_the_pages_hold() -> None:
    draw, ledger = random.Random(3), PageLedger(16, (0,))
    journal, known, held = journal_of(ledger), set[bytes](), []
    journal.ask()
    for _ in range(500):
        if held and (len(held) > 4 or draw.random() < 0.5):
            ledger.close(held.pop(draw.randrange(len(held))))
        elif ledger.missing(ledger.open(), 64) <= 0:
            held.append(named(ledger, *(b"%d" % draw.randrange(60) for _ in range(2))))
        if draw.random() < 0.3 and (report := journal.take()) is not None:
            known = (set() if report.is_full else known - {*report.dropped}) | {*report.gained}
            assert known == {*ledger.pools[0].names()}
    assert known


def test_salts_keep_the_keys_of_tenants_apart() -> None:
    tokens = list(range(96))

    def keys_of(salt: str, secret: bytes) -> list[bytes]:
        keys: list[bytes] = []
        PageKeys(secret).extend(keys, salt, tokens)
        return keys

    assert keys_of("one", b"s" * 16) == keys_of("one", b"s" * 16)
    assert not {*keys_of("one", b"s" * 16)} & {*keys_of("two", b"s" * 16)}
    assert not {*keys_of("one", b"s" * 16)} & {*keys_of("one", b"t" * 16)}
    late = PageJournal()
    late.keys.use_secret(b"s" * 16)
    keys: list[bytes] = []
    late.keys.extend(keys, "one", tokens)
    assert keys == keys_of("one", b"s" * 16)
