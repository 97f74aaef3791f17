"""The three overlaps of peer/training/pace.py, row by row."""

from dataclasses import replace

import pytest

from dilocox_peer.peer.training.pace import Duty, Situation, next_step

TRAINING = Situation(
    overlap="arrival",
    ready=True,
    busy=False,
    due=False,
    may_offer=True,
    offered=False,
    waiting=0,
    training_round=3,
    merged_round=2,
    last_round=8,
)


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
def test_a_round_that_is_over_and_free_to_offer_closes(overlap):
    assert next_step(replace(TRAINING, overlap=overlap, due=True)) is Duty.CLOSE


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
def test_nothing_is_decided_while_something_runs_or_state_is_missing(overlap):
    over = replace(TRAINING, overlap=overlap, due=True, waiting=1)
    assert next_step(replace(over, busy=True)) is Duty.TRAIN
    assert next_step(replace(over, ready=False)) is Duty.TRAIN


def test_arrival_merges_at_once_and_trains_on_while_it_waits():
    assert next_step(replace(TRAINING, offered=True, may_offer=False)) is Duty.TRAIN
    assert next_step(replace(TRAINING, offered=True, may_offer=False, due=True)) is Duty.TRAIN
    assert next_step(replace(TRAINING, waiting=1)) is Duty.MERGE


def test_one_step_merges_only_at_the_end_of_the_next_round_and_waits_there():
    one_step = replace(TRAINING, overlap="one-step")
    assert next_step(replace(one_step, waiting=1)) is Duty.TRAIN
    assert next_step(replace(one_step, waiting=1, due=True)) is Duty.MERGE
    assert next_step(replace(one_step, offered=True, may_offer=False, due=True)) is Duty.HOLD


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
def test_a_joiner_that_is_not_in_the_roster_yet_trains_on(overlap):
    assert next_step(replace(TRAINING, overlap=overlap, due=True, may_offer=False)) is Duty.TRAIN


def test_one_step_that_fell_behind_catches_up():
    assert next_step(replace(TRAINING, overlap="one-step", waiting=2)) is Duty.MERGE


def test_none_merges_at_once():
    assert next_step(replace(TRAINING, overlap="none", waiting=1)) is Duty.MERGE


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
def test_after_the_last_close_nothing_is_trained_and_its_certificate_ends_the_run(overlap):
    last = replace(TRAINING, overlap=overlap, training_round=9, merged_round=7, offered=True, may_offer=False)
    assert next_step(last) is Duty.HOLD
    assert next_step(replace(last, waiting=1)) is Duty.MERGE
    assert next_step(replace(last, merged_round=8)) is Duty.FINISH


def test_a_late_peer_finishes_without_its_own_last_close():
    assert next_step(replace(TRAINING, training_round=8, merged_round=8)) is Duty.FINISH
