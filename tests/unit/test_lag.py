from dilocox_peer.peer.lag import LoopLag


def test_the_longest_standstill_is_told_beside_the_99th_percentile():
    lag = LoopLag()
    assert (lag.p99_ms, lag.max_ms) == (0.0, 0.0)
    lag.late_s.extend([0.001] * 999 + [1.5])
    assert (lag.p99_ms, lag.max_ms) == (1.0, 1500.0)
