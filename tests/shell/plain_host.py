"""A host of plain py-libp2p, which strangers to a linkd are: the beginning of scripts of their own, as libp2p and hivemind do not go into one process."""

PLAIN_HOST = """
import sys, trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.tls.transport import PROTOCOL_ID, TLSTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID, Yamux
from multiaddr import Multiaddr
from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import FrameKind

def plain_host():
    key_pair = create_new_key_pair()
    host = new_host(key_pair=key_pair, sec_opt={PROTOCOL_ID: TLSTransport(key_pair)}, muxer_opt={TProtocol(YAMUX_ID): Yamux})
    host._schedule_identify = lambda *_args, **_options: None  # linkd tells nobody who it is, and what asks ends this host at times
    return host
"""
