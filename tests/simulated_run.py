"""A run as its page may meet it, made up: certificates of many rounds and leases of many peers, unsigned. For what the page costs."""

import math
import random

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.web.facts import Holder, RunFacts, StageFacts
from dilocox_peer.wire.chain import Certificate, Entry, Report

START_S = 1_700_000_000.0
ROUND_S = 40


def simulated_manifest(rounds: int, stages: int, name: str = "simulated", admission: str = "open") -> Manifest:
    """Signed by an owner made up for it."""
    settings = {"total": rounds, "inner_steps": 16}
    made = preset("tiny", stages={"count": stages}, rounds=settings, run={"name": name}, admission={"mode": admission})
    return made.signed_by(SigningKey(bytes(32)))


def peer_names(stage: int, count: int) -> list[PeerId]:
    return [SigningKey(sha256(f"{stage} {number}".encode())).peer_id for number in range(count)]


def simulated_chain(
    manifest: Manifest, stage: int, peers: list[PeerId], rounds: int, rng: random.Random, roster_size: int = 16
) -> list[Certificate]:
    """Rounds of a roster that changes slowly through the peers; nothing is signed."""
    place, certificates = genesis_of(manifest, stage), []

    def append(value, view):
        nonlocal place
        certificate = Certificate(stage, place.head, view, 0, value, tuple((peer, bytes(72)) for peer in value.roster))
        certificates.append(certificate)
        place = place.then(certificate)

    roster = tuple(sorted(peers[:roster_size]))
    append(place.view_change(roster), 1)
    for number in range(rounds):
        first = number // 4 % len(peers)
        roster = tuple(sorted((peers + peers)[first : first + min(roster_size, len(peers))]))
        entries = []
        for peer in place.roster:
            loss = 2.0 + 3.5 * math.exp(-number / (0.2 * rounds + 1)) + rng.gauss(0, 0.03)
            report = Report(
                8000, 90_000, 1500, 100, 0, round(1e6 * loss), int(1000 * (START_S + ROUND_S * (number + 1)))
            )
            entries.append(
                Entry(peer, 1, sha256(f"{peer} {number}".encode()), 40_000, rng.randint(12, 20), b"", report)
            )
        append(place.round_value(entries, roster), place.view)
    return certificates


def simulated_facts(
    manifest: Manifest, *, peers: int, rounds: int, seed: int = 0, names: list[str] | None = None
) -> RunFacts:
    """peers: of all stages together. names: that peers give themselves, the first ones."""
    rng, stages, given = random.Random(seed), [], list(names or [])
    for stage in range(manifest.stages.count):
        known = peer_names(stage, peers // manifest.stages.count)
        chain = simulated_chain(manifest, stage, known, rounds, rng)
        holders = tuple(
            Holder(
                peer, 1000.0 + 50 * number, rounds, "direct" if number % 4 else "relayed", number % 17 != 5,
                number % 11 == 3, given.pop(0) if given else "",
            )
            for number, peer in enumerate(known)
        )  # fmt: skip
        stages.append(StageFacts(chain, holders, chain[-1].value.roster))
    validation = {number: 2.05 + 3.5 * math.exp(-number / (0.2 * rounds + 1)) for number in range(8, rounds, 8)}
    return RunFacts(
        START_S + ROUND_S * rounds + 5, "dilocox://" + "0" * 64 + "@/ip4/127.0.0.1/tcp/4711", stages, validation
    )
