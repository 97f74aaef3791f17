"""What `status` and `pause` say of a peer, and to it."""

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.operate import peer_lines
from dilocox_peer.peer.status import Status
from dilocox_peer.peer.summary import summary
from tests.unit.dashboard_data import certified, joined, progress


def test_a_round_of_a_small_model_does_not_show_as_no_bytes(tmp_path):
    found = Status()
    found.take(joined(stages=1, stage=0), 0.0)
    found.take(progress(1), 1.0)
    found.take(certified(1, expected_rounds=400, bytes_sent=35_000), 1.0)
    assert peer_lines(summary(found, 1.0))[-1].endswith("35.0 kB sent")


def test_a_command_to_a_peer_with_a_name_of_its_own_has_the_name(tmp_path):
    assert PeerHome.at(tmp_path, "a", None).name_flag == " --name a"
    assert PeerHome.at(tmp_path, "default", None).name_flag == ""
