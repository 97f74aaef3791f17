"""What a bootstrap tells where it cannot evaluate the run that it keeps."""

from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_peer.cli.evaluation import Evaluation
from dilocox_peer.config import preset
from dilocox_peer.events import Event
from dilocox_peer.signing import SigningKey


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"source": "shards", "catalogue": "0" * 64}, "shards"),
        ({"source": "files"}, "its volunteers' own files"),
    ],
)
async def test_data_that_are_elsewhere_are_evaluated_where_they_are(tmp_path, data: dict[str, Any], what: str):
    said: list[Event] = []
    manifest = preset("tiny", data=data).signed_by(SigningKey(bytes(32)))
    state = SimpleNamespace(state_round=3, num_parameters=1)
    keeper: Any = SimpleNamespace(manifest=manifest, evaluations=[], stages=[state], is_complete=False, round=3)
    await Evaluation(keeper, tmp_path, (), said.append).run()
    assert [event.line() for event in said] == [
        f"run 'my-run' is kept and not evaluated: its data are {what}, which a bootstrap does not hold; evaluate elsewhere: "
        "`dilocox-peer evaluate LINK --data FOLDER`"
    ]
