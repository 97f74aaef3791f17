"""A peer's status in JSON form, for `status --json` and programs that watch a peer. Pure."""

from typing import Any

from dilocox_peer.peer.contributions import Round
from dilocox_peer.peer.status import Status, printable


def summary(status: Status, now: float) -> dict[str, Any]:
    """The JSON form, for `status --json` and programs that watch a peer."""
    health, why = status.health(now)
    joined, progress, pipeline = status.joined, status.progress, status.pipeline
    daemon = status.rates.daemon_bytes_per_s()
    return {
        "peer": status.me,
        "run": joined.run if joined is not None else None,
        "run_name": joined.run_name if joined is not None else None,
        "phase": status.phase,
        "health": health,
        "why": why,
        "paused": status.paused,
        "stage": status.stage,
        "stages": status.num_stages,
        "round": min(progress.round, status.total_rounds or progress.round) if progress is not None else None,
        "total_rounds": status.total_rounds or None,
        "eta_s": None if (left_s := status.time_left_s(now)) is None else round(left_s),
        "micro_batches": progress.micro_batches if progress is not None else 0,
        "tokens": progress.tokens if progress is not None else 0,
        "tokens_per_s": round(status.rates.tokens_per_s(), 1),
        "busy": status.busy(),
        "train_loss": _number(progress.train_loss) if progress is not None else None,
        "memory_bytes": progress.memory_bytes if progress is not None else None,
        "costs": status.costs.summary(status.rounds),
        "lag_ms_p99": progress.lag_ms_p99 if progress is not None else None,
        "lag_ms_max": progress.lag_ms_max if progress is not None else None,
        "up_bytes_per_s": round(status.rates.up_bytes_per_s(), 1),
        "down_bytes_per_s": round(status.rates.down_bytes_per_s(), 1),
        "upload_bps": progress.upload_bps or None if progress is not None else None,
        "line_bps": progress.line_bps or None if progress is not None else None,
        "queueing_ms": progress.queueing_ms if progress is not None else None,
        "link_overhead": status.link_overhead(),
        "daemon_up_bytes_per_s": round(daemon[0], 1) if daemon is not None else None,
        "daemon_down_bytes_per_s": round(daemon[1], 1) if daemon is not None else None,
        "linked": pipeline.linked if pipeline is not None else None,
        "addresses": list(status.addresses),
        "doubted": [
            {"peer": peer, "reason": reason, "proven": is_proven}
            for peer, (reason, is_proven) in status.doubted.items()
        ],
        "refused": [
            {"peer": peer, "reason": reason, "times": times} for peer, (reason, times) in status.refused.items()
        ],
        "turned_away": [
            {"who": who, "reason": reason, "for_s": round(until_s - now)}
            for who, (reason, until_s) in status.turned_away.items()
            if until_s > now
        ],
        "contributions_counted": status.contributions.share,
        "contributions_missed": (
            None
            if (missed := status.contributions.missed) is None
            else {
                "round": missed.round,
                "peers": [{"peer": peer, "why": printable(why)} for peer, why in missed.missed],
            }
        ),
        "contributions_refused": [
            {
                "peer": peer,
                "round": each.refused.round,
                "reason": printable(each.refused.reason),
                "times": each.num_refused,
            }
            for peer, each in status.contributions.by_peer.items()
            if each.refused is not None
        ],
        "contributions_clipped": [
            {
                "peer": peer,
                "round": each.clipped.round,
                "norm": each.clipped.norm,
                "median_norm": each.clipped.median_norm,
                "factor": each.clipped.factor,
                "times": each.num_clipped,
            }
            for peer, each in status.contributions.by_peer.items()
            if each.clipped is not None
        ],
        "troubles": [
            {
                "kind": each.kind,
                "stage": each.stage,
                "peers": list(each.peers),
                "stops": each.stops,
                "cause": each.cause,
                "next": each.next_words(max(0.0, now - status.troubles_at_s)),
            }
            for each in status.troubles
        ],
        "owner_wants": status.directive.wants if status.directive is not None else None,
        "owner_says": status.directive.said if status.directive is not None else "",
        "copies": [{"stage": stage, "round": number} for stage, number in sorted(status.copies.items())],
        "swarm": [
            {
                "stage": stage,
                "tokens_per_s": round(status.stage_speed(stage), 1),
                "is_whole_speed": status.stage_speed_is_whole(stage),
                "thin": status.is_thin(stage),
                "peers": [
                    {
                        "peer": peer.peer,
                        "tokens_per_s": peer.tokens_per_s,
                        "round": peer.round,
                        "reachability": peer.reachability,
                        "here": peer.is_here,
                        "paused": peer.is_paused,
                        "leader": peer.is_leader,
                    }
                    for peer in status.of_stage(stage)
                ],
            }
            for stage in status.seen_stages
        ],
        "last_round": _round_summary(status.rounds[-1], status) if status.rounds else None,
    }


def _round_summary(last: Round, status: Status) -> dict[str, Any]:
    return {
        "round": last.number,
        "contributors": last.contributors,
        "weighed": [
            {"peer": peer, "norm": norm, "clip_factor": factor}
            for peer, (norm, factor) in status.contributions.weighed.items()
        ],
        "refused": last.refused,
        "clipped": last.clipped,
        "own_included": last.own_included,
        "train_loss": _number(last.train_loss),
        "val_loss": last.val_loss,
        "codec": last.codec,
        "rank": last.rank or None,
        "inner_steps": last.inner_steps,
        "delay_s": last.delay_s,
        "bytes_sent": last.bytes_sent,
        "allreduce_bytes": round(last.allreduce_bytes),
    }


def _number(value: float) -> float | None:
    return None if value != value else round(value, 5)
