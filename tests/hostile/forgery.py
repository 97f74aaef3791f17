"""Chains that were never agreed on, signed with the keys that an attacker has. Pure; the protocol's own classes."""

from collections.abc import Mapping, Sequence

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Place, place_after, vote_for
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Value, acceptance

SYBILS = 15
FAR_ORDER = 2**52  # a vote's order that is later than any honest one
SIZE_BYTES, MICRO_BATCHES = 1000, 8

Keys = Mapping[PeerId, SigningKey]


def sybils(number: int = SYBILS, *, seed: bytes = b"sybil") -> dict[PeerId, SigningKey]:
    """Keys that nobody but the attacker has ever heard of."""
    keys = (SigningKey(sha256(seed, bytes([index]))) for index in range(number))
    return {key.peer_id: key for key in keys}


def certified(place: Place, value: Value, view: int, keys: Keys, signers: Sequence[PeerId]) -> Certificate:
    """value at place with the votes of these signers, all of whose keys are ours."""
    message = acceptance(place.stage, place.head, view, 0, value)
    votes = tuple((peer, vote_for(message, FAR_ORDER, keys[peer].sign)) for peer in sorted(signers))
    return Certificate(place.stage, place.head, view, 0, value, votes)


def branch(
    place: Place,
    *,
    insiders: Keys,
    outsiders: Keys,
    bounds: PlanBounds,
    max_peers: int,
    state_digest: Digest,
    most: int = 1000,
) -> list[Certificate]:
    """From place to the run's last round: a roster of the insiders that are in place's, else of the outsiders; then rounds,
    as long as the plans may make them, that the outsiders join."""
    keys = {**insiders, **outsiders}
    inside = [peer for peer in place.roster if peer in keys]  # an outsider may have a seat, without a vote
    roster = inside or sorted(keys)[:max_peers]
    forged = [certified(place, place.view_change(roster), place.view + 1, keys, roster)]
    place = place.then(forged[0])
    left = 2  # a plan is of the round after next
    while left and len(forged) < most:
        left -= bounds.is_last(place.plan)
        entries = [
            Entry(
                peer, 1, sha256(b"nothing", peer.encode(), place.head), SIZE_BYTES, MICRO_BATCHES, state_digest
            ) for peer in place.roster
        ]  # fmt: skip
        plan = bounds.after(
            place.plan, codec=place.plan.codec, rank=place.plan.rank, inner_steps=2 * place.plan.inner_steps
        )
        members = tuple(dict.fromkeys([*place.roster, *sorted(outsiders)]))[:max_peers]
        value = place.round_value(entries, members, plan)
        forged.append(certified(place, value, place.view, keys, place.voters))
        place = place.then(forged[-1])
    return forged


def chain_with(genesis: Place, agreed: Sequence[Certificate], start: int, **how: object) -> list[Certificate]:
    """A whole chain: the agreed one up to height start, then a branch."""
    before = list(agreed[:start])
    return [*before, *branch(place_after(genesis, before), **how)]  # type: ignore[arg-type]
