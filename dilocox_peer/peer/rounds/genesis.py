"""Where the chains of a run begin."""

from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds
from dilocox_peer.peer.planning.planner import FixedPlanner
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.directing import Authority
from dilocox_peer.peer.rounds.seats import seat_terms
from dilocox_peer.signing import verify


def genesis_of(manifest: Manifest, stage: int) -> Place:
    """Where the chain of a stage of this run begins: its first roster is the run's owner's to sign."""
    second_plan = FixedPlanner(plan_bounds(manifest)).next(first_plan(manifest))
    authority = authority_of(manifest)
    return Place.genesis(
        stage,
        manifest.genesis(stage),
        second_plan,
        manifest.owner_peer,
        seat_terms(manifest),
        authority,
        manifest.rounds.num_slices,
    )


def authority_of(manifest: Manifest) -> Authority | None:
    """Whose directives apply to the run; None: nobody has signed its manifest."""
    owner = manifest.owner_peer
    return None if owner is None else Authority(owner, manifest.digest, verify)
