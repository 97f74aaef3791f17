"""Real network daemons that dial one another back, on loopback."""

import socket

from dilocox_peer.peer import dialback
from dilocox_peer.peer.dialback import DialbackVerdict
from tests.shell.conftest import MakeTransport


async def test_a_peer_that_listens_is_dialled(make_transport: MakeTransport) -> None:
    helper, _ = await make_transport("helper")
    await dialback.serve(helper)
    asker, _ = await make_transport("asker", initial_peers=helper.addresses)
    assert (await dialback.ask(asker, [helper.peer_id])).peer is True


async def test_a_port_that_is_closed_or_no_peer_is_no(make_transport: MakeTransport) -> None:
    helper, _ = await make_transport("helper")
    await dialback.serve(helper)
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))  # taken, and not listening
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and says nothing
        for name, listener in (("closed", closed), ("silent", silent)):
            announced = (f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}",)
            asker, _ = await make_transport(name, initial_peers=helper.addresses, announce_maddrs=announced)
            assert (await dialback.ask(asker, [helper.peer_id])).peer is False


async def test_another_host_is_not_dialled_and_nobody_who_answers_is_no_verdict(make_transport: MakeTransport) -> None:
    helper, _ = await make_transport("helper")
    mute, _ = await make_transport("mute", initial_peers=helper.addresses)  # of a version without the service
    await dialback.serve(helper)
    elsewhere = ("/ip4/127.0.0.2/tcp/4712",)  # not where its connection comes from
    asker, _ = await make_transport(
        "asker", initial_peers=(*helper.addresses, *mute.addresses), announce_maddrs=elsewhere
    )
    assert await dialback.ask(asker, [helper.peer_id, mute.peer_id]) == (None, None)


async def test_linkds_port_is_tried_apart_from_p2pds(make_transport: MakeTransport) -> None:
    helper, _ = await make_transport("helper")
    await dialback.serve(helper)
    asker, _ = await make_transport("asker", initial_peers=helper.addresses)
    verdict = DialbackVerdict(outgoing_only=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and not listening
        link = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{helper.peer_id}"
        await verdict.ask_entries(asker, [link])
        assert verdict.is_known_direct
        assert verdict.closed_links == {link}
        assert verdict.changed.is_set()
    [listening] = [text for text in helper.addresses if "127.0.0.1" in text][:1]
    await verdict.ask_entries(asker, [listening])
    assert not verdict.closed_links
    await verdict.ask_entries(asker, [link])
    assert verdict.closed_links == {link}
    verdict.moved()
    assert not verdict.closed_links, "on another line it may be open"
