"""What is dialled for leases of peers that nobody has heard: third parties are not to be flooded by it."""

from dilocox_peer.invitation import Address, parse_multiaddr
from dilocox_peer.network.lead_budget import OF_A_LEASE, RANGE_LEADS, RANGE_LEADS_PER_S, LeadBudget
from dilocox_peer.signing import SigningKey

PEER, RELAY = (SigningKey(seed * 32).peer_id for seed in (b"p", b"r"))
SECONDS = 120
VICTIM = "/ip4/9.9.9.9/tcp/{}/p2p/{}"


def parsed(*texts: str) -> list[Address]:
    return [parse_multiaddr(text, "lease") for text in texts]


def test_however_many_leases_name_a_third_party_it_is_dialled_now_and_then() -> None:
    """Each names an address of its own first, and then ports of one that it has nothing to do with."""
    budget, dialled = LeadBudget(), 0
    for second in range(SECONDS):
        for number in range(100):
            own = f"/ip4/8.{second % 250}.{number}.1/tcp/9/p2p/{PEER}"
            found = budget.allowed(parsed(own, *(VICTIM.format(p, PEER) for p in range(1, 8))), (), float(second))
            assert found[0].text == own, "a range of its own is dialled"
            dialled += len(found) - 1
    assert 0 < dialled <= RANGE_LEADS + SECONDS * RANGE_LEADS_PER_S


def test_of_one_lease_few_addresses_of_a_range_are_dialled() -> None:
    ports = [VICTIM.format(port, PEER) for port in range(1, 9)]
    names = [f"/dns4/{host}.example/tcp/1/p2p/{PEER}" for host in "abcdefgh"]
    assert len(LeadBudget().allowed(parsed(*ports), (), 0.0)) == OF_A_LEASE
    assert len(LeadBudget().allowed(parsed(*names), (), 0.0)) == OF_A_LEASE, "all may lead to one host"


def test_ways_within_this_computer_and_through_a_relay_that_is_heard_are_free() -> None:
    budget = LeadBudget()
    local = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
    passed_on = f"/ip4/9.9.9.9/tcp/9/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"
    for _ in range(1000):
        assert len(budget.allowed(parsed(local, passed_on), {RELAY}, 0.0)) == 2
    for _ in range(1000):
        budget.allowed(parsed(passed_on), (), 0.0)
    assert budget.allowed(parsed(passed_on), (), 0.0) == [], "to a relay that was never heard it leads as any other"
