"""Updates in a row: how they are counted, and which of them are looked into."""

from lucid.amp.diagnosis._rows import Row, Seen


def test_updates_are_counted_however_many_optimizers_come() -> None:
    """Two or three skips of one update are one update; the next number goes on, and a gap begins anew."""
    row, counts = Row(), []
    for update in (4, 4, 5, 5, 5, 6, 8, 8, 9):
        row.come_to(update)
        counts.append(row.updates)
    assert counts == [1, 1, 2, 2, 2, 3, 1, 1, 2]


def test_the_powers_of_two_are_looked_into() -> None:
    """Of twenty in a row the 1st, 2nd, 4th, 8th and 16th."""
    row, looked = Row(), []
    for update in range(20):
        row.come_to(update)
        if not row.is_quiet():
            looked.append(update + 1)
    assert looked == [1, 2, 4, 8, 16]


def test_what_was_seen_earlier_is_of_the_same_backward_if_possible() -> None:
    """Of two backward passes each is told what was seen of it; a third one what was seen of the first."""
    row, first, second = Row(), Seen(notes=("first",)), Seen(notes=("second",))
    row.come_to(0)
    row.now |= {0: first, 1: second}
    row.come_to(1)
    assert [row.earlier(number).notes for number in (0, 1, 2)] == [("first",), ("second",), ("first",)]
    assert row.now == {}
