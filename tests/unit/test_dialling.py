"""Who is dialled where more are announced than may be."""

from dilocox_peer.peer.links.dialling import (
    IN_VAIN_S,
    MAX_ADDRESSES,
    MAX_DIALLED,
    MAX_NEARER,
    Dial,
    Dialling,
    HangUp,
    LinkAddress,
)
from dilocox_peer.types import LinkId, PeerId


def _lease(number: int) -> LinkAddress:
    return LinkAddress(PeerId(f"p{number:03d}"), LinkId(f"link{number:03d}"), (f"address {number}",))


def _dialled_after(minutes: int, announced: range, real: range) -> tuple[set[LinkId], set[LinkId]]:
    """Which links are up, and all that were ever dialled. real: whose links come up as soon as they are dialled."""
    dialling, up, ever = Dialling(), set[LinkId](), set[LinkId]()
    for minute in range(minutes):
        now = 60.0 * minute
        if minute % 2 == 0:
            dialling.want([_lease(number) for number in announced])
        if dialling.deadline > now:
            continue
        for order in dialling.due(now, up):
            if isinstance(order, HangUp):
                assert order.link not in up, "nobody who is linked makes room"
            else:
                ever.add(order.link)
        assert len(dialling.dialled) <= MAX_DIALLED
        up = {_lease(number).link for number in real} & set(dialling.dialled)
    return up, ever


def test_made_up_leases_make_room_for_peers_that_are_there() -> None:
    """Those of the lowest rank were dialled for ever, whether they were there or not."""
    up, ever = _dialled_after(40, announced=range(300), real=range(280, 300))
    assert up == {_lease(number).link for number in range(280, 300)}
    assert len(ever) == 300


def test_names_that_are_new_at_each_look_do_not_keep_a_neighbour_undialled_that_was_away() -> None:
    """It was dialled for three minutes in two hours."""
    dialling, neighbour, dialled_at = Dialling(), LinkAddress(PeerId("neighbour"), LinkId("neighbour"), ("there",)), []
    for now in range(0, 1800, 30):
        of_look = (f"made up {now // 120} {number}" for number in range(128))
        made_up = [LinkAddress(PeerId(name), LinkId(name), (name,)) for name in of_look]
        dialling.want([neighbour, *made_up[: 128 if now else MAX_DIALLED - 1]])
        dialling.due(now, ())
        if neighbour.link in dialling.dialled:
            dialled_at.append(now)
    assert 0 in dialled_at
    assert max(dialled_at) > 2 * IN_VAIN_S


def test_who_is_linked_stays_dialled() -> None:
    up, _ = _dialled_after(60, announced=range(300), real=range(40))
    assert up == {_lease(number).link for number in range(40)}


def test_nobody_makes_room_where_there_is_room_for_all() -> None:
    dialling = Dialling()
    dialling.want([_lease(number) for number in range(MAX_DIALLED)])
    assert len(dialling.due(0.0, ())) == MAX_DIALLED
    assert dialling.deadline == float("inf")
    assert dialling.due(10 * IN_VAIN_S, ()) == []


def test_room_is_made_for_the_first_that_wait() -> None:
    dialling = Dialling()
    dialling.want([_lease(number) for number in range(MAX_DIALLED + 1)])
    up = {_lease(number).link for number in range(1, MAX_DIALLED)}
    dialling.due(0.0, ())
    assert dialling.due(IN_VAIN_S - 1.0, up) == []
    orders = dialling.due(IN_VAIN_S, up)
    waiting = _lease(MAX_DIALLED)
    assert orders == [HangUp(_lease(0).link), Dial(waiting.link, waiting.addresses)]


def test_what_is_announced_on_this_network_pushes_out_nothing_that_leases_say() -> None:
    dialling, lease = Dialling(), _lease(1)
    dialling.want([lease])
    dialling.due(0.0, ())
    for number in range(6):
        announced = tuple(f"made up {number} {each}" for each in range(16))
        [order] = dialling.nearer(lease.link, announced)
        assert order.addresses == (*announced[:MAX_NEARER], *lease.addresses)
    assert dialling.nearer(lease.link, ("near",))[0].addresses[0] == "near"
    assert dialling.nearer(lease.link, ("near",)) == []
    dialling.want([lease])
    assert dialling.due(1.0, ()) == [], "as it is dialled"


def _all_name(link: LinkId, numbers: range) -> list[LinkAddress]:
    return [LinkAddress(PeerId(f"p{number:03d}"), link, (f"address {number}",)) for number in numbers]


def test_an_order_holds_what_many_leases_say_of_a_link_and_what_is_announced() -> None:
    dialling, link = Dialling(), LinkId("link")
    leases = _all_name(link, range(MAX_ADDRESSES - MAX_NEARER))
    dialling.want(leases)
    dialling.due(0.0, ())
    [order] = dialling.nearer(link, tuple(f"near {each}" for each in range(16)))
    assert len(order.addresses) == MAX_ADDRESSES
    assert dialling.nearer(link, order.addresses) == []
    dialling.want(leases)
    assert dialling.due(1.0, ()) == []


def test_many_leases_that_name_anothers_link_do_not_keep_it_from_being_dialled_where_it_is() -> None:
    dialling, link, dialled = Dialling(), LinkId("link"), set[str]()
    leases = _all_name(link, range(500))
    for look in range(9):
        dialling.want(leases)
        for order in dialling.due(60.0 * look, ()):
            assert isinstance(order, Dial)
            assert len(order.addresses) <= MAX_ADDRESSES
            dialled |= set(order.addresses)
    assert dialled == {text for lease in leases for text in lease.addresses}
