"""New processes at an address, and late messages of former ones."""

from sluice.wire.heartbeats import MAX_FORMER, Epochs


def test_the_first_epoch_replaces_no_other():
    assert not Epochs().replaced_by(1)
    assert not Epochs().is_former(1)
    assert Epochs().after(0) == Epochs(0)


def test_a_new_epoch_replaces_the_latest_once_and_a_former_one_never():
    epochs = Epochs().after(1)
    assert not epochs.replaced_by(1)
    assert epochs.replaced_by(2)
    epochs = epochs.after(2)
    assert epochs == Epochs(2, (1,))
    assert epochs.is_former(1)
    assert not epochs.replaced_by(1)
    assert epochs.after(1) == epochs == epochs.after(2)


def test_the_number_of_former_epochs_is_bounded():
    epochs = Epochs()
    for epoch in range(MAX_FORMER + 3):
        epochs = epochs.after(epoch)
    assert epochs.former == tuple(range(2, MAX_FORMER + 2))
