"""Looking for what is about to come, where that pays."""

from transfer.tcp.reactor import LOOKS, MAX_SKIPS, Patience


def skips_until_it_looks(patience: Patience) -> int:
    skips = 0
    while not patience.looks():
        skips += 1
    return skips


def test_what_comes_while_it_is_looked_for_is_looked_for_again() -> None:
    patience = Patience()
    for _ in range(3):
        assert patience.looks() == LOOKS
        patience.paid()


def test_looking_in_vain_again_and_again_becomes_rare_and_does_not_end() -> None:
    patience = Patience()
    seen = []
    for _ in range(8):
        patience.was_in_vain()
        seen.append(skips_until_it_looks(patience))
    assert seen == [1, 3, 7, 15, 31, 63, 63, MAX_SKIPS]


def test_one_that_pays_makes_up_for_all_that_did_not() -> None:
    patience = Patience()
    for _ in range(5):
        patience.was_in_vain()
    patience.paid()
    assert skips_until_it_looks(patience) == 31
    patience.was_in_vain()
    assert skips_until_it_looks(patience) == 1
