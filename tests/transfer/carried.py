"""Counts the batches that each transport carried."""

from collections import Counter

from transfer.transport import TransferFacts, TransferObserver


class Carried(TransferObserver):
    """What an agent's transports carried, by their names."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()

    def ended(self, batch: TransferFacts, seconds: float, error: BaseException | None) -> None:
        if error is None:
            self.batches[batch.transport] += 1
