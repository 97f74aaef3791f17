"""What a run takes on a peer's disk. Pure."""

from dilocox_peer.peer.planning.plan import KEPT_ROUNDS

STATE_BYTES = 8  # a parameter: anchor and momentum
STATES = 4  # three checkpoints, and one that is written
COPIES = 2  # of another stage's state, where there are several: the copy, and the next while it is written


def disk_bytes(parameters: int, contribution_bytes: int, peers: int, *, copied: int = 0) -> int:
    """Of one stage. peers: of it, each with a contribution of contribution_bytes a round; those of the last KEPT_ROUNDS stay, and
    older ones as long as all of them together are no larger than a state (peer/rounds/replay.py). copied: parameters of the stage whose
    copy is kept; 0: none."""
    state = STATE_BYTES * parameters
    return STATES * state + max(state, KEPT_ROUNDS * peers * contribution_bytes) + COPIES * STATE_BYTES * copied
