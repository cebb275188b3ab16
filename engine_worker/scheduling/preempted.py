"""Who gave memory back for others."""

from engine_worker.request import Sequence, State


class Preempted:
    """Paused sequences; `count` is how many pauses there were since the start."""

    def __init__(self) -> None:
        self.count = 0
        self._sequences: set[Sequence] = set()

    @property
    def sequences(self) -> set[Sequence]:
        """Those that have not got new blocks yet."""
        if self._sequences:
            self._sequences = {sequence for sequence in self._sequences if sequence.state is State.PAUSED}
        return self._sequences

    def add(self, sequence: Sequence) -> None:
        """It gave its blocks back, and will go on."""
        sequence.state = State.PAUSED
        sequence.request.pauses += 1
        self._sequences.add(sequence)
        self.count += 1
