"""How much memory a peer holds, where the system does not say."""

import os
import resource

from dilocox_peer.peer.footprint import resident_bytes


def test_without_a_file_descriptor_it_is_not_known_and_nothing_is_raised() -> None:
    """The task that shows it ended the peer."""
    assert resident_bytes() > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        assert resident_bytes() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
