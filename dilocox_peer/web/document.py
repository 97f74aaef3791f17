"""The page's document: a run as it is now and how it came here, as one bounded JSON value. A fold over what was seen. Pure.

`/api/state` is this document; the page is drawn from it, and `/metrics` too. It consists of sections, each of which changes
on its own; who follows gets those that did. All sizes are bounded, whatever strangers announce.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.sizes import raw_bytes
from dilocox_peer.durations import duration
from dilocox_peer.events_of_data import TextSampled
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.planning.upkeep import StageNeeds, first_disk, upkeep
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.status import printable
from dilocox_peer.types import PeerId
from dilocox_peer.web.facts import Holder, RunFacts, StageFacts
from dilocox_peer.web.history import StageHistory, evaluations_on, thinned

FORMAT = 1
MAX_MAP_PEERS = 1024  # of all stages; a stage averages at most 64, an announcement costs a stranger nothing
MAX_CONTRIBUTORS = 512
MAX_NAME = 64
MAX_NAMES = 4096  # remembered, of peers that have left
STALLED_ROUNDS, STALLED_S = 4.0, 60.0  # so many times as long as a round takes, and no less: the run stands
MAX_TROUBLES = 16
MAX_SAMPLE = 1000  # characters of each part
UNKNOWN: Final = None

PageDocument = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """How the run does, in one word and in a sentence."""

    word: str
    why: str


class RunPage:
    """One run. Give `take` what was seen; it gives the document back, whose sections nobody changes. Not thread-safe."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tokens = manifest.inner.micro_batch * manifest.model.context  # of a micro-batch
        bounds = plan_bounds(manifest)
        layouts = [layout_of(manifest, stage) for stage in range(manifest.stages.count)]
        self.num_parameters = sum(layout.num_elements for layout in layouts)
        self._histories = [
            StageHistory(first_plan(manifest), genesis_of(manifest, stage).plan, bounds, raw_bytes(layout))
            for stage, layout in enumerate(layouts)
        ]
        self._needs = [StageNeeds.of(manifest, stage) for stage in range(manifest.stages.count)]
        self.name = printable(manifest.run.name, MAX_NAME)
        self._names: dict[str, str] = {}  # that peers gave themselves, also those that have left
        self._said: dict[PeerId, str] = {}  # at the last look
        self._validation: dict[int, float] = {}
        self._history = self._make_history()  # it and the next one are made anew when they change alone
        self._contributors = self._make_contributors()

    def take(self, facts: RunFacts) -> PageDocument:
        """The document by now."""
        followed = [
            history.follow(stage.certificates, facts.at_s)
            for history, stage in zip(self._histories, facts.stages, strict=True)
        ]
        names = {holder.peer: holder.name for stage in facts.stages for holder in stage.holders if holder.name}
        if any(followed) or names != self._said:
            self._said = names
            self._names |= {peer: printable(name, MAX_NAME) for peer, name in names.items()}
            if len(self._names) > MAX_NAMES:
                self._names = {peer: self._names[peer] for peer in names}
            self._contributors = self._make_contributors()
        validation = dict(facts.validation)
        if any(followed) or validation != self._validation:
            self._validation = validation
            self._history = self._make_history()
        return {
            "format": FORMAT,
            "run": self._run(facts),
            "now": self._now(facts),
            "stages": self._stages(facts.stages),
            "sample": _sample(facts.sampled),
            "history": self._history,
            "contributors": self._contributors,
        }

    # ---- the sections ----

    def _run(self, facts: RunFacts) -> PageDocument:
        manifest = self._manifest
        return {
            "id": manifest.run_id,
            "name": self.name,
            "owner": manifest.owner_peer,
            "stages": manifest.stages.count,
            "parameters": self.num_parameters,
            "context": manifest.model.context,
            "data": printable(manifest.data.source, MAX_NAME),
            "admission": manifest.admission.mode,
            # Without an invitation in it, the link that is served lets in those on the list alone, and nobody read.
            "join": None if manifest.admission.mode == "invite" else f"dilocox-peer join {facts.link}",
            "export": f"dilocox-peer export {facts.link if manifest.admission.mode == 'open' else 'LINK'} --out model",
            "link": facts.link,
        }

    def _now(self, facts: RunFacts) -> PageDocument:
        first = self._histories[0]
        last = first.rounds[-1] if first.rounds else None
        plan = first.plan_for(len(first.rounds) + 1)
        is_over = all(stage.is_over for stage in facts.stages)
        standing = self._standing(facts, is_over=is_over)
        holders = [holder for stage in facts.stages for holder in stage.here]
        sent, allreduce = (
            sum(getattr(history, name) for history in self._histories) for name in ("sent_bytes", "allreduce_bytes")
        )
        speed = first.micro_batches_per_s()
        losses = [each.loss for each in first.rounds[-8:] if each.loss is not None]
        newest = max(facts.validation, default=None)
        directive = first.directive
        return {
            "at_s": round(facts.at_s, 1),
            "kept_round": facts.kept_round,
            "standing": standing.word,
            "why": standing.why,
            "troubles": [
                {
                    "kind": each.kind,
                    "stage": each.stage,
                    "stops": each.stops,
                    "cause": each.cause,
                    "next": each.next_words(facts.troubles_age_s),
                }
                for each in facts.troubles[:MAX_TROUBLES]
            ],
            "round": last.number if last is not None else 0,
            "total_rounds": first.expected_rounds,
            "rounds_by_stage": [len(history.rounds) for history in self._histories],
            "steps": first.steps_done,
            "total_steps": first.total_steps,
            "owner_wants": UNKNOWN if directive is None else printable(directive.words()),
            "owner_says": "" if directive is None else printable(directive.said),
            "tokens": last.micro_batches * self._tokens if last is not None else 0,
            "tokens_per_s": UNKNOWN if speed is None or standing.word != "training" else round(speed * self._tokens, 1),
            "loss": _loss(losses[-1]) if losses else UNKNOWN,
            "val_loss": _loss(facts.validation[newest]) if newest is not None else UNKNOWN,
            "val_round": newest,
            "codec": plan.codec,
            "rank": plan.rank if plan.codec == LOW_RANK else UNKNOWN,
            "inner_steps": plan.inner_steps,
            "round_s": _rounded(first.round_s(), 2),
            "last_round_at_s": _rounded(last.at_s or None, 1) if last is not None else UNKNOWN,
            "eta_s": UNKNOWN if is_over or standing.word != "training" else _rounded(self._eta_s(facts.at_s), 0),
            "peers": len(holders),
            "peers_paused": sum(holder.is_paused for holder in holders),
            "sent_bytes": round(sent),
            "allreduce_bytes": round(allreduce),
            "times_less": round(allreduce / sent, 1) if sent and allreduce else UNKNOWN,
            "counted_share": _counted_share(self._histories),
        }

    def _stages(self, stages: Sequence[StageFacts]) -> list[PageDocument]:
        most = max(1, MAX_MAP_PEERS // len(stages))
        thin = thin_stages(stages)
        return [
            {
                "stage": number,
                "round": len(self._histories[number].rounds),
                "counted_share": _counted_share([self._histories[number]]),
                "tokens_per_s": round(stage.tokens_per_s, 1),
                "empty": not stage.here,
                "thin": number in thin,
                "not_shown": len(stage.here) - sum(holder.is_here for holder in _shown(stage, most)),
                "costs": self._costs(number, len(stage.here)),
                "peers": [self._peer(holder, number, stage) for holder in _shown(stage, most)],
            }
            for number, stage in enumerate(stages)
        ]

    def _costs(self, number: int, peers: int) -> PageDocument:
        """What a peer of the stage is to expect, in bytes. peers: that are there."""
        needs, pace = self._needs[number], self._histories[number].pace()
        found = None if pace is None else upkeep(needs, pace)
        return {
            "memory_bytes": needs.memory_bytes,
            "disk_bytes": first_disk(self._manifest, needs, peers) if found is None else found.disk_bytes,
            "sent_bytes_a_day": UNKNOWN if found is None else round(found.sent_bytes_a_day),
            "received_bytes_a_day": UNKNOWN if found is None else round(found.received_bytes_a_day),
        }

    def _peer(self, holder: Holder, number: int, stage: StageFacts) -> PageDocument:
        """round: the newest it is known to have trained; its announcement may be half a minute old."""
        counted = self._histories[number].ledger.by_peer.get(holder.peer)
        return {
            "peer": holder.peer,
            "name": self._names.get(holder.peer, ""),
            "reachability": holder.reachability,
            "tokens_per_s": round(holder.tokens_per_s, 1),
            "round": max(holder.round, counted.last_round if counted is not None else 0),
            "paused": holder.is_paused,
            "answers": holder.is_here,
            "seated": holder.peer in stage.roster,
        }

    def _make_history(self) -> PageDocument:
        """Columns, a point each in the same place of all of them."""
        rounds = self._histories[0].rounds
        points = thinned(rounds)
        validation = evaluations_on(rounds, self._validation)
        return {
            "round": [each.last.number for each in points],
            "tokens": [each.last.micro_batches * self._tokens for each in points],
            "at_s": [_rounded(each.last.at_s or None, 1) for each in points],
            "loss": [_loss(each.loss) for each in points],
            "contributors": [_rounded(each.contributors, 2) for each in points],
            "codec": [each.last.codec for each in points],
            "inner_steps": [each.last.inner_steps for each in points],
            "sent_bytes": [round(each.last.sent_bytes) for each in points],
            "allreduce_bytes": [round(each.last.allreduce_bytes) for each in points],
            "validation": {
                "round": [each.number for each, _ in validation],
                "tokens": [each.micro_batches * self._tokens for each, _ in validation],
                "at_s": [_rounded(each.at_s or None, 1) for each, _ in validation],
                "loss": [_loss(loss) for _, loss in validation],
            },
        }

    def _make_contributors(self) -> PageDocument:
        """tokens: that went through the peer's layers and counted."""
        everybody = sorted(
            (
                (stage, each)
                for stage, history in enumerate(self._histories)
                for each in history.ledger.by_peer.values()
            ),
            key=lambda pair: (-pair[1].micro_batches, -pair[1].rounds, pair[1].peer, pair[0]),
        )
        return {
            "count": len({each.peer for _, each in everybody}),
            "shown": [
                {
                    "peer": each.peer,
                    "name": self._names.get(each.peer, ""),
                    "stage": stage,
                    "rounds": each.rounds,
                    "tokens": each.micro_batches * self._tokens,
                    "last_round": each.last_round,
                }
                for stage, each in everybody[:MAX_CONTRIBUTORS]
            ],
        }

    # ---- how it does ----

    def _standing(self, facts: RunFacts, *, is_over: bool) -> Standing:
        first = self._histories[0]
        if is_over:
            return Standing("complete", f"the run is over: {self._model_words(facts.kept_round)}")
        empty = [str(number) for number, stage in enumerate(facts.stages) if not stage.here]
        worst = facts.troubles[0] if facts.troubles else None
        if len(empty) == len(facts.stages) and (worst is None or worst.kind in {"empty", "waiting"}):
            return Standing("empty", f"nobody is here: the run {self._waiting_words(facts.kept_round)}")
        if first.directive is not None and first.directive.paused:
            return Standing("paused", "the run's owner has paused it: it goes on when the owner says so")
        if worst is not None and worst.stops:
            return Standing("waiting" if worst.kind == "waiting" else "stalled", worst.words(facts.troubles_age_s))
        if not first.rounds:
            return Standing("waiting", "the first round is under way")
        since_s = facts.at_s - first.rounds[-1].at_s
        patience_s = max(STALLED_S, STALLED_ROUNDS * (first.round_s() or 0.0))
        if first.rounds[-1].at_s and since_s > patience_s:
            return Standing("stalled", f"no round was certified for {duration(since_s)}")
        return Standing("training", "rounds are being certified")

    def _model_words(self, kept_round: int | None) -> str:
        """Of a run that is over. It is read beside the page's line for `export`, and where no such line is."""
        if kept_round is None:
            return "whether its last round is kept is not known"
        is_kept = kept_round >= len(self._histories[0].rounds)
        return "its model is to be had with `dilocox-peer export`" if is_kept else "its last round is not kept yet"

    def _waiting_words(self, kept_round: int | None) -> str:
        """Of a run that nobody trains."""
        if kept_round:
            return f"is kept up to round {kept_round}, and goes on from there with who joins"
        if not self._histories[0].rounds:
            return "begins with those who join"
        return "waits for somebody who has it" if kept_round == 0 else "waits; what is kept of it is not known"

    def _eta_s(self, now: float) -> float | None:
        """Until the last round, at the pace of the newest ones; None while it is not known."""
        first = self._histories[0]
        pace, total = first.steps_per_s(), first.total_steps
        if not pace:
            return None
        steps = [] if total is None else [total - first.steps_done]
        if first.last_round is not None:
            steps.append((first.last_round - len(first.rounds)) * first.plan_for(len(first.rounds) + 1).inner_steps)
        return max(0.0, min(steps) / pace - max(0.0, now - first.rounds[-1].at_s)) if steps else None


def thin_stages(stages: Sequence[StageFacts]) -> set[int]:
    """Those that one more loss would stop, or that all wait for: as peer/status.Status.is_thin has it."""
    counts = [len(stage.here) for stage in stages]
    speeds = [stage.tokens_per_s for stage in stages]
    middle = sorted(speeds)[len(speeds) // 2]
    known = [all(holder.tokens_per_s or holder.is_paused for holder in stage.here) for stage in stages]
    return {
        number
        for number, count in enumerate(counts)
        if count == 0
        or (count == 1 and max(counts) > 1)
        or (len(stages) > 1 and known[number] and 0 < speeds[number] < middle / 2)
    }


def _shown(stage: StageFacts, most: int) -> Sequence[Holder]:
    """Of too many, those that are here, of the roster first, then the fastest: who only announces itself stands behind them."""
    if len(stage.holders) <= most:
        return stage.holders
    roster = set(stage.roster)
    return sorted(
        stage.holders, key=lambda each: (not each.is_here, each.peer not in roster, -each.tokens_per_s, each.peer)
    )[:most]


def _sample(sampled: TextSampled | None) -> PageDocument:
    """What the model writes: text of who trained it, shown as text."""
    if sampled is None:
        return {"round": UNKNOWN, "prompt": "", "text": ""}
    return {"round": sampled.round, "prompt": sampled.prompt[-MAX_SAMPLE:], "text": sampled.text[:MAX_SAMPLE]}


def _counted_share(histories: Sequence[StageHistory]) -> float | None:
    """How many of the contributions that the rosters of the newest rounds could make are in them."""
    counted, possible = (sum(each) for each in zip(*(history.counted for history in histories), strict=True))
    return _rounded(counted / possible, 4) if possible else UNKNOWN


def _loss(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def figures(document: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(name, help, value) of what is known, for Prometheus."""
    now = document["now"]
    known = [
        ("round", "Newest certified round.", now["round"]),
        ("rounds_expected", "That the run will have, as far as can be told.", now["total_rounds"]),
        ("tokens", "Trained and certified.", now["tokens"]),
        ("tokens_per_second", "Certified, over the newest rounds.", now["tokens_per_s"]),
        ("train_loss", "Nats a token in the newest round: the median of what its contributors report.", now["loss"]),
        ("validation_loss", "The newest known, nats a token.", now["val_loss"]),
        ("peers", "That announce to hold a stage.", now["peers"]),
        ("peers_paused", "Those of them that hold training.", now["peers_paused"]),
        ("contributors", "Peers with at least one counted contribution.", document["contributors"]["count"]),
        ("troubles", "That are known of now.", len(now["troubles"])),
        ("round_seconds", "How long a round takes, the median of the newest.", now["round_s"]),
        ("eta_seconds", "Until the last round, at the pace of the newest.", now["eta_s"]),
        ("contribution_bytes", "Sent of contributions, by all.", now["sent_bytes"]),
        (
            "contributions_counted_share",
            "Share that the newest rounds hold of what their rosters could make.",
            now["counted_share"],
        ),
        ("allreduce_bytes", "That AllReduce of float32 gradients would have sent.", now["allreduce_bytes"]),
        ("is_training", "1 while rounds are being certified.", float(now["standing"] == "training")),
        ("is_complete", "1 once the last round is certified.", float(now["standing"] == "complete")),
    ]
    return [(name, text, float(value)) for name, text, value in known if value is not None]
