"""What leaves the device and comes back: the mechanism, on the CPU's own memory."""

import pytest
import torch

from rlpost.residents import Moved, Together


def test_tensors_come_back_bit_by_bit_and_views_with_them():
    buffer = torch.randn(1000)
    view, other = buffer[10:20].view(2, 5), torch.arange(7)
    before = [t.clone() for t in (buffer, view, other)]
    moved = Moved("the weights", lambda: [view, buffer, other])
    assert moved.bytes() == 4 * 1000 + 8 * 7 and moved.on_device
    assert moved.offload() == moved.bytes() == 4 * 1000 + 8 * 7
    assert buffer.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0 and not moved.on_device
    assert moved.offload() == 0, "it is away already"
    assert moved.onload() == 4 * 1000 + 8 * 7
    assert all(torch.equal(a, b) for a, b in zip(before, (buffer, view, other)))
    view.zero_()
    assert torch.equal(buffer[10:20], torch.zeros(10)), "still a view"
    moved.offload()
    moved.onload()
    assert torch.equal(buffer[10:20], torch.zeros(10)), "what was written since went along"


def test_what_nobody_reads_again_is_not_copied():
    gradients = torch.ones(10)
    moved = Moved("the gradients", lambda: [gradients], keep=False)
    assert moved.offload() == 0 and gradients.untyped_storage().nbytes() == 0
    assert moved.onload() == 0 and torch.equal(gradients, torch.zeros(10))


def test_touching_what_is_away_is_an_error_that_says_so():
    moved = Moved("the model's weights", lambda: [torch.ones(3)])
    moved.require()
    moved.offload()
    with pytest.raises(RuntimeError, match="the model's weights: in host memory now; .* among its residents"):
        moved.require()


def test_tensors_that_appear_later_go_along():
    state = [torch.ones(4)]
    moved = Moved("the state", lambda: state)
    moved.offload()
    moved.onload()
    state.append(torch.full((8,), 2.0))
    assert moved.offload() == 4 * 12
    moved.onload()
    assert torch.equal(state[0], torch.ones(4)) and torch.equal(state[1], torch.full((8,), 2.0))


@pytest.mark.parametrize("away", [False, True])
def test_borrowed_for_a_moment(away):
    tensor = torch.ones(4)
    moved = Moved("the state", lambda: [tensor])
    if away:
        moved.offload()
    with pytest.raises(KeyError), moved.borrowed():
        assert moved.on_device
        tensor += 1
        raise KeyError
    assert moved.on_device is not away
    moved.onload()
    assert torch.equal(tensor, torch.full((4,), 2.0))


def test_several_move_as_one():
    tensors = [torch.ones(4), torch.zeros(2)]
    both = Together([Moved("a", lambda: tensors[:1]), Moved("b", lambda: tensors[1:])])
    assert both.offload() == both.bytes() == 24 and not both.on_device
    assert both.onload() == 24 and both.on_device
